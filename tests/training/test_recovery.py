"""Tests of the recovery from faults of training steps: unchanged weights, skipped batches, and rollbacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.training import ranks
from tests.training.curves import events_of, steps_of
from tests.training.jobs import Make, StopAt
from vitrail.errors import NonFiniteLoss, Stopped
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.config import FaultConfig
from vitrail.training.log import Log
from vitrail.training.loop import train_step
from vitrail.training.run import resume, train
from vitrail.training.state import Faults, StepFault, robust_score

PLAIN = {"steps": 10, "evaluations": 1, "checkpoints": 3, "shift": 0, "erase": 0.0, "keep": "last", "average": 0.9}
"""A run of one epoch with a checkpoint after steps 4, 8 and 10."""


@pytest.fixture(scope="module")
def batches(three_splits: Path) -> list[list[int]]:
    return ranks.batches_of(three_splits)


def weights(run: Path) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in load_file(run / "model" / "model.safetensors").items()}


def left_out(run: Path) -> dict[int, tuple[str, set[str]]]:
    return {event["step"]: (event["reason"], set(event["keys"])) for event in events_of(run, "batch left out")}


@pytest.mark.slow
@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_with_a_fault_moves_nothing(
    poison: str, small: Make, prepare: Callable[..., Any], flat: Callable[..., Any],
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
