"""Packed shards: how they are written, and the description of their folder (`dataset.json`), with the classes, the
splits, and the size and checksum of each shard."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tarfile
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from jaxtyping import UInt64
from PIL import Image

from vitrail.data.pixels.decode import SUFFIXES, format_of, open_file, to_pil
from vitrail.data.source import Sample, Source, fingerprint, samples_of
from vitrail.data.splits import SPLITS, Splits
from vitrail.data.targets import Target, is_texts
from vitrail.errors import ConfigError, DataError, Stopped, UndecodableImage, listed
from vitrail.files import check_parent, only_writer, saving, write_json, write_whole
from vitrail.report.page import picture_file
from vitrail.settings import from_plain, problem_of, raise_problems

FILE = "dataset.json"
UNFINISHED = "dataset.unfinished.json"
"""Name of the manifest until all shards are complete. It is then renamed to `FILE`."""

IMAGES = "dataset.images"
"""File with `_identities` of the images, until all shards are complete."""

FORMAT = "vitrail shards 1"

NUMBERS = "__numbers__"
"""Field of a sample's JSON with the list of numbers to learn. An unknown number is null."""


@dataclass(frozen=True)
class Packing:
    """The settings that determine every byte of the shards."""

    fingerprint: str
    """`vitrail.data.source.fingerprint` of the splits."""
    shard_size: int
    """Maximum size of a shard in bytes. Only a shard with a single sample can be larger."""
    max_side: int | None
    """Maximum side in pixels, to which larger images are scaled down. None keeps all sizes."""
    jpeg_quality: int | None
    """JPEG quality of the images that are scaled down."""


@dataclass(frozen=True)
class ShardRecord:
    """The description of one complete shard."""

    name: str
    samples: int
    size: int
    sha256: str
    rescaled: int
    """Number of images that were larger than `max_side`."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Keys of images that could not be scaled down, with the reasons. The shard has the original bytes of these
    images."""


@dataclass(frozen=True)
class Manifest:
    """The content of `dataset.json`."""

    classes: tuple[str, ...]
    samples: dict[str, int]
    """Number of samples of each split."""
    packing: Packing
    shards: dict[str, tuple[ShardRecord, ...]]
    """The shards of each split, in order."""
    format: str = FORMAT


def parse(where: str, data: bytes) -> Manifest:
    """Return the manifest in the bytes of a file. Raises `DataError` if the file is not a consistent manifest."""
    try:
        manifest = from_plain(Manifest, json.loads(data))
    except (ValueError, RecursionError, ConfigError) as error:
        raise DataError(f"{where} is not a description of packed shards: {error}") from error
    if manifest.format != FORMAT:
        raise DataError(
            f"{where} has the format {manifest.format!r}, but this version of Vitrail reads {FORMAT!r}; pack the "
            "data again"
        )
    names = [record.name for records in manifest.shards.values() for record in records]
    if set(manifest.shards) - set(SPLITS) or any("/" in name or not name.endswith(".tar") for name in names):
        raise DataError(f"{where} has invalid names of splits or shards: {listed([*manifest.shards, *names], 4)}")
    if "train" not in manifest.shards:
        raise DataError(f"{where} has no training split; pack the data again")
    return manifest


JPEG_QUALITY = 95
"""JPEG quality of images that are scaled down. Pillow's default of 75 is visibly worse. Above 95, files grow without a
visible gain."""

BLOCK = 512
END = bytes(2 * BLOCK)
"""The bytes at the end of a tar file."""

GREY = ("1", "L", "LA", "I;16", "I;16B", "I;16L")
ENDINGS = {
    "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "PPM": "ppm", "AVIF": "avif",
    "HEIC": "heic",
}  # fmt: skip
"""Suffixes of image formats. A file of any other format is assumed to be a JPEG."""


class _Encoded(NamedTuple):
    """A sample in the form in which it is written into a shard."""

    key: str
    image: bytes
    suffix: str
    text: bytes
    rescaled: bool
    reason: str | None
    """Reason why the image could not be scaled down, if there is one."""


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
    """Write shards `train-000000.tar`, ... of at most `shard_size` bytes, and return the content of dataset.json.

    Encoded images are copied byte for byte, and arrays become PNG. With `max_side`, images with a longer side (in
    pixels) are turned upright, scaled down to it, and encoded as JPEG of quality 95. An image that should be scaled
    down but cannot be decoded is copied and listed in dataset.json. `progress` is called with the number of samples
    written so far. If `stop` returns True, `Stopped` is raised. A further call continues after the last complete shard.

    Raises `ConfigError` if an argument is invalid or the folder holds other files, `DestinationError` if another
    process writes the folder, `SaveError` if a file cannot be written, and the `DataError` of the source.
    """
    numbers = {"shard_size": shard_size, "max_side": max_side, "workers": workers}
    raise_problems(problem_of(name, value, int, {"least": 1}) for name, value in numbers.items())
    sources: dict[str, Source] = {split: source for split, source in splits.sources.items() if len(source)}
    packing = Packing(fingerprint(*sources.values()), shard_size, max_side, JPEG_QUALITY if max_side else None)
    samples = {split: len(source) for split, source in sources.items()}
    state = Manifest(splits.classes, samples, packing, dict.fromkeys(sources, ()))
    with contextlib.ExitStack() as stack:
        state = replace(state, shards=_begin(destination, state, _identities(sources), stack))
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
                            raise Stopped(
                                f"stopped: {packed_before(state):,} of {sum(samples.values()):,} images are in "
                                f"complete shards in {destination}",
                                destination,
                            )
        with saving("the description of the shards", destination / FILE):
            (destination / UNFINISHED).replace(destination / FILE)
            (destination / IMAGES).unlink(missing_ok=True)
    return state


def _identities(sources: Mapping[str, Source]) -> UInt64[np.ndarray, " n"]:
    """Return a hash of each image that changes if the image changes, as far as its source knows the sizes and times of
    its files."""
    every = (source.stamp(index) for source in map(samples_of, sources.values()) for index in range(len(source)))
    hashes = b"".join(hashlib.blake2b(os.fsencode(str(one)), digest_size=8).digest() for one in every)
    return np.frombuffer(hashes, np.uint64)


def packed_before(manifest: Manifest) -> int:
    """Return the number of samples in the complete shards."""
    return sum(record.samples for records in manifest.shards.values() for record in records)


def _begin(
    destination: Path, state: Manifest, images: UInt64[np.ndarray, " n"], stack: contextlib.ExitStack
) -> dict[str, tuple[ShardRecord, ...]]:
    """Make the folder, lock it until the stack is closed, and return the complete shards in it, up to the first
    incomplete one.

    Raises `ConfigError` if the folder holds other files, or shards of images that have changed (`_identities`), and
    `DestinationError` if it cannot be made, or if another process writes it.
    """
    shards: dict[str, tuple[ShardRecord, ...]] = dict(state.shards)
    for name in (FILE, UNFINISHED):
        path = destination / name
        if not path.is_file():
            continue
        before = parse(str(path), path.read_bytes())
        if replace(before, shards=state.shards) != state:
            raise ConfigError(
                f"{destination} has shards of other data or with other options: {_difference(before, state)}; "
                "choose another folder"
            )
        for split in shards:
            shards[split] = _whole(destination, before.shards.get(split, ()))
        if name == UNFINISHED and (place := destination / IMAGES).is_file():
            known = np.fromfile(place, np.uint64)
            counts = {split: sum(record.samples for record in records) for split, records in shards.items()}
            is_packed = np.concatenate([np.arange(state.samples[split]) < count for split, count in counts.items()])
            if len(known) != len(images) or not np.array_equal(known[is_packed], images[is_packed]):
                raise ConfigError(
                    f"{destination} has shards of images that have changed since, and the other shards would have the "
                    "new ones; choose another folder"
                )
        break
    else:
        if not destination.exists():
            check_parent(destination)
        if destination.exists() and not destination.is_dir():
            raise ConfigError(f"{destination} is a file; shards are written to a folder, so choose another path")
        if destination.exists() and any(
            not entry.name.endswith((".partial", "-partial")) for entry in destination.iterdir()
        ):
            raise ConfigError(f"{destination} is not empty and has no shards to continue; choose another folder")
    with saving("the description of the shards", destination):
        destination.mkdir(parents=True, exist_ok=True)
        stack.enter_context(only_writer(destination, destination))
    _save(destination, replace(state, shards=shards))  # first, so that there always is a description
    with saving("the description of the shards", destination):
        write_whole(destination / IMAGES, images.tobytes())
        (destination / FILE).unlink(missing_ok=True)
    return shards


def _difference(before: Manifest, now: Manifest) -> str:
    """Return a text about the first difference between two packs."""
    pairs = {"classes": (before.classes, now.classes), "number of samples": (before.samples, now.samples)}
    old, new = asdict(before.packing), asdict(now.packing)
    pairs |= {name: (old[name], new[name]) for name in ("shard_size", "max_side", "jpeg_quality")}
    for name, (one, other) in pairs.items():
        if one != other:
            return f"its {name} is {one}, not {other}" if name != "classes" else "its classes differ"
    return "its keys or labels differ"


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
    """Write the samples from `start` on. Yields a record for each complete shard, and None for each sample."""
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
    """A tar file that is being written. It has a temporary name until it is complete."""

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
    """Return a tar member without owner and time, so that equal data always gives equal bytes."""
    about = tarfile.TarInfo(name)
    about.size = len(data)
    return about.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK)


def _in_order(work: Callable[[int], _Encoded], start: int, stop: int, workers: int) -> Generator[_Encoded, None, None]:
    """Yield the results of `work` for each number, in order. Threads compute a few results ahead.

    Threads help because Pillow releases the GIL.
    """
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


def encoded(sample: Sample) -> tuple[bytes, str]:
    """Return the file of a sample's image and its suffix without a dot: that of the key, or else that of the format
    that its first bytes show. An array becomes a PNG."""
    if isinstance(sample.image, np.ndarray):
        return picture_file(to_pil(sample.image, sample.image.shape[2]), "PNG"), "png"
    own = os.path.splitext(sample.key)[1].lower()  # noqa: PTH122 (a key is not a path of this machine)
    return sample.image, own.removeprefix(".") if own in SUFFIXES else ENDINGS.get(format_of(sample.image), "jpg")


def _encode(source: Source, index: int, max_side: int | None) -> _Encoded:
    sample = source[index]
    text = json.dumps({"__key__": sample.key, **_fields(sample.target)}).encode()
    rescaled, reason = None, None
    try:
        rescaled = None if max_side is None else _rescaled(sample.image, max_side)
    except UndecodableImage as error:
        reason = str(error)
    data, suffix = encoded(sample) if rescaled is None else rescaled
    return _Encoded(sample.key, data, suffix, text, rescaled is not None, reason)


def _fields(target: Target) -> dict[str, object]:
    """Return the JSON fields of a target: a list of numbers if the target holds floats, the texts, or else the class
    indices."""
    if target is None:
        return {}
    if is_texts(target):
        return {"texts": target}
    if isinstance(target, tuple) and any(isinstance(number, float) for number in target):
        return {NUMBERS: [None if math.isnan(number) else float(number) for number in cast(tuple[float, ...], target)]}
    return {"label": target}


def _rescaled(image: bytes | np.ndarray, max_side: int) -> tuple[bytes, str] | None:
    """Return the file of the image scaled down to `max_side`, a JPEG or for an array a PNG, and its suffix without a
    dot. Return None if the image is small enough.

    Raises `UndecodableImage`.
    """
    if isinstance(image, np.ndarray):
        picture = to_pil(image, image.shape[2])
        return None if max(picture.size) <= max_side else (picture_file(_scaled(picture, max_side), "PNG"), "png")
    try:
        with open_file(image) as header:
            size, mode = header.size, header.mode
    except Exception:  # decoding raises the usual error for a broken file
        to_pil(image, 3)
        return None
    if max(size) <= max_side:
        return None
    picture = to_pil(image, 1 if mode in GREY else 3)
    return picture_file(_scaled(picture, max_side), "JPEG", quality=JPEG_QUALITY), "jpg"


def _scaled(picture: Image.Image, max_side: int) -> Image.Image:
    scale = max_side / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.BICUBIC)
