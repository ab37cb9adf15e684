"""Random images with and without labels, which the tests of several tasks share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Sample
from vitrail.data.targets import Target


class Pictures:
    """A source of random images. `targets` are those of the images in turn, by default none."""

    def __init__(self, count: int, classes: tuple[str, ...] = (), targets: Sequence[Target] = (None,)) -> None:
        self.count = count
        self.classes = classes
        self.targets = targets

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (21, 28, 3), generator=generator, dtype=torch.uint8).numpy()
        return Sample(self.key(index), image, self.target(index))

    def key(self, index: int) -> str:
        return str(index)

    def target(self, index: int) -> Target:
        return self.targets[index % len(self.targets)]


class Labels(Pictures):
    """A source of targets whose images must not be read."""

    def __init__(self, *targets: Target, classes: tuple[str, ...] = ("a", "b", "c"), target_kind: str = "") -> None:
        super().__init__(len(targets), classes, targets)
        if target_kind:
            self.target_kind = target_kind

    def __getitem__(self, index: int) -> Sample:
        raise AssertionError("no image is read")


def images_of(count: int, *, size: tuple[int, int] = (21, 28), channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    levels = torch.randint(0, 256, (count, channels, *size), generator=generator, dtype=torch.uint8)
    return Preprocess(image_size=size, channels=channels).normalise(levels)


def batch_of(images: Tensor, *, first: int = 0, epoch: int = 0) -> Batch:
    """Return a batch of decoded images without labels. Their samples are numbered from `first`."""
    count = len(images)
    return Batch(
        images=images,
        labels=torch.full((count,), -1),
        valid=torch.ones(count, dtype=torch.bool),
        samples=torch.arange(first, first + count),
        epochs=torch.full((count,), epoch),
        target_kind="none",
    )
