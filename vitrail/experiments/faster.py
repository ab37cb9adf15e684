"""The search for a faster model that keeps its accuracy: lower precision, fewer blocks or tokens, smaller images."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from vitrail.bench.workload import timed, waits_for
from vitrail.data.source import Source
from vitrail.errors import ConfigError
from vitrail.evaluation.classifiers.linear import fit_linear
from vitrail.evaluation.frozen import labelled_features
from vitrail.evaluation.outputs import Outputs
from vitrail.machine import has_bf16_matrix_units
from vitrail.models.network import with_weights
from vitrail.models.predictor import Predictor
from vitrail.models.reduction import ReductionMethod, TokenReduction
from vitrail.tasks.classification import Accuracy
from vitrail.training.linear_start import set_head
from vitrail.weights.adapt import adapted, with_reduction
from vitrail.weights.bundle import Bundle

SPEEDS = {"float32": 1.0, "bf16": 2.0}
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
    if bundle.precision == "float32" and has_bf16_matrix_units(bundle.device):
        yield _move("precision", config, "bf16", lambda: replace(bundle, precision="bf16", metrics={}))
    smaller = config.nearest_size(*(int(side * SIZE_FACTOR) for side in config.image_size))
    if smaller != config.image_size and min(config.grid_of(*smaller)) >= MIN_GRID:
        with suppress(ConfigError):  # the windows of some attention need a larger grid
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
        with suppress(ConfigError):  # these positions, this attention or this pooling need all tokens
            reduced = replace(config, reduction=reduction)
            if reduced.inference_flops() < config.inference_flops():
                yield _move(axis, reduced, bundle.precision, functools.partial(with_reduction, bundle, reduction))


def _move(axis: str, config: Any, precision: str, build: Callable[[], Bundle]) -> Move:
    return Move(axis, config.inference_flops() / SPEEDS[precision], build)


def truncated(bundle: Bundle, depth: int) -> Bundle:
    """Return a ViT with its first `depth` blocks only. The final norm and the head keep their weights."""
    network = bundle.network
    config: Any = network.config
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
    set_head(made, fit_linear(known.features, known.truth, device=made.device).model)
    return made


# The search for a faster model that keeps a fraction of the accuracy, by measured accuracy and time. From the current
# model, the step with the lowest cost is tried first. A step is taken if the model keeps the accuracy and is
# measurably faster. Otherwise, this axis is not tried again. The search ends when no axis is left or when the time is
# over.


ROUNDS = 7
"""Number of timed batches of each model. The batches of two models alternate."""

FASTER = 0.98
"""A step has to reduce the time to this fraction at least. Smaller differences are within the noise."""

Verdict = Literal["start", "taken", "accuracy", "not faster"]


@dataclass(frozen=True)
class Images:
    """Images by which models are compared. None of them is a test image."""

    train: Source
    """Training images for new linear heads."""
    held_out: Source
    """Images on which accuracy is measured."""


@dataclass(frozen=True)
class Search:
    """The result of a search."""

    bundle: Bundle
    """The fastest model that keeps the accuracy."""
    trials: tuple[dict[str, Any], ...]
    """A row for each model that was tried, in order. The first is the model at the start.

    `tried` is the setting that was changed, followed by all settings after the change (`settings_of`). `result` is
    "start", "taken", too low an "accuracy", or "not faster"."""
    floor: float
    """Lowest accuracy that was accepted."""
    is_complete: bool
    """False if the time was over before all axes were tried."""

    @property
    def best(self) -> dict[str, Any]:
        """The trial of `bundle`."""
        return next(trial for trial in reversed(self.trials) if trial["result"] in ("start", "taken"))


def search(
    bundle: Bundle,
    images: Images,
    *,
    keep: float,
    seconds: float,
    batch_size: int,
    on_progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Search:
    """Return the fastest model whose accuracy is at least `keep` times the accuracy of `bundle`.

    No step begins after `seconds`. `on_progress` is called with the name of a trial, and its numbers of measured images
    and of all images.
    """
    ends = time.monotonic() + seconds
    trials: list[dict[str, Any]] = []

    def record(axis: str, model: Bundle, accuracy: float, spent: float, verdict: Verdict) -> None:
        trials.append(
            {
                "tried": axis,
                **settings_of(model),
                "accuracy": accuracy,
                "milliseconds_per_image": 1000 * spent,
                "flops": model.network.config.inference_flops(),
                "result": verdict,
            }
        )

    def accuracy_of(model: Bundle, axis: str) -> float:
        outputs = Outputs(
            model,
            batch_size=None,
            precision=model.precision,
            on_progress=lambda done, total: on_progress(axis, done, total),
        )
        return Accuracy()(outputs, images.train, images.held_out)["accuracy"]

    start, current = bundle, bundle
    accuracy = accuracy_of(bundle, "start")
    (now,) = _seconds([bundle], batch_size)
    record("", bundle, accuracy, now, "start")
    floor, closed, is_complete = keep * accuracy, set[str](), False
    while time.monotonic() < ends:
        left = [move for move in moves(current, start, images.train) if move.axis not in closed]
        if not left:
            is_complete = True
            break
        move = min(left, key=lambda one: (one.axis != "precision", one.cost))
        candidate = move.build()
        reached = accuracy_of(candidate, move.axis)
        before, after = _seconds([current, candidate], batch_size)
        is_faster = after < FASTER * before
        verdict: Verdict = "accuracy" if reached < floor else "taken" if is_faster else "not faster"
        spent = now * after / before
        record(move.axis, candidate, reached, spent, verdict)
        if verdict == "taken":
            current, now = candidate, spent
        else:
            closed.add(move.axis)
    return Search(replace(current, notes=()), tuple(trials), floor, is_complete)


def _seconds(models: Sequence[Bundle], batch_size: int) -> list[float]:
    """Return the median seconds per image of each model, whose batches alternate."""
    timers = []
    for model in models:
        config = model.network.config
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(batch_size, config.channels, *config.image_size, generator=generator)
        predict = functools.partial(Predictor(model.network, model.precision).logits, images.to(model.device))
        timers.append(timed(predict, waits_for(model.device)))
    turns = [[timer() / batch_size for timer in timers] for _ in range(ROUNDS + 1)]
    return [statistics.median(times) for times in zip(*turns[1:], strict=True)]  # the first batch warms up
