"""Jobs for single steps, ways to stop a run, and readers of journals and weights, for the tests of runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.listening import Display
from tests.several import in_processes
from tests.tasks.images import Pictures
from vitrail.data.splits import Splits
from vitrail.errors import Stopped
from vitrail.training.config import TrainConfig
from vitrail.training.job import Job, Phase
from vitrail.training.log import Log, read_journal
from vitrail.training.run import RunResult, resume, train
from vitrail.training.state import TrainState

SMALL = (
    "--variant", "ViT-Pico/7", "--image-size", "28", "28", "--width", "16", "--depth", "2", "--heads", "2",
    "--mlp-width", "32", "--precision", "float32", "--device", "cpu",
)  # fmt: skip
"""Options of a small network, for commands."""


class Finished(NamedTuple):
    config: TrainConfig
    result: RunResult


Make = Callable[..., TrainConfig]
"""A fixture that makes configs."""

Prepare = Callable[[TrainConfig], tuple[TrainState, Job]]
"""The fixture that makes the state and the job of a config."""

Initial = Callable[..., Path]
"""The fixture that makes models to start from."""

Outcome = Callable[[Path], dict[str, Any]]
"""The fixture that returns all that two equal runs have equal."""


class AtStep(Display):
    """Acts when a step is reported, before anything is saved, in runs of at most 100 steps."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.at, self.act = step, act

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.at:
            self.act()


class StopAt(AtStep):
    """Sends this process a real SIGTERM."""

    def __init__(self, step: int) -> None:
        super().__init__(step, lambda: os.kill(os.getpid(), signal.SIGTERM))


def train_until(begin: TrainConfig | Path, step: int, **options: Any) -> Path:
    """Train a config or resume a run until a signal after a step stops it, and return the run's folder."""
    start: Callable[..., Any] = resume if isinstance(begin, Path) else train
    with pytest.raises(Stopped) as caught:
        start(begin, log=Log(StopAt(step)), **options)
    assert caught.value.run is not None
    return caught.value.run


def crash(*given: object) -> None:
    """Take the place of a function that ends a run."""
    raise MemoryError


def job_of(config: TrainConfig, images: int, **fields: Any) -> Job:
    """Return the job of a config that sets the number of steps, with this number of training images."""
    steps = config.total_steps(images)
    phase = Phase(0, steps, config.images.image_size, patch_dropout=0.0, batch_size=config.run.batch_size)
    known = {"device": torch.device("cpu"), "splits": Splits(Pictures(images), None, None), "phases": (phase,)}
    return Job(config=config, steps=steps, **{**known, **fields})


def results_of(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function in `world` processes, and return their results. None of them may fail."""
    found = in_processes(world, function, *arguments)
    assert [one.error for one in found] == [None] * world
    return [one.result for one in found]


def events_of(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    return [event for event in read_journal(run / "journal.jsonl") if event["event"] == kind]


def steps_of(run: Path, kind: str = "step") -> list[int]:
    return [event["step"] for event in events_of(run, kind)]


def values_of(run: Path, *names: str) -> list[list[float]]:
    return [[event[name] for name in names] for event in events_of(run)]


def curve(run: Path) -> list[list[float]]:
    """Return loss, accuracy and gradient norm of every step of a run of 12 steps."""
    assert steps_of(run) == list(range(1, 13))
    return values_of(run, "loss", "accuracy", "gradient_norm")


def difference(run: Path, other: Path) -> float:
    """Return the largest difference of two curves."""
    return max(
        abs(a - b) for one, two in zip(curve(run), curve(other), strict=True) for a, b in zip(one, two, strict=True)
    )


def model_bytes(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def same_weights(one: Path, other: Path) -> bool:
    """Return True if two files of weights have equal bits."""
    ours, theirs = load_file(one), load_file(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
