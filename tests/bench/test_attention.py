"""Tests of the comparison of kinds of attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.conftest import MakeWork
from vitrail.bench import growth as attention
from vitrail.bench.growth import attention_workloads
from vitrail.errors import ConfigError

KINDS = ("local:window=2", "axial:sum=on")


def test_grids_go_from_196_to_4096_patches(tiny_work: MakeWork) -> None:
    found = attention_workloads(tiny_work(), ["linformer"])
    assert [works["linformer"].config.tokens for works in found.values()] == [side**2 + 1 for side in (14, 28, 48, 64)]
    assert list(found) == [14, 28, 48, 64]
    with pytest.raises(ConfigError, match="--attention: BiT-Pico is a ResNet, which has no attention"):
        attention_workloads(tiny_work("BiT-Pico", image_size=(32, 32)), ["local"])
    with pytest.raises(ConfigError, match="window=15 is larger than the grid of 14 x 14 patches"):
        attention_workloads(tiny_work(), ["local:window=15"])


@pytest.mark.slow
def test_a_kind_is_cheaper_from_the_first_grid_with_fewer_flops(tiny_work: MakeWork) -> None:
    config = tiny_work(pool="gap", class_token=False).config
    found = attention.cheaper_from(config, "linformer:rows=8")
    side = round(found**0.5)
    for patches, is_cheaper in ((side, True), (side - 1, False)):
        one = replace(config, image_size=(7 * patches, 7 * patches), attention="linformer:rows=8")  # type: ignore[arg-type]
        assert (one.training_flops() < replace(one, attention="full").training_flops()) == is_cheaper
    assert attention.cheaper_from(config, "linformer:rows=100000") is None


def test_a_kind_is_faster_from_where_it_stays_faster() -> None:
    times = {"full": (2.0, 2.0, 2.0, 2.0), "axial": (1.0, 3.0, 1.0, 1.0), "lsh": (9.0, 9.0, 9.0, 9.0)}
    points = [
        {"attention": name, "patches": side * side, "median": medians[number]}
        for number, side in enumerate(attention.SIDES)
        for name, medians in times.items()
    ]
    assert attention.faster_from(points, "axial") == 48 * 48
    assert attention.faster_from(points, "lsh") is None
