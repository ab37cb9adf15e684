"""A source in memory, for tests of evaluators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests import make
from vitrail.data.source import Sample
from vitrail.data.targets import Target


class MemorySource(make.MemorySource):
    """A source of arrays of pixels. Samples whose index is in `broken` are not images."""

    images: Any

    def __init__(
        self,
        images: np.ndarray,
        labels: Sequence[Target],
        broken: tuple[int, ...] = (),
        *,
        classes: tuple[str, ...] = ("a", "b", "c"),
        prefix: str = "picture ",
    ) -> None:
        super().__init__(
            images, labels=labels, keys=[f"{prefix}{index}" for index in range(len(labels))], classes=classes
        )
        self.broken = broken

    def __getitem__(self, index: int) -> Sample:
        if index in self.broken:
            return Sample(self.key(index), b"<html>", self.target(index))
        return super().__getitem__(index)
