"""Tests of sweeps, growth exponents, kinds of attention and layers that mix tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.bench.conftest import MakeWork
from vitrail.bench.growth import (
    SIDES,
    attention_workloads,
    cheaper_from,
    exponent,
    faster_from,
    layer_times,
    mixings,
    scaling,
    sweep,
)
from vitrail.errors import ConfigError
from vitrail.models.attention import ATTENTION
from vitrail.models.cost import attention_costs, layer_costs, of_pixels
from vitrail.models.vit_config import ViTConfig


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0, -1.5])
def test_power_laws_are_found_exactly(power: float) -> None:
    xs = [1, 2, 5, 12]
    assert exponent(xs, [3.7 * x**power for x in xs]) == pytest.approx(power)


def test_values_of_a_sweep(tiny_work: MakeWork) -> None:
    work = tiny_work(batch=48, width=96, heads=3, mlp_width=384, depth=6)
    assert list(sweep(work, "batch")) == [3, 6, 12, 24, 48]
    widths = sweep(work, "width")
    assert list(widths) == [24, 48, 72, 96]
    for width, point in widths.items():
        assert isinstance(point.config, ViTConfig)
        assert point.config.mlp_width == 4 * width and point.config.width % point.config.heads == 0
    sizes = [point.config.image_size for point in sweep(work, "tokens").values()]
    assert (28, 21) in sizes and all(height % 7 == width % 7 == 0 for height, width in sizes)


def test_a_resnet_grows_in_tokens_alone(tiny_work: MakeWork) -> None:
    resnet = tiny_work("BiT-R26x1", image_size=(128, 64))
    assert len(sweep(resnet, "tokens")) >= 3
    with pytest.raises(ConfigError, match="--scaling width needs a transformer; for BiT-R26x1, choose batch or tokens"):
        sweep(resnet, "width")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.slow
def test_time_and_memory_of_every_point(tiny_work: MakeWork) -> None:
    result = scaling(tiny_work(batch=4), "batch", repetitions=2, warmup=0)
    assert [point["value"] for point in result["points"]] == [1, 2, 4]
    assert all(len(point["seconds"]) == 2 and point["memory_bytes"] >= 0 for point in result["points"])
    exponents = result["exponents"]
    assert exponents["flops"] == pytest.approx(1) and exponents["activation_bytes"] == pytest.approx(1)
    weights_stay = exponents["predicted_bytes"]
    assert weights_stay is not None and 0 < weights_stay < 1
    infer = scaling(tiny_work(task="infer"), "batch", repetitions=1, warmup=0)["exponents"]
    assert infer["predicted_bytes"] is None and infer["flops"] == pytest.approx(1)


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
    found = cheaper_from(config, "linformer:rows=8")
    side = round(found**0.5)
    for patches, is_cheaper in ((side, True), (side - 1, False)):
        one = replace(config, image_size=(7 * patches, 7 * patches), attention="linformer:rows=8")  # type: ignore[arg-type]
        assert (one.training_flops() < replace(one, attention="full").training_flops()) == is_cheaper
    assert cheaper_from(config, "linformer:rows=100000") is None


def test_a_kind_is_faster_from_where_it_stays_faster() -> None:
    times = {"full": (2.0, 2.0, 2.0, 2.0), "axial": (1.0, 3.0, 1.0, 1.0), "lsh": (9.0, 9.0, 9.0, 9.0)}
    points = [
        {"attention": name, "patches": side * side, "median": medians[number]}
        for number, side in enumerate(SIDES)
        for name, medians in times.items()
    ]
    assert faster_from(points, "axial") == 48 * 48
    assert faster_from(points, "lsh") is None


KINDS = tuple(name for name in (*ATTENTION, "axial:sum=on") if name != "full")
CONFIG = ViTConfig(image_size=(16, 18), patch_size=(2, 2), width=16, heads=2, depth=3)
"""A network with a grid of 8 x 9 patches."""


@pytest.mark.slow
def test_what_is_measured_is_what_the_closed_forms_count() -> None:
    expected = {cost.kind: cost.macs for cost in (*layer_costs(73, 16), *attention_costs(CONFIG, KINDS))}
    expected |= {of_pixels(cost.kind): cost.macs for cost in layer_costs(16 * 18, 16)}
    found = mixings(CONFIG, KINDS, most_macs=500_000)
    assert set(found) == set(expected)
    for name, mixing in found.items():
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            mixing.run()
        assert counter.get_total_flops() * mixing.tokens == 2 * expected[name] * mixing.computed, name
    parts = [name for name, mixing in found.items() if mixing.computed < mixing.tokens]
    assert parts == ["self-attention of pixels"]


def test_times_are_scaled_to_all_tokens() -> None:
    times = layer_times(CONFIG, ("axial", "local:window=9"), repetitions=2, warmup=0)
    assert "axial" in times and "local:window=9" not in times, "a window of 9 does not fit 8 x 9 patches"
    assert all(time.seconds > 0 for time in times.values())
    assert times["recurrence of pixels"].computed == 16 * 18
