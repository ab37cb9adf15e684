"""Train a model as a config describes: `train` starts a run, `resume` continues it, `finished` reads its result."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from vitrail.cores import compute_threads, share_cores
from vitrail.data.batch import Skipped
from vitrail.data.check.findings import quick_check
from vitrail.data.check.images import colour_note, images_of
from vitrail.data.source import Source
from vitrail.data.sources import OpenedData
from vitrail.data.splits import Splits
from vitrail.errors import (
    ConfigError,
    DataError,
    NonFiniteLoss,
    RunComplete,
    RunError,
    SaveError,
    Stopped,
    nearest,
    plural,
)
from vitrail.files import expanded, recover_folder, saving, write_json
from vitrail.machine import deterministic_algorithms, keep_freed_memory, peak_memory
from vitrail.models.linear.float32 import float32_products
from vitrail.models.vit_config import ViTConfig
from vitrail.processes.group import Processes, join_processes
from vitrail.settings import raise_problems, typed
from vitrail.tasks.own_model import BESIDE, beside, load_beside, load_weights, without_adapters, write_weights
from vitrail.tasks.task import Objective, Task
from vitrail.training.after_step import Run, before_first_step, checked_result, reader_trials
from vitrail.training.checkpoint import BestModel, Checkpoints
from vitrail.training.clock import MachineLimit, Timing
from vitrail.training.config import ALLOWED, LENGTHS, ON_RESUME, EarlyConfig, TrainConfig
from vitrail.training.folder import Record, locked, new_folder, outdate_pages, read_record, replace_config
from vitrail.training.job import (
    Job,
    Probe,
    check_run_memory,
    cost_text,
    evaluation_batch,
    object_names,
    phases_of,
    prepare,
    record_of,
    schedule_of,
)
from vitrail.training.log import Log, end_of, read_journal, tracking
from vitrail.training.loop import fit
from vitrail.training.optimizer import check_names
from vitrail.training.page import HeldOutExample, ProgressPage, write_examples, write_pictures
from vitrail.training.start import open_again, open_initial
from vitrail.training.state import TrainState, make_bundle, make_network, make_state
from vitrail.training.stop import StopRequest, interrupted_by_signals
from vitrail.weights.bundle import Bundle


def train(
    config: TrainConfig,
    *,
    data: Source | Splits | OpenedData | None = None,
    network: nn.Module | None = None,
    initial: Bundle | None = None,
    probes: Sequence[Probe] = (),
    measure_test: bool = True,
    log: Log | None = None,
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
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}; pass a TrainConfig, such as vitrail.RECIPES['demo']() or "
            "vitrail.TrainConfig()"
        )
    started = time.perf_counter() if started is None else started
    processes = join_processes(config.run.process_seconds)
    with processes.reporting():
        config = processes.from_first(config)
        raise_problems(config.new_problems())
        if initial is not None and config.start.init is None:
            raise ConfigError(
                "initial: a model was passed, but config.start.init does not say where it comes from; set init to its "
                "path or name"
            )
        model = typed(Bundle | None, initial, "initial") or open_initial(config.start)
        job = prepare(
            config, data=data, network=network, model=model, probes=probes, measure_test=measure_test,
            processes=processes,
        )  # fmt: skip
        memory = check_run_memory(job.config, job.network, job.device, processes)
        with _same_arithmetic(job, log):
            torch.manual_seed(config.run.seed)
            on_progress = log.extracting if log is not None and processes.is_first else None
            trained, job, notes = make_network(job, model, on_progress)
            del model, initial  # the new network has copies of their weights
            state = make_state(job, trained)
            notes += check_names(state.objective, job.config.optimizer)
            folder = processes.on_first(lambda: new_folder(job.config))
            with _locked(folder, processes):
                processes.on_first(lambda: _write_record(job, folder))
                if (words := job.words) is not None:
                    from vitrail.tasks.pairs import save_words  # runs without texts do not need it

                    processes.on_first(lambda: save_words(words, folder))
                run = open_run(job, folder, log, started)
                _announce(run, trained, notes, memory)
                run.log.tell("started", step=0, steps=job.steps)
                return _complete(run, state)


def resume(
    folder: str | Path,
    *,
    data: Source | Splits | OpenedData | None = None,
    network: nn.Module | None = None,
    probes: Sequence[Probe] = (),
    measure_test: bool = True,
    changes: Mapping[str, Any] = MappingProxyType({}),
    allow: Collection[str] | str = (),
    log: Log | None = None,
    started: float | None = None,
) -> RunResult:
    """Continue a run that was stopped or killed, from its newest complete checkpoint.

    In float32 on the CPU, the result is bitwise equal to the result of a run that was not stopped. `data` and `network`
    are the objects that were passed to `train`, or None. A run that was killed before its first checkpoint starts
    again, so it needs the model that it started from. Raises the same errors as `train`.

    `changes` are new values of settings, by their bare names. Those that change no number of training are free. Those
    that change rounding, or the place of the data, must be named in `allow` if they differ from the run's own
    (`ALLOWED`). A new `max_time` is for this process only; without one, the run's own time begins again. With `epochs`
    or `steps`, a larger total, a finished or stopped run becomes longer. A resumed run keeps all other settings.

    The learning rate of a longer run is that of a run which had the new length from the beginning. A schedule that had
    fallen to its end therefore rises again at the first new step.
    """
    started = time.perf_counter() if started is None else started
    if not isinstance(changes, Mapping):
        raise ConfigError(
            f"changes={changes!r:.60} is not a mapping of settings to new values, such as {{'epochs': 20}}"
        )
    length = {name: changes[name] for name in LENGTHS if changes.get(name) is not None}
    if len(length) > 1:
        raise ConfigError(
            f"epochs={length['epochs']} and steps={length['steps']}: a run is extended to a number of epochs or of "
            "steps; give one of them"
        )
    record = read_record(folder := expanded(typed(str, folder, "folder")))
    processes = join_processes(record.config.run.process_seconds)
    with processes.reporting(), _locked(folder, processes):
        _check_objects(folder, record, object_names(data, network))
        model = None
        if record.origin is not None and not Checkpoints(folder / "checkpoints").steps():
            model = open_again(record.config.start, str(folder), record.origin)
        config, differences = changed_config(folder, record.config, changes, allow)
        config = config.override(**length)
        max_seconds = config.override(max_time=changes.get("max_time")).run.max_seconds
        try:
            job = prepare(
                config, data=data, network=network, model=model, origin=record.origin, probes=probes,
                measure_test=measure_test, processes=processes,
            )  # fmt: skip
        except DataError as error:
            if data is not None or "does not exist" not in str(error):
                raise
            raise DataError(
                f"{error}. If the data of run {folder} was moved or renamed, add --data NEW --allow data"
            ) from None
        _check_sources(folder, record, job)
        processes.on_first(lambda: _check_unfinished(folder, record, job.steps, extends=bool(length)))
        processes.on_first(lambda: recover_folder(folder / "model"))
        from vitrail.tasks.pairs import saved_words

        with _same_arithmetic(job, log):
            torch.manual_seed(record.config.run.seed)
            trained, job, notes = make_network(replace(job, words=saved_words(folder)), model)
            if differences:
                processes.on_first(lambda: replace_config(folder, job.config))
            try:
                memory = check_run_memory(job.config, job.network, job.device, processes)
            except ConfigError as error:  # its settings are fixed, so the run is not refused
                memory = f"the run may end for lack of memory: {str(error).partition(';')[0]}"
            before = record.config.total_steps(record.images)
            run, state = open_run(job, folder, log, started, max_seconds), make_state(job, trained)
            for note in _restore(run, state):
                run.log.note(note)
            _announce(run, trained, notes, memory)
            if state.step:
                run.log.say(f"continuing after step {state.step:,} of {job.steps:,}")
            details: dict[str, Any] = {"extends": before} if length else {}
            if differences:
                details["changes"] = {name: list(values) for name, values in differences.items()}
            if length:
                _say_stretched(run, state, before)
            run.log.tell("resumed", step=state.step, steps=job.steps, **details)
            if length:
                state.best.waited = 0  # otherwise a run that --patience ended would end again at once
                processes.on_first(lambda: _record_extension(folder, job, state.step, before))
            return _complete(run, state)


def finished(folder: Path) -> RunResult | None:
    """Return the result of a complete run from its folder. For an incomplete run, return None.

    Raises `BundleError` if the model cannot be read.
    """
    if (event := end_of(read_journal(folder / "journal.jsonl"))) is None:
        return None
    summary = {name: value for name, value in event.items() if isinstance(value, int | float)}
    task = read_record(folder).config.task
    from vitrail.weights.load import load  # other layouts, which a run from scratch does not need

    return RunResult(folder, load(folder / "model"), dict(event["metrics"]), summary, (), task)


@contextmanager
def _locked(folder: Path, processes: Processes) -> Iterator[None]:
    """Hold the lock of a run's folder for all processes inside the `with` block."""
    with ExitStack() as stack:
        processes.on_first(lambda: stack.enter_context(locked(folder)))
        yield


def _write_record(job: Job, folder: Path) -> None:
    """Write run.json into a new folder. If this fails, delete the folder."""
    try:
        with saving("the run", folder):
            write_json(folder / "run.json", record_of(job))
    except SaveError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


ONE_RUN = threading.RLock()
"""Held by the run that trains in this process. Random numbers and settings of PyTorch belong to the whole process, so a
run in another thread waits."""


@contextmanager
def _same_arithmetic(job: Job, log: Log | None) -> Iterator[None]:
    """Compute inside the `with` block with the settings of a checked config, so that a resumed run computes the same
    bits, and with gradients. The caller's random state stays as it was. `log` is the caller's."""
    if log is not None and not isinstance(log, Log):
        raise ConfigError(f"log is a {type(log).__name__}; pass a Log with your functions as listeners: Log(print)")
    share_cores()
    if ONE_RUN.acquire(blocking=False):
        ONE_RUN.release()
    elif log is not None:
        log.note(
            "another thread of this process trains a run, so this run waits until that one ends; if an evaluator or a "
            "hook of that run waits for this thread, neither ends"
        )
    config = job.config
    with (
        ONE_RUN,
        torch.random.fork_rng([job.device] if job.device.type == "cuda" else []),
        torch.inference_mode(False),
        torch.enable_grad(),
        float32_products(config.run.float32_products),
        compute_threads(config.run.compute_threads),
        deterministic_algorithms(enabled=config.run.deterministic),
    ):
        yield


def _check_objects(folder: Path, record: Record, names: Sequence[str]) -> None:
    """Raise `RunError` unless the run was started with objects of the same names."""
    if missing := [name for name in record.objects if name not in names]:
        raise RunError(
            f"run {folder} was started with {_arguments(record.objects)} in Python; pass the same "
            f"{' and '.join(missing)} to vitrail.resume"
        )
    if further := [name for name in names if name not in record.objects]:
        raise RunError(
            f"run {folder} was started without {_arguments(further)}; resume it without {_arguments(further)}"
        )


def _check_sources(folder: Path, record: Record, job: Job) -> None:
    """Raise `RunError` if the data of a run, or the weights of a model that it learns from, are not what they were when
    the run began."""
    if (record.fingerprint, record.classes) != (job.fingerprint, job.splits.classes):
        raise RunError(
            f"the data of run {folder} has changed since the run began: it had {record.images:,} training images then, "
            f"and has {len(job.splits.train):,} now. If both numbers are equal, names, labels, classes or another "
            "split have changed. To resume the run, restore its data"
        )
    found = record.config.task.models()
    for name, sha256 in record.models:
        if found.get(name) != sha256:
            raise RunError(
                f"{name}={getattr(record.config.task, name)!r} has other weights now than when run {folder} began. To "
                "resume the run, restore the earlier model; to learn from the new model, start a new run"
            )


def _check_unfinished(folder: Path, record: Record, steps: int, *, extends: bool) -> None:
    """Raise `RunComplete` if a run is complete. A run that is extended to `steps` steps may be complete."""
    ended = end_of(read_journal(folder / "journal.jsonl"))
    if extends:
        _check_extension(folder, record, steps, None if ended is None else ended["step"])
    elif ended is not None:
        did = f"ended early, after {ended['step']:,}" if ended["step"] < steps else "has done all"
        raise RunComplete(
            f"run {folder} is complete, and nothing is left to do: it {did} of its {steps:,} steps. To train it "
            "further, give a larger total with --steps or --epochs"
        )


def _arguments(names: Sequence[str]) -> str:
    return " and ".join(f"{name}=..." for name in names)


# What a resumed run may change: settings that change no number, those that the user allows, and a longer length. A run
# keeps its other settings, because its curve would otherwise not be that of one experiment.


def changed_config(
    folder: Path, config: TrainConfig, changes: Mapping[str, Any], allow: Collection[str] = ()
) -> tuple[TrainConfig, dict[str, tuple[Any, Any]]]:
    """Return the config of a run in `folder` with some settings changed, and the settings that differ from those of the
    run, with their values before and now. The length of the run and the time of a process stay as they are.

    Raises `ConfigError` for settings that a run keeps, and for differences that are not among the names in `allow`. The
    message names all of them.
    """
    allow = (allow,) if isinstance(allow, str) else allow
    raise_problems(
        f"allow={name!r} is not a setting that may change; {nearest(name, ALLOWED)}"
        for name in allow
        if name not in ALLOWED
    )
    wanted = {name: value for name, value in changes.items() if name not in (*LENGTHS, "max_time")}
    found = [
        f"{name}={value!r} cannot change, because run {folder} keeps the settings that it began with; leave {name} "
        "out, or start a new run"
        for name, value in wanted.items()
        if name not in ON_RESUME
    ]
    before = {
        name: config.data.spec if name == "data" else getattr(config.run, name) for name in wanted if name in ON_RESUME
    }
    differences = {name: (value, wanted[name]) for name, value in before.items() if value != wanted[name]}
    missing = [name for name in differences if name in ALLOWED and name not in allow]
    together = ",".join(dict.fromkeys([*allow, *missing]))
    found += [
        f"{name}={differences[name][1]!r} differs from {differences[name][0]!r}, with which run {folder} began, and "
        f"{ALLOWED[name]}; leave {name} out, or accept the change with --allow {together}"
        for name in missing
    ]
    raise_problems(found)
    return config.override(**wanted), differences


def _check_extension(folder: Path, record: Record, steps: int, finished_at: int | None) -> None:
    """Raise `RunError` unless a run can be extended to `steps` optimizer steps in total.

    `finished_at` is the last step of a finished run, whose checkpoint is needed, or None.
    """
    before = record.config.total_steps(record.images)
    if steps <= before:
        epochs = before * record.config.mean_batch_size / record.images
        raise RunError(
            f"run {folder} has {before:,} steps ({epochs:.3g} epochs), and {steps:,} steps are not more; a run can "
            "only be made longer: choose a larger total"
        )
    checkpoints = Checkpoints(folder / "checkpoints")
    if finished_at is not None and finished_at not in checkpoints.steps():
        raise RunError(
            f"run {folder} cannot be extended, because the checkpoint of its end, {checkpoints.folder}/step-"
            f"{finished_at}, is gone; to train its model further, start a new run with --init {folder}/model"
        )


def _record_extension(folder: Path, job: Job, step: int, before: int) -> None:
    """Replace the config and the length of a run in run.json, and add the extension to its list. Raises
    `SaveError`."""
    values: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    extensions = [*values.get("extensions", ()), {"after": step, "from": before, "to": job.steps}]
    replace_config(folder, job.config, steps=job.steps, extensions=extensions)


# The parts of `train` and `resume`: opening the run, its steps, and the messages before them.


def open_run(
    job: Job,
    folder: Path,
    log: Log | None,
    started: float,
    max_seconds: float | None = None,
) -> Run:
    """Return the run in its folder.

    `log` is the caller's. The run's own log also keeps the journal, in the first process. `max_seconds` is the time
    after `started` at which this process stops. By default it is that of the config.
    """
    processes, best = job.processes, BestModel(folder)
    listeners = log.listeners if log is not None and processes.is_first else ()
    own_log = Log(*listeners, path=folder / "journal.jsonl" if processes.is_first else None)
    checkpoints = Checkpoints(
        folder / "checkpoints",
        processes=processes,
        in_background=job.config.run.background_checkpoints,
        log=own_log,
        best=best,
    )
    # Processes share the images of an evaluation batch by batch, although their machines can differ.
    evaluated_at_once = processes.from_first(evaluation_batch(job.config, job.network))
    keep_freed_memory()
    max_seconds = job.config.run.max_seconds if max_seconds is None else max_seconds
    stop = StopRequest(None if max_seconds is None else started + max_seconds)
    return Run(job, folder, own_log, checkpoints, best, Timing(job, started), stop, evaluated_at_once)


def _complete(run: Run, state: TrainState) -> RunResult:
    """Take the steps that are left, and finish the run."""
    job, log = run.job, run.log
    if log.path is not None:
        metric = job.config.task.selection(job.splits)
        log.listeners.append(ProgressPage(run.folder, job.config, metric, job.steps).receive)
    with tracking(job.config.run.track, run.folder, job.config.to_plain(), log, state.step):
        _train(run, state)
        try:
            with interrupted_by_signals():
                if any(job.processes.gather(run.stop.is_asked)):  # too late for the last step to see it
                    raise KeyboardInterrupt
                result = finish(run, state)
        except KeyboardInterrupt:
            log.tell("stopped", step=state.step)
            raise Stopped("stopped before the finished model was measured and saved", run.folder) from None
        # Outside of the `with` block, so that a signal does not record a complete run as stopped.
        metrics, examples = result.metrics, {"examples": result.examples}
        log.tell("finished", examples, step=state.step, metrics=metrics, **result.summary)
        return result


def _train(run: Run, state: TrainState) -> None:
    """Take the steps that are left. Signals stop the run meanwhile."""
    job, log = run.job, run.log
    with run.stop:
        has_limit = all(phase.flops for phase in job.phases)
        run.clock.begin(state.step, MachineLimit(job, log, state) if has_limit else None)
        run.trials = reader_trials(job, state)
        log.show("begin", step=state.step, steps=job.steps, task=job.config.task)
        try:
            with closing(run.checkpoints):
                if state.step == 0:
                    before_first_step(run, state, evaluates=_may_keep_start(job))
                fit(run, state)
        except NonFiniteLoss as error:
            log.tell("failed", step=state.step, reason=str(error))
            if not _may_keep_start(job) or state.best.step < 0:
                kept = "there is no checkpoint yet"
                if steps := run.checkpoints.steps():
                    kept = f"the last good checkpoint is {run.checkpoints.folder}/step-{steps[0]}"
                raise NonFiniteLoss(
                    f"{error}: the run diverged, and {kept}. Try a lower --learning-rate, a longer --warmup, or "
                    "--precision float32"
                ) from None
            log.note(f"{error}: the run diverged, so the best weights before, of step {state.best.step:,}, stay")
        finally:
            log.show("end")
            state.batches.close()


def _may_keep_start(job: Job) -> bool:
    """Return True if the initial weights can be the best: the run starts from a linear model of features."""
    return job.config.start.linear_head and job.config.run.keep == "best"


def _restore(run: Run, state: TrainState) -> list[str]:
    """Load the newest checkpoint, and return notes for the user. Without a checkpoint, the run starts again."""
    if run.job.processes.on_first(run.checkpoints.steps):
        return run.checkpoints.restore(state)
    return ["the run ended before its first checkpoint, so it starts from the beginning"]


def _say_stretched(run: Run, state: TrainState, before: int) -> None:
    """Note if the learning rate of the next step is higher than that of the last one, or if early settings end later,
    because the schedule and the phases of a run that had `before` steps are stretched to its new length."""
    job, step = run.job, state.step
    if not step:
        return
    last, following = schedule_of(job.config, job.splits, before)(step - 1), job.schedule(step)
    if following > last:
        run.log.note(
            f"the learning rate rises from {last:.3g} to {following:.3g}, because the schedule is now that of a run of "
            f"{job.steps:,} steps (docs/train.md)"
        )
    if job.work(step) < replace(job, phases=phases_of(job.config, job.network, before)).work(step):
        run.log.note(
            f"the early settings end at step {job.phases[-1].first:,}, as in a run of {job.steps:,} steps, and the "
            "next images are those of such a run"
        )


def _announce(run: Run, network: nn.Module, notes: Sequence[str], memory: str) -> None:
    """Show notes about the start and the data, and sentences about the memory, the page and the run."""
    job, log = run.job, run.log
    for note in (*notes, *job.splits.notes):
        log.note(note)
    if isinstance(job.network, ViTConfig) and (note := job.network.attention_kind.note()):
        log.note(note)
    if note := colour_note(images_of(job.splits.train), job.config.images.channels):
        log.note(f"{note}; to learn from colours, choose channels=3")
    for line in quick_check(job.splits):
        log.say(line)
    log.say(memory)
    log.say(f"{run.folder / 'progress.html'} shows the curves during the run")
    log.say(f"{_summary(job, network)}, into {run.folder}")
    if job.config.early != EarlyConfig() and job.network is not None:
        log.say(cost_text(job.phases, job.network, job.config.task))


COMPILED = {"off": "", "on": ", compiled", "graphs": ", compiled into CUDA graphs"}


def _summary(job: Job, network: nn.Module) -> str:
    """Return a sentence about the network, the data, the length of the run and the device."""
    config = job.config
    parameters = list(network.parameters())
    count = sum(one.numel() for one in parameters)
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    name = config.start.init or config.model.name if job.own_network is None else type(network).__name__
    names = config.task.output_names(job.splits)
    outputs = plural(len(names), config.task.output_noun) if names else "without a head"
    return (
        f"{name} with {count:,} parameters{f', {trained:,} of them trained,' if trained < count else ''} on "
        f"{len(job.splits.train):,} images, {outputs}: {plural(job.steps, 'step')} of {config.run.batch_size} in "
        f"{config.run.precision} on {job.device}{COMPILED[job.compile]}"
        f"{f', shared by {job.processes.world} processes' if job.processes.are_several else ''}"
    )


# The end of a run: the kept weights are measured on the held-out splits and saved, with examples and pictures.


MAX_KEPT = 2**24
"""Maximum number of outputs of a split that a run returns (64 MB)."""


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    folder: Path
    bundle: Bundle
    """The model, which is saved in `folder / "model"`, in evaluation mode. If the network is of the user's own class,
    only the weights are saved. If weights are sharded, only the first process has the model's weights, in main
    memory."""
    metrics: dict[str, float]
    """Metrics of the model on the held-out splits: `validation_accuracy`, and `test_accuracy` if there is a test split.
    Other tasks have other metrics, such as `test_r2`."""
    summary: dict[str, float]
    """Optimizer steps, seconds, images per second, fraction of the time spent waiting for data, and peak memory in
    bytes."""
    examples: tuple[HeldOutExample, ...]
    """A few held-out images, saved as files, with the model's predictions."""
    task: Task
    """The task that the model was trained for."""
    predictions: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Outputs of the model by the name of the held-out split: `Predictions`, or what a model of boxes or masks answers
    (`Answered`). A split with more than `MAX_KEPT` outputs of classes is missing."""

    def texts(self, split: str) -> list[str]:
        """Return the metrics of a split as texts with their names, such as "accuracy 89.30%".

        Those of "train" are means over the last training steps, with augmentation."""
        return self.task.texts_of(split, self.summary | self.metrics)


def finish(run: Run, state: TrainState) -> RunResult:
    """Load the weights that the config keeps, measure the model on the held-out splits, and write the model."""
    job, folder, processes = run.job, run.folder, run.job.processes
    summary = {
        "steps": float(state.step),
        **{f"train_{name}": value for name, value in run.means.read().items()},
        **run.clock.summary(),
        "peak_memory_bytes": float(peak_memory(job.device)),
    }
    if state.average is not None:
        state.average.swap()  # no swap back, because no step follows
    bundle = make_bundle(job, state.saved_objective())
    if job.config.start.lora_rank is not None:
        bundle = without_adapters(bundle)
    bundle.provenance["step"] = state.step
    is_best = job.config.run.keep == "best" and state.best.step >= 0
    if is_best:
        processes.on_first(lambda: load_weights(bundle, folder / "model"))
        processes.on_first(lambda: load_beside(state.kept, folder / BESIDE))
        bundle.provenance["step"] = state.best.step
    measured = bundle
    if state.streamed is not None:  # sharded weights are measured, and those of the first process are saved
        if is_best:
            state.streamed.scatter(state.objective)
        measured = make_bundle(job, state.whole_objective())
        state.streamed.copy_rest(measured.network, bundle.network)
        measured.provenance, measured.metrics = bundle.provenance, bundle.metrics
    elif is_best:
        processes.copy_from_first(bundle.network.state_dict().values())
        processes.copy_from_first(beside(state.kept).values())
        if bundle.words is not None:  # their numbers are those of the last step
            bundle = measured = replace(bundle, words=make_bundle(job, state.kept).words)
    predictions = _measure(run, state, measured)
    bundle.metrics = measured.metrics
    processes.on_first(lambda: outdate_pages(folder))
    processes.on_first(lambda: write_weights(bundle, folder / "model"))
    processes.on_first(run.best.forget)
    held_out = job.splits.held_out
    source = held_out[1] if held_out else job.splits.train
    examples = processes.on_first(lambda: write_examples(bundle, source, folder / "examples"))
    processes.on_first(lambda: _write_pictures(run, bundle, state.kept, source))
    bundle.network.eval()  # as the model that `load` returns
    return RunResult(folder, bundle, bundle.metrics, summary, examples, job.config.task, predictions)


def _write_pictures(run: Run, bundle: Bundle, objective: Objective, source: Source) -> None:
    """Write a report with the task's pictures, if it has any."""
    config = run.job.config
    name = config.start.init or config.model.name
    heading = f"{name}, pre-trained by {config.task.name} on {config.data.spec}, {plural(run.job.steps, 'step')}."
    results = [
        (split, text) for split in ("validation", "test") for text in config.task.texts_of(split, bundle.metrics)
    ]
    write_pictures(run.folder, heading, results, config.task.pictures(objective, bundle, source))


def _measure(run: Run, state: TrainState, bundle: Bundle) -> dict[str, Any]:
    """Measure the finished model on the held-out splits, and add the metrics to it. Return its outputs."""
    task, splits, split = run.job.config.task, run.job.splits, ""

    def skip(item: Skipped) -> None:
        run.log.tell("skipped", step=state.step, split=split, key=item.key, reason=item.reason)

    outputs = run.outputs(state, bundle, skip, keep=MAX_KEPT)
    predictions: dict[str, Any] = {}
    evaluator = task.evaluator(state.copy or state.objective)
    for split, source in (("validation", splits.validation), ("test", splits.test)):
        if source is not None:
            found = evaluator(outputs, splits.train, source)
            state.settle()
            result = checked_result(task, found, state.step)
            values = {"split": split, "weights": state.measured, "kept": True, **result}
            run.log.tell("evaluation", step=bundle.provenance["step"], **values)
            bundle.metrics |= {f"{split}_{name}": value for name, value in task.summary(result).items()}
            if (kept := outputs.kept(source)) is not None:
                predictions[split] = kept
    return predictions
