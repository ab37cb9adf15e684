"""`vitrail evaluate`: measure the head or the features of a model on a data set or a suite of tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console

from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.cli.options.reduction import reduction_of
from vitrail.cli.output.bars import images_bar

if TYPE_CHECKING:  # without PyTorch, --help is faster
    from vitrail.data.source import Source
    from vitrail.evaluation.outputs import Outputs
    from vitrail.evaluation.predictions.report import ClassificationReport
    from vitrail.weights.bundle import Bundle

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Options of `vitrail evaluate`."""

    models: Annotated[tuple[str, ...], Positional("MODEL...")]
    """Folder of a model or a run, file or folder of another library's model, or a name on the Hugging Face hub. Several
    models are measured on the same images, which none of them learned from."""
    data: str = ""
    """Data set, in any form that `vitrail train` accepts. With --suite, a folder that can hold a folder of data per
    task, named like the task."""
    by: str = ""
    """Evaluators, separated by commas: accuracy, regression, linear, fewshot, knn. By default accuracy, or regression
    if the model predicts numbers; both measure the model's own head. The other three train a simple model on features
    of the training split: a linear model, least squares on a few images per class, or nearest neighbours."""
    numbers: tuple[str, ...] = ()
    """Numeric columns of a table to measure instead of classes. By default the columns that the model predicts."""
    suite: str = ""
    """Suite of tasks to measure instead of one data set: vtab-1k, paper-table-5, fewshot, offline, or a TOML file."""
    strict: bool = False
    """Fail if a task of the suite cannot be measured. By default the task is skipped."""
    split: Literal["held-out", "train", "validation", "test", "all"] = "held-out"
    """Split to measure. held-out is the test split if there is one, else the images that training holds out for
    validation. all measures every image, including training images."""
    validation_share: float | None = None
    """Fraction of the training images to measure if the data has no test or validation split. Images that a model
    learned from are skipped. By default the fraction that the model's training held out, or 0.1."""
    per_class: bool = False
    """Show the metrics of the model's own head for each class."""
    confusion: bool = False
    """Show the confusion matrix of the model's own head. With more than 20 classes, show only the most confused
    pairs."""
    bootstrap: int = 1000
    """Number of bootstrap resamples for each 95 % confidence interval. 0 computes no intervals."""
    real: str = ""
    """Also measure with the ReaL labels of ImageNet's validation images: public, or a file real.json."""
    class_names: str = ""
    """File with the WordNet id and name of each model output, in order. Needed only if the data uses other class names
    than the model."""
    shots: tuple[int, ...] = ()
    """Numbers of training images per class for fewshot. By default those of 1, 5, 10 and 25 for which every class has
    enough images."""
    seeds: int = 3
    """Number of random draws of training images. fewshot reports the mean over the draws."""
    l2: float | Literal["loo"] = 1024.0
    """L2 regularisation strength of fewshot. loo chooses the strength for each draw by leave-one-out validation."""
    allow_fewer: bool = False
    """Accept classes with too few images for fewshot, and use all of their images. By default this is an error."""
    features: Literal["embedding", "head-inputs"] | None = None
    """Features of a network with a hidden layer before its head: the input of the hidden layer (embedding) or its
    output (head-inputs). By default head-inputs for fewshot, as in the original code, and embedding for linear and
    knn."""
    k: tuple[int, ...] = ()
    """Numbers of neighbours for knn. By default those of 1, 5, 10, 20 and 100 that do not exceed the number of training
    images."""
    temperature: float = 0.07
    """Temperature of knn. The vote of a neighbour is weighted by exp(cosine similarity / temperature)."""
    image_size: tuple[int, int] | None = None
    """Image height and width in pixels. The default is the model's size. Position embeddings are resized for other
    sizes."""
    reduce_tokens: int | None = None
    """Patch tokens that each block removes, on average over the blocks. 0 keeps all tokens. By default
    the model's own setting."""
    reduce_by: Literal["merge", "prune"] = "merge"
    """merge averages the most similar tokens. prune drops those that the class token attends to least."""
    reduce_schedule: Literal["constant", "decreasing"] = "constant"
    """Distribution of the removed tokens: the same number in every block, or a number that decreases to 0 in the last
    block."""
    batch_size: int | None = None
    """Images per forward pass. The default follows from the model's cost."""
    device: str = "auto"
    """Device to run on: auto, cpu, cuda or cuda:N."""
    precision: Literal["auto", "int8", "bf16", "float32"] | None = None
    """Number format of matrix products. The default is the model's own, usually float32. Features use bf16 by default
    if it hardly changes them."""
    cache: Path | None = None
    """Folder that keeps extracted features for later commands. By default $VITRAIL_DATA/features or
    ~/.cache/vitrail/features."""
    no_cache: bool = False
    """Do not use the cache of features."""
    json: bool = False
    """Print JSON instead of tables."""


COMMAND = Command(
    name="evaluate",
    summary="""Measure a model on a data set: the accuracy of the model's own head, or of a simple classifier that is
    trained on the model's features. Several models are compared on the same images. With --suite, measure a model on
    many data sets.""",
    examples=(
        Example("vitrail evaluate runs/flowers --data flowers", "Measure the model of a run on held-out images."),
        Example("vitrail evaluate runs/a runs/b --data flowers --by linear,knn", "Compare the features of two models."),
        Example("vitrail evaluate vit.npz --suite vtab-1k --data datasets", "Measure a model on a suite of tasks."),
    ),
    options=(Evaluate,),
    essential={
        "Measurements": ("data", "split", "by", "numbers", "suite", "image_size"),
        "Settings of evaluators": ("shots", "k", "bootstrap"),
        "Output": ("per_class", "confusion", "json"),
        "Speed": ("batch_size", "device", "precision"),
    },
)


def main(call: Call) -> int:
    from vitrail.cli.evaluating.checks import check_options
    from vitrail.machine import keep_freed_memory
    from vitrail.processes.group import join_processes
    from vitrail.training.monitoring.stop import interrupted_by_signals

    options = Evaluate(**call.options)
    check_options(options, call.options)
    console = Console(stderr=options.json, highlight=False, soft_wrap=True)
    keep_freed_memory()
    with join_processes().reporting(), interrupted_by_signals():
        return _suite(options, console) if options.suite else _one(options, call.options, console)


def _one(options: Evaluate, given: Mapping[str, Any], console: Console) -> int:
    """Measure one or several models on one data set, and return the exit code."""
    from vitrail.cli.evaluating.checks import evaluators_for
    from vitrail.cli.evaluating.common import common_images
    from vitrail.cli.evaluating.plan import plan_of

    bundles = {name: _load(options, name) for name in options.models}
    with _Bar(console) as bar:
        prepared = {name: evaluators_for(bundle, options, given) for name, bundle in bundles.items()}
        common = None
        if len(bundles) > 1 or options.validation_share is not None:
            common = common_images(bundles, options.data, options.split, options.validation_share)
        plans = {
            name: plan_of(bundle, prepared[name], options, common, _outputs(bundle, options, console, bar))
            for name, bundle in bundles.items()
        }
        notes = [(name, note) for name, plan in plans.items() for note in plan.notes]
        if common is not None and common.note:
            console.print(common.note, style="yellow", markup=False, soft_wrap=not console.is_terminal)
        for name, note in dict.fromkeys(notes):
            console.print(
                f"{name}: {note}" if len(bundles) > 1 else note,
                style="yellow",
                markup=False,
                soft_wrap=not console.is_terminal,
            )
        rows: dict[str, dict[str, dict[str, Any]]] = {}
        for name, plan in plans.items():
            if len(bundles) > 1:
                bar.begin(name)
            rows[name] = plan.measure()
    skipped = {key: reason for plan in plans.values() for key, reason in plan.outputs.skipped.items()}
    for key, reason in skipped.items():
        console.print(f"skipped {key}: {reason}", style="yellow", markup=False)
    if len(bundles) > 1:
        _show_several(rows, options, console)
        return 0
    (name,) = options.models
    details = plans[name].head if options.per_class or options.confusion else {}
    _show(rows[name], _reports(plans[name].outputs, details), bundles[name], options, console)
    return 0


def _show_several(rows: dict[str, dict[str, dict[str, Any]]], options: Evaluate, console: Console) -> None:
    """Print the results of several models: one table per split, with a column per model."""
    from vitrail.cli.output.evaluate_tables import metrics_table

    if options.json:
        print(json.dumps(rows))
        return
    splits = dict.fromkeys(split for row in rows.values() for split in row)
    for split in splits:
        console.print(metrics_table({name: row[split] for name, row in rows.items() if split in row}, split))


def _show(
    rows: dict[str, dict[str, Any]],
    reports: dict[str, ClassificationReport],
    bundle: Bundle,
    options: Evaluate,
    console: Console,
) -> None:
    """Print the results for each split."""
    from vitrail.cli.output.evaluate_tables import confusion_table, metrics_table, per_class_table

    if options.json:
        print(json.dumps({name: row | _detail(reports.get(name), options, bundle) for name, row in rows.items()}))
        return
    console.print(metrics_table(rows))
    for name, report in reports.items():
        if options.per_class:
            console.print(per_class_table(name, report))
        if options.confusion:
            console.print(confusion_table(name, report, bundle.classes))


def _suite(options: Evaluate, console: Console) -> int:
    """Measure a suite of tasks, and return the exit code."""
    from vitrail.cli.output.evaluate_tables import suite_table
    from vitrail.transfer.suite import read_suite, run_suite, suite_as_plain

    suite = read_suite(options.suite)
    (name,) = options.models
    bundle = _load(options, name)
    for note in bundle.notes:
        console.print(COMMAND.note(note), style="yellow", markup=False, soft_wrap=not console.is_terminal)
    with _Bar(console) as bar:
        outputs = _outputs(bundle, options, console, bar)
        result = run_suite(
            outputs,
            suite,
            folder=Path(options.data).expanduser() if options.data else None,
            strict=options.strict,
            on_task=lambda task: bar.begin(task.name),
        )
    if options.json:
        print(json.dumps(suite_as_plain(result)))
        return 0
    console.print(suite_table(result))
    for row in result.rows:
        if row.reason is not None:
            console.print(f"skipped {row.task.name}: {row.reason}", style="yellow", markup=False)
    return 0


def _load(options: Evaluate, name: str) -> Bundle:
    from vitrail.processes.group import join_processes
    from vitrail.weights.adapt import with_reduction
    from vitrail.weights.load import load

    device = join_processes().device_name(options.device)
    bundle = load(name, device=device, image_size=options.image_size)
    if options.reduce_tokens is None:
        return bundle
    return with_reduction(bundle, reduction_of(options.reduce_tokens, options.reduce_by, options.reduce_schedule))


def _outputs(bundle: Bundle, options: Evaluate, console: Console, bar: _Bar) -> Outputs:
    from vitrail.evaluation.features.extract import default_cache
    from vitrail.evaluation.outputs import Outputs
    from vitrail.processes.group import join_processes

    return Outputs(
        bundle,
        batch_size=options.batch_size,
        precision=options.precision or bundle.precision,
        feature_precision=options.precision or ("float32" if options.suite else "auto"),
        cache=None if options.no_cache else options.cache or default_cache(),
        on_progress=bar.update,
        on_note=lambda note: console.print(
            COMMAND.note(note), style="yellow", markup=False, soft_wrap=not console.is_terminal
        ),
        processes=join_processes(),
    )


def _reports(outputs: Outputs, sources: dict[str, Source]) -> dict[str, ClassificationReport]:
    """Return the reports of the model's own head, without intervals."""
    from vitrail.evaluation.predictions.report import report

    return {name: report(outputs.predictions(source), bootstrap=0) for name, source in sources.items()}


def _detail(report: ClassificationReport | None, options: Evaluate, bundle: Bundle) -> dict[str, Any]:
    """Return all results of a split except its metrics, as JSON values."""
    from vitrail.plain import to_plain

    detail: dict[str, Any] = {}
    if report is not None and options.per_class:
        detail["per_class"] = [to_plain(row) for row in report.per_class]
        detail["classes_without_images"] = list(report.absent)
    if report is not None and options.confusion:
        names = bundle.classes
        detail["confusion"] = [[names[true], names[taken], images] for true, taken, images in report.confusion]
    return detail


class _Bar:
    """A progress bar over images."""

    def __init__(self, console: Console) -> None:
        self._progress = images_bar(console, transient=True)
        self._task = self._progress.add_task("measuring", total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, name: str) -> None:
        self._progress.reset(self._task, description=name, total=None)

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)
