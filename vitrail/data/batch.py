"""One batch of training or evaluation: pixels, targets and the keys of its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from vitrail.data.source import TargetKind


@dataclass(frozen=True)
class Skipped:
    """A sample that could not be decoded."""

    key: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """Samples in rows: one row per sample, or consecutive rows with several views of each sample.

    A sample that cannot be decoded keeps its row, with `valid` False and black pixels.
    """

    images: Shaped[Tensor, "b c h w"]
    """Levels from 0 to 255, or normalised values after normalisation. Levels are uint8. In evaluation, levels are
    float32 if the resampler of the preprocessing keeps fractions of levels."""
    labels: Int64[Tensor, " b"]
    """Class indices. The index is -1 for an image that has no label, or whose target is in `targets`."""
    valid: Bool[Tensor, " b"]
    samples: Int64[Tensor, " b"]
    """Index of each image in its source. `samples`, `epochs` and `views` stay on the CPU, because random numbers are
    computed from them on the CPU."""
    epochs: Int64[Tensor, " b"]
    """Epoch of each image, from 0. A batch can hold the last images of one epoch and the first images of the next."""
    views: Int64[Tensor, " b"] = field(default=None)  # type: ignore[assignment]
    """View number of each image, from 0. By default every image is view 0."""
    targets: Float[Tensor, "b k"] | None = None
    """Amount of each class, or the numbers of a regression target. An unknown number is NaN. If every image has at most
    one class, no targets are soft and no images are mixed, `targets` is None and `labels` contains the targets."""
    target_kind: TargetKind = "class"
    has_soft_targets: bool = False
    """True if the source has soft targets. `targets` then holds the amounts of all images, and `labels` their most
    likely classes."""
    skipped: tuple[Skipped, ...] = ()
    partners: int = 0
    """Number of rows at the end that belong to another process. The last sample of this process is mixed with them."""
    first_key: tuple[int, int] | None = None
    """Epoch and sample of the first row of the batch that several processes share, or None if this batch is whole."""
    local: Batch | None = None
    """More views of the same samples, whose images have another size, or None. Their view numbers follow those of this
    batch."""

    def __post_init__(self) -> None:
        if cast(Tensor | None, self.views) is None:
            object.__setattr__(self, "views", torch.zeros_like(self.samples))

    def __len__(self) -> int:
        """Return the number of rows, which is the number of samples times the number of views."""
        return len(self.labels)

    @property
    def views_per_sample(self) -> int:
        """Number of rows per sample."""
        views = np.from_dlpack(self.views)  # DLPack shares memory on the CPU only, so nothing waits here
        return int(views[-1] - views[0]) + 1

    @property
    def counted(self) -> Bool[Tensor, " b"]:
        """True for each image that was decoded and has a label or a target."""
        if self.target_kind == "numbers" and self.targets is not None:
            return self.valid & ~self.targets.isnan().all(dim=1)
        has_labels = self.targets is None or self.has_soft_targets
        return self.valid & (self.labels >= 0) if has_labels else self.valid

    def to(self, device: torch.device) -> Batch:
        """Return the batch with the images, labels and other tensors for the loss on the device.

        `samples`, `epochs` and `views` stay on the CPU, so computing random numbers from them does not wait for the
        device.
        """
        moved = {}
        for name in ON_DEVICE:
            if (tensor := getattr(self, name)) is not None:
                if device.type == "cuda":
                    tensor = tensor.pin_memory()  # pinned, so that the copy runs while the GPU computes
                moved[name] = tensor.to(device, non_blocking=True)
        return replace(self, **moved, local=None if self.local is None else self.local.to(device))

    def with_images(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `change` of its images, and of the images of its local views."""
        local = None if self.local is None else self.local.with_images(change)
        return replace(self, images=change(self.images), local=local)

    def without_partners(self) -> Batch:
        """Return the batch without the rows that belong to another process."""
        if not self.partners:
            return self
        own = {
            item.name: getattr(self, item.name)[: len(self) - self.partners]
            for item in fields(self)
            if isinstance(getattr(self, item.name), Tensor)
        }
        return replace(self, **own, partners=0)

    def chunks(self, count: int) -> list[Batch]:
        """Return the batch as `count` smaller batches of nearly equal size, in order. A batch with fewer than `count`
        samples becomes one batch per sample.

        All views of a sample stay together.
        """
        names = [item.name for item in fields(self) if isinstance(getattr(self, item.name), Tensor)]
        views = self.views_per_sample
        samples = len(self) // views
        size, larger = divmod(samples, chunks := min(count, samples))  # the first ones have one more sample
        ends = [views * (number * size + min(number, larger)) for number in range(1, chunks)]
        parts = zip(*(getattr(self, name).tensor_split(ends) for name in names), strict=True)
        local = [None] * chunks if self.local is None else self.local.chunks(count)
        return [
            Batch(
                **dict(zip(names, part, strict=True)),
                target_kind=self.target_kind,
                has_soft_targets=self.has_soft_targets,
                local=more,
            )
            for part, more in zip(parts, local, strict=True)
        ]


ON_DEVICE = ("images", "labels", "valid", "targets")
