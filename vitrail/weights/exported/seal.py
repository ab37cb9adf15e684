"""The hash inside an exported file, which shows whether the file was changed after it was written.

A file contains the hash of its own bytes. While the hash is computed, its place in the file is filled with zeros.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from vitrail.errors import BundleError

SEAL = "vitrail_sha256"
"""Name of the hash among a file's metadata."""

BLANK = "0" * 64


def digest(parts: Sequence[bytes]) -> str:
    """Return the SHA-256 of the parts of a file, in their order."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


def sealed(content: bytes, *others: bytes) -> bytes:
    """Return a file's content with its hash in place of `BLANK`, which must occur once. The hash includes `others`, the
    contents of files that belong to it."""
    assert content.count(BLANK.encode()) == 1
    return content.replace(BLANK.encode(), digest((content, *others)).encode())


def check_seal(path: str, seal: str, content: bytes, *others: bytes) -> None:
    """Raise `BundleError` unless `content` is what `sealed` returned for the same `others`."""
    if len(seal) != len(BLANK) or digest((content.replace(seal.encode(), BLANK.encode()), *others)) != seal:
        raise altered(path)


def altered(path: str) -> BundleError:
    """Return the error for a file whose content does not have its hash."""
    return BundleError(f"{path} was altered: its SHA-256 is not the one that it records; export the model again")
