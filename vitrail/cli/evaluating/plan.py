"""The measurements of `vitrail evaluate` for one model: checked before any of them is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitrail.cli.evaluating.common import CommonImages
from vitrail.cli.evaluating.data import open_for_features, open_for_head
from vitrail.data.colour import colour_note, images_of
from vitrail.data.source import Source
from vitrail.errors import ConfigError
from vitrail.evaluation.evaluators import BY_HEAD, Evaluator, check_evaluators, measure
from vitrail.evaluation.outputs import Outputs
from vitrail.weights.bundle import Bundle

if TYPE_CHECKING:
    from vitrail.cli.evaluate import Evaluate

__all__ = ["Job", "Plan", "plan_of"]


@dataclass(frozen=True)
class Job:
    """Evaluators that measure one split."""

    split: str
    evaluators: dict[str, Evaluator]
    train: Source
    source: Source


@dataclass(frozen=True)
class Plan:
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
) -> Plan:
    """Open the data for a model, and check it. Nothing is measured."""

    heads = set(BY_HEAD.values())
    by_head = {name: evaluator for name, evaluator in evaluators.items() if name in heads}
    by_features = {name: evaluator for name, evaluator in evaluators.items() if name not in heads}
    data, split = options.data, options.split
    learned = open_for_features(bundle, data, split, options.numbers, common) if by_features else None
    judged = open_for_head(bundle, data, split, options.class_names, learned, common) if by_head else None
    if learned is not None and list(learned.sources) == ["train"]:
        raise ConfigError(
            f"--split {split}: {', '.join(by_features)} cannot be measured on the images that it learns from; leave "
            "out --split to measure held-out images"
        )
    head = judged.sources if judged is not None else {}
    jobs = [Job(name, by_head, source, source) for name, source in head.items()]
    if learned is not None:
        tested = {name: source for name, source in learned.sources.items() if name != "train"}
        jobs += [Job(name, by_features, learned.train, source) for name, source in tested.items()]
    for job in jobs:
        check_evaluators(job.evaluators, outputs, job.train, job.source)
    opened = [each for each in (judged, learned) if each is not None]
    colour = colour_note(images_of(jobs[0].source), bundle.preprocess.channels)
    notes = dict.fromkeys((*bundle.notes, *(note for each in opened for note in each.notes), *filter(None, [colour])))
    return Plan(outputs, tuple(jobs), head, tuple(notes))
