"""Tests of resuming: a run that was stopped any number of times ends with the same bits as one without stops."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail.training.checkpoint as checkpoint_module
from tests.listening import Display
from tests.training.jobs import SMALL, AtStep, Make, Outcome, StopAt, crash, steps_of, train_until
from vitrail.errors import ConfigError, RunError, Stopped
from vitrail.models.linear import float32
from vitrail.training.config import TrainConfig
from vitrail.training.log import Log
from vitrail.training.run import resume, train


def run_with_stops(config: TrainConfig, cuts: tuple[int, ...]) -> Path:
    """Train, and stop the run by a signal after each of the steps `cuts`."""
    folder = Path(config.run.folder or "")
    for number, cut in enumerate(cuts):
        with pytest.raises(Stopped, match=f"^stopped at step {cut} of 24; .*checkpoints/step-{cut}$") as caught:
            train(config, log=Log(StopAt(cut))) if number == 0 else resume(folder, log=Log(StopAt(cut)))
        assert caught.value.run == folder and caught.value.exit_code == 75
        torch.manual_seed(999 + number)  # whatever the next process begins with
        torch.rand(5)
    resume(folder)
    return folder


@pytest.mark.parametrize("cuts", [
    (1, 10),
    pytest.param((17,), marks=pytest.mark.slow),
    pytest.param((9, 10, 11, 12, 20), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_stopping_changes_no_bit(
    cuts: tuple[int, ...], small: Make, straight: dict[str, Any], outcome: Outcome, tmp_path: Path
) -> None:
    run = run_with_stops(small(tmp_path / "run"), cuts)
    found = outcome(run)
    for part, expected in straight.items():
        assert found[part] == expected, f"{part} differs"
    assert len(steps_of(run, "resumed")) == len(cuts) and steps_of(run, "finished") == [24]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [
    {"optimizer": "sgd", "keep": "last", "loss": "sigmoid"},
    {"optimizer": "adafactor", "momentum_format": "bfloat16", "width": 32, "heads": 1, "mlp_width": 48, "average": 0.9},
    {"momentum_format": "bfloat16", "weight_decay_rule": "independent", "schedule": "rsqrt", "cooldown": "5 steps"},
    {"optimizer": "sgd", "weight_decay_rule": "decoupled", "momentum_format": "bfloat16", "layer_decay": 0.7},
    {"optimizer": "muon", "momentum_format": "bfloat16", "layer_decay": 0.7, "accumulation": 3, "average": 0.9},
    {"optimizer": "lars", "momentum_of": "changes", "learning_rate": 0.5}, {"optimizer": "lamb", "average": 0.9},
    {"accumulation": 3, "clip": 0.0, "pool": "gap", "shift": 3, "head_hidden": 8},
    {"variant": "Conv+ViT-Pico/8", "image_size": (32, 32), "registers": 1, "positions": "relative-bias"},
    {"float32_products": "onednn"},  # the environment chooses the other library
], ids=str)  # fmt: skip
def test_stopping_changes_no_bit_of_other_configs(
    fields: dict[str, Any], small: Make, outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float32, "SMALLEST", 1)
    fields = {**fields, "evaluations": 2, "checkpoints": 1}
    train(small(tmp_path / "straight", **fields))
    stopped = run_with_stops(small(tmp_path / "stopped", **fields), (13,))
    assert outcome(stopped) == outcome(tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "stopped"), [("evaluation", 8), ("save", 9)])
def test_a_signal_within_an_evaluation_or_a_save_changes_no_bit(
    moment: str, stopped: int, small: Make, straight: dict[str, Any], outcome: Outcome, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run, real = tmp_path / "run", checkpoint_module.save

    class Signalling(Display):
        def evaluated(self, step: int, result: Mapping[str, Any], training: Mapping[str, float]) -> None:
            if step == 8 and moment == "evaluation":
                os.kill(os.getpid(), signal.SIGTERM)

    def signalling(*given: Any, **named: Any) -> None:
        if moment == "save" and named["checkpoint_id"].name == ".step-8.vitrail-partial":
            os.kill(os.getpid(), signal.SIGTERM)
        real(*given, **named)

    with monkeypatch.context() as patch, pytest.raises(Stopped, match=f"^stopped at step {stopped} of 24; "):
        patch.setattr(checkpoint_module, "save", signalling)
        train(small(run), log=Log(Signalling()))
    resume(run)
    assert outcome(run) == straight


@pytest.mark.slow
def test_a_moved_run_can_be_resumed(small: Make, straight: dict[str, Any], outcome: Outcome, tmp_path: Path) -> None:
    train_until(small(tmp_path / "run"), 7)
    moved = (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert resume(moved).folder == moved
    assert not (tmp_path / "run").exists()
    assert outcome(moved) == straight


@pytest.mark.slow
def test_a_run_of_an_earlier_version_with_settings_that_are_refused_now_goes_on(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = (".*=1", "head.*=2")
    config = small(tmp_path / "run", optimizer="lamb", weight_decay_rule="independent", learning_rate_factors=factors)
    with pytest.raises(ConfigError, match="'independent' does not fit"):
        train(config)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("vitrail.training.config.TrainConfig.new_problems", lambda _: ())
        patch.setattr("vitrail.training.run.check_names", lambda *_: ())
        train(config, log=Log(StopAt(22)))
    assert resume(tmp_path / "run").summary["steps"] == 24


def test_classes_that_were_renamed_are_refused(folder_config: Make, colour_folder: Path, tmp_path: Path) -> None:
    """The labels of a table stay the same indices, but the model would give them other names."""
    table = colour_folder / "labels.csv"
    rows = [f"{path.relative_to(colour_folder)},{path.parent.name}" for path in colour_folder.glob("*/*.png")]
    table.write_text("\n".join(["path,label", *rows]))
    config = folder_config(colour_folder).override(data=str(table), run=str(tmp_path / "run"))
    train_until(config, 5)
    table.write_text(table.read_text().replace(",red", ",rot"))
    with pytest.raises(RunError, match="classes"):
        resume(tmp_path / "run")


def test_data_that_changed_is_refused(folder_config: Make, colour_folder: Path) -> None:
    config = folder_config(colour_folder)
    train_until(config, 5)
    run = Path(config.run.folder or "")
    before = sorted((path.relative_to(run), path.stat().st_mtime_ns) for path in run.rglob("*"))
    added = colour_folder / "red" / "new.png"
    added.write_bytes((colour_folder / "red" / "00.png").read_bytes())
    with pytest.raises(RunError, match=r"^the data of run .* has changed since the run began: it had "):
        resume(run)
    added.unlink()
    moved = (colour_folder / "red" / "00.png").rename(colour_folder / "blue" / "zz.png")
    with pytest.raises(RunError, match=r"has changed since the run began.* names, labels, classes or another split"):
        resume(run)
    assert sorted((path.relative_to(run), path.stat().st_mtime_ns) for path in run.rglob("*")) == before
    moved.rename(colour_folder / "red" / "00.png")
    assert resume(run).metrics["validation_accuracy"] >= 0


@pytest.mark.slow
def test_a_run_that_ended_before_its_first_checkpoint_begins_anew(
    small: Make, straight: dict[str, Any], outcome: Outcome, tmp_path: Path
) -> None:
    run, shown = tmp_path / "run", Display()
    with pytest.raises(MemoryError):
        train(small(run), log=Log(AtStep(6, crash)))  # after the evaluation at step 4, which wrote a model
    assert (run / "model").is_dir() and not list(run.glob("checkpoints/step-*"))
    resume(run, log=Log(shown))
    assert "the run ended before its first checkpoint, so it starts from the beginning" in shown.notes
    assert outcome(run) == straight


@pytest.mark.slow
def test_a_run_that_ended_in_its_last_measurements_is_finished(
    small: Make, straight: dict[str, Any], outcome: Outcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.training.run.write_examples", crash)
        with pytest.raises(MemoryError):
            train(small(run))
    assert (run / "model").is_dir() and not (run / "examples").exists()
    result = resume(run)
    assert len(result.examples) == 10 and set(result.metrics) == {"validation_accuracy", "test_accuracy"}
    found = outcome(run)
    assert found["model"] == straight["model"] and found["tensors"] == straight["tensors"]
    assert found["evaluations"][-2:] == straight["evaluations"][-2:]
    assert steps_of(run, "finished") == [24]


RANDOM = (*SMALL, "--dropout", "0.2", "--stochastic-depth", "0.3", "--threads", "2", "--batch-size", "20")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--background-checkpoints",)], ids=str)
def test_kill_9_at_random_moments_changes_no_bit(
    more: tuple[str, ...], three_splits: Path, outcome: Outcome, command: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:  # fmt: skip
    options = ("--data", str(three_splits), "--steps", "40", "--checkpoints", "40", "--evaluations", "20", *RANDOM)
    options += more
    straight = command("demo", *options, "--run", str(tmp_path / "straight"))
    _, errors = straight.communicate(timeout=120)
    assert straight.returncode == 0, errors
    run = tmp_path / "run"
    moments, reached = random.Random(20201022), []
    process = command("demo", *options, "--run", str(run))
    for _ in range(4):
        size, seen = reached[-1] if reached else 0, 0
        while seen <= size and process.poll() is None:  # until it got further than the last one
            time.sleep(0.01)
            seen = max((int(p.name[5:]) for p in run.glob("checkpoints/step-*") if p.name[5:].isdigit()), default=0)
        if seen > 20:
            break
        time.sleep(moments.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        reached.append(seen)
        process = command("--resume", str(run))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert len(reached) >= 2
    assert outcome(run) == outcome(tmp_path / "straight")
    assert not list((run / "checkpoints").glob("*-partial"))


KILLER = """
import os, signal, sys
import vitrail.files, vitrail.training.checkpoint as checkpoint
from vitrail.cli import main

def dying(place, name, when):
    real = getattr(place, name)
    def wrapped(*args, **kwargs):
        if when(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(place, name, wrapped)

def writes(file):
    dying(checkpoint, "write_json", lambda path, _: (path.parent.name, path.name) == (".step-24.vitrail-partial", file))

where = sys.argv[1]
if where == "before the tensors":
    dying(checkpoint, "save", lambda *a, checkpoint_id, **k: checkpoint_id.name == ".step-24.vitrail-partial")
elif where == "before the values":
    writes("state.json")
elif where == "before the manifest":
    writes("manifest.json")
elif where == "before the rename":
    dying(vitrail.files, "_swap", lambda new, path, names: path.name == "step-24")
elif where == "before the old one is deleted":
    dying(checkpoint.shutil, "rmtree", lambda path, **k: path.name == "step-8")
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--background-checkpoints",)], ids=str)
@pytest.mark.parametrize(
    ("where", "newest"),
    [
        ("before the tensors", 16),
        ("before the values", 16),
        ("before the manifest", 16),
        ("before the rename", 16),
        ("before the old one is deleted", 24),
    ],
)
def test_kill_9_within_a_save_changes_no_bit(
    more: tuple[str, ...], where: str, newest: int, three_splits: Path, small: Make, straight: dict[str, Any],
    outcome: Outcome, tmp_path: Path,
) -> None:  # fmt: skip
    run = tmp_path / "run"
    options = ("--data", str(three_splits), "--run", str(run), "--steps", "24", "--checkpoints", "3", *RANDOM)
    options += (*more, "--evaluations", "6", "--keep", "best", "--optimizer", "adamw", "--learning-rate", "0.01")
    words, one_thread = [sys.executable, "-c", KILLER, where, "train", "demo", *options], {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(words, env=os.environ | one_thread, capture_output=True, text=True, timeout=120)
    assert process.returncode == -signal.SIGKILL, process.stderr
    resume(run)
    found = outcome(run)
    for part, expected in straight.items():
        assert found[part] == expected, f"{part} differs"
    assert steps_of(run, "resumed") == [newest]
    assert not list((run / "checkpoints").glob("*-partial"))
