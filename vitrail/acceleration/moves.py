"""Steps that make predictions faster: lower precision, fewer blocks, fewer tokens and smaller images."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vitrail.data.source import Source
from vitrail.errors import BundleError, ConfigError
from vitrail.evaluation.classifiers.linear import fit_linear
from vitrail.evaluation.frozen import labelled_features
from vitrail.evaluation.outputs import Outputs
from vitrail.machine import Precision, has_bf16_matrix_units, has_int8_products
from vitrail.models.network import with_weights
from vitrail.models.tokens.reduction import ReductionMethod, TokenReduction
from vitrail.weights.adapt import adapted, with_reduction
from vitrail.weights.bundle import Bundle

__all__ = ["Move", "linear_head", "moves", "settings_of", "truncated"]

SPEEDS = {"float32": 1.0, "bf16": 2.0, "int8": 2.4}
"""Rough speed of matrix products by precision, by which moves are ordered."""

DEPTH_STEPS, TOKEN_STEPS, SIZE_FACTOR = 6, 8, 7 / 8
"""A step removes a sixth of the blocks, an eighth of the patches over all blocks, or an eighth of the image's sides."""

REDUCTIONS: dict[str, ReductionMethod] = {"merging": "merge", "pruning": "prune"}
"""Methods of removing tokens, by the axis that each of them is. Both remove the same number of tokens in a step."""

MIN_GRID = 4
"""Smallest number of rows and of columns of patches."""


@dataclass(frozen=True)
class Move:
    """One step along one axis. `build` returns the model after the step, which can take some time."""

    axis: str
    cost: float
    """FLOPs of a prediction after the step, divided by the rough speed of the precision."""
    build: Callable[[], Bundle]


def settings_of(bundle: Bundle) -> dict[str, Any]:
    """Return the settings that moves change, as JSON values."""
    config = bundle.network.config
    reduction = getattr(config, "reduction", None)
    return {
        "precision": bundle.precision,
        "image_size": list(config.image_size),
        "blocks": config.num_blocks,
        "removed_tokens": 0 if reduction is None else reduction.tokens,
        "removed_by": None if reduction is None else reduction.by,
    }


def moves(bundle: Bundle, original: Bundle, train: Source) -> Iterator[Move]:
    """Yield the next step along every axis that the network allows. Steps are fractions of the `original` model.

    A network with fewer blocks receives a new linear head, which is fitted to the images of `train`. A step of merging
    also merges the tokens that earlier steps pruned, and the other way round.
    """
    config: Any = bundle.network.config
    start: Any = original.network.config
    lower = _lower_precision(bundle)
    if lower is not None:
        yield _move("precision", config, lower, lambda: replace(bundle, precision=lower, metrics={}))
    smaller = config.nearest_size(*(int(side * SIZE_FACTOR) for side in config.image_size))
    if smaller != config.image_size and min(config.grid_of(*smaller)) >= MIN_GRID and _fits(config, smaller):
        yield _move(
            "image size",
            config.with_image_size(smaller),
            bundle.precision,
            lambda: replace(adapted(bundle, image_size=smaller), notes=bundle.notes),
        )
    if config.architecture != "ViT":
        return
    fewer = config.depth - max(1, start.depth // DEPTH_STEPS)
    is_cuttable = config.positions_place == "stem" and not config.attention_kind.depends_on_grid
    if fewer >= 1 and is_cuttable and config.num_classes:
        yield _move(
            "blocks",
            replace(config, depth=fewer),
            bundle.precision,
            lambda: linear_head(truncated(bundle, fewer), bundle.classes, train),
        )
    patches = start.grid[0] * start.grid[1]
    before = 0 if config.reduction is None else config.reduction.tokens
    for axis, by in REDUCTIONS.items():
        reduction = TokenReduction(tokens=before + max(1, patches // (TOKEN_STEPS * start.depth)), by=by)
        try:
            reduced = replace(config, reduction=reduction)
        except ConfigError:  # these positions, this attention or this pooling need all tokens
            continue
        if reduced.inference_flops() < config.inference_flops():
            yield _move(axis, reduced, bundle.precision, functools.partial(with_reduction, bundle, reduction))


def _fits(config: Any, image_size: tuple[int, int]) -> bool:
    """Return True if the network can have this image size. The windows of some attention need a larger grid."""
    try:
        config.with_image_size(image_size)
    except ConfigError:
        return False
    return True


def _lower_precision(bundle: Bundle) -> Precision | None:
    """Return the next faster number format of matrix products that this machine and the network have, or None."""
    if bundle.precision == "float32" and has_bf16_matrix_units(bundle.device):
        return "bf16"
    is_new = bundle.precision in ("float32", "bf16") and bundle.network.config.architecture == "ViT"
    return "int8" if is_new and has_int8_products(bundle.device) else None


def _move(axis: str, config: Any, precision: str, build: Callable[[], Bundle]) -> Move:
    return Move(axis, config.inference_flops() / SPEEDS[precision], build)


def truncated(bundle: Bundle, depth: int) -> Bundle:
    """Return the model with its first `depth` blocks only. The final norm and the head keep their weights.

    Raise `BundleError` for a network other than a ViT, for a number of blocks that it does not have, and for positions
    that are added before every block.
    """
    network = bundle.network
    config: Any = network.config
    if config.architecture != "ViT" or config.positions_place != "stem":
        raise BundleError("only a ViT whose positions are added once can lose its last blocks")
    if config.attention_kind.depends_on_grid:
        raise BundleError(f"attention={config.attention!r} has weights of all blocks, so no block can be removed")
    if not 1 <= depth <= config.depth:
        raise BundleError(f"depth={depth} is not a number of blocks from 1 to {config.depth}")
    blocks = depth * config.attention_kind.blocks_per_layer
    weights = {
        name: tensor
        for name, tensor in network.state_dict().items()
        if not name.startswith("blocks.") or int(name.split(".")[1]) < blocks
    }
    smaller = with_weights(network, replace(config, depth=depth), weights)
    return replace(bundle, network=smaller, metrics={})


def linear_head(bundle: Bundle, classes: tuple[str, ...], train: Source) -> Bundle:
    """Return the model with a new head: a linear model of the embeddings of the labelled images of `train`.

    Raise `DataError` if no image has a label and can be decoded.
    """
    network = bundle.network.with_head(len(classes), drop_hidden=True).to(bundle.device).eval()
    made = replace(bundle, network=network, classes=classes, metrics={})
    known = labelled_features(Outputs(made, batch_size=None, precision=made.precision), train, "head-inputs")
    fit = fit_linear(known.features, known.truth, device=made.device)
    head = network.get_submodule("head")
    assert isinstance(head, nn.Linear), "networks of this package have a dense layer as their head"
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(fit.model.weight.T))
        head.bias.copy_(torch.from_numpy(fit.model.bias))
    return made
