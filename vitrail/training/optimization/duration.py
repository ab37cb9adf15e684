"""Lengths of parts of a run, such as the warm-up: a fraction of the run, or steps, epochs or images."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Duration", "RunLength", "duration_problems", "steps_of"]

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
