"""Tests of overlays of maps on images, and of drawn pictures."""

from __future__ import annotations

import io
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from tests.analysis.networks import images_of, make
from tests.make import dense_bundle, encode, make_bundle, random_bundle
from vitrail.analysis.charts import colours, standalone
from vitrail.analysis.faithfulness import RandomisedWeights, SaliencyCurves
from vitrail.analysis.features import LayerProbe, token_norms
from vitrail.analysis.images import (
    SIDE,
    Overlays,
    draw_curves,
    draw_layer_similarity,
    draw_norms,
    draw_probes,
    draw_randomised,
    overlay,
)
from vitrail.analysis.pages.explanation import Wanted, explain
from vitrail.analysis.similarity import layer_similarity
from vitrail.evaluation.metrics.intervals import Metric
from vitrail.models.variants import variant_config
from vitrail.weights.bundle import Bundle


def small_bundle(**changes: Any) -> Bundle:
    """Return a model for images of 36 x 30 pixels."""
    return make_bundle(image_size=(36, 30), **changes)


def file_of(size: tuple[int, int]) -> bytes:
    coarse = Image.fromarray(np.random.default_rng(2).integers(0, 256, (4, 5, 3), dtype=np.uint8))
    return encode(coarse.resize(size[::-1], Image.Resampling.BICUBIC), "PNG")


def pixels_of(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file)), np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"num_classes": 0, "pool": "gap"}, {"pool": "map", "registers": 2}])
def test_overlays_are_those_of_explanations(changes: dict[str, Any]) -> None:
    bundle, image = small_bundle(**changes), file_of((47, 61))
    for target in (0, 2, None) if bundle.classes else (None,):
        explained = explain(bundle, image, wanted=Wanted(target))
        values = explained.enlarge(explained.by_patch["rollout" if target is None else "relevance"])
        found = pixels_of(Overlays().draw(bundle, image, target))
        assert found.shape == (47, 61, 3)
        assert np.abs(found - overlay(explained.picture, values)).mean() < 4  # of 255: JPEG loses a little


def test_large_pictures_are_reduced() -> None:
    bundle = small_bundle()
    small, large = (pixels_of(Overlays().draw(bundle, file_of(size), 1)) for size in ((640, 32), (1280, 64)))
    assert small.shape == large.shape == (SIDE, 32, 3)


def test_models_without_overlays() -> None:
    resnet = random_bundle(variant_config("BiT-Pico", num_classes=3))
    for bundle, reason in (
        (resnet, "a network of the architecture 'BiT' has no attention to look into"),
        (dense_bundle("queries"), "head_kind='queries' adds tokens before the last blocks"),
        (small_bundle(attention="linformer"), "attention='linformer' has no dense map of weights"),
        (small_bundle(), None),
    ):
        refusal = Overlays().refusal(bundle)
        assert refusal is None if reason is None else refusal.startswith(reason)


def titles(chart: str) -> list[str]:
    root = ElementTree.fromstring(standalone(chart))
    return [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}title")]


def test_charts_by_layer() -> None:
    network = make(registers=1)
    norms = token_norms(network, images_of(2))
    found = titles(draw_norms(norms))
    assert f"patches, median: 2, {np.median(norms.patches[:, 2]):.4g}" in found
    assert {"class token, mean", "registers, mean"} <= {*found}
    probes = [LayerProbe(0, Metric(0.5, 0.4, 0.6)), LayerProbe(2, Metric(0.75))]
    found = titles(draw_probes(probes))
    assert "accuracy: 2, 75" in found and "95 % interval, upper end: 0, 60" in found
    similarity = layer_similarity(network, [images_of(5)])
    found = titles(draw_layer_similarity(similarity))
    assert len(found) == 9 and "layer 1, layer 1: 1 CKA" in found


def test_curves_and_random_weights() -> None:
    curves = SaliencyCurves(
        "deletion and insertion",
        "probability of the class",
        ("rollout", "random"),
        np.array([0.0, 0.5, 1.0]),
        np.array([[[0.8, 0.2, 0.0]], [[0.8, 0.6, 0.0]]]),
        np.array([[[0.0, 0.7, 0.8]], [[0.0, 0.1, 0.8]]]),
    )
    found = titles(draw_curves(curves))
    assert "rollout (area 0.300)" in found and "random (area 0.500): 50, 0.6" in found
    assert "rollout (area 0.550): 50, 0.7" in titles(draw_curves(curves, "insertion"))
    check = RandomisedWeights("saliency", "rank correlation", ("head", "block 0"), np.array([[1.0, 0.5], [0.0, 0.1]]))
    other = RandomisedWeights("saliency", "rank correlation", ("head", "block 0"), np.array([[1.0, 1.0], [0.5, 0.3]]))
    lines = [title for title in titles(draw_randomised({"relevance": check, "rollout": other})) if ": " in title]
    assert lines == ["relevance: 1, 0.75", "relevance: 2, 0.05", "rollout: 1, 1", "rollout: 2, 0.4"]


def test_overlay_keeps_what_the_network_did_not_see() -> None:
    picture = np.full((2, 3, 3), 100, np.uint8)
    values = np.array([[0.0, 5.0, np.nan], [2.5, np.nan, 5.0]])
    found = overlay(picture, values, opacity=0.5)
    assert found[0, 2].tolist() == [100, 100, 100]
    for place, fraction in (((0, 0), 0.0), ((0, 1), 1.0), ((1, 0), 0.5)):
        expected = np.rint(0.5 * 100 + 0.5 * colours(np.array([[fraction]]))[0, 0])
        np.testing.assert_array_equal(found[place], expected)
    assert np.array_equal(overlay(picture, np.full((2, 3), np.nan)), picture)
