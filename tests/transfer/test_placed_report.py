"""Tests of the pages and examples of runs with boxes and with masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.make import coco_data
from vitrail.tasks import TASKS
from vitrail.training.config import TrainConfig
from vitrail.training.run import train
from vitrail.transfer.finetune import evaluate_run


def mask_data(root: Path) -> Path:
    """Write images whose left part is of another class."""
    random = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 3)):
        for number in range(count):
            mask = np.zeros((33, 47), np.uint8)
            mask[:, : int(random.integers(8, 40))] = 1
            for folder, pixels in (("images", np.stack([mask * 200] * 3, axis=2)), ("masks", mask)):
                (root / folder / split).mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(root / folder / split / f"{split}{number}.png")
    (root / "classes.txt").write_text("right\nleft\n")
    return root


@pytest.mark.parametrize("name", ["detection", "segmentation"])
def test_examples_and_pages_are_drawn(name: str, tmp_path: Path) -> None:
    data = coco_data(tmp_path / "data", [1, 2, 3]) if name == "detection" else mask_data(tmp_path / "data")
    config = TrainConfig(task=TASKS[name]()).override(
        data=str(data), variant="ViT-Pico/8", image_size=(24, 32), resize="pad", depth=1, steps=2, batch_size=4,
        device="cpu", precision="float32", run=str(tmp_path / "run"), validation_share=0.25, evaluations=1,
    )  # fmt: skip
    run = train(config)
    paths = sorted((tmp_path / "run" / "examples").glob("*.png"))
    assert [example.path for example in run.examples] == paths
    width = 30 if name == "detection" else 47
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
    assert "the prediction on the right" in page and page.count("<img") > len(run.examples)
