"""Tests of full disks and of faults of training steps: clear errors, valid files, skipped batches, and rollbacks."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

import vitrail.training.checkpoint as checkpoint_module
from tests.training import ranks
from tests.training.jobs import AtStep, Make, Outcome, Prepare, StopAt, events_of, steps_of
from vitrail.errors import NonFiniteLoss, SaveError, Stopped
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.config import FaultConfig
from vitrail.training.log import Log, read_journal
from vitrail.training.loop import train_step
from vitrail.training.run import resume, train
from vitrail.training.state import Faults, StepFault, TrainState, robust_score


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
    size: str, small: Make, prepare: Prepare, small_disk: Callable[[str], Path], tmp_path: Path
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
    small: Make, prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


PLAIN = {"steps": 10, "evaluations": 1, "checkpoints": 3, "shift": 0, "erase": 0.0, "keep": "last", "average": 0.9}
"""A run of one epoch with a checkpoint after steps 4, 8 and 10."""


@pytest.fixture(scope="module")
def batches(three_splits: Path) -> list[list[int]]:
    return ranks.batches_of(three_splits)


def weights(run: Path) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in load_file(run / "model" / "model.safetensors").items()}


def left_out(run: Path) -> dict[int, tuple[str, set[str]]]:
    """Return why each batch was skipped, and the names of its images, by the number of its step."""
    return {event["step"]: (event["reason"], set(event["keys"])) for event in events_of(run, "batch left out")}


@pytest.mark.slow
@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_with_a_fault_moves_nothing(
    poison: str, small: Make, prepare: Prepare, flat: Callable[..., Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    config = small(tmp_path / "run", average=0.9, on_non_finite="skip", accumulation=3)
    state, job = prepare(config)
    job = replace(job, config=replace(job.config, faults=config.faults))
    train_step(job, state, next(state.batches))
    state.step = 1
    before = {name: leaf.clone() for name, leaf in flat(state.tensors()).items() if isinstance(leaf, Tensor)}
    weight = next(state.objective.parameters())
    if poison == "loss":
        handle = state.objective.network.register_forward_hook(lambda module, inputs, output: output * torch.nan)
    else:
        handle = weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(StepFault, match=f"^{'loss' if poison == 'loss' else 'gradient_norm'} is (nan|inf)$"):
        train_step(job, state, next(state.batches))
    handle.remove()
    after = {name: leaf for name, leaf in flat(state.tensors()).items() if isinstance(leaf, Tensor)}
    assert len(before) == len(after) > 20
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in state.objective.parameters())


@pytest.mark.slow
def test_a_rollback_leaves_the_same_batches_out_as_skipping_them(
    three_splits: Path, batches: list[list[int]], tmp_path: Path
) -> None:
    rolled = ranks.config_of(three_splits, tmp_path / "rolled", on_non_finite="rollback", rollback_skips=2, **PLAIN)
    ranks.with_faults(rolled, [batches[6][0]])
    skipped = ranks.config_of(three_splits, tmp_path / "skipped", on_non_finite="skip", **PLAIN)
    ranks.with_faults(skipped, [batches[5][0], batches[6][0]])
    assert weights(tmp_path / "rolled") == weights(tmp_path / "skipped")
    reason = "the run went back to an earlier checkpoint"
    by_skipping = left_out(tmp_path / "skipped")
    assert left_out(tmp_path / "rolled") == {step: (reason, keys) for step, (_, keys) in by_skipping.items()}
    (event,) = events_of(tmp_path / "rolled", "rolled back")
    assert (event["step"], event["at"], event["left_out"]) == (4, 7, [6, 7])
    assert event["reason"] == "loss is nan"
    assert steps_of(tmp_path / "rolled") == [1, 2, 3, 4, 5, 8, 9, 10]


@pytest.mark.slow
@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_skipped_steps_do_not_count_in_the_mean(
    action: str, three_splits: Path, batches: list[list[int]], tmp_path: Path
) -> None:
    """If all steps but the last one are skipped, the mean is exactly the weights after the only update."""
    marked = [one[0] for one in batches[:4]] if action == "skip" else [batches[3][0]]
    fields = {"on_non_finite": action, **PLAIN, "steps": 5, "checkpoints": 1}
    for average in (0.0, 0.9999):
        config = ranks.config_of(three_splits, tmp_path / str(average), **fields | {"average": average})
        ranks.with_faults(config, marked)
    assert sorted(left_out(tmp_path / "0.9999")) == [1, 2, 3, 4]
    assert weights(tmp_path / "0.9999") == weights(tmp_path / "0.0")
    values = json.loads((tmp_path / "0.9999" / "checkpoints" / "step-5" / "state.json").read_text())
    assert values["averaged"] == 1


@pytest.mark.slow
def test_a_spike_goes_back_to_the_beginning_if_there_is_no_checkpoint_between(
    three_splits: Path, batches: list[list[int]], tmp_path: Path
) -> None:
    fields = {"spike_score": 8.0, "spike_window": 4, **PLAIN, "checkpoints": 1}
    ranks.with_faults(ranks.config_of(three_splits, tmp_path / "run", **fields), [batches[5][3]], "spike")
    (event,) = events_of(tmp_path / "run", "rolled back")
    assert (event["step"], event["at"], event["left_out"]) == (0, 6, [1, 6])
    assert "robust standard deviations above the median of the 4 steps before" in event["reason"]
    assert sorted(left_out(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [10, 0]


@pytest.mark.slow
def test_a_score_that_no_loss_reaches_changes_no_bit(three_splits: Path, tmp_path: Path) -> None:
    fields = {"dropout": 0.2, "steps": 8}
    train(ranks.config_of(three_splits, tmp_path / "plain", **PLAIN | fields))
    watched = {"spike_score": 1e9, "spike_window": 2, "on_non_finite": "rollback"}
    train(ranks.config_of(three_splits, tmp_path / "watched", **PLAIN | fields | watched))
    assert weights(tmp_path / "plain") == weights(tmp_path / "watched")


@pytest.mark.slow
def test_a_stop_after_a_rollback_changes_no_bit(three_splits: Path, batches: list[list[int]], tmp_path: Path) -> None:
    fields = {"on_non_finite": "rollback", "rollback_skips": 3, "spike_score": 1e6, "spike_window": 3, **PLAIN}
    marked = [batches[6][0]]
    ranks.with_faults(ranks.config_of(three_splits, tmp_path / "straight", **fields), marked)
    config = ranks.config_of(three_splits, tmp_path / "stopped", **fields)
    with pytest.raises(Stopped, match="stopped at step 8 of 10"):
        ranks.with_faults(config, marked, log=Log(StopAt(8)))
    splits = config.data.open()
    data = replace(splits, train=ranks.Marked(splits.train, marked))
    resume(tmp_path / "stopped", data=data, network=ranks.Fragile("loss"))
    assert weights(tmp_path / "straight") == weights(tmp_path / "stopped")
    assert left_out(tmp_path / "straight") == left_out(tmp_path / "stopped")
    values = json.loads((tmp_path / "stopped" / "checkpoints" / "step-10" / "state.json").read_text())
    assert values["faults"]["count"] == 1 and values["faults"]["left_out"] == [5, 6, 7]
    assert values["averaged"] == 7


@pytest.mark.parametrize("action", ["skip", pytest.param("rollback", marks=pytest.mark.slow)])
def test_faults_have_a_bound(action: str, three_splits: Path, batches: list[list[int]], tmp_path: Path) -> None:
    marked = [batches[number][0] for number in (2, 5, 8)]
    fields = {"on_non_finite": action, "max_faults": 2, "rollback_skips": 1, **PLAIN}
    with pytest.raises(NonFiniteLoss) as caught:
        ranks.with_faults(ranks.config_of(three_splits, tmp_path / "run", **fields), marked)
    start = "loss is nan at step 9, after 2 other faults, which is all that --max-faults allows: the run diverged"
    assert str(caught.value).startswith(start)
    assert sorted(left_out(tmp_path / "run")) == [3, 6]
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps()[0] == 8


@pytest.mark.slow
def test_the_best_weights_of_steps_that_no_longer_count_are_replaced(
    three_splits: Path, batches: list[list[int]], tmp_path: Path
) -> None:
    fields = {"on_non_finite": "rollback", "rollback_skips": 10, **PLAIN, "keep": "best", "evaluations": 5}
    fields |= {"checkpoints": 1, "learning_rate": 1e-3}
    ranks.with_faults(ranks.config_of(three_splits, tmp_path / "run", **fields), [batches[6][0]])
    best = [event["step"] for event in events_of(tmp_path / "run", "evaluation") if event.get("best")]
    lines = map(json.loads, (tmp_path / "run" / "journal.jsonl").read_text().splitlines())
    assert best[0] == 2 and [line["step"] for line in lines if line.get("best")].count(2) == 2


def test_robust_scores() -> None:
    assert robust_score(5.0, [1.0, 2.0, 3.0, 2.0]) == pytest.approx(3 / (1.4826 * 0.5))
    assert robust_score(9.0, [2.0, 2.0, 2.0]) == 0
    faults = Faults(losses=[1.0, 2.0])
    config = FaultConfig(spike_score=3.0, spike_window=2)
    low = {"loss": torch.tensor(-90.0), "gradient_norm": torch.tensor(1.0)}
    faults.check(config, low)  # a fall is no spike
    assert faults.losses == [2.0, -90.0]
    assert Faults(**json.loads(json.dumps(vars(faults)))) == faults
