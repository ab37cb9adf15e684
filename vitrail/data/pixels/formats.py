"""The image formats that are decoded, and the decoders of AVIF and HEIC, which not every machine has."""

from __future__ import annotations

import functools
import importlib
import threading

from PIL import Image, features

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "HEIC")
"""Formats that may be opened. Pillow also supports formats that start programs (EPS) or read other files."""

SUFFIXES = frozenset({
    ".jpg", ".jpeg", ".jfif", ".jpe", ".jif", ".jfi", ".mpo", ".png", ".apng", ".webp", ".bmp", ".dib", ".gif", ".tif",
    ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".heic", ".heif", ".hif",
})  # fmt: skip
"""Suffixes, in lower case, of files that count as images, also on a machine without a decoder for their format."""

ALWAYS = FORMATS[:7]
"""Formats that every Pillow decodes."""

REGISTERING = threading.Lock()


def pillow_formats(found: str) -> tuple[str, ...]:
    """Return Pillow's names of the formats to try for a file that begins like the format `found`.

    A HEIC file loads pillow-heif if it is installed. Nothing else does, because loading takes time.
    """
    if found == "AVIF":
        return ("AVIF",) if _has_avif() else ()
    if found == "HEIC":
        return ("HEIF",) if _has_heic() else ()
    return ALWAYS


def missing_decoder(found: str) -> str | None:
    """Return the reason why this machine cannot decode the format `found`, with advice. Return None if it can."""
    if found == "AVIF" and not _has_avif():
        return "is an AVIF image, which the installed Pillow cannot decode: pip install --upgrade pillow"
    if found == "HEIC" and not _has_heic():
        return "is a HEIC image, and decoding it needs pillow-heif: pip install 'vitrail[heic]'"
    return None


@functools.cache
def _has_avif() -> bool:
    return bool(features.check("avif")) if "avif" in features.features or "avif" in features.modules else False


@functools.cache
def _has_heic() -> bool:
    """Register the decoder of HEIC with Pillow. Return False if it is not installed."""
    with REGISTERING:
        try:
            importlib.import_module("pillow_heif").register_heif_opener()
        except ImportError:
            return False
        return "HEIF" in Image.OPEN
