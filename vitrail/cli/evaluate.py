"""`vitrail evaluate`: a model's figures on a data set, by its head or by its features, or on a suite of tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from vitrail.cli.bars import images_bar
from vitrail.cli.options import parse
from vitrail.errors import ConfigError, DataError

if TYPE_CHECKING:  # so that --help does not wait for PyTorch
    from vitrail.data.source import Source
    from vitrail.data.splits import Splits
    from vitrail.evaluation.outputs import Outputs
    from vitrail.evaluation.predictions.report import ClassificationReport
    from vitrail.weights.bundle import Bundle

__all__ = ["main"]

BY_SUITE = (
    "by", "split", "per_class", "confusion", "bootstrap", "real", "class_names", "shots", "seeds", "l2", "allow_fewer",
    "k", "temperature",
)  # fmt: skip
"""Options that a suite decides."""


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a model on a data set: how often its likeliest class is the true one, or how much a simple classifier
    makes of its features. With --suite, on many data sets."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a model or of the run that made it, another library's file or folder, or a name on the hub."""
    data: str = ""
    """A data set, as for vitrail train. With --suite, a folder that may hold the tasks' data in folders of their
    names."""
    by: str = "accuracy"
    """Evaluators with commas between them: accuracy, of the model's own head; linear, logistic regression on its
    features; fewshot, least squares on the features of a few images of each class; knn, a vote of the nearest
    features. The last three learn from the training split."""
    suite: str = ""
    """A suite of tasks instead of one data set: vtab-1k, paper-table-5, fewshot, offline, or a TOML file."""
    strict: tyro.conf.FlagCreatePairsOff[bool] = False
    """A task of the suite that cannot be measured is an error, and not left out."""
    split: Literal["held-out", "train", "validation", "test", "all"] = "held-out"
    """What is measured. held-out is the test split, or else the validation split; where the data has neither, the
    images that training on it would hold out. all measures every image, whether it was trained on or not."""
    per_class: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the head's figures of each class."""
    confusion: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show what the head takes for what: all of it up to 20 classes, else the pairs that are most confused."""
    bootstrap: int = 1000
    """Resamples behind each 95 % interval of the head's figures; 0 for no intervals."""
    real: str = ""
    """public, or a file real.json: measure ImageNet's validation images by the ReaL labels too."""
    class_names: str = ""
    """A list of WordNet ids and names in the order of the model's head, where neither says the other's names."""
    shots: tuple[int, ...] = ()
    """Images of each class that fewshot learns from; by default 1, 5, 10 and 25, as far as every class has so many."""
    seeds: int = 3
    """How many times fewshot draws them."""
    l2: float | Literal["loo"] = 1024.0
    """Strength of fewshot's regularisation; loo chooses it for each draw by leaving each image out in turn."""
    allow_fewer: tyro.conf.FlagCreatePairsOff[bool] = False
    """Let classes that have fewer images than shots give those they have."""
    k: tuple[int, ...] = ()
    """Numbers of neighbours for knn; by default 1, 5, 10, 20 and 100, as far as there are as many images."""
    temperature: float = 0.07
    """Of knn: a neighbour's vote weighs exp(cosine / temperature)."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels, where they are to be others than the model's; its positions are resized."""
    batch_size: int = 256
    """Images at a time."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""
    precision: Literal["auto", "bf16", "float32"] = "float32"
    """Of matrix products: float32; bf16, which is faster; or auto: bf16 where the processor has units for it."""
    cache: Path | None = None
    """Folder in which features are kept and found again; by default $VITRAIL_DATA/features, or
    ~/.cache/vitrail/features."""
    no_cache: tyro.conf.FlagCreatePairsOff[bool] = False
    """Keep and find none."""
    json: bool = False
    """Print JSON instead of tables."""


def main(words: Sequence[str], started: float) -> int:
    options = parse(Evaluate, words, usage="vitrail evaluate", description=Evaluate.__doc__ or "")
    _check(options)
    from vitrail.machine import keep_freed_memory

    console = Console(stderr=options.json, highlight=False, soft_wrap=True)
    keep_freed_memory()
    return _suite(options, console) if options.suite else _one(options, console)


def _check(options: Evaluate) -> None:
    """Raises `ConfigError` for options at odds with each other."""
    if options.no_cache and options.cache is not None:
        raise ConfigError("--cache names a folder to keep features in, and --no-cache keeps none; choose one")
    if not options.suite:
        if not options.data:
            raise ConfigError("nothing to measure on: name a data set by --data, or a suite of them by --suite")
        if options.strict:
            raise ConfigError("--strict is for the tasks of a --suite")
        return
    usual = {field.name: field.default for field in fields(options) if field.default is not MISSING}
    if given := [f"--{name.replace('_', '-')}" for name in BY_SUITE if getattr(options, name) != usual[name]]:
        raise ConfigError(f"a suite says itself what is measured and how; leave out {', '.join(given)}")


def _one(options: Evaluate, console: Console) -> int:
    """One data set."""
    from vitrail.evaluation.evaluators import evaluators_of, measure

    evaluators = evaluators_of(options.by, _settings(options))
    by_head = {name: evaluator for name, evaluator in evaluators.items() if name == "accuracy"}
    by_features = {name: evaluator for name, evaluator in evaluators.items() if name != "accuracy"}
    if (options.per_class or options.confusion) and not by_head:
        raise ConfigError("--per-class and --confusion are of the model's own head; add accuracy to --by")
    bundle = _load(options)
    share = 0.0 if options.split == "all" else float(bundle.provenance.get("validation_share") or 0.1)
    notes = list(bundle.notes)
    judged: dict[str, Source] = {}
    if by_head:
        splits, mapped = _by_model(bundle, options, share)
        judged, more = _chosen(splits, options)
        notes += (*mapped, *more)
    learned: dict[str, Source] = {}
    if by_features:
        splits = _by_data(options, share)
        learned, more = _chosen(splits, options)
        notes += more
        if list(learned) == ["train"]:
            raise ConfigError(
                f"{', '.join(by_features)}: what learns from the training split cannot be measured on it; leave out "
                "--split, and held-out images are measured"
            )
        learned.pop("train", None)
    if "validation" in {*judged, *learned} and _learned_all(bundle, options):
        notes.append(
            "this model's training held nothing out: if it was trained on this data, it has learned from the images "
            "that are measured"
        )
    for note in dict.fromkeys(notes):
        console.print(note, style="yellow", markup=False)
    rows: dict[str, dict[str, Any]] = {}
    with _Bar(console) as bar:
        outputs = _outputs(bundle, options, console, bar)
        for name, source in judged.items():
            rows[name] = dict(measure(by_head, outputs, source, source))
        for name, source in learned.items():
            rows[name] = rows.get(name, {}) | measure(by_features, outputs, splits.train, source)
    for key, reason in outputs.skipped.items():
        console.print(f"skipped {key}: {reason}", style="yellow", markup=False)
    _show(rows, _reports(outputs, judged) if options.per_class or options.confusion else {}, bundle, options, console)
    return 0


def _show(
    rows: dict[str, dict[str, Any]],
    reports: dict[str, ClassificationReport],
    bundle: Bundle,
    options: Evaluate,
    console: Console,
) -> None:
    """Prints what was found of each split."""
    from vitrail.cli.evaluate_tables import confusion_table, figures_table, per_class_table

    if options.json:
        print(json.dumps({name: row | _detail(reports.get(name), options, bundle) for name, row in rows.items()}))
        return
    console.print(figures_table(rows))
    for name, report in reports.items():
        if options.per_class:
            console.print(per_class_table(name, report))
        if options.confusion:
            console.print(confusion_table(name, report, bundle.classes))


def _suite(options: Evaluate, console: Console) -> int:
    """Many data sets."""
    from vitrail.cli.evaluate_tables import suite_table
    from vitrail.transfer.suite import read_suite, run_suite, suite_as_plain

    suite = read_suite(options.suite)
    bundle = _load(options)
    for note in bundle.notes:
        console.print(note, style="yellow", markup=False)
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
            console.print(f"left out {row.task.name}: {row.reason}", style="yellow", markup=False)
    return 0


def _load(options: Evaluate) -> Bundle:
    from vitrail.weights.adapt import adapted
    from vitrail.weights.load import load

    return adapted(load(options.model, device=options.device), image_size=options.image_size)


def _settings(options: Evaluate) -> dict[str, dict[str, Any]]:
    """Of the evaluators."""
    names = {
        "accuracy": ("bootstrap", "real", "class_names"),
        "fewshot": ("shots", "seeds", "l2", "allow_fewer"),
        "knn": ("k", "temperature"),
    }
    return {name: {field: getattr(options, field) for field in some} for name, some in names.items()}


def _by_model(bundle: Bundle, options: Evaluate, share: float) -> tuple[Splits, tuple[str, ...]]:
    """The data with labels that are the model's outputs, and what to say of how they were matched."""
    from vitrail.data.sources import open_data
    from vitrail.data.splits import Splits
    from vitrail.evaluation.predictions.imagenet import MappedSource, map_classes

    if not options.class_names:
        try:
            # The cut depends on names and share alone, so with training's share it holds out what training held out.
            return open_data(options.data, validation_share=share, classes=bundle.classes or None), ()
        except DataError:
            pass  # if it is not for the classes, the next line says it again
    splits = open_data(options.data, validation_share=share)
    mapped = map_classes(bundle.classes, splits.classes, mapping=options.class_names or None)

    def of_model(source: Source | None) -> MappedSource | None:
        return None if source is None else MappedSource(source, mapped, bundle.classes)

    train = MappedSource(splits.train, mapped, bundle.classes)
    return Splits(train, of_model(splits.validation), of_model(splits.test), splits.notes), (mapped.note,)


def _by_data(options: Evaluate, share: float) -> Splits:
    """The data with its own classes. All training images are learned from where other ones are measured."""
    from vitrail.data.sources import open_data

    if options.split != "validation":
        splits = open_data(options.data, validation_share=0.0)
        if splits.held_out is not None or options.split == "all":
            return splits
    return open_data(options.data, validation_share=share)


def _learned_all(bundle: Bundle, options: Evaluate) -> bool:
    """Whether a validation split is cut here that training with no image held out had not."""
    from vitrail.data.sources import open_data

    if options.split == "all" or bundle.provenance.get("validation_share") != 0:
        return False
    return open_data(options.data, validation_share=0.0).validation is None


def _chosen(splits: Splits, options: Evaluate) -> tuple[dict[str, Source], tuple[str, ...]]:
    """The splits to measure by name, and what to say of them."""
    named = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    there = {name: source for name, source in named.items() if source is not None}
    if options.split == "all":
        return there, splits.notes
    if options.split == "held-out":
        assert splits.held_out is not None, "a validation split was cut where there was none"
        name, source = splits.held_out
        if name == "test":
            return {name: source}, ()
        return {name: source}, (*splits.notes, "measuring the validation split; --split all measures every image")
    if options.split not in there:
        raise DataError(f"data {options.data!r} has no {options.split} split; it has: {', '.join(there)}")
    return {options.split: there[options.split]}, splits.notes


def _outputs(bundle: Bundle, options: Evaluate, console: Console, bar: _Bar) -> Outputs:
    from vitrail.evaluation.features.extract import default_cache
    from vitrail.evaluation.outputs import Outputs

    return Outputs(
        bundle,
        batch_size=options.batch_size,
        precision=options.precision,
        cache=None if options.no_cache else options.cache or default_cache(),
        on_progress=bar.update,
        on_note=lambda note: console.print(note, style="yellow", markup=False),
    )


def _reports(outputs: Outputs, sources: dict[str, Source]) -> dict[str, ClassificationReport]:
    """Of the head, once more, without the intervals that are known already."""
    from vitrail.evaluation.predictions.report import report

    return {name: report(outputs.predictions(source), bootstrap=0) for name, source in sources.items()}


def _detail(report: ClassificationReport | None, options: Evaluate, bundle: Bundle) -> dict[str, Any]:
    """What JSON has of a split beside its figures."""
    from vitrail.plain import to_plain

    detail: dict[str, Any] = {}
    if report is not None and options.per_class:
        detail["per_class"] = [to_plain(row) for row in report.per_class]
    if report is not None and options.confusion:
        names = bundle.classes
        detail["confusion"] = [[names[true], names[taken], images] for true, taken, images in report.confusion]
    return detail


class _Bar:
    """How far the images are, where somebody looks on."""

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
