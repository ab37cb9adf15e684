"""Exported files of boxes and masks: the outputs and the answers are those of the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.make import dense_bundle, make_masks_folder
from vitrail.data.source import Sample
from vitrail.errors import ConfigError, ExportFailed
from vitrail.export import parity
from vitrail.export.export import export
from vitrail.models.heads import HEADS
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Pictures of odd sizes, none of which has the aspect ratio of the network."""
    folder = make_masks_folder(tmp_path_factory.mktemp("drawn"), train=6, validation=0, test=0)
    return [Sample(path.name, path.read_bytes(), None) for path in sorted((folder / "images/train").iterdir())]


def assert_same_answers(bundle: Bundle, file: Bundle, samples: list[Sample]) -> None:
    """Assert that a model and its file answer the same about every picture, in its pixels."""
    images = [sample.image for sample in samples]
    assert file.output == bundle.output and file.classes == bundle.classes
    ours: list[Any] = bundle.predict(images)
    theirs: list[Any] = file.predict(images)
    for one, other in zip(ours, theirs, strict=True):
        if bundle.output == "mask":
            assert (one.indices != other.indices).mean() < 1e-3
        else:
            assert len(one) == len(other) > 3 and one.size == other.size
            np.testing.assert_array_equal(one.labels, other.labels)
            np.testing.assert_allclose(one.boxes, other.boxes, atol=1e-2)
            np.testing.assert_allclose(one.scores, other.scores, atol=1e-4)
            pairs = zip(one.masks, other.masks, strict=True)
            assert len(one.masks) == (len(one) if bundle.finds_masks else 0)
            assert all((our.mask() != their.mask()).mean() < 1e-2 for our, their in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["pt2", "onnx", "openvino"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_file_answers_like_the_model(kind: str, to: str, samples: list[Sample], tmp_path: Path) -> None:
    if to == "openvino":
        pytest.importorskip("openvino")
    bundle = dense_bundle(kind)
    made = export(bundle, tmp_path / {"openvino": "a.xml"}.get(to, f"a.{to}"), to, samples)
    assert made.parity.agreement == 1 and made.parity.relative < 1e-4
    file = load(str(made.path))
    assert_same_answers(bundle, file, samples)
    network: Any = file.network
    (rows,) = network.run(np.zeros((3, 32, 40, 3), np.uint8)).items()
    assert rows[0] == "rows" and rows[1].shape[0] == 3
    if to == "onnx":
        import onnx

        described = {item.key: item.value for item in onnx.load(made.path).metadata_props}["vitrail"]
        assert ("box" in json.loads(described)["rows"]) == (bundle.output == "boxes")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pyramid", "patches"])
def test_a_file_resizes_pictures_and_has_an_embedding(kind: str, samples: list[Sample], tmp_path: Path) -> None:
    bundle = dense_bundle(kind)
    made = export(bundle, tmp_path / "a.pt2", "pt2", samples, resizes=True)
    assert_same_answers(bundle, load(str(made.path)), samples)
    embedding = export(bundle, tmp_path / "e.pt2", "pt2", samples, contents="embedding")
    images = [sample.image for sample in samples]
    np.testing.assert_allclose(load(str(embedding.path)).embed(images), bundle.embed(images), atol=1e-4)


@pytest.mark.slow
def test_a_folder_for_triton_names_the_rows(samples: list[Sample], tmp_path: Path) -> None:
    made = export(dense_bundle(), tmp_path / "model", "triton", samples)
    assert 'name: "rows" data_type: TYPE_FP32 dims: [ -1, 6 ]' in (made.path / "config.pbtxt").read_text()


@pytest.mark.slow
def test_a_file_with_other_boxes_fails(samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "SAME_BOX", 1.1)  # as if all boxes were others
    bundle = dense_bundle("detection-tokens", depth=1)
    with pytest.raises(ExportFailed, match=r"has only 0\.00% of the boxes"):
        export(bundle, tmp_path / "a.pt2", "pt2", samples)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ConfigError, match="any_size"):
        export(dense_bundle(positions="sincos-2d"), tmp_path / "a.pt2", "pt2", samples, any_size=True)
