"""Tests of runs whose head starts as a linear model of the initial model's features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.make import MemorySource, make_colour_folder
from tests.training.jobs import Initial, Make, events_of
from vitrail.data.source import truth_of
from vitrail.data.sources import open_data
from vitrail.data.splits import Splits
from vitrail.errors import DataError
from vitrail.evaluation.outputs import Outputs
from vitrail.training.linear_start import linear_score, start_head
from vitrail.training.run import train
from vitrail.weights.bundle import Bundle, load_bundle


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_colour_folder(tmp_path_factory.mktemp("colours"))


@pytest.fixture
def splits(colours: Path) -> Splits:
    return open_data(str(colours), validation_share=0.25)


def accuracy(bundle: Bundle, splits: Splits) -> float:
    assert splits.validation is not None
    found = Outputs(bundle).predictions(splits.validation)
    return float((found.logits.argmax(axis=1) == truth_of(splits.validation).values).mean())


def headed(initial: Initial, names: tuple[str, ...]) -> Bundle:
    bundle = load_bundle(initial(classes=names))
    return replace(bundle, network=bundle.network.with_head(len(names)))


@pytest.mark.slow
def test_a_kept_head_stays_unless_a_linear_model_is_better(initial: Initial, splits: Splits) -> None:
    bundle = headed(initial, splits.classes)
    start_head(Outputs(bundle), splits, kept=False)
    good = bundle.network.head.weight.detach().clone() * 1.01
    with torch.no_grad():
        bundle.network.head.weight.copy_(good)
    note = start_head(Outputs(bundle), splits, kept=True)
    assert "as good on the validation split" in note and torch.equal(bundle.network.head.weight, good)
    with torch.no_grad():
        bundle.network.head.weight.neg_()
    assert "starts as a linear model" in start_head(Outputs(bundle), splits, kept=True)
    assert accuracy(bundle, splits) == 1.0


def test_without_a_validation_split_a_kept_head_stays(initial: Initial, splits: Splits) -> None:
    bundle = headed(initial, splits.classes)
    before = bundle.network.head.weight.detach().clone()
    start_head(Outputs(bundle), replace(splits, validation=None), kept=True)
    assert torch.equal(bundle.network.head.weight, before)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["ViT-Pico/7", "BiT-R26x1"])
def test_a_run_begins_and_is_measured_at_the_linear_model(
    variant: str, initial: Initial, from_model: Make, colours: Path
) -> None:
    is_vit = variant == "ViT-Pico/7"
    size = {} if is_vit else {"image_size": (32, 48)}
    model = initial(variant, **({} if is_vit else {"width": 32, "depths": (1, 1, 1, 1)}))
    config = from_model(model, colours, linear_head=True, steps=2, evaluations=1, learning_rate=1e-6, **size)
    found = train(config)
    first, *_ = events_of(found.folder, "evaluation")
    assert (first["step"], first["split"], first["best"]) == (0, "validation", True)
    splits = config.data.open()
    score = linear_score(config, load_bundle(model), splits)
    assert score == ("accuracy", first["accuracy"]) and first["accuracy"] > 0.9
    assert found.metrics["validation_accuracy"] >= first["accuracy"]
    assert linear_score(config, load_bundle(model), replace(splits, validation=None)) is None


@pytest.mark.slow
def test_numbers_start_at_ridge_regression(initial: Initial, from_model: Make, colours: Path) -> None:
    lines = ["file,redness,split"]
    for index, path in enumerate(sorted(colours.rglob("*.png"))):
        split = "val" if index % 3 == 0 else "train"
        lines.append(f"{path.relative_to(colours)},{1000 + 10 * (path.parent.name == 'red')},{split}")
    (colours / "table.csv").write_text("\n".join(lines), encoding="utf-8")
    config = from_model(
        initial(), colours / "table.csv", numbers=("redness",), task="regression", linear_head=True, steps=1,
        learning_rate=1e-9, keep="last",
    )  # fmt: skip
    found = train(config)
    assert found.metrics["validation_r2"] > 0.8, "the head starts in standardised numbers"


def test_a_linear_head_needs_labels(initial: Initial, splits: Splits) -> None:
    bundle = headed(initial, splits.classes)
    unlabelled = MemorySource([splits.train[0].image] * 3, labels=[None] * 3, classes=splits.classes)
    with pytest.raises(DataError, match="no training image has a label"):
        start_head(Outputs(bundle), Splits(unlabelled, None, None), kept=False)
    assert not np.any(bundle.network.head.weight.detach().numpy())
