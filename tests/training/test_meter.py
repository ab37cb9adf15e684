"""Tests of means over steps, which are read once, and of the first step with a number that is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from vitrail.errors import NonFiniteLoss
from vitrail.training.after_step import Meter, RunningMeans


def test_means_since_the_last_reading() -> None:
    meter = Meter()
    for step, loss in enumerate((1.0, 2.0, 6.0), start=1):
        meter.add(step, {"loss": torch.tensor(loss), "accuracy": torch.tensor(loss / 10)})
    assert meter.read() == pytest.approx({"loss": 3.0, "accuracy": 0.3})
    meter.add(4, {"loss": torch.tensor(8.0), "accuracy": torch.tensor(0.5)})
    assert meter.read() == {"loss": 8.0, "accuracy": 0.5}


def test_nothing_added_reads_as_nothing() -> None:
    meter = Meter()
    assert meter.read() == {}
    meter.add(1, {"loss": torch.tensor(1.0)})
    meter.read()
    assert meter.read() == {}


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_the_first_bad_step_is_named(value: float, shown: str) -> None:
    meter = Meter()
    for step in range(5, 12):
        norm = torch.tensor(value if step >= 8 else 1.0)
        meter.add(step, {"loss": torch.tensor(value if step >= 9 else 1.0), "gradient_norm": norm})
    with pytest.raises(NonFiniteLoss, match=f"^gradient_norm is {shown} at step 8$"):
        meter.read()


def test_it_keeps_no_graph_and_reads_the_device_once() -> None:
    meter = Meter()
    weight = torch.ones((), requires_grad=True)
    meter.add(1, {"loss": weight * 2})
    assert not any(row.requires_grad for row in meter._rows)
    assert meter.read() == {"loss": 2.0}


def test_running_means_weigh_reports_by_their_steps() -> None:
    means = RunningMeans()
    assert means.read() == {}
    means.add(3, {"loss": 1.0})
    means.add(1, {"loss": 3.0})
    assert means.read() == {"loss": 1.5} == means.read(), "the last means stay until there are new ones"
    means.add(2, {"loss": 0.5})
    assert means.read() == {"loss": 0.5}
