"""Tests of files that hold many pieces of bytes: valid, damaged, and on disks that are full or have no locks."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.make import full_disk
from vitrail.data.formats import unpacked as module
from vitrail.data.formats.unpacked import open_blob, write_blob
from vitrail.errors import SaveError


@given(pieces=st.lists(st.binary(max_size=20)))
def test_pieces_are_read_back(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("blob") / "sub/pieces"
    for blob in (write_blob(path, pieces), open_blob(path)):
        assert blob is not None
        assert len(blob) == len(pieces)
        assert [blob[index] for index in reversed(range(len(pieces)))] == pieces[::-1]
    assert [file.name for file in path.parent.iterdir()] == ["pieces"]


def test_more_pieces_than_are_counted_at_a_time(tmp_path: Path) -> None:
    blob = write_blob(tmp_path / "pieces", (b"x" * (number % 3) for number in range(200_000)))
    assert len(blob) == 200_000 and blob.offsets[-1] == sum(number % 3 for number in range(200_000))
    assert blob[131_075] == b"x" * (131_075 % 3)


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    def never() -> object:
        raise AssertionError
        yield

    (tmp_path / "pieces.partial").write_bytes(b"x" * 1000)  # a killed process left it
    write_blob(tmp_path / "pieces", [b"a", None, b"bc"])
    blob = write_blob(tmp_path / "pieces", never())
    assert [blob[index] for index in range(3)] == [b"a", b"", b"bc"]
    assert [file.name for file in tmp_path.iterdir()] == ["pieces"]


def test_every_cut_and_every_changed_end_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "pieces"
    assert open_blob(path) is None
    write_blob(path, [b"abc", b"de"])
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert open_blob(path) is None
    for place in range(5, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1 :])
        assert open_blob(path) is None
    path.write_bytes(whole)
    assert open_blob(path) is not None


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    with full_disk(3_000_000), pytest.raises(SaveError) as caught:
        write_blob(tmp_path / "pieces", [bytes(100_000)] * 50)
    assert str(caught.value).startswith(f"could not save unpacked images to {tmp_path / 'pieces'}: File")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    assert write_blob(tmp_path / "pieces", [b"ab"])[0] == b"ab"
    assert [file.name for file in tmp_path.iterdir()] == ["pieces"]


@pytest.mark.slow
def test_one_who_waits_takes_what_the_other_wrote(tmp_path: Path) -> None:
    partial = tmp_path / "pieces.partial"
    script = f"""
from pathlib import Path
from vitrail.data.formats.unpacked import write_blob
print(write_blob(Path({str(tmp_path / "pieces")!r}), [b"mine"])[0].decode())
"""
    with partial.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        write_blob(tmp_path / "other", [b"theirs"]).path.replace(tmp_path / "pieces")
        partial.unlink()
    assert process.communicate()[0] == "theirs\n"
    assert [file.name for file in tmp_path.iterdir()] == ["pieces"]
