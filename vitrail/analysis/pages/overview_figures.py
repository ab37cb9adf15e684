"""The figures of an overview of one model: charts as SVG, and pictures as pixels."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from vitrail.analysis import charts
from vitrail.analysis.charts import scatter
from vitrail.analysis.drawing import (
    draw_curves,
    draw_filters,
    draw_heads,
    draw_layer_similarity,
    draw_norms,
    draw_patch_colours,
    draw_positions,
    draw_probes,
    draw_randomised,
)
from vitrail.analysis.receptive import ReceptiveField
from vitrail.analysis.statistics import HeadStatistic
from vitrail.analysis.summaries.embedding_map import EmbeddingMap
from vitrail.analysis.summaries.overview import Overview
from vitrail.analysis.summaries.samples import distances
from vitrail.report.charts import Series

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
        drawn["embedding"] = _embedding(found.embedding)
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


def _embedding(mapped: EmbeddingMap) -> str:
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
