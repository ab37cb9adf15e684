"""Tests of accuracy against a direct count, one image at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import Tensor, nn

from tests.evaluation.memory import MemorySource
from vitrail.data.batch import Skipped
from vitrail.data.pipeline import Readers
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.classifiers.linear import linear_probe
from vitrail.evaluation.evaluators import evaluators_of, measure
from vitrail.evaluation.head import ByRegression
from vitrail.evaluation.outputs import Outputs
from vitrail.models.variants import create
from vitrail.models.vit import VisionTransformer
from vitrail.tasks.classification import Accuracy
from vitrail.tasks.regression import NumberErrors
from vitrail.training.config import TrainConfig
from vitrail.training.run import train
from vitrail.weights.bundle import Bundle

PREPROCESS = Preprocess(image_size=(14, 14), channels=1, mean=(0.3,), std=(0.4,))


class Pictures(MemorySource):
    """Random grey images."""

    def __init__(self, count: int, broken: tuple[int, ...] = ()) -> None:
        random = np.random.default_rng(count)
        images = random.integers(0, 256, (count, 14, 14, 1), dtype=np.uint8)
        super().__init__(images, random.integers(0, 3, count).tolist(), broken)


def make_network(**fields: object) -> VisionTransformer:
    torch.manual_seed(3)
    sizes = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32, "channels": 1}
    network = create("ViT-Pico/7", image_size=(14, 14), **{"num_classes": 3, **sizes, **fields})
    if network.head is not None:
        nn.init.normal_(network.head.weight)
    return network


def measured(network: VisionTransformer, source: Pictures, **options: object) -> dict[str, float]:
    bundle = Bundle(network, source.classes, PREPROCESS)
    return Accuracy()(Outputs(bundle, **options), source, source)


def count_directly(network: VisionTransformer, source: Pictures) -> tuple[float, float, int]:
    """Return the number of correct images, the sum of cross-entropies and the number of images, by softmax in
    float64."""
    right, loss, count = 0, 0.0, 0
    for index in range(len(source)):
        if index in source.broken:
            continue
        pixels = torch.from_numpy(source.images[index]).permute(2, 0, 1)[None]
        with torch.no_grad():
            logits = network.eval()((pixels.float() / 255 - 0.3) / 0.4)[0].double().numpy()
        right += int(np.argmax(logits) == source.target(index))
        loss += math.log(np.exp(logits).sum()) - logits[source.target(index)]
        count += 1
    return right, loss, count


@pytest.mark.parametrize(("count", "broken", "threads"), [(1, (), 0), (8, (), 0), (9, (), 3), (21, (0, 7, 8, 20), 2)])
def test_it_is_the_direct_count_of_the_images_that_can_be_decoded(
    count: int, broken: tuple[int, ...], threads: int
) -> None:
    network, source = make_network(), Pictures(count, broken)
    right, loss, images = count_directly(network, source)
    named: list[Skipped] = []
    result = measured(network, source, batch_size=8, readers=Readers(threads), on_skip=named.append)
    assert result["accuracy"] == right / images
    assert result["cross_entropy"] == pytest.approx(loss / images, rel=1e-5)
    assert result["images"] == images == count - len(broken) and result["skipped"] == len(broken)
    assert [item.key for item in named] == [f"picture {index}" for index in broken]
    assert all("not an image" in item.reason for item in named)


def test_nothing_decodable_is_0_of_0() -> None:
    result = measured(make_network(), Pictures(5, broken=(0, 1, 2, 3, 4)), batch_size=4)
    assert result == {"accuracy": 0, "cross_entropy": 0, "images": 0, "skipped": 5}


@pytest.mark.parametrize("training", [True, False])
def test_the_network_is_left_as_it_was(training: bool) -> None:
    network = make_network(dropout=0.5, stochastic_depth=0.5).train(training)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    random_before = torch.get_rng_state()
    source = Pictures(20)
    first = measured(network, source, batch_size=8)
    assert all(module.training is training for module in network.modules())
    assert first == measured(network, source, batch_size=8), "dropout was on"
    assert torch.equal(random_before, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.slow
def test_it_measures_in_float32_what_was_trained_in_bf16(tiny: Callable[..., TrainConfig]) -> None:
    kinds: dict[bool, set[torch.dtype]] = {True: set(), False: set()}

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, nn.Linear):
            kinds[module.training].add(output.dtype)

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        train(tiny(precision="bf16", steps=2))
    finally:
        handle.remove()
    assert kinds == {True: {torch.bfloat16}, False: {torch.float32}}


class Tagged(Pictures):
    """The same pictures with any number of labels each."""

    def target(self, index: int) -> tuple[int, ...]:
        return tuple(number for number in range(3) if (int(self.labels[index]) + index) >> number & 1)


@pytest.mark.parametrize("broken", [(), (2, 11)])
def test_several_labels_equal_a_direct_count(broken: tuple[int, ...]) -> None:
    network, source = make_network(), Tagged(13, broken)
    result = measured(network, source, batch_size=5, readers=Readers(0))
    decoded = [index for index in range(13) if index not in broken]
    images = PREPROCESS.normalise(torch.from_numpy(source.images[decoded].transpose(0, 3, 1, 2).copy()))
    with torch.no_grad():
        logits = network.eval()(images).double()
    truth = np.array([[number in source.target(index) for number in range(3)] for index in decoded])
    hits = [truth[row, int(logits[row].argmax())] for row in range(len(decoded))]
    probabilities = torch.sigmoid(logits).numpy()
    losses = -(truth * np.log(probabilities) + ~truth * np.log(1 - probabilities)).sum(axis=1)
    precisions = []
    for number in range(3):
        ranked = [truth[row, number] for row in sorted(range(len(decoded)), key=lambda row: -logits[row, number])]
        found = [sum(ranked[: place + 1]) / (place + 1) for place, is_true in enumerate(ranked) if is_true]
        precisions += [np.mean(found)] if found else []
    assert result["accuracy"] == pytest.approx(np.mean(hits)) and result["images"] == len(decoded)
    assert result["cross_entropy"] == pytest.approx(losses.mean(), rel=1e-5)
    assert result["mean_average_precision"] == pytest.approx(np.mean(precisions))


class Measured(Pictures):
    """The same pictures with two numbers each: the brightness of their halves. Some numbers are unknown."""

    target_kind = "numbers"

    def __init__(self, count: int, broken: tuple[int, ...] = ()) -> None:
        super().__init__(count, broken)
        self.classes = ("left", "right")

    def target(self, index: int) -> tuple[float, ...] | None:  # type: ignore[override]
        if index % 7 == 3:
            return None
        left, right = (float(half.mean()) for half in np.split(self.images[index], 2, axis=1))
        return (left, math.nan) if index % 5 == 4 else (left, right)


def number_bundle(source: Measured) -> Bundle:
    return Bundle(make_network(num_classes=2), source.classes, PREPROCESS, output="numbers")


def errors_directly(bundle: Bundle, source: Measured) -> dict[str, np.ndarray]:
    """Return R², mean absolute error and root mean squared error of each number, by scikit-learn."""
    rows = [index for index in range(len(source)) if index not in source.broken and source.target(index) is not None]
    predicted = np.array([one.values for one in bundle.predict([source.images[row] for row in rows])])
    truth = np.array([source.target(row) for row in rows])
    known = ~np.isnan(truth)
    return {
        name: np.array([metric(truth[known[:, one], one], predicted[known[:, one], one]) for one in range(2)])
        for name, metric in (
            ("r2", reference.r2_score),
            ("mean_absolute_error", reference.mean_absolute_error),
            ("root_mean_squared_error", reference.root_mean_squared_error),
        )
    }


def test_errors_of_numbers_are_scikit_learns() -> None:
    source = Measured(40, broken=(2, 11))
    bundle = number_bundle(source)
    expected = errors_directly(bundle, source)
    streamed = NumberErrors()(Outputs(bundle, batch_size=7), source, source)
    found = ByRegression(bootstrap=100)(Outputs(bundle, batch_size=7), source, source)
    for name, each in expected.items():
        low, high = (found[f"left:{name}_{end}"] for end in ("low", "high"))
        assert low < found[f"left:{name}"] < high
        assert [found[f"{output}:{name}"] for output in source.classes] == pytest.approx(each.tolist(), rel=1e-4)
    assert streamed["r2"] == pytest.approx(found["r2"]) == pytest.approx(expected["r2"].mean(), rel=1e-4)
    assert streamed["standardised_error"] == pytest.approx(found["standardised_error"])
    errors = [streamed[f"{output}:mean_absolute_error"] for output in source.classes]
    assert errors == pytest.approx(expected["mean_absolute_error"].tolist(), rel=1e-4)
    assert "mean_absolute_error" not in {*found, *streamed}, "units can differ"
    assert (streamed["images"], streamed["skipped"]) == (found["images"], found["skipped"]) == (32, 2)
    assert found["unlabelled"] == 6
    assert "r2_low" not in ByRegression(bootstrap=0)(Outputs(bundle), source, source)


def test_without_a_known_number_there_is_no_error_to_validate_by() -> None:
    source = Measured(5, broken=(0, 1, 2, 4))
    assert NumberErrors()(Outputs(number_bundle(source)), source, source) == {"images": 0, "skipped": 4}


def test_heads_and_targets_of_other_kinds_are_refused() -> None:
    classes, numbers = Pictures(7), Measured(7)
    bundle = number_bundle(numbers)
    with pytest.raises(DataError, match="regression needs numbers, but the targets of this data are classes"):
        ByRegression()(Outputs(bundle), classes, classes)
    named = Bundle(make_network(), classes.classes, PREPROCESS)
    with pytest.raises(ConfigError, match="regression measures predicted numbers, but this model predicts classes"):
        ByRegression()(Outputs(named), numbers, numbers)
    other = Bundle(bundle.network, ("right", "left"), PREPROCESS, output="numbers")
    with pytest.raises(DataError, match="the model predicts right, left, but the targets of this data are left, right"):
        ByRegression()(Outputs(other), numbers, numbers)


def test_features_of_numbers_are_for_linear_and_knn() -> None:
    source = Measured(40)
    outputs = Outputs(Bundle(make_network(num_classes=0), (), PREPROCESS))
    found = measure(evaluators_of("linear,knn", {"knn": {"k": [3]}}), outputs, source, source)
    features = outputs.features(source)
    known = features.truth.known
    rows = features.features[known], features.truth.rows(known)
    linear = linear_probe(*rows, *rows)
    assert found["linear_r2"] == linear.metrics["r2"] and found["linear_penalty"] == linear.penalty
    assert found["images"] == found["training_images"] == known.sum() == 34
    assert {"knn_3_r2", "left:knn_3_mean_absolute_error", "linear_standardised_error"} <= set(found)
