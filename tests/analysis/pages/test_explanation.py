"""Explanations of found objects and of places of masks: they belong to the answers that `predict` gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.make import dense_bundle, encode, make_bundle
from vitrail.analysis.faithfulness import saliency_curves
from vitrail.analysis.pages.explanation import Wanted, explain, outputs_to_explain
from vitrail.analysis.saliency import _dense_reading, attention_rollout, class_relevance
from vitrail.analysis.tracing import trace
from vitrail.cli import main
from vitrail.errors import ConfigError
from vitrail.report.drawing import colour_of
from vitrail.weights.answers import Detections, MaskPrediction

BOXES = "pyramid", "detection-tokens"
MASKS = "patches", "fine-patches"


@pytest.fixture
def image() -> bytes:
    return encode(np.random.default_rng(0).integers(0, 255, (47, 81, 3), dtype=np.uint8), "PNG")


def found_in(bundle: Any, image: bytes, wanted: Wanted) -> tuple[list[Any], torch.Tensor]:
    """Return the outputs to explain, and the probability of each output of the network."""
    inputs = bundle.inputs([bundle.preprocess.pixels(image)])
    with torch.no_grad():
        outputs = bundle.network(inputs)
    config, (placement,) = bundle.network.config, bundle.placements([image])
    found = outputs_to_explain(config, outputs, bundle.classes, placement, wanted, 5)
    return found, config.dense_head.scores(outputs).flatten()


def test_the_explained_class_is_predicted_in_the_precision_of_the_model(image: bytes) -> None:
    bundle = replace(make_bundle(), precision="bf16")
    with torch.no_grad():
        bundle.network.head.weight[:] = bundle.network.head.weight[0]
        bundle.network.head.bias[:] = torch.tensor([8.0, 8.001, 0.0])  # equal in bfloat16
    explained = explain(bundle, image, wanted=Wanted())
    (answer,) = bundle.predict([image])
    assert explained.chosen is not None and explained.chosen.name == explained.ranking[0][0] == answer.label


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOXES)
def test_an_object_is_explained_by_its_own_score(kind: str, image: bytes) -> None:
    bundle = dense_bundle(kind)
    (answer,) = bundle.predict([image])
    assert isinstance(answer, Detections) and len(answer) > 5
    for number in (1, 4):
        found, scores = found_in(bundle, image, Wanted(box=number))
        assert scores[found[0].number] == pytest.approx(answer.scores[number - 1], rel=1e-4)
        assert found[0].label == answer.labels[number - 1]
        np.testing.assert_allclose(found[0].box, answer.boxes[number - 1], atol=1e-3)
    label = int(answer.labels[-1])
    found, scores = found_in(bundle, image, Wanted(label=label))
    assert scores[found[0].number] == pytest.approx(answer.scores[answer.labels == label][0], rel=1e-4)
    assert len(found) in (5, 6) and len({one.number for one in found}) == len(found)
    with pytest.raises(ConfigError, match=f"the model finds {len(answer)} objects"):
        found_in(bundle, image, Wanted(box=len(answer) + 1))


@pytest.mark.parametrize("kind", MASKS)
def test_a_place_of_a_mask_is_explained_by_the_class_there(kind: str, image: bytes) -> None:
    bundle = dense_bundle(kind)
    (answer,) = bundle.predict([image])
    assert isinstance(answer, MaskPrediction)
    found, scores = found_in(bundle, image, Wanted())
    for one in found:  # each at the middle of the cell where its class is clearest
        x, y = (one.box[:2] + one.box[2:]) / 2
        assert answer.indices[int(y), int(x)] == one.label and scores[one.number] > 1 / 3
        chosen, _ = found_in(bundle, image, Wanted(place=(float(int(x)), float(int(y)))))
        assert chosen[0].number == one.number
        assert found_in(bundle, image, Wanted(label=one.label))[0][0].number == one.number
    (other, *_), scores = found_in(bundle, image, Wanted(label=2, place=(40.0, 20.0)))
    assert other.label == 2 and other.box[0] <= 40.5 <= other.box[2] and other.box[1] <= 20.5 <= other.box[3]
    with pytest.raises(ConfigError, match="outside of the image of 81 x 47 pixels"):
        found_in(bundle, image, Wanted(place=(81.0, 3.0)))


@pytest.mark.parametrize(("kind", "row"), [("detection-tokens", 4), ("patches", 7)])
def test_a_head_of_single_tokens_reads_one_token(kind: str, row: int) -> None:
    network: Any = dense_bundle(kind).network
    images, classes = torch.randn(2, 3, 32, 40, generator=torch.Generator().manual_seed(0)), network.config.num_classes
    targets = torch.tensor([row * classes + 1, row * classes])
    piece = trace(network, images, keep={"attention", "outputs"}, targets=targets)
    place = 1 + row if kind == "detection-tokens" else network.config.prefix + row
    expected = torch.zeros(2, network.config.tokens)
    expected[:, place] = 1
    torch.testing.assert_close(_dense_reading(network, piece), expected)
    own = [attention_rollout(network, images, each).values for each in (None, targets, targets % classes)]
    assert not np.allclose(own[0], own[1]) and not np.allclose(own[1], own[2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pyramid", "fine-patches"])
def test_faithfulness_is_measured_by_the_score_of_the_object(kind: str) -> None:
    network: Any = dense_bundle(kind).network
    images = torch.randn(2, 3, 32, 40, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        scores = network.config.dense_head.scores(network(images)).flatten(1)
    targets = scores.argmax(dim=1)
    maps = {"relevance": class_relevance(network, images, targets)}
    curves = saliency_curves(network, images, maps, targets, output="boxes", steps=3)
    assert maps["relevance"].values.shape == (2, 4, 5) and np.isfinite(maps["relevance"].values).all()
    np.testing.assert_allclose(curves.deletion[:, :, 0], np.broadcast_to(scores.amax(dim=1), (2, 2)), rtol=1e-4)
    again = saliency_curves(network, images, maps, output="boxes", steps=3)
    np.testing.assert_array_equal(again.deletion, curves.deletion)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["detection-tokens", "patches"])
def test_the_command_draws_the_box(kind: str, image: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = dense_bundle(kind)
    bundle.save(tmp_path / "model")
    (tmp_path / "a.png").write_bytes(image)
    arguments = ["explain", str(tmp_path / "model"), str(tmp_path / "a.png"), "--out", str(tmp_path / "out")]
    choice = ["--box", "2"] if kind in BOXES else ["--place", "40", "20"]
    assert main([*arguments, *choice]) == 0
    explained = explain(bundle, image, wanted=Wanted(box=2) if kind in BOXES else Wanted(place=(40.0, 20.0)))
    assert explained.chosen is not None and explained.chosen.box is not None
    with Image.open(tmp_path / "out/a-relevance.png") as drawn:
        assert (np.asarray(drawn.convert("RGB")) == colour_of(explained.chosen.label)).all(axis=2).any()
    assert explained.chosen.name in (tmp_path / "out/a.html").read_text()
    wrong = ["--place", "3", "4"] if kind in BOXES else ["--box", "1"]
    assert main([*arguments, "--overwrite", *wrong]) == 2
    assert "leave it out" in capsys.readouterr().err
