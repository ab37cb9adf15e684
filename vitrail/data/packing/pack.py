"""Any data set as tar shards: the same bytes for the same input, however many workers; resumable at a shard."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import tarfile
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.packing.manifest import FILE, NUMBERS, UNFINISHED, Manifest, Packing, ShardRecord, parse
from vitrail.data.pixels.decode import FORMATS, SUFFIXES, to_pil
from vitrail.data.source import Source, Target, fingerprint
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, Stopped, UndecodableImage
from vitrail.files import saving, write_json

__all__ = ["JPEG_QUALITY", "pack", "packed_before"]

JPEG_QUALITY = 95
"""Of images that are scaled down; Pillow's default of 75 shows, and above 95 files grow for nothing to be seen."""

BLOCK = 512
END = bytes(2 * BLOCK)
"""Ends a tar."""

GREY = ("1", "L", "LA", "I;16", "I;16B", "I;16L")
MARKS = {b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp", b"II*\0": "tif", b"MM\0*": "tif"}
"""How files of images begin; of others, JPEG is the likeliest."""


class _Encoded(NamedTuple):
    """A sample as it goes into a shard."""

    key: str
    image: bytes
    suffix: str
    text: bytes
    rescaled: bool
    reason: str | None
    """Why it could not be scaled down."""


def pack(
    splits: Splits,
    destination: Path,
    *,
    shard_size: int = 256_000_000,
    max_side: int | None = None,
    workers: int = 1,
    progress: Callable[[int], None] = lambda done: None,
    stop: Callable[[], bool] = lambda: False,
) -> Manifest:
    """Writes shards `train-000000.tar`, ... of at most `shard_size` bytes and dataset.json, and returns what it says.

    Encoded images are copied byte for byte and arrays become PNG; with `max_side`, images with a longer side (pixels)
    are scaled down to it, upright, and encoded as JPEG of quality 95. An image that cannot be scaled down because it
    cannot be read is copied, and named in dataset.json. `progress` is told how many samples are in whole or begun
    shards; when `stop` returns True, `Stopped` is raised. Called again, it goes on after the last whole shard.

    Raises `ConfigError` for a folder that holds something else, `DataError` as the source does, and `SaveError`.
    """
    for name, value in (("shard_size", shard_size), ("max_side", max_side), ("workers", workers)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} is not at least 1")
    named = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    sources: dict[str, Source] = {split: source for split, source in named.items() if source}
    packing = Packing(fingerprint(*sources.values()), shard_size, max_side, JPEG_QUALITY if max_side else None)
    samples = {split: len(source) for split, source in sources.items()}
    state = Manifest(splits.classes, samples, packing, dict.fromkeys(sources, ()))
    state = replace(state, shards=_begin(destination, state))
    done = packed_before(state)
    for split, source in sources.items():
        start = sum(record.samples for record in state.shards[split])
        with contextlib.closing(_write(destination, split, source, start, state, workers)) as steps:
            for finished in steps:
                if finished is not None:
                    state = replace(state, shards={**state.shards, split: (*state.shards[split], finished)})
                    _save(destination, state)
                else:
                    done += 1
                    progress(done)
                    if stop():
                        raise Stopped(f"stopped after {packed_before(state):,} of {sum(samples.values()):,} images in "
                                      f"whole shards in {destination}", destination)  # fmt: skip
    with saving("the description of the shards", destination / FILE):
        (destination / UNFINISHED).replace(destination / FILE)
    return state


def packed_before(manifest: Manifest) -> int:
    """How many samples are in its whole shards."""
    return sum(record.samples for records in manifest.shards.values() for record in records)


def _begin(destination: Path, state: Manifest) -> dict[str, tuple[ShardRecord, ...]]:
    """The shards that are there already, whole, up to the first that is not. Makes the folder. Raises `ConfigError`."""
    shards: dict[str, tuple[ShardRecord, ...]] = dict(state.shards)
    for name in (FILE, UNFINISHED):
        path = destination / name
        if not path.is_file():
            continue
        before = parse(str(path), path.read_bytes())
        if replace(before, shards=state.shards) != state:
            raise ConfigError(
                f"{destination} has shards of other data, or of other options: {_difference(before, state)}; "
                "choose another folder"
            )
        for split in shards:
            shards[split] = _whole(destination, before.shards.get(split, ()))
        break
    else:
        if destination.exists() and not destination.is_dir():
            raise ConfigError(f"{destination} is a file; shards are written to a folder")
        if destination.exists() and any(not entry.name.endswith(".partial") for entry in destination.iterdir()):
            raise ConfigError(f"{destination} is not empty, and has no shards to go on with; choose another folder")
    with saving("the description of the shards", destination):
        destination.mkdir(parents=True, exist_ok=True)
        (destination / FILE).unlink(missing_ok=True)
    _save(destination, replace(state, shards=shards))
    return shards


def _difference(before: Manifest, now: Manifest) -> str:
    """The first thing in which two packs are not the same."""
    pairs = {"classes": (before.classes, now.classes), "number of samples": (before.samples, now.samples)}
    old, new = asdict(before.packing), asdict(now.packing)
    pairs |= {name: (old[name], new[name]) for name in ("shard_size", "max_side", "jpeg_quality")}
    for name, (one, other) in pairs.items():
        if one != other:
            return f"its {name} is {one}, not {other}" if name != "classes" else "its classes are others"
    return "its keys or labels are others"


def _whole(destination: Path, records: tuple[ShardRecord, ...]) -> tuple[ShardRecord, ...]:
    for count, record in enumerate(records):
        path = destination / record.name
        if not path.is_file() or path.stat().st_size != record.size:
            return records[:count]
    return records


def _save(destination: Path, state: Manifest) -> None:
    with saving("the description of the shards", destination / UNFINISHED):
        write_json(destination / UNFINISHED, asdict(state))


def _write(
    destination: Path, split: str, source: Source, start: int, state: Manifest, workers: int
) -> Generator[ShardRecord | None, None, None]:
    """Writes the samples from `start` on. Yields a record when a shard is whole, and None when a sample is written."""
    count = len(state.shards[split])
    shard: _Shard | None = None
    try:
        encoded = _in_order(lambda index: _encode(source, index, state.packing.max_side), start, len(source), workers)
        with contextlib.closing(encoded):
            for number, item in enumerate(encoded, start):
                members = _member(f"{number:08}.{item.suffix}", item.image) + _member(f"{number:08}.json", item.text)
                if shard is not None and shard.size + len(members) + len(END) > state.packing.shard_size:
                    yield shard.finish()
                    shard = None
                if shard is None:
                    shard = _Shard(destination / f"{split}-{count:06}.tar")
                    count += 1
                shard.add(item, members)
                yield None
        if shard is not None:
            yield shard.finish()
            shard = None
    finally:
        if shard is not None:
            shard.abandon()


class _Shard:
    """A tar being written, under another name until it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        self.size = self.samples = self.rescaled = 0
        self.unreadable: dict[str, str] = {}
        self._digest = hashlib.sha256()
        with saving("a shard", path):
            self._file = self.partial.open("wb")

    def add(self, item: _Encoded, members: bytes) -> None:
        self._append(members)
        self.samples += 1
        self.rescaled += item.rescaled
        if item.reason is not None:
            self.unreadable[item.key.encode("utf-8", "backslashreplace").decode()] = item.reason

    def finish(self) -> ShardRecord:
        self._append(END)
        with saving("a shard", self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self.partial.replace(self.path)
        return ShardRecord(
            self.path.name, self.samples, self.size, self._digest.hexdigest(), self.rescaled, self.unreadable
        )

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self.partial.unlink()

    def _append(self, data: bytes) -> None:
        with saving("a shard", self.path):
            self._file.write(data)
        self._digest.update(data)
        self.size += len(data)


def _member(name: str, data: bytes) -> bytes:
    """A file in a tar, of nobody, at no time, so that the same data give the same bytes."""
    about = tarfile.TarInfo(name)
    about.size = len(data)
    return about.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK)


def _in_order(work: Callable[[int], _Encoded], start: int, stop: int, workers: int) -> Generator[_Encoded, None, None]:
    """What `work` returns for each number, in order, worked on by threads a little ahead (Pillow lets them run)."""
    waiting: deque[Future[_Encoded]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for index in range(start, stop):
                waiting.append(pool.submit(work, index))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _encode(source: Source, index: int, max_side: int | None) -> _Encoded:
    sample = source[index]
    text = json.dumps({"__key__": sample.key, **_fields(sample.target)}).encode()
    if isinstance(sample.image, np.ndarray):
        picture = to_pil(sample.image, sample.image.shape[2])
        larger = max_side is not None and max(picture.size) > max_side
        data = _saved(_scaled(picture, max_side) if max_side and larger else picture, "PNG")
        return _Encoded(sample.key, data, "png", text, larger, None)
    reason = None
    try:
        rescaled = None if max_side is None else _rescaled(sample.image, max_side)
    except UndecodableImage as error:
        rescaled, reason = None, str(error)
    if rescaled is not None:
        return _Encoded(sample.key, rescaled, "jpg", text, True, None)
    return _Encoded(sample.key, sample.image, _suffix(sample.key, sample.image), text, False, reason)


def _fields(target: Target) -> dict[str, object]:
    """Return the JSON fields of a target. A float is always one of several numbers."""
    if target is None:
        return {}
    if isinstance(target, tuple) and any(isinstance(number, float) for number in target):
        return {NUMBERS: [None if math.isnan(number) else float(number) for number in target]}
    return {"label": target}


def _rescaled(image: bytes, max_side: int) -> bytes | None:
    """The image as a JPEG with sides of at most `max_side`, or None where it has them. Raises `UndecodableImage`."""
    try:
        with Image.open(io.BytesIO(image), formats=FORMATS) as header:
            size, mode = header.size, header.mode
    except Exception:  # whatever it is, decoding says so in the words that are used elsewhere
        to_pil(image, 3)
        return None
    if max(size) <= max_side:
        return None
    return _saved(_scaled(to_pil(image, 1 if mode in GREY else 3), max_side), "JPEG", quality=JPEG_QUALITY)


def _scaled(picture: Image.Image, max_side: int) -> Image.Image:
    scale = max_side / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def _saved(picture: Image.Image, file_format: str, **options: int) -> bytes:
    file = io.BytesIO()
    picture.save(file, file_format, **options)
    return file.getvalue()


def _suffix(key: str, image: bytes) -> str:
    """The one of its name, or else that of what it begins with."""
    own = os.path.splitext(key)[1].lower()  # noqa: PTH122 (a key is not a path of this machine)
    if own in SUFFIXES:
        return own.removeprefix(".")
    return next((suffix for mark, suffix in MARKS.items() if image.startswith(mark)), "jpg")
