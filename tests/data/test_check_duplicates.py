"""Tests of the search for copies against a comparison of all pairs of images."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.make import MemorySource, encode
from vitrail.data.check import duplicates
from vitrail.data.check.duplicates import RADIUS, alike, find_duplicates, neighbours
from vitrail.data.check.images import look, look_at_all


def distances(thumbnails: np.ndarray) -> np.ndarray:
    """Return the distance of each pair of images, or infinity if one of them is flat."""
    flat = thumbnails.reshape(-1, 64).astype(np.float64)
    contrast = flat.std(axis=1)
    flat -= flat.mean(axis=1, keepdims=True)
    unit = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-9)
    apart = np.linalg.norm(unit[:, None] - unit[None], axis=2)
    apart[(contrast < 3)[:, None] | (contrast < 3)[None]] = np.inf
    return apart


@pytest.mark.slow
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(0, 50),
    kinds=st.integers(1, 12),
    noise=st.integers(0, 9),
    contrast=st.sampled_from([0, 2, 10, 60, 127]),
    radius=st.sampled_from([0.01, 0.05, 0.2, 0.7]),
)
def test_neighbours_are_those_that_comparing_all_finds(
    seed: int, count: int, kinds: int, noise: int, contrast: int, radius: float
) -> None:
    random = np.random.default_rng(seed)
    pictures = random.integers(-contrast, contrast + 1, (kinds, 8, 8)) + 128
    chosen = pictures[random.integers(0, kinds, count)] + random.integers(-noise, noise + 1, (count, 8, 8))
    thumbnails = np.clip(chosen, 0, 255).astype(np.uint8)
    apart = distances(thumbnails)
    found = neighbours(thumbnails, radius)
    assert found.complete
    pairs = set(map(tuple, found.pairs.tolist()))
    certain = {(int(i), int(j)) for i, j in zip(*np.nonzero(apart <= radius - 1e-4), strict=True) if i < j}
    possible = {(int(i), int(j)) for i, j in zip(*np.nonzero(apart <= radius + 1e-4), strict=True) if i < j}
    assert certain <= pairs <= possible and len(pairs) == len(found.pairs)
    for (one, other), distance in zip(found.pairs.tolist(), found.distances, strict=True):
        assert distance == pytest.approx(apart[one, other], abs=1e-3)


@pytest.mark.slow
def test_thousands_that_look_alike_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "MOST_COMPARISONS", 40_000)
    random = np.random.default_rng(0)
    crowd = random.integers(0, 256, (8, 8)) // 2 + 60 + random.integers(-2, 3, (2000, 8, 8))
    found = neighbours(crowd.astype(np.uint8))
    assert not found.complete
    assert 0 < len(found.pairs) <= 80_000
    assert (distances(crowd[found.pairs[:50].ravel()].astype(np.uint8))[::2, 1::2].diagonal() <= RADIUS + 1e-4).all()


def test_a_cap_on_what_is_decoded_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    small = Image.fromarray(random.integers(0, 256, (6, 8), dtype=np.uint8))
    images = [np.asarray(small.resize((60 + step, 40)))[..., None] for step in range(4)]
    source = MemorySource(images, labels=[0] * 4)
    looks = look_at_all([source], [np.arange(4)], threads=1)
    whole = find_duplicates(looks, [source], threads=1)
    assert whole.complete and [group.tolist() for group in whole.near] == [[0, 1, 2, 3]] and whole.exact == []
    monkeypatch.setattr(duplicates, "MOST_COMPARED", 1)
    looks.details = None
    capped = find_duplicates(looks, [source], threads=1)
    assert not capped.complete and [len(group) for group in capped.near] == [2]


def test_a_source_without_images_has_no_copies() -> None:
    source = MemorySource([b"", b""], labels=[0, 1])
    found = find_duplicates(look_at_all([source], [np.arange(2)]), [source])
    assert (found.exact, found.near, found.complete) == ([], [], True)


@pytest.mark.slow
@pytest.mark.parametrize(("quality", "scale"), [(75, 1.0), (75, 0.5), (95, 2.0)])
def test_a_picture_saved_again_is_the_same_and_others_are_not(quality: int, scale: float) -> None:
    images = []
    for seed in range(12):
        small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
        whole = Image.fromarray(small).resize((130, 97), Image.Resampling.BICUBIC)
        again = whole.resize((round(130 * scale), round(97 * scale)), Image.Resampling.BILINEAR)
        images += [encode(whole, "PNG"), encode(again, "JPEG", quality=quality)]
    source = MemorySource(images, labels=[0] * 24)
    found = find_duplicates(look_at_all([source], [np.arange(24)]), [source])
    assert [group.tolist() for group in found.near] == [[row, row + 1] for row in range(0, 24, 2)]


def test_the_same_picture_in_another_colour_is_a_near_duplicate() -> None:
    grey = np.asarray(Image.fromarray(np.random.default_rng(0).integers(60, 180, (6, 8), np.uint8)).resize((40, 30)))
    shifts = np.array([60, 0, -60]), np.array([-48, 29, -20])  # which leave luma nearly as it is
    images = [np.clip(grey[..., None].astype(int) + shift, 0, 255).astype(np.uint8) for shift in shifts]
    assert abs(look(images[0]).mean - look(images[1]).mean) < 15
    source = MemorySource(images, labels=[0, 0])
    looks = look_at_all([source], [np.arange(2)])
    pairs = neighbours(looks.thumbnails).pairs
    assert len(pairs) == 1 and not alike(looks, [source], pairs).any()
    assert [group.tolist() for group in find_duplicates(looks, [source]).near] == [[0, 1]]
