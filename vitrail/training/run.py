"""Train a model as a config describes: `train` starts a run, `resume` continues it, `finished` reads its result."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from vitrail.cores import compute_threads
from vitrail.data.source import Source
from vitrail.data.sources import OpenedData
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError, RunComplete, RunError, SaveError
from vitrail.files import recover_folder, saving, write_json
from vitrail.machine import deterministic_algorithms
from vitrail.models.linear.float32 import float32_products
from vitrail.processes.group import Processes, join_processes
from vitrail.training.assembly import make_network
from vitrail.training.config import TrainConfig
from vitrail.training.execution import Execution
from vitrail.training.finish import RunResult
from vitrail.training.forecast import check_run_memory
from vitrail.training.monitoring.examiner import Probe, check_probes
from vitrail.training.records.changes import changed_config
from vitrail.training.records.extension import Length, check_extension
from vitrail.training.records.folder import new_folder
from vitrail.training.records.lock import locked
from vitrail.training.records.record import Record, read_record, replace_config
from vitrail.training.reporting.display import Display
from vitrail.training.reporting.journal import read_journal
from vitrail.training.setup import OwnObjects, Setup, prepare, record_of
from vitrail.training.start import open_again, open_initial
from vitrail.training.state.checkpoint import Checkpoints
from vitrail.weights.bundle import Bundle, load_bundle

__all__ = ["finished", "resume", "train"]


def train(
    config: TrainConfig,
    *,
    data: Source | Splits | OpenedData | None = None,
    network: nn.Module | None = None,
    initial: Bundle | None = None,
    probes: Sequence[Probe] = (),
    measure_test: bool = True,
    display: Display | None = None,
    started: float | None = None,
) -> RunResult:
    """Train a model as `config` describes, and save the run in a new folder.

    `data` replaces the data set that the config names, and is split in the same way. `OpenedData` is the config's own
    data set, opened earlier; `resume` does not need it.

    `network` replaces the network that the config describes. If the network's class is not one of this package, the run
    saves only the network's weights, and the returned bundle predicts with the network that was passed. `resume` needs
    the same `network` and `data` again, apart from `OpenedData`.

    `initial` is the model that `config.start.init` names, if the caller has already loaded it. Training does not change
    `initial`. `probes` are measured during the run. `measure_test=False` leaves the test split unmeasured, for runs
    that choose the settings of another run. `started` is the time (`time.perf_counter()`) at which the user started the
    command.

    Raises `UserError` for settings, data and objects that cannot work, `Stopped` if the user stops the run,
    `NonFiniteLoss` if it diverges, and `SaveError` if a file cannot be written.

    If torchrun or SLURM has started several processes, all of them call this function. They train one network together,
    with the settings of the first process, which alone writes files. The results are the same in all of them, but with
    sharded weights, only the first process returns the weights of the model. Raises `ProcessError` if one of them ends
    or hangs.
    """
    started = time.perf_counter() if started is None else started
    processes = join_processes(config.run.process_seconds)
    with processes.reporting():
        config = processes.from_first(config)
        return _train(config, processes, data, network, initial, probes, measure_test, display, started)


def _train(
    config: TrainConfig,
    processes: Processes,
    data: Source | Splits | OpenedData | None,
    network: nn.Module | None,
    initial: Bundle | None,
    probes: Sequence[Probe],
    measure_test: bool,
    display: Display | None,
    started: float,
) -> RunResult:
    if initial is not None and config.start.init is None:
        raise ConfigError(
            "initial: a model was passed, but config.start.init does not say where it comes from; set init to its "
            "path or name"
        )
    model = initial or open_initial(config.start)
    objects = OwnObjects(data, network)
    setup = prepare(config, model=model, objects=objects, measure_test=measure_test, processes=processes)
    check_probes((*setup.probes, *probes), setup.splits)
    memory = check_run_memory(setup.config, setup.network, setup.device, processes)
    with _same_arithmetic(setup.config):
        torch.manual_seed(config.run.seed)
        shown = display if display is not None and processes.is_first else Display()
        trained, setup, notes = make_network(setup, model, shown.extracting)
        del model, initial  # the new network has copies of their weights
        folder = processes.on_first(lambda: new_folder(setup.config))
        with _locked(folder, processes):
            processes.on_first(lambda: _write_record(setup, folder))
            return Execution(setup, folder, display or Display(), started, memory).go(trained, notes, probes)


def resume(
    folder: Path,
    *,
    data: Source | Splits | OpenedData | None = None,
    network: nn.Module | None = None,
    probes: Sequence[Probe] = (),
    measure_test: bool = True,
    length: Length | None = None,
    max_time: str | None = None,
    changes: Mapping[str, Any] = MappingProxyType({}),
    allow: Collection[str] = (),
    display: Display | None = None,
    started: float | None = None,
) -> RunResult:
    """Continue a run that was stopped or killed, from its newest complete checkpoint. With `length`, make a finished or
    stopped run longer.

    In float32 on the CPU, the result is bitwise equal to the result of a run that was not stopped. `data` and `network`
    are the objects that were passed to `train`, or None. A run that was killed before its first checkpoint starts
    again, so it needs the model that it started from. Raises the same errors as `train`.

    `changes` are new values of settings, by their bare names. Those that change no number of training are `FREE`. Those
    that change rounding, or the place of the data, must be named in `allow` if they differ from the run's own
    (`ALLOWED`). A resumed run keeps all others.

    `max_time` replaces the run's own `max_time`, for this process only. Without it, the run's own time begins again.

    The learning rate of a longer run is that of a run which had the new length from the beginning. A schedule that had
    fallen to its end therefore rises again at the first new step.
    """
    started = time.perf_counter() if started is None else started
    record = read_record(folder)
    processes = join_processes(record.config.run.process_seconds)
    with processes.reporting(), _locked(folder, processes):
        objects = OwnObjects(data, network)
        _check_objects(folder, record, objects)
        model = None
        if record.origin is not None and not Checkpoints(folder / "checkpoints").steps():
            model = open_again(record.config.start, str(folder), record.origin.sha256)
        changed, differences = changed_config(folder, record.config, changes, allow)
        config = changed if length is None else length.apply(changed)
        max_seconds = None if max_time is None else config.override(max_time=max_time).run.max_seconds
        try:
            setup = prepare(
                config, model=model, origin=record.origin, objects=objects, measure_test=measure_test,
                processes=processes,
            )  # fmt: skip
        except DataError as error:
            if data is not None or "does not exist" not in str(error):
                raise
            raise DataError(
                f"{error}. If the data of run {folder} was moved or renamed, add --data NEW --allow data"
            ) from None
        _check_data(folder, record, setup)
        _check_models(folder, record)
        processes.on_first(lambda: _check_unfinished(folder, record, setup.steps, extends=length is not None))
        check_probes((*setup.probes, *probes), setup.splits)
        processes.on_first(lambda: recover_folder(folder / "model"))
        with _same_arithmetic(setup.config):
            torch.manual_seed(record.config.run.seed)
            trained, setup, notes = make_network(setup, model)
            if differences:
                processes.on_first(lambda: replace_config(folder, setup.config))
            memory = _memory_of_resumed(setup)
            run = Execution(setup, folder, display or Display(), started, memory, max_seconds=max_seconds)
            before = record.config.total_steps(record.images)
            extends = None if length is None else before
            return run.go(trained, notes, probes, resuming=True, extends=extends, changes=differences)


def finished(folder: Path) -> RunResult | None:
    """Return the result of a complete run from its folder. For an incomplete run, return None.

    Raises `BundleError` if the model cannot be read.
    """
    for event in read_journal(folder / "journal.jsonl"):
        if event["event"] == "finished":
            summary = {name: value for name, value in event.items() if isinstance(value, int | float)}
            metrics = dict(event["metrics"])
            task = read_record(folder).config.task
            return RunResult(folder, load_bundle(folder / "model"), metrics, summary, (), task)
    return None


@contextmanager
def _locked(folder: Path, processes: Processes) -> Iterator[None]:
    """Hold the lock of a run's folder for all processes inside the `with` block."""
    with ExitStack() as stack:
        processes.on_first(lambda: stack.enter_context(locked(folder)))
        yield


def _write_record(setup: Setup, folder: Path) -> None:
    """Write run.json into a new folder. If this fails, delete the folder."""
    try:
        with saving("the run", folder):
            write_json(folder / "run.json", record_of(setup))
    except SaveError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _same_arithmetic(config: TrainConfig) -> Iterator[None]:
    """Compute inside the `with` block with the settings of a checked config, so that a resumed run computes the same
    bits."""
    with (
        float32_products(config.run.float32_products),
        compute_threads(config.run.compute_threads),
        deterministic_algorithms(enabled=config.run.deterministic),
    ):
        yield


def _check_objects(folder: Path, record: Record, objects: OwnObjects) -> None:
    """Raise `RunError` unless the run was started with objects of the same names."""
    if missing := [name for name in record.objects if name not in objects.names]:
        raise RunError(
            f"run {folder} was started with {_arguments(record.objects)} in Python; pass the same "
            f"{' and '.join(missing)} to vitrail.resume"
        )
    if further := [name for name in objects.names if name not in record.objects]:
        raise RunError(
            f"run {folder} was started without {_arguments(further)}; resume it without {_arguments(further)}"
        )


def _check_data(folder: Path, record: Record, setup: Setup) -> None:
    """Raise `RunError` if the data of a run is not what it was when the run began."""
    if record.fingerprint != setup.fingerprint:
        raise RunError(
            f"the data of run {folder} has changed since the run began: it had {record.images:,} training images then, "
            f"and has {len(setup.splits.train):,} now. If both numbers are equal, names, labels or another split "
            "have changed. To resume the run, restore its data"
        )


def _check_models(folder: Path, record: Record) -> None:
    """Raise `RunError` if a model that the run learns from has other weights than when the run began."""
    found = record.config.task.models()
    for name, sha256 in record.models:
        if found.get(name) != sha256:
            raise RunError(
                f"{name}={getattr(record.config.task, name)!r} has other weights now than when run {folder} began. To "
                "resume the run, restore the earlier model; to learn from the new model, start a new run"
            )


def _check_unfinished(folder: Path, record: Record, steps: int, *, extends: bool) -> None:
    """Raise `RunComplete` if a run is complete. A run that is extended to `steps` steps may be complete."""
    ended = next((event for event in read_journal(folder / "journal.jsonl") if event["event"] == "finished"), None)
    if extends:
        check_extension(folder, record, steps, None if ended is None else ended["step"])
    elif ended is not None:
        did = f"ended early, after {ended['step']:,}" if ended["step"] < steps else "has done all"
        raise RunComplete(
            f"run {folder} is complete, and nothing is left to do: it {did} of its {steps:,} steps. To train it "
            "further, give a larger total with --steps or --epochs"
        )


def _memory_of_resumed(setup: Setup) -> str:
    """Return a sentence about the memory that a resumed run needs. Its settings are fixed, so it is not refused."""
    try:
        return check_run_memory(setup.config, setup.network, setup.device, setup.processes)
    except ConfigError as error:
        return f"the run may end for lack of memory: {str(error).partition(';')[0]}"


def _arguments(names: Sequence[str]) -> str:
    return " and ".join(f"{name}=..." for name in names)
