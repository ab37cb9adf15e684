"""Addresses that contain the pictures of analyses, for their pages."""

from __future__ import annotations

import io
from typing import Literal

import numpy as np
from jaxtyping import UInt8
from markupsafe import Markup
from PIL import Image

from vitrail.analysis.charts import png
from vitrail.report.page import embedded

ImageForm = Literal["jpeg", "png"]
"""File format of an embedded picture."""

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


def image_address(picture: UInt8[np.ndarray, "height width 3"], form: ImageForm) -> Markup:
    """Return an address that contains a picture."""
    if form == "png":
        return embedded(png(picture), form)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=88)
    return embedded(file.getvalue(), form)
