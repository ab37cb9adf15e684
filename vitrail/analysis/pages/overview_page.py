"""The page of `vitrail report`: its figures and tables."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vitrail.analysis import charts
from vitrail.analysis.charts import png, scatter, standalone
from vitrail.analysis.faithfulness import SaliencySummary
from vitrail.analysis.heads import HeadStatistic, ReceptiveField
from vitrail.analysis.images import (
    draw_curves,
    draw_filters,
    draw_heads,
    draw_layer_similarity,
    draw_norms,
    draw_patch_colours,
    draw_positions,
    draw_probes,
    draw_randomised,
    overlay,
)
from vitrail.analysis.overview import Answers, ColouredPatches, EmbeddingMap, Overview
from vitrail.analysis.pages.figure import NARROW, STYLE, captioned, figure, image, skipped_part
from vitrail.analysis.samples import distances
from vitrail.errors import DataError, plural
from vitrail.evaluation.features.feature_files import parquet_library, printable_key
from vitrail.evaluation.metrics.intervals import LEVEL, Metric
from vitrail.evaluation.metrics.report import absent_note, named_metrics
from vitrail.files import write_json
from vitrail.report.charts import Series
from vitrail.report.page import document, escape, table, thumbnail
from vitrail.settings import to_plain

OVERVIEW_FILES = ("report.html", "report.json", "*.csv", "*.svg", "*.png", "*.parquet")
"""Files of an overview, as shell patterns."""

FIRST = ".first figure { max-width: 28rem; } .first img { image-rendering: pixelated; }"
"""Style of the pictures of the first layer, which are small."""

MAP = """
#near { width: auto; } #near img[hidden] { display: none; }
#near img { width: 10rem; height: 10rem; image-rendering: pixelated; }
#near figcaption { font-size: .9rem; }
.dot.chosen { stroke: CanvasText; stroke-width: 2; }
"""
"""Style of the embedding map and of the image of its chosen dot."""

MAX_CLASSES = 50
"""Maximum number of classes on the page. classes.csv has all of them."""

Pictures = dict[str, UInt8[np.ndarray, "height width 3"]]
"""Pictures by name."""


def write_overview(found: Overview, folder: Path, beside: str | None = None) -> tuple[str, ...]:
    """Write the page, its figures and its numbers into a folder, and return notes about files that are missing.

    `beside` is the address of the page of the training run, if there is one.
    """
    drawn, pictures = charts_of(found), pictures_of(found)
    for name, chart in drawn.items():
        (folder / f"{name}.svg").write_text(standalone(chart), encoding="utf-8")
    for name, picture in pictures.items():
        (folder / f"{name}.png").write_bytes(png(picture))
    page = document(
        f"Report on {found.name}",
        _parts(found, drawn, pictures, beside),
        style=STYLE + charts.STYLE + NARROW + FIRST + MAP,
        script="" if found.embedding is None else map_script(found.embedding),
    )
    (folder / "report.html").write_text(page, encoding="utf-8")
    write_json(folder / "report.json", overview_as_plain(found))
    return write_tables(found, folder)


def headline(found: Overview) -> str:
    """Return the accuracy and the number of images as a text. A model without a head has no accuracy."""
    images = plural(found.images, "image")
    if found.answers is None:
        return f"a model without a head, looked into on {images}"
    return f"{found.answers.report.accuracy.value:.2%} accuracy on {images}"


def overview_as_plain(found: Overview) -> dict[str, Any]:
    """Return the numbers of an overview as JSON values. An analysis without a result is None."""
    layers, answers = found.layers, found.answers
    return {
        "name": found.name,
        "images": found.images,
        **({} if answers is None else {one.name: to_plain(one.metric) for one in named_metrics(answers.report)}),
        "images_for_layers": layers.images,
        "distance": {"name": layers.reach.name, "unit": layers.reach.unit, "layers": dict(distances(layers.reach))},
        "entropy": None if layers.entropy is None else layers.entropy.mean.round(6).tolist(),
        "similarity": None if layers.similarity is None else layers.similarity.as_lists(),
        "outlier_tokens": None if layers.norms is None else layers.norms.outliers().round(6).tolist(),
        "probes": [to_plain(one) for one in found.probes],
        "saliency": None if found.saliency is None else _saliency_as_plain(found.saliency),
        "embedding_explained": None if found.embedding is None else list(found.embedding.explained),
        "errors": [
            {"key": one.key, "label": one.label, "predicted": one.answer.label, "probability": one.answer.probability}
            for one in (() if answers is None else answers.errors)
        ],
        "skipped": [to_plain(item) for item in found.skipped],
        "notes": list(found.notes),
    }


def _saliency_as_plain(found: SaliencySummary) -> list[dict[str, Any]]:
    return [
        {
            **one._asdict(),
            "deletion": to_plain(one.deletion),
            "insertion": to_plain(one.insertion),
        }
        for one in found.methods
    ]


def _parts(found: Overview, drawn: dict[str, str], pictures: Pictures, beside: str | None) -> Iterator[str]:
    config = found.bundle.network.config
    size = found.bundle.preprocess.image_size
    text = headline(found)
    yield f"<p><strong>{text[0].upper()}{text[1:]}.</strong></p>"
    yield (
        f'<p class="dim">{config.parameters() / 1e6:,.2f} million parameters, {config.macs(size) / 1e6:,.2f} million '
        f"multiply-accumulates for an image of {size[0]} x {size[1]} pixels.</p>"
    )
    if beside is not None:
        yield f'<p><a href="{escape(beside)}">Report of the training</a></p>'
    if found.answers is not None:
        rows = [(one.name, one.value, one.interval) for one in named_metrics(found.answers.report)]
        yield table(("metric", "value", f"{LEVEL:.0%} interval"), rows)
        if note := absent_note(found.answers.report):
            yield f"<p>Note: {escape(note)}.</p>"
    yield from skipped_part(found.skipped)
    yield from _first_layer(pictures)
    yield "<h2>Layers</h2>"
    yield '<div class="beside">'
    yield from _layer_charts(found, drawn)
    yield "</div>"
    for note in found.notes:
        yield f'<p class="dim">Not shown: {escape(note)}.</p>'
    if found.patches is not None:
        yield from _patches(found.patches)
    if found.saliency is not None:
        yield from _saliency(found.saliency, drawn)
    if "embedding" in drawn:
        yield from _embedding(drawn["embedding"])
    if found.answers is not None:
        yield from _answers(found.answers)


def _first_layer(pictures: Pictures) -> Iterator[str]:
    """Yield the filters and positions of the first layer."""
    texts = {
        "filters": "Filters: principal components of the patch embedding.",
        "positions": "Positions: each map shows the cosine similarity of one patch's position to all others, from dark "
        "(least) to bright (most).",
    }
    shown = [name for name in texts if name in pictures]
    if not shown:
        return
    yield "<h2>What the first layer sees</h2>"
    yield '<div class="maps first">'
    for name in shown:
        caption = escape(texts[name])
        yield f"<figure>{image(pictures[name], texts[name], 'png')}<figcaption>{caption}</figcaption></figure>"
    yield "</div>"


def _patches(found: ColouredPatches) -> Iterator[str]:
    """Yield each image beside the colours of its patches."""
    yield "<h2>Patches</h2>"
    yield (
        "<p>Patches of equal colour have similar features: their first three principal components are drawn as red, "
        "green and blue.</p>"
    )
    yield '<div class="strip">'
    for picture, values in zip(found.pictures, found.colours.pictures(), strict=True):
        shown = np.rint(255 * values[..., :3]).astype(np.uint8)
        pair = [
            thumbnail(Image.fromarray(each), name) for each, name in ((picture, "an image"), (shown, "its patches"))
        ]
        yield f'<div class="group">{"".join(pair)}</div>'
    yield "</div>"


def _layer_charts(found: Overview, drawn: dict[str, str]) -> Iterator[str]:
    reach, over = found.layers.reach, f"over {plural(found.layers.images, 'image')}"
    each = "each layer and head" if isinstance(reach, HeadStatistic) else "each layer"
    captions = {
        "distance": f"{reach.name.capitalize()} of {each}: the distance over which it mixes information.",
        "entropy": "Entropy of the attention of each head: small if a token attends to few others.",
        "similarity": f"Similarity of the features of every two layers (CKA, unbiased, {over}).",
        "norms": "Norms of tokens. Patch tokens with large norms often serve the network as memory.",
        "probes": "Accuracy of a linear model of each layer's mean patch token, on images that it did not learn from.",
    }
    for name, caption in captions.items():
        if name in drawn:
            yield captioned(drawn[name], caption)


def _saliency(found: SaliencySummary, drawn: dict[str, str]) -> Iterator[str]:
    """Yield the measurements of the saliency methods."""
    images = found.curves.deletion.shape[1]
    yield "<h2>Saliency maps, measured</h2>"
    yield (
        f"<p>Patches of {plural(images, 'image')} are deleted, or inserted into an empty image, in the order of each "
        "map, most salient first. A good map has a small area under the deletion curve and a large one under the "
        "insertion curve. The last two columns are the rank correlations of the maps with those of a random head, and "
        "of random weights in all layers. Maps that stay as they are show the image, not what the network learned.</p>"
    )
    heads = ("method", "deletion area", "insertion area", "random head", "all random")
    yield table(
        heads,
        [
            (one.name, _area(one.deletion), _area(one.insertion), _number(one.random_head), _number(one.random_all))
            for one in found.methods
        ],
    )
    captions = {
        "deletion": "Probability of the predicted class while patches are deleted.",
        "insertion": "Probability of the predicted class while patches are inserted into an empty image.",
        "random_weights": "Rank correlation of the maps with the trained network's, while the weights of more and more "
        "layers become random.",
    }
    yield '<div class="beside">'
    for name, caption in captions.items():
        yield captioned(drawn[name], caption)
    yield "</div>"


def _embedding(chart: str) -> Iterator[str]:
    """Yield the map of the embeddings, and the place of the image of a dot."""
    yield "<h2>Embeddings</h2>"
    yield '<div id="embedding" class="beside">'
    yield f'<div id="dots" tabindex="0">{chart}</div>'
    yield '<figure id="near" aria-live="polite"><img hidden alt=""><figcaption></figcaption></figure>'
    yield "</div>"
    yield (
        '<p class="dim">Embeddings of the images along their first two principal components. The pointer, or the '
        "arrow keys on the map, show the image of a dot.</p>"
    )


def _answers(found: Answers) -> Iterator[str]:
    """Yield the metrics of each class, and the largest errors."""
    classes = sorted(found.report.per_class, key=lambda row: 1.0 if row.accuracy is None else row.accuracy)
    yield "<h2>Classes, worst first</h2>"
    yield table(
        ("class", "images", "accuracy", "precision", "F1"),
        [
            (row.name, f"{row.images:,}", *(_percent(value) for value in (row.accuracy, row.precision, row.f1)))
            for row in classes[:MAX_CLASSES]
        ],
    )
    if found.errors:
        yield "<h2>Most certain errors</h2>"
        if found.errors[0].answer.relevance is not None:
            yield "<p>Colours show which parts support the wrong answer, from dark (least) to bright (most).</p>"
        yield '<div class="maps">'
        for one in found.errors:
            relevance = one.answer.relevance
            picture = one.picture if relevance is None else overlay(one.picture, relevance)
            answer = f"{one.answer.label}, {one.answer.probability:.1%}"
            yield figure(picture, f"{one.key}: {answer}; the label is {one.label}.")
        yield "</div>"


def _area(found: Metric) -> str:
    """Return an area with its interval over images, if there are several images."""
    ends = "" if found.low is None else f" ({found.low:.3f} to {found.high:.3f})"
    return f"{found.value:.3f}{ends}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


# The figures of an overview of one model: charts as SVG, and pictures as pixels.


NO_LABEL = "no label"
"""Name of the images without a label in the map of embeddings."""


def charts_of(found: Overview) -> dict[str, str]:
    """Return the charts by name, as SVG."""
    layers = found.layers
    drawn = {"distance": _distance(layers.reach)}
    if layers.similarity is not None:
        drawn["similarity"] = draw_layer_similarity(layers.similarity)
    if layers.entropy is not None:
        drawn["entropy"] = draw_heads(layers.entropy)
    if layers.norms is not None:
        drawn["norms"] = draw_norms(layers.norms)
    if found.probes:
        drawn["probes"] = draw_probes(found.probes)
    if found.saliency is not None:
        drawn["deletion"] = draw_curves(found.saliency.curves, "deletion")
        drawn["insertion"] = draw_curves(found.saliency.curves, "insertion")
        drawn["random_weights"] = draw_randomised(found.saliency.checks)
    if found.embedding is not None:
        drawn["embedding"] = _embedding_figure(found.embedding)
    return drawn


def pictures_of(found: Overview) -> dict[str, UInt8[np.ndarray, "height width 3"]]:
    """Return the pictures by name."""
    drawn = {}
    if found.layers.filters is not None:
        drawn["filters"] = draw_filters(found.layers.filters)
    if found.layers.positions is not None:
        drawn["positions"] = draw_positions(found.layers.positions)
    if found.patches is not None:
        drawn["patches"] = draw_patch_colours(found.patches.colours)
    return drawn


def map_script(mapped: EmbeddingMap) -> str:
    """Return the script of the embedding map with its thumbnails, in the order of the dots."""
    names = [f"{mapped.keys[row]}: {mapped.labels[row] or NO_LABEL}" for row in mapped.shown]
    pictures = [base64.b64encode(picture).decode() for picture in mapped.pictures]
    values = {"names": names, "pictures": pictures}
    data = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())
    data = data.replace("<", r"\u003c")  # a file name could end the script
    return data + (Path(__file__).parent / "embedding_map.js").read_text(encoding="utf-8")


def _distance(reach: HeadStatistic | ReceptiveField) -> str:
    if isinstance(reach, HeadStatistic):
        return draw_heads(reach)
    points = [(float(layer), value) for layer, value in distances(reach)]
    return charts.series_chart(
        [Series(reach.name, points)],
        label="Effective receptive field by layer.",
        x_name="layer",
        y_name="mean distance, pixels",
        bounds=(0.0, math.inf),
        integers=True,
    )


def _embedding_figure(mapped: EmbeddingMap) -> str:
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
        _write_csv(folder / "classes.csv", ("class", "images", "accuracy", "precision", "f1"), rows)
    if found.saliency is not None:
        heads = ("method", "deletion_area", "insertion_area", "correlation_random_head", "correlation_random_all")
        methods = [
            (one.name, one.deletion.value, one.insertion.value, one.random_head, one.random_all)
            for one in found.saliency.methods
        ]
        _write_csv(folder / "saliency.csv", heads, methods)
    if found.embedding is None:
        return ()
    columns = _embedding_columns(found)
    _write_csv(folder / "embedding.csv", tuple(columns), zip(*columns.values(), strict=True))
    try:
        parquet_library()
    except DataError as reason:
        return (f"{PARQUET} was not written: {reason}",)
    _write_parquet(folder / PARQUET, columns, found.embedding.features)
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


def _write_parquet(path: Path, columns: dict[str, Sequence[Any]], features: np.ndarray) -> None:
    """Write the columns and the features: a list of float32 of fixed length for each image."""
    arrow = parquet_library()
    texts = {"key", "class", "predicted"}
    arrays = {
        name: arrow.array(list(map(printable_key, values)) if name in texts else values)
        for name, values in columns.items()
    }
    flat = arrow.array(np.ascontiguousarray(features, dtype=np.float32).reshape(-1))
    arrays["feature"] = arrow.FixedSizeListArray.from_arrays(flat, features.shape[1])
    arrow.parquet.write_table(arrow.table(arrays), path)


def _write_csv(path: Path, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(rows)
    path.write_text(file.getvalue(), encoding="utf-8", errors="backslashreplace")
