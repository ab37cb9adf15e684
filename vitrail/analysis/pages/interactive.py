"""The interactive page of one image: attention weights in few bytes, its markup and its script."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, UInt8
from markupsafe import Markup
from PIL import Image

from vitrail.analysis.charts import SCALE
from vitrail.analysis.images import image_address
from vitrail.data.source import evenly
from vitrail.errors import plural
from vitrail.report.page import render

PICTURE_SIDE = 1024
"""Longest side of the picture on the page in pixels. The PNG files have the size of the image."""

SCRIPTS = ("maps.js", "selection.js", "drawing.js", "exports.js", "page.js", "controls.js")
"""Files of the script, in the order in which they run."""

RESERVE = 2_000
"""Bytes of a page for the notes and the fields that depend on how the weights are packed."""


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """Measurements of one image by patch, and the position of the patches on its picture."""

    attention: Float[np.ndarray, "layers heads n n"]
    grid: tuple[int, int]
    """Numbers of rows and columns of patches."""
    prefix: tuple[str, ...]
    """Names of the tokens before the patches."""
    has_class_token: bool
    area: tuple[float, float, float, float]
    """Left, top, width and height of all patches on the picture, in its pixels. They can extend beyond the picture."""
    rollout: Float[np.ndarray, "rows columns"]
    relevance: tuple[tuple[str, Float[np.ndarray, "rows columns"]], ...]
    """Names of classes, each with the relevance of the patches. The first class is shown first."""


def make_page(
    maps: AttentionMaps,
    picture: UInt8[np.ndarray, "height width 3"],
    *,
    title: str,
    predictions: Sequence[tuple[str, str]] = (),
    max_bytes: int,
) -> tuple[str, tuple[str, ...]]:
    """Return the page of a picture, at most `max_bytes` long unless its other parts are longer than that, and notes
    about layers, heads and precision that the page lacks.

    `predictions` are names with their probabilities or numbers as text. The weights get the bytes that the other parts
    leave. If they do not fit in 8 bits each, the page has fewer bits, layers or heads.
    """
    image = Image.fromarray(picture)
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.LANCZOS)
    small = np.array(image)
    address = image_address(small, "png" if max(small.shape) <= 256 else "jpeg")
    down, across = small.shape[0] / picture.shape[0], small.shape[1] / picture.shape[1]  # differ by rounding
    about = _about(maps, small, (across, down), Path(title).stem)

    def page(packed: PackedMaps | None, notes: tuple[str, ...]) -> str:
        shown = packed or PackedMaps((), (), BITS[-1], b"")
        chosen = {"layers": shown.layers, "heads": shown.heads, "bits": shown.bits}
        return render(
            "analysis/pages/interactive/page.html",
            title=title,
            style=Markup(_read("page.css")),
            script=Markup(script_text()),
            predictions=predictions,
            notes=notes,
            about=Markup(json.dumps(about | chosen).replace("<", "\\u003c")),
            picture=address,
            weights=Markup(base64.b64encode(shown.data).decode("ascii")),
        )

    rest = max_bytes - RESERVE - len(page(None, ()).encode())
    packed = pack(maps.attention, max(0, rest * 3 // 4))
    notes = _notes(packed, maps, max_bytes)
    return page(packed, notes), notes


def script_text() -> str:
    """Return the script of the page, without indentation and without lines that are comments."""
    lines = [line.strip() for file in SCRIPTS for line in _read(file).splitlines()]
    return "\n".join(['"use strict";', *(line for line in lines if line and not line.startswith(("//", "/**")))])


def _about(maps: AttentionMaps, picture: np.ndarray, factors: tuple[float, float], name: str) -> dict[str, Any]:
    """Return the data of the script. `factors` scale the image to the picture, across and down."""
    return {
        "name": name,
        "grid": maps.grid,
        "prefix": maps.prefix,
        "hasClassToken": maps.has_class_token,
        "picture": (picture.shape[1], picture.shape[0]),
        "area": [round(factor * value, 3) for factor, value in zip(2 * factors, maps.area, strict=True)],
        "colours": SCALE,
        "rollout": _rounded(maps.rollout),
        "relevance": [{"label": label, "values": _rounded(values)} for label, values in maps.relevance],
    }


def _notes(packed: PackedMaps | None, maps: AttentionMaps, max_bytes: int) -> tuple[str, ...]:
    layers, heads, tokens, _ = maps.attention.shape
    limit = f"the limit of {max_bytes / 1e6:g} MB (--page-size)"
    if packed is None:
        return (
            f"The page has no attention of heads, because one map of {tokens} tokens exceeds {limit}. Choose a "
            "smaller --image-size or a larger limit.",
        )
    notes = []
    if packed.bits < BITS[0]:
        notes.append(f"Attention has {packed.bits} bits per weight instead of {BITS[0]} because of {limit}.")
    for name, kept, count in (("layer", packed.layers, layers), ("head", packed.heads, heads)):
        if len(kept) < count:
            numbers = ", ".join(map(str, kept))
            notes.append(f"The page has {plural(len(kept), name)} of {count} ({numbers}) because of {limit}.")
    return tuple(notes)


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values.ravel()]


def _read(file: str) -> str:
    return (Path(__file__).parent / "interactive" / file).read_text(encoding="utf-8")


# Attention weights in few bytes: codes of 4 to 8 bits, compressed, in a budget. A row holds the weights with which
# one token attends to all tokens. Its largest weight is stored, and each weight is a code from 0 to 2^bits - 1, the
# square root of its fraction of the largest weight. The square root gives small weights finer steps than large ones,
# which a logarithmic scale shows. Codes are compressed as differences from the row above, because neighbouring
# patches attend to similar patches.


BITS = (8, 7, 6, 5, 4)
"""Precisions of codes, from the finest to the coarsest."""

SAMPLE = 2**20
"""Approximate number of weights that are compressed to estimate the size of all of them."""


@dataclass(frozen=True, eq=False)
class PackedMaps:
    """Attention weights of some layers and heads."""

    layers: tuple[int, ...]
    """Numbers of the layers, from 0."""
    heads: tuple[int, ...]
    """Numbers of the heads, from 0."""
    bits: int
    data: bytes
    """The largest weights of all rows (float32, little-endian), and then the codes of all weights, each less the code
    above it in its map, modulo 256. Layers, heads, rows and columns are in this order. All of it is compressed (zlib).
    """


def quantise(
    weights: Float[np.ndarray, "*n tokens"], bits: int
) -> tuple[UInt8[np.ndarray, "*n tokens"], Float32[np.ndarray, "*n"]]:
    """Return the codes of weights, which are at least 0, and the largest weight of each row.

    A code stands for the row's largest weight times the square of the code divided by 2^bits - 1. The square root of
    this differs from that of the weight by at most half a step.
    """
    exact = weights.astype(np.float32)
    maxima = np.asarray(exact.max(axis=-1))  # a single row has a scalar
    fractions = exact / np.where(maxima > 0, maxima, 1)[..., None]
    return np.rint(np.sqrt(fractions) * (2**bits - 1)).astype(np.uint8), maxima


def pack(attention: Float[np.ndarray, "layers heads n n"], budget: int) -> PackedMaps | None:
    """Return the weights in at most `budget` bytes, or None if not even one map fits.

    The finest precision that fits is chosen. If the coarsest one does not fit, layers at equal distances are kept,
    among them the last one. If not even one layer fits, heads at equal distances of the last layer are kept.
    """
    layers, heads, _, _ = attention.shape
    for bits in BITS:
        if _estimate(attention, bits) <= 1.05 * budget:
            packed = _pack(attention, range(layers), range(heads), bits)
            if len(packed.data) <= budget:
                return packed
    bits = BITS[-1]
    one_map = _estimate(attention, bits) / (layers * heads)
    most = min(layers * heads - 1, int(1.05 * budget / one_map))
    for count in range(min(layers - 1, most // heads), 0, -1):
        packed = _pack(attention, _evenly(layers, count), range(heads), bits)
        if len(packed.data) <= budget:
            return packed
    for count in range(min(heads if layers > 1 else heads - 1, most), 0, -1):
        packed = _pack(attention, (layers - 1,), _evenly(heads, count), bits)
        if len(packed.data) <= budget:
            return packed
    return None


def _pack(attention: np.ndarray, layers: Sequence[int], heads: Sequence[int], bits: int) -> PackedMaps:
    """Return the weights of layers and heads, one layer at a time, so that little memory is needed beside them."""
    maxima, codes = [], []
    for layer in layers:
        rows, largest = quantise(attention[layer, list(heads)], bits)
        maxima.append(largest.astype("<f4").tobytes())
        codes.append(np.diff(rows, axis=1, prepend=np.uint8(0)).tobytes())
    compressor = zlib.compressobj(9)
    parts = [compressor.compress(part) for part in (*maxima, *codes)]
    data = b"".join([*parts, compressor.flush()])
    return PackedMaps(tuple(layers), tuple(heads), bits, data)


def _estimate(attention: np.ndarray, bits: int) -> float:
    """Return about how many bytes all weights take, from maps at equal distances."""
    maps = attention.reshape(-1, *attention.shape[2:])
    chosen = _evenly(len(maps), max(1, SAMPLE // maps[0].size))
    sample = maps[chosen][None]
    return len(_pack(sample, (0,), range(len(chosen)), bits).data) * len(maps) / len(chosen)


def _evenly(total: int, count: int) -> list[int]:
    """Return at most `count` different numbers below `total` at equal distances, among them the last one."""
    return (total - 1 - evenly(total, count))[::-1].tolist()
