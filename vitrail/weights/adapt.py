"""A model made ready for another task: other classes, another image size, no hidden layer before its head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitrail.errors import BundleError, ConfigError
from vitrail.models.variants import AnyNetwork
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
        resized = network.config.weights_depend_on_size
        notes.append(f"image size {old} became {image_size}" + ("; positions were resized" if resized else ""))
    config = network.config
    hidden = bool(config.head_hidden and drop_head_hidden)
    names = bundle.classes
    if hidden or (num_classes is not None and num_classes != config.num_classes):
        new = config.num_classes if num_classes is None else num_classes
        if hidden:
            notes.append("the hidden layer before the head was dropped, and the head with it")
        replaced = f"the one of {config.num_classes}" if config.num_classes else "none"
        notes.append(f"a new head of {new} classes, all zero, replaces {replaced}" if new else "the head was left out")
        network = network.with_head(new, drop_hidden=hidden)
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
        return network.with_image_size(image_size)
    except ConfigError as error:
        raise BundleError(str(error)) from None
