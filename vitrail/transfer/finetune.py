"""A model, fine-tuned on other images and then looked at: what `vitrail finetune` does."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.evaluation.predictions.calibration import fit_temperature
from vitrail.evaluation.predictions.predict import Predictions, predict_all
from vitrail.evaluation.predictions.report import ClassificationReport, report
from vitrail.evaluation.truth import SingleLabels
from vitrail.machine import available_memory, pick_device
from vitrail.training.config import TrainConfig
from vitrail.training.folder import check_place, place_of
from vitrail.training.monitoring.display import Display
from vitrail.training.run import RunResult, train
from vitrail.transfer.protocol import (
    Trial,
    check_last_run,
    choose_rate,
    paper_rule,
    row_for,
    trials_of,
    whole_set,
)
from vitrail.transfer.report import write_report
from vitrail.transfer.rules import Given, Rule, facts_of, rule
from vitrail.weights.bundle import Bundle

__all__ = ["FinetuneResult", "Protocol", "finetune", "look_at", "plan"]

Protocol = Literal["rule", "paper"]


@dataclass(frozen=True)
class FinetuneResult:
    """A fine-tuned model, and what there is to know of it."""

    run: RunResult
    split: str | None
    """The split that the report is of: the test split, or else the validation split; None where neither has a label."""
    report: ClassificationReport | None
    page: Path | None
    """The report as a page."""
    trials: tuple[Trial, ...] = ()
    """Learning rates that were tried, best first."""


def plan(bundle: Bundle, config: TrainConfig, protocol: Protocol = "rule", given: Given = Given()) -> Rule:
    """The settings for fine-tuning the bundle's network on `config.data`, and the reasons for them.

    Of `config`, everything is kept that the rule does not choose; `given` is what the user chose of the rest. Raises
    `DataError` for data that cannot be used, `ConfigError` where nothing is left to train on.
    """
    device = pick_device(config.run.device)
    facts, memory, network = facts_of(_opened(config)), available_memory(device), bundle.network.config
    chosen = rule(config, network, bundle.preprocess, facts, device=device, memory=memory, given=given)
    if protocol == "paper":
        facts = facts._replace(images=_images(config))
        return paper_rule(chosen.config, network, facts, memory=memory, given=given)
    return chosen


def finetune(
    config: TrainConfig,
    *,
    protocol: Protocol = "rule",
    rates: tuple[float, ...] | None = None,
    initial: Bundle | None = None,
    display: Display | None = None,
    started: float | None = None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> FinetuneResult:
    """Trains as `config` says, which `plan` made, and measures what came out.

    With the paper's protocol, a run for each of `rates` (by default its own for data of this size) comes first, beside
    the run's folder; the images held out for them are then learned from, too. One rate needs no such run. Raises as
    `train` and `choose_rate` do.
    """
    trials: tuple[Trial, ...] = ()
    if protocol == "paper" and (rates is None or len(rates) > 1):
        if rates is None:
            rates = row_for(_images(config)).rates
        check_last_run(config)
        check_place(folder := place_of(config), config)
        trials = choose_rate(config, rates, trials_of(folder), initial=initial, display=display, on_trial=on_trial)
        config = whole_set(config, trials[0].rate)
    run = train(config, initial=initial, display=display, started=started)
    return look_at(run, config, trials)


def look_at(run: RunResult, config: TrainConfig, trials: tuple[Trial, ...] = ()) -> FinetuneResult:
    """Measures a finished run's model on its held-out split, and writes `report.html` into its folder.

    The temperature of its calibration is fitted on the validation split, and the rest is of the test split; where there
    is no test split, no temperature is fitted, since it could only be judged by the images it was fitted to.
    """
    there = _labelled(config.data.open())
    if not there:
        return FinetuneResult(run, None, None, None, trials)
    split, source = next(iter(there.items()))
    predictions = _predictions(run.bundle, source, config)
    temperature = None
    if split == "test" and "validation" in there:
        judged = _predictions(run.bundle, there["validation"], config).labelled()
        if isinstance(judged.truth, SingleLabels) and len(judged):
            temperature = fit_temperature(judged.logits, judged.truth.values, scores=judged.scores)
    found = report(predictions, temperature=temperature)
    model = run.folder / "model"
    commands = (
        ("vitrail", "predict", str(model), str(run.folder / "examples")),
        ("vitrail", "evaluate", str(model), "--data", config.data.spec, "--split", split),
    )
    page = write_report(run.folder, run.bundle, source, split, found, next_commands=tuple(map(shlex.join, commands)))
    return FinetuneResult(run, split, found, page, trials)


def _opened(config: TrainConfig) -> Splits:
    return replace(config.data, mix=()).open()


def _images(config: TrainConfig) -> int:
    """How many there are to train on where none are held out."""
    return len(_opened(config.override(validation_share=0.0)).train)


def _labelled(splits: Splits) -> dict[str, Source]:
    """The test and the validation split, each if any of its images has a label."""
    return {
        name: source
        for name, source in (("test", splits.test), ("validation", splits.validation))
        if source is not None and any(source.target(index) is not None for index in range(len(source)))
    }


def _predictions(bundle: Bundle, source: Source, config: TrainConfig) -> Predictions:
    return predict_all(bundle.network, source, bundle.preprocess, scores=bundle.output, readers=config.run.readers)
