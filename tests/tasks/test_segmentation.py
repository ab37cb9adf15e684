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
from tests.make import make_outlines_folder, tiny_config
from tests.tasks.objectives import check_parts
from vitrail.data.augment.settings import Augment
from vitrail.data.batch import Batch, Rows
from vitrail.data.objects import IGNORED
from vitrail.data.pipeline import Readers, Stage, TrainingBatches
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.sources import open_data
from vitrail.evaluation.detection import ByDetection
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.segmentation import ByMasks
from vitrail.models.heads.masks import CELLS
from vitrail.tasks import segmentation
from vitrail.tasks.detection import Detection, token_amounts
from vitrail.tasks.segmentation import (
    QueryObjective,
    Segmentation,
    SegmentationObjective,
    Segments,
    at_pixels,
    dice_loss,
    masking_chances,
    query_losses,
    segments_of,
)

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


# The losses of queries.


CLASSES, QUERIES, GRID = 4, 6, (3, 5)


def outputs_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(QUERIES, CLASSES + 1 + CELLS**2 * 15, generator=generator) * 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_losses_are_those_of_transformers(seed: int) -> None:
    module = pytest.importorskip("transformers.models.eomt.modeling_eomt")
    config = pytest.importorskip("transformers").EomtConfig(num_labels=CLASSES, num_blocks=1)
    weights = {"loss_cross_entropy": 2.0, "loss_mask": 5.0, "loss_dice": 5.0}
    criterion = module.EomtLoss(config, weights)
    outputs = outputs_of(seed)
    truth = torch.randint(0, CLASSES - 1, (24, 40), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    labels = truth.unique().long()
    masks = torch.stack([truth == label for label in labels]).float()
    torch.manual_seed(seed)
    expected = criterion(
        masks_queries_logits=outputs[None, :, CLASSES + 1 :].unflatten(2, (CELLS * 3, CELLS * 5)),
        class_queries_logits=outputs[None, :, : CLASSES + 1], mask_labels=[masks], class_labels=[labels],
    )  # fmt: skip
    torch.manual_seed(seed)
    segments = Segments(labels, masks > 0, torch.ones(1, 24, 40, dtype=torch.bool))
    found = query_losses(outputs, segments, GRID) / token_amounts(torch.tensor([len(labels)]), QUERIES)[0]
    total = [weights["loss_cross_entropy"] * expected["loss_cross_entropy"]]
    total.append(5.0 * (expected["loss_mask"] + expected["loss_dice"]))
    torch.testing.assert_close(found, torch.stack(total), rtol=1e-5, atol=1e-5)


def segments(truth: torch.Tensor) -> Segments:
    return segments_of(replace(batch_of(3), masks=truth.expand(3, -1, -1)), 0)


def test_pixels_without_a_class_do_not_count() -> None:
    outputs, truth = outputs_of(0), torch.zeros(24, 40, dtype=torch.uint8)
    truth[:, 20:] = 1
    truth[12:] = IGNORED
    changed = outputs.clone()
    changed[:, CLASSES + 1 :].unflatten(1, (12, 20))[:, 7:] += 20  # beyond the cells between known pixels

    def losses(values: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return query_losses(values, segments(truth), GRID)[1]

    assert losses(changed).item() == pytest.approx(losses(outputs).item(), rel=0.1)
    truth[12:] = 0
    assert losses(changed).item() != pytest.approx(losses(outputs).item(), rel=0.1)
    of_classes, of_masks = query_losses(outputs, segments(torch.full_like(truth, IGNORED)), GRID)
    assert of_masks == 0 and of_classes > 0


def test_all_outputs_of_a_batch_are_learned() -> None:
    torch.manual_seed(0)
    network: Any = vitrail.create(
        "ViT-Pico/8", num_classes=3, image_size=SIZE, head_kind="queries", depth=3, queries=QUERIES, query_blocks=2
    )
    objective = QueryObjective(network, Segmentation())
    batch = batch_of(4)
    batch = replace(batch, images=batch.images.float())
    counted = objective.counted(batch)
    assert counted.tolist() == [[QUERIES, 0], [0, 0], [QUERIES + 9 * 3, 3], [QUERIES + 9 * 3, 3]]
    output = objective(batch)
    assert output.loss.shape == (2,) and output.loss.isfinite().all()
    output.loss.sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in network.parameters())
    network.zero_grad()
    objective(replace(batch, valid=torch.zeros(4, dtype=torch.bool))).loss.sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in network.parameters())


def test_masked_attention_ends_block_by_block() -> None:
    assert masking_chances(0.0, 3) == masking_chances(2 / 12, 3) == (1, 1, 1)
    assert masking_chances(1.0, 3) == (0, 0, 0) and masking_chances(4 / 12, 3) == (0, 1, 1)
    assert masking_chances(6 / 12, 3) == pytest.approx((0, 0.5**0.9, 1))


def outline_batch(images: int) -> Batch:
    """Return images with up to eleven objects with outlines, one of which cannot be decoded, and of which one has no
    object that is learned."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(-2, 3, (images, 11), generator=generator)
    labels[0] = -2
    pixels = torch.rand(images, 11, *SIZE, generator=generator) < 0.3
    numbers = torch.arange(images)
    return Batch(
        torch.rand(images, 3, *SIZE, generator=generator), torch.full((images,), -1), numbers != 1, numbers,
        torch.zeros_like(numbers), boxes=torch.zeros(images, 11, 4), box_labels=labels, target_kind="boxes",
        outlines=torch.from_numpy(np.packbits(pixels.numpy(), axis=1, bitorder="little")),
    )  # fmt: skip


@pytest.mark.slow
def test_the_masks_of_objects_are_learned() -> None:
    torch.manual_seed(0)
    network: Any = vitrail.create(
        "ViT-Pico/8", num_classes=3, image_size=SIZE, head_kind="queries", depth=3, queries=QUERIES, query_blocks=2
    )
    objective, batch = QueryObjective(network, Detection()), outline_batch(4)
    assert batch.box_labels is not None and batch.outlines is not None
    pixels = np.unpackbits(batch.outlines.numpy(), axis=1, bitorder="little")
    for row in range(4):
        truth, labels = segments_of(batch, row), batch.box_labels[row]
        assert truth.labels.tolist() == labels[labels >= 0].tolist() and truth.known.all()
        assert np.array_equal(truth.masks.numpy(), pixels[row, :11][(labels >= 0).numpy()] > 0)
    counts = (batch.box_labels >= 0).sum(dim=1).tolist()
    assert objective.counted(batch)[:, 1].tolist() == [0, 0, *counts[2:]]
    output = objective(batch)
    output.loss.sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in network.parameters())
    damaged = batch.outlines.clone()
    damaged[1] = 255  # of an image that cannot be decoded
    torch.manual_seed(0)
    expected = objective(batch).loss
    torch.manual_seed(0)
    assert torch.equal(objective(replace(batch, outlines=damaged)).loss, expected)


def test_outlines_lie_at_the_pixels_of_mirrored_images(tmp_path: Path) -> None:
    """The mask that an object has in a batch is that of its colour, also after a crop and mirroring."""
    make_outlines_folder(tmp_path / "data", train=6, validation=0, test=0)
    data = open_data(str(tmp_path / "data"), validation_share=0.0).train
    augment = Augment(flip=True, scale_jitter=(0.5, 1.6))
    preprocess = Preprocess(image_size=(40, 48), resize="pad")
    rows = Rows(crop=augment.crop(1), outlines=True)
    batches = TrainingBatches(data, [Stage(preprocess, 6)], seed=1, readers=Readers(threads=0), rows=rows)
    batch = augment(next(batches), seed=1, preprocess=preprocess, classes=2)
    colours = torch.tensor([[20, 30, 230], [230, 30, 20], [90, 90, 90]])
    seen = 0
    for row in range(6):
        truth = segments_of(batch, row)
        for label, mask in zip(truth.labels.tolist(), truth.masks, strict=True):
            inner = ~F.max_pool2d((~mask)[None].float(), 3, 1, 1)[0].bool()
            distances = (batch.images[row].permute(1, 2, 0)[inner][:, None].float() - colours).abs().sum(dim=2)
            assert (distances.argmin(dim=1) == label).all()
            seen += int(inner.sum())
    assert seen > 1000


LEARNED: dict[str, dict[str, Any]] = {
    "queries": {"queries": 12, "query_blocks": 2, "width": 48, "mlp_width": 96, "depth": 4, "learning_rate": 4e-3},
    "detection-tokens": {"registers": 12, "width": 96, "mlp_width": 192, "depth": 2, "learning_rate": 3e-3},
}


@pytest.mark.slow
@pytest.mark.parametrize("head_kind", LEARNED)
def test_the_objects_of_ten_drawn_images_are_learned_by_heart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_kind: str
) -> None:
    monkeypatch.setattr(segmentation, "POINTS", 1000)
    make_outlines_folder(tmp_path / "data", train=10, validation=0, test=0)
    config = tiny_config(
        data=tmp_path / "data", run=tmp_path / "run", variant="ViT-Pico/8", image_size=(48, 64), heads=3, steps=200,
        batch_size=10, validation_share=0.0, keep="last", evaluations=0, flip=False, erase=0.0, resize="squash",
    ).override(task="detection", head_kind=head_kind, **LEARNED[head_kind])  # fmt: skip
    bundle = vitrail.train(config).bundle
    data = open_data(str(tmp_path / "data"), validation_share=0.0).train
    found = ByDetection(bootstrap=0)(Outputs(bundle), data, data)
    assert found["images"] == 10 and found["average_precision_50"] >= 0.98 and found["average_precision"] >= 0.9
    assert found.get("box_average_precision", 1) >= 0.8
