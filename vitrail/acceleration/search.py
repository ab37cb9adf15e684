"""The search for a faster model that keeps a fraction of the accuracy, by measured accuracy and time.

From the current model, the step with the lowest cost is tried first. A step is taken if the model keeps the accuracy
and is measurably faster. Otherwise, this axis is not tried again. The search ends when no axis is left or when the time
is over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from vitrail.acceleration.moves import moves, settings_of
from vitrail.data.source import Source
from vitrail.evaluation.head import Accuracy
from vitrail.evaluation.outputs import Outputs
from vitrail.models.predictor import Predictor
from vitrail.weights.bundle import Bundle

__all__ = ["Images", "Search", "Trial", "search"]

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
class Trial:
    """A model that was tried."""

    axis: str
    """Setting that was changed, or "" for the model at the start."""
    settings: dict[str, Any]
    """All settings after the change (`settings_of`)."""
    accuracy: float
    seconds: float
    """Seconds per image, in batches."""
    flops: int
    """FLOPs per image."""
    verdict: Verdict
    """Result: "taken", too low an "accuracy", or "not faster"."""


@dataclass(frozen=True)
class Search:
    """The result of a search."""

    bundle: Bundle
    """The fastest model that keeps the accuracy."""
    trials: tuple[Trial, ...]
    """All models that were tried, in order. The first is the model at the start."""
    floor: float
    """Lowest accuracy that was accepted."""
    is_complete: bool
    """False if the time was over before all axes were tried."""

    @property
    def best(self) -> Trial:
        """The trial of `bundle`."""
        return next(trial for trial in reversed(self.trials) if trial.verdict in ("start", "taken"))


def search(
    bundle: Bundle,
    images: Images,
    *,
    keep: float,
    seconds: float,
    batch_size: int,
    on_trial: Callable[[Trial], None] = lambda trial: None,
    on_progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Search:
    """Return the fastest model whose accuracy is at least `keep` times the accuracy of `bundle`.

    No step begins after `seconds`. `on_trial` is called with every trial, and `on_progress` with the name of a
    trial, and its numbers of measured images and of all images.
    """
    ends = time.monotonic() + seconds
    trials: list[Trial] = []

    def record(axis: str, model: Bundle, accuracy: float, spent: float, verdict: Verdict) -> None:
        flops = model.network.config.inference_flops()
        trials.append(Trial(axis, settings_of(model), accuracy, spent, flops, verdict))
        on_trial(trials[-1])

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
        if verdict == "taken":
            current, now = candidate, now * after / before
            record(move.axis, candidate, reached, now, verdict)
        else:
            closed.add(move.axis)
            record(move.axis, candidate, reached, now * after / before, verdict)
    return Search(replace(current, notes=()), tuple(trials), floor, is_complete)


def _seconds(models: Sequence[Bundle], batch_size: int) -> list[float]:
    """Return the median seconds per image of each model, whose batches alternate."""
    runs: list[tuple[Predictor, torch.Tensor]] = []
    for model in models:
        config = model.network.config
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(batch_size, config.channels, *config.image_size, generator=generator)
        runs.append((Predictor(model.network, model.precision), images.to(model.device)))
    found: list[list[float]] = [[] for _ in models]
    for turn in range(ROUNDS + 1):
        for times, (predictor, images) in zip(found, runs, strict=True):
            began = time.perf_counter()
            predictor.logits(images).sum().item()  # waits for the device
            if turn:  # the first batch warms up
                times.append((time.perf_counter() - began) / batch_size)
    return [statistics.median(times) for times in found]
