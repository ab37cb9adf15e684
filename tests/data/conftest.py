"""Data that tests of several modules share: trees of files, IDX files, and an empty cache."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.make import idx_bytes


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty cache folder of the test, which does not exist yet."""
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tree(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes empty files at relative paths. A path that ends in "/" makes a folder."""

    def make(*paths: str, name: str = "pictures") -> Path:
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        for path in paths:
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.endswith("/"):
                target.mkdir()
            else:
                target.touch()
        return root

    return make


@pytest.fixture(scope="session")
def write_idx() -> Callable[..., Path]:
    """Return a function that writes an array of bytes as an IDX file, compressed if the name ends in .gz."""

    def write(path: Path, array: np.ndarray) -> Path:
        data = idx_bytes(array.astype(np.uint8))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path

    return write


@pytest.fixture
def idx_folder(tmp_path: Path, write_idx: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that makes a folder of IDX files from lists of labels: `idx_folder(train=[0, 1], t10k=[1,
    1])`."""

    def make(*, name: str = "idx", suffix: str = "", **labels: Sequence[int]) -> Path:
        root = tmp_path / name
        for number, (prefix, values) in enumerate(labels.items()):
            images = np.random.default_rng(number).integers(0, 256, (len(values), 4, 3), dtype=np.uint8)
            write_idx(root / f"{prefix}-images-idx3-ubyte{suffix}", images)
            write_idx(root / f"{prefix}-labels-idx1-ubyte{suffix}", np.asarray(values, np.uint8))
        return root

    return make
