"""Tests of the cost of studies."""

from __future__ import annotations

import pytest
import torch

from vitrail.errors import ConfigError
from vitrail.studies.engine import CellCost, DataSize, StudyCost, check_jobs, cost_of, default_jobs, forecast, sizes_for
from vitrail.studies.study import Point, Settings, Stage, finetuning_config, point, small_config
from vitrail.training.job import phases_of, run_flops

CPU = torch.device("cpu")
CONFIG = small_config(Settings(scale="quick"), images=100, epochs=3.0)


def test_flops_are_those_of_the_runs() -> None:
    points = [point("a", CONFIG, (1e-3, 2e-3)), point("b", CONFIG.override(depth=2), (1e-3, 2e-3))]
    sizes = sizes_for(points, Settings())
    assert sizes == {"bundled[:100]": DataSize(100, 10)}
    cost = cost_of(points, (0, 1, 2), sizes)
    assert (cost.trials, cost.cells, len(cost.costs)) == (4, 6, 10)
    expected = 0
    for config in (CONFIG, CONFIG.override(depth=2)):
        network = config.model.resolve(num_classes=10, image_size=(28, 28), channels=1)
        expected += 5 * run_flops(phases_of(config, network, 5), network, config.task)  # ceil(3 x 100 / 64) steps
    assert cost.flops == expected
    assert cost.bytes == max(one.bytes for one in cost.costs)


def test_stages_count_once_if_points_share_them() -> None:
    later = CONFIG.override(variant=None, data="bundled[:50]", **dict.fromkeys(CONFIG.model.overrides))
    points = [
        Point(
            arm="a", label=f"{rate}", stages=(Stage(config=CONFIG, rates=(1e-3,)), Stage(config=later, rates=(rate,)))
        )
        for rate in (1e-4, 1e-5)
    ]
    cost = cost_of(points, (0,), sizes_for(points, Settings()))
    assert (cost.trials, cost.cells) == (0, 3)


def test_frozen_blocks_cost_a_forward_pass_alone() -> None:
    later = finetuning_config(Settings(scale="quick"), images=100, steps=5, train_blocks=0)
    points = [Point(arm="a", stages=(Stage(config=CONFIG, rates=(1e-3,)), Stage(config=later, rates=(1e-3,))))]
    whole, frozen = cost_of(points, (0,), sizes_for(points, Settings())).costs
    network = whole.network
    assert frozen.network == network and frozen.flops < 0.4 * whole.flops
    assert frozen.flops == run_flops(phases_of(later, network, 5), network, later.task, 0)


def test_sizes_of_data() -> None:
    specs = ("bundled", "bundled[:72]", "fractals:30:50", "jft-300m")
    points = [point(spec, CONFIG.override(data=spec), (1e-3,)) for spec in specs]
    assert sizes_for(points, Settings(images=7200)) == {
        "bundled": DataSize(7200, 10), "bundled[:72]": DataSize(72, 10), "fractals:30:50": DataSize(1500, 30),
        "jft-300m": DataSize(303_000_000, 18_000),
    }  # fmt: skip


def of(bytes_: int) -> StudyCost:
    network = CONFIG.model.resolve(num_classes=10, image_size=(28, 28), channels=1)
    return StudyCost(0, 1, [CellCost(network, 64, 1e9, bytes_)])


def test_jobs_beyond_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.studies.engine.available_memory", lambda device: 5_500_000_000)
    check_jobs(2, of(2_000_000_000), CPU)
    for jobs, needed, message in ((3, 2, r"jobs=3: .* 2.0 GB .* so 2 jobs fit"), (2, 4, "jobs=2: .* so 1 job fits")):
        with pytest.raises(ConfigError, match=message):
            check_jobs(jobs, of(needed * 1_000_000_000), CPU)
    assert default_jobs(of(2_000_000_000), 8, CPU) == 2 and default_jobs(of(100), 8, CPU) == 8
    assert default_jobs(of(9_000_000_000), 8, CPU) == 1 and default_jobs(of(100), 8, torch.device("cuda")) == 1
    check_jobs(99, of(2_000_000_000), torch.device("cuda"))


def test_the_forecast_divides_by_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.studies.engine._flops_per_second", lambda network, batch, device: 1e9)
    cost = StudyCost(0, 4, of(1).costs * 4)
    assert forecast(cost, jobs=1, threads=1, device=CPU) == 4 * 7.0
    assert forecast(cost, jobs=2, threads=1, device=CPU) == 2 * 7.0
    assert forecast(cost, jobs=9, threads=1, device=CPU) == 7.0  # one cell is not divided
