"""Programs that show the metrics of a run during training: TensorBoard, and Weights & Biases. They receive the
journal's events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vitrail.errors import nearest
from vitrail.files import saving
from vitrail.training.reporting.journal import Journal
from vitrail.weights.exported.runtimes import optional_module

__all__ = [
    "TRACKERS",
    "TensorBoard",
    "Tracker",
    "WeightsAndBiases",
    "check_trackers",
    "scalars",
    "tracker_problems",
    "tracking",
]


class Tracker(Protocol):
    """A program that receives the numbers of a run."""

    def add(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Add numbers by their names. `time` is in seconds since 1970."""

    def close(self) -> None:
        """Write all numbers that were received and are not written yet."""


class TensorBoard:
    """Writes event files for TensorBoard into the folder `tensorboard` of the run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        writer: Any = optional_module("torch.utils.tensorboard.writer", "tensorboard")
        place = folder / "tensorboard"
        with saving("the curves", place):  # a resumed run hides the steps that it repeats
            self._writer = writer.SummaryWriter(str(place), purge_step=step + 1 if step else None, flush_secs=10)
        if not step:
            self._writer.add_text("settings", f"```\n{json.dumps(settings, indent=1)}\n```")

    def add(self, step: int, values: Mapping[str, float], time: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Sends numbers to Weights & Biases. Its own environment variables set the account and the project, and
    `WANDB_MODE=offline` writes them to the folder `wandb` of the run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        wandb: Any = optional_module("wandb", "wandb")
        place = folder / "wandb"
        identity = place / "run-id.txt"
        with saving("the curves", place):
            place.mkdir(exist_ok=True)
            if not identity.exists():
                identity.write_text(secrets.token_hex(4), encoding="utf-8")
            name = identity.read_text(encoding="utf-8")
        quiet = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            dir=folder, id=name, name=folder.name, resume="allow", config=dict(settings), settings=quiet
        )
        self._run.define_metric("*", step_metric="training_step")  # its own steps cannot go back to a checkpoint

    def add(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log({"training_step": step, **values})

    def close(self) -> None:
        self._run.finish()


@dataclass(frozen=True)
class _Kind:
    module: str
    make: Callable[[Path, Mapping[str, Any], int], Tracker]


TRACKERS = {"tensorboard": _Kind("tensorboard", TensorBoard), "wandb": _Kind("wandb", WeightsAndBiases)}
"""The programs by their names. A name is also that of the extra that installs the program."""


def tracker_problems(track: str) -> list[str]:
    """Return messages about names of `track` that are not in the table."""
    return [
        f"track={track!r}: unknown program {name!r}; {nearest(name, TRACKERS)}"
        for name in _names(track)
        if name not in TRACKERS
    ]


def check_trackers(track: str) -> None:
    """Raise `ConfigError` if a program of `track` is not installed."""
    for name in _names(track):
        optional_module(TRACKERS[name].module, name)


@contextmanager
def tracking(track: str, folder: Path, settings: Mapping[str, Any], journal: Journal, step: int) -> Iterator[None]:
    """Send the journal's events inside the `with` block to the programs that `track` names. `step` is the number of
    steps that a resumed run has taken."""
    with ExitStack() as stack:
        trackers = list[Tracker]()
        for name in _names(track) if journal.is_kept else ():
            trackers.append(TRACKERS[name].make(folder, settings, step))
            stack.callback(trackers[-1].close)

        def receive(event: dict[str, Any]) -> None:
            if values := scalars(event):
                for tracker in trackers:
                    tracker.add(event["step"], values, event["time"])

        journal.readers.append(receive)
        stack.callback(journal.readers.remove, receive)
        yield


def scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an event by their names: "train/loss", "validation/accuracy", "probe/knn_1". Those of the
    finished model begin with "final/"."""
    kind = event["event"]
    if kind not in ("step", "evaluation", "probe"):
        return {}
    start = {"step": "train", "probe": "probe"}.get(kind) or event["split"]
    if event.get("kept"):
        start = f"final/{start}"
    return {
        f"{start}/{name}": float(value)
        for name, value in event.items()
        if name not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _names(track: str) -> list[str]:
    return [name.strip() for name in track.split(",") if name.strip()]
