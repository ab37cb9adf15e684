"""Reading of files at URLs (s3://, gs://, https:// and the other protocols of fsspec): byte ranges, retries and
timeouts.

Each attempt may take `TIMEOUT` seconds. The pause between attempts starts at `PAUSE` seconds and doubles each time.
After `ATTEMPTS` attempts, a `DataError` names the URL. Therefore no request blocks for longer than 2 min 38 s.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from vitrail.errors import DataError
from vitrail.processes.launch import within

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
"""The package that fsspec needs for each protocol."""

TAGS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "Last-Modified", "mtime", "created")
"""Fields that can hold the version of a file, most reliable first."""


def is_remote(location: str) -> bool:
    return "://" in location


def describe(url: str) -> tuple[int, str]:
    """Return the size of a file in bytes, and a text that identifies its version, or "" if the server states no
    version.

    Raises `FileNotFoundError` or `PermissionError`. Raises `DataError` if the last attempt fails.
    """
    about = _retry("looking it up", url, lambda system, path: system.info(path))
    if not isinstance(about.get("size"), int):
        raise DataError(f"{url}: the server does not state the size of the file, so parts of it cannot be read")
    return about["size"], next((str(about[tag]) for tag in TAGS if about.get(tag)), "")


def read(url: str, start: int, stop: int) -> bytes:
    """Return the bytes from `start` up to but excluding `stop`. Raises the same errors as `describe`."""

    def part(system: Any, path: str) -> bytes:
        data: bytes = system.cat_file(path, start=start, end=stop)
        if len(data) != stop - start:
            raise EOFError(f"the server sent {len(data):,} of {stop - start:,} bytes from byte {start:,} on")
        return data

    return _retry("reading", url, part) if stop > start else b""


def read_all(url: str) -> bytes:
    """Return all bytes of a small file. Raises the same errors as `describe`."""
    return _retry("reading", url, lambda system, path: system.cat_file(path))


def list_files(url: str) -> list[str]:
    """Return the files in a folder and in its subfolders, as sorted relative paths. Raises `DataError`."""
    return _list(url, lambda system, path: system.find(path, maxdepth=2))


def glob(folder: str, pattern: str) -> list[str]:
    """Return the files that match a pattern with *, as sorted paths relative to `folder`. Raises `DataError`."""
    return _list(folder, lambda system, path: system.glob(f"{path.rstrip('/')}/{pattern}"))


def _list(url: str, work: Callable[[Any, str], list[str]]) -> list[str]:
    def relative(system: Any, path: str) -> list[str]:
        root = path.rstrip("/") + "/"
        return sorted(found.removeprefix(root) for found in work(system, path))

    try:
        return _retry("listing", url, relative)
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise DataError(str(error)) from error


def _retry(action: str, url: str, work: Callable[[Any, str], T]) -> T:
    """Return the result of `work(file system, path)`. The call is repeated after an error that may be temporary."""
    failure: Exception | None = None
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        system, path = _open(url)
        try:
            return within(TIMEOUT, lambda: work(system, path))  # noqa: B023 (the call ends before the names change)
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system has its own exceptions
            if isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403):
                raise PermissionError(f"{url}: {action} is not allowed ({error})") from error
            failure = error
    raise DataError(
        f"{url}: {action} failed {ATTEMPTS} times, with up to {TIMEOUT:g} s per attempt; the last error was "
        f"{type(failure).__name__}: {failure}"
    ) from failure


def _open(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in that file system. fsspec caches file systems."""
    try:
        system, path = importlib.import_module("fsspec.core").url_to_fs(url)
    except ImportError as error:
        protocol = url.partition("://")[0]
        packages = PACKAGES.get(protocol)
        hint = f"pip install {packages}" if packages else str(error)
        raise DataError(f"{url}: reading {protocol}:// needs another package: {hint}") from error
    except ValueError as error:
        raise DataError(
            f"{url}: {error}; supported are file paths, s3://, gs://, https:// and the other protocols of fsspec"
        ) from error
    return system, path
