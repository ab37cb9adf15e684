"""`vitrail evaluate`: measure the head or the features of a model on a data set or a suite of tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import ReductionOptions, message_console, print_json, print_notes, showing_progress, text_table
from vitrail.cli.options import (
    Call,
    Command,
    DeviceOption,
    ImageSizeOption,
    JsonOption,
    Option,
    check_own_effects,
    flag,
    names_in,
    options_of,
)
from vitrail.data.check.images import colour_note, images_of
from vitrail.data.source import Source
from vitrail.errors import ConfigError, plural
from vitrail.evaluation.evaluators import (
    BY_HEAD,
    EVALUATORS,
    OF_PLACED,
    UNLEARNED,
    Evaluator,
    check_evaluators,
    evaluators_of,
    measure,
)
from vitrail.evaluation.features.cache import default_cache
from vitrail.evaluation.head import ByAccuracy
from vitrail.evaluation.imagenet import read_real, read_synsets
from vitrail.evaluation.measured_images import CommonImages, common_images, open_images
from vitrail.evaluation.metrics.report import ClassificationReport, report
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.retrieval import METRICS
from vitrail.files import expanded
from vitrail.machine import Precision, keep_freed_memory
from vitrail.processes.group import join_processes
from vitrail.settings import Effect, bare_names, setting, to_plain
from vitrail.training.stop import interrupted_by_signals
from vitrail.transfer.suite import DETAILS, SuiteResult, read_suite, run_suite, suite_as_plain
from vitrail.weights.adapt import with_reduction
from vitrail.weights.answers import OUTPUT_NOUNS
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load


@dataclass(frozen=True, kw_only=True)
class Evaluate(DeviceOption, JsonOption, ReductionOptions, ImageSizeOption):
    """Options of `vitrail evaluate`."""

    models: tuple[str, ...] = setting(argument="MODEL...", distinct=True)
    """Folder of a model or a run, file or folder of another library's model, or a name on the Hugging Face hub. Several
    models are measured on the same images, which none of them learned from."""
    data: str = setting("", metavar="SPEC")
    """Data set, in any form that `vitrail train` accepts. With --suite, a folder that can hold a folder of data per
    task, named like the task."""
    by: str = ""
    """Evaluators, separated by commas: accuracy, regression, detection, masks, linear, fewshot, knn, segmentation,
    zeroshot, retrieval. The first four measure the model's own head, and the default is the one for what the model
    predicts. The last two are for a model of images and texts: a head from the names of the classes, and searches for
    the texts of images and the images of texts. The others train a simple model on features of the training split: a
    linear model, least squares on a few images per class, nearest neighbours, or, for data with masks, a linear model
    of patch tokens."""
    numbers: tuple[str, ...] = setting((), commas=True)
    """Numeric columns of a table to measure instead of classes. By default the columns that the model predicts."""
    suite: str = ""
    """Suite of tasks to measure instead of one data set: vtab-1k, paper-table-5, fewshot, offline, or a TOML file."""
    strict: bool = setting(False, needs=("suite", "only the tasks of a --suite can be skipped; name a suite"))
    """Fail if a task of the suite cannot be measured. By default the task is skipped."""
    split: Literal["held-out", "train", "validation", "test", "all"] = "held-out"
    """Split to measure. held-out is the test split if there is one, else the images that training holds out for
    validation. all measures every image, including training images."""
    validation_share: float | None = setting(
        None,
        effect=Effect(lambda own: own.split in ("held-out", "validation"), "with --split held-out or validation"),
        above=0,
        below=1,
    )
    """Fraction of the training images to measure if the data has no test or validation split. Images that a model
    learned from are skipped. By default the fraction that the model's training held out, or 0.1."""
    per_class: bool = False
    """Show the metrics of the model's own head for each class."""
    confusion: bool = False
    """Show the confusion matrix of the model's own head. With more than 20 classes, show only the most confused
    pairs."""
    batch_size: int | None = setting(None, least=1)
    """Images per forward pass. The default follows from the model's cost."""
    precision: Precision | None = None
    """Number format of matrix products. The default is the model's own, usually float32. Features use bf16 by default
    if it hardly changes them."""
    cache: Path | None = setting(None, excludes="no_cache")
    """Folder that keeps extracted features for later commands. By default $VITRAIL_DATA/features or
    ~/.cache/vitrail/features."""
    no_cache: bool = False
    """Do not use the cache of features."""


def evaluator_options() -> Iterator[Option]:
    """Yield an option for each setting of the evaluators. A setting that several of them have is yielded once, without
    a default if they have different ones. Raise `ValueError` if a setting has the name of another option."""
    own = {option.name for option in options_of(Evaluate)}
    found: dict[str, Option] = {}
    for name, evaluator in EVALUATORS.items():
        for option in options_of(evaluator):
            if option.name in own:
                raise ValueError(f"evaluator {name}: {option.name} is another option of evaluate; rename the setting")
            if found.setdefault(option.name, option).default != option.default:
                found[option.name] = replace(found[option.name], default=None)
    yield from found.values()


COMMAND = Command(
    name="evaluate",
    summary="""Measure a model on a data set: the accuracy of the model's own head, or of a simple classifier that is
    trained on the model's features. Several models are compared on the same images. With --suite, measure a model on
    many data sets.""",
    examples=(
        ("vitrail evaluate runs/flowers --data flowers", "Measure the model of a run on held-out images."),
        ("vitrail evaluate runs/a runs/b --data flowers --by linear,knn", "Compare the features of two models."),
        ("vitrail evaluate vit.npz --suite vtab-1k --data datasets", "Measure a model on a suite of tasks."),
    ),
    options=(Evaluate,),
    spelled={"reduction.by": "--reduce-by"},
    settings=evaluator_options,
    essential={
        "Measurements": ("data", "split", "by", "numbers", "suite", "image_size"),
        "Settings of evaluators": ("shots", "k", "bootstrap"),
        "Output": ("per_class", "confusion", "json"),
        "Speed": ("batch_size", "device", "precision"),
    },
)


def main(call: Call, options: Evaluate) -> None:
    check_options(options, call.options)
    console = message_console(options.json)
    keep_freed_memory()
    with join_processes().reporting(), interrupted_by_signals():
        if options.suite:
            _suite(options, console)
        else:
            _one(options, call.options, console)


def _one(options: Evaluate, given: Mapping[str, Any], console: Console) -> None:
    """Measure one or several models on one data set, and print the metrics."""
    bundles = {name: _load(options, name) for name in options.models}
    with showing_progress(console, "measuring", transient=True) as show:
        prepared, unfit = fitting({
            name: (bundle, evaluators_for(bundle, options, given)) for name, bundle in bundles.items()
        })  # fmt: skip
        common = (
            common_images(
                bundles,
                options.data,
                options.split,
                options.validation_share,
                texts=all(evaluators.keys() == OF_PLACED["texts"] for evaluators in prepared.values()),
            )
            if len(bundles) > 1 or options.validation_share is not None
            else None
        )
        plans = {
            name: plan_of(bundle, prepared[name], options, common, _outputs(bundle, options, console, show))
            for name, bundle in bundles.items()
        }
        notes = [*unfit, *((name, note) for name, plan in plans.items() for note in plan.notes)]
        if common is not None and common.note:
            print_notes(console, common.note)
        print_notes(console, *(f"{name}: {note}" if len(bundles) > 1 else note for name, note in dict.fromkeys(notes)))
        rows: dict[str, dict[str, dict[str, Any]]] = {}
        for name, plan in plans.items():
            if len(bundles) > 1:
                show(0, description=name)
            rows[name] = plan.measure()
    skipped = {key: reason for plan in plans.values() for key, reason in plan.outputs.skipped.items()}
    print_notes(console, *(f"skipped {key}: {reason}" for key, reason in skipped.items()))
    if len(bundles) > 1:
        if options.json:
            print_json(rows)
            return
        for split in dict.fromkeys(split for row in rows.values() for split in row):
            console.print(metrics_table({name: row[split] for name, row in rows.items() if split in row}, split))
        return
    (name,) = options.models
    is_asked = options.per_class or options.confusion  # boxes and masks are always measured per class
    details = plans[name].head if is_asked and bundles[name].output in ("softmax", "sigmoid") else {}
    reports = {split: report(plans[name].outputs.predictions(source), bootstrap=0) for split, source in details.items()}
    if options.json:
        print_json({
            split: row | _detail(reports.get(split), options, bundles[name]) for split, row in rows[name].items()
        })  # fmt: skip
        return
    console.print(metrics_table(rows[name]))
    for split, found in reports.items():
        if options.per_class:
            console.print(per_class_table(split, found))
        if options.confusion:
            console.print(confusion_table(split, found, bundles[name].classes))


def _suite(options: Evaluate, console: Console) -> None:
    """Measure a suite of tasks, and print the metrics."""
    suite = read_suite(options.suite)
    (name,) = options.models
    bundle = _load(options, name)
    print_notes(console, *map(COMMAND.note, bundle.notes))
    with showing_progress(console, "measuring", transient=True) as show:
        outputs = _outputs(bundle, options, console, show)
        result = run_suite(
            outputs,
            suite,
            folder=expanded(options.data) if options.data else None,
            strict=options.strict,
            on_task=lambda task: show(0, description=task.name),
        )
    if options.json:
        print_json(suite_as_plain(result))
        return
    console.print(suite_table(result))
    print_notes(console, *(f"skipped {row.task.name}: {row.reason}" for row in result.rows if row.reason is not None))


def _load(options: Evaluate, name: str) -> Bundle:
    device = join_processes().device_name(options.device)
    bundle = load(name, device=device, image_size=options.image_size)
    return bundle if options.reduce_tokens is None else with_reduction(bundle, options.reduction())


def _outputs(bundle: Bundle, options: Evaluate, console: Console, show: Callable[..., None]) -> Outputs:
    return Outputs(
        bundle,
        batch_size=options.batch_size,
        precision=options.precision or bundle.precision,
        feature_precision=options.precision or ("float32" if options.suite else "auto"),
        cache=None if options.no_cache else options.cache or default_cache(),
        on_progress=show,
        on_note=lambda note: print_notes(console, COMMAND.note(note)),
        processes=join_processes(),
    )


def _detail(report: ClassificationReport | None, options: Evaluate, bundle: Bundle) -> dict[str, Any]:
    """Return all results of a split except its metrics, as JSON values."""
    detail: dict[str, Any] = {}
    if report is not None and options.per_class:
        detail["per_class"] = [to_plain(row) for row in report.per_class]
        detail["classes_without_images"] = list(report.absent)
    if report is not None and options.confusion:
        names = bundle.classes
        detail["confusion"] = [[names[true], names[taken], images] for true, taken, images in report.confusion]
    return detail


# Checks of the options of `vitrail evaluate`, before a model or data is read.


BY_SUITE = ("by", "numbers", "split", "validation_share", "per_class", "confusion")
"""Options that cannot be combined with --suite, because the suite sets them. It also sets the evaluators, apart from
their features."""


def check_options(options: Evaluate, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that exclude each other or have no effect, and `DataError` for
    a file of labels or names that cannot be read. Neither the model nor the data is read."""
    if not options.suite:
        if not options.data:
            raise ConfigError("--data is missing: name a data set, or a suite of tasks with --suite")
        if len(options.models) > 1 and (options.per_class or options.confusion):
            raise ConfigError("--per-class and --confusion show one model; name only one MODEL")
        check_own_effects(given, options)
        _check_evaluators(options, given)
        return
    if len(options.models) > 1:
        raise ConfigError("--suite measures one model; name only one MODEL")
    if options.data and not expanded(options.data).is_dir():
        raise ConfigError(
            f"data={options.data!r} is not a folder; with --suite, name a folder that can hold a folder of data per "
            "task, or leave --data out"
        )
    settings = {option.name for option in evaluator_options()} - {"features"}
    if decided := [flag(name) for name in given if name in BY_SUITE or name in settings]:
        raise ConfigError(f"--suite {options.suite} decides what is measured and how; leave out {', '.join(decided)}")


def _check_evaluators(options: Evaluate, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for settings that are out of range or that no chosen evaluator uses, and `DataError` for
    unreadable files."""
    by = options.by or ",".join(sorted(set(BY_HEAD.values())))
    evaluators = evaluators_of(by, _settings(given, by))
    _check_used(set(evaluators), given, f"--by is {options.by}" if options.by else "the model's own head is measured")
    for evaluator in evaluators.values():
        check_own_effects(given, evaluator)
    if ("accuracy" not in evaluators and options.confusion) or (
        options.per_class and evaluators.keys().isdisjoint(("accuracy", "detection", "masks"))
    ):
        raise ConfigError("--per-class and --confusion show metrics of the model's own head; add accuracy to --by")
    if real := given.get("real"):
        read_real(None if real == "public" else real)
    if class_names := given.get("class_names"):
        read_synsets(class_names)


def _check_used(chosen: Collection[str], given: Mapping[str, Any], reason: str) -> None:
    """Raise `ConfigError` if an option was typed that none of the chosen evaluators uses. The message has the
    `reason` for which they are chosen."""
    for name in given:
        users = [user for user, evaluator in EVALUATORS.items() if name in bare_names(evaluator)]
        if name == "numbers":
            users += ("linear", "knn")  # of the columns of the data
        if users and not set(users) & set(chosen):
            *others, last = users
            several = f"{', '.join(others)} and {last} use" if others else f"{last} uses"
            raise ConfigError(
                f"{flag(name)}: only {several} it, but {reason}; add {users[0]} to --by, or leave out {flag(name)}"
            )


def evaluators_for(bundle: Bundle, options: Evaluate, given: Mapping[str, Any]) -> dict[str, Evaluator]:
    """Return the evaluators for a model by name. Raise `ConfigError` for options that do not fit the model."""
    by = options.by or BY_HEAD[bundle.output]
    evaluators = evaluators_of(by, _settings(given, by))
    _check_used(set(evaluators), given, f"--by is {by}")
    if (options.confusion and bundle.output not in ("softmax", "sigmoid")) or (
        options.per_class and bundle.output == "numbers"
    ):
        raise ConfigError(
            f"--{'confusion' if options.confusion else 'per-class'} is for classes of images, but this model predicts "
            f"{OUTPUT_NOUNS[bundle.output]}; leave it out"
        )
    return evaluators


def fitting(
    models: Mapping[str, tuple[Bundle, dict[str, Evaluator]]],
) -> tuple[dict[str, dict[str, Evaluator]], list[tuple[str, str]]]:
    """Return the evaluators by which each model can be measured, and notes about the others with the name of the model.

    If several models are measured, one without a head is not measured by those for heads, and one without a text tower
    not by those for texts. Raise `ConfigError` if nothing is left for a model, or no model is left for an evaluator.
    """
    found: dict[str, dict[str, Evaluator]] = {}
    notes = []
    for name, (bundle, evaluators) in models.items():
        missing = set() if bundle.classes else set(evaluators) & set(BY_HEAD.values())
        missing |= set(evaluators) & UNLEARNED if bundle.words is None else set()
        found[name] = {each: evaluator for each, evaluator in evaluators.items() if each not in missing}
        for each in sorted(missing):
            part = "text tower" if each in UNLEARNED else "head"
            notes.append((name, f"has no {part}, which --by {each} measures; {each} is skipped for this model"))
    for name, (bundle, evaluators) in models.items():
        lost = [each for each in evaluators if not any(each in kept for kept in found.values())]
        if not lost and found[name]:
            continue
        each = (lost or list(evaluators))[0]
        if each in UNLEARNED:
            bundle.reader_of_texts()
        advice = "linear, fewshot or knn"
        if bundle.words is not None:
            advice += (
                ", the names of the classes by zeroshot, or images with texts by retrieval. If a fine-tuned model is "
                "named beside it, --by zeroshot,accuracy measures each model by what it has"
            )
        raise ConfigError(
            f"--by {each}: this model has no head, so it cannot classify; fine-tune it, or measure its features by "
            f"{advice}"
        )
    return found, notes


def _settings(given: Mapping[str, Any], by: str) -> dict[str, dict[str, Any]]:
    """Return the settings that the user typed for each evaluator of a list of names, by the evaluator's name."""
    return {
        name: {field: given[option] for option, field in bare_names(EVALUATORS[name]).items() if option in given}
        for name in names_in(by, "by")
        if name in EVALUATORS
    }


# The measurements of `vitrail evaluate` for one model: checked before any of them is made.


@dataclass(frozen=True)
class Job:
    """Evaluators that measure one split."""

    split: str
    evaluators: dict[str, Evaluator]
    train: Source
    source: Source


@dataclass(frozen=True)
class Measurements:
    """The checked measurements of one model."""

    outputs: Outputs
    jobs: tuple[Job, ...]
    head: dict[str, Source]
    """Splits on which the model's own head is measured, by name."""
    notes: tuple[str, ...]

    def measure(self) -> dict[str, dict[str, Any]]:
        """Return the metrics by split."""
        rows: dict[str, dict[str, Any]] = {}
        for job in self.jobs:
            found = measure(job.evaluators, self.outputs, job.train, job.source)
            rows[job.split] = rows.get(job.split, {}) | found
        return rows


def plan_of(
    bundle: Bundle,
    evaluators: dict[str, Evaluator],
    options: Evaluate,
    common: CommonImages | None,
    outputs: Outputs,
) -> Measurements:
    """Open the data for a model, and check it. Nothing is measured."""
    heads = set(BY_HEAD.values())
    by_head = {name: evaluator for name, evaluator in evaluators.items() if name in heads}
    by_features = {name: evaluator for name, evaluator in evaluators.items() if name not in heads}
    data, split = options.data, options.split
    learning = by_features.keys() - UNLEARNED
    learned = (
        open_images(
            bundle,
            data,
            split,
            by_features=True,
            numbers=options.numbers,
            common=common,
            needs_training=bool(learning),
            texts=evaluators.keys() == OF_PLACED["texts"],
        )
        if by_features
        else None
    )
    class_names = next((one.class_names for one in by_head.values() if isinstance(one, ByAccuracy)), "")
    judged = (
        open_images(bundle, data, split, by_features=False, class_names=class_names, own=learned, common=common)
        if by_head
        else None
    )
    if learned is not None and learning and list(learned.sources) == ["train"]:
        raise ConfigError(
            f"--split {split}: {', '.join(sorted(learning))} cannot be measured on the images that it learns from; "
            "leave out --split to measure held-out images"
        )
    head = judged.sources if judged is not None else {}
    jobs = [Job(name, by_head, source, source) for name, source in head.items()]
    if learned is not None:
        tested = {name: source for name, source in learned.sources.items() if name != "train" or not learning}
        jobs += [Job(name, by_features, learned.train, source) for name, source in tested.items()]
    for job in jobs:
        check_evaluators(job.evaluators, outputs, job.train, job.source)
    opened = [each for each in (judged, learned) if each is not None]
    colour = colour_note(images_of(jobs[0].source), bundle.preprocess.channels)
    notes = dict.fromkeys((*bundle.notes, *(note for each in opened for note in each.notes), *filter(None, [colour])))
    if split == "all" and learning:
        notes[f"{', '.join(sorted(learning))} learns from the training images, so it measures only the others"] = None
    return Measurements(outputs, tuple(jobs), head, tuple(notes))


# The tables of `vitrail evaluate`.


FORMATS = {
    "cross_entropy": ".4f",
    "zeroshot_cross_entropy": ".4f",
    "score_threshold": ".3g",
    "linear_penalty": ".3g",
} | dict.fromkeys(("images", "texts", "skipped", "unlabelled", "training_images", "real_images"), ",.0f")
"""Number formats by metric. All other metrics are fractions and shown as percentages."""

NUMBER_METRICS = ("r2", "standardised_error", "mean_absolute_error", "root_mean_squared_error")
"""Suffixes of metrics of numbers, which are not fractions."""

NAMES = {
    **METRICS,
    "top5_accuracy": "top-5 accuracy",
    "real_accuracy": "ReaL accuracy",
    "real_images": "images with ReaL labels",
    "exact_match": "all labels right",
    "micro_f1": "F1 over all answers",
    "macro_f1": "F1, mean over classes",
    "cross_entropy": "cross-entropy, nats",
    "zeroshot_cross_entropy": "zeroshot cross-entropy, nats",
    "mean_iou": "mean intersection over union",
    "iou": "intersection over union",
    "r2": "R²",
    "average_precision": "AP",
    "average_precision_50": "AP50, at an overlap of 0.5",
    "average_precision_75": "AP75, at an overlap of 0.75",
    "box_average_precision": "AP of the boxes around the masks",
    "average_precision_small": "AP of small objects, below 32 x 32 pixels",
    "average_precision_medium": "AP of medium objects",
    "average_precision_large": "AP of large objects, from 96 x 96 pixels",
    "score_threshold": "score with the best F1",
}
SEVERAL = {"accuracy": "likeliest class is a label"}
"""Display names of some metrics if images can have several labels."""

COUNTED = re.compile(r"(fewshot|knn)_(\d+)(.*)")

CONFUSED = 20
"""Maximum number of classes for which the whole confusion matrix is shown. With more classes, only this many pairs of
classes are shown."""


def metrics_table(rows: Mapping[str, Mapping[str, float]], corner: str = "") -> Table:
    """Return a table with a row per metric and a column per split or model. `corner` is the text of the first cell."""
    table = Table(corner, *map(escape, rows), box=SIMPLE_HEAD, pad_edge=False)
    names = dict.fromkeys(name for row in rows.values() for name in row if not name.endswith(DETAILS))
    named = SEVERAL if "exact_match" in names else {}
    for name in sorted(names, key=lambda name: FORMATS.get(name) == ",.0f"):  # puts counts last
        table.add_row(named.get(name) or _named(name), *(_cell(row, name) for row in rows.values()))
    return table


def per_class_table(split: str, report: ClassificationReport) -> Table:
    """Return a table of the classes, sorted by accuracy, the lowest first. Classes without images are last; if there
    are many, only those that were predicted are shown."""
    several = report.has_several_labels
    columns = (
        "images",
        "predicted",
        "recall" if several else "accuracy",
        "precision",
        "F1",
        *(("average precision",) if several else ()),
    )
    table = text_table((f"{split}: class", *columns))

    for row in sorted(report.per_class, key=lambda row: 2.0 if row.accuracy is None else row.accuracy):
        shares = (row.accuracy, row.precision, row.f1, *((row.average_precision,) if several else ()))
        table.add_row(escape(row.name), f"{row.images:,}", f"{row.predicted:,}", *map(_share, shares))
    for name in _never_predicted(report):
        table.add_row(escape(name), "0", "0", *["-"] * (len(columns) - 2))
    return table


def _never_predicted(report: ClassificationReport) -> list[str]:
    """Return the classes without images that were not predicted, or nothing if there are too many for a table."""
    predicted = {row.name for row in report.per_class}
    names = [name for name in report.absent if name not in predicted]
    return names if len(names) + len(predicted) <= CONFUSED else []


def confusion_table(split: str, report: ClassificationReport, classes: tuple[str, ...]) -> RenderableType:
    """Return the confusion matrix, with a row per true class and a column per predicted class."""
    if report.has_several_labels:
        return Text(f"{split}: there is no confusion matrix, since images can have several labels")
    there = sorted([row.index for row in report.per_class] + [classes.index(name) for name in _never_predicted(report)])
    if len(there) > CONFUSED:
        return _pairs(split, report, classes)
    counts = {(true, taken): images for true, taken, images in report.confusion}
    table = text_table((f"{split}: true class", *map(str, there)))
    for true in there:
        cells = [_count(counts.get((true, taken), 0), own=true == taken) for taken in there]
        table.add_row(f"{true} {escape(classes[true])}", *cells)
    return table


def _pairs(split: str, report: ClassificationReport, classes: tuple[str, ...]) -> RenderableType:
    images = {row.index: row.images for row in report.per_class}
    wrong = sorted((cell for cell in report.confusion if cell[0] != cell[1]), key=lambda cell: -cell[2])
    rows = (
        (escape(classes[true]), escape(classes[taken]), f"{count:,}", _share(count / images[true]))
        for true, taken, count in wrong[:CONFUSED]
    )
    table = text_table((f"{split}: true class", "predicted", "images", "of the class"), rows, left=2)
    left = len(wrong) - CONFUSED
    return Group(table, Text(f"and {plural(left, 'pair')} confused no more often than these")) if left > 0 else table


def suite_table(result: SuiteResult) -> Table:
    """Return a table with a row per task. Each group ends with its mean, and the last row is the mean of all tasks."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(result.suite.name, no_wrap=True)
    columns, means = result.columns(), result.means()
    for column in columns:
        table.add_column(_named(column), justify="right")
    for group in result.groups():
        for row in result.in_group(group):
            cells = [_value(name, row.metrics[name]) if name in row.metrics else "-" for name in columns]
            table.add_row(escape(row.task.name), *cells)
        cells = [_mean(name, means[group], len(result.in_group(group))) for name in columns]
        table.add_row(f"mean of {escape(group)}", *cells, style="bold")
        table.add_section()
    cells = [_mean(name, means[None], len(result.rows)) for name in columns]
    table.add_row(f"mean of {plural(len(result.rows), 'task')}", *cells, style="bold")
    return table


def _mean(name: str, means: Mapping[str, tuple[float, int]], tasks: int) -> str:
    """Return a mean as text. If some tasks lack the metric, append the number of tasks that have it."""
    if name not in means:
        return "-"
    value, count = means[name]
    return _value(name, value) + ("" if count == tasks else f" ({count} of {tasks})")


def _named(name: str) -> str:
    output, _, metric = name.rpartition(":")  # "age:r2" is the metric r2 of the number "age"
    if match := COUNTED.fullmatch(metric):
        kind, number, rest = match.groups()
        text = f"knn, k = {number}" if kind == "knn" else f"fewshot, {number} shot{'s' if number != '1' else ''}"
        text += f", {NAMES.get(rest[1:]) or rest[1:].replace('_', ' ')}" if rest else ""
    else:
        text = NAMES.get(metric) or metric.replace("_", " ").replace(" r2", ", R²")
    return f"{output}: {text}" if output else text


def _cell(row: Mapping[str, float], name: str) -> str:
    """Return a metric as text, with its confidence interval or standard deviation if it has one."""
    if name not in row:
        return ""
    text = _value(name, row[name])
    if f"{name}_low" in row:
        low, high = (_value(name, row[f"{name}{end}"]) for end in ("_low", "_high"))
        return f"{text} ({low} to {high})"
    if f"{name}_deviation" in row:
        return f"{text} ± {_value(name, row[f'{name}_deviation'])}"
    return text


def _value(name: str, value: float) -> str:
    """Return the value of a metric as text. Metrics without a format are shown as percentages."""
    return format(value, ".4g" if name.endswith(NUMBER_METRICS) else FORMATS.get(name, ".2%"))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _count(images: int, *, own: bool) -> str:
    text = f"{images:,}" if images else "."
    return f"[bold]{text}[/bold]" if own else text
