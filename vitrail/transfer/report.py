"""The report of a finished run: what was done, how it learned, where it errs, as one HTML file that needs no other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vitrail.data.augmentation.augment import Augment
from vitrail.data.source import Source
from vitrail.errors import plural
from vitrail.evaluation.predictions.bootstrap import LEVEL
from vitrail.evaluation.predictions.report import ClassificationReport
from vitrail.files import partial_path, saving
from vitrail.page import document, escape, table
from vitrail.plain import to_plain
from vitrail.training.config import TrainConfig
from vitrail.training.folder import read_record
from vitrail.training.monitoring.journal import read_journal
from vitrail.transfer import charts
from vitrail.transfer.charts import Mark, Point, Series
from vitrail.transfer.figures import (
    calibration_section,
    classes_section,
    confusion_section,
    mistakes_section,
    summary_section,
)
from vitrail.weights.bundle import Bundle

__all__ = ["write_report"]

MOST_SKIPPED = 50

MOST_POINTS = 300
"""Of a line: about one a pixel. Of more, neighbours are averaged."""

STYLE = """
pre { background: var(--soft); padding: .7rem 1rem; overflow-x: auto; font-size: .9rem; line-height: 1.6; }
@media (max-width: 30rem) { th, td { padding-right: .5rem; } }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 7.7rem; max-width: 24rem; }
.texts :is(th, td):nth-child(2) { text-align: left; }
.texts td:nth-child(2) { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; max-width: 34rem; }
"""

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
NO_CHANGES = Augment(flip=False)


def write_report(
    folder: Path,
    bundle: Bundle,
    source: Source,
    split: str,
    report: ClassificationReport,
    *,
    next_commands: Sequence[str] = (),
) -> Path:
    """Writes `report.html` into a run's folder, over one that is there, and returns its path.

    `bundle` is the run's model and `report` what it says of `source`, the split called `split`, which is read again for
    the worst mistakes' pictures. `next_commands` are what to type next. It works for any run, also one from scratch or
    without evaluations; what a run does not have is left out.

    Raises `RunError` where `folder` is not a run's, `SaveError` where the file cannot be written.
    """
    config = read_record(folder).config
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    events = read_journal(folder / "journal.jsonl")
    parts = [
        *_summary(config, split, report),
        *summary_section(report, split),
        *_settings(config, record, events, bundle),
        *_curves(config, events, bundle),
        *confusion_section(report),
        *classes_section(report),
        *calibration_section(report),
        *mistakes_section(report, source),
        *_skipped(report, split, events),
    ]
    if next_commands:
        parts.append("<h2>Next</h2>\n<pre>" + "\n".join(map(escape, next_commands)) + "</pre>")
    page = document(f"Report of {folder.resolve().name}", parts, style=STYLE + charts.STYLE)
    path = folder / "report.html"
    with saving("the report", path):
        partial = partial_path(path)
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    return path


def _summary(config: TrainConfig, split: str, report: ClassificationReport) -> Iterator[str]:
    several = report.multi_label
    what, figure = ("accuracy", report.accuracy) if several is None else ("exactly right", several.exact_match)
    low, high = figure.low, figure.high
    between = "" if low is None or high is None else f" ({LEVEL:.0%} interval {100 * low:.1f} to {high:.1%})"
    images = f"on {plural(report.images, f'{split} image')} of {plural(report.num_classes, 'class')}"
    yield f"<p><strong>{figure.value:.2%} {what}</strong>{between} {escape(images)}.</p>"
    how = "trained from scratch" if config.start.init is None else "fine-tuned"
    yield f'<p class="dim">{escape(f"{_model(config)}, {how} on {config.data}.")}</p>'
    if split == "validation" and config.keep == "best":
        yield '<p class="dim">The same images chose which weights to keep, so expect a little less of new ones.</p>'


def _settings(
    config: TrainConfig, record: dict[str, Any], events: Sequence[dict[str, Any]], bundle: Bundle
) -> Iterator[str]:
    """What decides a result, and what it took."""
    rates, data = config.optimization, record["data"]
    splits = ", ".join(f"{data[name]:,} {name}" for name in ("train", "validation", "test") if data[name])
    height, width = bundle.preprocess.image_size
    passes = record["steps"] * config.batch_size / max(data["train"], 1)
    optimizer = {
        "sgd": f"SGD with momentum {rates.momentum:g}",
        "adamw": f"AdamW with betas {rates.beta1:g} and {rates.beta2:g}",
    }[rates.optimizer]
    decay = "" if rates.layer_decay == 1 else f"; of each block {rates.layer_decay:g} times that of the block above it"
    rows = [
        ("model", f"{_model(config)}, {sum(one.numel() for one in bundle.network.parameters()):,} parameters"),
        ("trained", _trained(config)),
        ("data", f"{config.data}: {splits} images of {plural(len(bundle.classes), 'class')}"),
        ("image size", f"{height} x {width} pixels (height x width)"),
        (
            "steps",
            f"{record['steps']:,} of {config.batch_size:,} images: {passes:,.1f} passes over the training images",
        ),
        ("optimiser", f"{optimizer}, weight decay {rates.weight_decay:g}"),
        ("learning rate", f"{rates.learning_rate:g}, {rates.schedule}, warm-up {rates.warmup:.0%} of the steps{decay}"),
        ("augmentation", _augmentation(config.augment)),
    ]
    for name, value in (
        ("averaging", f"running mean of the weights, decay {rates.average:g}" if rates.average else ""),
        ("label smoothing", f"{config.label_smoothing:g}" if config.label_smoothing else ""),
        ("class weights", config.class_weights if config.class_weights != "none" else ""),
    ):
        if value:
            rows.append((name, value))
    if (step := bundle.provenance.get("step")) is not None:
        rows.append(("kept", f"the {config.keep} weights, of step {step:,}"))
    rows += [("precision", config.precision), ("seed", str(config.seed))]
    for event in events:
        if event["event"] == "ended early":
            rows.append(
                ("ended early", f"after step {event['step']:,}: {event['patience']} evaluations were no better")
            )
        if event["event"] == "finished":
            speed = f"{event['images_per_second']:,.0f} images/s"
            peak = f"{event['peak_memory_bytes'] / 2**30:.2f} GiB of memory at the peak"
            rows.append(("took", f"{_duration(event['seconds'])} on {record['machine']['device']}: {speed}, {peak}"))
    yield "<h2>What was done</h2>"
    yield f'<div class="texts">{table(("setting", "value"), rows)}</div>'
    yield from (f'<p class="dim">{escape(note)}.</p>' for note in data["notes"])
    yield '<p class="dim">Every other setting is in run.json beside this page.</p>'


def _model(config: TrainConfig) -> str:
    return config.start.init or config.model.variant or "ViT-Pico/7"


def _trained(config: TrainConfig) -> str:
    start = config.start
    if start.lora_rank is not None:
        return f"the head, and changes of rank {start.lora_rank} to {', '.join(start.lora_on)} of each block"
    if start.train_blocks is not None:
        return "the head" if not start.train_blocks else f"the last {plural(start.train_blocks, 'block')} and the head"
    return "all weights"


def _augmentation(augment: Augment) -> str:
    """What is switched on."""
    words = []
    for name, value in to_plain(augment).items():
        if value != getattr(NO_CHANGES, name):
            numbers = value if isinstance(value, tuple) else (value,)
            shown = "" if value is True else " " + " ".join(str(number) for number in numbers)
            words.append(f"{name.replace('_', ' ')}{shown}")
    return ", ".join(words) or "none"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _curves(config: TrainConfig, events: Sequence[dict[str, Any]], bundle: Bundle) -> Iterator[str]:
    """Training loss and learning rate as they were reported, and the validation split's accuracy, as far as there is
    any."""
    steps = [event for event in events if event["event"] == "step"]
    losses, each = _averaged([(float(event["step"]), event["loss"]) for event in steps])
    rates, _ = _averaged([(float(event["step"]), event["learning_rate"]) for event in steps])
    top = max((rate for _, rate in rates), default=0.0)
    power = math.floor(math.log10(top)) if 0 < top < 0.01 else 0
    scaled = [(step, rate / 10**power) for step, rate in rates]
    drawn = [
        (
            "Training loss" + (f", means of {each} reports" if each > 1 else ""),
            charts.line_chart([Series("loss", losses)], label=_told("Training loss", losses), zero=True),
        ),
        _accuracy_chart(events, bundle.provenance.get("step"), config.keep),
        (
            "Learning rate" + (f", in 10{str(power).translate(SUPERSCRIPT)}" if power else ""),
            charts.line_chart([Series("learning rate", scaled)], label=_told("Learning rate", rates), zero=True),
        ),
    ]
    if any(chart for _, chart in drawn):
        yield '<h2>How it learned</h2>\n<div class="charts">'
        for caption, chart in drawn:
            if chart:
                yield f"<figure>\n<figcaption>{caption}</figcaption>\n{chart}\n</figure>"
        yield "</div>"


def _accuracy_chart(events: Sequence[dict[str, Any]], kept: int | None, keep: str) -> tuple[str, str]:
    """Of the weights that would be kept, and where these are a running mean also of those without it."""
    points: dict[str, list[Point]] = {"averaged": [], "trained": []}
    for event in events:
        if event["event"] == "evaluation" and event["split"] == "validation" and not event.get("kept"):
            points[event["weights"]].append((float(event["step"]), 100 * event["accuracy"]))
    series = [Series(name, found) for name, found in points.items() if found]
    mark = None
    if series:
        at = [value for step, value in series[0].finite if step == kept]
        mark = Mark(float(kept), at[0], f"{keep}, kept: {at[0]:.2f}%") if kept is not None and at else None
    label = " ".join(_told(f"Validation accuracy in percent, {one.name} weights", one.points) for one in series)
    chart = charts.line_chart(series, label=label, unit="%", within=(0.0, 100.0), mark=mark)
    caption = "Validation accuracy" if len(series) < 2 else "Validation accuracy of the weights"
    return f"{caption}{charts.key([one.name for one in series])}", chart


def _averaged(points: list[Point]) -> tuple[list[Point], int]:
    """As many points as a line can show, each the mean of so many neighbours, at the last one's step."""
    each = max(math.ceil(len(points) / MOST_POINTS), 1)
    groups = [points[at : at + each] for at in range(0, len(points), each)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups], each


def _told(name: str, points: Sequence[Point]) -> str:
    """A line in a sentence, for those who do not see it."""
    if not points:
        return ""
    (first, begin), (last, end) = points[0], points[-1]
    return f"{name}: {begin:.4g} at step {first:,.0f}, {end:.4g} at step {last:,.0f}."


def _skipped(report: ClassificationReport, split: str, events: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What could not be decoded, in training and in the measurements of the finished model.

    The journal names it before what says where it was met: a checkpoint, or the measurement of a split.
    """
    found: dict[tuple[str, str], str] = {}
    waiting: list[dict[str, Any]] = []
    for event in (*events, {"event": "checkpoint"}):
        if event["event"] == "skipped":
            waiting.append(event)
        elif event["event"] == "checkpoint" or event.get("kept"):
            found |= {(event.get("split", "train"), one["key"]): one["reason"] for one in waiting}
            waiting = []
    found |= {(split, one.key): one.reason for one in report.skipped}
    rows = [(name, why, of) for (of, name), why in found.items()]
    if rows:
        yield f"<h2>{plural(len(rows), 'image')} left out</h2>"
        yield f'<div class="texts">{table(("image", "why", "split"), rows[:MOST_SKIPPED])}</div>'
        if len(rows) > MOST_SKIPPED:
            yield f'<p class="dim">and {len(rows) - MOST_SKIPPED:,} more; journal.jsonl names them.</p>'
