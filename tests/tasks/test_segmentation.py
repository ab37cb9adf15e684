"""The task segmentation: its losses, parts of a batch, ignored pixels, and that a network learns a few drawn images by
heart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitrail
from tests.evaluation.test_segmentation import make_scenes
from tests.make import tiny_config
from tests.tasks.objectives import check_parts
from vitrail.data.batch import Batch
from vitrail.data.objects import IGNORED
from vitrail.data.sources import open_data
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.segmentation import ByMasks
from vitrail.tasks import segmentation
from vitrail.tasks.segmentation import Segmentation, SegmentationObjective, at_pixels, dice_loss

SIZE = 24, 40


def batch_of(images: int, *, classes: int = 3, seed: int = 0) -> Batch:
    """Return images with masks, one of which cannot be decoded, and of which one has no known pixel."""
    generator = torch.Generator().manual_seed(seed)
    masks = torch.randint(0, classes, (images, *SIZE), generator=generator, dtype=torch.uint8)
    masks[:, :5] = IGNORED
    masks[0] = IGNORED
    masks[2, :, 7:] = IGNORED
    numbers = torch.arange(images)
    return Batch(
        torch.rand(images, 3, *SIZE, generator=generator).double(), torch.full((images,), -1), numbers != 1, numbers,
        torch.zeros_like(numbers), masks=masks, target_kind="mask",
    )  # fmt: skip


def objective_of(task: Segmentation, head_kind: str = "fine-patches") -> SegmentationObjective:
    torch.manual_seed(0)
    network: Any = vitrail.create("ViT-Pico/8", num_classes=3, image_size=SIZE, head_kind=head_kind, depth=1)
    torch.nn.init.normal_(network.head.layer.weight, std=0.3)
    return SegmentationObjective(network.double(), task)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_logits_lie_at_the_centres_of_pixels(stride: int) -> None:
    maps = torch.rand(2, 3, 5, 4, dtype=torch.float64)
    whole = F.interpolate(maps, SIZE, mode="bilinear", align_corners=False)
    torch.testing.assert_close(at_pixels(maps, SIZE, stride), whole[:, :, ::stride, ::stride])


@pytest.mark.parametrize("head_kind", ["patches", "fine-patches"])
def test_the_loss_is_the_mean_of_the_known_pixels(head_kind: str) -> None:
    objective, batch = objective_of(Segmentation(loss_stride=1), head_kind), batch_of(4)
    cells = {"patches": 1, "fine-patches": 4}[head_kind]
    maps = objective.network(batch.images).transpose(1, 2).unflatten(2, (3 * cells, 5 * cells))
    logits = F.interpolate(maps, SIZE, mode="bilinear").permute(0, 2, 3, 1)
    assert batch.masks is not None
    known = (batch.masks != IGNORED) & batch.valid[:, None, None]
    expected = F.cross_entropy(logits[known], batch.masks[known].long())
    torch.testing.assert_close(objective(batch).loss, expected)
    assert objective.counted(batch).tolist() == known.sum(dim=(1, 2)).tolist()


def test_dice_is_that_of_each_class_of_an_image() -> None:
    logits, truth = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.tensor([[0, 0, 2, 2, IGNORED]] * 4)
    likely = logits.softmax(dim=1)[0, :, :, :4].numpy()
    expected = []
    for label, columns in ((0, slice(0, 2)), (2, slice(2, 4))):
        common, both = likely[label][:, columns].sum(), likely[label].sum() + 8
        expected.append(1 - (2 * common + 1) / (both + 1))
    unknown = torch.full_like(truth, IGNORED)
    found = dice_loss(logits, torch.stack([truth, unknown]).to(torch.uint8))
    assert found.tolist() == pytest.approx([float(np.mean(expected)), 0])


@pytest.mark.slow
@pytest.mark.parametrize("dice_weight", [0.0, 0.7])
def test_parts_of_a_batch_have_the_gradients_of_the_whole(dice_weight: float) -> None:
    objective, batch = objective_of(Segmentation(dice_weight=dice_weight)), batch_of(5)

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, [*objective.network.head.parameters()]))

    whole = gradients(check_parts(objective, batch, parts=3, all_are_trained=False).loss)
    assert batch.masks is not None
    changed = batch.masks.clone()
    changed[1] = 0  # of an image that cannot be decoded
    torch.testing.assert_close(gradients(objective(replace(batch, masks=changed)).loss), whole)
    nothing = objective(replace(batch, valid=torch.zeros(5, dtype=torch.bool))).loss
    assert nothing == 0 and all(not each.any() for each in gradients(nothing))


@pytest.mark.parametrize("head_kind", ["patches", "fine-patches"])
def test_a_network_of_masks_fulfils_the_contract(head_kind: str) -> None:
    network: Any = vitrail.create("ViT-Pico/8", num_classes=3, image_size=SIZE, head_kind=head_kind, depth=1)
    cells = {"patches": 1, "fine-patches": 16}[head_kind]
    outputs = network(torch.rand(2, 3, *SIZE))
    assert outputs.shape == (2, 15 * cells, 3) and not outputs.any(), "a new head prefers no class"
    assert network.config.parameters() == sum(weight.numel() for weight in network.parameters())
    assert network(torch.zeros(1, 3, 16, 56)).shape == (1, 14 * cells, 3)
    coloured: Any = vitrail.create("ViT-Pico/8", num_classes=3, image_size=(8, 16), head_kind=head_kind, depth=1)
    numbers = torch.arange(2 * cells, dtype=torch.float32)[None, :, None].expand(1, -1, 3)
    maps = coloured.config.dense_head.class_maps(numbers, (1, 2))
    assert torch.equal(maps[0, 1].flatten(), numbers[0, :, 0]) and maps.shape[3] == 2 * maps.shape[2]


@pytest.mark.slow
@pytest.mark.parametrize("head_kind", ["fine-patches", "queries"])
def test_ten_drawn_images_are_learned_by_heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_kind: str) -> None:
    monkeypatch.setattr(segmentation, "POINTS", 1000)
    of_head = {"queries": {"queries": 8, "query_blocks": 2, "depth": 4}, "fine-patches": {"loss_stride": 1}}[head_kind]
    make_scenes(tmp_path / "data", "train", 10)
    config = tiny_config(
        data=tmp_path / "data", run=tmp_path / "run", variant="ViT-Pico/8", image_size=(48, 64), width=48,
        heads=3, mlp_width=96, steps=100, batch_size=10, learning_rate=4e-3, validation_share=0.0, keep="last",
        evaluations=0, flip=False, erase=0.0, resize="squash",
    ).override(task="segmentation", head_kind=head_kind, **of_head)  # fmt: skip
    bundle = vitrail.train(config).bundle
    data = open_data(str(tmp_path / "data"), validation_share=0.0).train
    found = ByMasks(bootstrap=0)(Outputs(bundle), data, data)
    assert found["images"] == 10 and found["mean_iou"] >= 0.98 and found["pixel_accuracy"] >= 0.98
