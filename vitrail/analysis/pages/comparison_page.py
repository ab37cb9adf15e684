"""The page, figures and tables of a comparison of two models."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitrail.analysis import charts
from vitrail.analysis.charts import heat_map, series_chart, standalone
from vitrail.analysis.comparison import Disagreement, Measured, ModelComparison
from vitrail.analysis.heads import HeadStatistic
from vitrail.analysis.images import overlay
from vitrail.analysis.pages.figure import NARROW, STYLE, captioned, figure, skipped_part
from vitrail.analysis.samples import Answer
from vitrail.errors import plural
from vitrail.evaluation.metrics.intervals import LEVEL
from vitrail.evaluation.metrics.report import NamedMetric, named_metrics
from vitrail.files import write_json
from vitrail.report.charts import Series
from vitrail.report.page import document, escape, table
from vitrail.settings import to_plain

COMPARISON_FILES = ("compare.html", "compare.json", "classes.csv", "similarity.svg", "distance.svg")
"""Files of a comparison."""

SIGNIFICANT = 0.05
"""Largest p-value with which the verdict names a more accurate model."""

COSTS = (("parameters, millions", "parameters", 1e6), ("multiply-accumulates per image, millions", "macs", 1e6))
"""Name, key and unit of each row of the costs."""

MAX_CLASSES = 20
"""Maximum number of classes on the page. classes.csv has all of them."""


def write_comparison(found: ModelComparison, folder: Path) -> None:
    """Write `FILES` into a folder."""
    drawn = {"similarity.svg": _similarity(found), "distance.svg": _distances(found)}
    for name, chart in drawn.items():
        (folder / name).write_text(standalone(chart), encoding="utf-8")
    page = document(_title(found), _parts(found, drawn), style=STYLE + charts.STYLE + NARROW)
    (folder / "compare.html").write_text(page, encoding="utf-8")
    write_json(folder / "compare.json", comparison_as_plain(found))
    (folder / "classes.csv").write_text(_classes_csv(found), encoding="utf-8")


def verdict(found: ModelComparison) -> str:
    """Return a sentence that names the more accurate model, or states that the images do not show a difference."""
    first, second = found.models
    paired, images = found.paired, plural(found.paired.images, "image")
    better, worse, sign = (first, second, 1) if paired.difference.value >= 0 else (second, first, -1)
    ends = [100 * sign * end for end in (paired.difference.low, paired.difference.high) if end is not None]
    between = f", {LEVEL:.0%} interval {min(ends):+z.2f} to {max(ends):+z.2f}" if ends else ""
    chance = "p < 0.001" if paired.p < 0.001 else f"p = {paired.p:.3f}"
    size = f"{100 * sign * paired.difference.value:+z.2f} points{between}, {chance}"
    if paired.p > SIGNIFICANT:
        return f"{images} do not show that {better.name} or {worse.name} is more accurate ({size})."
    return f"{better.name} is more accurate than {worse.name} on {images} ({size})."


def comparison_as_plain(found: ModelComparison) -> dict[str, Any]:
    """Return all numbers of a comparison as JSON values."""
    similarity = found.similarity
    return {
        "models": [
            {"name": one.name}
            | {each.name: to_plain(each.metric) for each in named_metrics(one.report)}
            | _cost(one)
            | {"distance": {"unit": one.reach.unit, "name": one.reach.name, "layers": dict(one.distances)}}
            for one in found.models
        ],
        "paired": to_plain(found.paired),
        "verdict": verdict(found),
        "images_for_layers": found.looked_at,
        "similarity": {
            "name": similarity.name,
            "rows": list(similarity.rows),
            "columns": list(similarity.columns),
            "values": similarity.as_lists(),
        },
        "disagreements": [
            {
                "key": one.key,
                "label": one.label,
                "predicted": [answer.label for answer in one.answers],
                "probability": [answer.probability for answer in one.answers],
            }
            for one in found.disagreements
        ],
        "skipped": [to_plain(item) for item in found.skipped],
    }


def _title(found: ModelComparison) -> str:
    return f"{found.models[0].name} and {found.models[1].name} compared"


def _parts(found: ModelComparison, drawn: dict[str, str]) -> Iterator[str]:
    first, second = found.models
    paired = found.paired
    yield f"<p><strong>{escape(verdict(found))}</strong></p>"
    yield '<p class="dim">p is from McNemar\'s exact test on the images where one model alone is right.</p>'
    yield table(("", first.name, second.name), _rows(found))
    yield from skipped_part(found.skipped)
    yield table(
        ("right are", "images", ""),
        [
            (name, f"{count:,}", f"{count / paired.images:.1%}")
            for name, count in (
                ("both models", paired.both),
                (f"only {first.name}", paired.only_first),
                (f"only {second.name}", paired.only_second),
                ("neither model", paired.neither),
            )
        ],
    )
    yield "<h2>Layers</h2>"
    yield '<div class="beside">'
    yield captioned(
        drawn["similarity.svg"],
        f"Similarity of the features of every two layers (CKA, unbiased, {plural(found.looked_at, 'image')}): 1 for "
        "features that are equal up to a rotation, 0 for unrelated ones.",
    )
    reaches = " ".join(f"{one.name}: {one.reach.name}, mean over {_over(one)}." for one in found.models)
    yield captioned(drawn["distance.svg"], f"Distance over which each layer mixes information. {reaches}")
    yield "</div>"
    classes = found.classes[:MAX_CLASSES]
    yield "<h2>Classes, largest difference first</h2>"
    yield table(
        ("class", "images", first.name, second.name, "difference, points"),
        [
            (name, f"{images:,}", f"{one:.1%}", f"{other:.1%}", f"{100 * (one - other):+z.1f}")
            for name, images, one, other in classes
        ],
    )
    if found.disagreements:
        yield "<h2>Images on which one model is right</h2>"
        yield (
            "<p>The images for which both answers are most certain. Colours show which parts support a model's "
            "answer, from dark (least) to bright (most). A ResNet has no attention, so its pictures are plain.</p>"
        )
        for one in found.disagreements:
            yield from _disagreement(found, one)


def _disagreement(found: ModelComparison, one: Disagreement) -> Iterator[str]:
    yield '<div class="maps">'
    yield figure(one.picture, f"{one.label} ({one.key})")
    for model, answer in zip(found.models, one.answers, strict=True):
        picture = one.picture if answer.relevance is None else overlay(one.picture, answer.relevance)
        yield figure(picture, f"{model.name}: {_answer(answer, one.label)}")
    yield "</div>"


def _answer(answer: Answer, label: str) -> str:
    judged = "right" if answer.label == label else "wrong"
    return f"{answer.label}, {answer.probability:.1%} ({judged})"


def _rows(found: ModelComparison) -> list[tuple[str, str, str]]:
    """Return the table of metrics and cost."""
    rows = [
        (one.name, _text(one), _text(other))
        for one, other in zip(*(named_metrics(each.report) for each in found.models), strict=True)
    ]
    one, other = (_cost(each) for each in found.models)
    for name, field, scale in COSTS:
        rows.append((name, f"{one[field] / scale:,.2f}", f"{other[field] / scale:,.2f}"))
    sizes = [" x ".join(map(str, cost["image_size"])) for cost in (one, other)]
    return [*rows, ("image size, pixels", sizes[0], sizes[1])]


def _text(one: NamedMetric) -> str:
    return f"{one.value} ({one.interval})" if one.interval else one.value


def _cost(one: Measured) -> dict[str, Any]:
    config = one.bundle.network.config
    size = one.bundle.preprocess.image_size
    return {"image_size": list(size), "parameters": config.parameters(), "macs": config.macs(size)}


def _over(one: Measured) -> str:
    return f"heads and {one.reach.images} images" if isinstance(one.reach, HeadStatistic) else "images"


def _similarity(found: ModelComparison) -> str:
    similarity = found.similarity
    first, second = (one.name for one in found.models)
    return heat_map(
        similarity.values,
        label=f"Centred kernel alignment of the layers of {first} with those of {second}.",
        row_name=f"layer of {first}",
        column_name=f"layer of {second}",
        unit=similarity.unit,
        rows=[str(layer) for layer in similarity.rows],
        columns=[str(layer) for layer in similarity.columns],
        bounds=similarity.bounds,
    )


def _distances(found: ModelComparison) -> str:
    """Return a line for each model: the distance over which its layers mix information, by relative depth."""
    lines = []
    for one in found.models:
        last = max(len(one.distances) - 1, 1)
        side = one.bundle.preprocess.image_size[1]
        points = [(100 * place / last, 100 * value / side) for place, (_, value) in enumerate(one.distances)]
        lines.append(Series(one.name, points))
    return series_chart(
        lines,
        label="Distance over which each layer mixes information, by depth.",
        x_name="depth, % of the layers",
        y_name="distance, % of the image width",
        bounds=(0.0, 200.0),
    )


def _classes_csv(found: ModelComparison) -> str:
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    first, second = (one.name for one in found.models)
    rows.writerow(("class", "images", f"accuracy of {first}", f"accuracy of {second}"))
    rows.writerows(found.classes)
    return file.getvalue()
