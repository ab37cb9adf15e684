"""Pictures with captions on the pages of analyses, and their style."""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Iterator
from typing import Literal

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vitrail.analysis.charts import png
from vitrail.data.batch import Skipped
from vitrail.errors import plural
from vitrail.report.page import escape, table

ImageForm = Literal["jpeg", "png"]
"""File format of an embedded picture."""

PAGE_SIDE = 480
"""Longest side of a picture on a page, in pixels."""

MAX_SKIPPED = 20
"""Largest number of rows in the list of images that could not be decoded."""

STYLE = """
.maps { display: grid; gap: 1rem; margin-top: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); }
.maps figure { width: auto; } .maps figure img { width: 100%; height: auto; }
.maps figcaption { color: CanvasText; font-size: .9rem; line-height: 1.4; }
"""

NARROW = ".chart svg { max-width: 100%; height: auto; }"
"""Style of charts on narrow windows."""


def captioned(chart: str, text: str) -> str:
    """Return an SVG chart above a text."""
    return f'<div class="chart">{chart}<p class="dim">{escape(text)}</p></div>'


def figure(picture: UInt8[np.ndarray, "height width 3"], text: str) -> str:
    """Return an HTML figure of a picture above its caption. Small pictures are enlarged by a whole factor."""
    small = Image.fromarray(picture)
    small.thumbnail((PAGE_SIDE, PAGE_SIDE))
    if max(small.size) < PAGE_SIDE // 2:
        factor = PAGE_SIDE // max(small.size)
        small = small.resize((small.width * factor, small.height * factor), Image.Resampling.NEAREST)
    return f"<figure>{image(np.asarray(small), text, 'jpeg')}<figcaption>{escape(text)}</figcaption></figure>"


def skipped_part(skipped: Collection[Skipped]) -> Iterator[str]:
    """Yield a list of the images that could not be decoded, unless there are none."""
    if not skipped:
        return
    rows = [(item.key, item.reason) for item in skipped]
    them = "it" if len(rows) == 1 else "them"
    first = f" These are the first {MAX_SKIPPED}." if len(rows) > MAX_SKIPPED else ""
    yield f"<p>{plural(len(rows), 'image')} could not be decoded. The numbers do not include {them}.{first}</p>"
    yield table(("image", "reason"), rows[:MAX_SKIPPED])


def image(picture: UInt8[np.ndarray, "height width 3"], text: str, form: ImageForm) -> str:
    """Return an `img` tag with an embedded picture."""
    return f'<img alt="{escape(text)}" src="{image_address(picture, form)}">'


def image_address(picture: UInt8[np.ndarray, "height width 3"], form: ImageForm) -> str:
    """Return an address that contains a picture."""
    if form == "png":
        data = png(picture)
    else:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=88)
        data = file.getvalue()
    return f"data:image/{form};base64,{base64.b64encode(data).decode('ascii')}"
