"""Tests of the folders of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitrail.recipes import RECIPES
from vitrail.training.folder import new_folder


def test_names_come_from_the_recipe_or_the_data_and_are_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    demo, folder = RECIPES["demo"](), RECIPES["folder"]()
    assert [new_folder(demo) for _ in range(3)] == [Path("runs/demo"), Path("runs/demo-2"), Path("runs/demo-3")]
    assert new_folder(folder.override(data="/images/My flowers!/")) == Path("runs/My-flowers")
    assert new_folder(folder.override(data="/")) == Path("runs/run")
