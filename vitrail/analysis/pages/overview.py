"""The page, figures and tables of an overview of one model."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from vitrail.analysis import charts
from vitrail.analysis.charts import png, scatter, standalone
from vitrail.analysis.drawing import (
    draw_filters,
    draw_heads,
    draw_layer_similarity,
    draw_norms,
    draw_patch_colours,
    draw_positions,
    draw_probes,
    overlay,
)
from vitrail.analysis.pages.figure import NARROW, STYLE, captioned, figure, image, skipped_part
from vitrail.analysis.statistics import HeadStatistic
from vitrail.analysis.summaries.overview import EmbeddingMap, Overview
from vitrail.analysis.summaries.samples import distances
from vitrail.charts.svg import Series
from vitrail.errors import plural
from vitrail.evaluation.predictions.bootstrap import LEVEL
from vitrail.evaluation.predictions.named import named_metrics
from vitrail.files import write_json
from vitrail.page import document, escape, table, thumbnail
from vitrail.plain import to_plain

__all__ = ["FILES", "overview_as_plain", "write_overview"]

FILES = ("report.html", "report.json", "*.csv", "*.svg", "*.png")
"""Files of an overview, as shell patterns."""

FIRST = ".first figure { max-width: 28rem; } .first img { image-rendering: pixelated; }"
"""Style of the pictures of the first layer, which are small."""

MAP = """
#near { width: auto; } #near img { width: 10rem; height: 10rem; image-rendering: pixelated; }
#near figcaption { font-size: .9rem; }
.dot.chosen { stroke: CanvasText; stroke-width: 2; }
"""
"""Style of the embedding map and of the image of its chosen dot."""

MAX_CLASSES = 50
"""Maximum number of classes on the page. classes.csv has all of them."""


def write_overview(found: Overview, folder: Path) -> None:
    """Write the page, its figures and its numbers into a folder."""
    drawn, pictures = _charts(found), _pictures(found)
    for name, chart in drawn.items():
        (folder / f"{name}.svg").write_text(standalone(chart), encoding="utf-8")
    for name, picture in pictures.items():
        (folder / f"{name}.png").write_bytes(png(picture))
    page = document(
        f"Report on {found.name}",
        _parts(found, drawn, pictures),
        style=STYLE + charts.STYLE + NARROW + FIRST + MAP,
        script="" if found.embedding is None else _map_script(found.embedding),
    )
    (folder / "report.html").write_text(page, encoding="utf-8")
    write_json(folder / "report.json", overview_as_plain(found))
    rows = [(row.name, row.images, row.accuracy, row.precision, row.f1) for row in found.report.per_class]
    _write_csv(folder / "classes.csv", ("class", "images", "accuracy", "precision", "f1"), rows)
    if (mapped := found.embedding) is not None:
        places = [
            (key, label, *map(float, point))
            for key, label, point in zip(mapped.keys, mapped.labels, mapped.points, strict=True)
        ]
        _write_csv(folder / "embedding.csv", ("key", "class", "component_1", "component_2"), places)


def overview_as_plain(found: Overview) -> dict[str, Any]:
    """Return the numbers of an overview as JSON values. An analysis without a result is None."""
    return {
        "name": found.name,
        "images": found.report.images,
        **{one.name: to_plain(one.metric) for one in named_metrics(found.report)},
        "images_for_layers": found.looked_at,
        "distance": {"name": found.reach.name, "unit": found.reach.unit, "layers": dict(distances(found.reach))},
        "entropy": None if found.entropy is None else found.entropy.mean.round(6).tolist(),
        "similarity": None if found.similarity is None else found.similarity.values.round(6).tolist(),
        "outlier_tokens": None if found.norms is None else found.norms.outliers().round(6).tolist(),
        "probes": [to_plain(one) for one in found.probes],
        "embedding_explained": None if found.embedding is None else list(found.embedding.explained),
        "errors": [
            {"key": one.key, "label": one.label, "predicted": one.answer.label, "probability": one.answer.probability}
            for one in found.errors
        ],
        "skipped": [to_plain(item) for item in found.skipped],
        "notes": list(found.notes),
    }


def _charts(found: Overview) -> dict[str, str]:
    """Return the charts by name, as SVG."""
    drawn = {"distance": _distance(found)}
    if found.similarity is not None:
        drawn["similarity"] = draw_layer_similarity(found.similarity)
    if found.entropy is not None:
        drawn["entropy"] = draw_heads(found.entropy)
    if found.norms is not None:
        drawn["norms"] = draw_norms(found.norms)
    if found.probes:
        drawn["probes"] = draw_probes(found.probes)
    if found.embedding is not None:
        drawn["embedding"] = _embedding(found.embedding)
    return drawn


def _distance(found: Overview) -> str:
    if isinstance(found.reach, HeadStatistic):
        return draw_heads(found.reach)
    points = [(float(layer), value) for layer, value in distances(found.reach)]
    return charts.series_chart(
        [Series(found.reach.name, points)],
        label="Effective receptive field by layer.",
        x_name="layer",
        y_name="mean distance, pixels",
        bounds=(0.0, math.inf),
        integers=True,
    )


def _embedding(mapped: EmbeddingMap) -> str:
    """Return the map of embeddings. Of many images, some at equal distances in the data are drawn."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in mapped.shown:
        first, second = mapped.points[row]
        groups.setdefault(mapped.labels[row], []).append((float(first), float(second)))
    first_share, second_share = (f"{part:.0%} of the variance" for part in mapped.explained)
    return scatter(
        groups,
        label="Embeddings of images along their first two principal components.",
        x_name=f"first principal component, {first_share}",
        y_name=f"second, {second_share}",
    )


def _map_script(mapped: EmbeddingMap) -> str:
    """Return the script of the embedding map with its thumbnails, in the order of the dots."""
    names = [f"{mapped.keys[row]}: {mapped.labels[row]}" for row in mapped.shown]
    pictures = [base64.b64encode(picture).decode() for picture in mapped.pictures]
    values = {"names": names, "pictures": pictures}
    data = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())
    data = data.replace("<", r"\u003c")  # a file name could end the script
    return data + (Path(__file__).parent / "embedding_map.js").read_text(encoding="utf-8")


def _pictures(found: Overview) -> dict[str, UInt8[np.ndarray, "height width 3"]]:
    """Return the pictures by name."""
    drawn = {}
    if found.filters is not None:
        drawn["filters"] = draw_filters(found.filters)
    if found.positions is not None:
        drawn["positions"] = draw_positions(found.positions)
    if found.colours is not None:
        drawn["patches"] = draw_patch_colours(found.colours)
    return drawn


def _parts(
    found: Overview, drawn: dict[str, str], pictures: dict[str, UInt8[np.ndarray, "height width 3"]]
) -> Iterator[str]:
    report, config = found.report, found.bundle.network.config
    size = found.bundle.preprocess.image_size
    yield f"<p><strong>{report.accuracy.value:.2%} accuracy</strong> on {plural(report.images, 'image')}.</p>"
    yield (
        f'<p class="dim">{config.parameters() / 1e6:,.2f} million parameters, {config.macs(size) / 1e6:,.2f} million '
        f"multiply-accumulates for an image of {size[0]} x {size[1]} pixels.</p>"
    )
    rows = [(one.name, one.value, one.interval) for one in named_metrics(report)]
    yield table(("metric", "value", f"{LEVEL:.0%} interval"), rows)
    yield from skipped_part(found.skipped)
    if {"filters", "positions"} & pictures.keys():
        yield "<h2>What the first layer sees</h2>"
    yield '<div class="maps first">'
    if "filters" in pictures:
        yield _picture(pictures["filters"], "Filters: principal components of the patch embedding.")
    if "positions" in pictures:
        yield _picture(
            pictures["positions"],
            "Positions: each map shows the cosine similarity of one patch's position to all others, from dark (least) "
            "to bright (most).",
        )
    yield "</div>"
    yield "<h2>Layers</h2>"
    yield '<div class="beside">'
    yield from _layer_charts(found, drawn)
    yield "</div>"
    for note in found.notes:
        yield f'<p class="dim">Not shown: {escape(note)}.</p>'
    if found.colours is not None:
        yield from _patches(found.colour_pictures, found.colours.pictures())
    yield from _results(found, drawn)


def _patches(
    images: Sequence[UInt8[np.ndarray, "_ _ 3"]], colours: Float32[np.ndarray, "b rows columns components"]
) -> Iterator[str]:
    """Yield each image beside the colours of its patches."""
    yield "<h2>Patches</h2>"
    yield (
        "<p>Patches of equal colour have similar features: their first three principal components are drawn as red, "
        "green and blue.</p>"
    )
    yield '<div class="strip">'
    for picture, values in zip(images, colours, strict=True):
        shown = np.rint(255 * values[..., :3]).astype(np.uint8)
        pair = [
            thumbnail(Image.fromarray(each), name) for each, name in ((picture, "an image"), (shown, "its patches"))
        ]
        yield f'<div class="group">{"".join(pair)}</div>'
    yield "</div>"


def _layer_charts(found: Overview, drawn: dict[str, str]) -> Iterator[str]:
    over = f"over {plural(found.looked_at, 'image')}"
    each = "each layer and head" if isinstance(found.reach, HeadStatistic) else "each layer"
    captions = {
        "distance": f"{found.reach.name.capitalize()} of {each}: the distance over which it mixes information.",
        "entropy": "Entropy of the attention of each head: small if a token attends to few others.",
        "similarity": f"Similarity of the features of every two layers (CKA, unbiased, {over}).",
        "norms": "Norms of tokens. Patch tokens with large norms often serve the network as memory.",
        "probes": "Accuracy of a linear model of each layer's mean patch token, on images that it did not learn from.",
    }
    for name, caption in captions.items():
        if name in drawn:
            yield captioned(drawn[name], caption)


def _results(found: Overview, drawn: dict[str, str]) -> Iterator[str]:
    """Yield the parts about classes and images."""
    if "embedding" in drawn:
        yield "<h2>Embeddings</h2>"
        yield '<div id="embedding" class="beside">'
        yield f'<div id="dots" tabindex="0">{drawn["embedding"]}</div>'
        yield '<figure id="near" aria-live="polite"><img hidden alt=""><figcaption></figcaption></figure>'
        yield "</div>"
        yield (
            '<p class="dim">Embeddings of the images along their first two principal components. The pointer, or the '
            "arrow keys on the map, show the image of a dot.</p>"
        )
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
            yield "<p>Colours show which parts speak for the wrong answer, from dark (least) to bright (most).</p>"
        yield '<div class="maps">'
        for one in found.errors:
            relevance = one.answer.relevance
            picture = one.picture if relevance is None else overlay(one.picture, relevance)
            answer = f"{one.answer.label}, {one.answer.probability:.1%}"
            yield figure(picture, f"{one.key}: {answer}; the label is {one.label}.")
        yield "</div>"


def _picture(picture: UInt8[np.ndarray, "height width 3"], text: str) -> str:
    return f"<figure>{image(picture, text, 'png')}<figcaption>{escape(text)}</figcaption></figure>"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _write_csv(path: Path, heads: tuple[str, ...], rows: list[Any]) -> None:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(rows)
    path.write_text(file.getvalue(), encoding="utf-8")
