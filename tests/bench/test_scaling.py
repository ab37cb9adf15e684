"""Tests of sweeps and of growth exponents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.conftest import MakeWork
from vitrail.bench.growth import exponent, scaling, sweep
from vitrail.errors import ConfigError
from vitrail.models.vit_config import ViTConfig


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0, -1.5])
def test_power_laws_are_found_exactly(power: float) -> None:
    xs = [1, 2, 5, 12]
    assert exponent(xs, [3.7 * x**power for x in xs]) == pytest.approx(power)


def test_values_of_a_sweep(tiny_work: MakeWork) -> None:
    work = tiny_work(batch=48, width=96, heads=3, mlp_width=384, depth=6)
    assert list(sweep(work, "batch")) == [3, 6, 12, 24, 48]
    assert list(sweep(work, "depth")) == [2, 3, 4, 6] or list(sweep(work, "depth")) == [2, 4, 6]
    widths = sweep(work, "width")
    assert list(widths) == [24, 48, 72, 96]
    for width, point in widths.items():
        assert isinstance(point.config, ViTConfig)
        assert point.config.mlp_width == 4 * width and point.config.width % point.config.heads == 0
    sizes = [point.config.image_size for point in sweep(work, "tokens").values()]
    assert sizes == [(14, 14), (21, 14), (28, 21), (35, 28), (42, 35)] or len(set(sizes)) == len(sizes) >= 4
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
