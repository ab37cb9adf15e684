"""A model made ready for another task: other classes, another image size, no hidden layer before its head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from vitrail.errors import BundleError, ConfigError
from vitrail.models.positions import resize_grid
from vitrail.models.resnet import ResNetConfig
from vitrail.models.variants import AnyNetwork, build
from vitrail.models.vit import ViTConfig
from vitrail.weights.bundle import Bundle

__all__ = ["adapted", "resize_network"]


def adapted(
    bundle: Bundle,
    *,
    image_size: tuple[int, int] | None = None,
    num_classes: int | None = None,
    classes: Sequence[str] | None = None,
    drop_head_hidden: bool = False,
) -> Bundle:
    """The bundle with what is asked for changed, and each change added to its notes; the same one if nothing is.

    Tensors that stay as they are are shared with the given bundle, which is not changed. Raises `BundleError` for class
    names that are not as many as `num_classes`, and for an image size that patches do not divide.
    """
    if classes is not None:
        if num_classes is not None and num_classes != len(classes):
            raise BundleError(f"num_classes={num_classes} and {len(classes)} class names do not agree")
        num_classes = len(classes)
    notes = list(bundle.notes)
    network, preprocess = bundle.network, bundle.preprocess
    if image_size is not None and image_size != network.config.image_size:
        old = network.config.image_size
        network = resize_network(network, image_size)
        preprocess = replace(preprocess, image_size=image_size)
        resized = isinstance(network.config, ViTConfig) and network.config.positions in RESIZED
        notes.append(f"image size {old} became {image_size}" + ("; positions were resized" if resized else ""))
    config = network.config
    hidden = isinstance(config, ViTConfig) and config.head_hidden and drop_head_hidden
    names = bundle.classes
    if hidden or (num_classes is not None and num_classes != config.num_classes):
        new = config.num_classes if num_classes is None else num_classes
        if hidden:
            notes.append("the hidden layer before the head was dropped, and the head with it")
        replaced = f"the one of {config.num_classes}" if config.num_classes else "none"
        notes.append(f"a new head of {new} classes, all zero, replaces {replaced}" if new else "the head was left out")
        network = _with_new_head(network, new, drop_hidden=bool(hidden))
        names = tuple(map(str, range(new)))
    if classes is not None:
        names = tuple(classes)
    if (network, names) == (bundle.network, bundle.classes):
        return bundle
    metrics = bundle.metrics if network is bundle.network else {}  # they were measured of another network
    return replace(bundle, network=network, classes=names, preprocess=preprocess, metrics=metrics, notes=tuple(notes))


def resize_network(network: AnyNetwork, image_size: tuple[int, int]) -> AnyNetwork:
    """The same weights in a network made for another image size: learned positions are stretched to its grid.

    Raises `BundleError` where patches do not divide the size.
    """
    try:
        config = replace(network.config, image_size=image_size)
    except ConfigError as error:
        raise BundleError(str(error)) from None
    state, old_config = dict(network.state_dict()), network.config
    if isinstance(config, ViTConfig) and isinstance(old_config, ViTConfig) and config.grid != old_config.grid:
        how = config.position_resize
        (height, width), (new_height, new_width) = old_config.grid, config.grid
        if config.positions == "learned":
            whole = state["positions.embedding"]
            covered = whole.shape[1] - height * width
            patches = resize_grid(whole[:, covered:], (height, width), config.grid, how)
            state["positions.embedding"] = torch.cat([whole[:, :covered], patches], dim=1)
        elif config.positions == "learned-2d":
            state["positions.columns"] = resize_grid(state["positions.columns"], (width, 1), (new_width, 1), how)
            state["positions.rows"] = resize_grid(state["positions.rows"], (height, 1), (new_height, 1), how)
        elif config.positions == "relative-bias":
            bias = state["positions.bias"]
            old, new = (2 * height - 1, 2 * width - 1), (2 * new_height - 1, 2 * new_width - 1)
            table = resize_grid(bias.flatten(2).transpose(1, 2), old, new, how)
            state["positions.bias"] = table.transpose(1, 2).reshape(*bias.shape[:2], *new)
    return _rebuilt(network, config, state)


RESIZED = ("learned", "learned-2d", "relative-bias")


def _with_new_head(network: AnyNetwork, num_classes: int, *, drop_hidden: bool) -> AnyNetwork:
    config = replace(network.config, num_classes=num_classes)
    if isinstance(config, ViTConfig) and drop_hidden:
        config = replace(config, head_hidden=0)
    dropped = ("head.", "head_hidden.") if drop_hidden else ("head.",)
    state = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith(dropped)}
    if num_classes:
        into = config.embed_width if isinstance(config, ResNetConfig) else config.head_hidden or config.embed_width
        state["head.weight"] = torch.zeros(num_classes, into)
        state["head.bias"] = torch.full((num_classes,), config.head_bias)
    return _rebuilt(network, config, state)


def _rebuilt(network: AnyNetwork, config: ViTConfig | ResNetConfig, state: dict[str, torch.Tensor]) -> AnyNetwork:
    with torch.device("meta"):
        new = build(config)
    new.load_state_dict(state, assign=True)
    for parameter in new.parameters():
        parameter.requires_grad_(True)
    return new.train(network.training)
