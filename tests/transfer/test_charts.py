"""Tests of charts by reading their SVG: they show the given values, and names in them are text."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

from vitrail.report.charts import (
    MAX_DOTS,
    Bin,
    Chart,
    Series,
    confusion_matrix,
    line_chart,
    reliability_diagram,
    scatter_plot,
)
from vitrail.report.page import environment

AWKWARD = st.sampled_from([math.nan, math.inf, -math.inf])
EVIL = "</title><script>alert('1 & 2')</script>\u202e\x00"
SHOWN = "</title><script>alert('1 & 2')</script>\\u202e\\x00"


class Drawing:
    """A parsed SVG."""

    def __init__(self, text: str) -> None:
        self.root = ElementTree.fromstring(text)
        left, top, self.width, self.height = map(float, self.root.attrib["viewBox"].split())
        assert (left, top) == (0, 0)
        assert self.root.attrib["role"] == "img" and self.root.attrib["aria-label"]

    def all(self, tag: str, css: str = "") -> list[ElementTree.Element]:
        """Return the elements of a tag that have all of these style classes."""
        return [one for one in self.root.iter(tag) if {*css.split()} <= {*one.get("class", "").split()}]

    def texts(self) -> list[str]:
        return ["".join(one.itertext()) for one in self.all("text")]

    def path(self, css: str) -> list[list[tuple[float, float]]]:
        """Return the corners of a line, in a list for each part between gaps."""
        (element,) = self.all("path", css)
        pieces = element.attrib["d"].split("M")[1:]
        return [[tuple(map(float, corner.split())) for corner in piece.split("L")] for piece in pieces]  # type: ignore[misc]

    def dots(self, css: str) -> list[tuple[float, float, float]]:
        return [
            (float(one.attrib["cx"]), float(one.attrib["cy"]), float(one.attrib["r"]))
            for one in self.all("circle", css)
        ]

    def scale(self, anchor: str) -> tuple[float, float]:
        """Return the value at 0 pixels and the value of a pixel, from the first and the last label of an axis.

        Labels at the left end ("end") stand at their tick. Labels below have their middle at the tick ("middle").
        """
        found = []
        for text in self.all("text"):
            number = re.fullmatch(r"(-?[\d,.e+-]+)%?", "".join(text.itertext()))
            if number and text.get("text-anchor") == anchor and not text.get("class"):
                place = float(text.attrib["y"]) - 4 if anchor == "end" else float(text.attrib["x"])
                found.append((place, float(number[1].replace(",", ""))))
        (first, low), *_, (last, high) = found
        pixel = (high - low) / (last - first)
        return low - first * pixel, pixel


def values_of(drawing: Drawing, corners: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Convert pixels to values by the labels of the axes."""
    (left, across), (top, up) = drawing.scale("middle"), drawing.scale("end")
    return [(left + x * across, top + y * up) for x, y in corners]


@st.composite
def lines(draw: st.DrawFn) -> list[tuple[float, float]]:
    steps = sorted(draw(st.sets(st.integers(0, 500_000), min_size=1, max_size=60)))
    scale = draw(st.sampled_from([1e-6, 1.0, 100.0, 1e5]))
    values = st.floats(-1, 1, width=32).map(lambda value: value * scale) | AWKWARD
    return [(float(step), draw(values)) for step in steps]


@pytest.mark.slow
@settings(max_examples=25)
@given(lines(), lines() | st.none(), st.sampled_from(["", "%"]), st.booleans())
def test_lines_are_what_was_given(
    first: list[tuple[float, float]], second: list[tuple[float, float]] | None, unit: str, zero: bool
) -> None:
    series = [Series("a<b", first)] + ([] if second is None else [Series("c", second)])
    chart = line_chart(series, label="a & b", unit=unit, from_zero=zero)
    every = [point for one in series for point in one.finite]
    if not every:
        assert chart == ""
        return
    drawing = Drawing(chart)
    (_, across), (_, up) = drawing.scale("middle"), drawing.scale("end")
    for one, css in zip(series, ("one", "two"), strict=False):
        pieces = drawing.path(f"line {css}")
        expected = [
            list(group)
            for whole, group in itertools.groupby(one.points, key=lambda point: math.isfinite(point[1]))
            if whole
        ]
        assert [len(piece) for piece in pieces] == [len(piece) for piece in expected]
        for (x, y), (step, value) in zip(
            values_of(drawing, [*itertools.chain(*pieces)]), [*itertools.chain(*expected)], strict=True
        ):
            assert abs(x - step) <= 0.03 * abs(across) and abs(y - value) <= 0.03 * abs(up)
        alone = [piece for piece in expected if len(piece) == 1]
        few = len(one.finite) <= MAX_DOTS
        assert len(drawing.dots(f"dot {css}")) == (len(one.finite) if few else len(alone))


@pytest.mark.parametrize("step", [0, 1, 99, 100])
def test_a_mark_stands_at_its_point(step: int) -> None:
    points = [(float(at), 80 + at / 10) for at in range(101)]
    drawing = Drawing(line_chart([Series("x", points)], label="x", unit="%", mark=(points[step], "best, saved")))
    ((x, y, _),) = drawing.dots("dot")
    assert values_of(drawing, [(x, y)]) == [pytest.approx(points[step], abs=0.05)]
    assert "best, saved" in drawing.texts()
    ((line,),) = [element.attrib["d"].split("M")[1:] for element in drawing.all("path", "mark")]
    assert float(line.split()[0]) == x


def test_names_in_charts_are_text() -> None:
    chart = line_chart([Series(EVIL, [(0.0, 1.0), (1.0, 2.0)])], label=EVIL, mark=((1.0, 2.0), EVIL))
    drawing = Drawing(chart)
    assert drawing.root.attrib["aria-label"] == SHOWN and SHOWN in drawing.texts()
    assert f"{SHOWN}, step 1: 2" in [one.text for one in drawing.all("title")]
    parts = environment().get_template("report/parts.html").module
    assert "<script" not in chart and "<script" not in parts.chart(Chart("caption", Markup("svg"), (EVIL, EVIL)))


shares = st.floats(0, 1)
bins = st.lists(st.tuples(shares, shares, st.integers(1, 10**6), st.tuples(shares, shares)), min_size=1, max_size=15)


@given(bins, bins | st.none())
def test_a_reliability_diagram_has_a_dot_for_each_bin(before: list[Bin], after: list[Bin] | None) -> None:
    drawing = Drawing(reliability_diagram(before, after, label="x"))
    drawn = [("one", before)] if after is None else [("two", before), ("one", after)]
    assert len(drawing.dots("dot")) == len(before) + len(after or ())
    for css, filled in drawn:
        dots = drawing.dots(f"dot {css}")
        for value, (confidence, accuracy, *_) in zip(
            values_of(drawing, [dot[:2] for dot in dots]), filled, strict=True
        ):
            assert value == pytest.approx((100 * confidence, 100 * accuracy), abs=0.02)
        total = sum(images for _, _, images, _ in filled)
        for (_, _, radius), (_, _, images, _) in zip(dots, filled, strict=True):
            assert radius == 1.5 or math.isclose(radius**2 / 81, images / total, abs_tol=0.01)
    (ideal,) = drawing.path("ideal")
    assert values_of(drawing, ideal) == [pytest.approx((0, 0), abs=1e-6), pytest.approx((100, 100), abs=1e-6)]


def test_the_bins_of_a_reliability_diagram_have_intervals_and_are_not_joined() -> None:
    filled = [(0.25, 0.8, 10, (0.4, 0.9)), (0.5, 0.0, 1, (0.0, 0.7)), (1.0, 1.0, 10**6, (0.9, 1.0))]
    drawing = Drawing(reliability_diagram(filled, None, label="x"))
    (path,) = drawing.all("path", "line")
    found = re.findall(r"M([\d.]+) ([\d.]+)V([\d.]+)", path.attrib["d"])
    assert "".join(f"M{x} {low}V{high}" for x, low, high in found) == path.attrib["d"], "no line joins two bins"
    for (x, low, high), (confidence, _, _, ends) in zip(found, filled, strict=True):
        corners = values_of(drawing, [(float(x), float(low)), (float(x), float(high))])
        assert corners == [pytest.approx((100 * confidence, 100 * end), abs=0.03) for end in ends]


@st.composite
def matrices(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[str]]:
    classes = draw(st.integers(1, 24))
    places = draw(st.sets(st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1)), max_size=20))
    cells = [(*place, draw(st.integers(1, 10**6))) for place in sorted(places)]
    return cells, [
        draw(st.text(max_size=3)) + f"class {number} " + "漢字 long" * (number % 4) for number in range(classes)
    ]


@settings(max_examples=15)
@given(matrices())
def test_a_heat_map_has_each_count_in_its_place(made: tuple[list[tuple[int, int, int]], list[str]]) -> None:
    cells, names = made
    drawing = Drawing(confusion_matrix(cells, names, label="x"))
    assert drawing.width <= 990, "it fits the page"
    boxes = drawing.all("rect", "heat")
    assert len(boxes) == len(cells)
    (grid,) = drawing.all("path", "grid")
    horizontal, vertical = (
        [tuple(map(float, one)) for one in re.findall(rf"M([\d.]+) ([\d.]+){way}", grid.attrib["d"])] for way in "hv"
    )
    assert len(horizontal) == len(vertical) == len(names) + 1
    counts = drawing.all("text", "count")
    for (row, column, count), box, text in zip(cells, boxes, counts, strict=True):
        x, y, width, height = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert vertical[column][0] < x and x + width < vertical[column + 1][0]
        assert horizontal[row][1] < y and y + height < horizontal[row + 1][1]
        share = count / sum(other for at, _, other in cells if at == row)
        strength = float(box.attrib["fill-opacity"])
        assert strength == pytest.approx(0.05 + 0.95 * share, abs=1e-3)
        assert text.text == (f"{count:,}" if count < 10_000 else f"{count / 1000:.0f}k")


def test_a_heat_map_names_rows_and_columns() -> None:
    names = ["rose", "a very long name of a tulip", EVIL]
    drawing = Drawing(confusion_matrix([(0, 1, 3), (0, 0, 1), (2, 2, 5)], names, label="x"))
    labels = [one for one in drawing.all("text") if one.find("title") is not None]
    rows, columns = labels[::2], labels[1::2]
    assert [one.findtext("title") for one in rows] == [*names[:2], SHOWN]
    assert [float(one.attrib["y"]) for one in rows] == sorted(float(one.attrib["y"]) for one in rows)
    assert [float(one.attrib["x"]) for one in columns] == sorted(float(one.attrib["x"]) for one in columns)
    assert [one.findtext("title") for one in drawing.all("g")][:2] == [
        "rose → a very long name of a tulip: 3 of 4 (75.0%)", "rose → rose: 1 of 4 (25.0%)",
    ]  # fmt: skip


@given(
    st.lists(
        st.tuples(*[st.sampled_from([1e-7, 1.0, 3e4, 2e9]).flatmap(lambda most: st.floats(-most, most))] * 2),
        min_size=1,
        max_size=30,
    )
)
def test_a_scatter_plot_has_a_dot_for_each_sample(points: list[tuple[float, float]]) -> None:
    titles = [f"{EVIL} {number}" for number in range(len(points))]
    drawing = Drawing(scatter_plot(points, titles, label="x"))
    dots = drawing.dots("dot sample")
    (_, pixel), (_, vertical) = drawing.scale("middle"), drawing.scale("end")
    assert pixel == pytest.approx(-vertical, rel=1e-3), "both axes have one scale"
    for (x, y), (true, predicted) in zip(values_of(drawing, [dot[:2] for dot in dots]), points, strict=True):
        assert abs(x - true) <= 0.05 * pixel and abs(y - predicted) <= 0.05 * pixel
    ((start, end),) = drawing.path("ideal")
    assert end[0] - start[0] == pytest.approx(start[1] - end[1], abs=0.02), "the diagonal is at 45 degrees"
    assert [title.text for title in drawing.all("title")][-1] == f"{SHOWN} {len(points) - 1}"
