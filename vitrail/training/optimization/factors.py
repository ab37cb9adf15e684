"""Factors of the learning rate and the weight decay for weights that are chosen by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from vitrail.errors import ConfigError

__all__ = ["check_patterns", "factor_of", "factor_problems"]


def factor_problems(name: str, factors: Sequence[str], *, zero: bool) -> Iterator[str]:
    """Yield a message for every text of the setting `name` that is not PATTERN=FACTOR.

    The pattern is a regular expression and the factor a number above 0, or at least 0 if `zero` is True.
    """
    for text in factors:
        pattern, found, number = text.rpartition("=")
        try:
            re.compile(pattern)
            value = float(number)
        except (re.error, ValueError):
            value = -1.0
        if not found or not (value >= 0 if zero else value > 0) or value == float("inf"):
            rule = "at least 0" if zero else "above 0"
            yield (
                f"{name}={text!r} is not PATTERN=FACTOR, a regular expression of names of weights and a number {rule}; "
                r"write for example 'head\..*=10'"
            )


def factor_of(weight: str, factors: Sequence[str], otherwise: float) -> float:
    """Return the factor of the first pattern that matches the whole name of a weight. If no pattern matches, return
    `otherwise`."""
    for text in factors:
        pattern, _, number = text.rpartition("=")
        if re.fullmatch(pattern, weight):
            return float(number)
    return otherwise


def check_patterns(setting: str, factors: Sequence[str], weights: Iterable[str]) -> None:
    """Raise `ConfigError` if a pattern of the setting matches none of these names."""
    names = list(weights)
    for text in factors:
        pattern = text.rpartition("=")[0]
        if not any(re.fullmatch(pattern, name) for name in names):
            raise ConfigError(
                f"{setting}={text!r} matches no weight of the network; names are for example {names[0]} and {names[-1]}"
            )
