"""Tests of placements against numbers of torchvision and timm, and against pixels from their documented steps."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.make import from_pillow, to_pillow
from vitrail.data.pixels.geometry import Box, Placement, place, place_like_big_vision, scaled_side
from vitrail.data.pixels.preprocess import Interpolation, Preprocess
from vitrail.errors import ConfigError

GOLDEN = json.loads((Path(__file__).parent / "golden" / "placements.json").read_text())
"""Cases of the transforms of other libraries, with their results. A case is the transform, the size of the image, the
requested size and the fraction (for torchvision the crop and the short side). A result is the scaled height and width,
and the top and left of the window. Made with torchvision 0.29.2 and timm 1.0.31."""

OURS = {"torchvision": "crop", "center": "crop", "squash": "squash", "border": "pad"}

side = st.integers(1, 300)


@pytest.mark.parametrize("kind", OURS)
def test_placements_are_those_of_torchvision_and_timm(kind: str) -> None:
    rows = [row for row in GOLDEN if row[0] == kind]
    assert len(rows) > 80
    for _, old, new, share, (height, width, top, left) in rows:
        share = share[0] / share[1] if kind == "torchvision" else share
        found = place(tuple(old), tuple(new), OURS[kind], share)
        assert found == Placement(tuple(old), (0, 0, *old), (height, width), tuple(new), top, left), (old, new)


@given(size=st.integers(1, 2000), more=st.integers(0, 2000))
def test_a_share_made_of_two_sides_gives_the_second_back(size: int, more: int) -> None:
    assert scaled_side(size, size / (size + more)) == size + more


small = st.integers(1, 23)
cases = st.tuples(
    st.tuples(small, small), st.tuples(small, small), st.sampled_from(["squash", "crop", "pad"]), st.floats(0.3, 1),
    st.none() | st.tuples(small, small, small, small), st.tuples(st.integers(-3, 3), st.integers(-3, 3)),
)  # fmt: skip
"""Random cases: sizes of the image and of the result, resize, crop_share, numbers for a box, and a shift."""


def framed(case: tuple[Any, ...], **fields: Any) -> tuple[Preprocess, Box | None]:
    """Return preprocessing of an image of odd size, by squashing, cropping or padding, or the squashing of a box."""
    old, new, resize, share, numbers, _ = case
    box = None
    if numbers is not None:
        top, left = numbers[0] % old[0], numbers[1] % old[1]
        box = (top, left, 1 + numbers[2] % (old[0] - top), 1 + numbers[3] % (old[1] - left))
    return Preprocess(image_size=new, resize=resize, crop_share=share, **fields), box


def placed(case: tuple[Any, ...]) -> Placement:
    """Return a placement, perhaps moved."""
    preprocess, box = framed(case)
    placement, (down, right) = preprocess.placement(case[0], box), case[-1]
    return replace(placement, top=placement.top + down, left=placement.left + right)


PILLOW: dict[Interpolation, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST, "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC, "area": Image.Resampling.BOX,
}  # fmt: skip


@given(cases, st.sampled_from([1, 3]), st.sampled_from([*PILLOW]))
def test_pixels_are_pillows_where_the_placement_says_and_padding_lies_around_them(
    case: tuple[Any, ...], channels: int, interpolation: Interpolation
) -> None:
    old, new, levels = case[0], case[1], (7, 80, 200)[:channels]
    preprocess, box = framed(case, channels=channels, interpolation=interpolation, pad_value=levels)
    placement = preprocess.placement(old, box)
    if box is not None:
        assert placement == Placement(old, box, new, new, 0, 0)
    image = np.random.default_rng(sum(old)).integers(0, 256, (*old, channels), dtype=np.uint8)
    top, left, height, width = placement.box
    part = to_pillow(image[top : top + height, left : left + width].transpose(2, 0, 1))
    scaled = from_pillow(part.resize(placement.scaled[::-1], PILLOW[interpolation]))
    expected = np.broadcast_to(np.array(levels, np.uint8)[:, None, None], (channels, *new)).copy()
    for row, column in np.ndindex(*new):
        y, x = row + placement.top, column + placement.left
        if 0 <= y < placement.scaled[0] and 0 <= x < placement.scaled[1]:
            expected[:, row, column] = scaled[:, y, x]
    np.testing.assert_array_equal(preprocess.pixels(image, box), expected)


def forwards(placement: Placement, axis: int, at: Fraction) -> Fraction:
    """Return the position of an image's coordinate by the definition: cut the box, scale it, cut the window."""
    scaled = (at - placement.box[axis]) * placement.scaled[axis] / placement.box[2 + axis]
    return scaled - (placement.top, placement.left)[axis]


def under(placement: Placement, axis: int) -> list[int]:
    """Return for each pixel of the result the pixel of the image that contains its centre, or -1 in the padding."""
    found = []
    edges = [forwards(placement, axis, Fraction(at)) for at in range(placement.image[axis] + 1)]
    box = range(placement.box[axis], placement.box[axis] + placement.box[2 + axis])
    for pixel in range(placement.size[axis]):
        centre = pixel + Fraction(1, 2)
        holding = [at for at in box if min(edges[at : at + 2]) <= centre <= max(edges[at : at + 2])]
        # On the edge between two pixels, it is the pixel that begins there in the image.
        found.append(max(holding) if holding else -1)
    return found


@given(cases)
def test_masks_are_placed_as_the_definition_says(case: tuple[Any, ...]) -> None:
    placement = placed(case)
    height, width = placement.image
    ids = np.arange(height * width).reshape(height, width)
    rows, columns = under(placement, 0), under(placement, 1)
    expected = [[-1 if row < 0 or column < 0 else row * width + column for column in columns] for row in rows]
    found = placement.mask(ids, fill=-1)
    assert found.dtype == ids.dtype
    # A centre on the outer edge of the scaled box may count as padding or as the box by the definition.
    edge = np.array(expected) != found
    assert not edge.any() or set(found[edge]) == {-1}
    np.testing.assert_array_equal(placement.mask(np.stack([ids, ids + 1]), fill=-1)[0], found)


@given(cases)
def test_points_go_there_and_back_exactly_as_defined(case: tuple[Any, ...]) -> None:
    placement = placed(case)
    points = np.array([[0.0, 0.0], [0.5, 0.5], [3.25, 7.0], [float(placement.image[1]), float(placement.image[0])]])
    found = placement.points(points)
    for (x, y), (new_x, new_y) in zip(points, found, strict=True):
        assert abs(forwards(placement, 1, Fraction(x)) - Fraction(new_x)) < 1e-9
        assert abs(forwards(placement, 0, Fraction(y)) - Fraction(new_y)) < 1e-9
    np.testing.assert_allclose(placement.points_back(found), points, atol=1e-9)


@given(cases, st.tuples(*[st.integers(0, 22)] * 4))
def test_boxes_enclose_the_pixels_of_their_masks(case: tuple[Any, ...], corners: tuple[int, int, int, int]) -> None:
    """A pixel of the result shows the box if its centre is in the placed box. Centres on an edge are not tested."""
    placement = placed(case)
    height, width = placement.image
    left, right = sorted((corners[0] % width, corners[1] % width + 1))
    top, bottom = sorted((corners[2] % height, corners[3] % height + 1))
    mask = np.zeros((height, width), bool)
    mask[top:bottom, left:right] = True
    ((x0, y0, x1, y1),) = placement.boxes(np.array([[left, top, right, bottom]], np.float64))
    assert 0 <= x0 <= x1 <= placement.size[1] and 0 <= y0 <= y1 <= placement.size[0]
    y, x = (np.arange(size) + 0.5 for size in placement.size)
    seen = placement.mask(mask)
    inside = ((y > y0 + 1e-9) & (y < y1 - 1e-9))[:, None] & ((x > x0 + 1e-9) & (x < x1 - 1e-9))
    nearly = ((y > y0 - 1e-9) & (y < y1 + 1e-9))[:, None] & ((x > x0 - 1e-9) & (x < x1 + 1e-9))
    boxed = placement.mask(np.ones_like(mask))
    assert (seen >= (inside & boxed)).all() and (seen <= nearly).all()
    back = placement.boxes_back(np.array([[x0, y0, x1, y1]]))[0]
    if x1 > x0 and y1 > y0:  # clipped pixels are lost, and no pixel is added
        assert back[0] >= left - 1e-9 and back[1] >= top - 1e-9 and back[2] <= right + 1e-9 and back[3] <= bottom + 1e-9


@pytest.mark.slow
@given(cases, st.integers(1, 9), st.integers(1, 9))
def test_cells_of_the_result_are_put_back_onto_the_image(case: tuple[Any, ...], rows: int, columns: int) -> None:
    """The values by linear interpolation are compared with the placement of each pixel's centre."""
    placement = placed(case)
    height, width = placement.image
    down, across = np.mgrid[:rows, :columns] + 0.5
    grid = np.stack([across * placement.size[1] / columns, down * placement.size[0] / rows])
    places = placement.map_back(grid, fill=-1.0)
    top, left, h, w = placement.box
    for y in range(height):
        for x in range(width):
            at = [forwards(placement, axis, Fraction(2 * pixel + 1, 2)) for axis, pixel in ((0, y), (1, x))]
            part = [at[axis] * (rows, columns)[axis] / placement.size[axis] for axis in (0, 1)]
            inside = top <= y < top + h and left <= x < left + w
            if any(one.denominator == 1 for one in part):
                continue  # on the edge of two cells, or of the result
            if not inside or not all(0 <= one < count for one, count in zip(part, (rows, columns), strict=True)):
                assert (places[:, y, x] == -1).all()
                continue
            for axis, count in ((0, rows), (1, columns)):
                step = placement.scaled[axis] / placement.box[2 + axis] * count / placement.size[axis]
                if step <= 1:
                    clamped = min(max(part[axis], Fraction(1, 2)), count - Fraction(1, 2))  # beyond the outer centres
                    assert abs(places[1 - axis, y, x] - float(clamped) * placement.size[axis] / count) < 1e-9


def test_a_mask_of_another_image_is_refused() -> None:
    placement = Preprocess(image_size=(4, 4)).placement((5, 7))
    message = r"values of shape \(7, 5\) do not belong to an image of 5 x 7 \(height, width\); their last two"
    with pytest.raises(ConfigError, match=message):
        placement.mask(np.zeros((7, 5)))


@pytest.mark.parametrize(("old", "new", "resize", "share", "scaled", "start"), [
    ((61, 47), (20, 20), "crop", 20 / 24, (31, 24), (5, 2)),  # 61 * 24 / 47 = 31.1; torchvision starts at row 6
    ((29, 40), (20, 20), "crop", 20 / 24, (24, 33), (2, 6)),
    ((375, 500), (224, 224), "crop", 0.875, (256, 341), (16, 58)),
    ((61, 47), (24, 24), "pad", 1.0, (24, 18), (0, -3)),
    ((29, 40), (24, 24), "pad", 1.0, (17, 24), (-3, 0)),
    ((30, 50), (10, 20), "crop", 1.0, (12, 20), (1, 0)),
    ((30, 50), (10, 20), "squash", 1.0, (10, 20), (0, 0)),
])  # fmt: skip
def test_sizes_and_starts_of_big_vision(
    old: Any, new: Any, resize: Any, share: float, scaled: tuple[int, int], start: tuple[int, int]
) -> None:
    found = place_like_big_vision(old, new, resize, share)
    assert found == Placement(old, (0, 0, *old), scaled, new, *start)
