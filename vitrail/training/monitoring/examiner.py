"""Evaluation between steps: on the validation split, to choose the best weights, and by probes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.evaluation.evaluators import Evaluator
from vitrail.evaluation.outputs import Outputs
from vitrail.processes.group import Processes
from vitrail.tasks import Task
from vitrail.tasks.own_model import without_adapters
from vitrail.training.monitoring.meter import check_finite
from vitrail.training.monitoring.skipped import HeldOutSkips
from vitrail.training.reporting.display import TRAINING
from vitrail.training.reporting.sinks import Sinks
from vitrail.training.state.best import BestModel
from vitrail.training.state.state import Best, TrainState
from vitrail.weights.bundle import Bundle

__all__ = ["Examiner", "Probe", "check_probes"]


@dataclass(frozen=True)
class Probe:
    """An evaluation of the model during the run. The journal records its metrics."""

    name: str
    every: int
    """Number of steps between two evaluations. Another evaluation follows the last step."""
    evaluator: Evaluator
    """Evaluator of the model as it would be saved now, with averaged weights and merged adapters. The evaluator learns
    from the training split and measures on the validation split. The random state of PyTorch is restored afterwards."""


def check_probes(probes: Sequence[Probe], splits: Splits) -> None:
    """Raise `ConfigError` if there are probes and the data has no validation split to measure them on."""
    if probes and splits.validation is None:
        names = ", ".join(probe.name for probe in probes)
        raise ConfigError(
            f"{names} cannot be measured during the run, because the data has no validation split; leave --probe "
            "out, or set --validation-share above 0"
        )


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
        skips: HeldOutSkips,
    ) -> None:
        """`model` returns the model with its current weights for an evaluation, `saved` the same model for the first
        process to save, and `outputs` the outputs of a model, with the argument `on_skip` of `Outputs`. `skips` shows
        the images that cannot be decoded. Several `processes` share the images, and all of them get
        the same metrics. With None for `best`, no best model is saved."""
        self.processes = processes
        self.task = task
        self.state = state
        self.splits = splits
        self.sinks = sinks
        self.model = model
        self.saved = saved
        self.outputs = outputs
        self.on_skip = skips.of("validation")
        self.best = best
        self.evaluator = task.evaluator(state.copy or state.objective)
        self.selection = task.selection(splits)
        self.probes = tuple(probes)

    def evaluate(self, training: Mapping[str, float] = MappingProxyType({})) -> None:
        """Measure the weights on the validation split, if there is one. Save the weights if they are the best so far.
        The loss decides between weights with the same value of the metric that selects.

        If weights are averaged, the weights in training are measured as well. `training` has the metrics of the
        training steps since the last evaluation, which the display shows as well. Raises `NonFiniteLoss`.
        """
        state, validation, journal = self.state, self.splits.validation, self.sinks.journal
        if validation is None:
            return
        if state.average is not None:
            result = self._measure(self.model(), validation)
            journal.write("evaluation", step=state.step, split="validation", weights="trained", **result)
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
        journal.write("evaluation", step=state.step, split="validation", **values)
        beside = {f"{TRAINING}{name}": value for name, value in training.items()}
        self.sinks.display.evaluated(state.step, result | beside, best)

    def due(self, *, over: bool) -> list[Probe]:
        """Return the probes that are due after this step. After the last step of the run (`over`), all probes are
        due."""
        return [probe for probe in self.probes if over or self.state.step % probe.every == 0]

    def probe(self, due: Sequence[Probe]) -> None:
        """Measure the model with these probes, and write their metrics into the journal."""
        device = self.model().device
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            if self.state.streamed is None:
                model = self.current()
            else:  # the weights are gathered from those in training while the probes compute
                stack.enter_context(self.state.averaged())
                model = self.model()
            outputs = self.outputs(model, on_skip=self.on_skip)
            for probe in due:
                assert self.splits.validation is not None, "`check_probes` requires a validation split"
                metrics = probe.evaluator(outputs, self.splits.train, self.splits.validation)
                self.state.settle()
                values = {"name": probe.name, "weights": self.state.measured, **metrics}
                self.sinks.journal.write("probe", step=self.state.step, **values)
                shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
                self.sinks.display.say(f"step {self.state.step:,}: {shown}")

    def current(self) -> Bundle:
        """Return the model as it would be saved now, in evaluation mode, with its own copy of the weights."""
        with self.state.averaged():
            bundle = without_adapters(self.model())
            return replace(bundle, network=copy.deepcopy(bundle.network).eval())

    def _measure(self, model: Bundle, source: Source) -> dict[str, float]:
        result = self.evaluator(self.outputs(model, on_skip=self.on_skip), self.splits.train, source)
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
            best.keep(replaced, self.sinks.checkpoints.best_steps())
            best.save(model, objective)

        self.processes.on_first(write)
