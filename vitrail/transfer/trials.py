"""Trials before a run: several settings within a time budget (successive halving), or learning rates. The validation
split decides."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vitrail.bench.workload import timed, waits_for
from vitrail.data.source import evenly, fingerprint, subset
from vitrail.data.sources import OpenedData
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, NonFiniteLoss
from vitrail.evaluation.metrics.numbers import merit
from vitrail.experiments.runner import complete_run
from vitrail.files import saving, write_json
from vitrail.machine import Precision, pick_device, resolve_precision
from vitrail.models.predictor import Predictor
from vitrail.tasks.task import TaskMetric
from vitrail.training.config import TrainConfig
from vitrail.training.folder import locked
from vitrail.training.linear_start import linear_score
from vitrail.training.log import Log, kept_result, read_journal
from vitrail.transfer.examination import on_device
from vitrail.transfer.facts import Candidate, Search
from vitrail.transfer.protocols import MIN_STEPS, check_final_run, final_config, with_all_images
from vitrail.weights.adapt import adapted
from vitrail.weights.bundle import Bundle, weights_sha256

RESULTS = "trials.json"

TRIALS_SUFFIX = "-trials"
"""Suffix of the folder beside a run's folder that contains its trials."""

LINEAR = "a linear model of frozen features"

TRIAL_FRACTION = 0.35
"""Fraction of the time for training that the trials may use."""

MIN_TRIAL_STEPS = 30
"""Minimum number of steps of a trial. With less time, fewer settings are tried, or none: the best learning rate of a
very short run is too low for a longer one."""

MIN_CANDIDATES = 3
"""Minimum number of settings to try. Two trials take more steps from the final run than they gain."""

TRIAL_VALIDATION = 256
"""Maximum number of validation images that measure a trial."""

FINAL_FRACTION = 0.75
"""Fraction of the remaining time that the steps of the final run may use. The rest is for evaluation and saving."""

STEP_PER_FORWARD = 3.5
"""Time of a training step as a multiple of the forward pass on the same images."""

EVALUATION_PER_FORWARD = 1.2
"""Time of an evaluation, which computes in float32, as a multiple of the forward pass in float32. The rest of the time
is for reading and resizing the images."""

EVALUATION_FRACTION = 0.2
"""Fraction of the training time that evaluations on the validation split may use."""


class Tried(NamedTuple):
    """A finished trial."""

    name: str
    steps: int
    value: float | None
    """Metric on the validation split. None if the training diverged."""
    loss: float | None = None
    """Loss on the validation split, which decides between equal values. None if it is unknown."""

    def text(self, metric: TaskMetric) -> str:
        """Return the metric and the loss, which decides between equal values, unless it is the same, or "diverged"."""
        loss = "" if self.loss in (None, self.value) else f", loss {self.loss:.4g}"
        return "diverged" if self.value is None else metric.text(self.value) + loss


def forward_seconds(bundle: Bundle, precision: Precision, batch: int = 16) -> float:
    """Return the time of a model's forward pass on its device, in seconds per image."""
    config = bundle.network.config
    predictor = Predictor(bundle.network, precision)
    images = torch.zeros(batch, config.channels, *config.image_size, device=predictor.device)
    timer = timed(lambda: predictor.embed(images), waits_for(predictor.device))
    return min(timer() for _ in range(3)) / batch


def search_settings(
    config: TrainConfig,
    data: OpenedData,
    initial: Bundle,
    search: Search,
    folder: Path,
    *,
    started: float,
    on_trial: Callable[[str], None] = lambda text: None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[TrainConfig, tuple[Tried, ...]]:
    """Return the config of the final run in `folder`, with the best candidate's settings, and the trials.

    All candidates train for a few steps, each with a complete learning-rate schedule. The better half trains for twice
    as many steps, and so on until one is left. The validation split decides, and the test split is not used. The
    final run's steps are those that fit into the time that is left of `search.seconds`, counted from `started`
    (`time.perf_counter()`).

    Finished trials are reused if the same command is given again. `on_trial` receives a line for each trial, and
    `on_progress` the number of images whose features are computed, and of all images. Raise the errors of `train`, and
    `RunError` if another process tries settings for the same run.
    """
    device = pick_device(config.run.device)
    config = config.override(precision=resolve_precision(config.run.precision, device))
    trials = _Trials(config, data, initial, trials_folder(folder), on_trial)
    trials.measure_start(on_progress)
    placed = on_device(adapted(initial, image_size=config.images.image_size), device)
    in_float32 = forward_seconds(placed, "float32")
    forward = in_float32 if config.run.precision == "float32" else forward_seconds(placed, "bf16")
    budget = _Budget(
        search,
        started,
        step=STEP_PER_FORWARD * forward * config.run.batch_size,
        evaluation=EVALUATION_PER_FORWARD * in_float32,
        tested=trials.tested,
    )
    if budget.for_test > search.seconds / 2:
        on_trial(
            f"measuring {trials.tested:,} test images takes most of the time: about {budget.for_test:,.0f} seconds"
        )
    most = config.total_steps(len(trials.splits.train))
    count, steps = budget.trial_lengths(most, trials.images)
    best = search.candidates[0]
    if trials.images and count > 1:
        best, measured = trials.halve(search.candidates[:count], trials.recorded_steps or steps, search.rising)
        budget.step = measured or budget.step
    final = budget.final_steps(most, trials.held_out)
    settings: dict[str, Any] = {"steps": final, **best.settings}
    if trials.held_out and search.may_thin_evaluations:
        settings["evaluations"] = budget.evaluations(config.run.evaluations, final, trials.held_out)
    if count > 1:
        on_trial(f"chosen: {best.name}, {final:,} steps")
    elif final < most:
        on_trial(f"{final:,} of {most:,} steps, which fit into the time that is left")
    return config.override(**settings), tuple(trials.tried)


@dataclass
class _Budget:
    """The time of a command, and the time that its parts take."""

    search: Search
    started: float
    """Start of the command, as a value of `time.perf_counter`."""
    step: float
    """Seconds per training step."""
    evaluation: float
    """Seconds per evaluated image."""
    tested: int
    """Number of test images."""

    @property
    def for_test(self) -> float:
        """Seconds for measuring the finished model on the test split, if they belong to the budget."""
        return self.tested * self.evaluation if self.search.includes_test else 0.0

    @property
    def left(self) -> float:
        """Seconds that are left for trials and for the final run."""
        return max(0.0, self.search.seconds - self.for_test - (time.perf_counter() - self.started))

    def trial_lengths(self, most: int, images: int) -> tuple[int, int]:
        """Return the number of candidates to try, and the number of steps of the shortest trials. `most` is the number
        of steps of the final run, and `images` the number of images that measure a trial."""
        if most < 2 * MIN_TRIAL_STEPS:  # trials would cost more than the run itself
            return 1, 0
        # the steps that all trials together may take, and the cost of a trial's evaluation in steps
        affordable, evaluation = self.left * TRIAL_FRACTION / self.step, images * self.evaluation / self.step
        candidates = len(self.search.candidates)
        for count in range(candidates, max(2, min(candidates, MIN_CANDIDATES)) - 1, -1):
            left, factor, weight, runs = count, 1, 0, 0
            while left > 1:
                weight, runs = weight + left * factor, runs + left
                left, factor = left // 2, factor * 2
            steps = int((affordable - runs * evaluation) / weight)
            if steps >= MIN_TRIAL_STEPS:
                return count, min(steps, max(MIN_TRIAL_STEPS, most // 4))
        return 1, 0

    def final_steps(self, most: int, held_out: int) -> int:
        """Return the number of steps of the final run, at most `most`."""
        if not self.search.is_limited:
            return most
        seconds = max(0.0, self.left - 2 * held_out * self.evaluation)  # before the first step, and of the saved model
        return min(most, max(MIN_STEPS // 2, int(FINAL_FRACTION * seconds / self.step)))

    def evaluations(self, most: int, steps: int, held_out: int) -> int:
        """Return the number of evaluations that a run of this many steps can afford, at most `most` and at least 2."""
        affordable = int(EVALUATION_FRACTION * steps * self.step / (held_out * self.evaluation))
        return max(2, min(most, affordable))


def trials_folder(folder: Path) -> Path:
    """Return the folder that contains the trials of the run in `folder`."""
    return folder.with_name(f"{folder.name}{TRIALS_SUFFIX}")


def is_trial(folder: Path) -> bool:
    """Return True if a run is a trial of settings. The names of all candidates have their learning rate."""
    return folder.absolute().parent.name.endswith(TRIALS_SUFFIX) and "learning-rate-" in folder.name


def read_tried(folder: Path) -> tuple[Tried, ...]:
    """Return the finished trials of the run in `folder`, in the order in which they ran."""
    recorded = _read(trials_folder(folder))
    return () if recorded is None else tuple(Tried(*row) for row in recorded["tried"])


def _read(place: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((place / RESULTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _with_fewer(spec: str, splits: Splits) -> OpenedData:
    """Return the training images with at most `TRIAL_VALIDATION` validation images, evenly spaced."""
    validation = splits.validation
    if validation is not None and len(validation) > TRIAL_VALIDATION:
        validation = subset(validation, evenly(len(validation), TRIAL_VALIDATION).tolist())
    return OpenedData("", replace(splits, validation=validation, test=None, title=f"data {spec!r}"))


def _key(config: TrainConfig, initial: Bundle, splits: Splits) -> str:
    """Return a hash of the settings, the model and the data. Earlier trials with the same hash can be reused."""
    settings = json.dumps(config.override(run=None, overwrite=False, accumulation=1).to_plain(), sort_keys=True)
    parts = settings, weights_sha256(initial.network), fingerprint(splits.train, splits.validation)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class _Trials:
    """The trials of one search."""

    def __init__(
        self, config: TrainConfig, data: OpenedData, initial: Bundle, place: Path, on_trial: Callable[[str], None]
    ) -> None:
        self.config = config
        self.initial = initial
        self.place = place
        self.on_trial = on_trial
        self.splits = config.data.cut(data)
        self.held_out = 0 if self.splits.validation is None else len(self.splits.validation)
        self.tested = 0 if self.splits.test is None else len(self.splits.test)
        self.trial_data = _with_fewer(data.spec, self.splits)
        self.images = min(self.held_out, TRIAL_VALIDATION)
        self.metric = config.task.selection(self.splits)
        self.tried: list[Tried] = []
        self.speeds: dict[str, float] = {}
        self.key = _key(config, initial, self.splits)
        recorded = _read(place)
        if recorded is not None and recorded.get("key") != self.key:
            (place / RESULTS).unlink()  # the trials of another command
            recorded = None
        self.recorded_steps: int = 0 if recorded is None else recorded["steps"]

    def measure_start(self, on_progress: Callable[[int, int], None] | None) -> None:
        """Measure the linear model of frozen features that is the start of every trial."""
        if self.config.start.linear_head:
            found = linear_score(self.config, self.initial, self.splits, on_progress)
            if found is not None and found[0] == self.metric.name:
                self._add(Tried(LINEAR, 0, found[1]))

    def halve(
        self, candidates: Sequence[Candidate], steps: int, rising: Sequence[Candidate] = ()
    ) -> tuple[Candidate, float | None]:
        """Return the best candidate, and its seconds per step if they are known. The first trials have `steps`
        steps. Raise `RunError` if another process tries settings for the same run."""
        self.on_trial(f"trying {len(candidates)} settings for {steps:,} steps each, the better half twice as long")
        self.recorded_steps = steps
        left, count = list(candidates), len(candidates)
        with locked(self.place):
            while count > 1:
                values = {one.name: self._run(one, steps) for one in left}
                if count == len(candidates):
                    left += self._climb(rising, values, steps)
                count //= 2
                left = sorted(left, key=lambda one: values[one.name], reverse=True)[:count]
                steps *= 2
        return left[0], self.speeds.get(left[0].name)

    def _climb(
        self, rising: Sequence[Candidate], values: dict[str, tuple[float, float]], steps: int
    ) -> list[Candidate]:
        """Try the next higher learning rate as long as the highest one is the best of them. Add the new values to
        `values`, and return the new settings."""
        tried = [one for one in rising if one.name in values]
        found = list[Candidate]()
        for higher in rising[len(tried) :]:
            if max(tried, key=lambda one: values[one.name]) != tried[-1]:
                break
            if not found:
                self.on_trial("the highest learning rate is the best, so higher ones are tried too")
            values[higher.name] = self._run(higher, steps)
            tried.append(higher)
            found.append(higher)
        return found

    def _run(self, candidate: Candidate, steps: int) -> tuple[float, float]:
        """Train with a candidate's settings, and return its `merit` on the validation split."""
        place = self.place / f"{candidate.name.replace(' ', '-')}-{steps}"
        of_run = {"evaluations": 0, "checkpoints": 1, "keep": "last", "overwrite": False, "patience": None, "probe": ""}
        of_data = {"validation": "auto", "per_class": None, "mix": ()}  # the data is divided and mixed already
        config = self.config.override(steps=steps, run=str(place), **of_run, **of_data, **candidate.settings)
        with suppress(NonFiniteLoss):  # without a finished model, there are no metrics
            complete_run(config, data=self.trial_data, initial=self.initial, measure_test=False, replaces=True)
        found = kept_result(place / "journal.jsonl")
        value, loss = found.get(self.metric.name), found.get(self.config.task.loss_metric)
        events = (event for event in read_journal(place / "journal.jsonl") if event["event"] == "step")
        if rates := [event["images_per_second"] for event in events][1:]:  # the first one has the start-up
            self.speeds[candidate.name] = config.run.batch_size / float(np.median(rates))
        for unneeded in ("checkpoints", "model"):
            shutil.rmtree(place / unneeded, ignore_errors=True)
        self._add(Tried(candidate.name, steps, value, loss))
        return merit(value, loss, higher_is_better=self.metric.higher_is_better)

    def _add(self, trial: Tried) -> None:
        """Record a trial, and report it to the user."""
        self.tried.append(trial)
        split = "" if trial.value is None else "validation "
        steps = f", {trial.steps:,} steps" if trial.steps else ""
        self.on_trial(f"{trial.name}{steps}: {split}{trial.text(self.metric)}")
        if trial.steps:
            with saving("the trials", self.place):
                write_json(
                    self.place / RESULTS,
                    {
                        "key": self.key,
                        "steps": self.recorded_steps,
                        "metric": self.metric.name,
                        "tried": self.tried,
                    },
                )


# Learning rates that are tried by complete runs, before a run with the best of them.


def choose_rate(
    config: TrainConfig,
    data: OpenedData,
    rates: tuple[float, ...],
    folder: Path,
    *,
    initial: Bundle,
    log: Log | None = None,
) -> tuple[TrainConfig, Mapping[float, Tried]]:
    """Train with each learning rate. Return the config of the final run, which trains on all images with the best rate,
    and the trials by their rates, best first. Without `rates` nothing is tried, and `config` stays as it is.

    The loss decides between equal metrics, and the lower rate comes first if the losses are equal too. Every trial has
    a folder inside `folder`. A finished trial is reused, and a stopped trial continues. The test split is not used.
    `data` is the open data set of `config`, and `initial` is the model that every trial starts from.

    `log` names each trial. A trial that diverges is skipped.

    Raise `ConfigError` if no image is held out and for settings that the final run cannot have, `RunError` if an
    existing trial has other settings, data or weights, `NonFiniteLoss` if all trials diverge, and all other errors of
    `train`.
    """
    if not rates:
        return config, {}
    check_final_run(config, with_all_images(config).data.cut(data))
    no_images = (
        f"validation_share={config.data.validation_share} leaves no labelled image for choosing the learning "
        "rate; set learning_rate, or use more images"
    )
    splits = config.data.cut(data)
    if not splits.validation:
        raise ConfigError(no_images)
    metric, log, trials = config.task.selection(splits), log or Log(), dict[float, Tried]()
    for rate in rates:
        place = folder / f"learning-rate-{rate:g}"
        trial = config.override(learning_rate=rate, keep="last", run=str(place), overwrite=False)
        try:
            complete_run(trial, data=data, initial=initial, log=log, measure_test=False, replaces=config.run.overwrite)
        except NonFiniteLoss as error:
            if rate == rates[-1] and not trials:
                raise
            log.note(f"learning rate {rate:g} is skipped: {str(error).partition(':')[0]}")
            continue
        found = kept_result(place / "journal.jsonl")
        if metric.name not in found:  # no held-out image has a label and can be decoded
            raise ConfigError(no_images)
        steps = config.total_steps(len(splits.train))
        trials[rate] = Tried(f"learning rate {rate:g}", steps, found[metric.name], found[config.task.loss_metric])
        log.say(f"{trials[rate].name}: {trials[rate].text(metric)} on the held-out images")

    def order(rate: float) -> tuple[tuple[float, float], float]:
        return merit(trials[rate].value, trials[rate].loss, higher_is_better=metric.higher_is_better), -rate

    best_first = sorted(trials, key=order, reverse=True)
    return final_config(config, best_first[0]), {rate: trials[rate] for rate in best_first}
