"""Small networks, and checks of objectives, which the tests of several tasks share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.tasks.images import Pictures, batch_of, images_of
from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.evaluation.outputs import Outputs
from vitrail.models.variants import AnyNetwork, create
from vitrail.tasks.task import LossOutput, Objective
from vitrail.tasks.unlabelled import fixed_views

SMALL: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32}
"""Settings of a small Vision Transformer."""


def small_network(variant: str = "ViT-Pico/7", *, size: tuple[int, int] = (21, 28), **fields: Any) -> AnyNetwork:
    """Return a small network with the same random weights in every call, without a head unless `num_classes` is
    given."""
    torch.manual_seed(0)
    sizes = SMALL if variant.startswith("ViT") else {}
    return create(variant, image_size=size, **{"num_classes": 0, **sizes, **fields})


def pixels_of(patches: Tensor, *, grid: tuple[int, int] = (3, 4), side: int = 7) -> Tensor:
    """Return a mask of images, with True for the pixels of these patches of each image."""
    rows, columns = grid
    mask = torch.zeros(len(patches), rows * columns, dtype=torch.bool).scatter(1, patches, True)
    return mask.view(-1, 1, rows, columns).repeat_interleave(side, 2).repeat_interleave(side, 3)


class Fixed(nn.Module):
    """A network that returns these outputs for all images."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.outputs = nn.Parameter(outputs)

    def forward(self, images: Tensor) -> Tensor:
        return self.outputs


def batch_of_boxes(images: int, objects: int, *, classes: int = 3, seed: int = 0) -> Batch:
    """Return images with objects, of which some are crowds or missing."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(images, objects, 2, generator=generator) * 20
    boxes = torch.cat([starts, starts + 1 + torch.rand(images, objects, 2, generator=generator) * 12], dim=2)
    pixels = torch.rand(images, 3, 24, 40, generator=generator)
    labels = torch.randint(-2, classes, (images, objects), generator=generator)
    return replace(batch_of(pixels), boxes=boxes, box_labels=labels, target_kind="boxes")


@torch.no_grad()
def shrink(module: nn.Module) -> None:
    """Make a module unlike the one that it was copied from."""
    for weight in module.parameters():
        weight.mul_(0.9)


def check_parts(
    objective: Objective, batch: Batch | None = None, *, parts: int = 2, all_are_trained: bool = True
) -> LossOutput:
    """Check that the losses and the gradients of parts of a batch add up to those of the batch. By default one of its
    images cannot be decoded."""
    default = replace(batch_of(images_of(5)), valid=torch.tensor([True, True, False, True, True]))
    batch = default if batch is None else batch
    weights = [weight for weight in objective.parameters() if weight.requires_grad]
    total = objective.counted(batch).float().sum(dim=0).clamp(min=1)
    whole = objective(batch)
    shares = [objective(part).loss * objective.counted(part).sum(dim=0) / total for part in batch.chunks(parts)]
    added = torch.stack(shares).sum(dim=0)
    torch.testing.assert_close(added, whole.loss, rtol=1e-4, atol=1e-6)
    gradients = (
        torch.autograd.grad(loss.sum(), weights, retain_graph=True, allow_unused=not all_are_trained)
        for loss in (added, whole.loss)
    )
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert other is None or other.isfinite().all()
    return whole


def measured(objective: Any) -> tuple[dict[str, float], Tensor, Tensor]:
    """Return the metrics of seven held-out images, their fixed views in consecutive rows, and the images."""
    preprocess, source = Preprocess(image_size=(21, 28)), Pictures(7)
    bundle = objective.task.bundle(objective, (), preprocess, {})
    found = objective.task.evaluator(objective)(Outputs(bundle, batch_size=3), source, source)
    levels = torch.stack([torch.from_numpy(source[index].image).permute(2, 0, 1) for index in range(7)])
    images = preprocess.normalise(levels)
    assert (found["images"], found["skipped"]) == (7, 0)
    return found, torch.stack(fixed_views(images, torch.arange(7)), dim=1).flatten(0, 1), images
