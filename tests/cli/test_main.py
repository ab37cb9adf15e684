"""The front door: verbs, help, exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vitrail import __version__
from vitrail.cli import VERBS, main


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in VERBS) and "75" in shown


def test_no_verb_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: vitrail VERB" in capsys.readouterr().out


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "unknown verb 'trian'; nearest: train" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([verb, "--help"])
    assert leaving.value.code == 0
    assert "usage: vitrail " + verb in capsys.readouterr().out


def test_debug_shows_the_traceback(tmp_path: object) -> None:
    words = [sys.executable, "-m", "vitrail", "predict", f"{tmp_path}/nothing", f"{tmp_path}", "--debug"]
    finished = subprocess.run(words, capture_output=True, text=True)
    assert "Traceback" in finished.stderr
    finished = subprocess.run(words[:-1], capture_output=True, text=True)
    assert finished.returncode == 2 and "Traceback" not in finished.stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    finished = subprocess.run(
        f"{sys.executable} -m vitrail models --json | head -c 1", shell=True, capture_output=True, text=True
    )
    assert finished.stderr == ""
