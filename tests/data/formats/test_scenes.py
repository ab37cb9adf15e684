"""Tests of drawn scenes: sentences that fit the pictures, held-out combinations, and wrong names."""

from __future__ import annotations

import numpy as np
import pytest

from vitrail.data.formats.scenes import COLOURS, KNOWN, NEW, SHAPES, SceneSource
from vitrail.data.sources import open_data
from vitrail.errors import DataError
from vitrail.testing import check_source


@pytest.mark.slow
def test_combinations_of_the_test_split_are_new() -> None:
    assert len(KNOWN) + len(NEW) == len(COLOURS) * len(SHAPES)
    assert {colour for colour, _ in KNOWN} == set(range(len(COLOURS))) == {colour for colour, _ in NEW}
    assert {shape for _, shape in KNOWN} == set(range(len(SHAPES))) == {shape for _, shape in NEW}
    opened = open_data("scenes:60:3:24", validation_share=0.25)
    assert (len(opened.train), len(opened.validation), len(opened.test)) == (60, 20, 60)
    check_source(opened.train)
    known = {text for index in range(60) for text in opened.train.target(index)}
    assert known.isdisjoint(text for index in range(60) for text in opened.test.target(index))
    source = SceneSource(60, 3, new=True)
    pairs = [[(group.colour, group.shape) for group in source.groups(index)] for index in range(60)]
    assert all(first in NEW and second in KNOWN for first, second in pairs)


def test_sentences_describe_the_pictures() -> None:
    source = SceneSource(40, size=64)
    for index in range(len(source)):
        pixels, groups = source[index].image, source.groups(index)
        assert isinstance(pixels, np.ndarray) and groups[0].place != groups[1].place
        for group in groups:
            top, left = 32 * (group.place // 2), 32 * (group.place % 2)
            quarter = pixels[top : top + 32, left : left + 32].astype(float)
            colour = np.array([*COLOURS.values()][group.colour])
            cells = [cell for half in np.split(quarter, 2) for cell in np.split(half, 2, 1)]
            assert sum(np.ptp(cell, axis=(0, 1)).max() > 60 for cell in cells) == group.number + 1
            shade = quarter[(abs(quarter - pixels[0, 0]).max(axis=2) > 0)].max(axis=0)
            assert (abs(shade / colour - shade[0] / colour[0]) < 0.05).all()
            assert group.text in source.target(index)[0]
    assert source.target(0) != source.target(1)
    assert (SceneSource(5, 1)[2].image != SceneSource(5, 2)[2].image).any()


@pytest.mark.parametrize("spec", ["scenes:", "scenes:x", "scenes:0", "scenes:5:1:8", "scenes:5:1:32:9"])
def test_wrong_names_are_refused(spec: str) -> None:
    with pytest.raises(DataError, match="scenes:10000"):
        open_data(spec, validation_share=0.0)
