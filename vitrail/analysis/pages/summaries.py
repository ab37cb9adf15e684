"""The pages of `vitrail report` on one model and of `vitrail compare` on two: their figures and tables."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from markupsafe import Markup
from PIL import Image

from vitrail.analysis import charts
from vitrail.analysis.charts import png, scatter, series_chart, standalone
from vitrail.analysis.comparison import Disagreement, Measured, ModelComparison
from vitrail.analysis.faithfulness import SaliencySummary
from vitrail.analysis.heads import HeadStatistic, ReceptiveField
from vitrail.analysis.images import (
    Picture,
    draw_curves,
    draw_filters,
    draw_heads,
    draw_layer_similarity,
    draw_norms,
    draw_patch_colours,
    draw_positions,
    draw_probes,
    draw_randomised,
    figure_address,
    image_address,
    overlay,
)
from vitrail.analysis.overview import Answer, Answers, ColouredPatches, EmbeddingMap, Overview
from vitrail.data.formats.parquet import pyarrow
from vitrail.errors import DataError, plural
from vitrail.evaluation.features.feature_files import printable_key
from vitrail.evaluation.metrics.intervals import LEVEL, Metric
from vitrail.evaluation.metrics.report import NamedMetric, absent_note, named_metrics
from vitrail.files import write_json, write_table
from vitrail.report.charts import Series
from vitrail.report.page import write_page
from vitrail.settings import to_plain

OVERVIEW_FILES = ("report.html", "report.json", "*.csv", "*.svg", "*.png", "*.parquet")
"""Files of an overview, as shell patterns."""

MAX_CLASSES = 50
"""Maximum number of classes on the page. classes.csv has all of them."""

Pictures = dict[str, Picture]
"""Pictures by name."""

T = TypeVar("T")


def write_overview(found: Overview, folder: Path, beside: str | None = None) -> tuple[str, ...]:
    """Write the page, its figures and its numbers into a folder, and return notes about files that are missing.

    `beside` is the address of the page of the training run, if there is one.
    """
    drawn, pictures = charts_of(found), pictures_of(found)
    for name, chart in drawn.items():
        (folder / f"{name}.svg").write_text(standalone(chart), encoding="utf-8")
    for name, picture in pictures.items():
        (folder / f"{name}.png").write_bytes(png(picture))
    _write_page(found, drawn, pictures, beside, folder / "report.html")
    write_json(folder / "report.json", overview_as_plain(found))
    return write_tables(found, folder)


def headline(found: Overview) -> str:
    """Return the accuracy and the number of images as a text. A model without a head has no accuracy."""
    images = plural(found.images, "image")
    if found.answers is None:
        return f"a model without a head, looked into on {images}"
    return f"{found.answers.report.metrics['accuracy'].value:.2%} accuracy on {images}"


def overview_as_plain(found: Overview) -> dict[str, Any]:
    """Return the numbers of an overview as JSON values. An analysis without a result is None."""
    layers, answers = found.layers, found.answers
    return {
        "name": found.name,
        "images": found.images,
        **({} if answers is None else {one.name: to_plain(one.metric) for one in named_metrics(answers.report)}),
        "images_for_layers": layers.images,
        "distance": {"name": layers.reach.name, "unit": layers.reach.unit, "layers": dict(layers.reach.by_layer)},
        "entropy": None if layers.entropy is None else layers.entropy.mean.round(6).tolist(),
        "similarity": None if layers.similarity is None else layers.similarity.as_lists(),
        "outlier_tokens": None if layers.norms is None else layers.norms.outliers().round(6).tolist(),
        "probes": [to_plain(one) for one in found.probes],
        "saliency": None
        if found.saliency is None
        else [
            {**one._asdict(), "deletion": to_plain(one.deletion), "insertion": to_plain(one.insertion)}
            for one in found.saliency.methods
        ],
        "embedding_explained": None if found.embedding is None else list(found.embedding.explained),
        "errors": [
            {"key": one.key, "label": one.label, "predicted": one.answer.label, "probability": one.answer.probability}
            for one in (() if answers is None else answers.errors)
        ],
        "skipped": [to_plain(item) for item in found.skipped],
        "notes": list(found.notes),
    }


def _write_page(found: Overview, drawn: dict[str, Markup], pictures: Pictures, beside: str | None, path: Path) -> None:
    config, size = found.bundle.network.config, found.bundle.preprocess.image_size
    text = headline(found)
    write_page(
        "the report",
        path,
        "analysis/pages/overview.html",
        title=f"Report on {found.name}",
        style=Markup(charts.STYLE),
        script=Markup("" if found.embedding is None else map_script(found.embedding)),
        headline=f"{text[0].upper()}{text[1:]}",
        cost=f"{config.parameters() / 1e6:,.2f} million parameters, {config.macs(size) / 1e6:,.2f} million "
        f"multiply-accumulates for an image of {size[0]} x {size[1]} pixels.",
        beside=beside,
        answers=None if found.answers is None else _answers(found.answers),
        skipped=[(item.key, item.reason) for item in found.skipped],
        first_layer=[
            (image_address(pictures[name], "png"), text) for name, text in FIRST_LAYER.items() if name in pictures
        ],
        layer_charts=_layer_charts(found, drawn),
        notes=found.notes,
        patches=[] if found.patches is None else _patches(found.patches),
        saliency=None if found.saliency is None else _saliency(found.saliency),
        drawn=drawn,
    )


FIRST_LAYER = {
    "filters": "Filters: principal components of the patch embedding.",
    "positions": "Positions: each map shows the cosine similarity of one patch's position to all others, from dark "
    "(least) to bright (most).",
}
"""Captions of the pictures of the first layer."""


def _patches(found: ColouredPatches) -> list[tuple[Image.Image, Image.Image]]:
    """Return each image with the colours of its patches."""
    return [
        (Image.fromarray(picture), Image.fromarray(np.rint(255 * values[..., :3]).astype(np.uint8)))
        for picture, values in zip(found.pictures, found.colours.pictures(), strict=True)
    ]


def _layer_charts(found: Overview, drawn: dict[str, Markup]) -> list[tuple[Markup, str]]:
    """Return the charts of the layers with their captions."""
    reach, over = found.layers.reach, f"over {plural(found.layers.images, 'image')}"
    each = "layer and head" if isinstance(reach, HeadStatistic) else f"layer on the first {reach.images} images"
    captions = {
        "distance": f"{reach.name.capitalize()} of each {each}: the distance over which it mixes information.",
        "entropy": "Entropy of the attention of each head: small if a token attends to few others.",
        "similarity": f"Similarity of the features of every two layers (CKA, unbiased, {over}).",
        "norms": "Norms of tokens. Patch tokens with large norms often serve the network as memory.",
        "probes": "Accuracy of a linear model of each layer's mean patch token, on images that it did not learn from.",
    }
    return [(drawn[name], caption) for name, caption in captions.items() if name in drawn]


def _saliency(found: SaliencySummary) -> dict[str, Any]:
    """Return the measurements of the saliency methods."""
    rows = [
        (one.name, _area(one.deletion), _area(one.insertion), _number(one.random_head), _number(one.random_all))
        for one in found.methods
    ]
    return {"images": found.curves.deletion.shape[1], "rows": rows}


def _answers(found: Answers) -> dict[str, Any]:
    """Return the metrics of all images and of each class, and the largest errors."""
    worst_first = sorted(found.report.per_class, key=lambda row: 1.0 if row.accuracy is None else row.accuracy)
    errors = []
    for one in found.errors:
        relevance = one.answer.relevance
        picture = one.picture if relevance is None else overlay(one.picture, relevance)
        answer = f"{one.answer.label}, {one.answer.probability:.1%}"
        errors.append((figure_address(picture), f"{one.key}: {answer}; the label is {one.label}."))
    return {
        "heads": ("metric", "value", f"{LEVEL:.0%} interval"),
        "metrics": [(one.name, one.value, one.interval) for one in named_metrics(found.report)],
        "note": absent_note(found.report),
        "classes": [
            (row.name, f"{row.images:,}", *(_number(value, ".1%") for value in (row.accuracy, row.precision, row.f1)))
            for row in worst_first[:MAX_CLASSES]
        ],
        "errors": errors,
        "has_maps": bool(found.errors) and found.errors[0].answer.relevance is not None,
    }


def _area(found: Metric) -> str:
    """Return an area with its interval over images, if there are several images."""
    ends = "" if found.low is None else f" ({found.low:.3f} to {found.high:.3f})"
    return f"{found.value:.3f}{ends}"


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


# The figures of an overview of one model: charts as SVG, and pictures as pixels.


NO_LABEL = "no label"
"""Name of the images without a label in the map of embeddings."""


def charts_of(found: Overview) -> dict[str, Markup]:
    """Return the charts by name, as SVG."""
    layers = found.layers
    measured: dict[str, tuple[Callable[[Any], Markup], Any]] = {
        "distance": (_distance, layers.reach),
        "similarity": (draw_layer_similarity, layers.similarity),
        "entropy": (draw_heads, layers.entropy),
        "norms": (draw_norms, layers.norms),
        "probes": (draw_probes, found.probes or None),
        "embedding": (_embedding_figure, found.embedding),
    }
    if found.saliency is not None:
        measured |= {
            kind: (partial(draw_curves, kind=kind), found.saliency.curves) for kind in ("deletion", "insertion")
        }
        measured["random_weights"] = draw_randomised, found.saliency.checks
    return _drawn(measured)


def pictures_of(found: Overview) -> Pictures:
    """Return the pictures by name."""
    measured: dict[str, tuple[Callable[[Any], Picture], Any]] = {
        "filters": (draw_filters, found.layers.filters),
        "positions": (draw_positions, found.layers.positions),
        "patches": (draw_patch_colours, found.patches and found.patches.colours),
    }
    return _drawn(measured)


def _drawn(measured: Mapping[str, tuple[Callable[[Any], T], Any]]) -> dict[str, T]:
    """Return the figures of analyses, each given by a function that draws it and its result. An analysis without a
    result has no figure."""
    return {name: draw(result) for name, (draw, result) in measured.items() if result is not None}


def map_script(mapped: EmbeddingMap) -> str:
    """Return the script of the embedding map with its thumbnails, in the order of the dots."""
    names = [f"{mapped.keys[row]}: {mapped.labels[row] or NO_LABEL}" for row in mapped.shown]
    pictures = [base64.b64encode(picture).decode() for picture in mapped.pictures]
    values = {"names": names, "pictures": pictures}
    data = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())
    data = data.replace("<", r"\u003c")  # a file name could end the script
    return data + (Path(__file__).parent / "embedding_map.js").read_text(encoding="utf-8")


def _distance(reach: HeadStatistic | ReceptiveField) -> Markup:
    if isinstance(reach, HeadStatistic):
        return draw_heads(reach)
    points = [(float(layer), value) for layer, value in reach.by_layer]
    return charts.series_chart(
        [Series(reach.name, points)],
        label="Effective receptive field by layer.",
        x_name="layer",
        y_name="mean distance, pixels",
        bounds=(0.0, math.inf),
        integers=True,
    )


def _embedding_figure(mapped: EmbeddingMap) -> Markup:
    """Return the map of embeddings. Of many images, some at equal distances in the data are drawn."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in mapped.shown:
        first, second = mapped.points[row]
        groups.setdefault(mapped.labels[row] or NO_LABEL, []).append((float(first), float(second)))
    first_share, second_share = (f"{part:.0%} of the variance" for part in mapped.explained)
    return scatter(
        groups,
        label="Embeddings of images along their first two principal components.",
        x_name=f"first principal component, {first_share}",
        y_name=f"second, {second_share}",
    )


# The tables of an overview for other programs: CSV, and Parquet for the embeddings.


PARQUET = "embedding.parquet"
"""Table of the embeddings with all their features."""


def write_tables(found: Overview, folder: Path) -> tuple[str, ...]:
    """Write the tables of an overview into a folder, and return notes about those that cannot be written.

    classes.csv has the metrics of each class, saliency.csv the measurements of each saliency method, and embedding.csv
    the place of each image on the map of embeddings. embedding.parquet has the embeddings themselves as well, and is
    written if pyarrow is installed.
    """
    if found.answers is not None:
        rows = [(row.name, row.images, row.accuracy, row.precision, row.f1) for row in found.answers.report.per_class]
        write_table(folder / "classes.csv", ("class", "images", "accuracy", "precision", "f1"), rows)
    if found.saliency is not None:
        heads = ("method", "deletion_area", "insertion_area", "correlation_random_head", "correlation_random_all")
        methods = [
            (one.name, one.deletion.value, one.insertion.value, one.random_head, one.random_all)
            for one in found.saliency.methods
        ]
        write_table(folder / "saliency.csv", heads, methods)
    if found.embedding is None:
        return ()
    columns = _embedding_columns(found)
    write_table(folder / "embedding.csv", tuple(columns), zip(*columns.values(), strict=True))
    try:
        arrow = pyarrow("writing")
    except DataError as reason:
        return (f"{PARQUET} was not written: {reason}",)
    _write_parquet(arrow, folder / PARQUET, columns, found.embedding.features)
    return ()


def _embedding_columns(found: Overview) -> dict[str, Sequence[Any]]:
    """Return the columns of the embedding table, one row for each image."""
    mapped, answers = found.embedding, found.answers
    assert mapped is not None
    columns: dict[str, Sequence[Any]] = {"key": mapped.keys, "class": mapped.labels}
    if answers is not None:
        columns["predicted"] = [found.bundle.classes[number] for number in answers.each.predicted]
        columns["probability"] = answers.each.confidence.tolist()
    columns["component_1"], columns["component_2"] = mapped.points.T.tolist()
    return columns


def _write_parquet(arrow: Any, path: Path, columns: dict[str, Sequence[Any]], features: np.ndarray) -> None:
    """Write the columns and the features: a list of float32 of fixed length for each image."""
    texts = {"key", "class", "predicted"}
    arrays = {
        name: arrow.array(list(map(printable_key, values)) if name in texts else values)
        for name, values in columns.items()
    }
    flat = arrow.array(np.ascontiguousarray(features, dtype=np.float32).reshape(-1))
    arrays["feature"] = arrow.FixedSizeListArray.from_arrays(flat, features.shape[1])
    arrow.parquet.write_table(arrow.table(arrays), path)


# The page, figures and tables of `vitrail compare`.


COMPARISON_FILES = ("compare.html", "compare.json", "classes.csv", "similarity.svg", "distance.svg")
"""Files of a comparison."""

SIGNIFICANT = 0.05
"""Largest p-value with which the verdict names a more accurate model."""

COSTS = (("parameters, millions", "parameters", 1e6), ("multiply-accumulates per image, millions", "macs", 1e6))
"""Name, key and unit of each row of the costs."""

MOST_COMPARED = 20
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
    _write_comparison_page(found, drawn, folder / "compare.html")
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


def _write_comparison_page(found: ModelComparison, drawn: dict[str, Markup], path: Path) -> None:
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
            + f"{'heads and' if isinstance(one.reach, HeadStatistic) else 'the first'} {one.reach.images} images."
            for one in found.models
        ),
        class_heads=("class", "images", first.name, second.name, "difference, points"),
        classes=[
            (name, f"{images:,}", f"{one:.1%}", f"{other:.1%}", f"{100 * (one - other):+z.1f}")
            for name, images, one, other in found.classes[:MOST_COMPARED]
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
