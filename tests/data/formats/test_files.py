"""Tests of the search for files that two splits share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitrail.data.source import Samples, file_samples, shared_files
from vitrail.data.targets import Targets


def source_of(root: Path, names: list[str], inode: int | None = None) -> Samples:
    """Return a source of files. `inode` is given to all of them, as if they were on several disks."""
    inodes = [inode or (root / name).lstat().st_ino for name in names]
    return file_samples(root, names, inodes, Targets("class", ("a",), np.zeros(len(names), np.int64)))


def test_every_file_of_an_inode_is_compared(tmp_path: Path) -> None:
    for name in ("1.png", "2.png", "3.png"):
        (tmp_path / name).write_bytes(b"image")
    (tmp_path / "held-out").mkdir()
    (tmp_path / "held-out" / "4.png").hardlink_to(tmp_path / "2.png")
    train = source_of(tmp_path, ["1.png", "2.png"], inode=5)
    (fault,) = shared_files(train, source_of(tmp_path, ["3.png", "held-out/4.png"], inode=5), "test")
    assert fault.count == 1 and f"such as {tmp_path}/2.png and {tmp_path}/held-out/4.png;" in fault.text
    assert not list(shared_files(train, source_of(tmp_path, ["3.png"], inode=5), "test"))


def test_names_of_one_file_are_counted_once_and_lost_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"image")
    for name in ("2.png", "3.png", "4.png"):
        (tmp_path / name).hardlink_to(tmp_path / "1.png")
    train, test = source_of(tmp_path, ["1.png", "2.png"]), source_of(tmp_path, ["3.png", "4.png"])
    (fault,) = shared_files(train, test, "test")
    assert fault.count == 1 and f"such as {tmp_path}/1.png and {tmp_path}/3.png;" in fault.text
    (tmp_path / "3.png").unlink()
    (fault,) = shared_files(train, test, "test")
    assert fault.count == 1 and f"such as {tmp_path}/1.png and {tmp_path}/4.png;" in fault.text
