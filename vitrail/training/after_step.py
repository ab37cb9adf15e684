"""Everything that happens between steps: reports, evaluation, checkpoints, faults and stopping."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.data.batch import Batch, Skipped
from vitrail.data.pipeline import Readers, default_threads, skips_allowed
from vitrail.data.source import Source
from vitrail.errors import ConfigError, DataError, NonFiniteLoss, Stopped
from vitrail.evaluation.evaluators import RESERVED, checked_metrics
from vitrail.evaluation.outputs import Outputs
from vitrail.machine import peak_memory
from vitrail.models.attention.base import AttentionLayer
from vitrail.processes.group import local, whole
from vitrail.tasks.own_model import without_adapters
from vitrail.tasks.task import Task
from vitrail.training.checkpoint import BestModel, Checkpoints
from vitrail.training.clock import Timing
from vitrail.training.folder import replace_config
from vitrail.training.job import Job, Phase, Probe
from vitrail.training.log import Log
from vitrail.training.state import Best, Faults, StepFault, TrainState, make_bundle
from vitrail.training.stop import StopRequest
from vitrail.weights.bundle import Bundle

# The health of training: the norm of the weights, the relative size of an update, and the largest attention logit.
# Attention logits that grow without limit precede a divergence (2302.05442). Query-key normalisation (`qk_norm`)
# keeps them small.


MOST_IMAGES, SHARE_OF_IMAGES = 8, 8
"""Largest number of images of each part of a batch whose attention logits are computed again, and the number of images
of which one is chosen. With all images of a small batch, a step would take a fifth longer."""


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
        count = min(MOST_IMAGES, math.ceil(len(tokens) / SHARE_OF_IMAGES))
        if positions is not None:
            positions = positions.of_images(torch.arange(count, device=tokens.device))
        queries, keys, _, bias = layer.operands(tokens[:count], positions)
        logits = queries @ keys.mT / math.sqrt(queries.shape[-1])
        found.append((logits if bias is None else logits + bias).amax().float())

    with ExitStack() as stack:
        is_compiled = any(part._compiled_call_impl is not None for part in module.modules())
        for part in () if is_compiled else module.modules():  # a hook would compile the block again
            has_logits = isinstance(part, AttentionLayer) and type(part).operands is not AttentionLayer.operands
            if has_logits and part.training:
                stack.enter_context(part.register_forward_pre_hook(collect))
        yield


# Losses and metrics of training steps, which stay on the device until they are read, and their means.


def checked_result(task: Task, found: Any, step: int) -> dict[str, float]:
    """Return what the task's evaluator found after `step`. Raise `NonFiniteLoss` if the metric of the loss is not
    finite, and `ConfigError` if it or another metric that runs need is missing."""
    result = checked_metrics(f"task {task.name}", found, (task.loss_metric, "images"), reserved=RESERVED)
    if not math.isfinite(value := result[task.loss_metric]):
        raise NonFiniteLoss(f"the evaluation's {task.loss_metric.replace('_', ' ')} is {value} at step {step}")
    return result


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
        if values.keys() != {*self._names}:
            raise ConfigError(
                f"the metrics of step {step} are {', '.join(values)}, and those before {', '.join(self._names)}; an "
                "objective must return the same ones in every step"
            )
        self._steps.append(step)
        self._rows.append(torch.stack([values[name].detach().float() for name in self._names]))

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


# A run, and what follows each of its steps.


@dataclass
class Run:
    """A run whose folder is open. Everything that later steps depend on is in the state, and nothing of it is here."""

    job: Job
    folder: Path
    log: Log
    checkpoints: Checkpoints
    best: BestModel
    clock: Timing
    stop: StopRequest
    evaluation_batch: int
    """Images per forward pass in evaluations."""
    trials: ReaderTrials | None = None
    """The measurements of the first steps, if they decide whether threads or the main thread reads the images."""
    meter: Meter = field(default_factory=Meter)
    means: RunningMeans = field(default_factory=RunningMeans)
    health: Health = field(default_factory=Health)
    skipped: list[Skipped] = field(default_factory=list)
    """Training images that could not be decoded and were not reported yet."""

    def is_due(self, name: str, step: int) -> bool:
        """Return True if a report, an evaluation or a checkpoint follows a step, by its name in `Job.intervals`."""
        every = self.job.intervals.get(name)
        return every is not None and (step % every == 0 or step == self.job.steps)

    def outputs(
        self, state: TrainState, bundle: Bundle, on_skip: Callable[[Skipped], None], *, keep: int = 0
    ) -> Outputs:
        """Return the outputs of a model for an evaluation, whose images all processes share."""
        return Outputs(
            bundle,
            batch_size=self.evaluation_batch,
            readers=self.job.readers,
            keep=keep,
            on_skip=on_skip,
            processes=self.job.processes,
            settle=state.settle,
        )


def measuring(run: Run, state: TrainState) -> AbstractContextManager[None]:
    """Measure the health of the step inside the `with` block if a report is due after it."""
    is_due = run.is_due("report", state.step + 1)
    return run.health.measuring(state.objective) if is_due else nullcontext()


def before_first_step(run: Run, state: TrainState, *, evaluates: bool) -> None:
    """Save the state if the run may go back to it after a fault. If `evaluates`, measure the initial weights on the
    validation split, so that they are kept unless training improves them.

    Raises `NonFiniteLoss` and `SaveError`.
    """
    if evaluates:
        with run.clock.pause("evaluation"):
            evaluate(run, state)
    if run.job.config.faults.may_roll_back:
        with run.clock.pause("checkpoint"):
            run.checkpoints.save(state)


def begin_phase(run: Run, state: TrainState, phase: Phase) -> None:
    """Report the settings of a phase, unless the run has one phase only or continues within the phase."""
    if len(run.job.phases) > 1 and phase.first == state.step:
        report(run, state)
        settings = {"patch_dropout": phase.patch_dropout, "batch_size": phase.batch_size}
        run.log.tell("phase", step=state.step, image_size=list(phase.image_size), **settings)


def after_step(run: Run, state: TrainState, batch: Batch, metrics: dict[str, Tensor]) -> None:
    """Run the reports, evaluations and checkpoints that are due after a step. `metrics` is empty if the batch was
    skipped.

    Raises `Stopped` if the user asked to stop, `DataError` for too many broken images, `NonFiniteLoss` and
    `SaveError`.
    """
    job, step, log = run.job, state.step, run.log
    if metrics:
        run.meter.add(step, metrics)
    images = job.processes.world * (len(batch) - batch.partners) // batch.views_per_sample
    seconds, work = run.clock.after_step(step, images, was_taken=bool(metrics))
    if run.trials is not None and (threads := run.trials.add(seconds, work)) is not None:
        log.tell("readers", step=step, threads=threads, seconds_per_step=run.trials.times)
        run.trials = None
        replace_config(run.folder, job.config.override(threads=threads))
    if run.clock.times_each_step and (left := run.clock.seconds_left(step)) is not None:
        log.show("tick", step=step, seconds_left=left)
    run.skipped += batch.skipped
    if run.skipped and not job.processes.are_several:
        _report_skipped(run, state)
    if run.is_due("report", step):
        report(run, state)
    if run.is_due("evaluation", step):
        report(run, state)
        with run.clock.pause("evaluation"):
            evaluate(run, state, run.means.read())
    over = state.is_over(job)
    if due := [probe for probe in job.probes if over or step % probe.every == 0]:
        report(run, state)
        with run.clock.pause("probe"):
            _probe(run, state, due)
    if over and step < job.steps:
        log.tell("ended early", step=step, patience=job.config.run.patience, best=state.best.step)
    stopping = job.processes.any_earlier(run.stop.requested) and not over
    if run.is_due("checkpoint", step) or over or stopping:
        report(run, state)  # raises if the loss is not finite, so that no broken state is saved
        with run.clock.pause("checkpoint"):
            path = run.checkpoints.save(state)
            if over or stopping:
                run.checkpoints.wait()
    if stopping:
        log.tell("stopped", step=step)
        raise Stopped(f"stopped at step {step:,} of {job.steps:,}; the state is saved in {path}", run.folder)


def report(run: Run, state: TrainState) -> None:
    """Report the metrics since the last report. Raises `NonFiniteLoss`, and `DataError` for too many broken images.

    The journal receives the images per second and the fraction of the machine's limit since the last report, and
    smoothed ones are shown.
    """
    run.checkpoints.poll()
    if not (metrics := run.meter.read()):
        return
    if run.job.processes.are_several:
        run.skipped = [item for items in run.job.processes.gather(run.skipped) for item in items]
        _report_skipped(run, state)
    steps, exact, smoothed = run.clock.report(state.step)
    run.means.add(steps, metrics)
    metrics["learning_rate"] = max(group["lr"] for group in state.optimizer.param_groups)  # the highest
    metrics |= exact | {"memory_bytes": float(peak_memory(run.job.device))} | run.health.read()
    run.log.tell("step", smoothed, step=state.step, **metrics)


def _report_skipped(run: Run, state: TrainState) -> None:
    """Report each training image that cannot be decoded once. Raises `DataError` for too many."""
    items, run.skipped = run.skipped, []
    for item in items:
        if item.key not in state.skipped:
            state.skipped.add(item.key)
            run.log.tell("skipped", step=state.step, split="train", key=item.key, reason=item.reason)
    most = skips_allowed(len(run.job.splits.train), run.job.config.data.max_skipped)
    if len(state.skipped) > most:
        raise DataError(
            f"{len(state.skipped)} training images cannot be decoded, more than the {most} that --max-skipped "
            f"allows; the last one is {items[-1].key}: {items[-1].reason}. Find them with "
            "vitrail data check"
        )


def reader_trials(job: Job, state: TrainState) -> ReaderTrials | None:
    """Return what chooses the number of reading threads by measurements, if the run has it chosen."""
    if job.config.run.threads != "auto" or job.processes.are_several:
        return None
    return ReaderTrials((default_threads(), 0), lambda threads: state.batches.use_readers(Readers(threads)))


# Evaluation between steps: on the validation split, to choose the best weights, and by probes. It measures the weights
# that would be saved now, without changing the run.


def evaluate(run: Run, state: TrainState, training: Mapping[str, float] = MappingProxyType({})) -> None:
    """Measure the weights on the validation split, if there is one. Save the weights if they are the best so far. The
    loss decides between weights with the same value of the metric that selects.

    If weights are averaged, the weights in training are measured as well. `training` has the metrics of the training
    steps since the last evaluation, which are shown as well. Raises `NonFiniteLoss`.
    """
    job, task, validation = run.job, run.job.config.task, run.job.splits.validation
    if validation is None:
        return
    if state.average is not None:
        result = _measure(run, state, validation)
        run.log.tell("evaluation", step=state.step, split="validation", weights="trained", **result)
    with state.averaged():
        result = _measure(run, state, validation)
        selection = task.selection(job.splits)
        score, loss = result.get(selection.name), result[task.loss_metric]
        best = score is not None and state.best.is_beaten_by(score, loss, higher_is_better=selection.higher_is_better)
        if best:
            replaced, state.best = state.best.step, Best(score, state.step, loss=loss)
            if job.config.run.keep == "best":
                _save_best(run, state, result, replaced)
        else:
            state.best.waited += 1
    values = {"weights": state.measured, "best": best, **result}
    run.log.tell("evaluation", {"training": training}, step=state.step, split="validation", **values)


def _measure(run: Run, state: TrainState, source: Source) -> dict[str, float]:
    """Return the metrics of the current weights. All processes get the same ones."""
    task = run.job.config.task
    outputs = run.outputs(state, make_bundle(run.job, state.whole_objective()), _on_skip(run))
    found = task.evaluator(state.copy or state.objective)(outputs, run.job.splits.train, source)
    state.settle()
    return checked_result(task, found, state.step)


def _on_skip(run: Run) -> Callable[[Skipped], None]:
    return lambda item: run.log.show("skipped", split="validation", key=item.key, reason=item.reason)


def _save_best(run: Run, state: TrainState, result: dict[str, float], replaced: int) -> None:
    """Save the current weights as the best model. All processes call this function together."""
    model, objective = make_bundle(run.job, state.saved_objective()), state.kept

    def write() -> None:
        model.metrics = {f"validation_{name}": value for name, value in run.job.config.task.summary(result).items()}
        model.provenance["step"] = state.best.step
        run.best.keep(replaced, run.checkpoints.best_steps())
        run.best.save(model, objective)

    run.job.processes.on_first(write)


def _probe(run: Run, state: TrainState, due: Sequence[Probe]) -> None:
    """Measure the model with these probes, and report their metrics."""
    device, splits = run.job.device, run.job.splits
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        if state.streamed is None:
            with state.averaged():  # the probes get a copy of the model as it would be saved now
                model = without_adapters(make_bundle(run.job, state.whole_objective()))
                model = replace(model, network=copy.deepcopy(model.network).eval())
        else:  # the weights are gathered from those in training while the probes compute
            stack.enter_context(state.averaged())
            model = make_bundle(run.job, state.whole_objective())
        outputs = run.outputs(state, model, _on_skip(run))
        for probe in due:
            assert splits.validation is not None, "`prepare` requires a validation split"
            metrics = checked_metrics(
                probe.name, probe.evaluator(outputs, splits.train, splits.validation), reserved=RESERVED
            )
            state.settle()
            values = {"name": probe.name, "weights": state.measured, **metrics}
            run.log.tell("probe", {"metrics": metrics}, step=state.step, **values)


# Recovery from faults of training steps: the batch is skipped, or the run goes back to a checkpoint. All processes call
# the functions together.


def leaves_out(run: Run, state: TrainState, batch: Batch) -> bool:
    """Return True if the batch of the current step is skipped after a rollback, and report its keys."""
    if state.step + 1 not in state.faults.left_out:
        return False
    _leave_out(run, state, batch, "the run went back to an earlier checkpoint")
    return True


def recover(run: Run, state: TrainState, batch: Batch, fault: StepFault) -> bool:
    """Skip the batch of a fault, or go back to a checkpoint. Return True if the run went back.

    Raises `NonFiniteLoss` if the run has had as many faults as it may have.
    """
    faults, step, most = state.faults, state.step + 1, run.job.config.faults.max_faults
    faults.count += 1
    if faults.count > most:
        raise NonFiniteLoss(f"{fault} at step {step}, after {most} other faults, which is all that --max-faults allows")
    if fault.action == "rollback":
        _roll_back(run, state, step, str(fault))
        return True
    run.log.note(f"{fault} at step {step:,}: the batch is skipped")
    _leave_out(run, state, batch, str(fault))
    return False


def _leave_out(run: Run, state: TrainState, batch: Batch, reason: str) -> None:
    """Report the keys of a batch that is skipped. All processes call this function together."""
    own = batch.without_partners()
    keys = [run.job.splits.train.key(int(sample)) for sample in own.samples[own.views == 0]]
    everyone = [key for part in run.job.processes.gather(keys) for key in part]
    run.log.tell("batch left out", step=state.step + 1, reason=reason, keys=everyone)


def _roll_back(run: Run, state: TrainState, step: int, reason: str) -> None:
    """Restore a checkpoint from before the batches that will be skipped. If there is none, restore the oldest
    checkpoint, and skip only the batches after it. The steps after the checkpoint are forgotten."""
    faults = state.faults
    first = step - run.job.config.faults.rollback_skips + 1
    for note in run.checkpoints.restore(state, before=first):
        run.log.note(note)
    first = max(first, state.step + 1)
    left_out = sorted({*faults.left_out, *range(first, step + 1)})
    state.faults = Faults(faults.count, left_out, state.faults.losses)
    run.meter, run.means = Meter(), RunningMeans()
    run.clock.go_back(state.step)
    run.log.tell("rolled back", step=state.step, at=step, reason=reason, left_out=[first, step])
