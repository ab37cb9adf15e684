"""The report of a finished run in one HTML file: settings, training curves, metrics and largest errors."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image

from vitrail.data.augment.settings import Augment
from vitrail.data.check.images import colour_note, images_of
from vitrail.data.pixels.decode import to_pil
from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import DataError, plural
from vitrail.evaluation.metrics.intervals import LEVEL, Metric, wilson_ends
from vitrail.evaluation.metrics.report import (
    QUANTILES,
    Calibration,
    ClassificationReport,
    ClassRow,
    LargeError,
    Mistake,
    RegressionReport,
    absent_note,
    interval_text,
    named_metrics,
)
from vitrail.evaluation.mistakes import PlacedReport
from vitrail.report.charts import Bin, Chart, confusion_matrix, reliability_diagram, scatter_plot, shorten
from vitrail.report.page import write_page
from vitrail.settings import to_plain
from vitrail.tasks.task import TaskMetric
from vitrail.training.config import TrainConfig
from vitrail.training.folder import inside_link, read_record
from vitrail.training.log import read_journal
from vitrail.training.page import MAX_NAME, HeldOutExample, drawn_example, mistakes_text, training_figures
from vitrail.transfer.trials import Tried
from vitrail.weights.answers import Detections, MaskPrediction
from vitrail.weights.bundle import Bundle

AnyReport = ClassificationReport | RegressionReport | PlacedReport

NO_AUGMENTATION = Augment(flip=False)

MAX_FIRST = 6
"""Maximum number of errors, and of other images, at the top of the page."""

MAX_LARGE = 2
"""Maximum number of images with boxes or masks at the top of the page."""

Shown = tuple[Image.Image | None, Sequence[str]]
"""A picture, or None if it cannot be decoded, and the lines of its caption."""

Section = dict[str, Any]
"""The values of a section, for the macro of the same name in sections.html."""


def write_report(
    folder: Path,
    bundle: Bundle,
    source: Source,
    split: str,
    report: AnyReport,
    *,
    examples: Sequence[HeldOutExample] = (),
    tried: Sequence[Tried] = (),
    next_commands: Sequence[str] = (),
) -> Path:
    """Write `report.html` into a run's folder, replace an earlier report, and return the path.

    `bundle` is the run's model. `report` holds its metrics on `source`, the split with the name `split`. The pictures
    of the largest errors are read from `source`. `examples` are shown at the top, after the largest errors. `tried` are
    the trials that chose the settings. `next_commands` are shown at the end of the page. Sections without data are
    omitted, for example the training curves of a run without evaluations.

    Raise `RunError` if `folder` is not the folder of a run, and `SaveError` if the file cannot be written.
    """
    config = read_record(folder).config
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    events = read_journal(folder / "journal.jsonl")
    metric = config.task.selection(Splits(source, None, None))
    main, interval = headline(report)
    results = _results(report, source, bundle)
    path = folder / "report.html"
    write_page(
        "the report",
        path,
        "transfer/report.html",
        title=f"Report of {folder.resolve().name}",
        main=main,
        interval=interval,
        level=f"{LEVEL:.0%}",
        images=_images(report, split),
        notes=_notes(config, record["data"]["notes"], split, report, source, bundle),
        held_out=_held_out(report, results["errors"]["pictures"], examples),
        is_large=isinstance(report, PlacedReport),
        coloured=bundle.classes if bundle.output == "mask" else (),
        inside=Markup(inside_link(folder)),
        split=split,
        metrics=summary_rows(report),
        charts=training_figures(config, events, metric, bundle.provenance.get("step")),
        trials=_trials(tried, events, bundle, metric),
        has_trials=any(one.steps for one in tried),
        settings=_settings(config, record, events, bundle),
        data_notes=record["data"]["notes"],
        results=results,
        skipped=_skipped(report, split, events),
        next_commands=next_commands,
    )
    return path


def summary_rows(report: AnyReport) -> list[tuple[str, str, str]]:
    """Return table rows with the names, values and intervals of the metrics over all images."""
    match report:
        case ClassificationReport():
            return [(one.name, one.value, one.interval or UNDEFINED) for one in named_metrics(report)]
        case RegressionReport():
            return number_rows(report)
        case PlacedReport():
            return [_row(name, metric, ".2%") for name, metric in report.metrics.items()]


def headline(report: AnyReport) -> tuple[str, str]:
    """Return the text of the main metric and of its interval."""
    match report:
        case ClassificationReport(has_several_labels=True):
            metric = report.metrics["exact_match"]
            return f"{metric.value:.2%} all labels right", interval_text(metric, ".1%")
        case ClassificationReport():
            metric = report.metrics["accuracy"]
            return f"{metric.value:.2%} accuracy", interval_text(metric, ".1%")
        case RegressionReport():
            metric = report.metrics["r2"]
            name = "R²" if len(report.names) == 1 else "mean R²"
            return f"{name} {metric.value:.3f}", interval_text(metric, ".3f")
        case PlacedReport():
            name, metric = next(iter(report.metrics.items()))
            return f"{name} {metric.value:.2%}", interval_text(metric, ".1%")


def untrained_note(config: TrainConfig, bundle: Bundle) -> str:
    """Return a note if the model of a run is the one at the start of training, and an empty text otherwise."""
    if bundle.provenance.get("step") != 0:
        return ""
    linear = "is the linear model of the frozen features with which training began"
    start = linear if config.start.linear_head else "has the initial weights"
    return f"training did not improve the initial model, so the saved model {start}"


def _results(report: AnyReport, source: Source, bundle: Bundle) -> dict[str, Section]:
    """Return the sections with detailed metrics and the largest errors, in their order on the page."""
    found: dict[str, Section | None]
    match report:
        case ClassificationReport():
            found = {
                "confusion": confusion(report),
                "classes": classes(report),
                "calibration": calibration(report),
                "errors": mistakes(report, source),
            }
        case RegressionReport():
            found = {"scatters": scatters(report), "residuals": residuals(report), "errors": errors(report, source)}
        case PlacedReport():
            found = {
                "classes": placed_classes(report),
                "places": places(report),
                "sizes": sizes(report),
                "errors": worst_images(report, source, bundle),
            }
    return {name: section for name, section in found.items() if section is not None}


def _held_out(report: AnyReport, errors: Sequence[Shown], examples: Sequence[HeldOutExample]) -> Sequence[Shown]:
    """Return a few held-out images with their truth and prediction: the largest errors first, then images whose class
    is predicted right, or for numbers any other image. A run that saved no examples shows none."""
    if isinstance(report, PlacedReport):
        return errors[:MAX_LARGE]
    worst: Sequence[Mistake | LargeError] = report.worst
    first: dict[str, Shown] = {}
    for one, picture in zip(worst, errors if examples else (), strict=False):
        if len(first) < MAX_FIRST:
            first.setdefault(one.key, picture)  # an image can have a large error of several numbers
    others = [one for one in examples if one.key not in first and (one.right or isinstance(report, RegressionReport))]
    return [*first.values(), *(one.shown for one in others[:MAX_FIRST])]


def _images(report: AnyReport, split: str) -> str:
    """Return the number of images and outputs as the end of a sentence."""
    count = report.num_classes if isinstance(report, ClassificationReport) else len(report.names)
    outputs = plural(count, "number" if isinstance(report, RegressionReport) else "class")
    skipped = f"; {plural(len(report.skipped), 'image')} could not be decoded" if report.skipped else ""
    return f"on {plural(report.images, f'{split} image')} of {outputs}{skipped}"


def _notes(
    config: TrainConfig, of_data: Sequence[str], split: str, report: AnyReport, source: Source, bundle: Bundle
) -> list[dict[str, str | bool]]:
    """Return the sentences about the model and its metrics below the main metric. Of the notes on the data (`of_data`),
    they include one on validation images from which the initial model has learned."""
    absent = absent_note(report, split) if isinstance(report, ClassificationReport) else ""
    method = "trained from scratch" if config.start.init is None else "fine-tuned"
    untrained = untrained_note(config, bundle)
    colours = colour_note(images_of(source), config.images.channels)
    chosen = split == "validation" and config.run.keep == "best"
    learned = next((note for note in of_data if note.startswith(f"{config.start.init}: ")), "")
    found = [
        (learned and split == "validation", f"Note: {learned}.", False),
        (absent, f"Note: {absent}.", False),
        (method, f"{_model(config)}, {method} on {config.data.spec}.", True),
        (untrained, f"Note: {untrained}.", False),
        (colours, f"Note: {colours}. To learn from colours, train with --channels 3.", False),
        (chosen, "The best weights were chosen on the same images, so expect slightly worse metrics on new images.",
         True),
    ]  # fmt: skip
    return [{"text": text, "is_dim": is_dim} for applies, text, is_dim in found if applies]


def _settings(
    config: TrainConfig, record: dict[str, Any], events: Sequence[dict[str, Any]], bundle: Bundle
) -> list[tuple[str, str]]:
    """Return the names and values of the main settings, and of the run's time and memory."""
    rates, data, noun = config.optimizer.for_batch_size(config.run.batch_size), record["data"], config.task.output_noun
    splits = ", ".join(f"{data[name]:,} {name}" for name in ("train", "validation", "test") if data[name])
    height, width = bundle.preprocess.image_size
    epochs = record["steps"] * config.mean_batch_size / max(data["train"], 1)
    optimizer = {
        "sgd": f"SGD with momentum {rates.momentum_rate:g}",
        "adamw": f"AdamW with betas {rates.beta1:g} and {rates.beta2:g}",
        "muon": f"Muon with momentum {rates.momentum_rate:g}, betas {rates.beta1:g} and {rates.beta2:g}",
        "adafactor": f"Adafactor with momentum {rates.momentum_rate:g}",
        "lars": f"LARS with momentum {rates.momentum_rate:g}",
        "lamb": f"LAMB with betas {rates.beta1:g} and {rates.beta2:g}",
    }[rates.kind]
    decay_rule = f"{rates.decay_rule} " if rates.weight_decay else ""
    warmup = rates.warmup if isinstance(rates.warmup, str) else f"{100 * rates.warmup:.4g}% of the steps"
    decay = "" if rates.layer_decay == 1 else f", layer decay {rates.layer_decay:g}"
    rows = [
        ("model", f"{_model(config)}, {sum(one.numel() for one in bundle.network.parameters()):,} parameters"),
        ("trained weights", _trained(config)),
        ("data", f"{config.data.spec}: {splits} images of {plural(len(bundle.classes), noun)}"),
        ("image size", f"{height} x {width} pixels (height x width)"),
        ("steps", f"{record['steps']:,} with a batch size of {config.run.batch_size:,} ({epochs:,.1f} epochs)"),
        ("optimizer", f"{optimizer}, {decay_rule}weight decay {rates.weight_decay:g}"),
        ("learning rate", f"{rates.learning_rate:g}, {rates.schedule}, warm-up {warmup}{decay}"),
        ("augmentation", _augmentation(config.augment)),
    ]
    if rates.average:
        rows.append(("averaging", f"exponential moving average of the weights, decay {rates.average:g}"))
    rows += [
        (item.name.replace("_", " "), f"{value:g}" if isinstance(value, float) else str(value))
        for item in dataclasses.fields(config.task)
        if (value := getattr(config.task, item.name)) != item.default
    ]
    if (step := bundle.provenance.get("step")) is not None:
        rows.append(("saved weights", f"the {config.run.keep} ones, of step {step:,}"))
    rows += [("precision", config.run.precision), ("seed", str(config.run.seed))]
    for event in events:
        if event["event"] == "ended early":
            rows.append(
                ("stopped early", f"after step {event['step']:,}: {event['patience']} evaluations without improvement")
            )
        if event["event"] == "finished":
            speed = f"{event['images_per_second']:,.0f} images/s"
            memory = f"peak memory {event['peak_memory_bytes'] / 2**30:.2f} GiB"
            rows.append(("time", f"{_duration(event['seconds'])} on {record['machine']['device']}, {speed}, {memory}"))
    return rows


def _trials(
    tried: Sequence[Tried], events: Sequence[dict[str, Any]], bundle: Bundle, metric: TaskMetric
) -> list[tuple[str, str, str]]:
    """Return table rows of the start, the trials and the finished model, if there were trials."""
    final = bundle.metrics.get(f"validation_{metric.name}")
    starts = [event for event in events if event["event"] == "evaluation" and event["step"] == 0]
    if not tried and starts and metric.name in starts[0]:
        tried = (Tried("the start, before the first step", 0, starts[0][metric.name]),)
    if not tried or final is None:
        return []
    rows = [(one.name, f"{one.steps:,}", one.text(metric)) for one in tried]
    rows.append(("the saved model", f"{bundle.provenance.get('step', 0):,}", metric.text(final)))
    return rows


def _model(config: TrainConfig) -> str:
    return config.start.init or config.model.name


def _trained(config: TrainConfig) -> str:
    start = config.start
    if start.lora_rank is not None:
        return f"the head, and LoRA of rank {start.lora_rank} on {', '.join(start.lora_on)} of each block"
    if start.train_blocks is not None:
        return "the head" if not start.train_blocks else f"the last {plural(start.train_blocks, 'block')} and the head"
    return "all"


def _augmentation(augment: Augment) -> str:
    """Return the names and values of the enabled augmentation operations."""
    operations = []
    for name, value in to_plain(augment).items():
        if value != getattr(NO_AUGMENTATION, name):
            numbers = value if isinstance(value, tuple) else (value,)
            shown = "" if value is True else " " + " ".join(str(number) for number in numbers)
            operations.append(f"{name.replace('_', ' ')}{shown}")
    return ", ".join(operations) or "none"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _skipped(report: AnyReport, split: str, events: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the images that could not be decoded, during training or when the finished model was measured.

    In journals of earlier versions, skipped images come before the event that identifies their split: a checkpoint or
    an evaluation.
    """
    found: dict[tuple[str, str], str] = {}
    pending: list[dict[str, Any]] = []
    for event in (*events, {"event": "checkpoint"}):
        if event["event"] == "skipped":
            pending.append(event)
        elif event["event"] == "checkpoint" or event.get("kept"):
            split_of = event.get("split", "train")  # runs of earlier versions do not name the split of the image
            found |= {(one.get("split", split_of), one["key"]): one["reason"] for one in pending}
            pending = []
    found |= {(split, one.key): one.reason for one in report.skipped}
    return [(key, reason, where) for (where, key), reason in found.items()]


# Sections of the report for predicted numbers: summary, scatter plots, residuals and largest errors.


MAX_PLOTS = 12
"""Maximum number of outputs that get a scatter plot."""


def number_rows(report: RegressionReport) -> list[tuple[str, str, str]]:
    """Return table rows with the name, value and interval of each metric of each number.

    If there are several numbers, the first rows are their mean R² and their mean standardised error. Errors with a unit
    are not averaged over numbers.
    """
    rows: list[tuple[str, str, str]] = []
    if len(report.names) > 1:
        rows += [
            _row("mean R²", report.metrics["r2"], ".3f"),
            _row("mean error, in standard deviations", report.metrics["standardised_error"], ".3f"),
        ]
    for output in report.per_output:
        if output.metrics is None:
            rows.append((f"{output.name}: no image has a known number", UNDEFINED, UNDEFINED))
            continue
        rows += [
            _row(f"{output.name}: R²", output.metrics["r2"], ".3f"),
            _row(f"{output.name}: mean absolute error", output.metrics["mean_absolute_error"], ".4g"),
            _row(f"{output.name}: root mean squared error", output.metrics["root_mean_squared_error"], ".4g"),
        ]
    return rows


def scatters(report: RegressionReport) -> Section:
    """Return a scatter plot of predicted over true values for each number, at most 12."""
    known = [(output, output.metrics) for output in report.per_output if output.metrics is not None]
    charts = []
    for output, metrics in known[:MAX_PLOTS]:
        shown, images = len(output.points), output.images
        caption = output.name if shown == images else f"{output.name}, {shown:,} of {images:,} images"
        titles = [f"true {true:.4g}, predicted {predicted:.4g}" for true, predicted in output.points]
        r2, error = metrics["r2"].value, metrics["mean_absolute_error"].value
        label = f"Predicted over true values of {output.name}. R² {r2:.3f}, mean absolute error {error:.4g}."
        charts.append(Chart(caption, scatter_plot(output.points, titles, label=label)))
    return {"charts": charts, "hidden": len(known[MAX_PLOTS:])}


def residuals(report: RegressionReport) -> Section:
    """Return a table with the mean and the quantiles of each number's residuals."""
    inner = [place for place, quantile in enumerate(QUANTILES) if 0 < quantile < 1]
    rows = [
        (
            output.name,
            f"{output.images:,}",
            f"{output.mean_residual:.4g}",
            *(f"{output.residual_quantiles[place]:.4g}" for place in inner),
        )
        for output in report.per_output
        if output.mean_residual is not None
    ]
    quantiles = (f"{QUANTILES[place]:.0%} quantile" for place in inner)
    return {"heads": ("number", "images", "mean", *quantiles), "rows": rows}


def errors(report: RegressionReport, source: Source) -> Section:
    """Return the largest errors, in standard deviations of the true numbers. Their pictures are read from
    `source`."""
    return {
        "pictures": [(picture_of(one.index, source), _error(one)) for one in report.worst[:MAX_MISTAKES]],
        "is_large": False,
        "explanation": "The largest errors, in standard deviations of the true numbers.",
        "without": "All numbers are predicted exactly.",
    }


def _error(error: LargeError) -> list[str]:
    off = [] if error.deviations is None else [f"{error.deviations:.3g} standard deviations off"]
    return [
        f"true {shorten(error.name, MAX_NAME)}: {error.true:.4g}",
        f"predicted: {error.predicted:.4g}",
        *off,
        shorten(error.key, MAX_NAME),
    ]


def _row(name: str, metric: Metric, form: str) -> tuple[str, str, str]:
    return name, f"{metric.value:{form}}", interval_text(metric, form) or UNDEFINED


# Sections of the report for boxes and masks: classes, confusion, sizes and the worst images.


def placed_classes(report: PlacedReport) -> Section:
    """Return a table of at most 200 classes, worst first. Classes without an object or a pixel are last."""
    ordered = sorted(report.per_class, key=lambda one: math.inf if one[1] is None else one[1])
    rows = [(name, _percent(value)) for name, value in ordered[:MAX_CLASSES]]
    metric = "AP" if "AP" in report.metrics else "intersection over union"
    return {"heads": ("class", metric), "rows": rows, "hidden": len(ordered[MAX_CLASSES:])}


def places(report: PlacedReport) -> Section | None:
    """Return the confusion matrix, of which the background is a class if the model finds objects."""
    has_objects = "AP" in report.metrics
    names = [*report.names, "background"] if has_objects else list(report.names)
    if len(names) > MAX_MATRIX_CLASSES:
        return None
    explanation = (
        "Objects per true class (row) and predicted class (column) that overlap by at least one half, from the score "
        "threshold on. The last column has the missed objects, and the last row those where there is nothing."
        if has_objects
        else "Percentage of the pixels of each true class (row) per predicted class (column)."
    )
    label = f"Confusion matrix of {plural(len(names), 'class')}."
    return {"matrix": confusion_matrix(report.confusion, names, label=label), "explanation": explanation}


def sizes(report: PlacedReport) -> Section | None:
    """Return a table of the objects of each size and of those that were found, or None without objects."""
    rows = [(name, f"{true:,}", f"{found:,}", _percent(found / true)) for name, true, found in report.recall]
    return {"rows": rows} if rows else None


def worst_images(report: PlacedReport, source: Source, bundle: Bundle) -> Section:
    """Return the images with the most mistakes. They are read from `source` and predicted again."""
    pictures: list[Shown] = []
    for index in report.worst:
        if (picture := picture_of(index, source)) is None:
            continue
        drawn, found, mistakes = drawn_example(bundle, source, picture, source.target(index))
        assert isinstance(found, Detections | MaskPrediction)
        lines = mistakes_text(found, mistakes), f"predicted: {found.text}", shorten(source.key(index), MAX_NAME)
        pictures.append((drawn, lines))
    return {
        "pictures": pictures,
        "is_large": True,
        "explanation": "The images with the most mistakes: the truth on the left, and the prediction on the right.",
        "without": "No mistake was found.",
    }


# Sections of the report for classifiers: summary, confusion matrix, classes, calibration and largest errors.


MAX_MATRIX_CLASSES = 40
"""Maximum number of classes for which the confusion matrix is drawn. With more classes, only the most confused pairs
are listed."""

MAX_PAIRS = 40
PAIRS_BESIDE_MATRIX = 10
MAX_CLASSES = 200
MAX_MISTAKES = 20

UNDEFINED = "-"
"""Text for a metric that was not computed or whose denominator is 0."""


def picture_of(index: int, source: Source) -> Image.Image | None:
    """Return an image of a source, or None if it cannot be decoded."""
    try:
        return to_pil(source[index].image, 3)
    except DataError:
        return None


def confusion(report: ClassificationReport) -> Section | None:
    """Return the confusion matrix of all classes that occur, and the most frequently confused pairs of classes."""
    if report.has_several_labels:
        return None
    positions = {row.index: position for position, row in enumerate(report.per_class)}
    names = [row.name for row in report.per_class]
    cells = [(positions[true], positions[predicted], images) for true, predicted, images in report.confusion]
    wrong = [cell for cell in cells if cell[0] != cell[1]]
    wrong.sort(key=lambda cell: (-cell[2], -cell[2] / report.per_class[cell[0]].images))
    fits = len(names) <= MAX_MATRIX_CLASSES
    label = f"Confusion matrix of {plural(len(names), 'class')}; the table below lists the most confused pairs."
    shown = PAIRS_BESIDE_MATRIX if fits else MAX_PAIRS
    pairs = [
        (names[true], names[predicted], f"{images:,}", f"{images / report.per_class[true].images:.1%}")
        for true, predicted, images in wrong[:shown]
    ]
    matrix = confusion_matrix(cells, names, label=label) if fits else None
    return {"matrix": matrix, "pairs": pairs, "hidden": len(wrong[shown:])}


def classes(report: ClassificationReport) -> Section:
    """Return a table of at most 200 classes, worst first.

    Classes are sorted by accuracy, or by average precision if images can have several labels.
    """
    multi_label = report.has_several_labels

    def quality(row: ClassRow) -> tuple[float, int]:
        value = row.average_precision if multi_label else row.accuracy
        return (math.inf if value is None else value), -row.images

    ordered = sorted(report.per_class, key=quality)
    rows = [
        (
            row.name,
            f"{row.images:,}",
            *([_percent(row.average_precision)] if multi_label else []),
            _percent(row.accuracy),
            _percent(row.precision),
            _percent(row.f1),
        )
        for row in ordered[:MAX_CLASSES]
    ]
    first = ["average precision", "recall"] if multi_label else ["accuracy"]
    return {"heads": ("class", "images", *first, "precision", "F1"), "rows": rows, "hidden": len(ordered[MAX_CLASSES:])}


def calibration(report: ClassificationReport) -> Section | None:
    """Return the reliability diagram and the calibration metrics, before and after temperature scaling."""
    before, after = report.calibration, report.scaled
    if before is None:
        return None
    columns: list[tuple[str, Calibration]] = [("uncalibrated", before)]
    if after is not None:
        columns.append((f"with temperature {after.temperature:.3g}", after))
    label = "Reliability diagram: accuracy over confidence. " + " ".join(
        f"Calibration error {name}: {one.error.value:.2%}." for name, one in columns
    )
    return {
        "is_scaled": after is not None,
        "errors": [f"{100 * one.error.value:.1f}" for _, one in columns],
        "chart": Chart(
            "Accuracy over confidence, with 95% intervals; a dot's area is its number of images",
            reliability_diagram(_filled(before), None if after is None else _filled(after), label=label),
            tuple(name for name, _ in reversed(columns)),
        ),
        "heads": ("metric", *(name for name, _ in columns)),
        "rows": [
            ("expected calibration error", *(f"{one.error.value:.2%}" for _, one in columns)),
            ("cross-entropy, nats", *(f"{one.cross_entropy.value:.4f}" for _, one in columns)),
            ("Brier score", *(f"{one.brier.value:.4f}" for _, one in columns)),
        ],
    }


def _filled(calibration: Calibration) -> list[Bin]:
    """Return the bins that have images, with Wilson's intervals of their accuracies."""
    return [
        (one.confidence, one.accuracy, one.images, wilson_ends(one.accuracy, one.images))
        for one in calibration.bins
        if one.confidence is not None and one.accuracy is not None
    ]


def mistakes(report: ClassificationReport, source: Source) -> Section:
    """Return the wrong predictions with the largest loss. Their pictures are read from `source`."""
    multi_label = report.has_several_labels
    return {
        "pictures": [
            (
                picture_of(one.index, source),
                (
                    f"true: {shorten(', '.join(one.labels) or 'none', MAX_NAME)}",
                    f"predicted: {shorten(', '.join(one.predicted) or 'none', MAX_NAME)}",
                    f"{one.probability:.1%}{' for the likeliest class' if multi_label else ''}",
                    shorten(one.key, MAX_NAME),
                ),
            )
            for one in report.worst[:MAX_MISTAKES]
        ],
        "is_large": False,
        "explanation": "The wrong predictions with the largest loss.",
        "without": "All predictions are right.",
    }


def _percent(value: float | None) -> str:
    return UNDEFINED if value is None else f"{value:.1%}"
