"""Atomic writing of files and folders, checks of output paths, and checksums."""

from __future__ import annotations

import csv
import errno
import fcntl
import fnmatch
import functools
import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError, DestinationError, SaveError


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder in place of ~ at its beginning. If there is no such user, ~ stays. A path that
    begins with - becomes absolute, because commands that a message advises would take it for an option."""
    found = Path(os.path.expanduser(path))  # noqa: PTH111 (the method raises an error if there is no such user)
    return found.absolute() if str(found).startswith("-") else found


def cache_folder(name: str) -> Path:
    """Return a cache folder for files that can be made or downloaded again. The folder may not exist yet.

    The parent of the folder is `$VITRAIL_DATA` if this variable is set, else ~/.cache/vitrail. Raise `ConfigError` if
    the user has no home folder.
    """
    named = os.environ.get("VITRAIL_DATA")
    folder = expanded(named or "~/.cache/vitrail")
    if not named and not folder.is_absolute():
        raise ConfigError(
            "HOME is not set, and this user has no home folder for the cache; set VITRAIL_DATA to a folder that can be "
            "written"
        )
    return folder / name


@contextmanager
def saving(what: str, path: Path, *, is_replaced: bool = False) -> Iterator[None]:
    """Turn an `OSError` in the `with` block into a `SaveError` that names the file and the problem.

    `is_replaced` is True if the block writes elsewhere first and replaces what is at `path` in one step. If something
    is there before the block, the message says that it is intact. If the file belongs to the cache, the message names
    the variable that moves the cache.
    """
    intact = "; an earlier version there is intact" if is_replaced and path.exists() else ""
    try:
        yield
    except OSError as error:
        advice = ""
        with suppress(ConfigError):  # without a home folder
            if path.absolute().is_relative_to(cache_folder(".").absolute()):
                advice = "; set VITRAIL_DATA to a folder that can be written and has room"
        raise SaveError(f"could not save {what} to {path}: {error.strerror or error}{intact}{advice}") from error


def check_new_folder(
    path: Path, names: Collection[str], *, overwrite: bool, recognise: Callable[[Path], bool] = lambda path: True
) -> None:
    """Raise `DestinationError` unless a folder may be written at `path`.

    Either nothing exists at `path`, or `path` is an empty folder. With `overwrite`, `path` may also be an earlier
    output: a folder that `recognise` accepts and whose entries all match `names` (shell patterns). Any other folder
    belongs to the user and is never replaced.
    """
    room = 256 - len(replaced_path(Path("x")).name)  # most file systems have names of up to 255 bytes
    if len(os.fsencode(path.absolute().name)) > room:
        raise DestinationError(
            f"{path} has a name that leaves no room for those of temporary folders; choose one of at most {room} bytes"
        )
    if not path.exists():
        check_parent(path)
        return
    if not path.is_dir():
        raise DestinationError(f"{path} is a file; choose another path for the folder to write")
    if path.resolve() == Path.cwd():
        raise DestinationError(f"{path} is the current folder; name a new folder inside it")
    entries = sorted(entry.name for entry in path.iterdir())
    foreign = [name for name in entries if not _matches(name, names)]
    if foreign or (entries and not recognise(path)):
        shown = ", ".join((foreign or entries)[:3]) + (", ..." if len(foreign or entries) > 3 else "")
        raise DestinationError(
            f"{path} holds files that Vitrail did not write ({shown}), so it is not replaced; choose a new or an empty "
            "folder"
        )
    if entries and not overwrite:
        raise DestinationError(f"{path} exists already; choose another folder, or replace it with --overwrite")


def check_listed_folder(path: Path, contents: str, *, overwrite: bool) -> list[str]:
    """Raise `DestinationError` unless a folder may be written at `path`, as `check_new_folder` does. With `overwrite`,
    an earlier output is a folder whose JSON file `contents` lists its other files under "files".

    Return shell patterns of the entries of the earlier output, for `replacing_folder`. Each pattern matches one name.
    """
    ours: set[str] = set()
    theirs: set[str] = set()
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        listed = {contents, *json.loads((path / contents).read_text(encoding="utf-8"))["files"]}
        for entry in path.rglob("*"):
            if entry.is_symlink() or not entry.is_dir():
                inside = entry.relative_to(path)
                (ours if inside.as_posix() in listed else theirs).add(inside.parts[0])
    patterns = [glob.escape(name) for name in ours - theirs]
    check_new_folder(path, patterns, overwrite=overwrite)
    return patterns


def check_new_file(path: Path, *, overwrite: bool) -> None:
    """Raise `DestinationError` unless a file may be written at `path`. An existing file needs `overwrite`."""
    if path.is_dir():
        raise DestinationError(f"{path} is a folder; choose another path for the file to write")
    if path.exists() and not overwrite:
        raise DestinationError(f"{path} exists already; choose another file, or replace it with --overwrite")
    check_parent(path)


def check_parent(path: Path) -> None:
    """Raise `DestinationError` if nothing can be made at `path`, because it is a symbolic link to nothing, or because
    the nearest of its parent folders that exists is a file or is not writable."""
    if path.is_symlink() and not path.exists():
        raise DestinationError(
            f"{path} is a symbolic link to {path.readlink()}, where nothing can be written; delete the link, or choose "
            "another path"
        )
    parent = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not parent.is_dir():
        raise DestinationError(f"{path} cannot be made, because {parent} is not a folder; choose another path")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DestinationError(f"{path} cannot be made, because {parent} is not writable; choose another path")


@contextmanager
def replacing_folder(what: str, path: Path, names: Collection[str]) -> Iterator[Path]:
    """Yield an empty folder that replaces `path` if the block succeeds. If the block raises, the new folder is deleted.

    If there is an older folder at `path`, entries that match `names` (shell patterns) are deleted. All other entries
    belong to the user and move into the new folder. Everything is flushed to the disk before folders are renamed.
    Raises `SaveError`, and `DestinationError` if another process writes this folder.
    """
    path = path.resolve()
    partial = partial_path(path)
    with saving(what, path, is_replaced=True):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(None, "it is a file, but a folder must be written there")
        partial.mkdir(parents=True, exist_ok=True)
        with only_writer(path, partial):
            try:
                for left in partial.iterdir():  # by a process that was killed
                    shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
                yield partial
                for entry in (*partial.rglob("*"), partial):
                    _flush(entry)
                _swap(partial, path, names)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def only_writer(path: Path, folder: Path) -> Iterator[None]:
    """Hold a lock on `folder`, in which the content of `path` is written, inside the `with` block.

    Raises `DestinationError` if another process or thread holds the lock. The operating system releases the lock if the
    process ends. On a file system without locks, nothing is locked.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock(descriptor):
            raise DestinationError(
                f"{path} is being written by another process; wait until that process ends, or choose another path"
            )
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed. Return False if another process or thread holds its lock. On a
    file system without locks, nothing is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which replaces `path` in one step if the block succeeds. Several processes can
    write the same file at the same time. If `path` is a symbolic link, the file that it names is replaced.

    What a killed process has left beside the file is deleted when it is a day old.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    _delete_left(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".vitrail-") as folder, only_writer(path, Path(folder)):
        partial = Path(folder) / path.name
        yield partial
        partial.replace(path)


@functools.cache  # a process searches each folder once, because it can write thousands of files in it
def _delete_left(folder: Path) -> None:
    """Delete the folders of `replacing_file` that are a day old."""
    for left in folder.glob(".vitrail-????????"):
        with suppress(OSError, DestinationError):  # another process deletes it, or still writes in it
            if time.time() - left.stat().st_mtime > 24 * 3600:
                with only_writer(left, left):
                    shutil.rmtree(left)


def disk_problem(folder: Path, needed: int) -> OSError | None:
    """Return the error of the operating system if a new file of `needed` bytes does not fit into a folder, else None.

    Some libraries report a full disk as an internal assertion. This function then finds the cause.
    """
    probe = folder / f".{os.getpid()}.vitrail-partial"
    try:
        with probe.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(needed, 1))
    except OSError as error:
        return error if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else None
    finally:
        with suppress(OSError):
            probe.unlink()
    return None


def partial_path(path: Path) -> Path:
    """Return the temporary path, next to `path`, for an output that is not complete yet."""
    return path.with_name(f".{path.name}.vitrail-partial")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV, whose columns are those of the first row. Without rows the file is empty."""
    with path.open("w", encoding="utf-8", newline="") as file:
        if rows:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def write_table(path: Path, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a header and rows as CSV with the line ends of Unix."""
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(heads)
        writer.writerows(rows)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, replacing it in one step. If `path` is a symbolic link, the file that it names is replaced."""
    path = path.resolve()
    partial = partial_path(path)
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, replacing the file in one step."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # A file name that is not UTF-8 has lone surrogates, whose backslash form is also their form in JSON.
    write_whole(path, text.encode("utf-8", "backslashreplace"))


def named_once(pairs: list[tuple[str, Any]], names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the fields of a JSON object, as the `object_pairs_hook` of `json.loads`. Raise `ValueError` if two fields
    have the same name, of which Python would take the last one. If `names` is given, others may have the same name."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        found = [name for name, _ in pairs if names is None or name in names]
        if twice := [name for name in found if found.count(name) > 1]:
            raise ValueError(f"the field {twice[0]!r} occurs twice")
    return fields


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recover_folder(path: Path) -> None:
    """Restore the old folder if a process was killed in `replacing_folder` before the new folder had its final name."""
    old = replaced_path(path)
    if old.exists() and not path.exists():
        old.rename(path)


def _swap(new: Path, path: Path, names: Collection[str]) -> None:
    """Rename `new` to `path`. The old folder is deleted only after the new folder is in place."""
    old = replaced_path(path)
    recover_folder(path)
    _discard(old, path, names)
    if path.exists():
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        recover_folder(path)
        raise
    _flush(path.parent)
    _discard(old, path, names)


def _discard(old: Path, path: Path, names: Collection[str]) -> None:
    """Delete a replaced folder. Entries that do not match `names` are first moved into the folder at `path`."""
    if not old.exists():
        return
    for entry in old.iterdir():
        if not _matches(entry.name, names):
            entry.rename(path / entry.name)
    shutil.rmtree(old, ignore_errors=True)


def replaced_path(path: Path) -> Path:
    """Return the path, next to `path`, of the old folder while a new one replaces it."""
    return path.with_name(f".{path.name}.vitrail-replaced")


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
