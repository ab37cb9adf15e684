"""Prediction in tiles: the tiles of an image, the merged boxes, and small things in large images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage
from torch import Tensor, nn

from vitrail.data.objects import Runs
from vitrail.data.pixels.geometry import place
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.vit_config import ViTConfig
from vitrail.weights import answers, tiles
from vitrail.weights.answers import Detections, View, mask_of
from vitrail.weights.bundle import Bundle

SIZE = (64, 96)


class Finder(nn.Module):
    """Finds bright areas: a box around each one, or the patches that are mostly bright."""

    def __init__(self, head_kind: Any) -> None:
        super().__init__()
        self.config = ViTConfig(
            image_size=SIZE, patch_size=(8, 8), width=8, depth=1, heads=1, num_classes=2, head_kind=head_kind
        )
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        bright = images[:, 0] > 0.5
        if self.config.head_kind == "patches":
            share = nn.functional.avg_pool2d(images[:, :1].clamp(min=0), 8).flatten(2).transpose(1, 2)
            return torch.cat([1 - share, share], dim=2)
        outputs = torch.zeros(len(images), 200, 6)
        outputs[..., 4:] = -20
        for row, one in enumerate(bright.numpy()):
            for number, (down, across) in enumerate(ndimage.find_objects(ndimage.label(one)[0])):
                box = across.start / SIZE[1], down.start / SIZE[0], across.stop / SIZE[1], down.stop / SIZE[0]
                outputs[row, number, :4] = torch.tensor(box)
                outputs[row, number, 5] = 2.0
        return outputs


def finder(head_kind: str) -> Bundle:
    images = Preprocess(image_size=SIZE, resize="pad", crop_share=1.0, mean=(0.5,) * 3, std=(0.5,) * 3)
    output: Any = "boxes" if head_kind == "pyramid" else "mask"
    network: Any = Finder(head_kind)
    return Bundle(network, ("dark", "bright"), images, output=output)


@given(st.integers(1, 500), st.integers(1, 500))
def test_tiles_cover_an_image_and_overlap(height: int, width: int) -> None:
    corners = tiles.corners_of((height, width), SIZE)
    for side, whole in enumerate((height, width)):
        starts = sorted({corner[side] for corner in corners})
        assert starts[0] == 0 and starts[-1] == max(0, whole - SIZE[side])
        steps = np.diff(starts)
        assert (steps <= SIZE[side] * (1 - tiles.COMMON) + 1).all() and len(corners) == len(set(corners))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(301, 517), (64, 400), (150, 96)])
def test_every_small_object_is_found_once(tmp_path: Path, size: tuple[int, int]) -> None:
    random = np.random.default_rng(size[0])
    picture, truth = np.zeros((*size, 3), np.uint8), []
    for top in range(2, size[0] - 12, 21):
        for left in range(3, size[1] - 14, 29):
            down, across = (int(value) for value in random.integers(4, 12, 2))
            truth.append((left, top, left + across, top + down))
            picture[top : top + down, left : left + across] = 255
    Image.fromarray(picture).save(tmp_path / "large.png")
    found = tiles.predict_tiles(finder("pyramid"), tmp_path / "large.png")
    found = found.above(0.5)
    assert sorted(map(tuple, found.boxes.round(3).tolist())) == sorted(truth) and found.size == size


def test_large_objects_come_from_the_whole_image() -> None:
    picture = np.zeros((256, 384, 3), np.uint8)
    picture[40:200, 60:300] = 255
    picture[230:236, 10:18] = 255
    found = tiles.predict_tiles(finder("pyramid"), picture)
    boxes = found.above(0.5).boxes
    overlaps = [np.abs(boxes - np.array(truth)).max(axis=1).min() for truth in ((60, 40, 300, 200), (10, 230, 18, 236))]
    assert overlaps[0] <= 4 and overlaps[1] < 1e-4, "the whole image has a quarter of the resolution"
    small = tiles.predict_tiles(finder("pyramid"), picture[:60, :90])
    assert len(small.above(0.5)) == 1


def detections(size: tuple[int, int], *rows: tuple[float, float, float, float, float, int]) -> Detections:
    values = np.array(rows, np.float64).reshape(len(rows), 6)
    masks = []
    for left, top, right, bottom, *_ in values.astype(int).tolist():
        mask = np.zeros(size, np.bool_)
        mask[top:bottom, left:right] = True
        masks.append(Runs.of(mask))
    return Detections(("a", "b"), values[:, :4], values[:, 4], values[:, 5].astype(np.int64), size, tuple(masks))


def test_boxes_that_an_inner_edge_cuts_lose_to_whole_ones() -> None:
    corners = [(0, 0), (0, 72)]
    first = detections(SIZE, (80, 10, 96, 20, 0.99, 0), (0, 0, 9, 9, 0.8, 1), (80, 10, 96, 20, 0.7, 1))
    second = detections(SIZE, (8, 10, 30, 20, 0.6, 0), (60, 30, 96, 60, 0.5, 0))
    found = tiles.merged(detections((64, 168), (100, 2, 104, 6, 0.9, 0)), [first, second], corners, SIZE)
    assert [(*box, label) for box, label in zip(found.boxes.tolist(), found.labels.tolist(), strict=True)] == [
        (0, 0, 9, 9, 1), (80, 10, 96, 20, 1), (80, 10, 102, 20, 0), (132, 30, 168, 60, 0),
    ]  # fmt: skip
    assert "the edge of the image cuts nothing off" and found.scores.tolist() == [0.8, 0.7, 0.6, 0.5]
    for box, runs in zip(found.boxes.astype(int).tolist(), found.masks, strict=True):
        expected = np.zeros((64, 168), np.bool_)
        expected[box[1] : box[3], box[0] : box[2]] = True
        np.testing.assert_array_equal(runs.mask(), expected)


@pytest.mark.parametrize(("size", "block"), [((300, 31), answers.BLOCK), ((517, 70), 3000), ((90, 70), 40)])
def test_masks_have_the_largest_mean_of_logits(
    size: tuple[int, int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "BLOCK", block)
    random = np.random.default_rng(1)
    views = []
    for part, top, left in ((size, 0, 0), ((40, 20), size[0] - 40, 3), ((40, 20), size[0] - 60, 11)):
        placement = place(part, (32, 48), "pad", 1.0)
        views.append(View(torch.from_numpy(random.normal(size=(3, 4, 6))).float(), placement, top, left))
    total = np.zeros((3, *size))
    for view in views:
        height, width = view.placement.image
        back = view.placement.map_back(view.maps.numpy())
        total[:, view.top : view.top + height, view.left : view.left + width] += back
    np.testing.assert_array_equal(mask_of(views, size, ("a", "b", "c")).indices, total.argmax(axis=0))


def test_small_areas_of_masks_are_found() -> None:
    picture = np.zeros((320, 480, 3), np.uint8)
    picture[160:180, 200:224] = 255
    (whole,) = finder("patches").predict([picture])
    found = tiles.predict_tiles(finder("patches"), picture)
    assert not whole.indices.any()
    assert found.indices[165:175, 205:219].mean() > 0.9
    assert found.indices.mean() < 0.02
