"""Where images land, against numbers of torchvision and timm and against pixels made by their documented steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitrail.data.pixels.geometry import Placement, place, scaled_side
from vitrail.data.pixels.preprocess import FILTERS, Interpolation, Preprocess

GOLDEN = json.loads((Path(__file__).parent / "golden" / "placements.json").read_text())
"""Transform, size of the image, size asked for, share (torchvision: cut and short side), and what their code does: the
scaled height and width, top and left of the window. Made with torchvision 0.29.2 and timm 1.0.31."""

OURS = {"torchvision": "crop", "center": "crop", "squash": "squash", "border": "pad"}

side = st.integers(1, 300)


def picture(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("kind", OURS)
def test_placements_are_those_of_torchvision_and_timm(kind: str) -> None:
    rows = [row for row in GOLDEN if row[0] == kind]
    assert len(rows) > 80
    for _, old, new, share, (height, width, top, left) in rows:
        share = share[0] / share[1] if kind == "torchvision" else share
        assert place(tuple(old), tuple(new), OURS[kind], share) == Placement((height, width), top, left), (old, new)


@pytest.mark.parametrize(("size", "edge"), [(224, 256), (224, 232), (238, 242)])
@pytest.mark.parametrize("old", [(375, 500), (251, 240), (300, 1001)])
@pytest.mark.parametrize("interpolation", FILTERS)
def test_pixels_are_those_of_scaling_the_short_side_and_cutting_the_centre(
    size: int, edge: int, old: tuple[int, int], interpolation: Interpolation
) -> None:
    image = picture(*old)
    scaled = (edge, int(edge * old[1] / old[0])) if old[0] <= old[1] else (int(edge * old[0] / old[1]), edge)
    resized = image.resize(scaled[::-1], FILTERS[interpolation])
    top, left = (round((whole - size) / 2) for whole in scaled)
    expected = np.asarray(resized)[top : top + size, left : left + size]
    preprocess = Preprocess(image_size=(size, size), resize="crop", crop_share=size / edge, interpolation=interpolation)
    np.testing.assert_array_equal(preprocess.pixels(np.asarray(image)), expected.transpose(2, 0, 1))


@pytest.mark.parametrize("share", [1.0, 0.9, 0.5])
@pytest.mark.parametrize("new", [(60, 60), (40, 61), (61, 40)])
@pytest.mark.parametrize("old", [(50, 97), (97, 50), (30, 31), (1, 40)])
@pytest.mark.parametrize("channels", [1, 3])
def test_pad_fits_the_image_in_and_fills_around_it(
    share: float, new: tuple[int, int], old: tuple[int, int], channels: int
) -> None:
    image = picture(*old).convert("L" if channels == 1 else "RGB")
    levels = (7, 80, 200)[:channels]
    ratio = max(before / math.floor(after / share) for before, after in zip(old, new, strict=True))
    scaled = [max(1, round(before / ratio)) for before in old]
    resized = np.asarray(image.resize(scaled[::-1], Image.Resampling.BICUBIC)).reshape(*scaled, channels)
    border = [max(0, after - whole) for after, whole in zip(new, scaled, strict=True)]
    canvas = np.empty([whole + add for whole, add in zip(scaled, border, strict=True)] + [channels], np.uint8)
    canvas[...] = levels
    begin = [add // 2 for add in border]
    canvas[begin[0] : begin[0] + scaled[0], begin[1] : begin[1] + scaled[1]] = resized
    top, left = (round((whole - after) / 2) for whole, after in zip(canvas.shape, new, strict=False))
    expected = canvas[top : top + new[0], left : left + new[1]]
    preprocess = Preprocess(
        image_size=new, channels=channels, resize="pad", crop_share=share, interpolation="bicubic", pad_value=levels
    )
    np.testing.assert_array_equal(
        preprocess.pixels(np.asarray(image).reshape(*old, channels)), expected.transpose(2, 0, 1)
    )


def test_padding_is_white_unless_said_otherwise() -> None:
    found = Preprocess(image_size=(4, 4), resize="pad").pixels(np.zeros((2, 4, 3), np.uint8))
    assert found[:, [0, 3]].min() == 255 and found[:, 1:3].max() == 0


def test_squashing_with_a_share_cuts_the_middle_of_what_was_squashed() -> None:
    image = picture(70, 90)
    expected = np.asarray(image.resize((50, 40), Image.Resampling.BILINEAR))[4:36, 5:45]
    found = Preprocess(image_size=(32, 40), crop_share=0.8).pixels(np.asarray(image))
    np.testing.assert_array_equal(found, expected.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("size", "share", "expected"),
    [
        (224, 0.875, 256), (224, 224 / 232, 232), (238, 238 / 242, 242), (224, 0.9, 248), (224, 0.95, 235),
        (384, 1.0, 384), (518, 0.99, 523), (1, 1 / 93, 93), (1, 0.4, 2), (252, 0.9, 280),
    ],
)  # fmt: skip
def test_the_scaled_side_is_rounded_down(size: int, share: float, expected: int) -> None:
    assert scaled_side(size, share) == expected


@given(size=st.integers(1, 2000), more=st.integers(0, 2000))
def test_a_share_made_of_two_sides_gives_the_second_back(size: int, more: int) -> None:
    assert scaled_side(size, size / (size + more)) == size + more


@given(
    old=st.tuples(side, side),
    new=st.tuples(side, side),
    resize=st.sampled_from(["squash", "crop", "pad"]),
    share=st.floats(0.1, 1),
)
def test_the_window_lies_in_the_middle(old: tuple[int, int], new: tuple[int, int], resize: str, share: float) -> None:
    placement = place(old, new, resize, share)
    for whole, part, begin in zip(placement.scaled, new, (placement.top, placement.left), strict=True):
        assert whole >= 1 and abs((whole - part) - 2 * begin) <= 1
        if resize != "pad":
            assert 0 <= begin <= whole - part
    if resize == "pad":
        assert any(
            abs(whole - scaled_side(part, share)) <= 0 for whole, part in zip(placement.scaled, new, strict=True)
        )
