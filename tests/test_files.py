"""Tests of complete writes with real faults: exceptions, full files, and existing names."""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vitrail.errors import ConfigError, DestinationError, SaveError
from vitrail.files import (
    cache_folder,
    check_new_file,
    check_new_folder,
    check_parent,
    expanded,
    replacing_file,
    replacing_folder,
    saving,
    write_json,
)

OURS = ("a", "b", "old", "new", "both", "inner", "half")


def content(folder: Path) -> dict[str, str]:
    """Return every file below a folder with its text."""
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def write(folder: Path, **files: str) -> None:
    with replacing_folder("the test", folder, OURS) as partial:
        for name, text in files.items():
            (partial / name).write_text(text)


def test_a_path_like_an_option_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert expanded("-a/b") == tmp_path / "-a/b" and expanded("a/-b") == Path("a/-b")


def test_a_folder_appears_with_all_its_files(tmp_path: Path) -> None:
    target = tmp_path / "new" / "deep"
    with replacing_folder("the test", target, OURS) as partial:
        assert partial.is_dir() and not any(partial.iterdir()) and partial != target
        (partial / "inner").mkdir()
        (partial / "inner" / "b").write_text("B")
        (partial / "a").write_text("A")
        assert not target.exists()
        identity = partial.stat().st_ino
    assert content(target) == {"a": "A", "inner/b": "B"}
    assert target.stat().st_ino == identity  # renamed in one step, not copied
    assert [entry.name for entry in target.parent.iterdir()] == ["deep"]


def test_a_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write(target, old="1", both="1")
    write(target, both="2", new="2")
    assert content(target) == {"both": "2", "new": "2"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_every_file_is_flushed_before_a_folder_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int | str] = []
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        done.append("renamed")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(Path, "rename", renamed)
    model = tmp_path / "model"
    write(model, a="A", b="B")
    first, then = done[: done.index("renamed")], done[done.index("renamed") :]
    assert {*first} == {path.stat().st_ino for path in (model, model / "a", model / "b")}
    assert then == ["renamed", tmp_path.stat().st_ino]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_old_folder(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "model"
    write(target, a="1")
    with pytest.raises(error, match="stop"), replacing_folder("the test", target, OURS) as partial:
        (partial / "a").write_text("2")
        raise error("stop")
    assert content(target) == {"a": "1"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_leftovers_of_a_process_that_was_killed(tmp_path: Path) -> None:
    target = tmp_path / "model"
    script = f"""
        import os, signal
        from pathlib import Path
        from vitrail.files import replacing_folder
        with replacing_folder("the test", Path({str(target)!r}), ("*",)) as partial:
            (partial / "half").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False).returncode == -9
    assert not target.exists() and any(tmp_path.iterdir())
    write(target, a="1")
    assert content(target) == {"a": "1"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_second_writer_of_a_folder_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with replacing_folder("the test", target, OURS) as partial:
        (partial / "a").write_text("1")
        with pytest.raises(DestinationError, match="model is being written by another process"):
            write(target, a="2")
    assert content(target) == {"a": "1"}
    write(target, a="3")
    assert content(target) == {"a": "3"}


def limited(script: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process whose files may not exceed 100 bytes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    command = [sys.executable, "-B", "-c", textwrap.dedent(script)]
    return subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)


def test_a_file_that_cannot_be_finished_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write(target, a="1")
    result = limited(f"""
        from pathlib import Path
        from vitrail.errors import SaveError
        from vitrail.files import replacing_folder
        try:
            with replacing_folder("the test", Path({str(target)!r}), ("*",)) as partial:
                (partial / "a").write_text("2" * 50)
                (partial / "b").write_text("2" * 500)
        except SaveError as error:
            print(error)
    """)
    expected = f"could not save the test to {target}: File too large; an earlier version there is intact"
    assert result.stdout.strip() == expected
    assert content(target) == {"a": "1"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_json_that_cannot_be_finished_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})
    result = limited(f"""
        from pathlib import Path
        from vitrail.files import write_json
        try:
            write_json(Path({str(path)!r}), ["long"] * 100)
        except OSError as error:
            print(error.errno)
    """)
    assert result.stdout.strip() == str(errno.EFBIG)
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_a_file_that_a_link_names_is_replaced(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "elsewhere" / "file"
    file.parent.mkdir()
    file.touch()
    link.symlink_to(file)
    write_json(link, 1)
    assert link.is_symlink()
    assert file.read_text() == "1\n"
    with replacing_file(link) as partial:
        partial.write_text("2")
    assert link.is_symlink()
    assert file.read_text() == "2"


def test_what_a_killed_process_left_of_a_file_is_deleted_a_day_later(tmp_path: Path) -> None:
    for name in (".vitrail-old_one1", ".vitrail-new_one1", ".vitrail-of-the-user"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        if "new" not in name:
            os.utime(tmp_path / name, (1, 1))
    with replacing_file(tmp_path / "file") as partial:
        partial.write_text("1")
    assert sorted(os.listdir(tmp_path)) == [".vitrail-new_one1", ".vitrail-of-the-user", "file"]  # noqa: PTH208


def test_what_another_process_still_writes_is_not_deleted(tmp_path: Path) -> None:
    with replacing_file(tmp_path / "a" / "slow") as partial:
        used = tmp_path / partial.parent.name
        os.utime(partial.parent.rename(used), (1, 1))  # to a folder that is searched for the first time
        with replacing_file(tmp_path / "file") as other:
            other.touch()
        assert used.is_dir()
        used.rename(partial.parent)
        partial.write_text("1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file"]


@pytest.mark.parametrize("target", ["nowhere", "link"])
def test_a_link_to_nothing_is_no_destination(tmp_path: Path, target: str) -> None:
    (link := tmp_path / "link").symlink_to(target)
    for check in (check_new_file, lambda path, overwrite: check_new_folder(path, (), overwrite=overwrite)):
        with pytest.raises(DestinationError, match=f"{re.escape(str(link))} is a symbolic link to {target}"):
            check(link, overwrite=True)


def test_a_path_where_nothing_can_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in ("file", "link"):
        for name in ("out", "deep/out"):
            path = tmp_path / place / name
            message = f"{path} cannot be made, because {tmp_path / place} is not a folder; choose another path"
            for check in (
                lambda path: check_parent(path),
                lambda path: check_new_file(path, overwrite=True),
                lambda path: check_new_folder(path, (), overwrite=True),
            ):
                with pytest.raises(DestinationError, match=re.escape(message)):
                    check(path)
    check_parent(tmp_path / "deep" / "out")
    monkeypatch.chdir(tmp_path)
    check_parent(Path("out"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # permissions do not bind root
    with pytest.raises(DestinationError, match=f"because {re.escape(str(tmp_path))} is not writable"):
        check_parent(tmp_path / "deep" / "out")


def test_a_folder_with_a_name_that_leaves_no_room_beside_it_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(DestinationError, match="at most 237 bytes"):
        check_new_folder(tmp_path / ("é" * 119), (), overwrite=False)
    path = tmp_path / ("x" * 237)
    check_new_folder(path, (), overwrite=False)
    for _ in range(2):
        with replacing_folder("it", path, ("file",)) as folder:
            (folder / "file").touch()
    assert [*path.iterdir()] == [path / "file"]


def test_saving_names_the_variable_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))
    for path, is_named in ((cache_folder("parquet") / "x", True), (tmp_path / "x", False)):
        with pytest.raises(SaveError, match="Permission denied") as caught, saving("it", path):
            raise PermissionError(13, "Permission denied")
        assert ("VITRAIL_DATA" in str(caught.value)) == is_named


def test_a_user_without_a_home_folder_names_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("VITRAIL_DATA", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="set VITRAIL_DATA"):
        cache_folder("features")
    with pytest.raises(SaveError, match="could not save it"), saving("it", tmp_path / "x"):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setenv("VITRAIL_DATA", "cache")
    assert cache_folder("features") == Path("cache/features")
