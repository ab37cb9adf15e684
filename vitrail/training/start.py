"""Starting a run from a model: its weights go into a new network with a head for the run's data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError, ConfigError, RunError, plural
from vitrail.models.linear.lora import Projection
from vitrail.models.network import with_weights
from vitrail.models.variants import ARCHITECTURES, AnyConfig, AnyNetwork, build
from vitrail.plain import from_plain, to_plain
from vitrail.settings import above_zero, at_least, raise_problems
from vitrail.tasks import Task
from vitrail.weights.adapt import adapted
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.load import load

__all__ = ["Origin", "StartConfig", "fitted", "network_from", "open_again", "open_initial"]


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """The model that a run starts from, and the choice of weights to train.

    Raises `ConfigError` if fields have invalid values. The message names all of them.
    """

    init: str | None = None
    """Model to start from: a model folder, a run folder, another library's checkpoint, a hub name, or small, which is
    part of Vitrail. The model's head is kept if the classes have the same names in the same order. Otherwise, or if the
    class names are only numbers, it is replaced by a new head of zeros."""
    train_blocks: int | None = None
    """With --init: number of last blocks to train with the final norm, pooling and head. By default all blocks. 0
    trains only the head. The blocks of a ResNet are its residual units."""
    lora_rank: int | None = None
    """With --init: rank of the LoRA updates (2106.09685). If given, only these updates and the head are trained."""
    lora_alpha: float | None = None
    """LoRA scaling: the update is multiplied by alpha / rank. By default alpha equals rank."""
    lora_on: tuple[Projection, ...] = ("query", "value")
    """Weights of each block that get LoRA updates: query, key, value, out, up, down."""
    new_head: bool = False
    """With --init: replace the model's head even if the model and the data have the same class names. The new head is
    zero, or a linear model of features with --linear-head."""
    linear_head: bool = False
    """With --init: fit a linear classifier to the model's features of the training images, and start from it as the
    head (2202.10054). With --keep best, the initial weights are evaluated as well, and are kept unless training
    improves them."""

    def __post_init__(self) -> None:
        problems = [*at_least(self, train_blocks=0, lora_rank=1), *above_zero(self, "lora_alpha")]
        for name in ("train_blocks", "lora_rank") if self.init is None else ():
            if (value := getattr(self, name)) is not None:
                problems.append(
                    f"{name}={value} leaves weights untrained, so it needs a model to start from; give init=..."
                )
        for name in ("new_head", "linear_head") if self.init is None else ():
            if getattr(self, name):
                problems.append(
                    f"{name}=True is a new head for a model, so it needs a model to start from; give init=..."
                )
        if self.lora_rank is None and self.lora_alpha is not None:
            problems.append(f"lora_alpha={self.lora_alpha} needs lora_rank; give both")
        if self.lora_rank is None and self.lora_on != StartConfig.lora_on:
            problems.append(f"lora_on={self.lora_on} needs lora_rank; give both")
        if self.lora_rank is not None and self.train_blocks is not None:
            problems.append(
                f"train_blocks={self.train_blocks} and lora_rank={self.lora_rank} exclude each other; give one of them"
            )
        raise_problems(problems)


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
