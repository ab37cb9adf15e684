"""Fashion-MNIST (arXiv 1708.07747): the full data set, and the subset that ships with the package."""

from __future__ import annotations

import gzip
import hashlib
import tempfile
import urllib.request
import zlib
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

from vitrail.data.sources.idx import find_idx
from vitrail.errors import DataError
from vitrail.files import cache_folder

CLASSES = (
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


def locate(*, mirror: str = MIRROR, debian: Path = DEBIAN) -> Path:
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
    folder.mkdir(parents=True, exist_ok=True)
    for name, checksum in SHA256.items():
        with urllib.request.urlopen(mirror + name, timeout=30) as response:
            data = response.read()
        found = hashlib.sha256(gzip.decompress(data)).hexdigest()
        if found != checksum:
            raise DataError(f"{mirror}{name} has the SHA-256 {found} instead of {checksum}; the download was discarded")
        with tempfile.TemporaryDirectory(dir=folder) as own:  # another process may be downloading the same file
            partial = Path(own) / name
            partial.write_bytes(data)
            partial.replace(folder / name)
    return folder
