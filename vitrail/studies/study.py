"""The contract of studies: a question with its points, and the claims that the results confirm or not.

A study is a row of `vitrail.studies.questions.STUDIES`. It only defines which runs answer its question. The engine
(`engine.py`) runs them, and `claims.py` computes the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.studies.claims import Claim
from vitrail.training.config import TrainConfig

__all__ = ["Point", "Scale", "Settings", "Stage", "Study"]

Scale = Literal["quick", "default"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The choices of one execution of a study."""

    scale: Scale = "default"
    data: str = "bundled"
    """Data set of classification, without an amount in brackets."""
    images: int = 9000
    """Number of training images of the data, without the cut on which learning rates are chosen."""
    classes: int = 10
    channels: Literal[1, 3] = 1
    """Channels of the networks' images: 1 if the images are grey, else 3."""

    def of(self, quick: Any, default: Any) -> Any:
        """Return the value for the scale."""
        return quick if self.scale == "quick" else default


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A training run of a point. The run of a second stage starts from the model of the first."""

    config: TrainConfig
    rates: tuple[float, ...]
    """Learning rates to try. A single one is used without trials."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A row of the table of a study: an arm at a place of the x axis. It is measured with every seed."""

    arm: str
    stages: tuple[Stage, ...]
    x: float | None = None
    """Place on the x axis, such as the number of training images. None for studies without an axis."""
    label: str = ""
    """Name of the place, such as "10 %"."""
    by: tuple[str, ...] = ("accuracy",)
    """Evaluators of the finished model on the test split."""
    evaluator_settings: Mapping[str, Any] = field(default_factory=dict)
    tuned: str = ""
    """Points of the same name share the learning rates that are chosen for the first of them. By default every point is
    tuned by itself."""

    @property
    def name(self) -> str:
        """The arm with its place."""
        return f"{self.arm} at {self.label}" if self.label else self.arm

    @property
    def tuning(self) -> str:
        """Name under which learning rates are chosen."""
        return self.tuned or self.name


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question of the paper as a grid of runs."""

    name: str
    question: str
    """The question, as a sentence for the page."""
    paper: str
    """Table or figure of the paper, and the finding that it reports."""
    points: Callable[[Settings], Sequence[Point]]
    """Returns the points of the study. The seed and the learning rate are set by the engine."""
    claims: Callable[[Sequence[Point]], Sequence[Claim]]
    """Returns the statements to check, for the points that are measured."""
    metrics: Mapping[str, str] = field(default_factory=lambda: {"accuracy": "accuracy"})
    """Metrics of the table with their names for readers. The first one is drawn."""
    x_name: str = ""
    """Name of the x axis, or "" for studies without an axis."""
    published: Callable[[], Sequence[Point]]
    """Returns the points of the study in the published size. They are planned for their cost and not run. Settings that
    the paper does not state are assumed, and learning rates do not matter."""
