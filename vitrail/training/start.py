"""Starting a run from a model: its weights go into a new network with a head for the run's data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Samples, Source
from vitrail.data.splits import Splits
from vitrail.errors import BundleError, ConfigError, DataError, RunError, plural
from vitrail.evaluation.classifiers.linear import LinearMap, fit_linear
from vitrail.evaluation.features.cache import default_cache
from vitrail.evaluation.frozen import labelled_features
from vitrail.evaluation.metrics.numbers import SELECTING
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.truth import truth_of
from vitrail.machine import Precision, pick_device
from vitrail.models.blocks import StochasticDepth
from vitrail.models.linear.lora import add_adapters, check_adapters
from vitrail.models.network import with_weights
from vitrail.models.variants import ARCHITECTURES, AnyConfig, AnyNetwork, build
from vitrail.processes.group import Processes
from vitrail.settings import from_plain, to_plain
from vitrail.tasks.task import Task
from vitrail.training.config import StartConfig, TrainConfig
from vitrail.weights.adapt import adapted
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.load import load


@dataclass(frozen=True)
class Origin:
    """The model that a run started from, as `run.json` records it. A run that has a checkpoint can resume without the
    model itself."""

    sha256: str
    """A hash of the model's weights, which does not depend on the file format."""
    network: AnyConfig
    """The config of the run's network."""

    def to_plain(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "sha256": self.sha256,
            "architecture": self.network.architecture,
            "network": to_plain(self.network),
        }

    @classmethod
    def from_plain(cls, values: Any) -> Origin | None:
        """Return the origin that `to_plain` wrote. Raises `ConfigError`, `KeyError` or `TypeError` for other values."""
        if values is None:
            return None
        return cls(str(values["sha256"]), from_plain(ARCHITECTURES[values["architecture"]][0], values["network"]))


def open_initial(start: StartConfig) -> Bundle | None:
    """Load the model that a run starts from, and return it on the CPU. Return None if the run starts without a model.
    Raises `BundleError` if the model cannot be loaded.
    """
    return None if start.init is None else load(start.init, device="cpu")


def open_again(start: StartConfig, run: str, sha256: str) -> Bundle:
    """Load the model again for a run without a checkpoint. Raises `RunError` if it is missing or its weights have
    changed.
    """
    begins = f"run {run} ended before its first checkpoint, so it starts from model {start.init!r} again"
    try:
        bundle = open_initial(start)
    except BundleError as error:
        raise RunError(f"{begins}, which cannot be loaded: {error}") from None
    assert bundle is not None, "a run without an initial model has no hash of one"
    if weights_sha256(bundle.network) != sha256:
        raise RunError(f"{begins}, whose weights have changed since the run started")
    return bundle


def fitted(
    model: AnyConfig, init: str | None, images: Preprocess, overrides: Mapping[str, Any], num_classes: int
) -> AnyConfig:
    """Return the config of a model's network, changed to the run's images and to a new head for `num_classes` classes.

    A grey model can take images of three channels. Raises `ConfigError` for any other number of channels, and for
    overrides that the model's architecture does not have.
    """
    if images.channels != model.channels and (model.channels, images.channels) != (1, 3):
        raise ConfigError(
            f"channels={images.channels} does not fit model {init!r}, which takes {model.channels}; choose "
            f"channels={model.channels}, which also converts the images"
        )
    known = {item.name for item in fields(model)}
    for name, value in overrides.items():
        if name not in known:
            raise ConfigError(f"{name}={value} is a setting of transformers, but model {init!r} is a ResNet")
    hidden = {"head_hidden": 0} if "head_hidden" in known else {}
    shape = {"image_size": images.image_size, "channels": images.channels, "num_classes": num_classes}
    return replace(model, **{**shape, **overrides, **hidden})


def network_from(
    bundle: Bundle,
    start: StartConfig,
    images: Preprocess,
    overrides: Mapping[str, Any],
    task: Task,
    names: tuple[str, ...],
) -> tuple[AnyNetwork, bool, tuple[str, ...]]:
    """Return a network for the run, True if it keeps the model's head, and notes for the user.

    The network has a copy of the model's weights. If `start.new_head` is False and the outputs have the same names in
    the same order, the head and the hidden layer before it are kept. Otherwise the network gets a new head of zeros and
    no hidden layer (paper, section 3.2). Classes that have only numbers never match, because class "3" of one data set
    is not class "3" of another.
    """
    bundle = adapted(bundle, channels=images.channels)
    if "cut_uneven" in overrides:  # before the size changes to one that needs it
        settings: dict[str, Any] = {"cut_uneven": overrides["cut_uneven"]}
        config = replace(bundle.network.config, **settings)
        bundle = replace(bundle, network=with_weights(bundle.network, config, bundle.network.state_dict()))
    resized = adapted(bundle, image_size=images.image_size)
    same = bundle.classes == names and (bundle.output == "numbers") == (task.output == "numbers")
    numbered = task.output != "numbers" and names == tuple(map(str, range(len(names))))
    kept = same and not numbered and not start.new_head
    if not names:
        headed = adapted(resized, num_classes=0, drop_head_hidden=True)
        note = f"the head of model {start.init!r} is removed: the task {task.name} trains a network without a head"
        kept = False
    elif kept:
        headed, note = resized, f"the head of model {start.init!r} is kept, because its outputs are the same"
    else:
        headed = adapted(adapted(resized, num_classes=0, drop_head_hidden=True), classes=names)
        note = f"the new head has {plural(len(names), task.output_noun)}"
        if not start.linear_head:
            note += "; its weights start at zero"
        if same and numbered:
            note += ", because the classes have numbers instead of names, which may mean other things in the model"
    with torch.device("meta"):
        network = build(replace(headed.network.config, **overrides))
    network.load_state_dict({name: tensor.clone() for name, tensor in headed.network.state_dict().items()}, assign=True)
    return network, kept, (*resized.notes, note)


# The linear start of a run: its head is first a linear model of the features of the model that it starts from. Kumar
# et al. (2202.10054) fit the head to frozen features before they train all weights. A head of zeros sends nearly
# random gradients into the blocks, which then lose what they had learned.


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
    head = outputs.bundle.network.get_submodule("head")
    assert isinstance(head, nn.Linear), "networks of this package have a dense layer as their head"
    if kept and not _is_better(fit.model, head, outputs, splits):
        return "the kept head is as good on the validation split as a new linear model of the features, so it stays"
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(fit.model.weight.T))
        head.bias.copy_(torch.from_numpy(fit.model.bias))
    images = plural(len(known.truth), "training image")
    return f"the head starts as a linear model of the features of {images} (penalty {fit.penalty:.1g})"


def _own_images(train: Source) -> Source:
    """Return the images of the data itself, without further data that is mixed in. The classes are those of all."""
    return train.first_part() if isinstance(train, Samples) else train


def _is_better(model: LinearMap, head: nn.Linear, outputs: Outputs, splits: Splits) -> bool:
    """Return True if a linear model is better on the validation split than a trained head, by the metric or, if both
    have the same value, by the loss."""
    if splits.validation is None:
        return False
    known = labelled_features(outputs, splits.validation, "head-inputs")
    if not len(known.truth):
        return False
    weight, bias = (tensor.detach().cpu().double().numpy() for tensor in (head.weight.t(), head.bias))
    new, old = (each.merit(known.features, known.truth) for each in (model, LinearMap(weight, bias)))
    return new > old


# The choice of the weights that are trained: all, the last blocks, the head, or low-rank adapters.


def check_choice(start: StartConfig, config: AnyConfig) -> None:
    """Raise `ConfigError` if `start` chooses blocks or adapters that a network of this config cannot have."""
    if start.lora_rank is not None:
        check_adapters(config, start.lora_rank, start.lora_on)
    count = config.num_blocks
    if start.train_blocks is not None and start.train_blocks > count:
        raise ConfigError(f"train_blocks={start.train_blocks} is more than the {count} blocks of the model")


def choose_weights(network: AnyNetwork, start: StartConfig) -> None:
    """Set `requires_grad` for the weights that `start` chooses, and add its adapters. Raises `ConfigError`.

    The blocks below the first trained block compute a fixed function of the image. Dropout and stochastic depth are
    switched off in these blocks, because no weight in them can adapt to the noise. Patch dropout stays, because it
    applies to the whole network. With adapters every block is trained, so nothing is switched off.

    `docs/transfer.md` reports how much time a step takes with few trained blocks.
    """
    check_choice(start, network.config)
    layers = network.layers()
    if start.lora_rank is not None:
        network.requires_grad_(False)
        alpha = float(start.lora_rank) if start.lora_alpha is None else start.lora_alpha
        add_adapters(network, rank=start.lora_rank, alpha=alpha, names=start.lora_on)
        trained = layers.head
    elif start.train_blocks is not None:
        network.requires_grad_(False)
        first = len(layers.blocks) - start.train_blocks
        trained = [*layers.blocks[first:], *(layers.summary if start.train_blocks else ()), *layers.head]
        for module in (*layers.embedding, *layers.blocks[:first]):
            _without_noise(module)
    else:
        return
    for module in trained:
        module.requires_grad_(True)


def _without_noise(module: nn.Module) -> None:
    """Switch off all randomness in a module, in training mode as well, because evaluations change the mode."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, StochasticDepth):
            part.rate = 0.0
