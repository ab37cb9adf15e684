"""Checks of the user's own data and network before a run starts."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source, Target, TargetKind, target_kind
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, UndecodableImage
from vitrail.models.variants import AnyNetwork
from vitrail.tasks.own_model import has_known_architecture
from vitrail.training.config import TrainConfig
from vitrail.weights.bundle import check_loadable

__all__ = ["check_network", "check_settings", "check_source", "named_splits"]

EXAMPLES = 8
"""Number of samples that are read to check a source."""


def named_splits(data: Any) -> Splits:
    """Return the user's data as splits, with a title for messages.

    Raises `ConfigError` with the broken rule if an object breaks the contract of `Source`.
    """
    splits = data if isinstance(data, Splits) else Splits(data, None, None)
    for source in (splits.train, splits.validation, splits.test):
        if source is not None:
            check_source(source)
    if splits.title == Splits.title:
        return Splits(splits.train, splits.validation, splits.test, splits.notes, type(splits.train).__name__)
    return splits


def check_source(source: Any) -> None:
    """Raise `ConfigError` with the broken rule if an object breaks the contract of `Source`.

    Up to 8 samples, spread evenly over the source, are read. `vitrail.testing.check_source` checks the whole contract.
    """
    if not isinstance(source, Source):
        lacking = [name for name in ("classes", "__len__", "__getitem__", "key", "target") if not hasattr(source, name)]
        raise _broken(source, f"a source must have {' and '.join(lacking)}")
    classes, count = source.classes, len(source)
    if not isinstance(classes, tuple) or not all(isinstance(name, str) for name in classes):
        raise _broken(source, f"classes must be a tuple of names, not {classes!r:.60}")
    if not count:
        raise _broken(source, "a source must have at least one sample")
    kind = target_kind(source)
    for index in np.unique(np.linspace(0, count - 1, min(count, EXAMPLES)).astype(np.int64)).tolist():
        key, target = source.key(index), source.target(index)
        if not isinstance(key, str):
            raise _broken(source, f"key({index}) must be a name, not {key!r:.60}")
        if not _fits(target, kind, len(classes)):
            raise _broken(source, f"target({index}) is {target!r:.60}, but {_rule(kind, len(classes))}")
        try:
            sample = source[index]
        except UndecodableImage:
            continue
        if sample.key != key or repr(sample.target) != repr(target):
            raise _broken(
                source, f"source[{index}] must have the key and the target that key({index}) and target({index}) return"
            )
        image = sample.image
        is_array = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3
        if not isinstance(image, bytes) and not (is_array and image.shape[2] in (1, 3)):
            raise _broken(source, f"the image of {key!r} must be bytes or a uint8 array of (height, width, 1 or 3)")


def check_settings(config: TrainConfig) -> None:
    """Raise `ConfigError` for settings that work only with a network of this package."""
    start = config.start
    for name, value, used in (
        ("init", start.init, start.init is not None),
        ("optimizer", config.optimizer.kind, config.optimizer.kind == "muon"),
        ("layer_decay", config.optimizer.layer_decay, config.optimizer.layer_decay < 1),
        ("precision", config.run.precision, config.run.precision == "float8"),
        ("compile", config.run.compile, config.run.compile in ("on", "graphs")),
        ("shard", config.run.shard, config.run.shard != "none"),
        ("checkpoint_activations", True, config.run.checkpoint_activations),
        ("probe", config.run.probe, bool(config.run.probe)),
    ):
        if used:
            raise ConfigError(
                f"{name}={value!r} cannot be combined with network=...; {name} works only for networks that are "
                "built from a config"
            )


def check_network(network: nn.Module, images: Preprocess, outputs: int) -> None:
    """Raise `ConfigError` with the broken rule if the run's task cannot train this network. With 0 `outputs`, the task
    does not use the outputs of the network, and `BundleError` if a network of this package was changed so that it
    cannot be saved.

    The network is called once, in evaluation mode, with two images of zeros.
    """
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise _broken(network, "a network must have a parameter that requires gradients")
    device = next(network.parameters()).device
    shape = (2, images.channels, *images.image_size)
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            made = network(torch.zeros(shape, device=device))
    except Exception as error:
        rule = f"a network must take images of (b, channels, height, width), here {shape}, but it raised"
        raise _broken(network, f"{rule} {type(error).__name__}: {error}") from error
    finally:
        network.train(was_training)
    if (
        not isinstance(made, Tensor)
        or made.shape[:1] != (2,)
        or made.ndim != 2
        or outputs not in (0, made.shape[1])
        or not made.is_floating_point()
    ):
        found = f"a tensor of {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        raise _broken(
            network, f"a network must return floats of (b, {outputs}), one for each output, but it returned {found}"
        )
    config: Any = getattr(network, "config", None)
    if has_known_architecture(network) and config.image_size != images.image_size:
        raise ConfigError(
            f"image_size={images.image_size} differs from the network's image_size, {config.image_size}; make the "
            "two equal"
        )
    if has_known_architecture(network):
        check_loadable(cast(AnyNetwork, network))


def _broken(thing: Any, rule: str) -> ConfigError:
    name = "network" if isinstance(thing, nn.Module) else "data"
    return ConfigError(f"{name}: {type(thing).__name__} breaks a rule of its contract: {rule}")


def _fits(target: Target, kind: TargetKind, count: int) -> bool:
    if target is None or kind == "none":
        return target is None
    if kind == "class":
        return _is_class(target, count)
    if not isinstance(target, tuple):
        return False
    if kind == "numbers":
        return len(target) == count and all(isinstance(number, float) for number in target)
    return all(_is_class(one, count) for one in target)


def _is_class(value: Any, count: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count


def _rule(kind: TargetKind, count: int) -> str:
    if kind == "numbers":
        return f"the targets of this source must be None or tuples of {count} floats, one for each name in classes"
    if kind == "classes":
        return f"the targets of this source must be None or tuples of indices from 0 to {count - 1}"
    return f"the targets of this source must be None or an index from 0 to {count - 1}"
