"""Tests of checkpoints, of which only complete ones count, and of the best model beside them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import vitrail.training.checkpoint as checkpoint_module
from tests.training.jobs import AtStep, Make, Outcome, Prepare, crash
from vitrail.errors import RunError, SaveError
from vitrail.training.checkpoint import BestModel, Checkpoints
from vitrail.training.job import Job
from vitrail.training.log import Log
from vitrail.training.loop import train_step
from vitrail.training.run import resume, train
from vitrail.training.state import Best, TrainState

FILES = (".metadata", "__0_0.distcp", "manifest.json", "state.json")
Moving = tuple[TrainState, Job]
TensorsOf = Callable[[TrainState], dict[str, Tensor]]
Saved = Callable[..., dict[str, Tensor]]
Two = tuple[Path, dict[str, Tensor]]


@pytest.fixture(scope="module")
def moving(small: Make, prepare: Prepare, tmp_path_factory: pytest.TempPathFactory) -> Moving:
    return prepare(small(tmp_path_factory.mktemp("moving") / "run", threads=0))


@pytest.fixture(scope="module")
def tensors_of(flat: Callable[..., dict[str, Any]]) -> TensorsOf:
    return lambda state: {
        name: leaf.clone() for name, leaf in flat(state.tensors()).items() if isinstance(leaf, torch.Tensor)
    }


def save_steps(moving: Moving, checkpoints: Checkpoints, *steps: int) -> TrainState:
    """Take a step before each save under the given step numbers."""
    state, job = moving
    for step in steps:
        state.step = 0
        train_step(job, state, next(state.batches))
        state.step, state.best, state.skipped = step, Best(step / 100, step), {f"bad {step}"}
        checkpoints.save(state)
    return state


@pytest.fixture
def saved(moving: Moving, tmp_path: Path, tensors_of: TensorsOf) -> Saved:
    """Save under the given step numbers, and return the tensors of the last save."""
    return lambda *steps, retain=2: tensors_of(
        save_steps(moving, Checkpoints(tmp_path / "checkpoints", retain=retain), *steps)
    )


@pytest.fixture(scope="module")
def two(moving: Moving, tmp_path_factory: pytest.TempPathFactory, tensors_of: TensorsOf) -> Two:
    """A folder with checkpoints of steps 3 and 4, which tests copy, and the tensors of step 3."""
    checkpoints = Checkpoints(tmp_path_factory.mktemp("two") / "checkpoints")
    tensors = tensors_of(save_steps(moving, checkpoints, 3))
    save_steps(moving, checkpoints, 4)
    return checkpoints.folder, tensors


def test_the_names_of_the_tensors_do_not_depend_on_the_machine(
    moving: Moving, flat: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = set(flat(moving[0].tensors()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not torch.cuda.is_initialized())
    assert set(flat(moving[0].tensors())) == here
    assert not any("random" in name or "cuda" in name for name in here)


@pytest.mark.slow
@pytest.mark.parametrize("retain", [1, 3])
def test_the_numerically_newest_are_kept_and_win(retain: int, saved: Saved, moving: Moving, tmp_path: Path) -> None:
    saved(8, 9, 10, 100, retain=retain)
    checkpoints, kept = Checkpoints(tmp_path / "checkpoints"), [100, 10, 9][:retain]
    assert {path.name for path in checkpoints.folder.iterdir()} == {f"step-{step}" for step in kept}
    assert checkpoints.steps() == kept and checkpoints.restore(moving[0]) == [] and moving[0].step == 100


@pytest.mark.slow
def test_the_same_step_can_be_saved_again(saved: Saved, moving: Moving, tmp_path: Path) -> None:
    saved(4)
    first = (tmp_path / "checkpoints" / "step-4" / "manifest.json").read_bytes()
    saved(4)
    assert (tmp_path / "checkpoints" / "step-4" / "manifest.json").read_bytes() != first
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-4"]
    assert Checkpoints(tmp_path / "checkpoints").restore(moving[0]) == []


@pytest.mark.parametrize("sizes", [(1, None), (None, ()), (1, 2)], ids=str)
def test_a_checkpoint_with_other_tensors_is_refused(
    sizes: tuple[Any, Any], saved: Saved, moving: Moving, tmp_path: Path
) -> None:
    """In an earlier version, the task of a run can have had other weights."""
    before, after = (None if size is None else torch.ones(size) for size in sizes)
    moving[0].objective.register_buffer("further", before)
    saved(4)
    moving[0].objective.register_buffer("further", after)
    with pytest.raises(RunError, match=r"weights\.further"):
        Checkpoints(tmp_path / "checkpoints").restore(moving[0])
    moving[0].objective.register_buffer("further", None)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
@given(bit=st.integers(0, 2**24))
@settings(max_examples=1, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_flipped_bit_falls_back_to_the_one_before(
    bit: int, name: str, two: Two, moving: Moving, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    if not checkpoints.folder.exists():
        shutil.copytree(two[0], checkpoints.folder)
    whole = (checkpoints.folder / "step-4" / name).read_bytes()
    flip(checkpoints.folder / "step-4" / name, bit)
    (note,) = checkpoints.restore(moving[0])
    (checkpoints.folder / "step-4" / name).write_bytes(whole)
    assert moving[0].step == 3
    assert note.startswith(f"checkpoint {checkpoints.folder}/step-4 is damaged (")
    assert note.endswith("; going back to the one before it")
    assert checkpoints.restore(moving[0]) == [] and moving[0].step == 4


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing tensors": (lambda step: (step / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "short tensors": (lambda step: os.truncate(step / "__0_0.distcp", 1000), "__0_0.distcp has 1,000 bytes, not "),
    "empty manifest": (lambda step: os.truncate(step / "manifest.json", 0), "manifest.json cannot be read"),
    "manifest of nothing": (lambda step: (step / "manifest.json").write_text("{}"), "manifest.json is incomplete"),
    "manifest a list": (lambda step: (step / "manifest.json").write_text("[1]"), "manifest.json cannot be read"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "problem"), DAMAGES.values(), ids=DAMAGES)
def test_a_missing_or_short_file_falls_back(
    damage: Callable[[Path], object], problem: str, two: Two, moving: Moving, tmp_path: Path, tensors_of: TensorsOf
) -> None:
    folder, expected = two
    shutil.copytree(folder, tmp_path / "checkpoints")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    damage(checkpoints.folder / "step-4")
    (note,) = checkpoints.restore(moving[0])
    assert f"step-4 is damaged ({problem}" in note
    assert moving[0].step == 3
    torch.testing.assert_close(tensors_of(moving[0]), expected, rtol=0, atol=0)


@pytest.mark.slow
def test_without_a_manifest_it_does_not_exist(saved: Saved, moving: Moving, tmp_path: Path) -> None:
    saved(3, 4)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    (checkpoints.folder / "step-4" / "manifest.json").unlink()
    for name in (".step-5.vitrail-partial", ".step-6.vitrail-replaced", "step-x", "other"):
        shutil.copytree(checkpoints.folder / "step-3", checkpoints.folder / name)
    assert checkpoints.steps() == [3]
    assert checkpoints.restore(moving[0]) == [] and moving[0].step == 3


def test_none_whole_is_an_error_that_leaves_the_state_alone(
    saved: Saved, moving: Moving, tmp_path: Path, tensors_of: TensorsOf
) -> None:
    before = saved(3, 4)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (3, 4):
        flip(checkpoints.folder / f"step-{step}" / "__0_0.distcp", 80_000)
    with pytest.raises(RunError) as caught:
        checkpoints.restore(moving[0])
    newest, older, rule = str(caught.value).splitlines()
    assert "step-4 is damaged" in newest and "step-3 is damaged" in older
    assert rule == f"{checkpoints.folder} has no complete checkpoint to resume from"
    assert moving[0].step == 4
    torch.testing.assert_close(tensors_of(moving[0]), before, rtol=0, atol=0)
    with pytest.raises(RunError, match="has no complete checkpoint to resume from"):
        Checkpoints(tmp_path / "nowhere").restore(moving[0])


def test_an_exception_while_saving_leaves_nothing_behind(saved: Saved, moving: Moving, tmp_path: Path) -> None:
    saved(3)
    state = moving[0]
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    before = {path.name: path.read_bytes() for path in (checkpoints.folder / "step-3").iterdir()}
    state.step, state.best = 4, object()  # type: ignore[assignment]  # JSON cannot write it
    with pytest.raises(TypeError):
        checkpoints.save(state)
    state.best = Best()
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-3"]
    assert {path.name: path.read_bytes() for path in (checkpoints.folder / "step-3").iterdir()} == before


@pytest.mark.slow
def test_the_background_writes_the_state_of_the_moment(
    saved: Saved, moving: Moving, tmp_path: Path, tensors_of: TensorsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, job = moving
    saved(3)
    real, may_write, complete = checkpoint_module.save, threading.Event(), list[int]()
    monkeypatch.setattr(checkpoint_module, "save", lambda *given, **named: (may_write.wait(60), real(*given, **named)))
    checkpoints = Checkpoints(
        tmp_path / "checkpoints", in_background=True, log=Log(lambda event: complete.append(event["step"]))
    )
    before = tensors_of(state)
    state.step = 4
    path = checkpoints.save(state)
    state.step, state.best.waited = 0, 99
    train_step(job, state, next(state.batches))
    state.skipped.add("later")
    checkpoints.poll()
    assert not path.exists() and complete == [] and checkpoints.steps() == [3]
    may_write.set()
    checkpoints.wait()
    assert complete == [4] and checkpoints.steps() == [4, 3]
    assert checkpoints.restore(state) == [] and state.step == 4 and state.best.waited == 0
    assert state.skipped == {"bad 3"}
    torch.testing.assert_close(tensors_of(state), before, rtol=0, atol=0)
    checkpoints.close()


def test_an_error_in_the_background_is_raised_by_the_next_save(
    saved: Saved, moving: Moving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(3)
    state, checkpoints = moving[0], Checkpoints(tmp_path / "checkpoints", in_background=True)

    def full(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "save", full)
        state.step = 4
        checkpoints.save(state)
        state.step = 5
        with pytest.raises(SaveError, match=r"step-4: No space left on device$"):
            checkpoints.save(state)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-3"]
    checkpoints.save(state)
    checkpoints.close()
    assert checkpoints.steps() == [5, 3]


@pytest.fixture
def lock() -> Iterator[Callable[[Path], None]]:
    """Return a function that makes a folder from which nothing can be deleted, even by root."""
    locked: list[Path] = []

    def make(folder: Path) -> None:
        if os.geteuid():
            folder.chmod(0o555)
        elif shutil.which("chattr") is None or subprocess.run(["chattr", "+i", folder], capture_output=True).returncode:
            pytest.skip("this file system cannot lock a folder against root")
        locked.append(folder)

    yield make
    for folder in locked:
        folder.chmod(0o755) if os.geteuid() else subprocess.run(["chattr", "-i", folder], check=True)


@pytest.mark.slow
def test_an_old_checkpoint_that_cannot_be_deleted_does_not_stop_the_run(
    tiny: Make, lock: Callable[[Path], None]
) -> None:
    config = tiny(checkpoints=4)
    folder = Path(config.run.folder or "") / "checkpoints"

    result = train(config, log=Log(AtStep(5, lambda: lock(folder / "step-3"))))
    assert sorted(path.name for path in folder.iterdir()) == ["step-12", "step-3", "step-9"]
    assert Checkpoints(folder).steps() == [12, 9, 3]
    assert (result.folder / "model" / "model.json").is_file()


def write(run: Path, text: str) -> None:
    """Replace the files of a model, as a run does."""
    for file in (run / "model" / "model.json", run / "beside.safetensors"):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(file)


def read(run: Path) -> set[str]:
    return {file.read_text() for file in (run / "model" / "model.json", run / "beside.safetensors")}


def without_links(source: Path, target: Path) -> None:
    """Fail as a file system without links does."""
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("has_links", [True, False])
def test_the_model_of_a_checkpoint_comes_back(has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_links:
        monkeypatch.setattr(checkpoint_module.os, "link", without_links)
    best = BestModel(tmp_path)
    write(tmp_path, "of step 3")
    best.keep(3, {3})
    write(tmp_path, "of step 5")
    best.keep(5, {3})
    write(tmp_path, "of step 7")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".best-3", "beside.safetensors", "model"]
    best.put_back(5)
    assert read(tmp_path) == {"of step 7"}
    best.put_back(3)
    assert read(tmp_path) == {"of step 3"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside.safetensors", "model"]


def test_models_to_which_no_checkpoint_refers_are_deleted(tmp_path: Path) -> None:
    best = BestModel(tmp_path)
    best.keep(-1, {-1})  # there is no model yet
    for step, referenced in ((3, {3}), (5, {3, 5}), (7, {5, 7})):
        write(tmp_path, f"of step {step}")
        best.keep(step, referenced)
    assert sorted(path.name for path in tmp_path.glob(".best-*")) == [".best-5", ".best-7"]
    best.forget()
    assert not list(tmp_path.glob(".best-*"))


@pytest.mark.slow
def test_a_crash_after_a_new_best_model_leaves_that_of_the_checkpoint(
    small: Make, outcome: Outcome, tmp_path: Path
) -> None:
    fields = {"evaluations": 24, "checkpoints": 8, "learning_rate": 3e-3}
    train(small(tmp_path / "straight", **fields))
    run = tmp_path / "run"

    def crash_at_the_best(event: Mapping[str, Any]) -> None:
        if event["event"] == "evaluation" and event["best"] and event["step"] > 6:
            crash()

    with pytest.raises(MemoryError):
        train(small(run, **fields), log=Log(crash_at_the_best))
    newest = Checkpoints(run / "checkpoints").steps()[0]
    values = json.loads((run / "checkpoints" / f"step-{newest}" / "state.json").read_text())

    def step_of_model() -> int:
        return json.loads((run / "model" / "model.json").read_text())["provenance"]["step"]

    assert step_of_model() > newest >= values["best"]["step"] > 0
    found = list[int]()
    resume(run, log=Log(lambda event: found.append(step_of_model()) if event["event"] == "resumed" else None))
    assert found == [values["best"]["step"]]
    assert outcome(run) == outcome(tmp_path / "straight")
    assert not list(run.glob(".best-*"))
