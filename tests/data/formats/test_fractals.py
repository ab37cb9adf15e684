"""Tests of fractals: equal pictures on every machine, similar within a class, different between classes, never
empty."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.make import targets_of
from vitrail.data.formats import fractals
from vitrail.data.formats.fractals import FractalSource, dots_of, open_fractals, system_of
from vitrail.data.source import subset
from vitrail.errors import DataError
from vitrail.testing import check_source

MOST = 2**31 - 1


def pictures(source: FractalSource) -> np.ndarray:
    return np.stack([source[index].image[..., 0] for index in range(len(source))])


def hash_of(source: FractalSource) -> str:
    return hashlib.sha256(pictures(source).tobytes()).hexdigest()


def test_samples_of_classes_take_turns() -> None:
    source = FractalSource(5, 3, size=8)
    assert len(source) == 15 and source.classes == tuple(f"fractal-000{number}" for number in range(5))
    assert targets_of(source) == [0, 1, 2, 3, 4] * 3
    assert [source.key(index) for index in (0, 4, 5, 14)] == [
        "fractal-0000/0", "fractal-0004/0", "fractal-0000/1", "fractal-0004/2",
    ]  # fmt: skip
    assert subset(source, [7])[0].key == "fractal-0002/1"
    with pytest.raises(IndexError, match="sample 15 of 15"):
        source.target(15)
    with pytest.raises(IndexError, match="sample -1 of 15"):
        source.key(-1)


def test_more_classes_or_samples_add_to_the_same_pictures() -> None:
    small, large = FractalSource(3, 2, seed=4, size=16), FractalSource(7, 5, seed=4, size=16)
    for index in range(len(small)):
        sample, number = divmod(index, 3)
        np.testing.assert_array_equal(small[index].image, large[sample * 7 + number].image)


def test_keys_and_labels_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fractals, "dots_of", None)
    source = FractalSource(1_000_000, 1000)
    assert len(source) == 10**9
    assert (source.key(10**9 - 1), source.target(10**9 - 1)) == ("fractal-999999/999", 999_999)
    assert "classes" not in vars(source)
    with pytest.raises(TypeError):
        source[10**9 - 1]


@pytest.mark.parametrize(("size", "expected"), [(32, "e9fab920157cbe84"), (224, "ccffe2c4a3596231")])
def test_pictures_are_the_same_on_every_machine(size: int, expected: str) -> None:
    source = FractalSource(4, 3, 7, size=size)
    last = source[11].image
    assert hash_of(source).startswith(expected)
    np.testing.assert_array_equal(source[11].image, last)


def test_colours_are_the_same_on_every_machine() -> None:
    grey, coloured = FractalSource(4, 3, 7, size=32), FractalSource(4, 3, 7, size=32, colour=True)
    for source in (grey, coloured):
        check_source(source)
    found = np.stack([coloured[index].image for index in range(12)])
    assert hashlib.sha256(found.tobytes()).hexdigest().startswith("1437cb4664205245")
    assert grey.identity != coloured.identity and grey.origin(0) != coloured.origin(0)
    later = coloured.held_out(0.25)[0]
    assert later.key == "fractal-0000/3" and later.image.shape == (32, 32, 3)


@settings(max_examples=15)
@given(size=st.integers(1, 45), seed=st.integers(0, 2**32 - 1))
def test_any_size_is_grey_or_in_colour_and_is_not_empty(size: int, seed: int) -> None:
    for colour in (False, True):
        image = FractalSource(2, 1, seed, size=size, colour=colour)[1].image
        assert image.dtype == np.uint8 and image.shape == (size, size, 3 if colour else 1)
        assert image.flags.c_contiguous and (colour or 5 < image.mean() < 200)


def test_points_are_those_of_a_walk() -> None:
    """The reference maps one point at a time, with a map that is drawn at random for each step."""
    system, side = system_of(0, 1), 64
    random = np.random.default_rng(0)
    x, walk = np.zeros(2), []
    for letter in random.choice(len(system.probabilities), 40_000, p=system.probabilities):
        a, b, c, d, e, f = system.maps[:, letter]
        x = np.array([a * x[0] + b * x[1] + e, c * x[0] + d * x[1] + f])
        walk.append(x)
    points = np.array(walk[100:])
    places = ((points - points.min(0)) / np.ptp(points, 0) * (side - 3)).astype(int)
    walked = np.zeros((side, side), bool)
    walked[places[:, 1], places[:, 0]] = True
    found = dots_of(system, side, 200, "walk")
    for some, others in ((found, walked), (walked, found)):  # within a pixel: the two differ in where the edges are
        wide = np.pad(others, 1)
        near = np.any([wide[y : y + side, x : x + side] for y in range(3) for x in range(3)], axis=0)
        assert near[some].mean() > 0.95


def test_where_no_system_fills_enough_the_fullest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fractals, "SMALLEST_FILLING", 0.9)
    monkeypatch.setattr(fractals, "ATTEMPTS", 12)
    system_of.cache_clear()
    try:
        fullest = system_of(0, 0)
        assert dots_of(fullest, 128, 128, "again").mean() > 0.25
    finally:
        system_of.cache_clear()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("fractals:10:5", (10, 5, 0, 224)), ("fractals:10:5:3", (10, 5, 3, 224)),
        ("fractals:10:5:3:64", (10, 5, 3, 64)), ("fractals:1000000:1000", (1_000_000, 1000, 0, 224)),
        ("fractals:2:1073741823", (2, 1_073_741_823, 0, 224)),
        (f"fractals:2:1:{2**32 - 1}:1024", (2, 1, 2**32 - 1, 1024)), ("fractals:10:5:3:64:colour", (10, 5, 3, 64)),
    ],
)  # fmt: skip
def test_specs_are_read(spec: str, expected: tuple[int, ...]) -> None:
    source = open_fractals(spec)
    assert (source.count, source.samples, source.seed, source.size) == expected
    assert source.colour == source.identity.endswith(":0:colour") == spec.endswith("colour")


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("fractals:1:5", "classes=1 is not from 2 to 2,147,483,647"),
        ("fractals:2:0", "samples=0 is not from 1 to 2,147,483,647"),
        ("fractals:2:1073741824", "2,147,483,648 images; the maximum is 2,147,483,647"),
        ("fractals:99999999999:1", "classes=99999999999 is not from 2"),
        ("fractals:2:1:4294967296", "seed=4294967296 is not from 0 to 4,294,967,295"),
        ("fractals:2:1:0:0", "size=0 is not from 1 to 1,024"),
        ("fractals:2:1:0:1025", "size=1025 is not from 1 to 1,024"),
        *((bad, "is not fractals:CLASSES:SAMPLES") for bad in (
            "fractals", "fractals:", "fractals:2", "fractals:2:", "fractals:2:1:", "fractals:2:1:0:8:9", "fractals:a:1",
            "fractals:2:1:-1", "fractals:-2:1", "fractals:2.0:1", "fractals:2:1e3", "fractals: 2:1", "fractals:2:1\n",
            "fractals:2:1:0:colour", "fractals:2:1:0:8:color", "fractals:2:1:0:8:colour:1",
            "fractals:1_0:1", "fractals:٣:1", "Fractals:2:1", f"fractals:2:{'9' * 5000}",
        )),
    ],
)  # fmt: skip
def test_bad_specs_are_refused_with_value_rule_and_example(spec: str, rule: str) -> None:
    with pytest.raises(DataError) as caught:
        open_fractals(spec)
    message = str(caught.value)
    assert repr(spec) in message and rule in message and "fractals:1000:100" in message
