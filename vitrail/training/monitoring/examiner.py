"""What is measured of a run's weights between steps: the validation split, which chooses the best, and probes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vitrail.data.pipeline import Readers
from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.evaluation.evaluators import Evaluator
from vitrail.evaluation.outputs import Outputs
from vitrail.models.lora import merged
from vitrail.training.monitoring.display import Display
from vitrail.training.monitoring.journal import Journal
from vitrail.training.monitoring.meter import check_finite
from vitrail.training.state.state import Best, TrainState
from vitrail.weights.bundle import Bundle, write_bundle

__all__ = ["Examiner", "Probe", "check_probes"]


@dataclass(frozen=True)
class Probe:
    """An evaluation of the model during the run, whose metrics are written into the journal."""

    name: str
    every: int
    """Steps between two; the last step has one as well."""
    evaluator: Evaluator
    """Measures the model as it would be kept now: with averaged weights and merged adapters. It learns from the
    training split and is measured on the validation split. It may draw PyTorch's random numbers: their state is
    restored afterwards."""


def check_probes(probes: Sequence[Probe], splits: Splits) -> None:
    """Raise `ConfigError` if there are probes and the data has no validation split to measure them on."""
    if probes and splits.validation is None:
        names = ", ".join(probe.name for probe in probes)
        raise ConfigError(f"{names} cannot be measured during the run: the data has no validation split")


class Examiner:
    """Measures the weights that would be kept now, without changing the run."""

    def __init__(
        self,
        state: TrainState,
        bundle: Bundle,
        journal: Journal,
        display: Display,
        *,
        evaluator: Evaluator,
        train: Source,
        validation: Source | None,
        readers: Readers,
        best_in: Path | None,
        probes: Sequence[Probe] = (),
    ) -> None:
        """`bundle` has the network in training. `best_in` is where the best model is saved, if it is to be."""
        self.state = state
        self.bundle = bundle
        self.journal = journal
        self.display = display
        self.evaluator = evaluator
        self.train = train
        self.validation = validation
        self.readers = readers
        self.best_in = best_in
        self.probes = tuple(probes)

    def evaluate(self) -> None:
        """Measures on the validation split, if there is one, and notes whether it is the best result so far; with an
        average, also what the weights are without it. Raises `NonFiniteLoss`."""
        if self.validation is None:
            return
        state = self.state
        if state.average is not None:
            result = self._measure(self.validation)
            self.journal.write("evaluation", step=state.step, split="validation", weights="trained", **result)
        with state.averaged():
            result = self._measure(self.validation)
            score = result.get("mean_average_precision", result["accuracy"])
            best = score > state.best.score
            if best:
                state.best = Best(score, state.step)
                self._keep(result["accuracy"])
            else:
                state.best.waited += 1
        values = {"weights": state.measured, "best": best, **result}
        self.journal.write("evaluation", step=state.step, split="validation", **values)
        self.display.evaluated(state.step, result, best)

    def due(self, *, over: bool) -> list[Probe]:
        """The probes whose turn it is after this step; all where it is the last."""
        return [probe for probe in self.probes if over or self.state.step % probe.every == 0]

    def probe(self, due: Sequence[Probe]) -> None:
        """Makes measurements and writes them into the journal."""
        device = self.bundle.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            outputs = Outputs(self.current(), readers=self.readers)
            for probe in due:
                assert self.validation is not None, "checked when the examiner was made"
                metrics = probe.evaluator(outputs, self.train, self.validation)
                values = {"name": probe.name, "weights": self.state.measured, **metrics}
                self.journal.write("probe", step=self.state.step, **values)
                shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
                self.display.say(f"step {self.state.step:,}: {shown}")

    def current(self) -> Bundle:
        """The model as it would be kept now, in evaluation mode, with weights of its own."""
        with self.state.averaged():
            return replace(self.bundle, network=copy.deepcopy(merged(self.bundle.network)).eval())

    def _measure(self, source: Source) -> dict[str, float]:
        result = self.evaluator(Outputs(self.bundle, readers=self.readers), self.train, source)
        check_finite(result, self.state.step)
        return result

    def _keep(self, accuracy: float) -> None:
        if self.best_in is not None:
            self.bundle.metrics = {"validation_accuracy": accuracy}
            self.bundle.provenance["step"] = self.state.best.step
            write_bundle(replace(self.bundle, network=merged(self.bundle.network)), self.best_in)
