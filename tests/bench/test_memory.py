"""Tests of the peak memory of a step and of the largest batch, which are measured in new processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.conftest import MakeWork
from vitrail.bench.memory import find_largest, largest_batch, measure_memory
from vitrail.bench.step import OURS, Entry
from vitrail.bench.workload import Format, Workload
from vitrail.errors import ConfigError
from vitrail.models.linear.float32 import has_onednn
from vitrail.models.variants import variant_config

MARGIN = 0.15
"""Tolerance. The formula is within 10 % of the measurement, and unused heap memory differs by up to 9 % between
runs."""

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
BIG = {"image_size": (224, 224), "width": 64}
"""Settings with which one image keeps some megabytes."""


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 7, 8, 31, 33, 100, 1000, 1023, 77_777, 2**20])
def test_the_largest_is_exact_where_it_is_small_and_close_where_it_is_not(largest: int) -> None:
    calls: list[int] = []

    def fits(batch: int) -> bool:
        calls.append(batch)
        return batch <= largest or largest == 2**20  # a search without an end stops there

    found = find_largest(fits)
    assert found == largest if largest < 100 or largest == 2**20 else 0.96 * largest <= found <= largest
    assert len(calls) < 30


@linux
@pytest.mark.slow
@pytest.mark.skipif(not has_onednn(torch.bfloat16), reason="bfloat16 in software takes half an hour")
def test_a_base_network_trains_within_six_gigabytes() -> None:
    work = Workload(name="ViT-B/16", config=variant_config("ViT-B/16"), batch=32, precision="bf16")
    measured = measure_memory(Entry(OURS), work)
    assert measured < 6e9 and measured == pytest.approx(work.predicted_bytes, rel=MARGIN)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(
    ("name", "batch", "fields"), [("ViT-S/32", 32, {}), ("ViT-S/16", 16, {"pool": "gap"}), ("BiT-R50x1", 8, {})]
)
def test_a_process_needs_what_the_closed_form_says(
    name: str, batch: int, fields: dict[str, Any], precision: Format
) -> None:
    work = Workload(name=name, config=variant_config(name, **fields), batch=batch, precision=precision)
    assert measure_memory(Entry(OURS), work) == pytest.approx(work.predicted_bytes, rel=MARGIN)


@pytest.mark.slow
@linux
def test_a_limit_on_the_process_limits_the_batch(tiny_work: MakeWork) -> None:
    work = tiny_work(**BIG)
    with pytest.raises(ConfigError, match=r"bytes is not above the [\d,]+ bytes that Python and torch use") as refused:
        largest_batch(work, 1_000_000)
    taken = int(str(refused.value).split("above the ")[1].split()[0].replace(",", ""))
    found = largest_batch(work, taken + 40_000_000)
    assert found["limit"] - found["left"] == pytest.approx(taken, rel=0.1)
    assert 1 <= found["batch"] <= 2 * found["predicted"] and 2 <= found["predicted"] <= 100
