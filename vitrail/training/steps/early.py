"""The settings of cheaper steps at the beginning of a run."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from vitrail.settings import raise_problems

__all__ = ["KINDS", "EarlyConfig", "Kind"]


@dataclass(frozen=True, kw_only=True)
class EarlyConfig:
    """Cheaper steps at the beginning of a run. Each setting is a list of VALUE:END.

    A value applies until END, a fraction of the run's steps. After the last END, the run's own setting applies. Raises
    `ConfigError` if fields have invalid values. The message names all of them.
    """

    early_image_size: tuple[str, ...] = ()
    """Smaller training images at the beginning of the run: SIZE:END, such as 16:0.4 24:0.7. END is a fraction of the
    steps. Afterwards the images have --image-size, as they always have in evaluations."""
    early_patch_dropout: tuple[str, ...] = ()
    """Higher patch dropout at the beginning of the run: RATE:END, such as 0.75:0.3 0.5:0.6. END is a fraction of the
    steps. Afterwards --patch-dropout applies."""
    early_batch_size: tuple[str, ...] = ()
    """Smaller batches at the beginning of the run: IMAGES:END, such as 16:0.3. END is a fraction of the steps.
    Afterwards --batch-size applies. The learning rate does not change."""

    def __post_init__(self) -> None:
        raise_problems(problem for name in KINDS for problem in self._problems(name))

    def course(self, name: str) -> list[tuple[Any, float]]:
        """Return the values of a setting with their ends."""
        texts = (text.rpartition(":") for text in getattr(self, name))
        return [(KINDS[name].parse(value), float(end)) for value, _, end in texts]

    def conflicts(self, name: str, last: Any) -> Iterator[str]:
        """Yield a message if a step becomes cheaper on the way to the run's own value `last`."""
        kind, values = KINDS[name], [value for value, _ in self.course(name)]
        costs = [kind.cost(value) for value in (*values, last)]
        if values and not all(before < after for before, after in itertools.pairwise(costs)):
            given, falls = " ".join(getattr(self, name)), "fall" if name == "early_patch_dropout" else "grow"
            yield f"{name}={given!r} does not {falls} to {kind.option}={last}; choose other values, or leave it out"

    def mean_batch_size(self, batch_size: int) -> float:
        """Return the mean number of images per step in a run with this batch size."""
        total, begin = 0.0, 0.0
        for value, end in self.course("early_batch_size"):
            total, begin = total + value * (end - begin), end
        return total + batch_size * (1 - begin)

    def _problems(self, name: str) -> Iterator[str]:
        """Yield a message for each text that is not VALUE:END, and for ends that do not increase."""
        kind, ends = KINDS[name], []
        for text in getattr(self, name):
            value, _, end = text.rpartition(":")
            try:
                kind.parse(value)
                ends.append(float(end))
            except ValueError:
                ends.append(math.nan)
            if not 0 < ends[-1] < 1:
                yield (
                    f"{name}={text!r} is not {kind.form}, with END a fraction of the run between 0 and 1; write for "
                    f"example {kind.example!r}"
                )
        if ends != sorted(set(ends)) and not any(map(math.isnan, ends)):
            yield f"{name}={' '.join(getattr(self, name))!r} has ends that do not increase"


class Kind(NamedTuple):
    """A setting that can change during a run."""

    parse: Callable[[str], Any]
    """Function that reads a value from a text. It raises `ValueError` for any other text."""
    form: str
    example: str
    option: str
    """Name of the run's own setting."""
    cost: Callable[[Any], float]
    """Function of a value that grows with the cost of a step."""


def _size(text: str) -> tuple[int, int]:
    if (found := re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)) is None:
        raise ValueError(text)
    return int(found[1]), int(found[2] or found[1])


def _rate(text: str) -> float:
    if not 0 < (rate := float(text)) < 1:
        raise ValueError(text)
    return rate


def _images(text: str) -> int:
    if (count := int(text)) < 1:
        raise ValueError(text)
    return count


KINDS = {
    "early_image_size": Kind(_size, "SIZE:END", "16:0.5", "image_size", math.prod),
    "early_patch_dropout": Kind(_rate, "RATE:END", "0.5:0.4", "patch_dropout", lambda rate: -rate),
    "early_batch_size": Kind(_images, "IMAGES:END", "16:0.3", "batch_size", float),
}
"""The settings that can change during a run, by the names of their options."""
