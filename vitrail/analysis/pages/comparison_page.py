"""The page, figures and tables of a comparison of two models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from vitrail.analysis import charts
from vitrail.analysis.charts import series_chart, standalone
from vitrail.analysis.comparison import Disagreement, Measured, ModelComparison
from vitrail.analysis.heads import HeadStatistic
from vitrail.analysis.images import draw_layer_similarity, figure_address, overlay
from vitrail.analysis.samples import Answer
from vitrail.errors import plural
from vitrail.evaluation.metrics.intervals import LEVEL
from vitrail.evaluation.metrics.report import NamedMetric, named_metrics
from vitrail.files import write_json, write_table
from vitrail.report.charts import Series
from vitrail.report.page import write_page
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
    """Write `COMPARISON_FILES` into a folder."""
    first, second = (one.name for one in found.models)
    similarity = draw_layer_similarity(
        found.similarity,
        of_layers=f"of the layers of {first} with those of {second}",
        row_name=f"layer of {first}",
        column_name=f"layer of {second}",
    )
    drawn = {"similarity.svg": similarity, "distance.svg": _distances(found)}
    for name, chart in drawn.items():
        (folder / name).write_text(standalone(chart), encoding="utf-8")
    _write_page(found, drawn, folder / "compare.html")
    write_json(folder / "compare.json", comparison_as_plain(found))
    heads = ("class", "images", f"accuracy of {first}", f"accuracy of {second}")
    write_table(folder / "classes.csv", heads, found.classes)


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
            | {"distance": {"unit": one.reach.unit, "name": one.reach.name, "layers": dict(one.reach.by_layer)}}
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


def _write_page(found: ModelComparison, drawn: dict[str, Markup], path: Path) -> None:
    first, second = found.models
    paired = found.paired
    right = {
        "both models": paired.both,
        f"only {first.name}": paired.only_first,
        f"only {second.name}": paired.only_second,
        "neither model": paired.neither,
    }
    write_page(
        "the comparison",
        path,
        "analysis/pages/compare.html",
        title=f"{first.name} and {second.name} compared",
        style=Markup(charts.STYLE),
        verdict=verdict(found),
        heads=("", first.name, second.name),
        metrics=_rows(found),
        skipped=[(item.key, item.reason) for item in found.skipped],
        right=[(name, f"{count:,}", f"{count / paired.images:.1%}") for name, count in right.items()],
        similarity=drawn["similarity.svg"],
        images_for_layers=found.looked_at,
        distances=drawn["distance.svg"],
        reaches=" ".join(
            f"{one.name}: {one.reach.name}, mean over "
            + (f"heads and {one.reach.images} images." if isinstance(one.reach, HeadStatistic) else "images.")
            for one in found.models
        ),
        class_heads=("class", "images", first.name, second.name, "difference, points"),
        classes=[
            (name, f"{images:,}", f"{one:.1%}", f"{other:.1%}", f"{100 * (one - other):+z.1f}")
            for name, images, one, other in found.classes[:MAX_CLASSES]
        ],
        disagreements=[_disagreement(found, one) for one in found.disagreements],
    )


def _disagreement(found: ModelComparison, one: Disagreement) -> list[tuple[Markup, str]]:
    """Return the addresses and captions of an image and of what each model sees in it."""
    pictures = [(figure_address(one.picture), f"{one.label} ({one.key})")]
    for model, answer in zip(found.models, one.answers, strict=True):
        picture = one.picture if answer.relevance is None else overlay(one.picture, answer.relevance)
        pictures.append((figure_address(picture), f"{model.name}: {_answer(answer, one.label)}"))
    return pictures


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
    rows += [(name, f"{one[field] / scale:,.2f}", f"{other[field] / scale:,.2f}") for name, field, scale in COSTS]
    sizes = [" x ".join(map(str, cost["image_size"])) for cost in (one, other)]
    return [*rows, ("image size, pixels", sizes[0], sizes[1])]


def _text(one: NamedMetric) -> str:
    return f"{one.value} ({one.interval})" if one.interval else one.value


def _cost(one: Measured) -> dict[str, Any]:
    config = one.bundle.network.config
    size = one.bundle.preprocess.image_size
    return {"image_size": list(size), "parameters": config.parameters(), "macs": config.macs(size)}


def _distances(found: ModelComparison) -> Markup:
    """Return a line for each model: the distance over which its layers mix information, by relative depth."""
    lines = []
    for one in found.models:
        layers, side = one.reach.by_layer, one.bundle.preprocess.image_size[1]
        last = max(len(layers) - 1, 1)
        points = [(100 * place / last, 100 * value / side) for place, (_, value) in enumerate(layers)]
        lines.append(Series(one.name, points))
    return series_chart(
        lines,
        label="Distance over which each layer mixes information, by depth.",
        x_name="depth, % of the layers",
        y_name="distance, % of the image width",
        bounds=(0.0, 200.0),
    )
