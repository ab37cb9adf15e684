"""Starting from a model: its weights in a network of the run's own, fitted to the data."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from vitrail.errors import BundleError, ConfigError, RunError
from vitrail.models.variants import ARCHITECTURES, AnyConfig, AnyNetwork, build
from vitrail.plain import from_plain, to_plain
from vitrail.training.config import TrainConfig
from vitrail.weights.adapt import adapted
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.load import load

__all__ = ["Origin", "fitted", "network_from", "open_again", "open_initial"]


@dataclass(frozen=True)
class Origin:
    """What `run.json` keeps of the model that a run started from: enough to go on from a checkpoint without it."""

    sha256: str
    """Of its weights, whatever file they were in."""
    network: AnyConfig
    """Of the run's network."""

    def to_plain(self) -> dict[str, Any]:
        return {
            "sha256": self.sha256,
            "architecture": self.network.architecture,
            "network": to_plain(self.network),
        }

    @classmethod
    def from_plain(cls, values: Any) -> Origin | None:
        """What `to_plain` wrote. Raises `ConfigError`, `KeyError` or `TypeError` for other things."""
        if values is None:
            return None
        return cls(str(values["sha256"]), from_plain(ARCHITECTURES[values["architecture"]][0], values["network"]))


def open_initial(config: TrainConfig) -> Bundle | None:
    """The model that `config` has the run start from, on the CPU. Raises `BundleError`."""
    return None if config.start.init is None else load(config.start.init, device="cpu")


def open_again(config: TrainConfig, run: str, sha256: str) -> Bundle:
    """The model for a run that has no checkpoint to go on from. Raises `RunError` where it is gone or is another."""
    begins = f"run {run} ended before its first checkpoint, so it starts from model {config.start.init!r} again"
    try:
        bundle = open_initial(config)
    except BundleError as error:
        raise RunError(f"{begins}, which cannot be loaded: {error}") from None
    assert bundle is not None, "a run without a model has no hash of one"
    if weights_sha256(bundle.network) != sha256:
        raise RunError(f"{begins}, whose weights are others now than when the run began")
    return bundle


def fitted(model: AnyConfig, config: TrainConfig, num_classes: int) -> AnyConfig:
    """The config of the model's network with a new head for so many classes, for the run's images.

    Raises `ConfigError` for images that it cannot take, and for settings that a network of its kind does not have.
    """
    if config.images.channels != model.channels:
        raise ConfigError(
            f"channels={config.images.channels} is not the {model.channels} that model {config.start.init!r} takes; "
            f"choose {model.channels}: the images are converted"
        )
    known = {item.name for item in fields(model)}
    given = config.model.given
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{name}={value} is of transformers, and model {config.start.init!r} is a ResNet")
    if "head_hidden" in known:
        given = {**given, "head_hidden": 0}
    return replace(model, image_size=config.images.image_size, num_classes=num_classes, **given)


def network_from(bundle: Bundle, config: TrainConfig, classes: tuple[str, ...]) -> tuple[AnyNetwork, tuple[str, ...]]:
    """A network with the model's weights, copied, for the run's images and classes, and what to say of it.

    Classes of the same names in the same order keep the head, and the hidden layer before it; others get a new one, all
    zero, and no hidden layer (paper, section 3.2).
    """
    resized = adapted(bundle, image_size=config.images.image_size)
    if bundle.classes == classes:
        headed, note = resized, f"the head of model {config.start.init!r} is kept: the classes are the same"
    else:
        headed = adapted(adapted(resized, num_classes=0, drop_head_hidden=True), classes=classes)
        before = f"replaces that of {len(bundle.classes)}" if bundle.classes else "is added"
        note = f"a new head of {len(classes)} classes, all zero, {before} of model {config.start.init!r}"
    with torch.device("meta"):
        network = build(replace(headed.network.config, **config.model.given))
    network.load_state_dict({name: tensor.clone() for name, tensor in headed.network.state_dict().items()}, assign=True)
    return network, (*resized.notes, note)
