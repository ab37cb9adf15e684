"""Starting a run from a model: its weights go into a new network with a head for the run's data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError, ConfigError, RunError, plural
from vitrail.models.blocks import StochasticDepth
from vitrail.models.heads import HEADS, DenseHead
from vitrail.models.linear.dense import Linear
from vitrail.models.linear.lora import add_adapters, check_adapters
from vitrail.models.network import with_weights
from vitrail.models.variants import ARCHITECTURES, AnyConfig, AnyNetwork, build
from vitrail.models.vit_config import ViTConfig, fields_of_other_heads
from vitrail.settings import from_plain, to_plain
from vitrail.tasks.task import Task
from vitrail.training.config import StartConfig
from vitrail.weights.adapt import adapted, with_new_tokens
from vitrail.weights.answers import OutputKind
from vitrail.weights.bundle import Bundle, is_described, weights_sha256


@dataclass(frozen=True)
class Origin:
    """The model that a run started from, as `run.json` records it. A run that has a checkpoint can resume without the
    model itself."""

    sha256: str
    """A hash of the model's weights, which does not depend on the file format."""
    network: AnyConfig
    """The config of the run's network."""
    zero_shot: Mapping[str, Any] | None = None
    """The texts from which the initial head was made (`vitrail.weights.zero_shot`), or None for another head."""
    made_of: Mapping[str, Any] | None = None
    """The classes, texts and templates from which the head of the initial model was made before the run, whether the
    run kept it or not, or None for a model as it was loaded."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """The provenance of the initial model, which says what it learned from."""

    def to_plain(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "sha256": self.sha256,
            "architecture": self.network.architecture,
            "network": to_plain(self.network),
            **({} if self.zero_shot is None else {"zero_shot": self.zero_shot}),
            **({} if self.made_of is None else {"made_of": self.made_of}),
            "provenance": self.provenance,
        }

    @classmethod
    def from_plain(cls, values: Any) -> Origin | None:
        """Return the origin that `to_plain` wrote. Raises `ConfigError`, `KeyError` or `TypeError` for other values."""
        if values is None:
            return None
        network = from_plain(ARCHITECTURES[values["architecture"]][0], values["network"])
        return cls(
            str(values["sha256"]), network, values.get("zero_shot"), values.get("made_of"), values.get("provenance", {})
        )


def open_initial(start: StartConfig) -> Bundle | None:
    """Load the model that a run starts from, and return it on the CPU. Return None if the run starts without a model.
    Raises `BundleError` if the model cannot be loaded.
    """
    if start.init is None:
        return None
    from vitrail.weights.load import load  # other layouts, which a run from scratch does not need

    return load(start.init, device="cpu")


def open_again(start: StartConfig, run: str, origin: Origin) -> Bundle:
    """Load the model again for a run without a checkpoint, and make its head from texts again if it had been. Raises
    `RunError` if it is missing or its weights have changed.
    """
    begins = f"run {run} ended before its first checkpoint, so it starts from model {start.init!r} again"
    try:
        bundle = open_initial(start)
    except BundleError as error:
        raise RunError(f"{begins}, which cannot be loaded: {error}") from None
    assert bundle is not None, "a run without an initial model has no hash of one"
    if (made := origin.made_of) is not None and bundle.words is not None and not bundle.classes:
        from vitrail.weights.zero_shot import zero_shot  # which few runs need

        bundle = replace(zero_shot(bundle, made["texts"], templates=made["templates"]), classes=tuple(made["classes"]))
    if weights_sha256(bundle.network) != origin.sha256:
        raise RunError(f"{begins}, whose weights have changed since the run started")
    return bundle


def fitted(
    model: AnyConfig, init: str | None, images: Preprocess, overrides: Mapping[str, Any], num_classes: int, task: Task
) -> AnyConfig:
    """Return the config of a model's network, changed to the run's images and to a new head of the task for
    `num_classes` classes.

    A grey model can take images of three channels. Raises `ConfigError` for any other number of channels, and for
    overrides that the model's architecture does not have.
    """
    if images.channels != model.channels and (model.channels, images.channels) != (1, 3):
        raise ConfigError(
            f"channels={images.channels} does not fit model {init!r}, which takes {model.channels}; choose "
            f"channels={model.channels}, which also converts the images"
        )
    model = _with_own_tokens(model, overrides)
    known = {item.name for item in fields(model)}
    kind = head_fields(model, overrides, task)
    overrides = {name: value for name, value in overrides.items() if name not in kind}
    for name, value in overrides.items():
        if name not in known:
            raise ConfigError(f"{name}={value} is a setting of transformers, but model {init!r} is a ResNet")
    hidden = {"head_hidden": 0} if "head_hidden" in known else {}
    if overrides and replace(model, **overrides).parameters() != model.parameters():
        raise ConfigError(
            f"{', '.join(f'{name}={value!r}' for name, value in overrides.items())} needs other weights than model "
            f"{init!r} has; leave it out"
        )
    shape = {"image_size": images.image_size, "channels": images.channels, "num_classes": num_classes}
    return replace(model, **{**shape, **overrides, **hidden, **kind})


def _with_own_tokens(model: AnyConfig, overrides: Mapping[str, Any]) -> AnyConfig:
    """Return the config of a model so that it keeps its class token, or has none, with the pooling of `overrides`. By
    default, the pooling decides about the class token."""
    if isinstance(model, ViTConfig) and "pool" in overrides:
        return replace(model, class_token=model.has_class_token)
    return model


def head_fields(model: AnyConfig, overrides: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """Return the kind of the head that a run trains, as a field of the config of its network: that of the overrides, or
    that of the model if the task trains it, or else the usual one of the task. A ResNet has no such field.

    A new kind of head can need other values of the fields that belong to it (`DenseHead.fields`), which are returned as
    well. Raise `ConfigError` if the task or the network does not have the kind, or if the head would need fewer weights
    than the network has.
    """
    own = getattr(model, "head_kind", "pooled")
    kind = overrides.get("head_kind", own if own in task.head_kinds else task.head_kinds[0])
    if kind not in task.head_kinds:
        raise ConfigError(
            f"head_kind={kind!r} is not one that the task {task.name} trains: {', '.join(map(repr, task.head_kinds))}"
        )
    if isinstance(model, ViTConfig):
        found: dict[str, Any] = {"head_kind": kind}
        if kind in HEADS and kind != own:
            chosen = {name: value for name, value in overrides.items() if name in HEADS[kind].fields}
            found |= fields_of_other_heads(kind) | HEADS[kind].needed(model) | chosen
            if "positions_at" in chosen and model.positions_place != "stem":
                raise ConfigError(
                    f"positions_at={chosen['positions_at']!r} needs a model whose positions are in the stem"
                )
            if found.get("registers", model.registers) < model.registers:
                raise ConfigError(f"registers={found['registers']} is less than the {model.registers} of the model")
        return found
    if kind != "pooled":
        raise ConfigError(
            f"the task {task.name} needs patch tokens, which a ResNet does not have; choose a Vision Transformer or a "
            "hybrid"
        )
    return {}


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
    if not is_described(bundle.network):
        raise ConfigError(
            f"init={start.init!r}: the network of the initial model was changed, and a new network with its config and "
            "its weights computes something else; pass it as vitrail.train(config, network=...), or undo the changes"
        )
    bundle = adapted(bundle, channels=images.channels)
    config = _with_own_tokens(bundle.network.config, overrides)
    if "cut_uneven" in overrides:  # before the size changes to one that needs it
        config = replace(config, cut_uneven=overrides["cut_uneven"])
    if config != bundle.network.config:
        bundle = replace(bundle, network=with_weights(bundle.network, config, bundle.network.state_dict()))
    resized = adapted(bundle, image_size=images.image_size)
    kind = head_fields(bundle.network.config, overrides, task)
    same = bundle.classes == names and _meaning(bundle.output) == _meaning(task.output)
    same = same and all(getattr(bundle.network.config, name) == value for name, value in kind.items())
    numbered = task.output != "numbers" and names == tuple(map(str, range(len(names))))
    kept = bool(names) and same and not numbered and not start.new_head
    if not names:
        headed = adapted(resized, num_classes=0, drop_head_hidden=True)
        removed = f"the head of model {start.init!r} is removed: the task {task.name} trains a network without a head"
        note = removed * (headed.network.config != resized.network.config)
    elif kept:
        better = " unless a linear model of the features is better on the validation split"
        fate = better if start.linear_head else ", because its outputs are the same"
        headed, note = resized, f"the head of model {start.init!r} is kept{fate}"
    else:
        bare = adapted(resized, num_classes=0, drop_head_hidden=True)
        config = replace(bare.network.config, **kind)
        with_kind = with_weights(bare.network, config, with_new_tokens(bare.network, config))
        headed = adapted(replace(bare, network=with_kind, output=task.output), classes=names)
        note = f"the new head has {plural(len(names), task.output_noun)}"
        if not start.new_head and _keep_parts_of_head(resized.network, headed.network):
            note += "; its weights that do not depend on the classes are those of the model"
        if not start.linear_head and headed.network.config.num_classes and isinstance(headed.network.head, Linear):
            note += "; its weights start at zero"
        if same and numbered:
            note += ", because the classes have numbers instead of names, which may mean other things in the model"
    with torch.device("meta"):
        network = build(replace(headed.network.config, **{**overrides, **kind}))
    network.load_state_dict({name: tensor.clone() for name, tensor in headed.network.state_dict().items()}, assign=True)
    own, notes = resized.preprocess, [*resized.notes, *filter(None, [note])]
    extremes = torch.tensor([0, 255], dtype=torch.uint8).expand(1, images.channels, 1, 2)
    if not torch.allclose(own.normalise(extremes), images.normalise(extremes)):
        notes.append(
            f"images are normalised with mean={images.mean} and std={images.std}, but model {start.init!r} was trained "
            f"with mean={own.mean} and std={own.std}"
        )
    return network, kept, tuple(notes)


def _keep_parts_of_head(model: AnyNetwork, network: AnyNetwork) -> bool:
    """Copy those weights of the head of a model whose shapes do not depend on the number of classes into a new head of
    the same kind. Return False if there are none."""
    old, new = model.head, network.head
    if not isinstance(old, DenseHead) or type(old) is not type(new):
        return False
    wider: Any = network.with_head(network.config.num_classes + 1).head
    state, of_more = new.state_dict(), wider.state_dict()
    kept = {name: weight for name, weight in old.state_dict().items() if of_more[name].shape == state[name].shape}
    new.load_state_dict(state | kept)
    return bool(kept)


def _meaning(output: OutputKind) -> OutputKind:
    """Return the meaning of outputs, of which a head of the same kind can have another: softmax and sigmoid are both
    scores of classes."""
    return "softmax" if output == "sigmoid" else output


# The choice of the weights that are trained: all, the last blocks, the head, or low-rank adapters.


def check_choice(start: StartConfig, config: AnyConfig) -> None:
    """Raise `ConfigError` if `start` chooses blocks or adapters that a network of this config cannot have."""
    if start.lora_rank is not None:
        check_adapters(config, start.lora_rank, start.lora_on)
    count = config.num_blocks
    if start.train_blocks is not None and start.train_blocks > count:
        raise ConfigError(f"train_blocks={start.train_blocks} is more than the {count} blocks of the model")


def choose_weights(network: AnyNetwork, start: StartConfig) -> None:
    """Set `requires_grad` for the weights that `start` chooses, and add its adapters (`check_choice`).

    The blocks below the first trained block compute a fixed function of the image. Dropout and stochastic depth are
    switched off in these blocks, because no weight in them can adapt to the noise. Patch dropout stays, because it
    applies to the whole network. With adapters every block is trained, so nothing is switched off. Tokens that belong
    to the head are trained as well.

    `docs/transfer.md` reports how much time a step takes with few trained blocks.
    """
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
    if getattr(network.config, "has_own_tokens", False):
        tokens: Any = network.prefix
        tokens.registers.requires_grad_(True)


def _without_noise(module: nn.Module) -> None:
    """Switch off all randomness in a module, in training mode as well, because evaluations change the mode."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, StochasticDepth):
            part.rate = 0.0
