"""Names of classes on pictures."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFont

from vitrail.report.drawing import FONTS, draw_boxes, draw_legend


def test_letters_beyond_ascii_are_drawn() -> None:
    """Pillow's own font draws the same empty box for each of them."""
    found: list[str] = []
    for name in FONTS:
        with suppress(OSError):
            found.append(Path(str(ImageFont.truetype(name).path)).name)
    if not found:
        pytest.skip("this machine has none of the fonts")
    first, other = (np.asarray(draw_legend(["a", name], 4, [0, 1])) for name in ("gr\u00fcn", "gr\u0436n"))
    assert first.shape != other.shape or (first != other).any()
    box, picture = np.array([[2.0, 2.0, 60.0, 30.0]]), Image.new("RGB", (64, 32))
    first, other = (np.asarray(draw_boxes(picture, box, [0], [name])) for name in ("\u00fc", "\u0436"))
    assert (first != other).any()
