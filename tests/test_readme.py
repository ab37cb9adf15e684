"""Tests of the README: its example runs, and the files and commands that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import vitrail
from tests.conftest import make_idx_folder
from vitrail.cli import COMMANDS
from vitrail.data.sources import fashion_mnist

ROOT = Path(vitrail.__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fashion_mnist, "BUNDLED", make_idx_folder(tmp_path / "data", train=300))  # fewer images
    exec(code, {"__name__": "__main__"})
    shown = capsys.readouterr().out
    assert "test_accuracy" in shown and "Ankle boot ->" in shown


def test_the_design_names_every_module() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for path in (ROOT / "vitrail").rglob("*.py"):
        top = path.parent == ROOT / "vitrail" and not path.name.startswith("__")
        name = path.stem if top else path.parent.name
        assert re.search(rf"\b{name}\b", design), f"docs/design.md does not name {path.relative_to(ROOT)}"


def test_the_files_that_it_names_exist() -> None:
    named = re.findall(r"\]\((docs/[^)]+)\)", README) + re.findall(r"`(vitrail/[\w/.]+\.py)`", README)
    assert len(named) > 8 and not [name for name in named if not (ROOT / name).is_file()]


@pytest.mark.parametrize("line", re.findall(r"^vitrail (\w+)", README, flags=re.MULTILINE))
def test_every_command_it_shows_exists(line: str) -> None:
    assert line in {command.split()[0] for command in COMMANDS}


def test_the_two_commands_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("setup", "demo", "test"):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
