"""Adaptation of a model to other classes, another image size or more tokens, and removal of the hidden layer before its
head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from vitrail.errors import BundleError, ConfigError, listed
from vitrail.machine import check_memory
from vitrail.models.network import separate_copy, with_resized_parts
from vitrail.models.positions import Covered
from vitrail.models.reduction import TokenReduction
from vitrail.models.resnet import ResNet
from vitrail.models.variants import AnyConfig, AnyNetwork
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import typed
from vitrail.weights.bundle import Bundle, FirstPositions

STANDARDISED_STEMS = ("root.before.weight", "root.stem.weight", "stem.weight")
"""Names of the first convolution of a hybrid with a convolutional stem, of another hybrid, and of a ResNet."""


def adapted(
    bundle: Bundle,
    *,
    image_size: tuple[int, int] | None = None,
    num_classes: int | None = None,
    classes: Sequence[str] | None = None,
    channels: int | None = None,
    drop_head_hidden: bool = False,
) -> Bundle:
    """Return a bundle with the requested changes, and with a note on each change. If nothing changes, return the given
    bundle. The given bundle is not modified, and shares all unchanged tensors with the result. Raise `BundleError` if
    the number of class names is not `num_classes`, if two new classes have the same name, if patches do not divide the
    image size, or if `channels` is neither the network's number of channels nor 3 for a grey network (`in_colour`).
    Raise `ConfigError` for a value of another type.
    """
    image_size = typed(tuple[int, int] | None, image_size, "image_size")
    num_classes = typed(int | None, num_classes, "num_classes")
    classes = typed(tuple[str, ...] | None, classes, "classes")
    if classes is not None:
        if num_classes is not None and num_classes != len(classes):
            raise BundleError(
                f"num_classes={num_classes} does not fit the {len(classes)} class names; give only one of the two"
            )
        num_classes = len(classes)
    notes = list(bundle.notes)
    network, preprocess, first = bundle.network, bundle.preprocess, bundle.first_positions
    if channels is not None and channels != network.config.channels:
        network, preprocess = in_colour(network, channels), replace(preprocess, channels=channels)
        notes.append(
            f"the grey model was given {channels} channels: the weights of its first layer were repeated for each; its "
            "outputs for grey images stay the same"
        )
    if image_size is not None and image_size != network.config.image_size:
        notes.append(
            f"the image size was changed from {network.config.image_size} to {image_size}{_resized_weights(network)}"
        )
        network, first = _resized(network, first, image_size)
        preprocess = replace(preprocess, image_size=image_size)
    config = network.config
    hidden = bool(config.head_hidden and drop_head_hidden)
    names = bundle.classes
    if hidden or (num_classes is not None and num_classes != config.num_classes):
        new = config.num_classes if num_classes is None else num_classes
        if hidden:
            notes.append("the hidden layer before the head was removed, together with the head")
        notes.append(f"the new head has {new} outputs; its weights start at zero" if new else "the head was removed")
        network = network.with_head(new, drop_hidden=hidden)
        names = tuple(map(str, range(new)))
    if classes is not None:
        names = tuple(classes)
        if names != bundle.classes and (twice := [name for name, count in Counter(names).items() if count > 1]):
            raise BundleError(f"classes: {listed(twice)} occur more than once; give each class a name of its own")
    if (network, names) == (bundle.network, bundle.classes):
        return bundle
    metrics = bundle.metrics if network is bundle.network else {}  # the metrics were measured with the old network
    return replace(
        bundle, network=network, classes=names, preprocess=preprocess, metrics=metrics, notes=tuple(notes),
        first_positions=first,
    )  # fmt: skip


def resize_network(network: AnyNetwork, image_size: tuple[int, int]) -> AnyNetwork:
    """Return a network for another image size with the same weights. Learned positions are resized to the grid of
    patches of that size.

    Raise `BundleError` if patches do not divide the size, or if the weights need more memory than is free.
    """
    height, width = image_size
    try:
        needed = 4 * replace(network.config, image_size=image_size).parameters()
        device = next(network.parameters()).device
        check_memory(needed, device, f"a model for images of {height} x {width} pixels", "choose smaller images")
        return network.with_image_size(image_size)
    except ConfigError as error:
        raise BundleError(str(error)) from None


def with_reduction(bundle: Bundle, reduction: TokenReduction | None) -> Bundle:
    """Return a bundle whose network merges or prunes tokens when it predicts, or with None keeps all of them. All
    tensors are shared, and hooks, replaced methods and frozen weights are kept.

    Raise `BundleError` for a ResNet, and for a network whose tokens cannot be reduced, and `ConfigError` if `reduction`
    is of another type.
    """
    network, reduction = bundle.network, typed(TokenReduction | None, reduction, "reduction")
    if network.config.architecture != "ViT":
        raise BundleError(
            f"tokens can be merged or pruned in a ViT only; this model is a {network.config.architecture}"
        )
    if network.config.reduction == reduction:
        return bundle
    try:
        config = replace(network.config, reduction=reduction)
    except ConfigError as error:
        raise BundleError(str(error)) from None
    reduced = separate_copy(network)
    reduced.config = config
    return replace(bundle, network=reduced, metrics={})


def _resized(
    network: AnyNetwork, first: FirstPositions | None, image_size: tuple[int, int]
) -> tuple[AnyNetwork, FirstPositions | None]:
    """Return a network for another image size, and its positions before they were resized for the first time. Positions
    that were resized before, and have not been trained since, are resized from the first ones."""
    if first is not None:
        state, unresized = network.state_dict(), resize_network(network, first.image_size)
        unresized.load_state_dict(first.tensors, strict=False, assign=True)
        again = resize_network(unresized, network.config.image_size).state_dict()
        if all(torch.equal(again[name].cpu(), state[name].cpu()) for name in first.tensors):
            return resize_network(unresized, image_size).to(next(network.parameters()).device), first
    resized = resize_network(network, image_size)
    if not network.config.weights_depend_on_size:
        return resized, None
    positions = {
        name: tensor for name, tensor in network.state_dict().items() if name.startswith(("positions.", "context."))
    }
    return resized, FirstPositions(network.config.image_size, positions)


def _resized_weights(network: AnyNetwork) -> str:
    """Return a text about the weights that another image size has resized."""
    config = network.config
    if config.architecture != "ViT":
        return ""
    found = ", and the positions were resized" if config.position_embedding.depends_on_grid else ""
    if config.attention_kind.depends_on_grid:
        found += f", and the projections of attention={config.attention!r} were interpolated"
    return found


def in_colour(network: AnyNetwork, channels: int) -> AnyNetwork:
    """Return a grey network that takes images of three channels. If all channels are equal, the outputs stay the same.

    The weights of the first layer are repeated for each channel. Those of a patch embedding are divided by three, so
    that their sum is unchanged. The filters of a hybrid or a ResNet are standardised in every call, which would undo a
    division; the norm behind them divides their sum by three instead.

    Raise `BundleError` unless the network has one channel and `channels` is 3, and `ConfigError` if its first layer was
    replaced or has hooks.
    """
    config = network.config
    if (config.channels, channels) != (1, 3):
        raise BundleError(
            f"channels={channels} does not fit a network of {config.channels} channels; only a grey network can be "
            "given 3 channels"
        )
    weights, projection = network.state_dict(), "patches.projection.weight"
    name = next((name for name in STANDARDISED_STEMS if name in weights), projection)
    repeated = weights[name].repeat(1, channels, *[1] * (weights[name].ndim - 2))
    module = name.removesuffix(".weight")
    weight = repeated / channels if name == projection else repeated
    made = with_resized_parts(network, replace(config, channels=channels), {module: {"weight": weight}})
    if isinstance(root := getattr(made, "root", None), ResNet):
        root.config = replace(root.config, channels=channels)
    return made


def moved_positions(
    state: Mapping[str, Tensor], config: ViTConfig, covered: Covered
) -> tuple[dict[str, Tensor], ViTConfig]:
    """Return equivalent weights and config in which learned positions cover other tokens (`covered`).

    If a token loses its position, the position is added to the token's learned vector. If a token gains a position, the
    position is zero.
    """
    state, moved = dict(state), replace(config, positions_cover=covered)
    have, want = config.covered, moved.covered
    if config.positions != "learned" or have == want:
        return state, moved
    positions, start = state["positions.embedding"], 0
    kept = positions[:, :have]
    for name in ("prefix.cls", "prefix.registers"):
        if name in state:
            end = start + state[name].shape[1]
            if want <= start and end <= have:
                state[name] = state[name] + kept[:, start:end]
            start = end
    zeros = positions.new_zeros(len(positions), max(0, want - have), config.width)
    state["positions.embedding"] = torch.cat([kept[:, :want], zeros, positions[:, have:]], dim=1)
    return state, moved


def with_new_tokens(network: AnyNetwork, config: AnyConfig) -> dict[str, Tensor]:
    """Return the weights of a network with register tokens and positions that `config` has beside its own. New ones are
    normal numbers of the standard deviation 0.02, as in YOLOS."""
    state, old = dict(network.state_dict()), network.config
    if not isinstance(old, ViTConfig) or not isinstance(config, ViTConfig):
        return state
    state, moved = moved_positions(state, old, config.positions_cover)
    like = next(network.parameters())

    def draw(*shape: int) -> Tensor:
        return nn.init.trunc_normal_(like.new_empty(*shape, old.width), std=0.02)

    if added := config.registers - old.registers:
        own = [state["prefix.registers"]] if old.registers else []
        state["prefix.registers"] = torch.cat([*own, draw(1, added)], dim=1)
        if config.positions == "learned" and config.positions_cover == "all":
            positions = state["positions.embedding"]
            parts = positions[:, : moved.covered], draw(len(positions), added), positions[:, moved.covered :]
            state["positions.embedding"] = torch.cat(parts, dim=1)
    if config.positions == "learned" and config.positions_place == "every-layer" != old.positions_place:
        positions = state["positions.embedding"]
        state["positions.embedding"] = torch.cat([positions, draw(config.num_blocks - 1, positions.shape[1])])
    return state
