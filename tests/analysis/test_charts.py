"""Tests of charts: values can be read back from the pictures."""

from __future__ import annotations

import io
import math
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from vitrail.analysis.charts import heat_map, mosaic, png, series_chart, standalone
from vitrail.report.charts import Series

SVG = "{http://www.w3.org/2000/svg}"


def parsed(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(standalone(chart))


def test_gaps_and_nothing() -> None:
    chart = series_chart([Series("a", [(0.0, 1.0), (1.0, math.nan), (2.0, 3.0)])], label="", x_name="x", y_name="y")
    assert chart.count("<circle") == 2 and "legend" not in chart
    assert series_chart([Series("a", [(0.0, math.nan)])], label="", x_name="x", y_name="y") == ""
    assert series_chart([], label="", x_name="x", y_name="y", lines=False) == ""


def test_scatter_plot_has_a_dot_per_point_and_groups_that_share_a_colour_differ() -> None:
    groups = [Series("heads & more", [(0.0, 5.0), (1.0, math.inf)]), Series("field", [(1.0, 2.0)])]
    root = parsed(series_chart(groups, label="Dots.", x_name="layer", y_name="pixels", lines=False))
    titles = [one[0].text for one in root.iter(f"{SVG}circle") if len(one)]
    assert titles == ["heads & more: 0, 5", "field: 1, 2"]
    classes = [Series(f"class {at}", [(float(at), 1.0)]) for at in range(10)]
    many = series_chart(classes, label="x", x_name="x", y_name="y", lines=False)
    looks = re.findall(r'class="(dot[ a-z]*)" (?:fill|color)="([^"]*)"', many)
    assert len(set(looks)) == 10


def test_heat_map_colours_tell_the_values() -> None:
    values = np.array([[0.0, 0.25, 1.0], [0.5, math.nan, 0.75]])
    names: dict[str, Any] = {"row_name": "layer", "column_name": "head", "unit": "CKA", "rows": "ab", "columns": "cde"}
    root = parsed(heat_map(values, label="Map.", **names, bounds=(0.0, 1.0)))
    cells = {one[0].text: one.get("fill") for one in root.iter(f"{SVG}rect") if len(one)}
    assert len(cells) == 5
    assert cells["layer a, head c: 0 CKA"] == "#440154" and cells["layer a, head e: 1 CKA"] == "#fde725"
    texts = [one.text for one in root.iter(f"{SVG}text")]
    assert {"a", "b", "c", "d", "e", "CKA", "layer", "head", "0.0", "1.0"} <= {*texts}
    constant = heat_map(np.full((2, 3), 2.0), label="", **names)
    assert float(parsed(constant).get("width", "")) == pytest.approx(float(root.get("width", "")), abs=60)


def test_mosaic_places_pictures_in_rows() -> None:
    pictures = np.arange(3)[:, None, None, None] * np.full((3, 2, 3, 1), 0.4)
    found = mosaic(pictures, 2, scale=2, gap=1)
    assert found.shape == (9, 13, 3)
    assert (found[:4, :6] == 0).all() and (found[:4, 7:] == 102).all() and (found[5:, :6] == 204).all()
    assert (found[4] == 255).all() and (found[5:, 6:] == 255).all()
    with Image.open(io.BytesIO(png(found))) as picture:
        assert np.array_equal(np.asarray(picture), found)
    assert mosaic(np.zeros((1, 2, 2, 3)), 5).shape == (2, 2, 3)
