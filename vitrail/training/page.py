"""The page of a run, `progress.html`: its curves from the journal, its settings, and held-out images."""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image

from vitrail.data.objects import Mask, Objects, drawn_on
from vitrail.data.pixels.decode import to_pil
from vitrail.data.source import Source, target_kind
from vitrail.data.targets import Target, class_indices
from vitrail.errors import UndecodableImage, plural
from vitrail.files import replacing_folder
from vitrail.report.charts import UNBOUNDED, Chart, Point, Series, line_chart, shorten
from vitrail.report.drawing import beside
from vitrail.report.page import write_page
from vitrail.tasks.pictures import PictureTable, spread
from vitrail.tasks.task import TaskMetric
from vitrail.training.config import TrainConfig
from vitrail.training.folder import inside_link, settings_of, value_text
from vitrail.training.log import numbers_of, read_journal
from vitrail.weights.answers import DENSE, AnyPrediction, Detections, MaskPrediction, Prediction
from vitrail.weights.bundle import Bundle

MAX_POINTS = 300
"""Maximum number of points of a line, about one per pixel. If there are more, neighbouring points are averaged."""

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

HEALTH = {
    "gradient_norm": ("Norm of the gradients", 1.0, ""),
    "parameter_norm": ("Norm of the weights", 1.0, ""),
    "update_ratio": ("Update of the weights", 100.0, "%"),
    "attention_logit": ("Largest attention logit", 1.0, ""),
    "images_per_second": ("Images per second", 1.0, ""),
    "waiting_share": ("Time spent waiting for images", 100.0, "%"),
}
"""Captions, factors and units of the measurements of a step, by their names in the journal."""


def training_figures(
    config: TrainConfig, events: Sequence[Mapping[str, Any]], metric: TaskMetric, saved_step: int | None = None
) -> list[Chart]:
    """Return charts of the validation metric, the training loss and the learning rate, as far as the journal has
    them. The metric at `saved_step`, the step of the saved weights, is marked."""
    steps = [event for event in events if event["event"] == "step"]
    rates, _ = averaged([(float(event["step"]), event["learning_rate"]) for event in steps])
    highest = max((rate for _, rate in rates), default=0.0)
    power = math.floor(math.log10(highest)) if 0 < highest < 0.01 else 0
    scaled = [(step, rate / 10**power) for step, rate in rates]
    found = [
        _metric_chart(events, saved_step, config.run.keep, metric),
        _step_chart(steps, "loss", "Training loss", line="loss"),
        Chart(
            "Learning rate" + (f", in 10{str(power).translate(SUPERSCRIPT)}" if power else ""),
            line_chart([Series("learning rate", scaled)], label=_description("Learning rate", rates), from_zero=True),
        ),
    ]
    return [one for one in found if one.svg]


def health_figures(events: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return charts of the health of training and of its speed, as far as the journal has them."""
    steps = [event for event in events if event["event"] == "step"]
    found = (_step_chart(steps, name, *how) for name, how in HEALTH.items())
    return [one for one in found if one.svg]


def _step_chart(
    steps: Sequence[Mapping[str, Any]], name: str, caption: str, scale: float = 1.0, unit: str = "", line: str = ""
) -> Chart:
    """Return the chart of a measurement of the steps by its name in the journal, times `scale`. `line` is the name of
    the line, which is by default the caption."""
    points, group = averaged([(float(step["step"]), scale * step[name]) for step in steps if name in step])
    svg = line_chart([Series(line or caption, points)], label=_description(caption, points), unit=unit, from_zero=True)
    return Chart(caption + (f", means of {group} reports" if group > 1 else ""), svg)


def _metric_chart(events: Sequence[Mapping[str, Any]], saved_step: int | None, keep: str, metric: TaskMetric) -> Chart:
    """Return the chart of a validation metric. There is one line for the averaged weights, and one for
    the weights in training.

    The point of the saved weights is marked. Fractions are drawn in percent.
    """
    name = f"Validation {metric.label}"
    scale, unit, bounds = (100, "%", (0.0, 100.0)) if metric.is_fraction else (1, "", UNBOUNDED)
    points: dict[str, list[Point]] = {"averaged": [], "trained": []}
    for event in events:
        measured = event["event"] == "evaluation" and event["split"] == "validation" and not event.get("kept")
        if measured and metric.name in event:
            points[event["weights"]].append((float(event["step"]), scale * event[metric.name]))
    series = [Series(weights, found) for weights, found in points.items() if found]
    mark: tuple[Point, str] | None = None
    if series and saved_step is not None:
        saved = [value for step, value in series[0].finite if step == saved_step]
        form = ".2f" if metric.is_fraction else ".4g"
        if saved:
            mark = (float(saved_step), saved[0]), f"{keep}, saved: {saved[0]:{form}}{unit}"
    described = f"{name}{' in percent' * metric.is_fraction}"
    label = " ".join(_description(f"{described}, {one.name} weights", one.points) for one in series)
    chart = line_chart(series, label=label, unit=unit, bounds=bounds, mark=mark)
    caption = name if len(series) < 2 else f"{name} of the weights"
    return Chart(caption, chart, tuple(one.name for one in series))


def averaged(points: list[Point]) -> tuple[list[Point], int]:
    """Return the means of groups of n neighbouring points, and n. There are at most `MAX_POINTS` groups.

    The x of a mean is the step of the last point of the group.
    """
    size = max(math.ceil(len(points) / MAX_POINTS), 1)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups], size


def _description(name: str, points: Sequence[Point]) -> str:
    """Return a sentence that describes a line to screen readers."""
    if not points:
        return ""
    (first, start), (last, end) = points[0], points[-1]
    return f"{name}: {start:.4g} at step {first:,.0f}, {end:.4g} at step {last:,.0f}."


# A few held-out images, saved as files for trying the new model.


PUNCTUATION = re.compile(r"\W+")
"""Characters of class names that are replaced by a hyphen in file names. Letters of all alphabets are kept."""

LONGEST = 60
"""Maximum number of characters of the labels in a file name."""


@dataclass(frozen=True)
class HeldOutExample:
    """An image with its labels and the model's prediction."""

    path: Path
    key: str
    """Key of the image in its source."""
    labels: tuple[str, ...]
    """The class of the image, all its classes, or its numbers with their names."""
    prediction: AnyPrediction
    mistakes: float = 0.0
    """Number of objects that are wrong or missed, or the fraction of wrong pixels."""

    @property
    def label(self) -> str:
        return ", ".join(self.labels) or ("a mask" if isinstance(self.prediction, MaskPrediction) else "none")

    @property
    def right(self) -> bool:
        """True if the predicted class is one of the labels, or if no object is wrong or missed."""
        if isinstance(self.prediction, Detections | MaskPrediction):
            return not self.mistakes
        return isinstance(self.prediction, Prediction) and self.prediction.label in self.labels

    @property
    def shown(self) -> tuple[Image.Image, list[str]]:
        """The picture, and the lines under it: the truth, the prediction, and the probability of a class. Pictures with
        boxes or masks show the truth on the left and the prediction on the right."""
        guess = self.prediction
        if isinstance(guess, Prediction):
            predicted, rest = guess.label, [f"{guess.probability:.1%}"]
        elif isinstance(guess, Detections | MaskPrediction):
            predicted, rest = guess.text, [mistakes_text(guess, self.mistakes)]
        else:
            predicted, rest = guess.text, []
        with Image.open(self.path) as picture:
            return picture.convert("RGB"), [
                f"true: {shorten(self.label, MAX_NAME)}", f"predicted: {shorten(predicted, MAX_NAME)}", *rest
            ]  # fmt: skip


def write_examples(bundle: Bundle, source: Source, folder: Path, count: int = 10) -> tuple[HeldOutExample, ...]:
    """Write about `count` images as PNG files with their labels in the file names. Return the images with their labels
    and the model's predictions.

    If the model predicts boxes or masks, the true and the predicted ones are drawn on copies beside each other. The
    images are spread evenly over `source`. Images without labels and broken images are skipped. A model without a head
    gets no examples. Raises `SaveError`.
    """
    if not bundle.classes:
        return ()
    picked, keys = [], []
    for place in spread(len(source), count):
        if (target := source.target(place)) is None:
            continue
        with suppress(UndecodableImage):
            picked.append((to_pil(source[place].image, bundle.preprocess.channels), target))
            keys.append(source.key(place))
    every = [_labels(source, target) for _, target in picked]
    names = [f"{number:02}-{_word(labels)}.png" for number, labels in enumerate(every)]
    paths = [folder / name for name in names]
    with replacing_folder("example images", folder, ("*.png",)) as partial:
        if bundle.output in DENSE:
            drawn = [drawn_example(bundle, source, picture, target) for picture, target in picked]
            for name, (picture, _, _) in zip(names, drawn, strict=True):
                picture.save(partial / name)
            rows = zip(paths, keys, every, drawn, strict=True)
            return tuple(
                HeldOutExample(path, key, labels, found, wrong) for path, key, labels, (_, found, wrong) in rows
            )
        for (picture, _), name in zip(picked, names, strict=True):
            picture.save(partial / name)
    return tuple(map(HeldOutExample, paths, keys, every, bundle.predict(paths)))


def drawn_example(
    bundle: Bundle, source: Source, picture: Image.Image, target: Target
) -> tuple[Image.Image, AnyPrediction, float]:
    """Return an image with its true boxes or mask beside the predicted ones, the prediction, and its mistakes. If the
    true mask cannot be read, the image alone stands in its place."""
    from vitrail.evaluation.mistakes import mistakes_of  # with the metrics of boxes and masks, which few runs need

    (found,) = bundle.predict([picture])
    found = bundle.shown(found)
    assert isinstance(target, Objects | Mask) and isinstance(found, Detections | MaskPrediction)
    try:
        true = drawn_on(picture.convert("RGB"), target, source.classes)
        return beside(true, found.drawn(picture)), found, mistakes_of(target, found)
    except UndecodableImage:
        return beside(picture, found.drawn(picture)), found, 0.0


def mistakes_text(found: Detections | MaskPrediction, mistakes: float) -> str:
    """Return the mistakes of a prediction as the line of a caption."""
    if isinstance(found, MaskPrediction):
        return f"{mistakes:.1%} of the pixels are wrong"
    return f"{plural(round(mistakes), 'object')} wrong or missed"


def try_command(folder: Path, bundle: Bundle, data: str) -> tuple[str, ...]:
    """Return the command that predicts a few images with the model of a run in a folder."""
    model = str(folder / "model")
    if bundle.output in DENSE:  # the examples are drawn on
        return "vitrail", "predict", model, "--data", data, "--out", str(folder / "drawn")
    return "vitrail", "predict", model, str(folder / "examples")


def _labels(source: Source, target: Target) -> tuple[str, ...]:
    if target_kind(source) == "numbers" and isinstance(target, tuple):
        texts = ["unknown" if math.isnan(float(value)) else f"{value:.6g}" for value in target]
        return tuple(f"{name} {text}" for name, text in zip(source.classes, texts, strict=True))
    return tuple(source.classes[one] for one in class_indices(target))


def _word(labels: tuple[str, ...]) -> str:
    return PUNCTUATION.sub("-", "-".join(labels) or "none")[:LONGEST]


# The report of a run without labels: one HTML page with metrics and pictures.


def write_pictures(
    folder: Path, heading: str, results: Sequence[tuple[str, str]], tables: Sequence[PictureTable]
) -> None:
    """Write `report.html` into a run's folder, over an earlier report. Without tables of pictures, write nothing. Raise
    `SaveError`.

    `heading` is a sentence about the run. `results` are metrics as texts, each after the name of its split.
    """
    if not tables:
        return
    write_page(
        "the report",
        folder / "report.html",
        "training/pictures.html",
        title=f"Report of {folder.resolve().name}",
        heading=heading,
        has_curves=(folder / "progress.html").is_file(),
        inside=Markup(inside_link(folder)),
        results=results,
        tables=tables,
    )


# `progress.html`: a run on one page, which is updated during the run.


SECONDS = 30.0
"""Least time between two versions of the page during a run."""

MAX_NAME = 60
"""Width of a name under a picture, in letters of average width."""

ENDS = ("finished", "stopped", "failed", "ended early")
"""Events after which the page is written at once."""


class ProgressPage:
    """Writes the page of a run again after evaluations and checkpoints, and when the run ends."""

    def __init__(self, folder: Path, config: TrainConfig, metric: TaskMetric, steps: int) -> None:
        self.folder = folder
        self.config = config
        self.metric = metric
        self.steps = steps
        self._examples: Sequence[HeldOutExample] = ()
        self._written = -SECONDS

    def receive(self, event: Mapping[str, Any]) -> None:
        """Write the page if this event of the journal changes it and the last version is old enough. Raises
        `SaveError`."""
        is_end = event["event"] in ENDS
        self._examples = event.get("shown", {}).get("examples", self._examples)
        now = time.perf_counter()
        if is_end or (event["event"] in ("evaluation", "checkpoint") and now - self._written >= SECONDS):
            self._written = now
            self.write()

    def write(self) -> None:
        """Write the page. Raises `SaveError`."""
        events = read_journal(self.folder / "journal.jsonl")
        config, task = self.config, self.config.task
        kept = "finished" if config.run.keep == "last" else "best"
        saved_steps = [event["step"] for event in events if event["event"] == kept or event.get(kept)]
        defaults = settings_of(TrainConfig()) | {one.name: one.default for one in fields(task)}
        changed = {
            name: value for name, value in settings_of(config).items() if value not in (None, defaults.get(name))
        }
        measured = {one["split"]: numbers_of(one) for one in events if one["event"] == "evaluation"}  # the last ones
        guesses = [one.prediction for one in self._examples]
        write_page(
            "the page of the run",
            self.folder / "progress.html",
            "training/progress.html",
            title=f"Run {self.folder.resolve().name}",
            state=self._state(events),
            results=[(split, text) for split in ("validation", "test") for text in task.texts(measured.get(split, {}))],
            charts=[
                *training_figures(config, events, self.metric, saved_steps[-1] if saved_steps else None),
                *health_figures(events),
            ],
            has_classes=task.output != "numbers",
            is_large=task.output in DENSE,
            coloured=next((one.names for one in guesses if isinstance(one, MaskPrediction)), ()),
            held_out=[one.shown for one in sorted(self._examples, key=lambda one: (one.right, -one.mistakes))],
            settings=[(name.replace("_", " "), value_text(value)) for name, value in changed.items()],
            skipped=[
                (event["key"], event["reason"], event.get("split", ""))
                for event in events
                if event["event"] == "skipped"
            ],
        )

    def _state(self, events: Sequence[dict[str, Any]]) -> str:
        """Return a sentence about how far the run is."""
        step = max((event.get("step", 0) for event in events), default=0)
        done = f"{step:,} of {plural(self.steps, 'step')}"
        for event in reversed(events):
            if event["event"] == "resumed":  # the ends before do not count
                break
            if event["event"] == "failed":
                return f"The run failed after {done}: {event['reason']}."
            if event["event"] == "finished":
                return f"The run is finished, after {done}."
            if event["event"] == "stopped":
                again = f"vitrail train --resume {shlex.quote(str(self.folder))}"
                return f"The run was stopped after {done}. Continue it with {again}."
        return f"The run is in progress: {done} were done when this page was written. Reload the page to see more."
