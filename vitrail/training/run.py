"""Train a model as a config describes: `train` starts a run, `resume` continues it, `finished` reads its result."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from vitrail.cores import compute_threads
from vitrail.data.batch import Skipped
from vitrail.data.check.findings import quick_check
from vitrail.data.check.images import colour_note, images_of
from vitrail.data.source import Source
from vitrail.data.sources import OpenedData
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError, NonFiniteLoss, RunComplete, RunError, SaveError, plural
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.predictions import Predictions
from vitrail.files import recover_folder, saving, write_json
from vitrail.machine import deterministic_algorithms, keep_freed_memory
from vitrail.models.linear.float32 import float32_products
from vitrail.models.vit_config import ViTConfig
from vitrail.processes.group import Processes, join_processes
from vitrail.tasks.own_model import BESIDE, beside, load_beside, load_weights, without_adapters, write_weights
from vitrail.tasks.task import Objective, Task
from vitrail.training.after_step import Examiner, Intervals, Monitor, Sinks, check_finite
from vitrail.training.build import make_bundle, make_network, make_plan, make_state
from vitrail.training.checkpoint import BestModel, Checkpoints
from vitrail.training.clock import MachineLimit, product_limit
from vitrail.training.config import TrainConfig
from vitrail.training.folder import Record, locked, new_folder, read_record, replace_config
from vitrail.training.job import (
    OwnObjects,
    Plan,
    Probe,
    Setup,
    check_probes,
    check_run_memory,
    cost_text,
    evaluation_batch,
    prepare,
    record_of,
    schedule_of,
)
from vitrail.training.log import Log, read_journal, tracking
from vitrail.training.loop import fit
from vitrail.training.page import HeldOutExample, ProgressPage, write_examples, write_pictures
from vitrail.training.resuming import Length, changed_config, check_extension, record_extension
from vitrail.training.sharding import StreamedCopy
from vitrail.training.start import open_again, open_initial
from vitrail.training.state import TrainState
from vitrail.training.stop import StopRequest
from vitrail.weights.bundle import Bundle, load_bundle


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
    started = time.perf_counter() if started is None else started
    processes = join_processes(config.run.process_seconds)
    with processes.reporting():
        config = processes.from_first(config)
        return _train(config, processes, data, network, initial, probes, measure_test, log, started)


def _train(
    config: TrainConfig,
    processes: Processes,
    data: Source | Splits | OpenedData | None,
    network: nn.Module | None,
    initial: Bundle | None,
    probes: Sequence[Probe],
    measure_test: bool,
    log: Log | None,
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
        log = log if log is not None and processes.is_first else Log()
        trained, setup, notes = make_network(setup, model, log.extracting)
        del model, initial  # the new network has copies of their weights
        folder = processes.on_first(lambda: new_folder(setup.config))
        with _locked(folder, processes):
            processes.on_first(lambda: _write_record(setup, folder))
            return Execution(setup, folder, log or Log(), started, memory).go(trained, notes, probes)


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
    log: Log | None = None,
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
            run = Execution(setup, folder, log or Log(), started, memory, max_seconds=max_seconds)
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


# The execution of one run: from a network or the newest checkpoint to the last step.


class Execution:
    """One run, from a network or the newest checkpoint to the finished model."""

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        log: Log,
        started: float,
        memory: str,
        *,
        max_seconds: float | None = None,
    ) -> None:
        """`max_seconds` is the time after `started` at which this process stops. By default it is that of the config.
        It is not recorded in the run's folder."""
        self.setup = setup
        self.folder = folder
        self.processes = setup.processes
        self.log = Log(*log.listeners, path=folder / "journal.jsonl") if setup.processes.is_first else Log()
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            processes=setup.processes,
            in_background=setup.config.run.background_checkpoints,
            on_saved=lambda step, path: self.log.tell("checkpoint", step=step, path=path.name),
            on_restored=lambda state: self.processes.on_first(lambda: self.best.put_back(state.best.step)),
        )
        self.best = BestModel(folder)
        # Processes share the images of an evaluation batch by batch, although their machines can differ.
        self.evaluation_batch = setup.processes.from_first(evaluation_batch(setup.config, setup.network))
        self.started = started
        self.max_seconds = setup.config.run.max_seconds if max_seconds is None else max_seconds
        self.memory = memory
        """A sentence about the memory that the run needs."""

    def go(
        self,
        network: nn.Module,
        notes: tuple[str, ...],
        probes: Sequence[Probe],
        *,
        resuming: bool = False,
        extends: int | None = None,
        changes: Mapping[str, tuple[Any, Any]] = MappingProxyType({}),
    ) -> RunResult:
        """Train the network, and save the model. `extends` is the former number of steps of a run that is extended.
        `changes` are the settings that a resumed run changes, with their values before and now."""
        setup, log = self.setup, self.log
        keep_freed_memory()
        state, plan = make_state(setup, network), make_plan(setup)
        for note in self._restore(state) if resuming else ():
            log.note(note)
        self._announce(network, notes)
        if state.step:
            log.say(f"continuing after step {state.step:,} of {setup.steps:,}")
        if extends is not None and state.step and (note := self._rise(plan, state.step, extends)):
            log.note(note)
        extension: dict[str, Any] = {} if extends is None else {"extends": extends}
        if changes:
            extension["changes"] = {name: list(values) for name, values in changes.items()}
        log.tell("resumed" if resuming else "started", step=state.step, steps=setup.steps, **extension)
        if extends is not None:
            state.best.waited = 0  # otherwise a run that --patience ended would end again at once
            longer = {"step": state.step, "before": extends, "steps": setup.steps}
            self.processes.on_first(lambda: record_extension(self.folder, setup.config, **longer))
        if log.path is not None:
            metric = setup.config.task.selection(setup.splits)
            log.listeners.append(ProgressPage(self.folder, setup.config, metric, setup.steps).receive)
        with tracking(setup.config.run.track, self.folder, setup.config.to_plain(), log, state.step):
            monitor = self._train(state, plan, probes)
            finish = Finish(setup, self.folder, log, self.best, partial(self._outputs, state))
            return finish(state, monitor.summary(setup.device))

    def _rise(self, plan: Plan, step: int, before: int) -> str:
        """Return a note if the learning rate of the next step is higher than that of the last one, because the schedule
        of a run that had `before` steps is stretched to its new length. Return "" otherwise."""
        last = schedule_of(self.setup.config, self.setup.splits, before)(step - 1)
        if (following := plan.schedule(step)) <= last:
            return ""
        return (
            f"the learning rate rises from {last:.3g} to {following:.3g}, because the schedule is now that of a run of "
            f"{self.setup.steps:,} steps (docs/train.md)"
        )

    def _train(self, state: TrainState, plan: Plan, probes: Sequence[Probe]) -> Monitor:
        """Take the steps that are left, and return the monitor that received them. Signals stop the run meanwhile."""
        setup, log = self.setup, self.log
        with StopRequest(None if self.max_seconds is None else self.started + self.max_seconds) as stop:
            sinks = Sinks(log, self.checkpoints)
            monitor = Monitor(
                state,
                plan,
                sinks,
                _intervals(setup),
                self._examiner(state, sinks, probes),
                stop=stop,
                started=self.started,
                on_readers=lambda threads: replace_config(self.folder, setup.config.override(threads=threads)),
                limit=self._limit(state, plan),
            )
            log.show("begin", step=state.step, steps=setup.steps, task=setup.config.task)
            try:
                with closing(self.checkpoints):
                    if state.step == 0:
                        monitor.before_first_step(evaluates=self._may_keep_start)
                    fit(state, plan, monitor)
            except NonFiniteLoss as error:
                log.tell("failed", step=state.step, reason=str(error))
                if not self._may_keep_start or state.best.step < 0:
                    raise NonFiniteLoss(_advice(error, self.checkpoints)) from None
                log.note(f"{error}: the run diverged, so the best weights before, of step {state.best.step:,}, stay")
            finally:
                log.show("end")
                state.batches.close()
        return monitor

    def _limit(self, state: TrainState, plan: Plan) -> MachineLimit | None:
        """Measure the machine's limit for the speed of the steps, and write it into the journal. Return None if the
        FLOPs of some steps are unknown."""
        if not all(phase.flops for phase in plan.phases):
            return None

        def measure(again: bool) -> float:
            found = product_limit(plan.precision, plan.device, self.processes, again=again)
            threads = torch.get_num_threads() if plan.device.type == "cpu" else None
            settings = {"precision": plan.precision, "threads": threads}
            self.log.tell("limit", step=state.step, flops_per_second=found, **settings)
            return found

        def give_up() -> None:
            self.log.tell("limit too low", step=state.step)

        return MachineLimit(measure, give_up, self.processes)

    @property
    def _may_keep_start(self) -> bool:
        """True if the initial weights can be the best: the run starts from a linear model of features."""
        config = self.setup.config
        return config.start.linear_head and config.run.keep == "best"

    def _restore(self, state: TrainState) -> list[str]:
        """Load the newest checkpoint, and return notes for the user. Without a checkpoint, the run starts again."""
        if self.processes.on_first(self.checkpoints.steps):
            return self.checkpoints.restore(state)
        return ["the run ended before its first checkpoint, so it starts from the beginning"]

    def _examiner(self, state: TrainState, sinks: Sinks, probes: Sequence[Probe]) -> Examiner:
        setup = self.setup
        return Examiner(
            setup.config.task,
            state,
            setup.splits,
            sinks,
            model=lambda: make_bundle(setup, state.whole_objective()),
            saved=lambda: make_bundle(setup, state.saved_objective()),
            outputs=partial(self._outputs, state),
            best=self.best if setup.config.run.keep == "best" else None,
            probes=(*setup.probes, *probes),
            processes=self.processes,
        )

    def _outputs(
        self,
        state: TrainState,
        bundle: Bundle,
        *,
        keep: int = 0,
        on_skip: Callable[[Skipped], None] | None = None,
    ) -> Outputs:
        """Return the outputs of a model for an evaluation, whose images all processes share."""
        return Outputs(
            bundle,
            batch_size=self.evaluation_batch,
            readers=self.setup.readers,
            keep=keep,
            on_skip=on_skip,
            processes=self.processes,
            settle=state.settle,
        )

    def _announce(self, network: nn.Module, notes: tuple[str, ...]) -> None:
        setup = self.setup
        for note in (*notes, *setup.splits.notes):
            self.log.note(note)
        if isinstance(setup.network, ViTConfig) and (note := setup.network.attention_kind.note()):
            self.log.note(note)
        if note := colour_note(images_of(setup.splits.train), setup.config.images.channels):
            self.log.note(f"{note}; to learn from colours, choose channels=3")
        for line in quick_check(setup.splits):
            self.log.say(line)
        self.log.say(self.memory)
        self.log.say(f"{self.folder / 'progress.html'} shows the curves during the run")
        self.log.say(f"{_summary(setup, network)}, into {self.folder}")
        if len(setup.phases) > 1 and setup.network is not None:
            self.log.say(cost_text(setup.phases, setup.network, setup.config.task))


COMPILED = {"off": "", "on": ", compiled", "graphs": ", compiled into CUDA graphs"}


def _intervals(setup: Setup) -> Intervals:
    config, validation = setup.config.run, setup.splits.validation

    def every(count: int) -> int:
        return math.ceil(setup.steps / count)

    return Intervals(
        journal=min(50, every(100)),
        evaluate=every(config.evaluations) if validation is not None and config.evaluations else None,
        checkpoint=every(config.checkpoints),
    )


def _summary(setup: Setup, network: nn.Module) -> str:
    """Return a sentence about the network, the data, the length of the run and the device."""
    config = setup.config
    parameters = list(network.parameters())
    count = sum(one.numel() for one in parameters)
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    name = config.start.init or config.model.name if setup.objects.network is None else type(network).__name__
    names = config.task.output_names(setup.splits)
    outputs = plural(len(names), config.task.output_noun) if names else "without a head"
    return (
        f"{name} with {count:,} parameters{f', {trained:,} of them trained,' if trained < count else ''} on "
        f"{len(setup.splits.train):,} images, {outputs}: {setup.steps:,} steps of {config.run.batch_size} in "
        f"{config.run.precision} on {setup.device}{COMPILED[setup.compile]}"
        f"{f', shared by {setup.processes.world} processes' if setup.processes.are_several else ''}"
    )


def _advice(error: NonFiniteLoss, checkpoints: Checkpoints) -> str:
    """Return the message of a run that diverged."""
    kept = "there is no checkpoint yet"
    if steps := checkpoints.steps():
        kept = f"the last good checkpoint is {checkpoints.folder}/step-{steps[0]}"
    return (
        f"{error}: the run diverged, and {kept}. Try a lower --learning-rate, a longer --warmup, or --precision float32"
    )


# The end of a run: the kept weights are measured on the held-out splits and saved, with examples and pictures.


MAX_KEPT = 2**24
"""Maximum number of outputs of a split that a run returns (64 MB)."""


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    folder: Path
    bundle: Bundle
    """The model, which is saved in `folder / "model"`. If the network is of the user's own class, only the weights are
    saved. If weights are sharded, only the first process has the model's weights, in main memory."""
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
    predictions: Mapping[str, Predictions] = field(default_factory=dict)
    """Outputs of the model by the name of the held-out split. A split with more than `MAX_KEPT` outputs is missing."""

    def texts(self, split: str) -> list[str]:
        """Return the metrics of a split as texts with their names, such as "accuracy 89.30%".

        Those of "train" are means over the last training steps, with augmentation."""
        start, found = f"{split}_", self.summary | self.metrics
        values = {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}
        return self.task.texts(values)


class Finish:
    """Turns the state after the last step into the finished model on the disk."""

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        log: Log,
        best: BestModel,
        outputs: Callable[..., Outputs],
    ) -> None:
        """`outputs` returns the outputs of a model for an evaluation, with the arguments `keep` and `on_skip` of
        `Outputs`."""
        self.setup = setup
        self.folder = folder
        self.log = log
        self.best = best
        self.outputs = outputs

    def __call__(self, state: TrainState, summary: dict[str, float]) -> RunResult:
        """Load the weights that the config keeps, measure the model on the held-out splits, and write the model."""
        setup, folder, processes = self.setup, self.folder, self.setup.processes
        if state.average is not None:
            state.average.swap()  # no swap back, because no step follows
        bundle = make_bundle(setup, state.saved_objective())
        if setup.config.start.lora_rank is not None:
            bundle = without_adapters(bundle)
        bundle.provenance["step"] = state.step
        is_best = setup.config.run.keep == "best" and state.best.step >= 0
        if is_best:
            processes.on_first(lambda: load_weights(bundle, folder / "model"))
            processes.on_first(lambda: load_beside(state.kept, folder / BESIDE))
            bundle.provenance["step"] = state.best.step
        if state.streamed is not None:
            predictions = self._measure_streamed(bundle, state, state.streamed, is_best=is_best)
        else:
            if is_best:
                processes.copy_from_first(bundle.network.state_dict().values())
                processes.copy_from_first(beside(state.kept).values())
            predictions = self._measure(bundle, state)
        processes.on_first(lambda: write_weights(bundle, folder / "model"))
        processes.on_first(self.best.forget)
        held_out = setup.splits.held_out
        source = held_out[1] if held_out else setup.splits.train
        examples = processes.on_first(lambda: write_examples(bundle, source, folder / "examples"))
        processes.on_first(lambda: self._write_pictures(bundle, state.kept, source))
        self.log.tell("finished", step=state.step, metrics=bundle.metrics, **summary)
        return RunResult(folder, bundle, bundle.metrics, summary, examples, setup.config.task, predictions)

    def _write_pictures(self, bundle: Bundle, objective: Objective, source: Source) -> None:
        """Write a report with the task's pictures, if it has any."""
        config = self.setup.config
        name = config.start.init or config.model.name
        heading = f"{name}, pre-trained by {config.task.name} on {config.data.spec}, {self.setup.steps:,} steps."
        write_pictures(self.folder, heading, bundle.metrics, config.task.pictures(objective, bundle, source))

    def _measure_streamed(
        self, bundle: Bundle, state: TrainState, streamed: StreamedCopy, *, is_best: bool
    ) -> dict[str, Predictions]:
        """Measure the model whose weights are in the main memory of the first process, by sharded weights. `is_best` is
        True if the weights of training are others."""
        if is_best:
            streamed.scatter(state.objective)
        measured = make_bundle(self.setup, state.whole_objective())
        streamed.copy_rest(measured.network, bundle.network)
        measured.provenance, measured.metrics = bundle.provenance, bundle.metrics
        predictions = self._measure(measured, state)
        bundle.metrics = measured.metrics
        return predictions

    def _measure(self, bundle: Bundle, state: TrainState) -> dict[str, Predictions]:
        """Measure the finished model on the held-out splits, and add the metrics to it. Return its outputs."""
        task, splits = self.setup.config.task, self.setup.splits

        split = ""

        def skip(item: Skipped) -> None:
            self.log.tell("skipped", step=state.step, split=split, key=item.key, reason=item.reason)

        outputs = self.outputs(bundle, keep=MAX_KEPT, on_skip=skip)
        predictions: dict[str, Predictions] = {}
        evaluator = task.evaluator(state.copy or state.objective)
        for split, source in (("validation", splits.validation), ("test", splits.test)):
            if source is not None:
                result = evaluator(outputs, splits.train, source)
                state.settle()
                check_finite(result, task.loss_metric, state.step)
                values = {"split": split, "weights": state.measured, "kept": True, **result}
                self.log.tell("evaluation", step=bundle.provenance["step"], **values)
                bundle.metrics |= {f"{split}_{name}": value for name, value in task.summary(result).items()}
                if (kept := outputs.kept(source)) is not None:
                    predictions[split] = kept
        return predictions
