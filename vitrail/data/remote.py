"""Files behind a URL (s3://, gs://, https://, whatever fsspec knows): ranges of bytes, retries, an end to waiting.

An attempt has `TIMEOUT` seconds; after `ATTEMPTS` of them, with pauses that double from `PAUSE` seconds, a `DataError`
names the URL. So no request hangs for longer than 2 min 38 s.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from vitrail.errors import DataError

__all__ = ["ATTEMPTS", "PAUSE", "TIMEOUT", "describe", "glob", "is_remote", "list_files", "read", "read_all"]

T = TypeVar("T")

ATTEMPTS = 5
TIMEOUT = 30.0
PAUSE = 0.5

PACKAGES = {
    "http": "aiohttp",
    "https": "aiohttp",
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
}
"""What to install for a protocol that fsspec knows but does not bring."""

TAGS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "Last-Modified", "mtime", "created")
"""Where file systems say which version of a file they have, the surest first."""


def is_remote(location: str) -> bool:
    return "://" in location


def describe(url: str) -> tuple[int, str]:
    """Size in bytes, and what tells this version of the file from others ("" where the server says nothing).

    Raises `FileNotFoundError`, `PermissionError`, and `DataError` after the last attempt.
    """
    about = _insist("looking it up", url, lambda system, path: system.info(path))
    if not isinstance(about.get("size"), int):
        raise DataError(f"{url}: its server does not say how large it is, so parts of it cannot be asked for")
    return about["size"], next((str(about[tag]) for tag in TAGS if about.get(tag)), "")


def read(url: str, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop`, all of them. Raises as `describe` does."""

    def part(system: Any, path: str) -> bytes:
        data: bytes = system.cat_file(path, start=start, end=stop)
        if len(data) != stop - start:
            raise EOFError(f"{len(data):,} bytes came, of {stop - start:,} from byte {start:,} on")
        return data

    return _insist("reading", url, part) if stop > start else b""


def read_all(url: str) -> bytes:
    """The whole file, a small one. Raises as `describe` does."""
    return _insist("reading", url, lambda system, path: system.cat_file(path))


def list_files(url: str) -> list[str]:
    """Paths, relative to a folder, of the files in it and in its subfolders, sorted. Raises `DataError`."""
    return _list(url, lambda system, path: system.find(path, maxdepth=2))


def glob(folder: str, pattern: str) -> list[str]:
    """Paths, relative to `folder`, of the files that fit a pattern with *, sorted. Raises `DataError`."""
    return _list(folder, lambda system, path: system.glob(f"{path.rstrip('/')}/{pattern}"))


def _list(url: str, work: Callable[[Any, str], list[str]]) -> list[str]:
    def relative(system: Any, path: str) -> list[str]:
        root = path.rstrip("/") + "/"
        return sorted(found.removeprefix(root) for found in work(system, path))

    try:
        return _insist("listing", url, relative)
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise DataError(str(error)) from error


def _insist(doing: str, url: str, work: Callable[[Any, str], T]) -> T:
    """What `work(file system, path)` returns, tried again when it fails in a way that can pass."""
    failure: Exception | None = None
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        system, path = _open(url)
        try:
            return _in_time(lambda: work(system, path))  # noqa: B023 (it has returned, or been given up, by then)
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system has exceptions of its own
            if isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403):
                raise PermissionError(f"{url}: {doing} is not allowed ({error})") from error
            failure = error
    raise DataError(
        f"{url}: {doing} failed {ATTEMPTS} times, with up to {TIMEOUT:g} s for each; the last time: "
        f"{type(failure).__name__}: {failure}"
    ) from failure


def _open(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, which it keeps and shares, and the path in it."""
    try:
        system, path = importlib.import_module("fsspec.core").url_to_fs(url)
    except ImportError as error:
        protocol = url.partition("://")[0]
        packages = PACKAGES.get(protocol)
        hint = f"pip install {packages}" if packages else str(error)
        raise DataError(f"{url}: reading {protocol}:// needs another package: {hint}") from error
    except ValueError as error:
        raise DataError(f"{url}: {error}; known are file paths, s3://, gs://, https:// and others of fsspec") from error
    return system, path


def _in_time(work: Callable[[], T]) -> T:
    """What `work` returns. Raises what it raises, or `TimeoutError`, and then leaves it to itself."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)  # so that one that never ends does not keep the process
    thread.start()
    thread.join(TIMEOUT)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError("no answer")
    return results[0]
