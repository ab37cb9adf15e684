"""Tests of training on several processes and machines: the same curve, the same files, and an end for all if one fails.

Two network namespaces are two hosts for everything that a network connects. Their processes are started as SLURM starts
them, without torchrun.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.make import wait_for
from tests.several import in_processes
from tests.training import ranks
from tests.training.jobs import SMALL, Initial, curve, difference, events_of, results_of, steps_of, values_of
from vitrail.errors import ConfigError, NonFiniteLoss, ProcessError, RunError, SaveError
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.log import read_journal
from vitrail.training.run import train
from vitrail.weights.load import load

pytestmark = pytest.mark.slow

Torchrun = Callable[..., "subprocess.Popen[str]"]
MIXED = {"mixup": 0.5, "cutmix": 1.0, "randaugment_layers": 1, "accumulation": 5, "average": 0.9, "shift": 2}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("fields", "bound"), [
    (MIXED, 2e-6),
    ({"mixup": 0.4, "mixup_per": "batch", "class_weights": "balanced", "loss": "sigmoid"}, 1e-5),
    ({"early_image_size": ("21:0.5",), "early_batch_size": ("8:0.5",), "crop_area": (0.3, 1.0)}, 2e-6),
    ({"optimizer": "muon", "learning_rate": 1e-3}, 1e-4),
    ({"reversible": True, "dropout": 0.0, "stochastic_depth": 0.0, **MIXED}, 1e-5),
    ({"optimizer": "adamw", "learning_rate": 1e-4, "accumulation": 3}, 1e-5),
], ids=str)  # fmt: skip
def test_any_number_of_processes_trains_as_one_does(
    three_splits: Path, tmp_path: Path, world: int, fields: dict[str, Any], bound: float
) -> None:
    alone = train(ranks.config_of(three_splits, tmp_path / "one", **fields))
    found = results_of(world, ranks.trained, ranks.config_of(three_splits, tmp_path / "more", **fields))
    assert found == [found[0]] * world and found[0] == pytest.approx(alone.metrics, abs=bound)
    assert difference(tmp_path / "one", tmp_path / "more") < bound
    one, more = (read_journal(tmp_path / name / "journal.jsonl") for name in ("one", "more"))
    assert [event["event"] for event in one] == [event["event"] for event in more]
    names = [{path.relative_to(run) for path in run.rglob("*")} for run in (tmp_path / "one", tmp_path / "more")]
    assert names[0] == names[1]


@pytest.mark.parametrize("fields", [{}, {"accumulation": 3}, {"shard": "full"}], ids=str)
def test_a_teacher_follows_its_student_on_several_processes(
    three_splits: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    fields = {
        "task": "dino", "prototypes": 32, "projection_hidden": 24, "bottleneck": 8, "local_views": 2, "flip": True,
        "local_size": (14, 7), "frozen_epochs": 0.5, "teacher_momentum": 0.7, "crop_area": (0.4, 1.0), **fields,
    }  # fmt: skip
    alone = train(ranks.config_of(three_splits, tmp_path / "one", **fields | {"shard": "none"}))
    first, second = results_of(2, ranks.trained, ranks.config_of(three_splits, tmp_path / "two", **fields))
    assert first == second == pytest.approx(alone.metrics, rel=1e-4)
    one, two = (values_of(tmp_path / run, "loss", "teacher_entropy", "gradient_norm") for run in ("one", "two"))
    assert len(one) == 12
    for ours, theirs in zip(one, two, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


CONTRAST: dict[str, dict[str, Any]] = {
    "simclr": {"projection_width": 8},
    "moco": {"projection_width": 8, "projection_hidden": 12},
    "dino": {
        "centring": "sinkhorn", "patch_weight": 1.0, "separate_patch_head": True, "mask_probability": 0.9,
        "mask_fraction": (0.2, 0.6), "frozen_epochs": 0.0, "local_views": 3, "local_size": (14, 14), "pool": "cls",
        "prototypes": 24, "projection_hidden": 20, "bottleneck": 12, "patch_bottleneck": 12,
    },
}  # fmt: skip


@pytest.mark.parametrize(("world", "invalid", "divisions"), [
    (1, (), [{"accumulation": 20}]),
    (1, (*range(3, 20),), [{"accumulation": 8}]),
    (2, (0, 7, 8, 19), [{"accumulation": 5}]),
    (2, (0, 7, 8, 19), [{}, {"shard": "full"}, {"shard": "full", "accumulation": 3}]),
    (1, (0, 7, 8, 19), [{"accumulation": 4, "stochastic_depth": 0.5, "dropout": 0.3}]),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("task", CONTRAST)
def test_all_images_of_a_batch_are_compared_in_every_division(
    task: str, world: int, invalid: tuple[int, ...], divisions: list[dict[str, Any]], three_splits: Path, tmp_path: Path
) -> None:
    """With random numbers, a division is compared with a single backward pass through its own parts."""
    same = {"task": task, "crop_area": (0.3, 1.0), "clip": 0.0, "stochastic_depth": 0.0, "dropout": 0.0}
    for fields in divisions:
        config = ranks.config_of(three_splits, tmp_path / "run", **{**same, **CONTRAST[task], **fields})
        whole = config if "dropout" in fields else config.override(accumulation=1, shard="none")
        loss, gradients = ranks.gradients(whole, invalid, at_once=True)
        largest = max(np.abs(values).max() for values in gradients.values())
        assert largest > 0.1
        found = results_of(world, ranks.gradients, config, invalid) if world > 1 else [ranks.gradients(config, invalid)]
        for metrics, ours in found:
            assert metrics["loss"] == pytest.approx(loss["loss"], rel=1e-6) and ours.keys() == gradients.keys()
            for name, values in gradients.items():
                np.testing.assert_allclose(ours[name], values, rtol=0, atol=1e-10 * largest)


@pytest.mark.parametrize(("world", "fields", "bound"), [
    (2, {"checkpoint_activations": True, **MIXED}, 2e-6),
    (4, {"clip": 0.01, "dropout": 0.0}, 2e-6),
    (4, {"optimizer": "adamw", "learning_rate": 1e-4, "accumulation": 3}, 1e-5),
], ids=str)  # fmt: skip
def test_sharded_weights_train_as_copies_do_and_resume_on_any_number(
    three_splits: Path, tmp_path: Path, world: int, fields: dict[str, Any], bound: float
) -> None:
    train(ranks.config_of(three_splits, tmp_path / "one", **fields | {"checkpoint_activations": False}))
    run = tmp_path / "sharded"
    config = ranks.config_of(three_splits, run, shard="full", **fields)
    results_of(world, ranks.trained_and_stopped, config, 1, 5)
    (newest,) = (run / "checkpoints").glob("step-6")
    parts = [(newest / f"__{rank}_0.distcp").stat().st_size for rank in range(world)]
    assert max(parts) < 1.5 * min(parts), "each process writes an equal part"
    listed = json.loads((newest / "manifest.json").read_text())
    assert {*listed, "manifest.json"} == {file.name for file in newest.iterdir()}
    for after in (1, 2, 4):
        shutil.copytree(run, tmp_path / f"on-{after}")
        found = results_of(after, ranks.resumed, tmp_path / f"on-{after}")
        assert found[0] == found[-1]
        assert difference(tmp_path / "one", tmp_path / f"on-{after}") < bound


@pytest.mark.parametrize(("world", "machine", "fields"), [
    (4, 2, {"shard": "hybrid", "average": 0.9}),
    (4, 2, {"shard": "hybrid", "task": "masked-patches", "checkpoint_activations": True}),
    (2, 2, {"shard": "full", "task": "masked-patches", "accumulation": 2}),
    (2, 2, {"task": "masked-patches", "patch_target": "pixels"}),
    (2, 2, {"task": "mae", "shard": "full"}),
    (2, 2, {"task": "distillation", "pool": "cls+dist", "registers": 1, "mixup": 0.4}),
    (2, 2, {"task": "distillation", "teacher_labels": "soft", "shard": "full"}),
], ids=str)  # fmt: skip
def test_tasks_train_alike_on_machines_of_several_processes(
    three_splits: Path, tmp_path: Path, world: int, machine: int, fields: dict[str, Any]
) -> None:
    if fields.get("task") == "distillation":
        teacher = tmp_path / "teacher"
        results_of(1, ranks.trained, ranks.config_of(three_splits, teacher))
        fields = fields | {"teacher": str(teacher)}
    results_of(1, ranks.trained, ranks.config_of(three_splits, tmp_path / "one", **fields | {"shard": "none"}))
    several = ranks.config_of(three_splits, tmp_path / "more", **fields)
    found = results_of(world, ranks.trained_on_machines, several, machine)
    assert found[0] == found[-1]
    one, more = (np.array(values_of(tmp_path / run, "loss", "gradient_norm")) for run in ("one", "more"))
    assert len(one) == 12 and one == pytest.approx(more, abs=2e-6)


@pytest.mark.parametrize(("world", "fields"), [
    (3, {"batch_size": 21, "average": 0.8, "probe": "linear,knn", "probe_every": 6, "keep": "best"}),
    (2, {"keep": "last", "pool": "map", "evaluations": 1}),
], ids=str)  # fmt: skip
def test_sharded_weights_are_evaluated_block_by_block(
    three_splits: Path, tmp_path: Path, world: int, fields: dict[str, Any]
) -> None:
    (alone,) = results_of(1, ranks.streamed, ranks.config_of(three_splits, tmp_path / "one", **fields), 8)
    config = ranks.config_of(three_splits, tmp_path / "more", shard="full", **fields)
    found = results_of(world, ranks.streamed, config, 8)
    for metrics, (most, whole), _ in found:
        assert metrics == pytest.approx(alone[0], abs=1e-6)
        assert 0 < most == whole / 2, "one of two blocks at a time"
    assert [device for *_, device in found] == ["cpu", *["meta"] * (world - 1)]
    assert alone[1:] == ([0, 0], "cpu")
    for kind in ("evaluation", "probe"):
        one, more = (events_of(tmp_path / run, kind) for run in ("one", "more"))
        assert len(one) == len(more) and (kind == "evaluation" or len(one) == (2 if "probe" in fields else 0))
        for ours, theirs in zip(one, more, strict=True):
            names = [name for name, value in ours.items() if isinstance(value, float) and name != "time"]
            assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], abs=1e-6)
    models = [load(tmp_path / run).network.state_dict() for run in ("one", "more")]
    torch.testing.assert_close(*models, rtol=0, atol=1e-6)


def test_weights_that_cannot_be_sharded_are_refused(three_splits: Path, tmp_path: Path) -> None:
    for shard, optimizer, message in (
        ("hybrid", "sgd", "shard='hybrid' divides weights among the processes of each machine, but 2 of 2"),
        ("full", "muon", "shard='full' works with PyTorch's AdamW and SGD, but not with optimizer='muon'"),
    ):
        config = ranks.config_of(three_splits, tmp_path / "run", shard=shard, optimizer=optimizer)
        found = in_processes(2, ranks.trained, config)
        assert all(isinstance(one.error, ConfigError) and message in str(one.error) for one in found)
        assert not (tmp_path / "run").exists()


def test_machines_with_unequal_memory_measure_the_same(
    colour_folder: Path, three_splits: Path, tmp_path: Path, initial: Initial
) -> None:
    model = initial(classes=("blue", "green", "red"), channels=3)
    metrics, features = ranks.measured_on_unequal_machines(model, colour_folder)
    for own_metrics, own_features in results_of(2, ranks.measured_on_unequal_machines, model, colour_folder):
        assert own_metrics["images"] == metrics["images"] and own_metrics == pytest.approx(metrics, abs=1e-5)
        np.testing.assert_allclose(own_features, features, atol=1e-5)
    config = ranks.config_of(three_splits, tmp_path / "run", task="mae", steps=2)
    alone = ranks.trained_on_unequal_machines(config.override(run=str(tmp_path / "alone")))
    for found in results_of(2, ranks.trained_on_unequal_machines, config):
        assert found == pytest.approx(alone, abs=1e-4)


def test_a_stopped_run_continues_in_the_same_processes(three_splits: Path, tmp_path: Path) -> None:
    results_of(2, ranks.stopped_and_resumed, ranks.config_of(three_splits, tmp_path / "run"))
    assert steps_of(tmp_path / "run", "stopped") == [2] and steps_of(tmp_path / "run", "finished") == [12]


def test_the_running_statistics_of_the_first_process_are_measured_and_saved(three_splits: Path, tmp_path: Path) -> None:
    found = results_of(2, ranks.measured_twice, ranks.config_of(three_splits, tmp_path / "run", keep="last"))
    assert [alone for _, alone in found] == pytest.approx([found[0][0]] * 2, rel=1e-6)


def test_a_linear_start_is_that_of_one_process(
    colour_folder: Path, initial: Initial, from_model: Callable[..., Any], tmp_path: Path
) -> None:
    fields = {"linear_head": True, "optimizer": "sgd", "learning_rate": 1e-3, "process_timeout": "300s"}
    heads = []
    for world in (1, 2):
        run = tmp_path / str(world)
        config = from_model(initial(channels=3), colour_folder, run=str(run), **fields)
        results_of(world, ranks.trained, config)
        first, *_ = events_of(run, "evaluation")
        assert first["step"] == 0
        heads.append(first["cross_entropy"])
    assert heads[0] == pytest.approx(heads[1], rel=1e-6)


def test_a_long_computation_of_the_first_process_outlasts_the_time_out() -> None:
    computed, seconds = zip(*results_of(3, ranks.busy, 3.0, 9.0), strict=True)
    assert computed == (1.5,) * 3 and max(seconds[1:]) < 1.0, "the others hardly compute meanwhile"


def test_a_signal_to_one_process_stops_all_at_the_same_step_and_any_number_resumes(
    three_splits: Path, tmp_path: Path
) -> None:
    train(ranks.config_of(three_splits, tmp_path / "straight", **MIXED))
    for number, (before, after) in enumerate(((2, 4), (4, 1), (1, 2))):
        run = tmp_path / f"run-{number}"
        config = ranks.config_of(three_splits, run, **MIXED)
        stopped = results_of(before, ranks.trained_and_stopped, config, before - 1, 5)
        step = 6 if before > 1 else 5  # the others learn of a signal with the next step
        message = f"stopped at step {step} of 12; the state is saved in {run}/checkpoints/step-{step}"
        assert stopped == [message] * before
        results_of(after, ranks.resumed, run)
        assert difference(tmp_path / "straight", run) < 2e-6 and steps_of(run, "resumed") == [step]


@pytest.mark.parametrize(("shard", "in_background"), [("none", False), ("none", True), ("full", True)])
def test_resuming_the_same_number_of_processes_changes_no_bit_and_neither_do_checkpoints_in_the_background(
    shard: str, in_background: bool, three_splits: Path, tmp_path: Path
) -> None:
    fields = {
        "optimizer": "adamw", "learning_rate": 1e-4, "checkpoints": 6, "average": 0.9, "shard": shard, "dropout": 0.2,
        "stochastic_depth": 0.3, "mixup": 0.3,
    }  # fmt: skip
    in_processes(2, ranks.trained, ranks.config_of(three_splits, tmp_path / "straight", **fields))
    config = ranks.config_of(three_splits, tmp_path / "run", background_checkpoints=in_background, **fields)
    results_of(2, ranks.trained_and_stopped, config, 1, 5)
    results_of(2, ranks.resumed, tmp_path / "run")
    assert curve(tmp_path / "straight") == curve(tmp_path / "run")
    assert steps_of(tmp_path / "run", "checkpoint") == [2, 4, 6, 8, 10, 12]
    written = []
    for run in (tmp_path / "straight", tmp_path / "run"):
        parts = sorted((run / "checkpoints" / "step-12").glob("*.distcp"))
        assert len(parts) == (2 if shard == "full" else 1)
        written.append([file.read_bytes() for file in (*parts, run / "model" / "model.safetensors")])
    assert written[0] == written[1]


@pytest.mark.parametrize(("rank", "shard"), [(0, "none"), (2, "none"), (2, "full")])
def test_a_killed_process_ends_the_others_with_its_name(
    three_splits: Path, tmp_path: Path, rank: int, shard: str
) -> None:
    config = ranks.config_of(three_splits, tmp_path / "run", batch_size=21, shard=shard)
    began = time.monotonic()
    found = in_processes(3, ranks.killed, config, rank, 6)
    assert time.monotonic() - began < 45, "the processes waited for their time-out"
    assert found[rank].code == -signal.SIGKILL
    for one in (one for other, one in enumerate(found) if other != rank):
        assert isinstance(one.error, ProcessError)
        assert f"process {rank} of 3 ended, or its machine cannot be reached" in str(one.error)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [4]
    results_of(1, ranks.resumed, tmp_path / "run")


def test_a_hanging_process_ends_the_others_within_the_time_out(three_splits: Path, tmp_path: Path) -> None:
    config = ranks.config_of(three_splits, tmp_path / "run", process_timeout="4s")
    found = in_processes(2, ranks.hanging, config, 1, 6, 12.0)
    assert all(isinstance(one.error, ProcessError) for one in found)
    assert str(found[0].error).startswith("process 1 of 2 does not answer, while the others waited for a")


@pytest.mark.parametrize(("world", "fields", "left_out"), [
    (2, {"on_non_finite": "skip", "accumulation": 2}, [6]),
    (4, {"on_non_finite": "rollback", "rollback_skips": 2, "average": 0.9}, [5, 6]),
    (2, {"on_non_finite": "rollback", "rollback_skips": 2, "shard": "full"}, [5, 6]),
    (4, {"on_non_finite": "skip", "shard": "full", "average": 0.9}, [6]),
], ids=str)  # fmt: skip
def test_a_fault_in_one_process_moves_no_weight_of_any(
    three_splits: Path, tmp_path: Path, world: int, fields: dict[str, Any], left_out: list[int]
) -> None:
    steps = []
    for number, name in ((1, "one"), (world, "more")):
        run = tmp_path / name
        found = results_of(number, ranks.poisoned, ranks.config_of(three_splits, run, **fields), number - 1, 5)
        assert found[0] == found[-1]
        keys = {event["step"]: sorted(event["keys"]) for event in events_of(run, "batch left out")}
        steps.append((np.array(values_of(run, "step", "loss", "gradient_norm")), keys))
    (alone, alone_keys), (several, several_keys) = steps
    assert list(alone_keys) == left_out and alone_keys == several_keys
    assert {len(keys) for keys in alone_keys.values()} == {20}
    assert len(alone) == 12 - len(left_out) and abs(alone - several).max() < 2e-6


@pytest.mark.parametrize(("fault", "rank", "fields", "error", "message"), [
    (ranks.diverging, 1, {}, NonFiniteLoss, "loss is nan at step 7"),
    (ranks.on_a_full_disk, 0, {}, SaveError, "checkpoints/step-8"),
    (ranks.on_a_full_disk, 1, {"shard": "full"}, SaveError, "checkpoints/step-8"),
])  # fmt: skip
def test_a_loss_that_is_not_finite_or_a_full_disk_of_one_process_ends_all(
    fault: Callable[..., None], rank: int, fields: dict[str, Any], error: type[Exception], message: str,
    three_splits: Path, tmp_path: Path,
) -> None:  # fmt: skip
    config = ranks.config_of(three_splits, tmp_path / "run", keep="last", **fields)
    found = in_processes(2, fault, config, rank, 6)
    for one in found:
        assert isinstance(one.error, error) and message in str(one.error)
    assert [one.is_reported for one in found] == [False, True]
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [4]


@pytest.mark.parametrize("background_checkpoints", [False, True])
def test_a_process_that_is_killed_in_a_save_of_parts_leaves_the_checkpoint_before(
    background_checkpoints: bool, three_splits: Path, tmp_path: Path
) -> None:
    fields = {"shard": "full", "background_checkpoints": background_checkpoints, "checkpoints": 3}
    config = ranks.config_of(three_splits, tmp_path / "run", **fields)
    found = in_processes(2, ranks.killed_in_a_save, config, 1, 8)
    assert found[1].code == -signal.SIGKILL
    assert isinstance(found[0].error, ProcessError) and "process 1 of 2 ended" in str(found[0].error)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [4]
    results_of(2, ranks.resumed, tmp_path / "run")
    train(ranks.config_of(three_splits, tmp_path / "one"))
    assert difference(tmp_path / "one", tmp_path / "run") < 2e-6


@pytest.mark.parametrize("shard", ["none", "full"])
def test_processes_go_back_together_from_a_damaged_checkpoint(shard: str, three_splits: Path, tmp_path: Path) -> None:
    train(ranks.config_of(three_splits, tmp_path / "straight"))
    run = tmp_path / "run"
    results_of(2, ranks.trained_and_stopped, ranks.config_of(three_splits, run, shard=shard), 0, 5)
    damaged = max((run / "checkpoints" / "step-6").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    results_of(2, ranks.resumed, run)
    assert steps_of(run, "resumed") == [4] and difference(tmp_path / "straight", run) < 2e-6


def test_a_mistake_is_reported_once_and_leaves_no_files(three_splits: Path, tmp_path: Path) -> None:
    found = in_processes(3, ranks.trained, ranks.config_of(three_splits, tmp_path / "run"))
    assert all(isinstance(one.error, ConfigError) for one in found)
    assert str(found[0].error) == "batch_size=20 is not a multiple of the number of processes (3); choose a multiple"
    assert [one.is_reported for one in found] == [False, True, True]
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    found = in_processes(2, ranks.trained, ranks.config_of(three_splits, tmp_path / "run"))
    assert all(isinstance(one.error, RunError) and "exists" in str(one.error) for one in found)
    assert [one.is_reported for one in found] == [False, True]


def test_processes_must_have_the_same_data(three_splits: Path, tmp_path: Path) -> None:
    config = ranks.config_of(Path("data"), tmp_path / "run")
    machines = [tmp_path / name for name in ("one", "two")]
    for change, machine in enumerate(machines):
        (machine / "data").mkdir(parents=True)
        for file in three_splits.iterdir():
            content = bytearray(file.read_bytes())
            content[-1] = (content[-1] + change) % 10
            (machine / "data" / file.name).write_bytes(content)
    found = in_processes(2, ranks.on_other_machines, config, machines)
    assert all("is not the same for all processes: process 1 finds other" in str(one.error) for one in found)


@pytest.fixture
def torchrun(three_splits: Path) -> Torchrun:
    """Starts `torchrun -m vitrail train` with two processes."""

    def start(*words: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        fields = ("--threads", "1", "--batch-size", "20", "--evaluations", "2", "--checkpoints", "6")
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options,
             "-m", "vitrail", "--", "train", "demo", "--data", str(three_splits), *SMALL, *fields, *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    return start


def workers(run: Path, launcher: subprocess.Popen[str], step: int) -> list[int]:
    """Return the worker processes of torchrun when the run has a checkpoint of a step."""
    wait_for(lambda: launcher.poll() is not None or Checkpoints(run / "checkpoints").steps()[-1:] >= [step], 300)
    assert launcher.poll() is None
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(child) for child in children if b"vitrail" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_torchrun_starts_a_run_that_prints_once(torchrun: Torchrun, tmp_path: Path) -> None:
    process = torchrun("--run", str(tmp_path / "run"), "--steps", "12")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert out.count("shared by 2 processes") == out.count("The model is in") == 1
    assert steps_of(tmp_path / "run", "finished") == [12]


def test_torchrun_goes_on_after_a_killed_process(torchrun: Torchrun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = torchrun("--run", str(run), "--steps", "600", options=("--max-restarts", "1"))
    os.kill(workers(run, process, 100)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    events = [event["event"] for event in read_journal(run / "journal.jsonl")]
    assert events.count("started") == events.count("resumed") == 1 and events[-1] == "finished"


def test_a_stop_of_torchrun_saves_the_state(torchrun: Torchrun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = torchrun("--run", str(run), "--steps", "5000")
    workers(run, process, 833)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=400)
    assert steps_of(run, "stopped") == Checkpoints(run / "checkpoints").steps()[:1] < [5000], err
    assert err.count("vitrail: stopped at step") == 1


HOSTS = {"one": "10.77.31.1", "two": "10.77.31.2"}
COMMAND = (
    sys.executable, "-m", "vitrail", "train", "demo", *SMALL, "--threads", "1", "--batch-size", "20",
    "--checkpoints", "3", "--evaluations", "2", "--optimizer", "sgd", "--learning-rate", "0.05",
)  # fmt: skip


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Names of two network namespaces by the names of hosts. They are connected by a cable (veth)."""
    if shutil.which("ip") is None:
        pytest.skip("ip (package iproute2) is not installed")
    names = {host: f"vitrail-{host}-{os.getpid()}" for host in HOSTS}
    ends = [f"vt{os.getpid() % 10**6}{host[0]}" for host in HOSTS]
    made = ip("netns", "add", names["one"])
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    try:
        ip("netns", "add", names["two"]).check_returncode()
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1]).check_returncode()
        for end, (host, address) in zip(ends, HOSTS.items(), strict=True):
            ip("link", "set", end, "netns", names[host], "name", "cable").check_returncode()
            ip("-n", names[host], "addr", "add", f"{address}/24", "dev", "cable").check_returncode()
            for link in ("cable", "lo"):
                ip("-n", names[host], "link", "set", link, "up").check_returncode()
        yield names
    finally:
        for name in names.values():
            ip("netns", "del", name)


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True)


def started(hosts: dict[str, str], *words: str) -> list[subprocess.Popen[str]]:
    """Start four processes as srun does, two on each host."""
    found = []
    for rank in range(4):
        slurm = {
            "SLURM_JOB_ID": "31", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2),
            "SLURM_STEP_NODELIST": ",".join(HOSTS.values()), "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = ["ip", "netns", "exec", list(hosts.values())[rank // 2], *COMMAND, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        found.append(subprocess.Popen(command, env=os.environ | slurm, text=True, **pipes))
    return found


def test_two_machines_of_two_processes_train_as_one_process_does(
    hosts: dict[str, str], three_splits: Path, tmp_path: Path
) -> None:
    words = ("--data", str(three_splits), "--steps", "12")
    alone = [*COMMAND, *words, "--run", str(tmp_path / "one")]
    subprocess.run(alone, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    processes = started(hosts, *words, "--run", str(tmp_path / "four"), "--shard", "hybrid")
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert [bool(output) for output, _ in outputs] == [True, False, False, False], "the first process prints"
    assert len(curve(tmp_path / "four")) == 12 and difference(tmp_path / "one", tmp_path / "four") < 2e-6


def test_an_address_that_cannot_be_reached_is_a_mistake(tmp_path: Path) -> None:
    lonely = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "--run", str(tmp_path / "run"), "--process-timeout", "2s"]
    ended = subprocess.run(command, env=os.environ | lonely, capture_output=True, text=True)
    assert ended.returncode == 2 and not (tmp_path / "run").exists()
    (line,) = ended.stderr.splitlines()
    assert line.startswith("vitrail: MASTER_ADDR=127.0.0.1 MASTER_PORT=1: the 2 processes did not come together within")
    assert line.endswith("; check the address, and that all of them were started")
