"""A run from its config to its model: opens the data, makes the parts, calls the loop, measures what came out."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vitrail.data.check import quick_check
from vitrail.data.pipeline import Skipped
from vitrail.errors import ConfigError, NonFiniteLoss, RunError, SaveError
from vitrail.evaluation.head import Accuracy
from vitrail.evaluation.outputs import Outputs
from vitrail.files import recover_folder, saving, write_json
from vitrail.machine import keep_freed_memory
from vitrail.models.lora import merged
from vitrail.models.variants import AnyNetwork
from vitrail.training.config import TrainConfig
from vitrail.training.folder import new_folder
from vitrail.training.loop import fit
from vitrail.training.monitoring.display import Display
from vitrail.training.monitoring.examiner import Examiner, Probe, check_probes
from vitrail.training.monitoring.examples import Example, write_examples
from vitrail.training.monitoring.journal import Journal, read_journal
from vitrail.training.monitoring.meter import check_finite
from vitrail.training.monitoring.stop import StopRequest
from vitrail.training.monitoring.watch import Intervals, Outlets, Watch
from vitrail.training.record import read_record
from vitrail.training.setup import Parts
from vitrail.training.start import open_again, open_initial
from vitrail.training.state.checkpoint import Checkpoints
from vitrail.training.state.state import TrainState
from vitrail.weights.bundle import Bundle, load_bundle, write_bundle

__all__ = ["RunResult", "finished", "resume", "train"]


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    folder: Path
    bundle: Bundle
    """The model that `folder / "model"` holds."""
    metrics: dict[str, float]
    """What was measured of it: `validation_accuracy`, and `test_accuracy` where the data has a test split."""
    summary: dict[str, float]
    """Steps, seconds, images per second, share of the time spent waiting for data, bytes of memory at the peak."""
    examples: tuple[Example, ...]
    """A few held-out images, as files, and what the model says of them."""


def train(
    config: TrainConfig,
    *,
    initial: Bundle | None = None,
    probes: Sequence[Probe] = (),
    measure_test: bool = True,
    display: Display | None = None,
    started: float | None = None,
) -> RunResult:
    """Trains as `config` says, into a folder of its own.

    `initial` is the model that `config` has the run start from, where it was loaded already; it is not changed.
    `probes` are measured during the run. Without `measure_test` the test split is left alone: for runs that choose the
    settings of another. `started` is when the user began to wait (perf_counter).

    Raises `UserError` for settings and data that cannot work, `Stopped` on request, `NonFiniteLoss`, `SaveError`.
    """
    started = time.perf_counter() if started is None else started
    if initial is not None and config.start.init is None:
        raise ConfigError("initial is a model to start from, and config.start.init does not say where it is from")
    parts = Parts(config, initial or open_initial(config.start), measure_test=measure_test)
    check_probes((*parts.probes, *probes), parts.splits)
    torch.manual_seed(config.run.seed)
    network, notes = parts.network()
    folder = new_folder(config)
    try:
        with saving("the run", folder):
            write_json(folder / "run.json", parts.record())
    except SaveError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return _Run(parts, folder, display or Display(), started).go(network, notes, probes)


def resume(
    folder: Path,
    *,
    probes: Sequence[Probe] = (),
    measure_test: bool = True,
    display: Display | None = None,
    started: float | None = None,
) -> RunResult:
    """Goes on with a run that was stopped or killed, from its newest whole checkpoint. Raises as `train` does.

    In float32 on the CPU the result is the same, bit by bit, as if the run had never stopped. The model that the run
    started from is not needed, unless it was killed before its first checkpoint.
    """
    started = time.perf_counter() if started is None else started
    record = read_record(folder)
    model = None
    if record.origin is not None and not Checkpoints(folder / "checkpoints").steps():
        model = open_again(record.config.start, str(folder), record.origin.sha256)
    parts = Parts(record.config, model, record.origin, measure_test=measure_test)
    if record.fingerprint != parts.fingerprint:
        raise RunError(
            f"the data of run {folder} has changed since it began ({record.images:,} training images then, "
            f"{len(parts.splits.train):,} now, or other names); a resumed run needs the same data"
        )
    check_probes((*parts.probes, *probes), parts.splits)
    recover_folder(folder / "model")
    torch.manual_seed(record.config.run.seed)
    network, notes = parts.network()
    return _Run(parts, folder, display or Display(), started).go(network, notes, probes, resuming=True)


def finished(folder: Path) -> RunResult | None:
    """What came of a run that is complete, as its folder tells; None of one that is not. Raises `BundleError`."""
    for event in read_journal(folder / "journal.jsonl"):
        if event["event"] == "finished":
            summary = {name: value for name, value in event.items() if isinstance(value, int | float)}
            metrics = dict(event["metrics"])
            return RunResult(folder, load_bundle(folder / "model"), metrics, summary, examples=())
    return None


class _Run:
    """One process's part of a run: from a network, or the newest checkpoint, to the finished model."""

    def __init__(self, parts: Parts, folder: Path, display: Display, started: float) -> None:
        self.parts = parts
        self.folder = folder
        self.journal = Journal(folder / "journal.jsonl")
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.display = display
        self.started = started

    def go(
        self, network: AnyNetwork, notes: tuple[str, ...], probes: Sequence[Probe], *, resuming: bool = False
    ) -> RunResult:
        parts, journal, display = self.parts, self.journal, self.display
        if resuming:
            self._check_incomplete()
        keep_freed_memory()
        state, plan = parts.state(network), parts.plan()
        bundle = parts.bundle(network)
        for note in self._restore(state) if resuming else ():
            display.note(note)
        self._announce(network, notes)
        journal.write("resumed" if resuming else "started", step=state.step, steps=parts.steps)
        with StopRequest() as stop:
            examiner = self._examiner(state, bundle, probes)
            outlets = Outlets(journal, self.checkpoints, display)
            watch = Watch(state, plan, outlets, self._intervals(), examiner, stop=stop, started=self.started)
            display.begin(state.step, parts.steps)
            try:
                fit(state, plan, watch)
            except NonFiniteLoss as error:
                journal.write("failed", step=state.step, reason=str(error))
                raise NonFiniteLoss(_advice(error, self.checkpoints)) from None
            finally:
                display.end()
                state.batches.close()
        return self._finish(bundle, state, watch.summary(parts.device))

    def _check_incomplete(self) -> None:
        events = read_journal(self.journal.path)
        for event in events:
            if event["event"] == "finished":
                early = event["step"] < self.parts.steps
                did = f"ended early, after {event['step']:,}" if early else "has done all"
                raise RunError(f"run {self.folder} is complete: it {did} of its {self.parts.steps:,} steps")

    def _restore(self, state: TrainState) -> list[str]:
        """Goes back to the newest checkpoint; returns what to say of it. Killed before the first, a run begins anew."""
        if self.checkpoints.steps():
            return self.checkpoints.restore(state)
        return ["the run ended before its first checkpoint: starting from the beginning"]

    def _intervals(self) -> Intervals:
        config, validation = self.parts.config.run, self.parts.splits.validation

        def every(count: int) -> int:
            return math.ceil(self.parts.steps / count)

        return Intervals(
            journal=min(50, every(100)),
            evaluate=every(config.evaluations) if validation is not None and config.evaluations else None,
            checkpoint=every(config.checkpoints),
        )

    def _examiner(self, state: TrainState, bundle: Bundle, probes: Sequence[Probe]) -> Examiner:
        parts, config = self.parts, self.parts.config
        return Examiner(
            state,
            bundle,
            self.journal,
            self.display,
            evaluator=Accuracy(),
            train=parts.splits.train,
            validation=parts.splits.validation,
            readers=config.run.readers,
            best_in=self.folder / "model" if config.run.keep == "best" else None,
            probes=(*parts.probes, *probes),
        )

    def _announce(self, network: AnyNetwork, notes: tuple[str, ...]) -> None:
        parts, config = self.parts, self.parts.config
        for note in (*notes, *parts.splits.notes):
            self.display.note(note)
        for line in quick_check(parts.splits):
            self.display.say(line)
        count = sum(parameter.numel() for parameter in network.parameters())
        moving = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
        name = config.start.init or config.model.name
        self.display.say(
            f"{name} with {count:,} parameters{f', {moving:,} of them trained,' if moving < count else ''} on "
            f"{len(parts.splits.train):,} images of {len(parts.splits.classes)} classes: {parts.steps:,} steps of "
            f"{config.run.batch_size} in {config.run.precision} on {parts.device}{COMPILED[parts.compile]}, into "
            f"{self.folder}"
        )

    def _finish(self, bundle: Bundle, state: TrainState, summary: dict[str, float]) -> RunResult:
        """Measures the weights that are kept, on splits that had no say in them, and writes the model."""
        parts, folder, journal = self.parts, self.folder, self.journal
        if state.average is not None:
            state.average.swap()  # for good: no step follows
        if parts.config.start.lora_rank is not None:
            bundle.network = merged(bundle.network)
        bundle.provenance["step"] = state.step
        if parts.config.run.keep == "best" and state.best.step >= 0:
            best = load_bundle(folder / "model", device=str(parts.device))
            bundle.network.load_state_dict(best.network.state_dict())
            bundle.provenance["step"] = state.best.step

        def skip(item: Skipped) -> None:
            journal.write("skipped", step=state.step, key=item.key, reason=item.reason)

        outputs, evaluator = Outputs(bundle, readers=parts.config.run.readers, on_skip=skip), Accuracy()
        for split, source in (("validation", parts.splits.validation), ("test", parts.splits.test)):
            if source is not None:
                result = evaluator(outputs, parts.splits.train, source)
                check_finite(result, state.step)
                values = {"split": split, "weights": state.measured, "kept": True, **result}
                journal.write("evaluation", step=bundle.provenance["step"], **values)
                if result["images"]:  # a cut of classes of one image each holds none, and a split may have no labels
                    bundle.metrics[f"{split}_accuracy"] = result["accuracy"]
        write_bundle(bundle, folder / "model")
        held_out = parts.splits.held_out
        examples = write_examples(bundle, held_out[1] if held_out else parts.splits.train, folder / "examples")
        journal.write("finished", step=state.step, metrics=bundle.metrics, **summary)
        return RunResult(folder, bundle, bundle.metrics, summary, examples)


COMPILED = {"off": "", "on": ", compiled", "graphs": ", compiled into CUDA graphs"}


def _advice(error: NonFiniteLoss, checkpoints: Checkpoints) -> str:
    kept = "it came before the first checkpoint"
    if steps := checkpoints.steps():
        kept = f"the last good checkpoint is {checkpoints.folder}/step-{steps[0]}"
    return f"{error}: the run diverged; {kept}. Try a lower --learning-rate, a longer --warmup, or --precision float32"
