"""Tests of what all tasks share: the selecting metric, texts of metrics, and the frequency of each sample."""

from __future__ import annotations

import pytest

from tests.tasks.images import Labels
from vitrail.data.source import mixed
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.tasks.classification import Classification
from vitrail.tasks.task import drawn_samples

ONE, SEVERAL = Splits(Labels(0, 2, 1), None, None), Splits(Labels((0, 1), (), (2,)), None, None)


def test_the_metric_that_chooses_follows_the_labels_unless_it_is_given() -> None:
    for splits, select, name in (
        (ONE, None, "accuracy"), (ONE, "cross_entropy", "cross_entropy"), (SEVERAL, None, "mean_average_precision"),
        (SEVERAL, "accuracy", "accuracy"),
    ):  # fmt: skip
        metric = Classification(select=select, loss="sigmoid").selection(splits)
        assert (metric.name, metric.higher_is_better) == (name, name != "cross_entropy")


def test_data_that_the_task_cannot_learn_is_refused() -> None:
    with pytest.raises(ConfigError, match="select='mean_average_precision' needs images with several labels"):
        Classification(select="mean_average_precision").check_data(ONE)
    with pytest.raises(ConfigError, match="has images with several labels, which loss='softmax' cannot learn"):
        Classification().check_data(SEVERAL)


def test_a_summary_has_the_metrics_that_describe_the_model() -> None:
    result = {"accuracy": 0.5, "cross_entropy": 2.0, "images": 4.0, "skipped": 0.0}
    assert Classification().summary(result) == {"accuracy": 0.5}
    assert Classification().summary({**result, "images": 0.0}) == {}


def test_samples_of_a_mixture_are_drawn_by_its_fractions() -> None:
    few, many = Labels(0, 1), Labels(0, 1, 2, 2)
    assert dict(drawn_samples(few)) == {0: 0.5, 1: 0.5}
    assert dict(drawn_samples(mixed([few, many], [0.2, 0.8]))) == {0: 0.1, 1: 0.1, 2: 0.2, 3: 0.2, 4: 0.2, 5: 0.2}
