"""Tests of files behind URLs, with a real server that stalls, fails and drops connections, and of the messages."""

from __future__ import annotations

import importlib.util
import io
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import fsspec
import numpy as np
import pytest
from fsspec.spec import AbstractFileSystem

from tests.data.server import Server
from tests.make import encode, write_tar
from vitrail.data import remote
from vitrail.data.formats.tar import open_shards
from vitrail.errors import DataError
from vitrail.testing import check_source


class PlainFileSystem(AbstractFileSystem):
    """A file system for plain://host/path that uses urllib, without a timeout of its own."""

    protocol = "plain"
    cachable = False

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        with self._request(path, method="HEAD") as answer:
            return {"name": path, "size": int(answer.headers["Content-Length"]), "ETag": answer.headers["ETag"]}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        headers = {} if start is None or end is None else {"Range": f"bytes={start}-{end - 1}"}
        with self._request(path, headers=headers) as answer:
            return answer.read()

    def _request(self, path: str, **options: Any) -> Any:
        try:
            return urllib.request.urlopen(urllib.request.Request(f"http://{path}", **options))
        except HTTPError as error:
            error.close()
            if error.code == 404:
                raise FileNotFoundError(path) from None
            raise OSError(f"status {error.code}") from None


@pytest.fixture(autouse=True)
def hurry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE", 0.001)
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))
    fsspec.register_implementation("plain", PlainFileSystem, clobber=True)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(params=["plain", "http"])
def root(request: pytest.FixtureRequest, server: Server) -> str:
    return f"{request.param}://{server.address}"


def tar_of(*keys: int) -> bytes:
    """Return a tar file of samples, each with a grey image and a label."""
    file, files = io.BytesIO(), []
    for key in keys:
        image = encode(np.full((40, 30 + key, 3), key, np.uint8), "BMP")
        files += [(f"{key:03}.bmp", image), (f"{key:03}.cls", b"%d" % (key % 2))]
    write_tar(file, files)
    return file.getvalue()


@pytest.mark.slow
def test_a_part_of_a_file(server: Server, root: str) -> None:
    server.files["/x"] = bytes(range(200))
    assert remote.read(f"{root}/x", 10, 14) == bytes([10, 11, 12, 13])
    assert remote.read(f"{root}/x", 7, 7) == b""
    assert remote.read_all(f"{root}/x") == bytes(range(200))
    size, tag = remote.describe(f"{root}/x")
    assert size == 200 and tag == f'"{hash(server.files["/x"])}"'
    with pytest.raises(FileNotFoundError):
        remote.read(f"{root}/y", 0, 1)


@pytest.mark.parametrize("fault", ["503", "drop", "short", "stall"])
def test_what_passes_is_waited_out(server: Server, root: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TIMEOUT", 0.3 if fault == "stall" else 30.0)
    server.files["/x"] = bytes(range(200))
    server.faults = [fault] * (1 if fault == "stall" else remote.ATTEMPTS - 1)
    failing = len(server.faults)
    assert remote.read(f"{root}/x", 10, 18) == bytes(range(10, 18))
    assert len(server.requests) == failing + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("503", "503"), ("drop", ""), ("short", "EOFError: the server sent 4 of 8 bytes"), ("stall", "TimeoutError")],
)
def test_what_lasts_is_an_error_that_names_the_file(
    server: Server, root: str, fault: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "TIMEOUT", 0.1 if fault == "stall" else 30.0)
    server.files["/x"] = bytes(range(200))
    server.faults = [fault, "..."]
    with pytest.raises(DataError, match=rf"{root}/x: reading failed 5 times, with up to .* s per attempt; .*{reason}"):
        remote.read(f"{root}/x", 10, 18)
    assert len(server.requests) == remote.ATTEMPTS


def test_pauses_between_attempts_double(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(remote, "PAUSE", 0.5)
    server.faults = ["503", "..."]
    with pytest.raises(DataError):
        remote.read_all(f"plain://{server.address}/x")
    assert pauses == [0.5, 1, 2, 4]


@pytest.mark.parametrize("protocol", ["closed", "http"])
def test_a_lack_of_permission_is_not_tried_again(server: Server, protocol: str) -> None:
    calls: list[str] = []

    class Closed(AbstractFileSystem):
        def info(self, path: str, **_: Any) -> dict[str, Any]:
            calls.append(path)
            raise PermissionError("no key")

        cat_file = find = info

    fsspec.register_implementation("closed", Closed, clobber=True)
    server.faults = ["403", "..."]
    url = f"{protocol}://{server.address}"
    with pytest.raises(PermissionError, match=rf"{url}/x: reading is not allowed"):
        remote.read(f"{url}/x", 0, 1)
    assert len(calls) + len(server.requests) == 1
    if protocol == "closed":
        said = rf"cannot read shard {url}/x\.tar: {url}/x\.tar: looking it up is not allowed \(no key\)"
        with pytest.raises(DataError, match=said):
            open_shards(f"{url}/x.tar", None)
        with pytest.raises(DataError, match=rf"{url}/: listing is not allowed \(no key\)"):
            open_shards(url, None)


def test_a_server_that_forbids_what_it_does_not_have(server: Server) -> None:
    """S3 answers in this way if the client may not list a bucket. The optional classes.json is requested."""

    class Strict(PlainFileSystem):
        protocol = "strict"

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
            if path.endswith(".json"):
                raise PermissionError(path)
            return super().cat_file(path, start, end)

    fsspec.register_implementation("strict", Strict, clobber=True)
    server.files["/x.tar"] = tar_of(1, 2)
    assert len(open_shards(f"strict://{server.address}/x.tar", None).train) == 2


def test_what_a_protocol_lacks_is_said() -> None:
    with pytest.raises(DataError, match=r"zzz://x/y\.tar: Protocol not known: zzz; supported are file paths, s3://"):
        remote.read_all("zzz://x/y.tar")


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_what_to_install_is_said() -> None:
    with pytest.raises(DataError, match=r"s3://x/.*: reading s3:// needs another package: pip install s3fs"):
        open_shards("s3://x/y.tar", None)


@pytest.mark.slow
def test_shards_on_a_server(server: Server, root: str, tmp_path: Path) -> None:
    for number in range(3):
        server.files[f"/data/train-{number}.tar"] = tar_of(*range(number * 20, number * 20 + 20))
    server.files["/data/classes.json"] = b'["rose", "daisy"]'
    location = f"{root}/data/train-{{0..2}}.tar"
    splits = open_shards(location, None)
    assert splits.classes == ("rose", "daisy") and len(splits.train) == 60 and splits.train.target(5) == 1
    check_source(splits.train)
    server.requests.clear()
    again = open_shards(location, None)
    assert not [path for _, path, wanted in server.requests if wanted]
    assert again.train[59] == splits.train[59]
    server.files["/data/train-1.tar"] = tar_of(*range(100, 120))
    assert open_shards(location, None).train.key(20) == "100"
    with pytest.raises(DataError, match=rf"shard {root}/data/train-3\.tar does not exist"):
        open_shards(f"{root}/data/train-{{0..3}}.tar", None)


def test_without_a_version_a_new_shard_of_the_same_size_is_read(server: Server) -> None:
    server.states_versions = False
    server.files["/x.tar"], changed = tar_of(1, 2), tar_of(2, 3)
    assert len(changed) == len(server.files["/x.tar"])
    assert open_shards(f"plain://{server.address}/x.tar", None).train.key(0) == "001"
    server.files["/x.tar"] = changed
    assert open_shards(f"plain://{server.address}/x.tar", None).train.key(0) == "002"


def test_headers_are_asked_for_and_images_are_not(server: Server) -> None:
    file = io.BytesIO()
    sizes = (("1.jpg", 3_000_000), ("1.cls", 1), ("2.jpg", 2_000_000), ("2.cls", 1))
    write_tar(file, ((name, b"1" * size) for name, size in sizes))
    server.files["/x.tar"] = file.getvalue()
    source = open_shards(f"plain://{server.address}/x.tar", None).train
    assert len(source) == 2 and source.target(1) == 1
    assert sum(bool(wanted) for _, _, wanted in server.requests) == 3  # the first, and one behind each image


def test_a_folder_and_a_glob_of_another_file_system() -> None:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for number, split in enumerate(("train", "train", "val")):
        memory.pipe(f"/bucket/{split}/{number}.tar", tar_of(number, number + 10))
    memory.pipe("/bucket/notes.txt", b"")
    splits = open_shards("memory://bucket", None)
    assert [splits.train.key(index) for index in range(len(splits.train))] == ["000", "010", "001", "011"]
    assert splits.validation[0].key == "002"
    assert len(open_shards("memory://bucket/train/*.tar", None).train) == 4
    assert len(open_shards("memory://bucket/{train,val}/*.tar", None).train) == 4
    with pytest.raises(DataError, match="memory://nothing has no shards"):
        open_shards("memory://nothing", None)
    memory.store.clear()
