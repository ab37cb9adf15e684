"""Tests of the command line as a whole: commands, help and exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from rich.console import Console
from rich.progress import Progress

from tests.cli.conftest import Cli
from vitrail import __version__
from vitrail.cli import COMMANDS, Output, command_of, main
from vitrail.cli.console import print_json
from vitrail.cli.help import help_text
from vitrail.cli.options import Call
from vitrail.errors import DataError
from vitrail.training.stop import StopRequest


def test_help_lists_every_verb(cli: Cli) -> None:
    shown = cli.shows("--help")
    assert all(name in shown for name in COMMANDS) and "75" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_no_verb_is_wrong_usage_except_for_the_version(cli: Cli) -> None:
    assert "usage: vitrail COMMAND" in cli.call(code=2).out
    assert __version__ in cli.shows("--version")


def test_an_interrupt_while_modules_are_imported_is_no_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert cli.call("recipes", code=130).err == "vitrail: interrupted\n"


@pytest.mark.parametrize("words", ["help {}", "--help {}", "-h {}"])
def test_help_about_a_command_is_that_of_the_command(words: str, cli: Cli) -> None:
    assert cli.shows(*words.format("data check").split()) == cli.shows("data", "check", "--help")
    assert cli.shows("--help-all", "recipes") == cli.shows("recipes", "--help-all")
    assert "unknown command 'trian'; nearest: train" in cli.refuses(*words.format("trian").split())


def test_a_missing_package_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def import_it(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("importlib.import_module", import_it)
    assert f"torch is not installed in {sys.prefix}; " in cli.refuses("train", "--help")
    with pytest.raises(ModuleNotFoundError):
        cli.call("train", "--debug")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_verb_fits_on_a_screen_and_a_half(
    name: str, columns: int, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = cli.shows(*name.split(), "--help").splitlines()
    assert lines[0].startswith(f"usage: vitrail {name} ") and max(map(len, lines)) <= columns
    assert len(lines) <= 60 and sum(line.startswith("  vitrail ") for line in lines) == 3


@pytest.mark.parametrize("name", COMMANDS)
def test_all_help_shows_every_option_once(name: str, cli: Cli) -> None:
    shown = cli.shows(*name.split(), "--help-all")
    command = command_of(name)[0]
    heads = [line.split()[0].rstrip(",") for line in shown.splitlines() if re.match(r"  (?!vitrail )\S", line)]
    assert sorted(heads) == sorted(one.label for one in command.known.values() if one.name not in command.hidden)
    for python in ("Raise", "ConfigError", "``"):
        assert python not in shown
    assert all(map(help_text, command.known.values())), "an option has no text"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_function_of_a_command_takes_its_options(name: str) -> None:
    command, run = command_of(name)
    taken = [kind for parameter, kind in get_type_hints(run).items() if parameter != "return"]
    assert taken == [Call, *(() if command.has_recipe else command.options)]


@pytest.mark.parametrize(("name", "offered"), [("train", True), ("finetune", False), ("noisy-student", False)])
def test_only_the_settings_of_tasks_that_a_command_can_run_are_offered(name: str, offered: bool, cli: Cli) -> None:
    shown = cli.shows(name, "--help-all")
    assert "--label-smoothing" in shown and all((word in shown) == offered for word in ("--prototypes", "--codes "))


def test_a_verb_of_two_words_needs_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 2 and main(["data", "--help"]) == 0
    assert capsys.readouterr().out.count("data check") == 2


def test_debug_shows_the_traceback(tmp_path: Path, cli: Cli) -> None:
    words = ["predict", str(tmp_path / "nothing"), str(tmp_path)]
    with pytest.raises(DataError, match="has no images"):  # which Python shows with its traceback
        main([*words, "--debug"])
    assert "Traceback" not in cli.refuses(*words)


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:  # which is written to once more when it is closed, as Python does at its exit
        monkeypatch.setattr("sys.stdout", pipe)
        assert cli.call("models", "--json").err == ""


@pytest.fixture
def abandoned() -> Iterator[Any]:
    """A pipe whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as pipe:
        yield pipe


def test_a_library_that_closes_the_output_of_a_command_leaves_the_stream_open(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("w", encoding="utf-8") as stream:
        Output(stream).close()
        assert not stream.closed


def test_a_run_whose_output_has_no_reader_is_asked_to_stop(abandoned: Any) -> None:
    with StopRequest() as stop:
        print("a line", file=Output(abandoned), flush=True)
        assert stop.requested
        print("another line", file=Output(abandoned), flush=True)


def test_a_run_under_nohup_goes_on_without_a_reader(abandoned: Any) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            print("a line", file=Output(abandoned), flush=True)
        assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_messages_without_a_reader_do_not_change_the_exit_code(abandoned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", abandoned)
    assert main(["no-command"]) == 2


class Terminal(io.StringIO):
    """A terminal, as far as `isatty` can tell."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_control_characters_of_names() -> None:
    terminal, file = Terminal(), io.StringIO()
    name = "a\x1b]0;title\x07\x1b[2J\x9b\x7fb\tc\n"
    for stream in (terminal, file):
        print(name, end="", file=Output(stream))
    assert terminal.getvalue() == "a\\x1b]0;title\\x07\\x1b[2J\\x9b\\x7fb\tc\n"
    assert file.getvalue() == name, "a file gets what another program can read"


def test_a_terminal_gets_colours_and_progress_bars() -> None:
    plain, shown = Terminal(), Terminal()
    for stream, file in ((plain, plain), (shown, Output(shown))):
        console = Console(file=file, force_terminal=True, width=40)
        with Progress(console=console, auto_refresh=False, redirect_stdout=False) as bar:
            bar.add_task("[red]reading", total=3)
            console.print("[bold]a line")
        assert "\x1b" in stream.getvalue()
    assert shown.getvalue() == plain.getvalue()


def test_a_full_disk_below_the_output_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["--help"]) == 1
    assert "standard output" in (shown := capsys.readouterr().err) and "Traceback" not in shown


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_output_of_another_encoding_has_escapes(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shows(what: Callable[[], None]) -> bytes:
        content = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(content, encoding=encoding, errors="surrogateescape"))
        monkeypatch.setattr("vitrail.cli._main", lambda *_: what() or 0)
        main(["runs"])
        return content.getvalue()

    text = {"ascii": b"\\xe9 \\u2026 \xff\n", "latin-1": b"\xe9 \\u2026 \xff\n", "utf-8": "é … ".encode() + b"\xff\n"}
    assert shows(lambda: print("é … \udcff")) == text[encoding]
    for value in ("é", "…", "\udcff"):
        assert json.loads(shows(lambda value=value: print_json(value, ascii_only=False)).decode(encoding)) == value


def test_a_folder_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert main(["runs"]) == 2
    assert "the current folder was deleted" in capsys.readouterr().err


def test_a_package_in_an_archive_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.cli.__file__", "vitrail.pyz/vitrail/cli/__init__.py")
    assert "cannot run from an archive" in cli.refuses("recipes")


def test_a_program_with_its_modules_inside_and_its_pages_as_files_runs(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vitrail").mkdir()
    monkeypatch.setattr("vitrail.cli.__file__", str(tmp_path / "vitrail/cli/__init__.py"))
    assert cli.shows("--version").startswith("vitrail ")


@pytest.mark.parametrize("program", ["bin/vitrail", "train.py"])
def test_files_in_the_current_folder_do_not_stand_in_for_modules_in_worker_processes(
    program: str, tmp_path: Path
) -> None:
    (tmp_path / "select.py").write_text("raise SystemExit('not the library')")
    code = (
        f"import sys, subprocess; sys.argv = [{program!r}, '--version']; from vitrail.cli import main; main(); "
        "sys.exit(subprocess.run([sys.executable, '-c', 'import select']).returncode)"
    )
    root = str(Path(__file__).parents[2])
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=variables, check=False)
    assert done.returncode == (program == "train.py"), "programs of a program of the user find what is beside them"


def test_a_closed_output_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(["--help"]) == 0
    sys.stdout.close()


@pytest.mark.parametrize("words", ["runs {}", "train --steps 1 --run {}"], ids=str)
def test_a_path_that_the_system_refuses_is_named(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.format("x" * 300).split()) == 2
    shown = capsys.readouterr().err
    assert "x" * 300 in shown and "File name too long" in shown


def test_a_disk_that_cannot_be_read_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.png").touch()
    (tmp_path / "model.json").symlink_to("/proc/self/mem")  # whose first byte cannot be read
    assert main(["predict", str(tmp_path), str(tmp_path)]) == 1
    assert "Input/output error" in capsys.readouterr().err


def test_a_terminal_of_no_columns_has_the_usual_width(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert "fashion-mnist" in cli.shows("recipes")


def test_a_command_of_one_process_needs_no_number_of_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch scripts export WORLD_SIZE for the commands that srun starts."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    assert "leave WORLD_SIZE out" in cli.refuses("train")
    assert "demo" in cli.shows("recipes")
