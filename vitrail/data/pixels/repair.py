"""Repair of PNG and JPEG files whose pixels are complete, but which Pillow refuses for something else in the file, and
a check of PNG files whose pixels are incomplete, which Pillow fills with zeros."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator

import numpy as np

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

TRANSPARENCY = b"tRNS"
"""The only ancillary chunk that changes the pixels which `decode` returns."""

PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Numbers of channels by the colour type of a PNG file."""

ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column, first row, and the distances of columns and of rows of each pass of an interlaced PNG file."""

INFLATED = 1 << 20
"""Largest number of bytes that are decompressed at a time."""

EXIF = b"eXIf"
"""The chunk that holds the orientation, if it is not in a text."""

TEXTS = {b"tEXt", b"zTXt", b"iTXt"}
OF_ORIENTATION = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")
"""Keywords of texts that can hold the orientation."""

START = b"\xff\xd8"
SCAN = b"\xff\xda"
END = b"\xff\xd9"

AFTER_SCAN = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")
"""The first marker after the compressed data of a scan. Stuffed zero bytes and restart markers belong to the data."""

RESTART = re.compile(rb"\xff[\xd0-\xd7]")

FRAMES = frozenset({0xC0, 0xC1, 0xC2, 0xC9, 0xCA})
"""Markers of the frame header of a JPEG that Pillow decodes."""

APPLICATION = range(0xE0, 0xF0)
COMMENT = 0xFE
"""Markers of segments without influence on the pixels, with the exceptions in `NEEDED`."""

NEEDED = {0xE0: b"JFIF\0", 0xE1: b"Exif\0", 0xEE: b"Adobe"}
"""Beginnings of the application segments that determine colours or the orientation, by their markers."""

SHORTEST = {0xE0: 16, 0xEE: 14}
"""Least lengths of such segments, which include the two bytes of the length."""

FILLS = (b"", b"\xb5\x6a\x93\x2d" * 16, b"\x4a\x95\x6c\xd2" * 16)
"""Bytes that take the place of missing compressed data. If some data is missing, they become different pixels."""

Chunk = tuple[bytes, bytes, bool]
"""Type of a chunk, the whole chunk, and True if its checksum is right."""


def png_of_pixels(data: bytes, *, keep_texts: bool) -> bytes | None:
    """Return a PNG file with only those chunks of `data` that determine its pixels, and EXIF. Return None if `data` is
    not a PNG file, or if one of the chunks of pixels has a wrong checksum or is cut short.

    With `keep_texts`, texts that can hold the orientation are kept, too. EXIF and texts with a wrong checksum are
    dropped. A missing final chunk (IEND) is no fault. Source: PNG (Third Edition), W3C, sections 5.4, 11.2 and 13.1.
    """
    if not data.startswith(PNG_SIGNATURE):
        return None
    kept = [PNG_SIGNATURE]
    for name, chunk, is_right in _chunks(data):
        is_critical = not name[0] & 0x20
        if is_critical or name == TRANSPARENCY:
            if not is_right:
                return None
            kept.append(chunk)
        elif is_right and (name == EXIF or (keep_texts and name in TEXTS and chunk[8:].startswith(OF_ORIENTATION))):
            kept.append(chunk)
    return b"".join(kept)


def has_all_rows(png: bytes) -> bool:
    """Return True if the compressed data of a PNG file has all the pixels that its header states. Source: PNG (Third
    Edition), W3C, sections 7 and 8."""
    width, height = int.from_bytes(png[16:20]), int.from_bytes(png[20:24])
    bits = png[24] * PNG_CHANNELS.get(png[25], 1)
    passes = ADAM7 if png[28] else ((0, 0, 1, 1),)
    missing = 0
    for left, top, right, down in passes:
        columns, rows = -(-(width - left) // right), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            missing += rows * (1 + (columns * bits + 7) // 8)  # each row begins with the number of its filter
    inflater = zlib.decompressobj()
    for name, chunk, _ in _chunks(png):
        data = chunk[8:-4] if name == b"IDAT" else b""
        while data and missing > 0 and not inflater.eof:
            missing -= len(inflater.decompress(data, INFLATED))
            data = inflater.unconsumed_tail
    return missing <= 0


def _chunks(png: bytes) -> Iterator[Chunk]:
    """Yield the chunks of a PNG file up to its end. A last chunk that is cut short counts as one with a wrong
    checksum."""
    start = len(PNG_SIGNATURE)
    while start + 8 <= len(png):
        end = start + 12 + int.from_bytes(png[start : start + 4])
        name, chunk = png[start + 4 : start + 8], png[start:end]
        yield name, chunk, end <= len(png) and zlib.crc32(chunk[4:-4]) == int.from_bytes(chunk[-4:])
        if name == b"IEND":
            return
        start = end


def jpeg_of_pixels(data: bytes) -> bytes | None:
    """Return a JPEG file without comments and application segments. Those of JFIF, EXIF and Adobe stay if they have
    their full length, because they can determine colours and orientation. Return None if `data` is not a JPEG file, or
    if nothing is left out. Source: ITU-T T.81, annex B; T.872, section 6.5.
    """
    if not data.startswith(START):
        return None
    kept, start = [START], len(START)
    while (marker := _marker(data, start)) is not None and marker[0] != SCAN[1]:
        kind, length, end = marker
        is_needed = data.startswith(NEEDED.get(kind, ()), length + 2)
        is_other = kind == COMMENT or (kind in APPLICATION and not is_needed)
        if not is_other and end - length >= SHORTEST.get(kind, 0):
            kept.append(data[start:end])
        start = end
    found = b"".join(kept) + data[start:]
    return found if len(found) < len(data) else None


def with_end_marker(data: bytes, decoded: Callable[[bytes], np.ndarray]) -> bytes | None:
    """Return a JPEG file with the end marker that `data` lacks. Return None unless the rest of the file is complete.

    `decoded` returns the pixels of a JPEG file. libjpeg fills missing compressed data with grey and does not report it,
    so the file is decoded with different bytes in the place of missing data. Only if the pixels are the same each time,
    nothing is missing. Source: ITU-T T.81, annexes B and G.
    """
    data = data.removesuffix(END[:1])
    last = _last_scan(data)
    if last is None:
        return None
    marks = RESTART.findall(last)
    following = bytes([0xFF, 0xD0 + (marks[-1][1] + 1) % 8 if marks else 0xD0])
    # If the data ends with a complete restart interval, only the data after the next restart marker changes pixels.
    ends = [fill and fill + following + fill for fill in FILLS]
    first, *others = (decoded(data + end + END) for end in ends)
    return data + END if all(np.array_equal(first, other) for other in others) else None


def _last_scan(jpeg: bytes) -> bytes | None:
    """Return the compressed data of the last scan of a JPEG file that ends in it. Return None if the file ends
    elsewhere, or if coefficients of a component are in none of its scans."""
    missing: dict[int, set[int]] = {}
    start = 2
    while (marker := _marker(jpeg, start)) is not None:
        kind, start, end = marker
        segment = jpeg[start + 2 : end]
        if kind in FRAMES and len(segment) >= 6:
            missing = {component: set(range(64)) for component in segment[6::3]}
        elif kind == SCAN[1]:
            if len(segment) < 4 or len(segment) < 4 + 2 * segment[0]:
                return None
            first, last, precision = segment[-3:]
            if not precision & 0x0F:  # the lowest bit of the coefficients
                for component in segment[1:-3:2]:
                    missing.get(component, set()).difference_update(range(first, last + 1))
            after = AFTER_SCAN.search(jpeg, end)
            if after is None:
                return None if any(missing.values()) or not missing else jpeg[end:]
            end = after.start()
        start = end
    return None


def _marker(jpeg: bytes, start: int) -> tuple[int, int, int] | None:
    """Return the kind of the segment whose marker begins at `start`, and the positions of its length and of its end.
    Return None if the file has no complete segment there."""
    while jpeg[start : start + 2] == b"\xff\xff":  # fill bytes
        start += 1
    length = int.from_bytes(jpeg[start + 2 : start + 4])
    end = start + 2 + length
    if length < 2 or end > len(jpeg) or jpeg[start] != END[0] or jpeg[start + 1] == END[1]:
        return None
    return jpeg[start + 1], start + 2, end
