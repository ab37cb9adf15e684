"""Tests of the process that trains a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrail.experiments.accuracy import AccuracyCell, Curve, measure_recipe, optimizer_flops
from vitrail.models.variants import build
from vitrail.recipes import RECIPES
from vitrail.training.build import make_network, make_state
from vitrail.training.config import TrainConfig
from vitrail.training.job import prepare, use_patch_dropout
from vitrail.training.loop import train_step


def tiny(**changes: Any) -> TrainConfig:
    return RECIPES["demo"]().override(
        data="fractals:3:12", validation_share=0.25, width=16, depth=1, heads=2, mlp_width=24, batch_size=8,
        image_size=(8, 16), steps=12, precision="float32", **changes,
    )  # fmt: skip


def cell(config: TrainConfig, budget: float | None = None) -> AccuracyCell:
    return AccuracyCell(
        entry="demo", seed=3, settings=config.to_plain(), budget=budget, evaluations=3, device="cpu"
    )  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return measure_recipe(tmp_path_factory.mktemp("cell"), cell(tiny()))


def test_a_curve_has_a_point_for_each_evaluation(measured: Curve) -> None:
    assert [point.step for point in measured.points] == [4, 8, 12]
    for name in ("seconds", "cpu_seconds", "flops"):
        values = [getattr(point, name) for point in measured.points]
        assert values == sorted(values) and values[0] > 0
    assert all(0 <= point.accuracy <= 1 for point in measured.points)
    assert (measured.steps, measured.own_steps, measured.batch_size) == (12, 12, 8)
    assert measured.epochs == 12 * 8 / 36 and measured.test_accuracy is None and measured.precision == "float32"


def test_operations_are_those_of_the_closed_form(measured: Curve) -> None:
    config = tiny().model.resolve(num_classes=3, image_size=(8, 16), channels=1)
    assert measured.points[1].flops == 8 * 8 * config.training_flops()


@pytest.mark.slow
def test_operations_of_cheaper_early_steps_are_counted(tmp_path: Path) -> None:
    config = tiny(
        early_image_size=("8:0.25",), early_patch_dropout=("0.5:0.5",), early_batch_size=("5:0.75",),
        patch_size=(4, 4), optimizer="muon", seed=3,
    )  # fmt: skip
    job = prepare(config.override(run=str(tmp_path / "counted")))
    network, _, _ = make_network(job, None)
    state, counts = make_state(job, network), list[int]()
    while not job.is_over(state):
        use_patch_dropout(state.objective, job.phase_of(state.step).patch_dropout)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            train_step(job, state, next(state.batches))
        counts.append(counter.get_total_flops())
        state.step += 1
    state.batches.close()
    result = measure_recipe(tmp_path, cell(config))
    assert [point.flops for point in result.points] == [sum(counts[: point.step]) for point in result.points]
    assert len(set(counts)) == 4 and result.epochs == (9 * 5 + 3 * 8) / 36


def test_the_products_of_the_optimizer_count() -> None:
    config = tiny().override(optimizer="muon")
    network = build(config.model.resolve(num_classes=3, image_size=(8, 16), channels=1))
    assert optimizer_flops(network, tiny()) == 0
    # A step of the iteration for a matrix of m rows and n >= m columns: m m n, m m m and m m n multiply-accumulates.
    square, wide = 2 * 3 * 16**3, 2 * (2 * 16 * 16 * 24 + 16**3)
    assert optimizer_flops(network, config) == 5 * (4 * square + 2 * wide)


def test_a_run_that_takes_longer_than_the_budget_is_shortened(tmp_path: Path) -> None:
    result = measure_recipe(tmp_path, cell(tiny().override(steps=10_000), budget=0.3))
    assert result.own_steps == 10_000 and 1 <= result.steps < 2_000
    assert result.points[-1].step == result.steps


@pytest.mark.slow
def test_a_run_that_fits_keeps_its_length(tmp_path: Path) -> None:
    result = measure_recipe(tmp_path, cell(tiny(), budget=1000.0))
    assert (result.steps, result.own_steps) == (12, 12)


@pytest.mark.slow
def test_the_model_of_a_cell_is_that_of_its_seed(measured: Curve, tmp_path: Path) -> None:
    again = measure_recipe(tmp_path, cell(tiny()))
    assert [point.accuracy for point in again.points] == [point.accuracy for point in measured.points]
    assert again.parameters == measured.parameters
