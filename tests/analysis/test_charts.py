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

from vitrail.analysis.charts import heat_map, mosaic, png, scatter, series_chart, series_look, standalone
from vitrail.report.charts import Series

SVG = "{http://www.w3.org/2000/svg}"


def parsed(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(standalone(chart))


def test_gaps_and_nothing() -> None:
    chart = series_chart([Series("a", [(0.0, 1.0), (1.0, math.nan), (2.0, 3.0)])], label="", x_name="x", y_name="y")
    assert chart.count("<circle") == 2 and "legend" not in chart
    points = [(float(x), math.nan if x in (50, 52) else 1.0) for x in range(100)]
    assert series_chart([Series("a", points)], label="", x_name="x", y_name="y").count("<circle") == 1
    assert series_chart([Series("a", [(0.0, math.nan)])], label="", x_name="x", y_name="y") == ""
    assert scatter({}, label="", x_name="x", y_name="y") == ""


def test_scatter_has_a_dot_per_point_and_groups_that_share_a_colour_differ() -> None:
    groups = {"heads & more": [(0.0, 5.0), (1.0, math.inf)], "field": [(1.0, 2.0)]}
    root = parsed(scatter(groups, label="Dots.", x_name="layer", y_name="pixels"))
    titles = [one[0].text for one in root.iter(f"{SVG}circle") if len(one)]
    assert titles == ["heads & more: 0, 5", "field: 1, 2"]
    many = scatter({f"class {at}": [(float(at), 1.0)] for at in range(10)}, label="x", x_name="x", y_name="y")
    looks = re.findall(r'class="(dot[ a-z]*)" (?:fill|color)="([^"]*)"', many)
    assert len(set(looks)) == 10
    lines = [series_look(number) for number in range(32)]
    assert len(set(lines)) == 32 and len({dashes for _, dashes in lines[:4]}) == 4, "also without colours"


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


def test_long_names_stay_inside_the_picture() -> None:
    names = [f"{'long ' * 20}{end}" for end in ("one", "two")]
    chart = parsed(scatter({name: [(0.0, 1.0)] for name in names}, label="", x_name="x", y_name="y"))
    texts = {text: one for one in chart.iter(f"{SVG}text") if (text := one.text or "")[:4] == "long"}
    assert {text[-3:] for text in texts} == {"one", "two"}
    assert all(float(one.get("x", "")) + 7 * len(text) <= 480 for text, one in texts.items())
    wide = parsed(scatter({"黒い花の絵の題": [(0.0, 1.0)], "b": [(0.0, 1.0)]}, label="", x_name="x", y_name="y"))
    first, second = (float(one.get("x", "")) for one in wide.iter(f"{SVG}text") if one.text in ("黒い花の絵の題", "b"))
    assert second - first > 7 * 14
    both = {"row_name": names[0], "column_name": names[1], "unit": "", "rows": "a", "columns": "b"}
    root = parsed(heat_map(np.ones((1, 1)), label="", **both))
    (across, down) = (one for one in root.iter(f"{SVG}text") if (one.text or "")[:4] == "long")
    for one, axis, size in ((across, "x", "width"), (down, "y", "height")):
        half = 3.5 * len(one.text or "")
        assert half - 1 <= float(one.get(axis, "")) <= float(root.get(size, "")) - half + 1


def test_mosaic_places_pictures_in_rows() -> None:
    pictures = np.arange(3)[:, None, None, None] * np.full((3, 2, 3, 1), 0.4)
    found = mosaic(pictures, 2, scale=2, gap=1)
    assert found.shape == (9, 13, 3)
    assert (found[:4, :6] == 0).all() and (found[:4, 7:] == 102).all() and (found[5:, :6] == 204).all()
    assert (found[4] == 255).all() and (found[5:, 6:] == 255).all()
    with Image.open(io.BytesIO(png(found))) as picture:
        assert np.array_equal(np.asarray(picture), found)
    assert mosaic(np.zeros((1, 2, 2, 3)), 5).shape == (2, 2, 3)
