"""Tests of the figures of studies."""

from __future__ import annotations

from xml.etree import ElementTree

from tests.studies.measured import measured, results_of
from vitrail.analysis.charts import standalone
from vitrail.studies.claims import Results
from vitrail.studies.page import arms_chart, lines_chart


def titles(chart: str) -> list[str]:
    root = ElementTree.fromstring(standalone(chart))
    return [element.text or "" for element in root.iter() if element.tag.endswith("title")]


def test_every_seed_and_mean_is_a_dot() -> None:
    chart = arms_chart(
        results_of({"one <arm>": (0.5, 0.52, 0.54), "two": (0.7, None), "gone": (None,)}), "accuracy", "top-1"
    )
    assert titles(chart) == [
        "one <arm>, seed 0: 50.00%", "one <arm>, seed 1: 52.00%", "one <arm>, seed 2: 54.00%",
        "one <arm>: mean 52.00%, 95 % interval 47.03% to 56.97% (3 seeds)",
        "two, seed 0: 70.00%", "two: 70.00% with one seed",
    ]  # fmt: skip
    assert ">diverged<" in chart and ">top-1<" in chart


def test_lines_are_in_the_order_of_x() -> None:
    points = [
        measured("vit", (0.8, 0.82), x=900.0, label="900"), measured("vit", (0.5, 0.5), x=90.0, label="90"),
        measured("bit", (0.6,), x=90.0, label="90"),
    ]  # fmt: skip
    chart = lines_chart(Results(points), "accuracy", "accuracy", "training images")
    assert titles(chart) == [
        "vit at 90: mean 50.00%, 95 % interval 50.00% to 50.00% (2 seeds)",
        "vit at 900: mean 81.00%, 95 % interval 68.29% to 93.71% (2 seeds)",
        "bit at 90: 60.00% with one seed",
    ]  # fmt: skip
    assert ">training images<" in chart and ">100<" in chart and ">500<" in chart


def test_without_a_finished_point_there_is_no_figure() -> None:
    results = Results([measured("a", (None,), x=10.0, label="10")])
    assert lines_chart(results, "accuracy", "accuracy", "images") == "" == arms_chart(results, "accuracy", "accuracy")


def test_no_two_lines_look_the_same() -> None:
    points = [measured(f"arm {number}", (0.5,), x=10.0, label="10") for number in range(12)]
    root = ElementTree.fromstring(standalone(lines_chart(Results(points), "accuracy", "accuracy", "images")))
    lines = [element.attrib for element in root.iter() if element.get("class") == "series"]
    looks = [(line["stroke"], line.get("stroke-dasharray")) for line in lines]
    assert looks[:12] == looks[12:] and len(set(looks)) == 12  # the lines, and those of the legend
