"""Tests of the comparison of two models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.make import MemorySource, make_colour_folder
from vitrail.analysis.comparison import ModelComparison, check_comparable, compare
from vitrail.analysis.heads import attention_distance
from vitrail.analysis.saliency import class_relevance
from vitrail.analysis.similarity import layer_similarity
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.data.sources import open_whole
from vitrail.errors import ConfigError
from vitrail.evaluation.metrics.intervals import mcnemar
from vitrail.evaluation.outputs import Outputs
from vitrail.models.variants import create
from vitrail.weights.answers import OutputKind
from vitrail.weights.bundle import Bundle

COLOURS = ("blue", "green", "red")
VIT = {"variant": "ViT-Pico/4", "width": 8, "depth": 2, "heads": 2, "mlp_width": 8}
BIT = {"variant": "BiT-Pico", "width": 8}


def bundle_of(
    *, seed: int = 0, classes: tuple[str, ...] = COLOURS, output: OutputKind = "softmax",
    size: tuple[int, int] = (12, 8), **fields: Any,
) -> Bundle:  # fmt: skip
    torch.manual_seed(seed)
    settings: dict[str, Any] = dict(fields or VIT)
    network = create(settings.pop("variant"), num_classes=len(classes), image_size=size, **settings).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return Bundle(network, classes, Preprocess(image_size=size), output=output)


def source_of(folder: Path, bundle: Bundle) -> Source:
    return open_whole(str(folder), classes=bundle.classes).whole.train


def compared(folder: Path, first: Bundle, second: Bundle, **fields: Any) -> ModelComparison:
    sources = source_of(folder, first), source_of(folder, second)
    return compare((Outputs(first), Outputs(second)), sources, ("one", "two"), **{"bootstrap": 50, **fields})


def answers(folder: Path, bundle: Bundle) -> dict[str, tuple[str, str]]:
    """The true and the predicted class of each image."""
    found = Outputs(bundle).predictions(source_of(folder, bundle))
    names = bundle.classes
    predicted = found.logits.argmax(axis=1)
    return {key: (names[found.truth.plain(row)], names[predicted[row]]) for row, key in enumerate(found.keys)}


def test_classes_of_one_name_are_rows_of_their_own() -> None:
    twins = ("crane", "bee", "crane")
    images = [np.full((12, 8, 3), 40 * number, np.uint8) for number in range(6)]
    source = MemorySource(images, labels=[0, 0, 1, 1, 2, 2], classes=twins)
    first, second = bundle_of(seed=3, classes=twins), bundle_of(seed=4, classes=twins)
    found = compare((Outputs(first), Outputs(second)), (source, source), ("one", "two"), bootstrap=0, examples=0)
    expected = [
        (name, 2, *(float((Outputs(one).predictions(source).logits[2 * row : 2 * row + 2].argmax(axis=1) == row).mean())
                    for one in (first, second)))
        for row, name in enumerate(twins)
    ]  # fmt: skip
    assert sorted(found.classes) == sorted(expected)
    with pytest.raises(ConfigError, match="only the first has crane"):
        check_comparable(first, bundle_of(classes=("crane", "bee", "bee")))


@pytest.mark.slow
def test_images_are_counted_by_which_model_is_right_though_classes_are_in_another_order(colours: Path) -> None:
    first, second = bundle_of(seed=3), bundle_of(seed=4, classes=("red", "blue", "green"))
    found = compared(colours, first, second, examples=100, images=4)
    one, two = answers(colours, first), answers(colours, second)
    only = {key for key, (true, said) in one.items() if true == said and two[key][1] != true}
    others = {key for key, (true, said) in two.items() if true == said and one[key][1] != true}
    assert (found.paired.images, found.paired.only_first, found.paired.only_second) == (27, len(only), len(others))
    assert only or others, "the models of this test must differ"
    assert found.paired.p == mcnemar(len(only), len(others))
    assert {item.key for item in found.disagreements} == only | others
    for item in found.disagreements:
        assert (item.answers[0].label == item.label) == (item.key in only)
        assert item.label == one[item.key][0]
        assert [answer.label for answer in item.answers] == [one[item.key][1], two[item.key][1]]
    accuracies = {name: (a, b) for name, images, a, b in found.classes if images == 9}
    assert accuracies == {
        name: tuple(sum(t == s == name for t, s in each.values()) / 9 for each in (one, two)) for name in COLOURS
    }


@pytest.mark.slow
def test_layers_are_compared_on_images_of_each_models_size(colours: Path) -> None:
    first, second = bundle_of(size=(12, 8)), bundle_of(seed=1, size=(16, 20))
    found = compared(colours, first, second, images=12)
    assert found.looked_at == 12
    inputs = []
    for bundle in (first, second):
        source = source_of(colours, bundle)
        chosen = np.linspace(0, 26, 12).round().astype(int)
        pixels = np.stack([bundle.preprocess.pixels(source[int(index)].image) for index in chosen])
        inputs.append(bundle.preprocess.normalise(torch.from_numpy(pixels)))
    wanted = layer_similarity(first.network, [inputs[0]], second.network, other_batches=[inputs[1]])
    assert np.allclose(found.similarity.values, wanted.values, atol=1e-9)
    reach = attention_distance(second.network, inputs[1])
    assert found.models[1].reach.by_layer == [(0, reach.mean[0].mean()), (1, reach.mean[1].mean())]


def test_relevance_is_that_of_the_predicted_class(colours: Path) -> None:
    bundle = bundle_of(seed=3)
    found = compared(colours, bundle, bundle_of(seed=4), examples=1, images=4)
    (item,) = found.disagreements
    source = source_of(colours, bundle)
    (index,) = [index for index in range(len(source)) if source.key(index) == item.key]
    pixels = bundle.preprocess.pixels(source[index].image)
    values = class_relevance(bundle.network, bundle.preprocess.normalise(torch.from_numpy(pixels[None]))).values[0]
    shown = item.answers[0].relevance
    assert shown is not None and np.nanmin(shown) >= values.min() - 1e-6 and np.nanmax(shown) <= values.max() + 1e-6


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"classes": ("blue", "green", "pink")}, "only the first has red; only the second has pink"),
        ({"output": "numbers"}, "a model that predicts numbers cannot be compared"),
        ({"classes": ()}, "a model without classes cannot be compared"),
    ],
)
def test_models_that_cannot_be_compared(second: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_comparable(bundle_of(), bundle_of(**second))


@pytest.mark.slow
def test_images_that_cannot_be_decoded_are_skipped_and_listed(tmp_path: Path) -> None:
    folder = make_colour_folder(tmp_path / "colours", images=3)
    bundle = bundle_of(seed=3)
    source = source_of(folder, bundle)
    (folder / source.key(4)).write_bytes(b"")
    found = compared(folder, bundle, bundle_of(seed=4))
    assert found.paired.images == found.looked_at == 8
    assert [(item.key, item.reason) for item in found.skipped] == [(source.key(4), "is empty (0 bytes)")]
