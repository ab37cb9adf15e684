"""Pictures of measurements. Each function takes a measurement, and returns SVG or an array of pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, UInt8
from markupsafe import Markup
from PIL import Image

from vitrail.analysis.charts import colours as colour_scale
from vitrail.analysis.charts import heat_map, mosaic, png, scatter, series_chart
from vitrail.analysis.faithfulness import RandomisedWeights, SaliencyCurves
from vitrail.analysis.features import Filters, LayerProbe, PatchColours, PositionSimilarity, TokenNorms
from vitrail.analysis.heads import HeadStatistic, ReceptiveField
from vitrail.analysis.saliency import attention_rollout, class_relevance
from vitrail.analysis.similarity import LayerSimilarity
from vitrail.analysis.tracing import Trace, check_maps, trace
from vitrail.data.pixels.decode import small_picture
from vitrail.data.pixels.geometry import Placement
from vitrail.errors import BundleError, ConfigError
from vitrail.report.charts import Series
from vitrail.report.page import embedded, jpeg
from vitrail.weights.bundle import Bundle

Picture = UInt8[np.ndarray, "height width 3"]


def draw_heads(statistic: HeadStatistic, beside: ReceptiveField | None = None) -> Markup:
    """Return a scatter plot of a number of each head over the layers (figures 7 and 11), as SVG.

    `beside` adds the distance of a network's effective receptive field by layer, in pixels.
    """
    heads = [
        (float(layer), float(mean)) for layer, row in zip(statistic.layers, statistic.mean, strict=True) for mean in row
    ]
    groups = {"heads": heads}
    if beside is not None:
        groups["receptive field"] = [
            (float(layer), float(d)) for layer, d in zip(beside.layers, beside.distance, strict=True)
        ]
    return scatter(
        groups,
        label=f"{statistic.name.capitalize()} of each head by layer, mean over {statistic.images} images.",
        x_name="layer",
        y_name=f"{statistic.name}, {statistic.unit}",
        bounds=(0.0, math.inf),
        integers=True,
    )


def draw_layer_similarity(
    similarity: LayerSimilarity, *, of_layers: str = "of layers", row_name: str = "layer", column_name: str = "layer"
) -> Markup:
    """Return the similarity of every two layers as a heat map, as SVG. `of_layers` names the layers for screen
    readers."""
    return heat_map(
        similarity.values,
        label=f"{similarity.name.capitalize()} {of_layers}.",
        row_name=row_name,
        column_name=column_name,
        unit=similarity.unit,
        rows=[str(layer) for layer in similarity.rows],
        columns=[str(layer) for layer in similarity.columns],
        bounds=similarity.bounds,
    )


def draw_norms(norms: TokenNorms) -> Markup:
    """Return the median and largest norm of patch tokens by layer, and the norms of the other tokens, as SVG."""
    patches = norms.patches
    lines = {"patches, median": np.median(patches, axis=(0, 2)), "patches, largest": patches.max(axis=(0, 2))}
    if norms.cls is not None:
        lines["class token, mean"] = norms.cls.mean(axis=0)
    if norms.registers.shape[2]:
        lines["registers, mean"] = norms.registers.mean(axis=(0, 2))
    return series_chart(
        [_by_layer(name, norms.layers, values) for name, values in lines.items()],
        label="Norms of tokens by layer.",
        x_name="layer",
        y_name=norms.unit,
        bounds=(0.0, math.inf),
        integers=True,
    )


def draw_probes(probes: Sequence[LayerProbe]) -> Markup:
    """Return the accuracy of a linear model by layer, with the ends of its interval, as SVG."""
    layers = [one.layer for one in probes]
    lines: dict[str, list[float | None]] = {
        "accuracy": [one.accuracy.value for one in probes],
        "95 % interval, lower end": [one.accuracy.low for one in probes],
        "95 % interval, upper end": [one.accuracy.high for one in probes],
    }
    return series_chart(
        [
            _by_layer(name, layers, [math.nan if value is None else 100 * value for value in values])
            for name, values in lines.items()
        ],
        label="Accuracy of a linear model of each layer's tokens.",
        x_name="layer",
        y_name="held-out accuracy, %",
        bounds=(0.0, 100.0),
        integers=True,
    )


def draw_curves(curves: SaliencyCurves, kind: str = "deletion") -> Markup:
    """Return the mean deletion or insertion curve of each saliency map, with its area in the legend, as SVG."""
    values = curves.deletion if kind == "deletion" else curves.insertion
    areas = curves.deletion_auc() if kind == "deletion" else curves.insertion_auc()
    lines = [
        Series(
            f"{name} (area {area:.3f})",
            [(float(x), float(y)) for x, y in zip(100 * curves.fractions, mean, strict=True)],
        )
        for name, mean, area in zip(curves.methods, values.mean(axis=1), areas.mean(axis=1), strict=True)
    ]
    return series_chart(
        lines,
        label=f"{kind.capitalize()} curves.",
        x_name="deleted patches, %" if kind == "deletion" else "inserted patches, %",
        y_name=curves.unit,
        bounds=(0.0, 1.0),
    )


def draw_randomised(checks: Mapping[str, RandomisedWeights]) -> Markup:
    """Return the similarity of saliency maps while weights become random from the head downward, as SVG.

    `checks` has the measurement of each method, by its name. All of them are of one network.
    """
    lines = [
        Series(name, [(float(stage + 1), float(mean)) for stage, mean in enumerate(check.correlation.mean(axis=1))])
        for name, check in checks.items()
    ]
    first = next(iter(checks.values()))
    return series_chart(
        lines,
        label=f"Rank correlation with the trained network's maps; random down to {', '.join(first.stages)}.",
        x_name="layers with random weights, from the head",
        y_name=first.unit,
        bounds=(-1.0, 1.0),
        integers=True,
    )


def draw_filters(filters: Filters, *, columns: int = 7, scale: int = 3) -> Picture:
    """Return the filters as tiles in colour, or in grey if they have one channel."""
    return mosaic(filters.pictures(), columns, scale=scale, gap=2)


def draw_positions(similarity: PositionSimilarity, *, scale: int = 3) -> Picture:
    """Return a grid of maps: the map in a row and column is that of the patch at this place.

    All maps have one scale, from the smallest cosine to 1.
    """
    values = similarity.values
    rows, columns = values.shape[:2]
    low = float(values.min())
    pictures = colour_scale((values - low) / max(1 - low, 1e-12)).reshape(rows * columns, rows, columns, 3)
    return mosaic(pictures / 255, columns, scale=scale, gap=2)


def draw_patch_colours(found: PatchColours, *, columns: int = 4, scale: int = 8) -> Picture:
    """Return the first three principal components of each image's patches as red, green and blue."""
    return mosaic(found.pictures()[..., :3], columns, scale=scale, gap=2)


def overlay(picture: Picture, values: Float[np.ndarray, "height width"], *, opacity: float = 0.6) -> Picture:
    """Return a picture under a map of the same size. The map's colours run from its smallest to its largest value.

    Pixels whose value is not finite, such as those that the network did not see, keep their own colours.
    """
    inside = np.isfinite(values)
    low, high = (float(values[inside].min()), float(values[inside].max())) if inside.any() else (0.0, 1.0)
    colours = colour_scale((np.where(inside, values, low) - low) / max(high - low, 1e-300))
    mixed = (1 - opacity) * picture + opacity * colours
    return np.where(inside[..., None], np.rint(mixed), picture).astype(np.uint8)


def on_picture(
    values: Float[np.ndarray, "rows columns"], found: Trace, placement: Placement
) -> Float[np.ndarray, "height width"]:
    """Return a map of patches as a map of the picture's pixels, by linear interpolation.

    `found` is a trace of the same image, and `placement` is the position of the picture in it. Pixels that the network
    did not see are NaN.
    """
    covered = tuple(side * patch for side, patch in zip(found.grid, found.patch, strict=True))
    if covered != placement.size:  # some rows or columns of pixels fill no patch
        values = np.kron(values, np.ones(found.patch))
        rest = [(0, max(0, size - side)) for size, side in zip(placement.size, covered, strict=True)]
        values = np.pad(values, rest, mode="edge")[: placement.size[0], : placement.size[1]]
    return placement.map_back(values.astype(np.float64), fill=float("nan"))


def _by_layer(name: str, layers: Sequence[int], values: Sequence[float] | np.ndarray) -> Series:
    return Series(name, [(float(layer), float(value)) for layer, value in zip(layers, values, strict=True)])


# Overlays for the HTTP server: one map on a small copy of a picture, which is computed quickly.


SIDE = 640
"""Longest side of an overlay in pixels. Pictures are not enlarged."""


class Overlays:
    """Draws the maps of `vitrail explain`: relevance for a class, or attention rollout for a model without classes."""

    def refusal(self, bundle: Bundle) -> str | None:
        """Return why a model has no overlays, or None if it has them."""
        try:
            check_maps(bundle.network, ["gradients"])
        except (ConfigError, BundleError) as error:
            return str(error).partition(";")[0]
        return None

    def draw(self, bundle: Bundle, image: bytes, target: int | None) -> bytes:
        """Return the picture of an image file under a map, as a JPEG file. The map is the relevance for the output of
        the number `target`, or the attention rollout for None. Raise `UndecodableImage`, and `ConfigError` for a model
        without overlays."""
        network, preprocess = bundle.network, bundle.preprocess
        inputs = bundle.inputs([preprocess.pixels(image)])
        if target is None:
            found = attention_rollout(network, inputs)
        else:
            found = class_relevance(network, inputs, torch.tensor([target], device=inputs.device))
        pixels = np.asarray(small_picture(image, SIDE))
        grid = trace(network, inputs, layers=(-1,), heads=(0,))  # says where the patches lie
        values = on_picture(found.values[0], grid, preprocess.placement(pixels.shape[:2]))
        return jpeg(Image.fromarray(overlay(pixels, values)))


# Addresses that contain the pictures of analyses, for their pages.


PAGE_SIDE = 480
"""Longest side of a picture on a page, in pixels."""


def figure_address(picture: UInt8[np.ndarray, "height width 3"]) -> Markup:
    """Return an address that contains a picture. Small pictures are enlarged by a whole factor."""
    small = Image.fromarray(picture)
    small.thumbnail((PAGE_SIDE, PAGE_SIDE))
    if max(small.size) < PAGE_SIDE // 2:
        factor = PAGE_SIDE // max(small.size)
        small = small.resize((small.width * factor, small.height * factor), Image.Resampling.NEAREST)
    return image_address(np.asarray(small), "jpeg")


def image_address(picture: UInt8[np.ndarray, "height width 3"], form: Literal["jpeg", "png"]) -> Markup:
    """Return an address that contains a picture as a file of this format."""
    return embedded(png(picture) if form == "png" else jpeg(Image.fromarray(picture), quality=88), form)
