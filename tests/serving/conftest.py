"""Small models with random weights, their exported files, and images to compare them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.make import CLASSES, encode
from tests.serving.running import Running, serving
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Sample
from vitrail.export.export import Exporter, export
from vitrail.export.formats import FORMATS, Int8
from vitrail.models.predictor import Predictor
from vitrail.models.variants import AnyConfig, build
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.answers import Prediction
from vitrail.weights.bundle import Bundle


def make_bundle(config: AnyConfig | None = None, *, output: Any = "softmax", **preprocess: Any) -> Bundle:
    """Return a model with random weights, by default a transformer for images of 12 x 10 pixels."""
    if config is None:
        config = ViTConfig(
            image_size=(12, 10), patch_size=(4, 5), width=12, depth=2, heads=3, mlp_width=20, num_classes=3
        )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        network = build(config).eval()
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    settings = {"image_size": config.image_size, "channels": config.channels, "mean": (0.4,), "std": (0.25,)}
    return Bundle(network, CLASSES[: config.num_classes], Preprocess(**{**settings, **preprocess}), output=output)


def probabilities(bundle: Bundle, images: Sequence[Any]) -> torch.Tensor:
    inputs = bundle.inputs([bundle.preprocess.pixels(image) for image in images])
    return bundle.probabilities(Predictor(bundle.network).logits(inputs))


def make_samples(count: int = 9, size: tuple[int, int] = (17, 13)) -> list[Sample]:
    """Return random pictures with labels."""
    draws = np.random.default_rng(3)
    return [
        Sample(f"{row}", draws.integers(0, 256, (*size, 3), dtype=np.uint8), row % len(CLASSES)) for row in range(count)
    ]


def judged(bundle: Bundle, count: int = 60) -> list[Sample]:
    """Return random pictures whose labels are the classes that a model predicts."""
    samples = make_samples(count)
    found = bundle.predict([sample.image for sample in samples])
    labels = [bundle.classes.index(one.label) for one in found if isinstance(one, Prediction)]
    return [replace(sample, target=label) for sample, label in zip(samples, labels, strict=True)]


@pytest.fixture(scope="session")
def samples() -> list[Sample]:
    return make_samples()


@pytest.fixture(scope="session")
def bundle() -> Bundle:
    return make_bundle()


@pytest.fixture(scope="session")
def exported(bundle: Bundle, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that exports the model `bundle` to a format, such as "onnx" or "onnx-int8", once per
    session."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            to, _, precision = name.partition("-")
            path = tmp_path_factory.mktemp("exported") / f"flowers{FORMATS[to].suffix}"
            if precision:
                exporter = Exporter(bundle, judged(bundle), int8=Int8(make_samples(24), max_drop=10.0))
                made[name] = exporter.write(path, to, precision).path
            else:
                made[name] = export(bundle, path, to, samples).path
        return made[name]

    return get


@pytest.fixture(scope="session")
def images() -> list[bytes]:
    """Files of random pictures of odd sizes."""
    draws = np.random.default_rng(7)
    return [encode(draws.integers(0, 256, (11 + n, 23 - n, 3), dtype=np.uint8), "PNG") for n in range(6)]


@pytest.fixture(scope="session")
def bundles(bundle: Bundle) -> dict[str, Bundle]:
    """A model of classes, the model of a regression, and a model without a head."""
    config: Any = bundle.network.config
    features = ViTConfig(**{**vars(config), "num_classes": 0})
    return {"flowers": bundle, "numbers": make_bundle(output="numbers"), "features": make_bundle(features)}


@pytest.fixture(scope="session")
def server(bundles: dict[str, Bundle]) -> Iterator[Running]:
    with serving(bundles) as running:
        yield running
