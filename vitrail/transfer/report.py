"""The report of a finished run in one HTML file: settings, training curves, metrics and largest errors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vitrail.data.augmentation.augment import Augment
from vitrail.data.colour import colour_note, images_of
from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import plural
from vitrail.evaluation.predictions.bootstrap import LEVEL
from vitrail.evaluation.predictions.regression import RegressionReport
from vitrail.evaluation.predictions.report import ClassificationReport, absent_note
from vitrail.files import partial_path, saving
from vitrail.page import document, escape, table
from vitrail.plain import to_plain
from vitrail.tasks.task import TaskMetric
from vitrail.training.config import TrainConfig
from vitrail.training.records.curves import training_figures
from vitrail.training.records.inside import inside_link
from vitrail.training.records.record import read_record
from vitrail.training.reporting.journal import read_journal
from vitrail.transfer import charts, number_sections, sections
from vitrail.transfer.number_sections import errors_section, number_rows, residuals_section, scatter_section
from vitrail.transfer.search import Tried
from vitrail.transfer.sections import (
    calibration_section,
    class_rows,
    classes_section,
    confusion_section,
    mistakes_section,
)
from vitrail.weights.bundle import Bundle

__all__ = ["AnyReport", "summary_rows", "untrained_note", "write_report"]

AnyReport = ClassificationReport | RegressionReport

MAX_SKIPPED = 50

STYLE = """
pre { background: var(--soft); padding: .7rem 1rem; overflow-x: auto; font-size: .9rem; line-height: 1.6; }
@media (max-width: 30rem) { th, td { padding-right: .5rem; } }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 7.7rem; max-width: 24rem; }
.texts.beside td:first-child { min-width: 8.5rem; }
.texts :is(th, td):nth-child(2) { text-align: left; }
.texts td:nth-child(2) { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; max-width: 34rem; }
"""

NO_AUGMENTATION = Augment(flip=False)


def write_report(
    folder: Path,
    bundle: Bundle,
    source: Source,
    split: str,
    report: AnyReport,
    *,
    tried: Sequence[Tried] = (),
    next_commands: Sequence[str] = (),
) -> Path:
    """Write `report.html` into a run's folder, replace an earlier report, and return the path.

    `bundle` is the run's model. `report` holds its metrics on `source`, the split with the name `split`. The pictures
    of the largest errors are read from `source`. `tried` are the trials that chose
    the settings. `next_commands` are shown at the end of the page. Sections without
    data are omitted, for example the training curves of a run without evaluations.

    Raise `RunError` if `folder` is not the folder of a run, and `SaveError` if the file cannot be written.
    """
    config = read_record(folder).config
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    events = read_journal(folder / "journal.jsonl")
    metric = config.task.selection(Splits(source, None, None))
    summary = table(("metric", split, f"{LEVEL:.0%} interval"), summary_rows(report))
    figures = training_figures(config, events, metric, bundle.provenance.get("step"))
    parts = [
        *_headline(config, split, report, source, bundle),
        inside_link(folder),
        *_overview(summary, next(iter(figures), "")),
        *_curves(figures[1:]),
        *_trials(tried, events, bundle, metric),
        *_settings(config, record, events, bundle),
        *_results(report, source),
        *_skipped(report, split, events),
    ]
    if next_commands:
        parts.append("<h2>Next steps</h2>\n<pre>" + "\n".join(map(escape, next_commands)) + "</pre>")
    page = document(f"Report of {folder.resolve().name}", parts, style=STYLE + charts.STYLE)
    path = folder / "report.html"
    with saving("the report", path):
        partial = partial_path(path)
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    return path


def summary_rows(report: AnyReport) -> list[tuple[str, str, str]]:
    """Return table rows with the names, values and intervals of the metrics over all images."""
    return number_rows(report) if isinstance(report, RegressionReport) else class_rows(report)


def untrained_note(config: TrainConfig, bundle: Bundle) -> str:
    """Return a note if the model of a run is the one at the start of training, and an empty text otherwise."""
    if bundle.provenance.get("step") != 0:
        return ""
    if config.start.linear_head:
        start = "is the linear model of the frozen features with which training began"
    else:
        start = "has the initial weights"
    return f"training did not improve the initial model, so the saved model {start}"


def _results(report: AnyReport, source: Source) -> Iterator[str]:
    """Yield the sections with detailed metrics and the largest errors."""
    if isinstance(report, RegressionReport):
        yield from scatter_section(report)
        yield from residuals_section(report)
        yield from errors_section(report, source)
    else:
        yield from confusion_section(report)
        yield from classes_section(report)
        yield from calibration_section(report)
        yield from mistakes_section(report, source)


def _headline(config: TrainConfig, split: str, report: AnyReport, source: Source, bundle: Bundle) -> Iterator[str]:
    """Yield the heading: the main metric, the model and the data."""
    if isinstance(report, RegressionReport):
        (main, interval), outputs = number_sections.headline(report), plural(len(report.names), "number")
    else:
        (main, interval), outputs = sections.headline(report), plural(report.num_classes, "class")
    level = f" ({LEVEL:.0%} interval {interval})" if interval else ""
    images = f"on {plural(report.images, f'{split} image')} of {outputs}"
    if report.skipped:
        images += f"; {plural(len(report.skipped), 'image')} could not be decoded"
    yield f"<p><strong>{escape(main)}</strong>{level} {escape(images)}.</p>"
    if isinstance(report, ClassificationReport) and (note := absent_note(report, split)):
        yield f"<p>Note: {escape(note)}.</p>"
    method = "trained from scratch" if config.start.init is None else "fine-tuned"
    yield f'<p class="dim">{escape(f"{_model(config)}, {method} on {config.data.spec}.")}</p>'
    if note := untrained_note(config, bundle):
        yield f"<p>Note: {escape(note)}.</p>"
    if note := colour_note(images_of(source), config.images.channels):
        yield f"<p>Note: {escape(note)}. To learn from colours, train with --channels 3.</p>"
    if split == "validation" and config.run.keep == "best":
        yield (
            '<p class="dim">The best weights were chosen on the same images, so expect slightly worse metrics on new '
            "images.</p>"
        )


def _settings(
    config: TrainConfig, record: dict[str, Any], events: Sequence[dict[str, Any]], bundle: Bundle
) -> Iterator[str]:
    """Yield a table of the main settings, and of the run's time and memory."""
    rates, data, noun = config.optimizer, record["data"], config.task.output_noun
    splits = ", ".join(f"{data[name]:,} {name}" for name in ("train", "validation", "test") if data[name])
    height, width = bundle.preprocess.image_size
    epochs = record["steps"] * config.mean_batch_size / max(data["train"], 1)
    optimizer = {
        "sgd": f"SGD with momentum {rates.momentum_rate:g}",
        "adamw": f"AdamW with betas {rates.beta1:g} and {rates.beta2:g}",
        "muon": f"Muon with momentum {rates.momentum_rate:g}, betas {rates.beta1:g} and {rates.beta2:g}",
        "adafactor": f"Adafactor with momentum {rates.momentum_rate:g}",
    }[rates.kind]
    decay_rule = f"{rates.decay_rule} " if rates.weight_decay else ""
    warmup = rates.warmup if isinstance(rates.warmup, str) else f"{rates.warmup:.0%} of the steps"
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
    for item in dataclasses.fields(config.task):
        if (value := getattr(config.task, item.name)) != item.default:
            rows.append((item.name.replace("_", " "), f"{value:g}" if isinstance(value, float) else str(value)))
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
    yield "<h2>Settings</h2>"
    half = (len(rows) + 1) // 2
    yield '<div class="beside texts">'
    yield from (table(("setting", "value"), part) for part in (rows[:half], rows[half:]))
    yield "</div>"
    yield from (f'<p class="dim">{escape(note)}.</p>' for note in data["notes"])
    yield '<p class="dim">The file run.json beside this page has all settings.</p>'


def _trials(
    tried: Sequence[Tried], events: Sequence[dict[str, Any]], bundle: Bundle, metric: TaskMetric
) -> Iterator[str]:
    """Yield a table of the start, the trials and the finished model."""
    final = bundle.metrics.get(f"validation_{metric.name}")
    starts = [event for event in events if event["event"] == "evaluation" and event["step"] == 0]
    if not tried and starts and metric.name in starts[0]:
        tried = (Tried("the start, before the first step", 0, starts[0][metric.name]),)
    if not tried or final is None:
        return
    rows = [(one.name, f"{one.steps:,}", one.text(metric)) for one in tried]
    rows.append(("the saved model", f"{bundle.provenance.get('step', 0):,}", metric.text(final)))
    yield "<h2>Trials</h2>"
    yield table(("settings", "steps", "on the validation split"), rows)
    trials = "Trials have fewer steps than the final run, and are measured on at most 256 of these images."
    yield f'<p class="dim">{trials} They chose the settings.</p>'


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


def _overview(summary: str, figure: str) -> Iterator[str]:
    """Yield the table of the metrics, with the first figure beside it if there is one."""
    if not figure:
        yield summary
        return
    yield f'<div class="beside">\n{summary}\n<div class="charts">\n{figure}\n</div>\n</div>'


def _curves(figures: Sequence[str]) -> Iterator[str]:
    """Yield the remaining training curves."""
    if figures:
        yield '<h2>Training curves</h2>\n<div class="charts">'
        yield from figures
        yield "</div>"


def _skipped(report: AnyReport, split: str, events: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the images that could not be decoded, during training or when the finished model was measured.

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
    rows = [(key, reason, where) for (where, key), reason in found.items()]
    if rows:
        yield f"<h2>{plural(len(rows), 'image')} skipped</h2>"
        yield f'<div class="texts">{table(("image", "reason", "split"), rows[:MAX_SKIPPED])}</div>'
        if len(rows) > MAX_SKIPPED:
            yield f'<p class="dim">and {len(rows) - MAX_SKIPPED:,} more, which journal.jsonl names.</p>'
