"""Tests of the steps that make models faster, and of the search among them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Sample
from vitrail.experiments import faster as search_module
from vitrail.experiments.faster import Images, linear_head, moves, search, settings_of, truncated
from vitrail.models.reduction import TokenReduction
from vitrail.models.variants import create
from vitrail.weights.adapt import with_reduction
from vitrail.weights.bundle import Bundle


class Colours:
    """Images of 16 x 24 pixels, mostly red, green or blue."""

    classes = ("red", "green", "blue")

    def __init__(self, count: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.images = random.integers(0, 90, (count, 16, 24, 3), dtype=np.uint8)
        for index in range(count):
            self.images[index, ..., index % 3] += 120

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.key(index), self.images[index], self.target(index))

    def key(self, index: int) -> str:
        return str(index)

    def target(self, index: int) -> int:
        return index % 3


def model(**fields: Any) -> Bundle:
    torch.manual_seed(0)
    settings = {"width": 16, "depth": 6, "heads": 2, "mlp_width": 32, "position_std": 0.3, **fields}
    network = create("ViT-Pico/4", image_size=(16, 24), channels=3, num_classes=3, **settings).eval()
    classes = Colours.classes
    return linear_head(Bundle(network, classes, Preprocess(image_size=(16, 24))), classes, Colours(60, seed=1))


@pytest.fixture(scope="module")
def images() -> Images:
    return Images(Colours(60, seed=1), Colours(45, seed=2))


@pytest.mark.slow
def test_a_truncated_network_is_the_smaller_network() -> None:
    bundle = model()
    smaller = truncated(bundle, 2)
    assert smaller.network.config.depth == len(smaller.network.blocks) == 2
    pixels = torch.randn(2, 3, 16, 24)
    with torch.inference_mode():
        (tokens,) = bundle.network.features(pixels, layers=[1])
        last = smaller.network.features(pixels)
        torch.testing.assert_close(bundle.network.norm(tokens.patches), last.patches)
    assert len(truncated(model(attention="axial"), 2).network.blocks) == 4


@pytest.mark.slow
def test_steps_and_their_costs(images: Images) -> None:
    bundle = model(depth=12)
    found = {move.axis: move for move in moves(bundle, bundle, images.train)}
    assert set(found) - {"precision"} == {"image size", "blocks", "merging", "pruning"}
    changes: dict[str, dict[str, Any]] = {
        "image size": {"image_size": [16, 20]},
        "blocks": {"blocks": 10},
        "merging": {"removed_tokens": 1, "removed_by": "merge"},
        "pruning": {"removed_tokens": 1, "removed_by": "prune"},
    }
    for axis, changed in changes.items():
        after = found[axis].build()
        assert settings_of(after) == settings_of(bundle) | changed
        assert found[axis].cost == after.network.config.inference_flops()
        assert after.notes == bundle.notes
    rotary = model(positions="rotary-2d", width=32)
    assert {move.axis for move in moves(rotary, rotary, images.train)} - {"precision"} == {"image size"}
    for fields in (
        {"positions_at": "every-layer"},
        {"attention": "linformer"},
    ):  # of all blocks
        whole = model(**fields)
        assert "blocks" not in {move.axis for move in moves(whole, whole, images.train)}
    resnet = Bundle(
        create("BiT-R26x1", image_size=(64, 64), num_classes=3, depths=(1,), width=32), Colours.classes,
        Preprocess(image_size=(64, 64)),
    )  # fmt: skip
    assert {move.axis for move in moves(resnet, resnet, images.train)} - {"precision"} == {"image size"}


@pytest.mark.slow
def test_pruning_goes_on_where_merging_ends(images: Images) -> None:
    bundle = model(depth=12)
    merged = with_reduction(bundle, TokenReduction(tokens=1))
    found = {move.axis: move for move in moves(merged, bundle, images.train)}
    for axis, by in {"merging": "merge", "pruning": "prune"}.items():
        expected = {"removed_tokens": 2, "removed_by": by}
        assert settings_of(found[axis].build()) == settings_of(bundle) | expected
    pooled = model(pool="gap")  # without a class token, nothing says which patches matter
    assert not pooled.network.config.has_class_token
    axes = {move.axis for move in moves(pooled, pooled, images.train)} - {"precision"}
    assert axes == {"image size", "blocks", "merging"}


@pytest.mark.slow
def test_the_fastest_model_that_keeps_the_accuracy(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is the closed form of FLOPs here, so that the result does not depend on the machine."""
    monkeypatch.setattr(
        search_module, "_seconds", lambda models, batch: [one.network.config.inference_flops() / 1e9 for one in models]
    )
    found = search(model(), images, keep=0.9, seconds=1000.0, batch_size=2)
    assert found.is_complete
    start, best = found.trials[0], found.best
    assert start["accuracy"] > 0.8 and found.floor == 0.9 * start["accuracy"]
    assert best["accuracy"] >= found.floor
    assert best["milliseconds_per_image"] < 0.7 * start["milliseconds_per_image"]
    assert settings_of(found.bundle).items() <= best.items()
    assert all(trial["accuracy"] < found.floor for trial in found.trials if trial["result"] == "accuracy")
    # All steps save FLOPs except bf16, so a step fails by accuracy, or because bf16 is as fast as float32 here.
    assert {trial["tried"] for trial in found.trials if trial["result"] == "not faster"} <= {"precision"}


@pytest.mark.slow
def test_nothing_is_taken_if_nothing_is_faster(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "_seconds", lambda models, batch: [1.0] * len(models))
    bundle = model()
    found = search(bundle, images, keep=0.01, seconds=1000.0, batch_size=2)
    assert found.bundle.network is bundle.network and found.best is found.trials[0]
    assert {trial["result"] for trial in found.trials[1:]} == {"not faster"} and found.is_complete
    stopped = search(bundle, images, keep=0.01, seconds=0.0, batch_size=2)
    assert len(stopped.trials) == 1 and not stopped.is_complete


@pytest.mark.slow
def test_models_of_every_precision_are_timed() -> None:
    bundle = model()
    smaller = with_reduction(replace(bundle, precision="bf16"), TokenReduction(tokens=2))
    assert all(0 < seconds < 60 for seconds in search_module._seconds([bundle, smaller], 4))
