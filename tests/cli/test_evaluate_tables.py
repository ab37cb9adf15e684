"""Tests of the tables of `vitrail evaluate`, as text."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
from rich.console import Console, RenderableType

from tests.targets import multi_labels, single_labels
from vitrail.cli.evaluate import confusion_table, metrics_table, per_class_table
from vitrail.evaluation.metrics.report import ClassificationReport, report
from vitrail.evaluation.predictions import Predictions


def shown(table: RenderableType) -> list[list[str]]:
    """Return the words of each line of a table."""
    file = io.StringIO()
    Console(file=file, width=200).print(table)
    return [line.split() for line in file.getvalue().splitlines() if line.strip()]


def predictions(labels: list[int], likeliest: list[int], classes: int) -> Predictions:
    logits = np.eye(classes, dtype=np.float32)[likeliest]
    names = tuple(f"c{number}" for number in range(classes))
    keys = tuple(map(str, range(len(labels))))
    return Predictions(
        logits, single_labels(np.array(labels, np.int64), len(names)), keys, np.arange(len(labels)), names
    )


def of(labels: list[int], likeliest: list[int], classes: int) -> ClassificationReport:
    return report(predictions(labels, likeliest, classes), bootstrap=0)


def test_figures_have_a_row_each_and_counts_come_last() -> None:
    rows = {
        "validation": {"images": 5.0, "accuracy": 0.5, "accuracy_low": 0.25, "accuracy_high": 0.75},
        "test": {"images": 1234.0, "accuracy": 0.125, "fewshot_10": 0.5, "fewshot_10_deviation": 0.01, "knn_7": 1.0,
                 "knn_7_mean_average_precision": 0.5, "cross_entropy": 1.5},
    }  # fmt: skip
    head, _, *lines = shown(metrics_table(rows))
    assert head == ["validation", "test"] and lines == [
        ["accuracy", "50.00%", "(25.00%", "to", "75.00%)", "12.50%"],
        ["fewshot,", "10", "shots", "50.00%", "±", "1.00%"],
        ["knn,", "k", "=", "7", "100.00%"],
        ["knn,", "k", "=", "7,", "mean", "average", "precision", "50.00%"],
        ["cross-entropy,", "nats", "1.5000"],
        ["images", "5", "1,234"],
    ]


def test_of_several_labels_accuracy_is_called_what_it_is() -> None:
    lines = shown(metrics_table({"test": {"accuracy": 0.5, "exact_match": 0.25, "micro_f1": 0.75}}))
    assert [" ".join(line) for line in lines[2:]] == [
        "likeliest class is a label 50.00%", "all labels right 25.00%", "F1 over all answers 75.00%",
    ]  # fmt: skip
    targets = np.array([[1, 1], [0, 1]], np.uint8)
    several = replace(predictions([0, 1], [0, 1], 2), truth=multi_labels(targets), scores="sigmoid")
    heads = " ".join(shown(per_class_table("test", report(several, bootstrap=0)))[0])
    assert "recall precision F1 average precision" in heads and "accuracy" not in heads


def test_the_least_accurate_class_comes_first() -> None:
    lines = shown(per_class_table("test", of([0, 0, 1, 1, 2], [0, 1, 1, 1, 0], 3)))
    assert [line[0] for line in lines[2:]] == ["c2", "c0", "c1"] and lines[2][:4] == ["c2", "1", "0", "0.00%"]


def test_of_a_large_one_the_most_confused_pairs_are_shown() -> None:
    labels = [number for number in range(30) for _ in range(4)]
    likeliest = [label if copy else (label + 1) % 30 for label in range(30) for copy in range(4)]
    likeliest[5] = 9  # of class 1, except the class that is confused with 2
    likeliest[6] = 9
    lines = shown(confusion_table("test", of(labels, likeliest, 30), tuple(f"c{n}" for n in range(30))))
    assert lines[2] == ["c1", "c9", "2", "50.00%"]
    assert lines[3] == ["c0", "c1", "1", "25.00%"]
    assert len(lines) == 23 and " ".join(lines[-1]) == "and 11 pairs that are confused no more often than these"
