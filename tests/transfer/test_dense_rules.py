"""The rule for boxes and masks: image sizes from the objects, epochs from the time, and refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vitrail
from tests.make import make_bundle, make_colour_folder, make_masks_folder, make_voc_folder
from vitrail.cli import main
from vitrail.data.source import typical_size
from vitrail.data.sources import open_data
from vitrail.tasks.segmentation import Segmentation
from vitrail.training.config import TrainConfig
from vitrail.transfer.dense_rules import PATCHES_OF_OBJECT, Times, choose_size, sizes_for, smallest_side
from vitrail.transfer.finetune import Method, plan


def test_small_objects_need_large_images(tmp_path: Path) -> None:
    train = open_data(str(make_voc_folder(tmp_path / "voc")), validation_share=0.2).train
    shape, network = typical_size(train, 64), make_bundle(patch_size=(8, 8), image_size=(32, 32)).network.config
    assert shape == pytest.approx((45, 57), abs=3)
    side = smallest_side(train, shape)
    assert side is not None and 12 < side < 22
    sizes = sizes_for(network, shape, train)
    areas = [height * width for height, width in sizes]
    assert areas == sorted(areas, reverse=True)
    scale = (areas[0] / (shape[0] * shape[1])) ** 0.5
    assert scale * side <= 1.15 * PATCHES_OF_OBJECT * 8 or len(sizes) == 1
    masks = open_data(str(make_masks_folder(tmp_path / "masks")), validation_share=0.2).train
    assert smallest_side(masks, shape) is None


def test_epochs_fit_into_the_time() -> None:
    times = Times((16, 16), forward=0.3, in_float32=0.6, head=0.1, images=50, versions=2)
    for epochs in (0.5, 2.0, 9.0):
        assert times.epochs_of_head(times.of_head(epochs)) == pytest.approx(epochs)
    assert times._replace(versions=float("inf")).epochs_of_head(40.0) == pytest.approx(2)


@pytest.mark.parametrize(
    ("seconds", "enough", "least", "enters", "wanted"),
    [
        (82.0, 2.0, 1.0, False, (40, False)),
        (83.0, 2.0, 1.0, False, (40, True)),  # 2 epochs of all blocks take 72 seconds, and the answers 10.5
        (50.0, 2.0, 0.5, False, (30, True)),
        (50.0, 2.0, 0.6, False, (40, False)),  # 8 epochs of the head take 28 seconds
        (30.0, 2.0, 0.5, False, (30, False)),  # all blocks can only be trained with less than half of the pixels
        (5.0, 2.0, 0.5, False, (20, False)),
        (170.0, math.inf, 1.0, True, (30, False)),  # 8 epochs of all blocks
    ],
)
def test_all_blocks_are_trained_with_images_that_are_not_much_smaller(
    seconds: float, enough: float, least: float, *, enters: bool, wanted: tuple[int, bool]
) -> None:
    expected = [
        Times((side, side), side**2 / 1600, side**2 / 960, head=side**2 / 16000, images=10, versions=2)
        for side in (40, 30, 20)
    ]
    times, suffices = choose_size(expected, seconds, 5, enters=enters, enough=enough, least=least)
    assert (times.image_size[0], suffices) == wanted


@pytest.mark.slow
def test_what_does_not_fit_the_targets_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_voc_folder(tmp_path / "voc")
    make_colour_folder(tmp_path / "colours")
    for data, words, message in (
        ("voc", ("--task", "classification"), "choose the task detection"),
        ("voc", ("--protocol", "paper"), "'paper' is made for classes"),
        ("voc", ("--head-kind", "queries", "--budget", "1s"), "needs the outline of each object"),
        ("colours", ("--task", "detection"), "has no boxes of objects"),
    ):
        assert main(["finetune", "small", "--data", str(tmp_path / data), "--run", str(tmp_path / "run"), *words]) == 2
        found = capsys.readouterr()
        assert message in " ".join((found.out + found.err).split()) and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "metric"), [(make_voc_folder, "average_precision_50"), (make_masks_folder, "mean_iou")]
)
def test_one_command_learns_drawn_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Path], metric: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "drawn", train=24, validation=6, test=6)
    assert main(["finetune", "small", "--data", "drawn", "--budget", "25s", "--run", "run"]) == 0
    assert (tmp_path / "run/report.html").is_file() and list((tmp_path / "run/examples").glob("*.png"))
    assert vitrail.load("run").metrics[f"test_{metric}"] > 0.4
    if metric == "average_precision_50":
        assert main(["predict", "run", "drawn/JPEGImages", "--coco", "found.json"]) == 0
        rows = json.loads((tmp_path / "found.json").read_text())
        assert {row["category_name"] for row in rows} <= {"blue", "red box"} and len(rows) > 20


Planned = Callable[..., TrainConfig]


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    """Returns the config that is chosen for a small model and masks of drawn objects."""
    base = TrainConfig().override(data=str(make_masks_folder(tmp_path / "masks")), init="small", device="cpu")

    def make(budget: str | None = None, **explicit: Any) -> TrainConfig:
        return plan(
            vitrail.load("small"), base.data.open_whole(), base, Method(explicit=explicit, budget=budget)
        ).config

    return make


@pytest.mark.parametrize(
    ("explicit", "weight"),
    [({}, 3.0), ({"dice_weight": 0.5}, 0.5), ({"head_kind": "queries", "queries": 8, "query_blocks": 2}, 0.0)],
)
def test_masks_are_learned_with_the_dice_loss_unless_the_head_has_its_own(
    planned: Planned, explicit: dict[str, Any], weight: float
) -> None:
    task = planned(steps=1, **explicit).task
    assert isinstance(task, Segmentation) and task.dice_weight == weight


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "evaluations", "keep"), [("0.2s", 0, "last"), ("10m", 4, "best")])
def test_a_run_whose_time_suffices_for_one_evaluation_measures_the_finished_model_only(
    planned: Planned, budget: str, evaluations: int, keep: str
) -> None:
    run = planned(budget, train_blocks=0).run
    assert (run.evaluations, run.keep) == (evaluations, keep)


@pytest.mark.slow
@pytest.mark.parametrize(("explicit", "rate"), [({}, 3e-3), ({"learning_rate": 1e-5}, 1e-5)])
def test_blocks_learn_more_slowly_than_the_head_at_any_rate(
    planned: Planned, explicit: dict[str, float], rate: float
) -> None:
    optimizer = planned(steps=1, train_blocks=1, **explicit).optimizer
    assert optimizer.learning_rate == rate and optimizer.learning_rate_factors[1] == ".*=0.03333"
