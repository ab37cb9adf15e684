"""Tests of the interactive page as a file: its policy, its data and its size."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable

import numpy as np
import pytest

from tests.analysis.pages.interactive.conftest import coded, unpack
from vitrail.analysis.pages.interactive import AttentionMaps, PackedMaps, make_page, script_text

MAX_BYTES = 5_000_000
MakeMaps = Callable[..., AttentionMaps]
PICTURE = np.random.default_rng(1).integers(0, 255, (30, 50, 3), dtype=np.uint8)


def element(text: str, name: str) -> str:
    found = re.search(rf'<script type="[a-z/]+" id="{name}">(.*?)</script>', text, re.DOTALL)
    return found[1]


def packed_in(text: str) -> PackedMaps:
    about = json.loads(element(text, "about"))
    data = base64.b64decode(element(text, "weights"), validate=True)
    return PackedMaps(tuple(about["layers"]), tuple(about["heads"]), about["bits"], data)


def test_the_page_contains_the_numbers(make_maps: MakeMaps) -> None:
    maps = make_maps()
    page, lacking = make_page(maps, PICTURE, title="a & b.jpg", predictions=[("<rose>", "9.1%")], max_bytes=MAX_BYTES)
    assert lacking == ()
    about = json.loads(element(page, "about"))
    assert (about["name"], about["grid"], about["layers"], about["heads"]) == ("a & b", [3, 5], [0, 1], [0, 1, 2])
    assert about["picture"] == [50, 30] and about["area"] == [5, 3, 40, 24]
    np.testing.assert_allclose(about["rollout"], maps.rollout.ravel(), rtol=1e-5)
    assert [one["label"] for one in about["relevance"]] == ["</script>a & b", "cat"]
    np.testing.assert_allclose(about["relevance"][1]["values"], maps.relevance[1][1].ravel(), rtol=1e-5)
    np.testing.assert_array_equal(unpack(packed_in(page), 18), coded(maps.attention))
    assert "<h1>a &amp; b.jpg</h1>" in page and "<li><bdi>&lt;rose&gt;</bdi> <b>9.1%</b></li>" in page


def test_nothing_is_requested_and_only_the_own_script_runs(make_maps: MakeMaps) -> None:
    text = make_page(make_maps(), PICTURE, title="x", max_bytes=MAX_BYTES)[0]
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.split(" ", 1) for rule in found[1].split("; "))
    assert set(rules) == {"default-src", "img-src", "style-src", "script-src", "base-uri", "form-action"}
    assert rules["default-src"] == "'none'" and rules["img-src"] == "data:"
    for name, tag in (("style-src", "style"), ("script-src", "script")):
        (own,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert rules[name] == f"'sha256-{base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()}'"
    rest = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.findall(r"https?:|@import|url\(|fetch\(|\son\w+=|\sstyle=|innerHTML|eval\(", rest)
    assert found.start() < text.index("<style>")


def test_the_script_is_small_and_whole() -> None:
    script = script_text()
    assert len(script.encode()) <= 30_000
    # The page omits comments that begin a line with //, so the script must have no others.
    assert not re.findall(r"^(?:\*|/\*)", script, re.MULTILINE) and "</script" not in script


def test_a_large_picture_is_embedded_smaller(make_maps: MakeMaps) -> None:
    picture = np.zeros((600, 2048, 3), np.uint8)
    text = make_page(make_maps(area=(1024.0, 300.0, 512.0, 300.0)), picture, title="x", max_bytes=MAX_BYTES)[0]
    about = json.loads(element(text, "about"))
    assert about["picture"] == [1024, 300] and about["area"] == [512, 150, 256, 150]
    assert element(text, "picture").startswith("data:image/jpeg;base64,")


def test_a_page_that_would_be_too_large_says_what_it_lacks(make_maps: MakeMaps) -> None:
    maps = make_maps(layers=6, heads=2, grid=(9, 9), prefix=("class token",))
    rest = len(make_page(maps, PICTURE, title="x", max_bytes=0)[0].encode())
    whole = (0, 1, 2, 3, 4, 5)
    for room, layers, notes in (
        (200_000, whole, ()), (75_000, whole, ("bits per weight instead of 8",)),
        (40_000, (0, 3, 5), ("4 bits per weight instead of 8", "The page has 3 layers of 6 (0, 3, 5)")),
        (14_000, (5,), ("4 bits per weight instead of 8", "The page has 1 layer of 6 (5)")),
        (2_500, (), ("The page has no attention of heads, because one map of 82 tokens exceeds",)),
    ):  # fmt: skip
        page, lacking = make_page(maps, PICTURE, title="x", max_bytes=rest + room)
        assert len(page.encode()) <= rest + room
        assert tuple(json.loads(element(page, "about"))["layers"]) == layers and len(lacking) == len(notes)
        for note, words in zip(lacking, notes, strict=True):
            assert words in note and f"limit of {(rest + room) / 1e6:g} MB (--page-size)" in note
            assert note.replace("&", "&amp;") in page


@pytest.mark.slow
def test_a_page_of_a_vit_b16_takes_at_most_5_mb(make_maps: MakeMaps) -> None:
    """Random weights of all scales are harder to compress than those of trained models."""
    maps = make_maps(layers=12, heads=12, grid=(14, 14), prefix=("class token",), area=(0.0, 0.0, 1024.0, 768.0))
    picture = np.random.default_rng(0).integers(0, 255, (768, 1024, 3), dtype=np.uint8)  # JPEG's worst case
    page, lacking = make_page(maps, picture, title="x", max_bytes=MAX_BYTES)
    packed = packed_in(page)
    assert len(page.encode()) <= 5_000_000
    assert (len(packed.layers), len(packed.heads)) == (12, 12) and packed.bits < 8
    assert lacking == (
        f"Attention has {packed.bits} bits per weight instead of 8 because of the limit of 5 MB (--page-size).",
    )
