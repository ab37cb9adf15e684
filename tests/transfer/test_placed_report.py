"""Tests of the pages and examples of runs with boxes and with masks."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.make import coco_data, make_masks_folder
from vitrail.tasks import TASKS
from vitrail.training.config import TrainConfig
from vitrail.training.run import train
from vitrail.transfer.finetune import evaluate_run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["detection", "segmentation"])
def test_examples_and_pages_are_drawn(name: str, tmp_path: Path) -> None:
    if name == "detection":
        data, width = coco_data(tmp_path / "data", [1, 2, 3]), 30
    else:
        data, width = make_masks_folder(tmp_path / "data", train=8, validation=0, test=3), 53
    config = TrainConfig(task=TASKS[name]()).override(
        data=str(data), variant="ViT-Pico/8", image_size=(24, 32), resize="pad", depth=1, steps=2, batch_size=4,
        device="cpu", precision="float32", run=str(tmp_path / "run"), validation_share=0.25, evaluations=1,
    )  # fmt: skip
    run = train(config)
    paths = sorted((tmp_path / "run" / "examples").glob("*.png"))
    assert [example.path for example in run.examples] == paths
    for example in run.examples:
        with Image.open(example.path) as picture:
            assert picture.width > 2 * width, "the truth is beside the prediction"
        assert example.mistakes >= 0 and len(example.shown[1]) == 3
    assert any(example.mistakes > 0 for example in run.examples)
    assert "on the right" in (tmp_path / "run" / "progress.html").read_text()
    result = evaluate_run(run, config, config.data.cut(config.data.open()))
    assert result.report is not None and result.page is not None and result.split == "test"
    value = run.metrics["test_average_precision" if name == "detection" else "test_mean_iou"]
    assert next(iter(result.report.metrics.values())).value == pytest.approx(value, abs=1e-6)
    page = result.page.read_text()
    assert "Confusion matrix" in page and ("by size" in page) == (name == "detection")
    assert ('<span class="colour">' in page) == ("Validation mIoU" in page) == (name == "segmentation")
    assert "the prediction on the right" in page and page.count("<img") > len(run.examples)
