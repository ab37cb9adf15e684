"""The execution of one run: from a network or the newest checkpoint to the last step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from vitrail.data.batch import Skipped
from vitrail.data.check import quick_check
from vitrail.data.colour import colour_note, images_of
from vitrail.errors import NonFiniteLoss, plural
from vitrail.evaluation.outputs import Outputs
from vitrail.machine import keep_freed_memory
from vitrail.models.vit_config import ViTConfig
from vitrail.training.assembly import make_bundle, make_plan, make_state
from vitrail.training.finish import Finish, RunResult
from vitrail.training.forecast import evaluation_batch
from vitrail.training.loop import fit
from vitrail.training.monitoring.examiner import Examiner, Probe
from vitrail.training.monitoring.monitor import Intervals, Monitor
from vitrail.training.monitoring.skipped import HeldOutSkips
from vitrail.training.monitoring.stop import StopRequest
from vitrail.training.records.extension import record_extension
from vitrail.training.records.progress import ProgressPage
from vitrail.training.records.record import replace_config
from vitrail.training.reporting.display import Display
from vitrail.training.reporting.journal import Journal
from vitrail.training.reporting.sinks import Sinks
from vitrail.training.reporting.trackers import tracking
from vitrail.training.setup import Setup, schedule_of
from vitrail.training.speed.limit import MachineLimit, product_limit
from vitrail.training.state.best import BestModel
from vitrail.training.state.checkpoint import Checkpoints
from vitrail.training.state.state import TrainState
from vitrail.training.steps.phases import cost_text
from vitrail.training.steps.plan import Plan
from vitrail.weights.bundle import Bundle

__all__ = ["Execution"]


class Execution:
    """One run, from a network or the newest checkpoint to the finished model."""

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        display: Display,
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
        self.journal = Journal(folder / "journal.jsonl", is_kept=setup.processes.is_first)
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            processes=setup.processes,
            in_background=setup.config.run.background_checkpoints,
            on_saved=lambda step, path: self.journal.write("checkpoint", step=step, path=path.name),
            on_restored=lambda state: self.processes.on_first(lambda: self.best.put_back(state.best.step)),
        )
        self.best = BestModel(folder)
        # Processes share the images of an evaluation batch by batch, although their machines can differ.
        self.evaluation_batch = setup.processes.from_first(evaluation_batch(setup.config, setup.network))
        self.display = display if setup.processes.is_first else Display()
        self.skips = HeldOutSkips(self.display)
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
        setup, journal, display = self.setup, self.journal, self.display
        keep_freed_memory()
        state, plan = make_state(setup, network), make_plan(setup)
        for note in self._restore(state) if resuming else ():
            display.note(note)
        self._announce(network, notes)
        if state.step:
            display.say(f"continuing after step {state.step:,} of {setup.steps:,}")
        if extends is not None and state.step and (note := self._rise(plan, state.step, extends)):
            display.note(note)
        extension: dict[str, Any] = {} if extends is None else {"extends": extends}
        if changes:
            extension["changes"] = {name: list(values) for name, values in changes.items()}
        journal.write("resumed" if resuming else "started", step=state.step, steps=setup.steps, **extension)
        if extends is not None:
            state.best.waited = 0  # otherwise a run that --patience ended would end again at once
            longer = {"step": state.step, "before": extends, "steps": setup.steps}
            self.processes.on_first(lambda: record_extension(self.folder, setup.config, **longer))
        if journal.is_kept:
            metric = setup.config.task.selection(setup.splits)
            journal.readers.append(ProgressPage(self.folder, setup.config, metric, setup.steps).receive)
        with tracking(setup.config.run.track, self.folder, setup.config.to_plain(), journal, state.step):
            monitor = self._train(state, plan, probes)
            finish = Finish(setup, self.folder, journal, self.best, partial(self._outputs, state), self.skips)
            return finish(state, monitor.summary(setup.device))

    def _rise(self, plan: Plan, step: int, before: int) -> str:
        """Return a note if the learning rate of the next step is higher than that of the last one, because the schedule
        of a run that had `before` steps is stretched to its new length. Return "" otherwise."""
        last = schedule_of(self.setup.config, self.setup.splits, before)(step - 1)
        if (following := plan.schedule(step)) <= last:
            return ""
        return (
            f"the learning rate rises from {last:.3g} to {following:.3g}, because the schedule is now that of a run of "
            f"{self.setup.steps:,} steps (docs/optimization.md)"
        )

    def _train(self, state: TrainState, plan: Plan, probes: Sequence[Probe]) -> Monitor:
        """Take the steps that are left, and return the monitor that received them. Signals stop the run meanwhile."""
        setup, journal, display = self.setup, self.journal, self.display
        with StopRequest(None if self.max_seconds is None else self.started + self.max_seconds) as stop:
            sinks = Sinks(journal, self.checkpoints, display)
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
            display.begin(state.step, setup.steps, setup.config.task)
            try:
                with closing(self.checkpoints):
                    if state.step == 0:
                        monitor.before_first_step(evaluates=self._may_keep_start)
                    fit(state, plan, monitor)
            except NonFiniteLoss as error:
                journal.write("failed", step=state.step, reason=str(error))
                if not self._may_keep_start or state.best.step < 0:
                    raise NonFiniteLoss(_advice(error, self.checkpoints)) from None
                display.note(
                    f"{error}: the run diverged, so the best weights before, of step {state.best.step:,}, stay"
                )
            finally:
                display.end()
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
            self.journal.write("limit", step=state.step, flops_per_second=found, **settings)
            return found

        def give_up() -> None:
            self.journal.write("limit too low", step=state.step)
            self.display.note(
                "the steps are faster than the matrix products that were measured alone, so other programs used the "
                "machine meanwhile; the fraction of this speed is not shown any more"
            )

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
            skips=self.skips,
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
            self.display.note(note)
        if isinstance(setup.network, ViTConfig) and (note := setup.network.attention_kind.note()):
            self.display.note(note)
        if note := colour_note(images_of(setup.splits.train), setup.config.images.channels):
            self.display.note(f"{note}; to learn from colours, choose channels=3")
        for line in quick_check(setup.splits):
            self.display.say(line)
        self.display.say(self.memory)
        self.display.say(f"{self.folder / 'progress.html'} shows the curves during the run")
        self.display.say(f"{_summary(setup, network)}, into {self.folder}")
        if len(setup.phases) > 1 and setup.network is not None:
            self.display.say(cost_text(setup.phases, setup.network, setup.config.task))


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
