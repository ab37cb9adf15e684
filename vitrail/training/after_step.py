"""Everything that happens between steps: reports, evaluation, checkpoints, faults and stopping."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.cores import SharedCores
from vitrail.data.batch import Batch, Skipped
from vitrail.data.pipeline import Readers, default_threads
from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import DataError, NonFiniteLoss, Stopped
from vitrail.evaluation.outputs import Outputs
from vitrail.machine import peak_memory
from vitrail.models.attention.base import AttentionLayer
from vitrail.processes.group import Processes, local, whole
from vitrail.tasks.own_model import without_adapters
from vitrail.tasks.task import Task
from vitrail.training.checkpoint import BestModel, Checkpoints
from vitrail.training.clock import MachineLimit, TimeLeft, Timing
from vitrail.training.config import FaultConfig
from vitrail.training.job import Phase, Plan, Probe
from vitrail.training.log import Log
from vitrail.training.state import Best, Faults, StepFault, TrainState
from vitrail.training.stop import StopRequest
from vitrail.weights.bundle import Bundle


@dataclass(frozen=True)
class Sinks:
    """The log and the checkpoints of a run."""

    log: Log
    checkpoints: Checkpoints


@dataclass(frozen=True)
class Intervals:
    """Numbers of steps between reports, evaluations and checkpoints. A report, an evaluation and a checkpoint also
    follow the last step."""

    journal: int
    evaluate: int | None
    checkpoint: int


class Monitor:
    """Receives every step of the loop, and runs the reports, evaluations and checkpoints that are due. It waits for the
    device only when one of these is due."""

    def __init__(
        self,
        state: TrainState,
        plan: Plan,
        sinks: Sinks,
        intervals: Intervals,
        examiner: Examiner,
        *,
        stop: StopRequest,
        started: float,
        on_readers: Callable[[int], None] = lambda threads: None,
        limit: MachineLimit | None = None,
    ) -> None:
        """`started` is the time (`time.perf_counter()`) at which the user started the command. `on_readers` receives
        the number of reading threads if the run chooses it. `limit` is that with which the speed of the steps is
        compared, or None if their FLOPs are unknown."""
        self.state = state
        self.plan = plan
        self.log, self.checkpoints = sinks.log, sinks.checkpoints
        self.intervals = intervals
        self.examiner = examiner
        self.stop = stop
        self.timing = Timing(plan, self._time_left(), step=state.step, started=started, limit=limit)
        self.meter = Meter()
        self.health = Health()
        self.means = RunningMeans()
        self.adaptation = Adaptation(state, plan, sinks, on_readers)
        self.skipped = SkippedImages(state, sinks, plan.most_skipped, plan.processes)
        self.recovery = Recovery(
            plan.faults,
            state,
            examiner.splits.train,
            sinks,
            processes=plan.processes,
            on_rollback=self._forget,
        )

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the step inside the `with` block if the journal is due after it."""
        following = self.state.step + 1
        if following % self.intervals.journal and following != self.plan.steps:
            yield
            return
        with self.health.measuring(self.state.objective):
            yield

    def before_first_step(self, *, evaluates: bool) -> None:
        """Save the state if the run may go back to it after a fault. If `evaluates`, measure the initial weights on the
        validation split, so that they are kept unless training improves them.

        Raises `NonFiniteLoss` and `SaveError`.
        """
        if evaluates:
            with self.timing.pause("evaluation"):
                self.examiner.evaluate()
        if self.plan.faults.may_roll_back:
            with self.timing.pause("checkpoint"):
                self.checkpoints.save(self.state)

    def begin_phase(self, phase: Phase) -> None:
        """Report the settings of a phase, unless the run has one phase only or continues within the phase."""
        if len(self.plan.phases) == 1 or phase.first != self.state.step:
            return
        self.report()
        self.log.tell(
            "phase",
            step=self.state.step,
            image_size=list(phase.image_size),
            patch_dropout=phase.patch_dropout,
            batch_size=phase.batch_size,
        )

    def after_step(self, batch: Batch, metrics: dict[str, Tensor]) -> None:
        """Run the reports, evaluations and checkpoints that are due after a step. `metrics` is empty if the batch was
        skipped.

        Raises `Stopped` if the user asked to stop, `DataError` for too many broken images, `NonFiniteLoss` and
        `SaveError`.
        """
        step = self.state.step
        processes = self.plan.processes
        images = processes.world * (len(batch) - batch.partners)
        if metrics:
            self.meter.add(step, metrics)
        seconds, work = self.timing.after_step(step, images, was_taken=bool(metrics))
        self.adaptation.after_step(seconds, work)
        if self.timing.times_each_step and (left := self.timing.seconds_left(step)) is not None:
            self.log.show("tick", step=step, seconds_left=left)
        self.skipped.add(batch.skipped)
        if self._due(self.intervals.journal):
            self.report()
        if self._due(self.intervals.evaluate):
            self.report()
            with self.timing.pause("evaluation"):
                self.examiner.evaluate(self.means.read())
        over = self.plan.is_over(self.state)
        if due := self.examiner.due(over=over):
            self.report()
            with self.timing.pause("probe"):
                self.examiner.probe(due)
        if over and step < self.plan.steps:
            self._say_early()
        stopping = processes.any_earlier(self.stop.requested) and not over
        if self._due(self.intervals.checkpoint) or over or stopping:
            self.report()  # raises if the loss is not finite, so that no broken state is saved
            with self.timing.pause("checkpoint"):
                path = self.checkpoints.save(self.state)
                if over or stopping:
                    self.checkpoints.wait()
        if stopping:
            self.log.tell("stopped", step=step)
            raise Stopped(
                f"stopped at step {step:,} of {self.plan.steps:,}; the state is saved in {path}", path.parent.parent
            )

    def report(self) -> None:
        """Report the metrics since the last report. Raises `NonFiniteLoss`.

        The journal receives the images per second and the fraction of the machine's limit since the last report, and
        smoothed ones are shown.
        """
        self.checkpoints.poll()
        if not (metrics := self.meter.read()):
            return
        self.skipped.exchange()
        speeds = self.timing.report(self.state.step)
        self.means.add(speeds.steps, metrics)
        metrics["learning_rate"] = max(group["lr"] for group in self.state.optimizer.param_groups)  # the highest
        metrics |= speeds.exact | {"memory_bytes": float(peak_memory(self.plan.device))} | self.health.read()
        self.log.tell("step", speeds.smoothed, step=self.state.step, **metrics)

    def summary(self, device: torch.device) -> dict[str, float]:
        """Return the run's length, speed and memory: steps, seconds, fractions and bytes. Metrics of the training steps
        before the last evaluation begin with "train_"."""
        return {
            "steps": float(self.state.step),
            **{f"train_{name}": value for name, value in self.means.read().items()},
            **self.timing.summary(),
            "peak_memory_bytes": float(peak_memory(device)),
        }

    def _forget(self) -> None:
        """Forget the steps after the checkpoint to which the run went back."""
        self.meter, self.means = Meter(), RunningMeans()
        self.timing.go_back(self.state.step)

    def _due(self, interval: int | None) -> bool:
        return interval is not None and (self.state.step % interval == 0 or self.state.step == self.plan.steps)

    def _say_early(self) -> None:
        step, best = self.state.step, self.state.best
        self.log.tell("ended early", step=step, patience=self.plan.patience, best=best.step)

    def _time_left(self) -> TimeLeft:
        intervals, splits = self.intervals, self.examiner.splits
        every = {"evaluation": intervals.evaluate, "checkpoint": intervals.checkpoint}
        if self.examiner.probes:
            every["probe"] = min(probe.every for probe in self.examiner.probes)
        validation, test = (0 if source is None else len(source) for source in (splits.validation, splits.test))
        return TimeLeft(
            self.plan.steps,
            {name: steps for name, steps in every.items() if steps is not None},
            batch_size=self.plan.batch_size,
            evaluated=validation,
            at_end=validation + test,
            work=self.plan.work,
        )


# Evaluation between steps: on the validation split, to choose the best weights, and by probes.


class Examiner:
    """Evaluates the weights that would be saved now, without changing the run."""

    def __init__(
        self,
        task: Task,
        state: TrainState,
        splits: Splits,
        sinks: Sinks,
        *,
        model: Callable[[], Bundle],
        saved: Callable[[], Bundle],
        outputs: Callable[..., Outputs],
        best: BestModel | None,
        probes: Sequence[Probe] = (),
        processes: Processes,
    ) -> None:
        """`model` returns the model with its current weights for an evaluation, `saved` the same model for the first
        process to save, and `outputs` the outputs of a model, with the argument `on_skip` of `Outputs`. Several
        `processes` share the images, and all of them get the same metrics. With None for `best`, no best model is
        saved."""
        self.processes = processes
        self.task = task
        self.state = state
        self.splits = splits
        self.log, self.checkpoints = sinks.log, sinks.checkpoints
        self.model = model
        self.saved = saved
        self.outputs = outputs
        self.best = best
        self.evaluator = task.evaluator(state.copy or state.objective)
        self.selection = task.selection(splits)
        self.probes = tuple(probes)

    def evaluate(self, training: Mapping[str, float] = MappingProxyType({})) -> None:
        """Measure the weights on the validation split, if there is one. Save the weights if they are the best so far.
        The loss decides between weights with the same value of the metric that selects.

        If weights are averaged, the weights in training are measured as well. `training` has the metrics of the
        training steps since the last evaluation, which are shown as well. Raises `NonFiniteLoss`.
        """
        state, validation = self.state, self.splits.validation
        if validation is None:
            return
        if state.average is not None:
            result = self._measure(self.model(), validation)
            self.log.tell("evaluation", step=state.step, split="validation", weights="trained", **result)
        with state.averaged():
            result = self._measure(self.model(), validation)
            score, loss = result.get(self.selection.name), result[self.task.loss_metric]
            higher = self.selection.higher_is_better
            best = score is not None and state.best.is_beaten_by(score, loss, higher_is_better=higher)
            if best:
                replaced, state.best = state.best.step, Best(score, state.step, loss=loss)
                self._save(result, replaced)
            else:
                state.best.waited += 1
        values = {"weights": state.measured, "best": best, **result}
        self.log.tell("evaluation", {"training": training}, step=state.step, split="validation", **values)

    def due(self, *, over: bool) -> list[Probe]:
        """Return the probes that are due after this step. After the last step of the run (`over`), all probes are
        due."""
        return [probe for probe in self.probes if over or self.state.step % probe.every == 0]

    def probe(self, due: Sequence[Probe]) -> None:
        """Measure the model with these probes, and report their metrics."""
        device = self.model().device
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            if self.state.streamed is None:
                model = self.current()
            else:  # the weights are gathered from those in training while the probes compute
                stack.enter_context(self.state.averaged())
                model = self.model()
            outputs = self.outputs(model, on_skip=self._skip)
            for probe in due:
                assert self.splits.validation is not None, "`check_probes` requires a validation split"
                metrics = probe.evaluator(outputs, self.splits.train, self.splits.validation)
                self.state.settle()
                values = {"name": probe.name, "weights": self.state.measured, **metrics}
                self.log.tell("probe", {"metrics": metrics}, step=self.state.step, **values)

    def current(self) -> Bundle:
        """Return the model as it would be saved now, in evaluation mode, with its own copy of the weights."""
        with self.state.averaged():
            bundle = without_adapters(self.model())
            return replace(bundle, network=copy.deepcopy(bundle.network).eval())

    def _skip(self, item: Skipped) -> None:
        self.log.show("skipped", split="validation", key=item.key, reason=item.reason)

    def _measure(self, model: Bundle, source: Source) -> dict[str, float]:
        result = self.evaluator(self.outputs(model, on_skip=self._skip), self.splits.train, source)
        self.state.settle()
        check_finite(result, self.task.loss_metric, self.state.step)
        return result

    def _save(self, result: dict[str, float], replaced: int) -> None:
        """Save the current weights as the best model. All processes call this method together."""
        if (best := self.best) is None:
            return
        model, objective = self.saved(), self.state.kept

        def write() -> None:
            model.metrics = {f"validation_{name}": value for name, value in self.task.summary(result).items()}
            model.provenance["step"] = self.state.best.step
            best.keep(replaced, self.checkpoints.best_steps())
            best.save(model, objective)

        self.processes.on_first(write)


# The health of training: the norm of the weights, the relative size of an update, and the largest attention logit.
# Attention logits that grow without limit precede a divergence (2302.05442). Query-key normalisation (`qk_norm`)
# keeps them small.


IMAGES = 8
"""Number of images of each part of a batch whose attention logits are computed again."""


class Health:
    """Measures chosen steps. The results stay on the device until they are read."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    @contextmanager
    def measuring(self, module: nn.Module) -> Iterator[None]:
        """Measure the step inside the `with` block. The step needs memory for a second copy of the trained weights.

        If weights are sharded, all processes measure the same step. The logits are those of this process's images.
        """
        weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        before = [weight.detach().clone() for weight in weights]
        logits: list[Tensor] = []
        with _collected_logits(module, logits):
            yield
        with torch.no_grad():
            norm = _norm(weights)
            torch._foreach_sub_([local(weight) for weight in before], [local(weight) for weight in weights])
            self._values = {"parameter_norm": norm, "update_ratio": _norm(before) / norm}
            if logits:
                self._values["attention_logit"] = torch.stack(logits).amax()

    def read(self) -> dict[str, float]:
        """Return the measurements of the last step that was measured since the last call. `parameter_norm` is the
        norm of all trained weights, `update_ratio` is the norm of their change divided by their norm, and
        `attention_logit` is the largest logit of all blocks. Compiled blocks, and kinds of attention without a dense
        map, have no logits."""
        found, self._values = self._values, {}
        if not found:
            return {}
        return dict(zip(found, torch.stack([value.float() for value in found.values()]).tolist(), strict=True))


def _norm(tensors: list[Any]) -> Tensor:
    return whole(nn.utils.get_total_norm([tensor.detach() for tensor in tensors], foreach=True))


@contextmanager
def _collected_logits(module: nn.Module, found: list[Tensor]) -> Iterator[None]:
    """Add the largest logit of each attention layer that runs inside the `with` block to `found`."""

    @torch.no_grad()
    def collect(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(layer, AttentionLayer)
        tokens, positions = inputs[0], inputs[1] if len(inputs) > 1 else None
        if positions is not None:
            positions = positions.of_images(torch.arange(min(IMAGES, len(tokens)), device=tokens.device))
        queries, keys, _, bias = layer.operands(tokens[:IMAGES], positions)
        logits = queries @ keys.mT / math.sqrt(queries.shape[-1])
        found.append((logits if bias is None else logits + bias).amax().float())

    with ExitStack() as stack:
        is_compiled = any(part._compiled_call_impl is not None for part in module.modules())
        for part in () if is_compiled else module.modules():  # a hook would compile the block again
            if isinstance(part, AttentionLayer) and part.training and _has_logits(part):
                stack.enter_context(part.register_forward_pre_hook(collect))
        yield


def _has_logits(layer: AttentionLayer) -> bool:
    return type(layer).operands is not AttentionLayer.operands


# Losses and metrics of training steps, which stay on the device until they are read, and their means.


def check_finite(result: dict[str, float], metric: str, step: int) -> None:
    """Raise `NonFiniteLoss` if this metric of the evaluation after `step` is not finite."""
    if not math.isfinite(value := result.get(metric, 0.0)):
        raise NonFiniteLoss(f"the evaluation's {metric.replace('_', ' ')} is {value} at step {step}")


class Meter:
    """Collects a dictionary of scalars per step. `read` waits for the device once, for any number of steps."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._names: tuple[str, ...] = ()
        self._steps: list[int] = []

    def add(self, step: int, values: dict[str, Tensor]) -> None:
        """Add the loss and metrics of a step."""
        if not self._rows:
            self._names = tuple(values)
        self._steps.append(step)
        self._rows.append(torch.stack([value.detach().float() for value in values.values()]))

    def read(self) -> dict[str, float]:
        """Return the means over the steps since the last call.

        Raises `NonFiniteLoss` with the first step whose loss or metric is not finite.
        """
        if not self._rows:
            return {}
        table = torch.stack(self._rows).cpu()
        steps, self._rows, self._steps = self._steps, [], []
        if len(bad := (~table.isfinite()).nonzero()):
            row, column = bad[0].tolist()
            raise NonFiniteLoss(f"{self._names[column]} is {table[row, column].item()} at step {steps[row]}")
        return dict(zip(self._names, table.mean(dim=0).tolist(), strict=True))


class RunningMeans:
    """Means of metrics over the steps of several reports."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._steps = 0
        self._last: dict[str, float] = {}

    def add(self, steps: int, metrics: Mapping[str, float]) -> None:
        """Add the means over some steps."""
        self._sums = {name: self._sums.get(name, 0.0) + steps * value for name, value in metrics.items()}
        self._steps += steps

    def read(self) -> dict[str, float]:
        """Return the means since the last call that had any steps, and begin again with the next report."""
        if self._steps:
            self._last = {name: total / self._steps for name, total in self._sums.items()}
            self._sums, self._steps = {}, 0
        return self._last


# Recovery from faults of training steps: the batch is skipped, or the run goes back to a checkpoint.


BY_ROLLBACK = "the run went back to an earlier checkpoint"
"""Reason in the journal for skipping the batches before the batch of a fault."""


class Recovery:
    """Continues a run after faults, within the bound of its config. All processes call the methods together."""

    def __init__(
        self,
        config: FaultConfig,
        state: TrainState,
        source: Source,
        sinks: Sinks,
        *,
        processes: Processes,
        on_rollback: Callable[[], None],
    ) -> None:
        """`source` has the training images. `on_rollback` is called when the state is that of a checkpoint again."""
        self.config = config
        self.state = state
        self.source = source
        self.log, self.checkpoints = sinks.log, sinks.checkpoints
        self.processes = processes
        self._on_rollback = on_rollback

    def leaves_out(self, batch: Batch) -> bool:
        """Return True if the batch of the current step is skipped after a rollback, and report its keys."""
        if self.state.step + 1 not in self.state.faults.left_out:
            return False
        self._leave_out(batch, BY_ROLLBACK, is_fault=False)
        return True

    def recover(self, batch: Batch, fault: StepFault) -> bool:
        """Skip the batch of a fault, or go back to a checkpoint. Return True if the run went back.

        Raises `NonFiniteLoss` if the run has had as many faults as it may have.
        """
        faults, step, most = self.state.faults, self.state.step + 1, self.config.max_faults
        faults.count += 1
        if faults.count > most:
            raise NonFiniteLoss(
                f"{fault} at step {step}, after {most} other faults, which is all that --max-faults allows"
            )
        if fault.action == "rollback":
            self._roll_back(step, str(fault))
            return True
        self._leave_out(batch, str(fault), is_fault=True)
        return False

    def _leave_out(self, batch: Batch, reason: str, *, is_fault: bool) -> None:
        own = batch.without_partners()
        keys = [self.source.key(int(sample)) for sample in own.samples[own.views == 0]]
        everyone = [key for part in self.processes.gather(keys) for key in part]
        shown = {"is_fault": is_fault}
        self.log.tell("batch left out", shown, step=self.state.step + 1, reason=reason, keys=everyone)

    def _roll_back(self, step: int, reason: str) -> None:
        """Restore a checkpoint from before the batches that will be skipped. If there is none, restore the oldest
        checkpoint, and skip only the batches after it."""
        state = self.state
        faults = state.faults
        first = step - self.config.rollback_skips + 1
        for note in self.checkpoints.restore(state, before=first):
            self.log.note(note)
        first = max(first, state.step + 1)
        state.faults = Faults(faults.count, faults.left_out | set(range(first, step + 1)), state.faults.losses)
        self._on_rollback()
        self.log.tell("rolled back", step=state.step, at=step, reason=reason, left_out=[first, step])


# Images that cannot be decoded: each is reported once, and too many training images of this kind end the run.


class SkippedImages:
    """Collects the images of all processes that could not be decoded, of which `most` are allowed."""

    def __init__(self, state: TrainState, sinks: Sinks, most: int, processes: Processes) -> None:
        self.state = state
        self.log, self.checkpoints = sinks.log, sinks.checkpoints
        self.most = most
        self.processes = processes
        self._found: list[Skipped] = []

    def add(self, items: Iterable[Skipped]) -> None:
        """Add the images of a batch. A process that is alone reports them at once. Raises `DataError` for too many."""
        self._found += items
        if self._found and not self.processes.are_several:
            self._tell()

    def exchange(self) -> None:
        """Tell of the images that all processes have found since the last call. All processes call this method
        together. Raises `DataError` for too many."""
        if self.processes.are_several:
            self._found = [item for items in self.processes.gather(self._found) for item in items]
            self._tell()

    def _tell(self) -> None:
        known, items, self._found = self.state.skipped, self._found, []
        for item in items:
            if item.key not in known:
                known.add(item.key)
                self.log.tell("skipped", step=self.state.step, split="train", key=item.key, reason=item.reason)
        if len(known) > self.most:
            raise DataError(
                f"{len(known)} training images cannot be decoded, more than the {self.most} that --max-skipped "
                f"allows; the last one is {items[-1].key}: {items[-1].reason}. Find them with "
                "vitrail data check"
            )


# The numbers of compute threads and of reading threads, which a run can choose by measuring its steps.


class Adaptation:
    """Adapts a run to its machine. `on_readers` receives the number of reading threads if the run chooses it."""

    def __init__(self, state: TrainState, plan: Plan, sinks: Sinks, on_readers: Callable[[int], None]) -> None:
        self.state = state
        self.log, self.checkpoints = sinks.log, sinks.checkpoints
        self._on_readers = on_readers
        self._cores = SharedCores() if plan.adapts_threads else None
        self._trials: ReaderTrials | None = None
        if plan.chooses_readers:
            choices = default_threads(), 0
            self._trials = ReaderTrials(choices, lambda threads: state.batches.use_readers(Readers(threads)))

    def after_step(self, seconds: float, work: float) -> None:
        """Adapt the run after a step that took this time, and whose cost was `work`."""
        if self._trials is not None and (threads := self._trials.add(seconds, work)) is not None:
            times, self._trials = self._trials.times, None
            self.log.tell("readers", step=self.state.step, threads=threads, seconds_per_step=times)
            self._on_readers(threads)
        if self._cores is not None and (threads := self._cores.check()) is not None:
            self.log.tell("threads", step=self.state.step, threads=threads, at_most=self._cores.full)


# The choice between threads and the main thread for reading images, measured in the first steps of a run.


class ReaderTrials:
    """Times steps with different numbers of reading threads in turns, and chooses the fastest number.

    The turns alternate, because the speed of a machine changes from second to second. The choice does not influence
    which images a batch holds, so the timed steps are ordinary steps of the run.
    """

    SECONDS, STEPS = 1.0, 4
    """Least time in seconds and least number of steps of a turn."""
    SKIPPED = 2
    """Number of first steps of a turn that are not timed, because the readers start in them."""
    TURNS = 2
    """Number of turns of each choice. The faster one counts."""
    GAIN = 0.02
    """Fraction of the time that a choice must save to be preferred to the first one."""

    def __init__(self, choices: Sequence[int], use: Callable[[int], None]) -> None:
        """`choices` are numbers of threads, the usual one first. `use` is called with each number that is tried, and
        with the chosen one."""
        self.times: dict[int, float] = {}
        """Seconds per step by the number of threads."""
        self._use = use
        self._turns = itertools.chain(*[choices] * self.TURNS)
        self._usual = choices[0]
        self._begin(next(self._turns))

    def add(self, seconds: float, work: float = 1.0) -> int | None:
        """Add the time of a step, whose cost is `work`. Return the chosen number of threads after the last turn."""
        self._steps += 1
        if self._steps <= self.SKIPPED:
            return None
        self._seconds += seconds
        self._work += work
        if self._seconds < self.SECONDS or self._steps < self.SKIPPED + self.STEPS:
            return None
        taken = self._seconds / self._work
        self.times[self._tried] = min(taken, self.times.get(self._tried, taken))
        if (following := next(self._turns, None)) is not None:
            self._begin(following)
            return None
        best = min(self.times, key=lambda threads: self.times[threads])
        chosen = best if self.times[best] <= (1 - self.GAIN) * self.times[self._usual] else self._usual
        if chosen != self._tried:
            self._use(chosen)
        return chosen

    def _begin(self, threads: int) -> None:
        self._tried, self._steps, self._seconds, self._work = threads, 0, 0.0, 0.0
        self._use(threads)
