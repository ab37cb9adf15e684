"""Training states on disk: `checkpoints/step-N/`. A checkpoint counts only if its manifest matches its files.

A checkpoint is written under another name, then hashed, then renamed. A thread can do this from a copy of the state
while training continues. If weights are sharded, each process writes and hashes a file with its parts. The newest
complete checkpoint is read. The tensors are in the format of torch.distributed.checkpoint, which unpickles on reading:
resume only your own runs, and publish models as bundles.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_leaves, tree_map_only

from vitrail.errors import RunError, SaveError
from vitrail.files import disk_problem, partial_path, replacing_folder, saving, sha256, write_json
from vitrail.processes.group import Processes
from vitrail.tasks.own_model import BESIDE, without_adapters, write_beside, write_weights
from vitrail.training.log import Log
from vitrail.training.state import TrainState, process_seed, random_state
from vitrail.weights.bundle import Bundle

MANIFEST = "manifest.json"
VALUES = "state.json"
WARNINGS = ("torch.distributed is disabled", "TypedStorage is deprecated")
"""Beginnings of warnings of torch.distributed.checkpoint that do not concern the user."""


class Checkpoints:
    """The checkpoints of one run. Only the newest `retain` checkpoints are kept.

    With `in_background`, a thread writes them. The `log` is told of each complete checkpoint. When a state is restored,
    the `best` model of its time is put back.
    """

    def __init__(
        self,
        folder: Path,
        *,
        retain: int = 2,
        processes: Processes = Processes(),
        in_background: bool = False,
        log: Log | None = None,
        best: BestModel | None = None,
    ) -> None:
        self.folder = folder
        self.retain = retain
        self.processes = processes
        self.log = log or Log()
        self.best = best
        self._best_in_writing = -1
        self._thread = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._writers: Processes | None = None
        """The processes that write parts of a checkpoint. None if the first process writes whole tensors."""
        self._writing: tuple[int, Future[Path]] | None = None

    def save(self, state: TrainState) -> Path:
        """Write the state as a new checkpoint, and return its folder. Older checkpoints are deleted, so that `retain`
        are left.

        All processes call this method. The first one writes, or each process writes its parts if weights are sharded.
        The tensors are the same with any number of processes. If the new checkpoint cannot be written, raises
        `SaveError` and leaves the other checkpoints intact.

        In the background, the checkpoint is complete when `wait` returns. This method then waits for the checkpoint
        before, and raises its error.
        """
        self.wait()
        random = self.processes.gather(random_state())
        tensors = state.tensors()
        values = state.values() | ({"random_of_others": random[1:]} if random[1:] else {})
        if state.is_sharded:
            self._writers = self._writers or self.processes.beside()
            return self._begin(state, values, tensors)
        return self.processes.on_first(lambda: self._begin(state, values, tensors))

    def wait(self) -> None:
        """Wait until the checkpoint that a thread is writing is complete. All processes call this method. Raises the
        errors of `save`."""
        if self._writers is None:
            self.processes.on_first(self._join)
        else:
            self._join()

    def poll(self) -> None:
        """Report the checkpoint that a thread has completed since the last call. Its error waits for `wait`."""
        if self._writing is not None and self._writing[1].done() and self._writing[1].exception() is None:
            self._join()

    def close(self) -> None:
        """Let the thread complete its checkpoint, and end it. This is for runs that end by another error."""
        if self._thread is not None:
            self._thread.shutdown()
            with suppress(Exception):
                self._join()

    def _begin(self, state: TrainState, values: dict[str, Any], tensors: dict[str, Any]) -> Path:
        """Write a checkpoint, or let the thread write a copy of the state."""
        step = state.step
        if self._thread is None:
            with _without_warnings():
                path = self._write(step, values, tensors)
            self.log.tell("checkpoint", step=step, path=path.name)
            return path
        for message in WARNINGS:  # a thread cannot restore filters, so they stay
            warnings.filterwarnings("ignore", message=message)
        values = copy.deepcopy(values)
        tensors = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), tensors)
        self._best_in_writing = values["best"]["step"]
        self._writing = step, self._thread.submit(self._write, step, values, tensors)
        return self._path(step)

    def _join(self) -> None:
        if self._writing is not None:
            (step, future), self._writing = self._writing, None
            self.log.tell("checkpoint", step=step, path=future.result().name)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _write(self, newest: int, values: dict[str, Any], tensors: dict[str, Any]) -> Path:
        path, writers = self._path(newest), self._writers or Processes()
        # Each tensor has a header of its own.
        needed = sum(one.nbytes + 2048 for one in tree_leaves(tensors) if isinstance(one, torch.Tensor))
        with ExitStack() as stack:
            partial = writers.on_first(lambda: self._open(stack, path))
            with saving("a checkpoint", path), _plain_errors(path, needed, writers):
                save(tensors, checkpoint_id=partial, process_group=writers.group, no_dist=not writers.are_several)
            writers.on_first(lambda: write_json(partial / VALUES, values))
            parts = writers.gather(_hashes(partial, writers.rank))
            writers.on_first(lambda: self._finish(stack, newest, partial, parts))
        return path

    def _open(self, stack: ExitStack, path: Path) -> Path:
        """Return a new folder, which becomes the checkpoint when the stack is closed."""
        for left in self.folder.glob(".step-*.vitrail-partial"):  # by a process that was killed while it saved
            shutil.rmtree(left, ignore_errors=True)
        return stack.enter_context(replacing_folder("a checkpoint", path, ("*", ".*")))

    def _finish(self, stack: ExitStack, newest: int, partial: Path, parts: list[dict[str, Any]]) -> None:
        """Write the manifest, rename the folder, and delete old checkpoints."""
        for rank, part in enumerate(parts):
            for name in part:
                if not (partial / name).is_file():
                    raise SaveError(
                        f"process {rank} has written {name} to a folder that the first process does not see; sharded "
                        "weights need a folder of the run that all machines share"
                    )
        write_json(partial / MANIFEST, dict(sorted(item for part in parts for item in part.items())))
        stack.close()
        steps = self.steps()
        abandoned = [step for step in steps if step > newest]  # damaged, or this run would not be before them
        for old in abandoned + steps[len(abandoned) + self.retain :]:
            shutil.rmtree(self._path(old), ignore_errors=True)  # too many checkpoints beat a stopped run

    def steps(self) -> list[int]:
        """Return the steps that have a folder with a manifest, complete or not, newest first."""
        if not self.folder.is_dir():
            return []
        names = (
            entry.name.removeprefix("step-") for entry in self.folder.glob("step-*") if (entry / MANIFEST).is_file()
        )
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)

    def best_steps(self) -> set[int]:
        """Return the steps of the best models to which checkpoints refer, with the one that a thread is writing."""
        found = {self._best_in_writing} if self._writing is not None else set()
        for step in self.steps():
            with suppress(OSError, ValueError, KeyError, TypeError):  # damaged checkpoints refer to nothing
                found.add(json.loads((self._path(step) / VALUES).read_text(encoding="utf-8"))["best"]["step"])
        return found

    def restore(self, state: TrainState, *, before: int | None = None) -> list[str]:
        """Load the newest complete checkpoint into `state`. Return a sentence about each newer checkpoint that is
        damaged.

        With `before`, load the newest one from before this step, or the oldest one if none is.

        All processes call this method and read the checkpoint. Raises `RunError` if there is no complete checkpoint, or
        if the newest one has other tensors than the state.
        """
        self.wait()
        path, damaged = self.processes.on_first(lambda: self._newest_complete(before))
        values, tensors = json.loads((path / VALUES).read_text(encoding="utf-8")), state.tensors()
        _check_tensors(path, tensors)
        with _without_warnings(), _plain_errors(path):
            load(tensors, checkpoint_id=path, no_dist=True)
        state.restore_tensors(tensors)
        state.restore_values(values | {"random": self._own_random_state(values)})
        if (best := self.best) is not None:
            self.processes.on_first(lambda: best.put_back(state.best.step))
        return damaged

    def _newest_complete(self, before: int | None) -> tuple[Path, list[str]]:
        """Return the newest complete checkpoint, and a sentence about each damaged one. Raises `RunError`."""
        damaged, steps = list[str](), self.steps()
        if before is not None:
            later = [step for step in steps if step >= before]
            steps = [step for step in steps if step < before] + later[::-1]
        for step in steps:
            path = self._path(step)
            if (problem := _damage(path)) is None:
                return path, damaged
            damaged.append(f"checkpoint {path} is damaged ({problem}); going back to the one before it")
        raise RunError("\n".join([*damaged, f"{self.folder} has no complete checkpoint to resume from"]))

    def _own_random_state(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the random state of this process. A process that the saved run did not have begins with a seed that
        follows from the step and its rank."""
        saved = [values["random"], *values.get("random_of_others", [])]
        if self.processes.rank < len(saved):
            return dict(saved[self.processes.rank])
        torch.manual_seed(process_seed(values["step"], self.processes.rank))
        return random_state()


def _hashes(folder: Path, rank: int) -> dict[str, Any]:
    """Return the sizes and hashes of the files that this process has written: its tensors, and the first process also
    the description of the checkpoint."""
    files = [*folder.glob(f"__{rank}_*"), *((folder / ".metadata", folder / VALUES) if rank == 0 else ())]
    return {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files}


def _damage(path: Path) -> str | None:
    """Return a description of the first difference between a checkpoint's files and its manifest, or None."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, recorded in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != recorded["bytes"]:
                return f"{name} has {file.stat().st_size:,} bytes, not {recorded['bytes']:,}"
            if sha256(file) != recorded["sha256"]:
                return f"{name} was altered"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None if VALUES in manifest else f"{MANIFEST} is incomplete"


def _check_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """Raise `RunError` unless a checkpoint has the same tensors as a state, in the same sizes. PyTorch would ignore
    tensors that only the checkpoint has, such as those of a head of an earlier version."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    saved = {name: getattr(one, "size", "option") for name, one in metadata.items()}
    own = {name: getattr(one, "shape", "option") for name, one in flatten_state_dict(tensors)[0].items()}
    # An option of the optimizer that PyTorch no longer has does not matter.
    further = (name for name in saved.keys() - own.keys() if saved[name] != "option")
    if others := sorted({*further, *(name for name, size in own.items() if saved.get(name) != size)}):
        raise RunError(
            f"checkpoint {path} does not fit the run: {len(others)} of their tensors, such as {others[0]}, are in one "
            "of them alone or have another size. Another version of Vitrail wrote it, or your own network or task has "
            f"changed; resume the run with that version, or train again with --like {path.parent.parent}"
        )


def _disk_problem(path: Path, needed: int) -> OSError | None:
    """Delete the unfinished files of a checkpoint. Return the error of the operating system if the checkpoint does not
    fit on the disk, else None."""
    partial = partial_path(path.resolve())
    for file in partial.iterdir():
        file.unlink()
    return disk_problem(partial, needed)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide two warnings of torch.distributed.checkpoint in the `with` block."""
    with warnings.catch_warnings():
        for message in WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield


@contextmanager
def _plain_errors(path: Path, needed: int = 0, writers: Processes = Processes()) -> Iterator[None]:
    """Raise the errors of torch.distributed.checkpoint as `OSError` or `SaveError`, the same in all `writers`.

    `needed` is the size of a checkpoint that is written. If the disk is full, torch mostly raises an internal assertion
    of its zip writer instead of the error of the operating system. The unfinished files are therefore deleted, and the
    operating system is asked if the checkpoint fits on the disk.
    """
    try:
        with writers.exchange("a checkpoint"):
            yield
    except CheckpointException as failure:
        causes = [error for error, _ in failure.failures.values()]
        for cause in causes:
            if isinstance(cause, OSError):
                raise cause from failure
        if needed and (problem := writers.on_first(lambda: _disk_problem(path, needed))) is not None:
            raise problem from failure
        reason = "; ".join(str(cause) or type(cause).__name__ for cause in causes)
        raise SaveError(f"checkpoint {path} failed: {reason}") from failure


# The best model in a run's folder, and earlier best models to which checkpoints still refer. A run that goes back to
# a checkpoint also goes back to the best model of that time. Otherwise, its result could be a model of steps that no
# longer count.


MODEL = "model"
KEPT = ".best-"
"""Beginning of the names of folders with earlier best models. The number of their step follows."""


class BestModel:
    """The folder of the best model of a run, and copies of earlier ones."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the folder of the run."""
        self.folder = folder
        self.path = folder / MODEL

    def keep(self, step: int, referenced: Collection[int]) -> None:
        """Keep a copy of the best model of a step before another one replaces it, if its step is `referenced` by a
        checkpoint. Other copies that no checkpoint refers to are deleted. Raises `SaveError`.

        The copy consists of links where the file system has them, because files of models are replaced and never
        changed.
        """
        self.forget(referenced)
        copy = self._copy(step)
        if step not in referenced or copy.exists() or not self.path.is_dir():
            return
        with saving("the best model so far", copy):
            partial = copy.with_name(f"{copy.name}.vitrail-partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(self.path, partial / MODEL, copy_function=_link)
            if (self.folder / BESIDE).exists():
                _link(self.folder / BESIDE, partial / BESIDE)
            partial.rename(copy)

    def save(self, bundle: Bundle, objective: nn.Module) -> None:
        """Save a model as the best one, with the weights that its objective trains beside the network. Raises
        `SaveError`."""
        write_beside(objective, self.folder / BESIDE)
        write_weights(without_adapters(bundle), self.path)

    def put_back(self, step: int) -> None:
        """Make the kept model of this step the best one again. Without a copy, the best model stays."""
        copy = self._copy(step)
        if not copy.is_dir():
            return
        with saving("the best model", self.path):
            for entry in list(copy.iterdir()):
                target = self.folder / entry.name
                shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
                entry.rename(target)
            copy.rmdir()

    def forget(self, referenced: Collection[int] = ()) -> None:
        """Delete the copies of earlier models of steps that no checkpoint refers to: all of a complete run."""
        for kept in list(self.folder.glob(f"{KEPT}*")):
            if kept.name.removeprefix(KEPT) not in map(str, referenced):
                shutil.rmtree(kept, ignore_errors=True)

    def _copy(self, step: int) -> Path:
        return self.folder / f"{KEPT}{step}"


def _link(source: str | Path, target: str | Path) -> None:
    """Link a file, or copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
