"""Decoding of mutated files in a separate process: `python fuzz_files.py COUNT KIND...` prints the outcomes as JSON.

Whole files are also truncated, at every byte if COUNT is above 1,000. The process has little memory and a time limit
for each file, and dies if it exceeds one of them. Each file depends only on its kind and number.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import random
import resource
import signal
import struct
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image

from vitrail.data.pixels import decode
from vitrail.errors import UndecodableImage

MAX_PIXELS = 1_000_000
MEMORY = 128 << 20
SECONDS = 5
"""Processor seconds for one file."""


def encoded(picture: Image.Image, file_format: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, file_format, **options)
    return file.getvalue()


def seeds() -> dict[str, list[bytes]]:
    """Return small valid files of each kind that this machine can write."""
    Image.init()
    with contextlib.suppress(ImportError):
        importlib.import_module("pillow_heif").register_heif_opener()
    random_numbers = np.random.default_rng(0)
    soft = Image.fromarray(random_numbers.integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize((30, 21))
    clear = soft.copy()
    clear.putalpha(Image.linear_gradient("L").resize(soft.size))
    deep = Image.fromarray(random_numbers.integers(0, 65536, (9, 11), dtype=np.uint16))
    bits, grey, palette = soft.convert("1"), soft.convert("L"), soft.convert("P")
    frames = {"save_all": True, "append_images": [soft.rotate(180), soft.transpose(Image.Transpose.FLIP_TOP_BOTTOM)]}
    exif = Image.Exif()
    exif[0x0112] = 6
    inks = soft.convert("CMYK")
    markers = {"restart_marker_rows": 1}
    jpeg = [(soft, {}), (soft, {"subsampling": 0, "exif": exif}), (grey, {}), (inks, {}), (soft, markers)]
    gif = [(soft, {}), (soft, {"interlace": 1}), (soft, frames), (palette, {"transparency": 2}), (bits, {})]
    tiff = [
        *((soft, {"compression": name}) for name in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "lzma")),
        *((bits, {"compression": name}) for name in ("group3", "group4", "tiff_ccitt")),
        (soft, {}), (deep, {}), (clear, {"compression": "tiff_lzw"}), (palette, {}), (soft, {"exif": exif}), (inks, {}),
        (soft, {**frames, "compression": "tiff_lzw"}), (soft.convert("YCbCr"), {}),
        (soft, {"compression": "tiff_lzw", "tiffinfo": {317: 2}}), (soft, {"big_tiff": True}),
    ]  # fmt: skip
    modern = [(soft, {"exif": exif}), (clear, {"exif": exif}), (soft, {}), (grey, {})]
    return {
        **{
            kind: [encoded(image, file_format, **options) for image, options in modern]
            for kind, file_format in (("avif", "AVIF"), ("heic", "HEIF"))
            if file_format in Image.SAVE
        },
        "jpeg": [encoded(image, "JPEG", **options) for image, options in jpeg],
        "progressive": [encoded(image, "JPEG", progressive=True, **options) for image, options in jpeg],
        "png": [encoded(image, "PNG") for image in (soft, clear, deep, bits, grey, palette)]
        + [encoded(soft, "PNG", exif=exif), encoded(soft, "PNG", **frames), encoded(palette, "PNG", transparency=3)],
        "webp": [encoded(image, "WEBP", quality=70, exif=exif) for image in (soft, clear)]
        + [encoded(soft, "WEBP", quality=70, **frames), encoded(soft, "WEBP")],
        "lossless": [encoded(image, "WEBP", lossless=True) for image in (soft, clear, palette)]
        + [encoded(soft, "WEBP", lossless=True, **frames)],
        "bmp": [encoded(image, "BMP") for image in (soft, clear, bits, grey, palette)] + [run_lengths()],
        "gif": [encoded(image, "GIF", **options) for image, options in gif],
        "tiff": [encoded(image, "TIFF", **options) for image, options in tiff],
    }


def run_lengths() -> bytes:
    """Return a BMP file of 8 x 2 pixels with run-length encoding, which Pillow reads but does not write."""
    rows = b"\x08\x01\0\0" + b"\x03\x02\0\x05\x01\x02\x03\x04\x05\0" + b"\0\0\0\x01"
    palette = b"".join(bytes([level, level, 255 - level, 0]) for level in range(256))
    header = struct.pack("<IiiHHIIiiII", 40, 8, 2, 1, 8, 1, len(rows), 0, 0, 256, 0)
    begin = 14 + len(header) + len(palette)
    return b"BM" + struct.pack("<IHHI", begin + len(rows), 0, 0, begin) + header + palette + rows


def mutated(kind: str, number: int, files: list[bytes]) -> bytes:
    draw = random.Random(f"{kind} {number}")
    data = bytearray(draw.choice(files))
    for _ in range(draw.choice((1, 1, 2, 4))):
        if data:
            draw.choice(MUTATIONS)(data, draw, files)
    return checked(bytes(data)) if kind == "png" and draw.random() < 0.7 else bytes(data)


def flip(data: bytearray, draw: random.Random, files: list[bytes]) -> None:
    for _ in range(draw.choice((1, 1, 3, 10))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def cut(data: bytearray, draw: random.Random, files: list[bytes]) -> None:
    del data[draw.randrange(len(data)) :]


def drop(data: bytearray, draw: random.Random, files: list[bytes]) -> None:
    begin = draw.randrange(len(data))
    del data[begin : begin + draw.randint(1, 40)]


def splice(data: bytearray, draw: random.Random, files: list[bytes]) -> None:
    other = draw.choice(files)
    begin, place = draw.randrange(len(other)), draw.randrange(len(data))
    length = draw.randint(1, 100)
    data[place : place + draw.choice((0, length))] = other[begin : begin + length]


def edit_header(data: bytearray, draw: random.Random, files: list[bytes]) -> None:
    size = draw.choice((1, 2, 4))
    value = draw.choice((0, 1, 2, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 0x8000, 0xFFFE, draw.getrandbits(32), 1000))
    place = draw.randrange(min(len(data), 200))
    data[place : place + size] = (value % (1 << 8 * size)).to_bytes(size, draw.choice(("big", "little")))


MUTATIONS: tuple[Callable[[bytearray, random.Random, list[bytes]], None], ...] = (flip, cut, drop, splice, edit_header)


def checked(data: bytes) -> bytes:
    """Return a PNG file with correct checksums of its chunks, so that a decoder reads on after them."""
    out, place = data[:8], 8
    while place + 12 <= len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        body = data[place + 4 : place + 8 + length]
        out += data[place : place + 4] + body + struct.pack(">I", zlib.crc32(body))
        place += 12 + length
    return out + data[place:]


def outcome(data: bytes, number: int) -> str:
    """Return "pixels" or "refused". Any other outcome is an error of the decoder."""
    channels = 1 if number % 4 == 0 else 3
    try:
        pixels = decode.decode(data, channels)
    except UndecodableImage as error:
        return "out of memory" if isinstance(error.__cause__, MemoryError) else "refused"
    if pixels.dtype != np.uint8 or pixels.shape != (*decode.image_size_of(data), channels) or not pixels.size:
        return f"array of {pixels.dtype} {pixels.shape}"
    opened = decode.open_image(data)
    shrink = opened.shrink_for(4)
    try:
        small = opened.load(3, shrink)
    except UndecodableImage:
        return "refused only when it is shrunk"
    fits = all(part == -(-whole // shrink) for part, whole in zip(small.size[::-1], opened.size, strict=True))
    return "pixels" if fits else f"{small.size} shrunk by {shrink} from {opened.size}"


def faults(kind: str, count: int, files: list[bytes], counts: dict[str, int]) -> Iterator[str]:
    for number in range(count):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            found = outcome(mutated(kind, number, files), number)
        except BaseException:
            found = traceback.format_exc(limit=-3)
        counts[found] = counts.get(found, 0) + 1
        if found not in ("pixels", "refused"):
            yield f"{kind} {number}: {found}"


def cut_faults(files: list[bytes], step: int) -> Iterator[str]:
    """Return the truncated files whose pixels differ from those of the whole file."""
    for number, data in enumerate(files):
        whole = decode.decode(data, 3)
        for length in range(0, len(data), step):
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                same = np.array_equal(decode.decode(data[:length], 3), whole)
            except UndecodableImage:
                continue
            if not same:
                yield f"file {number} cut to {length} of {len(data)} bytes: other pixels"


def main(count: int, kinds: list[str]) -> None:
    files = seeds()
    for data in (data for kind in kinds for data in files[kind]):
        decode.decode(data, 3)  # whole files must decode, and libraries must be loaded before memory is limited
    decode.MAX_PIXELS = MAX_PIXELS
    warnings.simplefilter("always")
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))
    report: dict[str, object] = {}
    for kind in kinds:
        counts: dict[str, int] = {}
        found = [*faults(kind, count, files[kind], counts), *cut_faults(files[kind], max(1, 2000 // count))]
        report[kind] = {"faults": found[:5], **counts}
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
