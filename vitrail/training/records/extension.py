"""Extension of a run beyond its length: the longer config, and its record in run.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError, RunError
from vitrail.files import saving, write_json
from vitrail.training.config import TrainConfig
from vitrail.training.records.record import FORMAT, Record
from vitrail.training.state.checkpoint import Checkpoints

__all__ = ["Length", "check_extension", "record_extension"]


@dataclass(frozen=True)
class Length:
    """A new length of a run, in epochs or in optimizer steps. Raises `ConfigError` if both or none is given."""

    epochs: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(
                f"epochs={self.epochs} and steps={self.steps}: a run is extended to a number of epochs or of steps; "
                "give one of them"
            )

    def apply(self, config: TrainConfig) -> TrainConfig:
        """Return the config of the longer run. Raises `ConfigError` for a length that is not above 0."""
        if self.steps is not None:
            return config.override(steps=self.steps)
        return config.override(steps=None, epochs=self.epochs)


def check_extension(folder: Path, record: Record, steps: int, finished_at: int | None) -> None:
    """Raise `RunError` unless a run can be extended to `steps` optimizer steps in total.

    `finished_at` is the last step of a finished run, whose checkpoint is needed, or None.
    """
    before = record.config.total_steps(record.images)
    if steps <= before:
        epochs = before * record.config.mean_batch_size / record.images
        raise RunError(
            f"run {folder} has {before:,} steps ({epochs:.3g} epochs), and {steps:,} steps are not more; a run can "
            "only be made longer: choose a larger total"
        )
    checkpoints = Checkpoints(folder / "checkpoints")
    if finished_at is not None and finished_at not in checkpoints.steps():
        raise RunError(
            f"run {folder} cannot be extended, because the checkpoint of its end, {checkpoints.folder}/step-"
            f"{finished_at}, is gone; to train its model further, start a new run with --init {folder}/model"
        )


def record_extension(folder: Path, config: TrainConfig, *, step: int, before: int, steps: int) -> None:
    """Replace the config and the length of a run in run.json, and add the extension to its list. Raises
    `SaveError`."""
    path = folder / "run.json"
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    extensions = [*values.get("extensions", ()), {"after": step, "from": before, "to": steps}]
    changed = {"format": FORMAT, "config": config.to_plain(), "steps": steps, "extensions": extensions}
    with saving("the run", folder):
        write_json(path, values | changed)
