"""Fashion-MNIST (1708.07747): the full set wherever it can be found, and the share that ships with the package."""

from __future__ import annotations

import gzip
import hashlib
import urllib.request
import zlib
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

from vitrail.data.sources.idx import find_idx
from vitrail.errors import DataError
from vitrail.files import cache_folder

__all__ = ["BUNDLED", "CLASSES", "locate"]

CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

BUNDLED = Path(__file__).parent / "bundled"
"""The first 1,000 training and 200 test images of each class, in their order."""

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
MIRROR = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
SHA256 = {
    "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""Of the decompressed files: the same bytes are gzipped differently by those who pass them on."""


def locate(*, mirror: str = MIRROR, debian: Path = DEBIAN) -> Path:
    """The folder with the full set: under `$VITRAIL_DATA`, Debian's package, or downloaded and verified.

    Raises `DataError`, which says what to do, when it is in none of these.
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
            f"{error}. Do one of these: `apt-get install dataset-fashion-mnist`; put its four *-ubyte.gz files into a "
            "folder fashion-mnist and set VITRAIL_DATA to the folder above; or train on the bundled share with --data "
            "bundled"
        ) from error


def _download(folder: Path, mirror: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, checksum in SHA256.items():
        with urllib.request.urlopen(mirror + name, timeout=30) as response:
            data = response.read()
        found = hashlib.sha256(gzip.decompress(data)).hexdigest()
        if found != checksum:
            raise DataError(f"{mirror}{name} holds data of SHA-256 {found}, expected {checksum}; it was not kept")
        partial = folder / (name + ".partial")
        partial.write_bytes(data)
        partial.replace(folder / name)
    return folder
