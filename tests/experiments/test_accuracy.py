"""Tests of comparisons of accuracy over time: the process that trains a recipe, the images for other libraries, the
costs of reaching an accuracy, and the script that runs timm's training loop. timm itself is not among the packages of
the other tests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.make import MemorySource, encode
from vitrail.bench.peers import benchmark_script
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.experiments.accuracy import (
    AccuracyCell,
    AccuracyComparison,
    Curve,
    CurvePoint,
    check_environments,
    first_at,
    measure_recipe,
    optimizer_flops,
    reached,
    write_images,
)
from vitrail.models.variants import build
from vitrail.recipes import RECIPES
from vitrail.training.config import TrainConfig
from vitrail.training.job import prepare, use_patch_dropout
from vitrail.training.loop import train_step
from vitrail.training.state import make_network, make_state


def tiny(**changes: Any) -> TrainConfig:
    return RECIPES["demo"]().override(
        **{
            "data": "fractals:3:12", "validation_share": 0.25, "variant": "Conv+ViT-Pico/8", "width": 16, "depth": 1,
            "heads": 2, "mlp_width": 24, "batch_size": 8, "image_size": (8, 16), "steps": 12, "precision": "float32",
            "optimizer": "adamw", "learning_rate": 1e-3, **changes,
        }
    )  # fmt: skip


def cell(config: TrainConfig, budget: float | None = None) -> AccuracyCell:
    return AccuracyCell(
        entry="demo", seed=3, settings=config.to_plain(), budget=budget, evaluations=3, device="cpu"
    )  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return measure_recipe(tmp_path_factory.mktemp("cell"), cell(tiny()))


@pytest.mark.slow
def test_a_curve_has_a_point_for_each_evaluation(measured: Curve) -> None:
    assert [point.step for point in measured.points] == [4, 8, 12]
    for name in ("seconds", "cpu_seconds", "flops"):
        values = [getattr(point, name) for point in measured.points]
        assert values == sorted(values) and values[0] > 0
    assert all(0 <= point.accuracy <= 1 for point in measured.points)
    assert (measured.steps, measured.own_steps, measured.batch_size) == (12, 12, 8)
    assert measured.epochs == 12 * 8 / 36 and measured.test_accuracy is None and measured.precision == "float32"


@pytest.mark.slow
def test_operations_of_cheaper_early_steps_are_counted(tmp_path: Path) -> None:
    config = tiny(
        early_image_size=("8:0.25",), early_patch_dropout=("0.5:0.5",), early_batch_size=("5:0.75",),
        patch_size=(4, 4), optimizer="muon", seed=3,
    )  # fmt: skip
    job = prepare(config.override(run=str(tmp_path / "counted")))
    network, _, _ = make_network(job, None)
    state, counts = make_state(job, network), list[int]()
    while not state.is_over(job):
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


@pytest.mark.slow
def test_a_run_that_takes_longer_than_the_budget_is_shortened(tmp_path: Path) -> None:
    result = measure_recipe(tmp_path, cell(tiny().override(steps=10_000), budget=0.3))
    assert result.own_steps == 10_000 and 1 <= result.steps < 2_000
    assert result.points[-1].step == result.steps


def pixels(seed: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (5, 7, channels), dtype=np.uint8)


def splits() -> Splits:
    images = encode(pixels(0), "JPEG"), encode(pixels(1), "BMP"), pixels(2, 1)
    train = MemorySource(images, labels=(2, 0, 0), classes=("b", "a", "c"))
    return Splits(train, MemorySource((pixels(3),), labels=(1,), classes=("b", "a", "c")), None)


def test_every_image_is_a_file_in_the_folder_of_its_class(tmp_path: Path) -> None:
    data = splits()
    write_images(data, tmp_path / "images")
    files = sorted(path.relative_to(tmp_path / "images").as_posix() for path in tmp_path.rglob("*.*g"))
    assert files == [
        "train/00000/0000001.png", "train/00000/0000002.png", "train/00002/0000000.jpg", "validation/00001/0000000.png",
    ]  # fmt: skip
    assert (tmp_path / "images/train/00001").is_dir()  # a class without an image in this split keeps its index
    assert (tmp_path / "images" / files[2]).read_bytes() == data.train[0].image  # JPEG and PNG are not encoded again
    for name, expected in ((files[0], pixels(1)), (files[1], pixels(2, 1)[:, :, 0]), (files[3], pixels(3))):
        assert np.array_equal(np.asarray(Image.open(tmp_path / "images" / name)), expected)


def test_images_are_written_once(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    write_images(splits(), folder)
    kept = folder / "train/00000/0000001.png"
    kept.write_bytes(b"untouched")
    write_images(splits(), folder)
    assert kept.read_bytes() == b"untouched"
    write_images(Splits(MemorySource((pixels(4),), labels=(1,), keys=("new",)), None, None), folder)
    assert [path.name for path in folder.rglob("*.png")] == ["0000000.png"]


def result(*points: tuple[float, float], test: float | None = None) -> Curve:
    """A cell with points of (seconds, accuracy). A second costs 10 FLOPs and two seconds of the cores."""
    return Curve(
        points=tuple(
            CurvePoint(
                step=step, seconds=float(seconds), cpu_seconds=2.0 * seconds, flops=10.0 * seconds, accuracy=accuracy
            )
            for step, (seconds, accuracy) in enumerate(points)
        ),
        validation_accuracy=points[-1][1], test_accuracy=test, steps=3, own_steps=4, epochs=1.5, batch_size=8,
        parameters=100, precision="bf16", threads=2, versions={},
    )  # fmt: skip


CURVES = {
    "ours": {0: result((1, 0.5), (2, 0.8), (3, 0.7)), 1: result((2, 0.6), (4, 0.8), (5, 0.9))},
    "theirs": {0: result((4, 0.4), (8, 0.8)), 1: result((4, 0.79), (8, 0.7))},
}


def test_the_first_evaluation_that_reaches_a_target_within_the_budget_counts() -> None:
    points = CURVES["ours"][0].points
    assert first_at(points, 0.8, None) == points[1] == first_at(points, 0.8, 2.0)
    assert first_at(points, 0.5, None) == points[0] and first_at(points, 0.81, None) is None
    assert first_at(points, 0.8, 1.9) is None


def ends(row: dict[str, Any], name: str) -> tuple[Any, ...]:
    return tuple(row[f"{name}_{end}"] for end in ("low", "median", "high"))


def test_costs_and_ratios_over_seeds() -> None:
    ours, theirs = reached(CURVES, [0.8], None)
    assert (ours["entry"], ours["reached"], ours["seeds"]) == ("ours", 2, 2)
    assert ends(ours, "seconds") == (2, 3, 4) and ours["cpu_seconds_high"] == 8 and ours["flops_low"] == 20
    assert ours["seconds_ratio_median"] == 1 and not ours["seconds_ratio_is_bound"]
    # seed 0: 8 s against 2 s; seed 1 is never reached: its whole run of 8 s against 4 s
    assert theirs["reached"] == 1 and theirs["seconds_low"] == 8 and theirs["seconds_high"] is None
    assert ends(theirs, "flops_ratio") == (2, 3, 4) and theirs["flops_ratio_is_bound"]


def test_a_ratio_is_a_lower_bound_if_a_run_exceeds_the_budget() -> None:
    curves = {"ours": {0: result((2, 0.8))}, "theirs": {0: result((3, 0.7), (5, 0.8), (6, 0.9))}}
    _, theirs = reached(curves, [0.8], 4.0)
    assert theirs["reached"] == 0 and theirs["seconds_median"] is None
    assert theirs["seconds_ratio_median"] == 5 / 2 and theirs["seconds_ratio_is_bound"]


def test_no_ratio_to_an_entry_that_does_not_reach_the_target() -> None:
    ours, theirs = reached(CURVES, [0.9], None)
    assert ours["reached"] == 1 and theirs["flops_low"] is None
    assert ends(ours, "flops_ratio") == ends(theirs, "flops_ratio") == (None, None, None)
    assert theirs["flops_ratio_is_bound"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environments", "message"),
    [
        ({"timm": str(shutil.which("false"))}, "--against timm: it printed nothing"),
        ({"tim": sys.executable}, "environment: unknown library 'tim'; nearest: timm"),
    ],
)
def test_an_environment_without_the_library_is_named(environments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_environments(("timm-small",), environments)


@pytest.mark.slow
def test_the_script_imports_nothing_of_vitrail() -> None:
    script = str(benchmark_script("timm_training.py"))
    code = f"import runpy, sys; runpy.run_path({script!r}); sys.exit('vitrail' in sys.modules)"
    assert subprocess.run([sys.executable, "-I", "-c", code]).returncode == 0


@pytest.mark.slow
@pytest.mark.network
def test_timm_trains_on_the_same_images(tmp_path: Path) -> None:
    """Installs timm and torchvision into an environment of their own, beside the torch of the tests."""
    home = tmp_path / "timm"
    venv.create(home, symlinks=True)
    python = home / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*install, "timm==1.0.31", "torchvision==0.29.2"], check=True)
    packages = sysconfig.get_path("purelib")
    (next(home.glob("lib/python*/site-packages")) / "base.pth").write_text(f"{packages}\n")
    peers = check_environments(("timm-small",), {"timm": str(python)})
    demo = RECIPES["demo"]().override(data="fractals:3:24", validation_share=0.25, image_size=(32, 32))
    comparison = AccuracyComparison(
        recipes={"demo": demo.override(steps=4)}, peers=peers, seeds=(1,), budget=2.0,
        evaluations=2, device=torch.device("cpu"),
    )  # fmt: skip
    curves = comparison.measure(tmp_path / "out")
    result = curves["timm-small"][1]
    assert result.steps < result.own_steps and [point.step for point in result.points][-1] == result.steps
    # a ViT of width 192 and 9 blocks with 65 tokens, and its products counted by hand: per token and block
    # 4 x 192^2 + 2 x 192 x 384 in dense layers and 2 x 65 x 192 in attention; the patches, and the head once
    macs = 9 * 65 * (4 * 192**2 + 2 * 192 * 384 + 2 * 65 * 192) + 64 * 192 * 48 + 192 * 3
    flops = result.points[-1].flops / result.steps / result.batch_size
    assert flops == pytest.approx(6 * macs - 2 * 64 * 192 * 48, rel=1e-6)  # the images have no gradient
    assert json.loads((tmp_path / "out/images/images.json").read_text())["classes"][0] == "fractal-0000"
