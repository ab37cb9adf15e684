"""The time limit of a command: a duration, or a word for a fraction or a multiple of the usual time."""

from __future__ import annotations

from vitrail.errors import ConfigError
from vitrail.settings import seconds_in

__all__ = ["seconds_of", "usual_seconds"]

FACTORS = {"quick": 0.4, "best": 4.0}

SECONDS_PER_ROOT = 34.0
"""Usual seconds of fine-tuning, divided by the cube root of the number of training images: four minutes for 300 images,
ten for 5,000 and twenty for 50,000."""


def usual_seconds(images: int) -> float:
    """Return the usual time of fine-tuning on this many training images, in seconds."""
    return SECONDS_PER_ROOT * images ** (1 / 3)


def seconds_of(budget: str | None, usual: float) -> float:
    """Return a time in seconds: `usual` for None, a fraction or multiple of it for "quick" and "best", or a duration.

    A duration is a number with a unit: "90s", "3m" or "1.5h". Raise `ConfigError` for another text.
    """
    if budget is None:
        return usual
    if budget in FACTORS:
        return FACTORS[budget] * usual
    seconds = seconds_in(budget)
    if seconds is None:
        raise ConfigError(
            f"budget={budget!r} is not a time; give a number above 0 with a unit, such as 90s, 3m or 1h, or one of "
            f"{', '.join(FACTORS)}"
        )
    return seconds
