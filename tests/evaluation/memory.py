"""A source in memory, for tests of evaluators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitrail.data.source import Sample
from vitrail.data.targets import Target


class MemorySource:
    """A source of arrays of pixels. Samples whose index is in `broken` are not images."""

    def __init__(
        self,
        images: np.ndarray,
        labels: Sequence[Target],
        broken: tuple[int, ...] = (),
        *,
        classes: tuple[str, ...] = ("a", "b", "c"),
        prefix: str = "picture ",
    ) -> None:
        self.images, self.labels, self.broken = images, list(labels), broken
        self.classes, self.prefix = classes, prefix

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.key(index), b"<html>" if index in self.broken else self.images[index], self.target(index))

    def key(self, index: int) -> str:
        return f"{self.prefix}{index}"

    def target(self, index: int) -> Target:
        return self.labels[index]
