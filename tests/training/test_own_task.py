"""Tests of a user's own task. docs/extending.md has one that is trained, which test_documents.py runs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from vitrail.errors import ConfigError
from vitrail.settings import setting
from vitrail.tasks import TASKS
from vitrail.tasks.masked_patches import MaskedPatches
from vitrail.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Colour(MaskedPatches):
    """A task with a setting of its own."""

    name = "colour"

    hidden: int = setting(4, least=1)


def test_its_settings_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "colour", Colour)
    config = TrainConfig().override(task="colour", hidden=5)
    assert config.task == Colour(hidden=5) and TrainConfig.from_plain(config.to_plain()) == config
    with pytest.raises(ConfigError, match=r"^hidden=0 is less than 1$"):
        config.override(hidden=0)
    with pytest.raises(ConfigError, match=r"^label_smoothing: the task of this run.* classification, distillation"):
        config.override(label_smoothing=0.1)
    assert config.override(task="classification").task == TASKS["classification"]()
