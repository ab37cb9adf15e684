"""The linear start of a run: its head is first a linear model of the features of the model that it starts from.

Kumar et al. (2202.10054) fit the head to frozen features before they train all weights. A head of zeros sends nearly
random gradients into the blocks, which then lose what they had learned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from vitrail.data.source import Samples, Source, truth_of
from vitrail.data.splits import Splits
from vitrail.errors import DataError, plural
from vitrail.evaluation.classifiers.linear import LinearMap, fit_linear
from vitrail.evaluation.features.cache import default_cache
from vitrail.evaluation.frozen import labelled_features
from vitrail.evaluation.metrics.numbers import SELECTING
from vitrail.evaluation.outputs import Outputs
from vitrail.machine import Precision, pick_device
from vitrail.models.variants import AnyNetwork
from vitrail.processes.group import Processes
from vitrail.training.config import TrainConfig
from vitrail.training.start import network_from
from vitrail.weights.bundle import Bundle


def head_outputs(
    network: AnyNetwork,
    names: tuple[str, ...],
    config: TrainConfig,
    on_progress: Callable[[int, int], None] | None = None,
    processes: Processes = Processes(),
) -> Outputs:
    """Return the outputs of a network with a head for a run's data, whose features are kept in the cache.

    Several `processes` share the computation of the features. `on_progress` receives the number of images whose
    features are computed, and the number of all images.
    """
    bundle = Bundle(network.eval(), names, config.images, output=config.task.output)
    precision: Precision = "float32" if config.run.precision == "float32" else "bf16"
    return Outputs(
        bundle,
        batch_size=None,
        readers=config.run.readers,
        precision=precision,
        cache=default_cache(),
        on_progress=on_progress,
        processes=processes,
    )


def linear_score(
    config: TrainConfig,
    initial: Bundle,
    splits: Splits,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[str, float] | None:
    """Return the name and the value of a metric on the validation split, for the linear model of the features of
    `initial` with which a run of this config would start. Return None without a labelled validation image.

    The metric is the accuracy, the mean average precision or R². The config's precision must not be "auto".
    `on_progress` is that of `head_outputs`. Raise the errors of `extract` and `fit_linear`.
    """
    if splits.validation is None or not truth_of(splits.validation).known.any():
        return None
    names = config.task.output_names(splits)
    network, _, _ = network_from(initial, config.start, config.images, config.model.overrides, config.task, names)
    outputs = head_outputs(network.to(pick_device(config.run.device)), names, config, on_progress)
    sources = _own_images(splits.train), splits.validation
    train, known = (labelled_features(outputs, one, "head-inputs") for one in sources)
    fit = fit_linear(train.features, train.truth, device=outputs.bundle.device)
    name = SELECTING[known.truth.kind]
    return name, fit.model.measure(known.features, known.truth)[name]


def start_head(outputs: Outputs, splits: Splits, *, kept: bool) -> str:
    """Replace the head of the network of `outputs` by a linear model of the head's inputs. Return a note for the user.

    The linear model is fitted to the labelled training images, and its penalty is chosen on held-out training images
    (`fit_linear`). The first of several processes fits it. Further data that is mixed in is left out. If the network
    has `kept` a trained head, this head stays unless the linear model is better on the validation split. Raise
    `DataError` if no training image has a label and can be decoded.
    """
    known = labelled_features(outputs, _own_images(splits.train), "head-inputs")
    if not len(known.truth):
        raise DataError("no training image has a label, so no linear model of the features can be fitted")
    device = outputs.bundle.device
    fit = outputs.processes.on_first(lambda: fit_linear(known.features, known.truth, device=device), is_long=True)
    if kept and not _is_better(fit.model, outputs, splits):
        return "the kept head is as good on the validation split as a new linear model of the features, so it stays"
    set_head(outputs.bundle, fit.model)
    images = plural(len(known.truth), "training image")
    return f"the head starts as a linear model of the features of {images} (penalty {fit.penalty:.1g})"


@torch.no_grad()
def set_head(bundle: Bundle, model: LinearMap) -> None:
    """Give the head of a network the weights of a linear model of the head's inputs."""
    head = _head_of(bundle)
    head.weight.copy_(torch.from_numpy(model.weight.T))
    head.bias.copy_(torch.from_numpy(model.bias))


def _head_of(bundle: Bundle) -> nn.Linear:
    head = bundle.network.get_submodule("head")
    assert isinstance(head, nn.Linear), "networks of this package have a dense layer as their head"
    return head


def _own_images(train: Source) -> Source:
    """Return the images of the data itself, without further data that is mixed in. The classes are those of all."""
    return train.first_part() if isinstance(train, Samples) else train


def _is_better(model: LinearMap, outputs: Outputs, splits: Splits) -> bool:
    """Return True if a linear model is better on the validation split than the trained head of the network, by the
    metric or, if both have the same value, by the loss."""
    if splits.validation is None:
        return False
    known = labelled_features(outputs, splits.validation, "head-inputs")
    if not len(known.truth):
        return False
    head = _head_of(outputs.bundle)
    weight, bias = (tensor.detach().cpu().double().numpy() for tensor in (head.weight.t(), head.bias))
    new, old = (each.merit(known.features, known.truth) for each in (model, LinearMap(weight, bias)))
    return new > old
