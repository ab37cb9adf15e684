"""The end of a run: the kept weights are measured on the held-out splits and saved, with examples and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vitrail.data.batch import Skipped
from vitrail.data.source import Source
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.predictions.predict import Predictions
from vitrail.tasks import Task
from vitrail.tasks.own_model import BESIDE, beside, load_beside, load_weights, without_adapters, write_weights
from vitrail.tasks.task import Objective
from vitrail.training.assembly import make_bundle
from vitrail.training.monitoring.meter import check_finite
from vitrail.training.monitoring.skipped import HeldOutSkips
from vitrail.training.parallel.streamed import StreamedCopy
from vitrail.training.records.examples import Example, write_examples
from vitrail.training.records.pictures import write_pictures
from vitrail.training.reporting.journal import Journal
from vitrail.training.setup import Setup
from vitrail.training.state.best import BestModel
from vitrail.training.state.state import TrainState
from vitrail.weights.bundle import Bundle

__all__ = ["Finish", "RunResult"]

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
    examples: tuple[Example, ...]
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
        journal: Journal,
        best: BestModel,
        outputs: Callable[..., Outputs],
        skips: HeldOutSkips,
    ) -> None:
        """`outputs` returns the outputs of a model for an evaluation, with the arguments `keep` and `on_skip` of
        `Outputs`. `skips` shows the images that cannot be decoded."""
        self.setup = setup
        self.folder = folder
        self.journal = journal
        self.best = best
        self.outputs = outputs
        self.skips = skips

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
        self.journal.write("finished", step=state.step, metrics=bundle.metrics, **summary)
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
            self.journal.write("skipped", step=state.step, split=split, key=item.key, reason=item.reason)
            self.skips.of(split)(item)

        outputs = self.outputs(bundle, keep=MAX_KEPT, on_skip=skip)
        predictions: dict[str, Predictions] = {}
        evaluator = task.evaluator(state.copy or state.objective)
        for split, source in (("validation", splits.validation), ("test", splits.test)):
            if source is not None:
                result = evaluator(outputs, splits.train, source)
                state.settle()
                check_finite(result, task.loss_metric, state.step)
                values = {"split": split, "weights": state.measured, "kept": True, **result}
                self.journal.write("evaluation", step=bundle.provenance["step"], **values)
                bundle.metrics |= {f"{split}_{name}": value for name, value in task.summary(result).items()}
                if (kept := outputs.kept(source)) is not None:
                    predictions[split] = kept
        return predictions
