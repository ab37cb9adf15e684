"""A trained model that the tests of several commands share, and calls of commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.make import make_idx_folder
from vitrail.cli import main
from vitrail.data.formats import idx
from vitrail.recipes import RECIPES
from vitrail.training.run import RunResult, train


class Cli:
    """Runs commands that begin with these words, and returns what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *begin: object) -> None:
        self.capsys, self.begin = capsys, begin

    def call(self, *words: object, code: int = 0) -> pytest.CaptureResult[str]:
        """Return what a command prints, which ends with this exit code."""
        self.capsys.readouterr()
        assert main([*map(str, (*self.begin, *words))]) == code
        return self.capsys.readouterr()

    def shows(self, *words: object) -> str:
        """Return the output of a command, which succeeds."""
        return self.call(*words).out

    def json(self, *words: object) -> Any:
        """Return the JSON that a command prints, which succeeds."""
        return json.loads(self.shows(*words, "--json"))

    def refuses(self, *words: object) -> str:
        """Return the message of a command, which is refused."""
        return self.call(*words, code=2).err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture(scope="session")
def some_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 1,100 training images and 300 test images of the bundled ones."""
    return make_idx_folder(tmp_path_factory.mktemp("bundled") / "images", train=1100, test=300)


@pytest.fixture
def fewer_bundled(some_images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `bundled` mean a part of the bundled images."""
    monkeypatch.setattr(idx, "BUNDLED", some_images)


@pytest.fixture(scope="session")
def trained(some_images: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run of a tiny network after 30 steps on a part of the bundled images."""
    run = tmp_path_factory.mktemp("trained") / "run"
    config = RECIPES["demo"]().override(
        run=str(run), steps=30, variant="Conv+ViT-Pico/8", width=16, depth=2, heads=2, mlp_width=32,
        precision="float32", device="cpu", evaluations=1, checkpoints=1, optimizer="adamw", learning_rate=1e-3,
        batch_size=32,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idx, "BUNDLED", some_images)
        return train(config)


@pytest.fixture
def model(trained: RunResult) -> Path:
    return trained.folder / "model"
