"""Tests of full disks and diverging losses: the error is clear, and earlier files stay valid."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import vitrail.training.checkpoint as checkpoint_module
from tests.training.curves import events_of
from tests.training.jobs import AtStep, Make, Outcome
from vitrail.errors import NonFiniteLoss, SaveError
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.log import Log, read_journal
from vitrail.training.run import resume, train
from vitrail.training.state import TrainState


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a file system of a given size, or change the size of the existing one."""
    place = tmp_path / "small disk"
    place.mkdir()
    options = ["mount", "-t", "tmpfs", "-o"]

    def mount(size: str) -> Path:
        if os.geteuid() or shutil.which("mount") is None:
            pytest.skip("mounting takes root")
        what = f"remount,size={size}" if place.is_mount() else f"size={size}"
        if subprocess.run([*options, what, "none", str(place)], capture_output=True).returncode:
            pytest.skip("this machine does not allow mounting")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_spares_what_is_saved(
    small: Make, straight: dict[str, Any], outcome: Outcome, small_disk: Callable[[str], Path]
) -> None:
    disk = small_disk("600k")
    run = disk / "run"
    with pytest.raises(SaveError) as caught:
        train(small(run))
    assert str(caught.value).startswith(f"could not save a checkpoint to {run}/checkpoints/step-16: No space left")
    assert "earlier version" not in str(caught.value)  # step-16 has none
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-8"]
    small_disk("4m")
    resume(run)
    assert outcome(run) == straight


@pytest.mark.slow
@pytest.mark.parametrize("size", ["300k", "420k", "660k"])
def test_a_full_disk_is_named_wherever_it_ends_a_checkpoint(
    size: str, small: Make, prepare: Callable[..., Any], small_disk: Callable[[str], Path], tmp_path: Path
) -> None:
    state, _ = prepare(small(tmp_path / "run", width=32))
    disk = small_disk(size)
    checkpoints = Checkpoints(disk / "checkpoints")
    with pytest.raises(SaveError) as caught:
        for state.step in range(1, 9):
            checkpoints.save(state)
            checkpoints.retain = 8
    assert str(caught.value).endswith(f"{disk}/checkpoints/step-{state.step}: No space left on device")
    assert checkpoints.steps() == list(range(1, state.step))[::-1]


def test_a_failure_that_is_no_full_disk_keeps_its_own_reason(
    small: Make, prepare: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = prepare(small(tmp_path / "run"))
    state.step = 3

    def fail(*args: object, **options: object) -> None:
        raise CheckpointException("", {0: (RuntimeError("[enforce fail] unexpected pos"), [])})

    monkeypatch.setattr(checkpoint_module, "save", fail)
    with pytest.raises(SaveError, match=r"^checkpoint .*/step-3 failed: \[enforce fail\] unexpected pos$"):
        Checkpoints(tmp_path).save(state)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    """Limit the size of the files that this process may write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_a_file_that_grows_too_large_stops_the_run_and_spares_what_is_saved(
    in_background: bool, small: Make, straight: dict[str, Any], outcome: Outcome, file_limit: Callable[[int], None],
    tmp_path: Path,
) -> None:  # fmt: skip
    run = tmp_path / "run"
    with pytest.raises(SaveError, match=r"^could not save a checkpoint to .*step-16: File too large$"):
        train(small(run, background_checkpoints=in_background), log=Log(AtStep(13, lambda: file_limit(120_000))))
    assert read_journal(run / "journal.jsonl")[-1]["step"] == (24 if in_background else 16)
    file_limit(resource.RLIM_INFINITY)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-8"]
    resume(run)
    assert outcome(run) == straight


def poison(states: list[TrainState]) -> None:
    """Make one weight NaN, so that the next loss is NaN."""
    with torch.no_grad():
        states[-1].objective.network.norm.weight[3] = torch.nan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "checkpoints", "after", "kept"), [(24, 24, 4, [4, 3]), (24, 1, 3, []), (300, 40, 15, [8])]
)
def test_the_step_that_went_bad_is_named_and_never_saved(
    steps: int, checkpoints: int, after: int, kept: list[int], small: Make, tmp_path: Path, states: list[TrainState]
) -> None:
    run = tmp_path / "run"
    config = small(run, steps=steps, checkpoints=checkpoints, evaluations=1)
    with pytest.raises(NonFiniteLoss) as caught:
        train(config, log=Log(AtStep(after, lambda: poison(states))))
    message = str(caught.value)
    assert message.startswith(f"loss is nan at step {after + 1}: the run diverged, and ")
    place = f"the last good checkpoint is {run}/checkpoints/step-{kept[0]}" if kept else "there is no checkpoint yet"
    assert place in message and "--learning-rate" in message
    assert Checkpoints(run / "checkpoints").steps() == kept
    assert [event["reason"] for event in events_of(run, "failed")] == [f"loss is nan at step {after + 1}"]
    assert not list(run.rglob("*-partial"))


@pytest.mark.slow
def test_a_run_that_went_bad_can_go_on_from_the_last_good_state(
    small: Make, straight: dict[str, Any], outcome: Outcome, tmp_path: Path, states: list[TrainState]
) -> None:
    with pytest.raises(NonFiniteLoss):
        train(small(tmp_path / "run"), log=Log(AtStep(18, lambda: poison(states))))
    resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == straight
    assert not events_of(tmp_path / "run", "failed")
