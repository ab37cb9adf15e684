"""The interactive page of one image: its markup, its data and its script in one file that requests nothing."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vitrail.analysis.charts import SCALE
from vitrail.analysis.pages.figure import image_address
from vitrail.analysis.pages.interactive.packing import BITS, PackedMaps, pack
from vitrail.errors import plural
from vitrail.report.page import document, escape

PICTURE_SIDE = 1024
"""Longest side of the picture on the page in pixels. The PNG files have the size of the image."""

SCRIPTS = ("maps.js", "selection.js", "drawing.js", "exports.js", "page.js", "controls.js")
"""Files of the script, in the order in which they run."""

PREDICTIONS, NOTES = "<!-- predictions -->", "<!-- notes -->"
"""Marks in page.html that are replaced by HTML."""

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


@dataclass(frozen=True)
class InteractivePage:
    """A page as text."""

    text: str
    notes: tuple[str, ...]
    """Layers, heads and precision that the page lacks, because it would be too large."""


def make_page(
    maps: AttentionMaps,
    picture: UInt8[np.ndarray, "height width 3"],
    *,
    title: str,
    predictions: str = "",
    max_bytes: int,
) -> InteractivePage:
    """Return the page of a picture, at most `max_bytes` long unless its other parts are longer than that.

    `predictions` is HTML. The weights get the bytes that the other parts leave. If they do not fit in 8 bits each, the
    page has fewer bits, layers or heads, and a note about this.
    """
    small = _small(picture)
    address = image_address(small, "png" if max(small.shape) <= 256 else "jpeg")
    factor = small.shape[1] / picture.shape[1]
    about = _about(maps, small, factor, Path(title).stem)

    def page(packed: PackedMaps | None, notes: tuple[str, ...]) -> str:
        chosen: dict[str, Any] = {"layers": (), "heads": (), "bits": BITS[-1]}
        data = b""
        if packed is not None:
            chosen = {"layers": packed.layers, "heads": packed.heads, "bits": packed.bits}
            data = packed.data
        markup = _read("page.html").replace(PREDICTIONS, predictions)
        markup = markup.replace(NOTES, "".join(f'<p class="note">{escape(note)}</p>' for note in notes))
        parts = [
            markup,
            _data("about", "application/json", json.dumps(about | chosen).replace("<", "\\u003c")),
            _data("picture", "text/plain", address),
            _data("weights", "text/plain", base64.b64encode(data).decode("ascii")),
        ]
        return document(title, parts, style=_read("page.css"), script=script_text())

    rest = max_bytes - RESERVE - len(page(None, ()).encode())
    packed = pack(maps.attention, max(0, rest * 3 // 4))
    notes = _notes(packed, maps, max_bytes)
    return InteractivePage(page(packed, notes), notes)


def script_text() -> str:
    """Return the script of the page, without indentation and without lines that are comments."""
    lines = [line.strip() for file in SCRIPTS for line in _read(file).splitlines()]
    return "\n".join(['"use strict";', *(line for line in lines if line and not line.startswith(("//", "/**")))])


def _about(maps: AttentionMaps, picture: np.ndarray, factor: float, name: str) -> dict[str, Any]:
    """Return the data of the script."""
    return {
        "name": name,
        "grid": maps.grid,
        "prefix": maps.prefix,
        "hasClassToken": maps.has_class_token,
        "picture": (picture.shape[1], picture.shape[0]),
        "area": [round(factor * value, 3) for value in maps.area],
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


def _small(picture: UInt8[np.ndarray, "height width 3"]) -> UInt8[np.ndarray, "h w 3"]:
    """Return the picture with sides of at most `PICTURE_SIDE`."""
    image = Image.fromarray(picture)
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.LANCZOS)
    return np.array(image)


def _data(name: str, kind: str, text: str) -> str:
    """Return data as an element that no browser runs."""
    return f'<script type="{kind}" id="{name}">{text}</script>'


def _read(file: str) -> str:
    return (Path(__file__).parent / file).read_text(encoding="utf-8")
