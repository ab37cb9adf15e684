"""IDX files, the format of the MNIST family: a header with the shape, then unsigned bytes, plain or gzipped.

Fashion-MNIST (arXiv 1708.07747) is in this format: the full data set, and the subset that ships with the package.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import math
import urllib.request
import zlib
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
from jaxtyping import UInt8

from vitrail.data.source import Samples, Source
from vitrail.data.splits import SPLITS, Split, Splits, splits_from
from vitrail.data.targets import Targets
from vitrail.errors import DataError, listed
from vitrail.files import cache_folder, replacing_file

SPLIT_PREFIXES = {"train": ("train",), "test": ("t10k", "test"), "validation": ("val", "validation")}


class IdxImages:
    """Grey images of an IDX file, which are held in memory."""

    def __init__(self, pixels: UInt8[np.ndarray, "n h w"]) -> None:
        self.pixels = pixels

    def key(self, place: int) -> str:
        return str(place)

    def image(self, place: int) -> UInt8[np.ndarray, "h w 1"]:
        return self.pixels[place, :, :, None]

    def stamp(self, place: int) -> str:
        """Return a hash of the pixels."""
        return hashlib.blake2b(self.pixels[place], digest_size=16).hexdigest()


def idx_samples(images: Path, labels: Path, classes: tuple[str, ...] | None = None) -> Samples:
    """Return the images and labels of a pair of IDX files. `classes` names the labels. Raises `DataError`."""
    pixels, numbers = read_idx(images), read_idx(labels)
    if pixels.ndim != 3 or numbers.ndim != 1 or len(pixels) != len(numbers):
        raise DataError(
            f"{images} has the shape {pixels.shape} and {labels} the shape {numbers.shape}; images must "
            "be (n, height, width) and labels (n,) with the same n"
        )
    highest = int(numbers.max(initial=0))
    names = classes or tuple(str(number) for number in range(highest + 1))
    if highest >= len(names):
        raise DataError(f"{labels} has the label {highest}, but the {len(names)} classes are numbered from 0")
    return Samples((IdxImages(pixels),), range(len(pixels)), Targets("class", names, numbers.astype(np.int64)))


def matched(samples: Samples, known: tuple[str, ...]) -> Samples:
    """Return samples of IDX files with the classes `known`, such as those of a model. Each label is the class that is
    called by its number. Raises `DataError` if there is no such class."""
    used = [samples.classes[label] for label in np.unique(samples.targets.values).tolist()]
    if missing := [name for name in used if name not in known]:
        raise DataError(
            f"the labels of IDX files are numbers without names, and {listed(missing)} are not among the known "
            f"classes, {listed(known, 20)}; use data that names its classes"
        )
    return samples.renumbered([known.index(name) if name in known else -1 for name in samples.classes], known)


def open_idx(root: Path, names: tuple[str, ...] | None = None, *, known: tuple[str, ...] | None = None) -> Splits:
    """Open IDX files. `names` are the names of the numbers in the files. `known` are classes to match them with."""
    sources: dict[Split, Source] = {}
    for split in SPLITS:
        if files := find_idx(root, split):
            samples = idx_samples(*files, names)
            names = names or samples.classes
            sources[split] = samples if known is None else matched(samples, known)
    return splits_from(sources, unlabelled_idx(root))


def has_idx(folder: Path) -> bool:
    """Return True if `folder` has the files of at least one split."""
    return any(find_idx(folder, split) for split in SPLIT_PREFIXES)


def find_idx(folder: Path, split: str) -> tuple[Path, Path] | None:
    """Return the image file and the label file of a split ("train", "validation" or "test") in `folder`, or None."""
    endings = itertools.product(SPLIT_PREFIXES[split], (".gz", ""))
    pairs = (
        (folder / f"{prefix}-images-idx3-ubyte{suffix}", folder / f"{prefix}-labels-idx1-ubyte{suffix}")
        for prefix, suffix in endings
    )
    return next((pair for pair in pairs if all(path.is_file() for path in pair)), None)


def unlabelled_idx(folder: Path) -> Iterator[str]:
    """Yield a note on each split that has images and no labels."""
    for split, prefixes in SPLIT_PREFIXES.items():
        images = [path for prefix in prefixes for path in folder.glob(f"{prefix}-images-idx3-ubyte*")]
        if images and not find_idx(folder, split):
            yield f"{folder}: the {split} split is skipped, because {images[0].name} has no file of labels beside it"


def read_idx(path: Path) -> UInt8[np.ndarray, " ..."]:
    """Return the array in an IDX file of unsigned bytes. Raises `DataError` for another format or a truncated file."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} is not an IDX file of unsigned bytes: it begins with {data[:4].hex() or 'nothing'}")
    dimensions = data[3]
    start = 4 + 4 * dimensions
    sizes = data[4:start]
    shape = tuple(int(size) for size in np.frombuffer(sizes[: len(sizes) // 4 * 4], ">u4"))
    if (
        len(shape) < dimensions
        or dimensions > 4
        or max(shape, default=0) >= 2**31
        or len(data) - start != math.prod(shape)
    ):
        raise DataError(
            f"{path} is damaged: its header states the shape {shape}, but {max(0, len(data) - start)} bytes follow"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


FASHION_MNIST = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

BUNDLED = Path(__file__).parent / "bundled"
"""Folder with the first 1,000 training and 200 test images of each class, in their original order."""

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
MIRROR = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
SHA256 = {
    "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""Hashes of the decompressed files. The compressed files differ between distributors."""


def locate_fashion_mnist(*, mirror: str = MIRROR, debian: Path = DEBIAN) -> Path:
    """Return the folder with the full data set, from `$VITRAIL_DATA` or from Debian's package. Otherwise download it.

    A download is verified by its hash. Raises `DataError` if the data set cannot be found. The message says what to do.
    """
    cache = cache_folder("fashion-mnist")
    for folder in (cache, cache.parent, debian):
        if find_idx(folder, "train") and find_idx(folder, "test"):
            return folder
    try:
        return _download(cache, mirror)
    except (OSError, EOFError, HTTPException, zlib.error) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise DataError(
            f"Fashion-MNIST is neither under {cache.parent} nor in {debian}, and {mirror} cannot be downloaded: "
            f"{error}. Do one of these: run `apt-get install dataset-fashion-mnist`; put the four *-ubyte.gz files "
            "into a folder called fashion-mnist and set VITRAIL_DATA to its parent folder; or train on the bundled "
            "part with --data bundled"
        ) from error


def _download(folder: Path, mirror: str) -> Path:
    for name, checksum in SHA256.items():
        with urllib.request.urlopen(mirror + name, timeout=30) as response:
            data = response.read()
        found = hashlib.sha256(gzip.decompress(data)).hexdigest()
        if found != checksum:
            raise DataError(f"{mirror}{name} has the SHA-256 {found} instead of {checksum}; the download was discarded")
        with replacing_file(folder / name) as partial:
            partial.write_bytes(data)
    return folder
