"""A trained model that the tests of several verbs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitrail.recipes import RECIPES
from vitrail.training.run import RunResult, train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run of a tiny network after 30 steps on the bundled images."""
    run = tmp_path_factory.mktemp("trained") / "run"
    config = RECIPES["demo"]().override(
        run=str(run), steps=30, width=16, depth=2, heads=2, mlp_width=32, precision="float32", device="cpu",
        evaluations=1, checkpoints=1,
    )  # fmt: skip
    return train(config)


@pytest.fixture
def model(trained: RunResult) -> Path:
    return trained.folder / "model"
