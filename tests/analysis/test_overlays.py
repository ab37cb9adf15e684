"""Tests of overlays: they are what `vitrail explain` draws, on a small copy of the picture."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.analysis.images import SIDE, Overlays, overlay
from vitrail.analysis.pages.explanation import Explainer
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.variants import build, variant_config
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle


def make_bundle(**changes: Any) -> Bundle:
    settings: dict[str, Any] = {
        "image_size": (36, 30), "patch_size": (4, 5), "width": 12, "depth": 2, "heads": 3, "mlp_width": 20,
        "num_classes": 3,
    }  # fmt: skip
    config = ViTConfig(**{**settings, **changes})
    return Bundle(
        build(config).eval(),
        ("a", "b", "c")[: config.num_classes],
        Preprocess(image_size=config.image_size, channels=config.channels),
    )


def file_of(size: tuple[int, int]) -> bytes:
    draws = np.random.default_rng(2)
    coarse = Image.fromarray(draws.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize(size[::-1], Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def pixels_of(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file)), np.float64)


@pytest.mark.parametrize("changes", [{}, {"num_classes": 0, "pool": "gap"}, {"pool": "map", "registers": 2}])
def test_overlays_are_those_of_explanations(changes: dict[str, Any]) -> None:
    bundle, image = make_bundle(**changes), file_of((47, 61))
    for target in (0, 2, None) if bundle.classes else (None,):
        explained = Explainer(bundle, target=target).explain(image)
        values = explained.rollout if target is None else explained.relevance
        assert values is not None
        found = pixels_of(Overlays().draw(bundle, image, target))
        assert found.shape == (47, 61, 3)
        assert np.abs(found - overlay(explained.picture, values)).mean() < 4  # of 255: JPEG loses a little


def test_a_grey_model_does_not_write_to_pixels_that_are_read_only() -> None:
    file = io.BytesIO()
    Image.open(io.BytesIO(file_of((36, 30)))).convert("L").save(file, "PNG")
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # PyTorch warns of such arrays only once in a process
    try:
        found = pixels_of(Overlays().draw(make_bundle(channels=1), file.getvalue(), 1))
    finally:
        torch.set_warn_always(always)
    assert found.shape == (36, 30, 3)


def test_large_pictures_are_reduced() -> None:
    bundle = make_bundle()
    small, large = (pixels_of(Overlays().draw(bundle, file_of(size), 1)) for size in ((640, 320), (1280, 640)))
    assert small.shape == large.shape == (SIDE, SIDE // 2, 3)


def test_models_without_overlays() -> None:
    resnet = variant_config("BiT-Pico", num_classes=3)
    bundle = Bundle(build(resnet).eval(), ("a", "b", "c"), Preprocess(image_size=resnet.image_size))
    assert Overlays().refusal(bundle) == "a network of the architecture 'BiT' has no attention to look into"
    assert Overlays().refusal(make_bundle(attention="linformer")) == "its kind of attention has no map of weights"
    assert Overlays().refusal(make_bundle()) is None
