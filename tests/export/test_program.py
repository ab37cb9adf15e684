"""Tests of exported files that resize pictures themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.serving.conftest import judged, make_bundle, make_samples, probabilities
from vitrail import load
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Sample
from vitrail.errors import ConfigError
from vitrail.export.export import Exporter, export
from vitrail.export.formats import Int8
from vitrail.export.program import Resizing
from vitrail.weights.exported import canvas_of

SIZES = ((37, 53), (53, 37), (24, 20), (48, 40), (25, 24), (11, 7), (7, 90), (131, 200))


def picture(height: int, width: int) -> np.ndarray:
    """Return a picture with smooth parts and fine noise."""
    draws = np.random.default_rng(height * 1000 + width)
    coarse = draws.integers(0, 256, (height // 4 + 2, width // 4 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height)), np.int64)
    return (smooth + draws.integers(-20, 21, smooth.shape)).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
@pytest.mark.parametrize(
    ("settings", "most", "often"),
    [
        ({"interpolation": "bilinear"}, 1, 0.04),
        ({"interpolation": "bilinear", "resampler": "torch"}, 1, 0.05),
        ({"interpolation": "bicubic"}, 2, 0.04),
        ({"interpolation": "bilinear", "antialias": False}, 1, 0.02),
        ({"interpolation": "bicubic", "antialias": False}, 1, 0.02),
        ({"interpolation": "bilinear", "antialias": False, "resampler": "tensorflow-uint8"}, 1, 0.02),
        ({"interpolation": "bilinear", "antialias": False, "resampler": "tensorflow"}, 0.01, 0.0),
    ],
)
def test_pictures_are_resized_like_by_the_preprocessing(
    settings: dict[str, Any], most: float, often: float, resize: Any
) -> None:
    wrong = total = 0
    for size, share in (((24, 20), 1.0), ((24, 20), 0.875), ((24, 24), 0.875)):
        preprocess = Preprocess(image_size=size, crop_share=share, resize=resize, pad_value=(10, 20, 30), **settings)
        resizing = Resizing(preprocess)
        for shape in SIZES:
            image = picture(*shape)
            expected = preprocess.pixels(image).astype(np.float32)
            difference = np.abs(resizing(torch.from_numpy(image)[None])[0].numpy() - expected)
            assert difference.max() <= most, (size, share, shape)
            wrong, total = wrong + int((difference > 0.01).sum()), total + difference.size
    assert wrong <= often * total


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"scaled_decode": True}, "scaled_decode=True changes how JPEG files are decoded"),
        ({"interpolation": "area"}, "interpolation='area' chooses another pixel"),
        ({"interpolation": "nearest"}, "interpolation='nearest' chooses another pixel"),
        ({"resampler": "tensorflow"}, "resampler='tensorflow' with interpolation='bilinear' and antialias=True"),
    ],
)
def test_what_cannot_be_expressed_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"resize=True: {reason}"):
        Exporter(make_bundle(**settings), make_samples(), resizes=True)


def pictures(count: int = 9) -> list[Sample]:
    sizes = [SIZES[row % len(SIZES)] for row in range(count)]
    return [replace(sample, image=picture(*size)) for sample, size in zip(make_samples(count), sizes, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["pt2", "onnx", "openvino"])
def test_a_file_takes_pictures_of_any_size(to: str, tmp_path: Path) -> None:
    bundle = make_bundle(resize="crop", crop_share=0.875)
    samples = pictures()
    suffix = {"pt2": ".pt2", "onnx": ".onnx", "openvino": ".xml"}[to]
    made = Exporter(bundle, samples, resizes=True).write(tmp_path / f"flowers{suffix}", to)
    assert made.parity.images == 9 and made.parity.agreement == 1.0
    file = load(made.path)
    network: Any = file.network
    assert canvas_of(network.preprocess) == (13, 11) and network.interface.resizes
    # Vitrail resizes pictures itself, so its own answers do not depend on the resizing in the file.
    images = [sample.image for sample in samples]
    for found, wanted in zip(file.predict(images), bundle.predict(images), strict=True):
        assert dict(found.ranking) == pytest.approx(dict(wanted.ranking), abs=1e-4)
    if to != "onnx":
        return
    import onnxruntime

    session = onnxruntime.InferenceSession(made.path)
    assert session.get_inputs()[0].shape == ["batch", "height", "width", 3]
    (found,) = session.run(["probabilities"], {"images": images[0][None]})
    assert found[0] == pytest.approx(probabilities(bundle, images[:1])[0].numpy(), abs=0.01)
    again = export(bundle, tmp_path / "again.onnx", "onnx", samples, resizes=True)
    assert again.path.read_bytes() == made.path.read_bytes()


@pytest.mark.slow
def test_integers_and_triton(tmp_path: Path) -> None:
    bundle = make_bundle()
    made = Exporter(bundle, judged(bundle), resizes=True, int8=Int8(pictures(24), max_drop=10.0))
    result = made.write(tmp_path / "flowers", "triton", "int8")
    assert "dims: [ -1, -1, 3 ]" in (result.path / "config.pbtxt").read_text(encoding="utf-8")
