"""A run from its config to its model: opens the data, makes the parts, calls the loop, measures what came out."""

from __future__ import annotations

import functools
import math
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitrail.data.check import quick_check
from vitrail.data.crop import crop_box
from vitrail.data.pipeline import Skipped, TrainingBatches
from vitrail.data.preprocess import Preprocess
from vitrail.data.source import fingerprint, is_multi_label
from vitrail.data.sources import mix_in, open_data
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, NonFiniteLoss, RunError, SaveError
from vitrail.evaluation.accuracy import Accuracy
from vitrail.files import recover_folder, saving, write_json
from vitrail.machine import describe, keep_freed_memory, pick_device, resolve_precision
from vitrail.models.compiled import compile_blocks, resolve_compile
from vitrail.models.float8 import check_float8, use_float8
from vitrail.models.variants import AnyConfig, AnyNetwork, build
from vitrail.objectives.classification import Classification
from vitrail.plain import to_plain
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.config import TrainConfig
from vitrail.training.display import Display
from vitrail.training.examples import Example, write_examples
from vitrail.training.folder import new_folder, read_record
from vitrail.training.journal import Journal, read_journal
from vitrail.training.loop import Plan, fit
from vitrail.training.meter import check_finite
from vitrail.training.optimizer import make_optimizer
from vitrail.training.schedule import Schedule
from vitrail.training.state import TrainState
from vitrail.training.stop import StopRequest
from vitrail.training.watch import Intervals, Watch
from vitrail.weights.bundle import Bundle, load_bundle

__all__ = ["RunResult", "resume", "train"]


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    folder: Path
    bundle: Bundle
    """The model that `folder / "model"` holds."""
    metrics: dict[str, float]
    """What was measured of it: `validation_accuracy`, and `test_accuracy` where the data has a test split."""
    summary: dict[str, float]
    """Seconds, images per second, share of the time spent waiting for data, bytes of memory at the peak."""
    examples: tuple[Example, ...]
    """A few held-out images, as files, and what the model says of them."""


def train(config: TrainConfig, *, display: Display | None = None, started: float | None = None) -> RunResult:
    """Trains as `config` says, into a folder of its own. `started` is when the user began to wait (perf_counter).

    Raises `UserError` for settings and data that cannot work, `Stopped` on request, `NonFiniteLoss`, `SaveError`.
    """
    started = time.perf_counter() if started is None else started
    parts = _Parts(config)
    folder = new_folder(config)
    try:
        with saving("the run", folder):
            write_json(folder / "run.json", parts.record())
    except SaveError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return parts.run(folder, display or Display(), started, resuming=False)


def resume(folder: Path, *, display: Display | None = None, started: float | None = None) -> RunResult:
    """Goes on with a run that was stopped or killed, from its newest whole checkpoint. Raises as `train` does.

    In float32 on the CPU the result is the same, bit by bit, as if the run had never stopped.
    """
    started = time.perf_counter() if started is None else started
    record = read_record(folder)
    parts = _Parts(record.config)
    if record.fingerprint != parts.fingerprint:
        raise RunError(
            f"the data of run {folder} has changed since it began ({record.images:,} training images then, "
            f"{len(parts.splits.train):,} now, or other names); a resumed run needs the same data"
        )
    recover_folder(folder / "model")
    return parts.run(folder, display or Display(), started, resuming=True)


class _Parts:
    """What a config stands for on this machine, made before anything is written."""

    def __init__(self, config: TrainConfig) -> None:
        self.device = pick_device(config.device)
        # Resolved here and recorded so, or a run resumed on another machine would go on in another number format.
        self.config = config = replace(config, precision=resolve_precision(config.precision, self.device))
        self.preprocess: Preprocess = config.images
        # The shape of the network is checked before the data is looked at; the number of classes cannot be wrong.
        network_config = self.network_config(num_classes=2)
        self.compile = resolve_compile(config.compile, self.device, network_config)
        if config.precision == "float8":
            check_float8(network_config)
        self.splits = self._open(config)
        if config.keep == "best" and (self.splits.validation is None or not config.evaluations):
            raise ConfigError(
                f"keep='best' needs a validation split and evaluations to choose by; validation_share="
                f"{config.validation_share} and evaluations={config.evaluations} leave none. Choose keep='last'"
            )
        self.fingerprint = fingerprint(self.splits.train, self.splits.validation, self.splits.test)
        self.steps = config.total_steps(len(self.splits.train))

    def _open(self, config: TrainConfig) -> Splits:
        splits: Splits = open_data(
            config.data,
            validation_share=config.validation_share,
            per_class=config.per_class,
            subset_seed=config.subset_seed,
        )
        if is_multi_label(splits.train) and config.loss != "sigmoid":
            raise ConfigError(
                f"data {config.data!r} has images of several classes, which loss={config.loss!r} cannot learn; choose "
                "loss='sigmoid'"
            )
        return mix_in(splits, config.mix)

    def network_config(self, num_classes: int) -> AnyConfig:
        return self.config.model.resolve(
            num_classes=num_classes, image_size=self.preprocess.image_size, channels=self.preprocess.channels
        )

    def record(self) -> dict[str, Any]:
        """What `run.json` says: enough to do the run again, and to know what it was done on."""
        splits = {"train": self.splits.train, "validation": self.splits.validation, "test": self.splits.test}
        return {
            "config": to_plain(self.config),
            "steps": self.steps,
            "data": {
                **{name: 0 if source is None else len(source) for name, source in splits.items()},
                "fingerprint": self.fingerprint,
                "classes": list(self.splits.classes),
                "notes": list(self.splits.notes),
            },
            "machine": describe(self.device),
        }

    def run(self, folder: Path, display: Display, started: float, *, resuming: bool) -> RunResult:
        keep_freed_memory()
        torch.manual_seed(self.config.seed)
        network = build(self.network_config(len(self.splits.classes))).to(self.device)
        if self.config.precision == "float8":
            use_float8(network)
        compile_blocks(network, self.compile)
        state = self._state(network)
        journal = Journal(folder / "journal.jsonl")
        checkpoints = Checkpoints(folder / "checkpoints")
        if resuming and any(event["event"] == "finished" for event in read_journal(journal.path)):
            raise RunError(f"run {folder} is complete: it has done all of its {self.steps:,} steps")
        for note in self._restore(checkpoints, state) if resuming else ():
            display.note(note)
        self._announce(folder, network, display)
        journal.write("resumed" if resuming else "started", step=state.step, steps=self.steps)
        bundle = self._bundle(network)
        with StopRequest() as stop:
            watch = self._watch(state, folder, journal, checkpoints, display, stop, bundle, started)
            display.begin(state.step, self.steps)
            try:
                fit(state, self._plan(), watch)
            except NonFiniteLoss as error:
                journal.write("failed", step=state.step, reason=str(error))
                raise NonFiniteLoss(_advice(error, checkpoints)) from None
            finally:
                display.end()
                state.batches.close()
        return self._finish(folder, bundle, state, journal, watch.summary(self.device))

    def _restore(self, checkpoints: Checkpoints, state: TrainState) -> list[str]:
        """Goes back to the newest checkpoint; returns what to say of it. Killed before the first, a run begins anew."""
        if checkpoints.steps():
            return checkpoints.restore(state)
        return ["the run ended before its first checkpoint: starting from the beginning"]

    def _state(self, network: AnyNetwork) -> TrainState:
        config = self.config
        objective = Classification(network, loss=config.loss, label_smoothing=config.label_smoothing)
        area = config.augment.settings.crop_area
        batches = TrainingBatches(
            self.splits.train,
            self.preprocess,
            batch_size=config.batch_size,
            seed=config.seed,
            readers=config.readers,
            crop=None if area is None else functools.partial(crop_box, config.seed, area=area),
        )
        return TrainState(objective, make_optimizer(objective, config.optimization), batches)

    def _plan(self) -> Plan:
        optimization = self.config.optimization
        warmup_steps = round(optimization.warmup * self.steps)
        return Plan(
            steps=self.steps,
            schedule=Schedule(optimization.schedule, optimization.learning_rate, self.steps, warmup_steps),
            accumulation=self.config.accumulation,
            clip=optimization.clip,
            seed=self.config.seed,
            augment=self.config.augment,
            preprocess=self.preprocess,
            precision=self.config.precision,
            device=self.device,
            classes=len(self.splits.classes),
        )

    def _watch(
        self,
        state: TrainState,
        folder: Path,
        journal: Journal,
        checkpoints: Checkpoints,
        display: Display,
        stop: StopRequest,
        bundle: Bundle,
        started: float,
    ) -> Watch:
        validation, config = self.splits.validation, self.config
        evaluator = Accuracy(self.preprocess, readers=config.readers)

        def every(count: int) -> int:
            return math.ceil(self.steps / count)

        def keep_best() -> None:
            bundle.metrics = {"validation_accuracy": state.best.accuracy}
            bundle.provenance["step"] = state.best.step
            bundle.save(folder / "model")

        return Watch(
            state,
            steps=self.steps,
            intervals=Intervals(
                journal=min(50, every(100)),
                evaluate=every(config.evaluations) if validation is not None and config.evaluations else None,
                checkpoint=every(config.checkpoints),
            ),
            journal=journal,
            checkpoints=checkpoints,
            display=display,
            stop=stop,
            evaluate=None if validation is None else lambda: evaluator(bundle.network, validation),
            keep_best=keep_best if config.keep == "best" else None,
            most_skipped=math.floor(config.max_skipped * len(self.splits.train)),
            started=started,
        )

    def _bundle(self, network: AnyNetwork) -> Bundle:
        config = self.config
        provenance = {
            "data": config.data,
            "data_fingerprint": self.fingerprint,
            "validation_share": config.validation_share if self.splits.validation is not None else 0.0,
            "recipe": config.name,
            "seed": config.seed,
            "steps": self.steps,
            "kept": config.keep,
        }
        return Bundle(network, self.splits.classes, self.preprocess, scores=config.loss, provenance=provenance)

    def _announce(self, folder: Path, network: AnyNetwork, display: Display) -> None:
        for note in self.splits.notes:
            display.note(note)
        for line in quick_check(self.splits):
            display.say(line)
        count = sum(parameter.numel() for parameter in network.parameters())
        display.say(
            f"{self.config.model.variant} with {count:,} parameters on {len(self.splits.train):,} images of "
            f"{len(self.splits.classes)} classes: {self.steps:,} steps of {self.config.batch_size} "
            f"in {self.config.precision} on {self.device}{COMPILED[self.compile]}, into {folder}"
        )

    def _finish(
        self, folder: Path, bundle: Bundle, state: TrainState, journal: Journal, summary: dict[str, float]
    ) -> RunResult:
        """Measures the weights that are kept, on splits that had no say in them, and writes the model."""
        if self.config.keep == "best" and state.best.step >= 0:
            best = load_bundle(folder / "model", device=str(self.device))
            bundle.network.load_state_dict(best.network.state_dict())
            bundle.provenance["step"] = state.best.step
        else:
            bundle.provenance["step"] = state.step

        def skip(item: Skipped) -> None:
            journal.write("skipped", step=state.step, key=item.key, reason=item.reason)

        evaluator = Accuracy(self.preprocess, readers=self.config.readers, on_skip=skip)
        for split, source in (("validation", self.splits.validation), ("test", self.splits.test)):
            if source is not None:
                result = evaluator(bundle.network, source)
                check_finite(result, state.step)
                journal.write("evaluation", step=bundle.provenance["step"], split=split, kept=True, **result)
                bundle.metrics[f"{split}_accuracy"] = result["accuracy"]
        bundle.save(folder / "model")
        held_out = self.splits.held_out
        examples = write_examples(bundle, held_out[1] if held_out else self.splits.train, folder / "examples")
        journal.write("finished", step=state.step, metrics=bundle.metrics, **summary)
        return RunResult(folder, bundle, bundle.metrics, summary, examples)


COMPILED = {"off": "", "on": ", compiled", "graphs": ", compiled into CUDA graphs"}


def _advice(error: NonFiniteLoss, checkpoints: Checkpoints) -> str:
    kept = "it came before the first checkpoint"
    if steps := checkpoints.steps():
        kept = f"the last good checkpoint is {checkpoints.folder}/step-{steps[0]}"
    return f"{error}: the run diverged; {kept}. Try a lower --learning-rate, a longer --warmup, or --precision float32"
