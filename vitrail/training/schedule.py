"""Schedules of the learning rate, as vision_transformer, big_vision and Big Transfer compute them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

ScheduleName = Literal["cosine", "linear", "polynomial", "rsqrt", "staircase", "constant"]


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every step: a warm-up to `peak`, then a course that `kind` names, then a cool-down.

    - "cosine", "linear", "polynomial": from the peak down to `end` at the end of the run.
    - "rsqrt": `peak / sqrt(1 + (steps after warm-up + shift) / timescale)` (2106.04560).
    - "staircase": the peak times one of `factors`. The factor of a boundary applies from the step at the boundary.
    - "constant": the peak.

    During warm-up, the rate is multiplied by a factor that rises linearly to 1. During the cool-down at the end of the
    run, the rate is multiplied by a factor that falls linearly to 0.
    """

    kind: ScheduleName
    peak: float
    steps: int
    warmup_steps: int
    warmup_from_zero: bool = False
    """If True, step n of the warm-up, counted from 0, has n / `warmup_steps` of the rate, as in the original code. The
    first step then leaves the weights unchanged. If False, step n has (n + 1) / `warmup_steps` of the rate."""
    end: float = 0.0
    """Learning rate at the end of a cosine, linear or polynomial schedule."""
    power: float = 2.0
    """Exponent of the polynomial."""
    timescale: int = 10_000
    """Number of steps after warm-up at which an rsqrt schedule without shift has fallen to 1 / sqrt(2) of the peak."""
    shift: int = 0
    """Number that is added to the steps after warm-up in an rsqrt schedule. The highest rate is then below the peak."""
    boundaries: tuple[int, ...] = ()
    """Steps, counted from 0, at which a staircase schedule changes."""
    factors: tuple[float, ...] = ()
    """Factors of the peak, one for each boundary."""
    cooldown_steps: int = 0
    wait_steps: int = 0
    """Number of steps before the warm-up, in which the rate is 0. The schedule takes the rest of the run."""

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0. For a step after the end of the run, return the rate at
        the end."""
        if self.wait_steps:
            boundaries = tuple(boundary - self.wait_steps for boundary in self.boundaries)
            later = replace(self, wait_steps=0, steps=self.steps - self.wait_steps, boundaries=boundaries)
            return later(step - self.wait_steps) if step >= self.wait_steps else 0.0
        rate = self._course(step)
        if step < self.warmup_steps:
            rate = rate * (step if self.warmup_from_zero else step + 1) / self.warmup_steps
        if (left := max(self.steps - step, 0)) < self.cooldown_steps:
            rate = rate * left / self.cooldown_steps
        return rate

    def _course(self, step: int) -> float:
        """Return the learning rate of a step without the factors of warm-up and cool-down."""
        after = max(step - self.warmup_steps, 0)
        if self.kind == "constant":
            return self.peak
        if self.kind == "rsqrt":
            return self.peak / math.sqrt(1 + (after + self.shift) / self.timescale)
        if self.kind == "staircase":
            passed = sum(boundary <= step for boundary in self.boundaries)
            return self.peak * (1.0, *self.factors)[passed]
        progress = min(after / max(self.steps - self.warmup_steps, 1), 1.0)
        if self.kind == "cosine":
            left = 0.5 * (1 + math.cos(math.pi * progress))
        else:
            left = (1 - progress) ** (self.power if self.kind == "polynomial" else 1)
        return self.end + (self.peak - self.end) * left


# Lengths of parts of a run, such as the warm-up: a fraction of the run, or steps, epochs or images.


Duration = float | str
"""A fraction of the run, such as 0.1, or a text such as "500 steps", "5 epochs", "64000 images" or "2.5%"."""

PATTERN = re.compile(r"(\d+(?:\.\d+)?) ?(steps?|epochs?|images?|%)")


class RunLength(NamedTuple):
    """The length of a run, which `steps_of` needs to convert durations into steps."""

    steps: int
    """Number of optimizer steps."""
    batch_size: float
    """Mean number of images per step."""
    images: int
    """Number of training images, which is the length of an epoch."""


def steps_of(duration: Duration, run: RunLength) -> int:
    """Return a valid duration in steps, rounded half to even.

    A number is a fraction of the run. A text is a length with a unit, and gives at least one step unless its number is
    0, as in big_vision.
    """
    if isinstance(duration, int | float):
        return round(duration * run.steps)
    match = PATTERN.fullmatch(duration)
    assert match is not None, "checked by duration_problems"
    number = float(match[1])
    numerator, denominator = {
        "step": (1, 1),
        "epoch": (run.images, run.batch_size),
        "image": (1, run.batch_size),
        "%": (run.steps, 100),
    }[match[2].removesuffix("s")]
    return max(round(number * numerator / denominator), 1) if number else 0


def is_zero(duration: Duration) -> bool:
    """Return True for a valid duration of no length, such as 0.0 or "0 epochs"."""
    if isinstance(duration, int | float):
        return not duration
    match = PATTERN.fullmatch(duration)
    return match is not None and not float(match[1])


def duration_problems(name: str, duration: Duration) -> Iterator[str]:
    """Yield a message if the setting `name` is neither a fraction in [0, 1) nor a text with a unit."""
    if isinstance(duration, str):
        if PATTERN.fullmatch(duration) is None:
            yield (
                f"{name}={duration!r} is not a length; write for example 0.1 (a fraction of the run), '500 steps', "
                "'5 epochs', '64000 images' or '2.5%'"
            )
    elif not 0 <= duration < 1:
        advice = f"; if steps are meant, write '{duration:g} steps'" if duration >= 1 else ""
        yield f"{name}={duration} is not in [0, 1), the range of a fraction of the run{advice}"
