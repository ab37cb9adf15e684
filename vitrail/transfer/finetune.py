"""Fine-tuning of a model on other images, from the settings to the report. `vitrail finetune` calls these functions."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from vitrail.data.source import Source, truth_of
from vitrail.data.sources import OpenedData
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, plural
from vitrail.evaluation.metrics.classes import fit_temperature
from vitrail.evaluation.metrics.report import regression_report, report
from vitrail.evaluation.mistakes import box_report, mask_report
from vitrail.evaluation.outputs import Outputs, Predictions
from vitrail.machine import Precision, available_memory, keep_freed_memory, pick_device, resolve_precision
from vitrail.tasks.regression import Regression
from vitrail.tasks.task import HeadlessTask
from vitrail.training.config import TrainConfig
from vitrail.training.folder import check_place, place_of
from vitrail.training.log import Log
from vitrail.training.page import try_command, write_examples
from vitrail.training.run import RunResult, train
from vitrail.training.start import check_choice, fitted
from vitrail.training.stop import interrupted_by_signals
from vitrail.transfer.dense_rules import NOUNS, TASKS_OF_TARGETS, TIMES_OF_USUAL, plan_dense
from vitrail.transfer.examination import examine
from vitrail.transfer.facts import (
    Choices,
    DataFacts,
    Explicit,
    FinetunePlan,
    Search,
    check_rate,
    facts_of,
    seconds_of,
    usual_seconds,
)
from vitrail.transfer.protocols import (
    TableRow,
    enough_validation,
    plan_by_hyperrule,
    plan_by_paper,
    plan_by_rule,
    with_all_images,
)
from vitrail.transfer.report import AnyReport, write_report
from vitrail.transfer.trials import RESULTS, Tried, choose_rate, read_tried, search_settings, trials_folder
from vitrail.weights.answers import DENSE
from vitrail.weights.bundle import Bundle
from vitrail.weights.zero_shot import NUMBER, zero_shot

Protocol = Literal["rule", "paper", "bit"]

OWN_NAMES = MappingProxyType({"test": "test", "validation": "validation"})

MAX_POINTS = 500
"""Maximum number of points in a scatter plot of the report."""


@dataclass(frozen=True)
class FinetuneResult:
    """A fine-tuned model and its metrics."""

    run: RunResult
    split: str | None
    """The split that was measured: test if there is a test split, else validation. None if neither split has labels."""
    report: AnyReport | None
    page: Path | None
    """Path of the report, if there is one."""
    trials: Mapping[float, Tried] = field(default_factory=dict)
    """Trials by their learning rates, best first."""


@dataclass(frozen=True)
class Method:
    """The way in which a model is fine-tuned. Raise `ConfigError` if the choices contradict each other. Neither the
    model nor the data is needed for that."""

    protocol: Protocol = "rule"
    """Our own rule (`plan_by_rule`), the paper's protocol (`plan_by_paper`), or BiT's HyperRule
    (`plan_by_hyperrule`)."""
    explicit: Explicit = field(default_factory=dict)
    """Settings of the user, which replace those of the protocol."""
    rates: tuple[float, ...] | None = None
    """Learning rates to try on held-out images. By default those of the protocol."""
    row: TableRow | None = None
    """Row of the paper's Table 4 for the paper's protocol. By default that for the number of training images."""
    budget: str | None = None
    """Time in which our own rule tries settings and trains. By default the usual time for the number of images."""

    def __post_init__(self) -> None:
        explicit, rates = self.explicit, self.rates
        if self.row is not None and self.protocol != "paper":
            raise ConfigError(
                f"table_row={self.row!r} is a row of the paper's Table 4; choose protocol='paper' as well"
            )
        if self.budget is not None:
            seconds_of(self.budget, 1.0)  # raises for a text that is not a time
            if self.protocol != "rule" or rates is not None:
                raise ConfigError(
                    f"budget={self.budget!r} limits the time of protocol='rule' without learning_rates; leave out "
                    "budget, or these options"
                )
        if rates is None:
            return
        if not rates or not all(0 < rate < math.inf for rate in rates) or len(set(rates)) < len(rates):
            raise ConfigError(f"learning_rates={rates} must be one or more different numbers above 0")
        if "learning_rate" in explicit:
            raise ConfigError(
                f"learning_rate={explicit['learning_rate']} and learning_rates={rates} exclude each other; choose one"
            )
        if self.protocol == "bit":
            raise ConfigError(f"learning_rates={rates}: BiT's rule has one learning rate; set learning_rate instead")


def plan(
    bundle: Bundle, data: OpenedData, config: TrainConfig, method: Method = Method(), *, search: bool = True
) -> FinetunePlan:
    """Return the settings for fine-tuning the bundle's network on this data, with the reasons for the settings.

    The protocol of the `method` replaces the settings of `config` except those of the user. With our own rule, `search`
    adds settings to try within the time budget. Raise `ConfigError` if the protocol is not for the network, or if
    settings contradict each other.
    """
    protocol, explicit, rates, budget = method.protocol, method.explicit, method.rates, method.budget
    kind = data.whole.target_kind
    usual = Regression.name if kind == "numbers" else TASKS_OF_TARGETS.get(kind, config.task.name)
    config = config.override(**{"task": usual, **explicit})
    if isinstance(config.task, HeadlessTask):
        raise ConfigError(
            f"task={config.task.name!r} learns no labels, but fine-tuning does; to train the model by this task, use: "
            f"vitrail train --init MODEL --task {config.task.name}"
        )
    if kind in (*TASKS_OF_TARGETS, "texts") or config.task.output in DENSE:
        config.task.check_data(data.whole)
    check_choice(config.start, bundle.network.config)
    fitted(bundle.network.config, config.start.init, bundle.preprocess, config.model.overrides, 2, config.task)
    keep_freed_memory()  # as in training, so that the measured speeds are those of training
    device = pick_device(config.run.device)
    network, preprocess, memory = bundle.network.config, bundle.preprocess, available_memory(device)
    data = replace(data, mixed=())
    if kind in TASKS_OF_TARGETS:
        if protocol != "rule" or rates is not None:
            what = f"protocol={protocol!r}" if protocol != "rule" else f"learning_rates={rates}"
            raise ConfigError(f"{what} is made for classes, and this data has {NOUNS[kind]}; leave it out")
        splits = config.data.cut(data)
        facts = facts_of(splits)
        wanted = seconds_of(budget, TIMES_OF_USUAL * usual_seconds(facts.images))
        return plan_dense(config, bundle, splits, facts, device=device, explicit=explicit, seconds=wanted)
    if protocol == "rule":
        seconds = None if rates is not None or not search else lambda images: seconds_of(budget, usual_seconds(images))
        chosen = _plan_by_rule(bundle, data, config, method, seconds)
        if chosen.search is None or budget is None:
            return chosen
        return replace(chosen, search=replace(chosen.search, includes_test=True))
    facts = facts_of(with_all_images(config).data.cut(data))
    if protocol == "bit":
        return plan_by_hyperrule(config, network, preprocess, facts, memory=memory, explicit=explicit)
    return plan_by_paper(
        config, network, preprocess, facts, memory=memory, row=method.row, rates=rates, explicit=explicit
    )


def _plan_by_rule(
    bundle: Bundle,
    data: OpenedData,
    config: TrainConfig,
    method: Method,
    seconds: Callable[[int], float] | None,
) -> FinetunePlan:
    """Return the settings of our own rule, after an examination of the training images through the model. `seconds`
    returns the time of the command for a number of training images, or is None if no settings are tried."""
    device, explicit, rates = pick_device(config.run.device), method.explicit, method.rates
    splits = config.data.cut(data)
    share = None
    if "validation_share" not in explicit:
        share = enough_validation(data.whole, splits, config.data.validation_share)
        if share is not None:
            config = config.override(validation_share=share)
            splits = config.data.cut(data)
    facts = facts_of(splits)
    check_rate(config.optimizer, explicit, "adamw")
    if "loss" in explicit:
        config.task.check_data(splits)
    named = explicit if rates is None else {**explicit, "learning_rate": rates[0]}
    precision: Precision = "float32" if resolve_precision(config.run.precision, device) == "float32" else "bf16"
    findings = examine(
        bundle, splits.train, facts, device=device, readers=config.run.readers, precision=precision, explicit=named
    )
    chosen = plan_by_rule(
        config,
        bundle.network.config,
        bundle.preprocess,
        facts,
        device=device,
        memory=available_memory(device),
        explicit=named,
        findings=findings,
        seconds=None if seconds is None else seconds(facts.images),
    )
    if share is not None:
        held_out = plural(len(splits.validation or ()), "validation image")
        chosen = replace(chosen, reasons=(*chosen.reasons, f"{held_out}: a part of --validation-share is enough"))
    return chosen if rates is None else _with_rates(chosen, rates, facts, explicit)


def _with_rates(chosen: FinetunePlan, rates: tuple[float, ...], facts: DataFacts, explicit: Explicit) -> FinetunePlan:
    """Return a plan that tries several learning rates. The final run uses the best of them on held-out images.

    If the data has no test split, its own validation split measures the finished model and does not choose.
    """
    if len(rates) == 1:
        return chosen
    shown = ", ".join(f"{rate:g}" for rate in rates)
    reason = f"the best learning rate of {shown} on held-out images; the model then learns from all training images"
    choices = Choices(explicit)
    choices.add(evaluations=10, keep="last")
    if not facts.has_test:
        choices.add(validation="train")
    return FinetunePlan(chosen.config.override(**choices.settings), (*chosen.reasons, reason), rates)


def starting_from_words(bundle: Bundle, data: OpenedData) -> Bundle:
    """Return a model that reads texts, but has no head, with a head made from the names of the data's classes
    (`zero_shot`). Fine-tuning keeps this head unless a linear model is better on the validation split, so it is never
    worse there than classification without training. Other models, and models for classes whose names are numbers, stay
    as they are. So do models that cannot make a head from the names, with a note on the reason."""
    names, kind = data.whole.classes, data.whole.target_kind
    is_named = kind in ("class", "classes") and not all(map(NUMBER.fullmatch, names))
    if bundle.words is None or bundle.classes or not is_named:
        return bundle
    try:
        made = zero_shot(bundle, names, readable=True)
    except ConfigError as error:  # for example, the names do not differ for the model, or a package is missing
        return replace(
            bundle,
            notes=(*bundle.notes, f"the head of the initial model is not made from the names of the classes: {error}"),
        )
    note = "the head of the initial model is made from the names of the classes, as for --by zeroshot"
    return replace(made, notes=(*bundle.notes, note))


def finetune(
    config: TrainConfig,
    data: OpenedData,
    initial: Bundle,
    *,
    rates: tuple[float, ...] = (),
    search: Search | None = None,
    log: Log | None = None,
    started: float | None = None,
) -> FinetuneResult:
    """Train the model `initial` on the data with the settings of `config`, which `plan` returned, and evaluate it.

    If there are several `rates`, a trial run for each learning rate is measured on held-out images first. The folder of
    the trials is beside the run's folder. The final run then trains on all training images with the best learning rate.
    With a `search`, short trials choose settings on the validation split (`search_settings`). Raise the errors of
    `train`, `choose_rate` and `search_settings`.
    """
    started = time.perf_counter() if started is None else started
    folder = place_of(config)
    if rates or search:
        check_place(folder, config)
    with interrupted_by_signals(f"stopped before the run; finished trials stay in {trials_folder(folder)}"):
        if search is not None:
            log = log or Log()
            log.say(f"computing the features of {plural(len(config.data.cut(data).train), 'training image')}")
            config, tried = search_settings(
                config, data, initial, search, folder, started=started, on_trial=log.say, on_progress=log.extracting
            )
            if any(one.steps for one in tried):  # these trials are beside this folder
                config = config.override(run=str(folder))
        else:
            # The trials of an earlier command must not be shown with another run of this name.
            (trials_folder(folder) / RESULTS).unlink(missing_ok=True)
        config, trials = choose_rate(config, data, rates, trials_folder(folder), initial=initial, log=log)
    run = train(config, data=data, initial=initial, log=log, started=started)
    return evaluate_run(run, config, config.data.cut(data), trials)


def evaluate_run(
    run: RunResult,
    config: TrainConfig,
    splits: Splits,
    trials: Mapping[float, Tried] = MappingProxyType({}),
    *,
    names: Mapping[str, str] = OWN_NAMES,
) -> FinetuneResult:
    """Measure the model of a finished run on its held-out split, and write `report.html` into the run's folder.

    `names` maps "test" and "validation" to the names that these splits have in the user's data set. If `names` contains
    the measured split, the report shows the command that measures this split again.

    If the test and validation splits both have labels, metrics are measured on the test split, and the calibration
    temperature is fitted on the validation split. Otherwise no temperature is fitted, because no other images are left
    to measure its effect on.
    """
    named = (("test", splits.test), ("validation", splits.validation))
    held_out = {name: source for name, source in named if source is not None and truth_of(source).known.any()}
    if not held_out:
        return FinetuneResult(run, None, None, None, trials)
    split, source = next(iter(held_out.items()))
    found: AnyReport
    predictions = None if run.bundle.output in DENSE else _predictions(run, split, source, config)
    if predictions is None:
        outputs = Outputs(run.bundle, readers=config.run.readers)
        if (seen := run.predictions.get(split)) is not None and len(seen.indices) == len(source):
            outputs.remember(source, seen)
        found = (box_report if run.bundle.output == "boxes" else mask_report)(outputs, source)
    elif run.bundle.output == "numbers":
        found = regression_report(predictions, points=MAX_POINTS)
    else:
        fits = split == "test" and "validation" in held_out
        temperature = _temperature(run, held_out["validation"], config) if fits else None
        found = report(predictions, temperature=temperature)
    model = run.folder / "model"
    commands: list[tuple[str, ...]] = [try_command(run.folder, run.bundle, config.data.spec)]
    if split in names:
        measured = ("--data", config.data.spec, "--split", names[split])
        numbers = ("--numbers", *config.data.numbers) if config.data.numbers else ()
        commands.append(("vitrail", "evaluate", str(model), *measured, *numbers))
        if predictions is not None and predictions.truth.kind == "class":
            commands.append(("vitrail", "report", str(run.folder), *measured))
    page = write_report(
        run.folder,
        run.bundle,
        source,
        split,
        found,
        examples=run.examples or write_examples(run.bundle, source, run.folder / "examples"),
        tried=read_tried(run.folder),
        next_commands=tuple(map(shlex.join, commands)),
    )
    return FinetuneResult(run, split, found, page, trials)


def _temperature(run: RunResult, source: Source, config: TrainConfig) -> float | None:
    """Return the calibration temperature of a model. If images can have several labels, return None."""
    judged = _predictions(run, "validation", source, config).labelled()
    if judged.truth.kind != "class" or not len(judged):
        return None
    return fit_temperature(judged.logits, judged.truth.values, scores=judged.scores)


def _predictions(run: RunResult, split: str, source: Source, config: TrainConfig) -> Predictions:
    """Return the model's outputs for a split: those that the run measured, unless the source has other images."""
    found = run.predictions.get(split)
    whole = found is not None and len(found) + len(found.skipped) == len(source)
    if found is not None and whole and found.keys == tuple(map(source.key, found.indices.tolist())):
        return found
    return Outputs(run.bundle, readers=config.run.readers).predictions(source)
