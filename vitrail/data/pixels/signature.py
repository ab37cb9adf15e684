"""Recognition of file formats by their first bytes, for messages about files that cannot be decoded."""

from __future__ import annotations

import itertools

from vitrail.data.pixels.formats import FORMATS

HEAD = 1000
"""Number of bytes at the beginning of a file that determine its format."""

SIGNATURES = (
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"GIF8", "GIF"),
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (8, b"WEBP", "WEBP"),
    *((0, b"P%c%c" % (kind, space), "PPM") for kind, space in itertools.product(b"123456", b" \t\r\n#")),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"8BPS", "a Photoshop file"),
    (128, b"DICM", "DICOM"),
    (0, b"\x76\x2f\x31\x01", "OpenEXR"),
    (0, b"#?RADIANCE", "Radiance HDR"),
    (0, b"DDS ", "DDS"),
    (0, b"SIMPLE  =", "FITS"),
    (0, b"P7\n", "PAM"),
    (0, b"Pf\n", "PFM"),
    (0, b"PF\n", "PFM"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"%PDF", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (0, b"\x1f\x8b", "a gzip file"),
    (0, b"version https://git-lfs", "a Git LFS pointer, whose file was not fetched"),
)
"""Position of the signature, its bytes, and the name of the format."""

OTHER_IMAGES = frozenset({
    "JPEG XL", "JPEG 2000", "a Photoshop file", "DICOM", "OpenEXR", "Radiance HDR", "DDS", "FITS", "PAM", "PFM", "ICO",
    "SVG",
})  # fmt: skip
"""Formats of images that are not decoded."""

BRANDS = (
    (b"avif", "AVIF"),
    (b"avis", "AVIF"),
    (b"hei", "HEIC"),
    (b"hev", "HEIC"),
    (b"mif1", "HEIC"),
    (b"msf1", "HEIC"),
)
"""Beginnings of the four-letter brands of image files in the container of MPEG-4, and the names of the formats. AVIF
files also have the brand mif1, so it decides last."""

MARKUP = ((b"<svg", "SVG"), (b"<html", "an HTML page"), (b"<!doctype html", "an HTML page"), (b"<?xml", "XML"))
"""Lower-case markers of text formats and the names of the formats. The first marker that occurs in the first bytes of
the file (`HEAD`) decides."""


def format_of(data: bytes) -> str:
    """Return the name of a file's format, in Pillow's spelling, or "" if the format is unknown."""
    if data[4:8] == b"ftyp":
        return _of_brands(data[8 : min(int.from_bytes(data[:4]), 256)])
    for place, mark, name in SIGNATURES:
        if data.startswith(mark, place):
            return name
    text = data[:HEAD].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return next((name for mark, name in MARKUP if text.startswith(b"<") and mark in text), "")


def is_image(data: bytes) -> bool:
    """Return True if a file begins like an image, even of a format that is not decoded."""
    return format_of(data) in {*FORMATS, *OTHER_IMAGES}


def _of_brands(brands: bytes) -> str:
    """Return the format of a file in the container of MPEG-4, from its major brand, its version, and its other
    brands."""
    found = {brands[:4], *(brands[start : start + 4] for start in range(8, len(brands), 4))}
    return next((name for mark, name in BRANDS if any(brand.startswith(mark) for brand in found)), "a video")
