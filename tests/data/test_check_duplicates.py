"""Tests of the search for copies against a comparison of all pairs of images, and of shifted or recoloured copies among
pictures that only resemble each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from tests.make import MemorySource, encode
from vitrail.data.check import duplicates
from vitrail.data.check import images as look_module
from vitrail.data.check.duplicates import alike, find_duplicates, most_similar, neighbours, shifted_copies
from vitrail.data.check.images import look, look_at_all
from vitrail.data.check.report import check_data
from vitrail.data.splits import Splits


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
    apart = distances(crowd[found.pairs[:50].ravel()].astype(np.uint8))[::2, 1::2].diagonal()
    assert (apart <= duplicates.RADIUS + 1e-4).all()


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


def scene(seed: int, width: int = 75, height: int = 56) -> Image.Image:
    """Return a random picture with details of several sizes, like a photograph, larger than its centre."""
    random = np.random.default_rng(seed)
    levels = np.zeros((height, width, 3))
    for size, strength in ((3, 60), (6, 40), (12, 25), (24, 15)):
        small = Image.fromarray(random.integers(0, 256, (size, size, 3), dtype=np.uint8))
        levels += strength / 128 * (np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)) - 128.0)
    return Image.fromarray(np.clip(levels + 128, 0, 255).astype(np.uint8))


def part(picture: Image.Image, right: int = 0, down: int = 0) -> Image.Image:
    """Return the picture without a margin, moved by a number of pixels."""
    return picture.crop((5 + right, 5 + down, picture.width - 5 + right, picture.height - 5 + down))


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "right": lambda picture: part(picture, 4, 0),
    "up and left": lambda picture: part(picture, -2, -3),
    "darker": lambda picture: ImageEnhance.Brightness(part(picture)).enhance(0.6),
    "contrast": lambda picture: ImageEnhance.Contrast(part(picture)).enhance(1.4),
    "grey": lambda picture: part(picture).convert("L"),
    "saturated and shifted": lambda picture: ImageEnhance.Color(part(picture, 2, 3)).enhance(1.8),
    "with a border": lambda picture: _bordered(part(picture)),
}


def _bordered(picture: Image.Image) -> Image.Image:
    framed = Image.new("RGB", picture.size, "white")
    framed.paste(picture.crop((2, 1, picture.width - 2, picture.height - 1)), (2, 1))
    return framed


def seen(pictures: list[Image.Image]) -> tuple[np.ndarray, np.ndarray]:
    results = [look(np.asarray(picture.convert("RGB"))) for picture in pictures]
    return np.stack([one.thumbnails for one in results]), np.stack([one.details for one in results])


@pytest.fixture(scope="module")
def others() -> list[Image.Image]:
    return [part(scene(seed)) for seed in range(100, 220)]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_is_found_among_other_pictures(others: list[Image.Image], change: str) -> None:
    copies = [CHANGES[change](scene(seed)) for seed in range(6)]
    pictures = [*others, *(part(scene(seed)) for seed in range(6)), *copies]
    pairs = shifted_copies(*seen(pictures))
    assert pairs.tolist() == [[120 + seed, 126 + seed] for seed in range(6)]


def test_pictures_that_only_resemble_each_other_are_not_copies(others: list[Image.Image]) -> None:
    assert shifted_copies(*seen(others)).tolist() == []
    random = np.random.default_rng(0)
    drawings = []  # the same outline in each, of slightly different sizes, as in pictures of products
    for _ in range(60):
        left, top, right, bottom = random.integers((4, 2, 16, 19), (12, 9, 25, 28))
        drawing = np.zeros((28, 28, 3), np.uint8)
        drawing[top:bottom, left:right] = random.integers(120, 250)
        drawing[top + 3 : bottom - 3, left + 3 : left + 5] = random.integers(0, 100)
        drawings.append(Image.fromarray(drawing))
    thumbnails, details = seen(drawings)
    pairs = most_similar(thumbnails)
    correlation, _ = duplicates.detail_correlation(details, pairs)
    assert (correlation > duplicates.MATCH).mean() > 0.2
    assert len(shifted_copies(thumbnails, details)) <= 0.03 * len(pairs)


def test_small_objects_before_a_plain_background_are_not_copies() -> None:
    pictures = []
    for number in range(2):
        sky = np.full((32, 32, 3), 150 + 20 * number, np.uint8)
        sky[14:17, 14 + number : 18 + number] = 30
        pictures.append(Image.fromarray(sky))
    thumbnails, details = seen(pictures)
    correlation, busy = duplicates.detail_correlation(details, np.array([[0, 1]]))
    assert correlation[0] > 0.95 and busy[0] < 0.2
    assert shifted_copies(thumbnails, details).tolist() == []


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 700), kinds=st.integers(1, 30), noise=st.integers(1, 60))
def test_the_most_similar_are_those_that_comparing_all_finds(seed: int, count: int, kinds: int, noise: int) -> None:
    random = np.random.default_rng(seed)
    base = random.integers(60, 200, (kinds, 8, 8))[random.integers(0, kinds, count)]
    thumbnails = np.clip(base + random.integers(-noise, noise + 1, (count, 8, 8)), 0, 255).astype(np.uint8)
    flat = thumbnails.reshape(count, 64).astype(np.float64)
    flat -= flat.mean(axis=1, keepdims=True)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    similarity = flat @ flat.T
    np.fill_diagonal(similarity, -2)
    expected = set()
    for row in range(count):
        for other in np.argsort(-similarity[row])[:5].tolist():
            if other != row:
                expected.add((min(row, other), max(row, other)))
    found = set(map(tuple, most_similar(thumbnails, threads=1).tolist()))
    assert len(found ^ expected) <= 0.01 * len(expected), "ties and rounding alone"


def test_beyond_many_images_only_equal_pictures_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [np.asarray(part(scene(seed))) for seed in range(40)] + [np.asarray(CHANGES["right"](scene(3)))]
    splits = Splits(MemorySource(images, labels=[0, 1] * 20 + [1], classes=("x", "y")), None, None)
    report = check_data(splits)
    assert [finding.kind for finding in report.findings] == ["near-duplicates"] and report.notes == ()
    monkeypatch.setattr(look_module, "MOST_DETAILED", 40)
    report = check_data(splits)
    assert report.findings == ()
    assert report.notes == ("shifted and recoloured copies are searched among at most 100,000 images; use --sample",)
