"""Tests of evaluators by name against the functions and the network that they use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.evaluation.memory import MemorySource
from vitrail.data.pipeline import Readers
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import truth_of
from vitrail.data.targets import Target
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.classifiers.linear import few_shot, linear_probe
from vitrail.evaluation.classifiers.nearest import knn
from vitrail.evaluation.evaluators import evaluators_of, measure
from vitrail.evaluation.frozen import ByFewShot, ByLinear, ByNeighbours
from vitrail.evaluation.head import ByAccuracy
from vitrail.evaluation.outputs import Outputs
from vitrail.models.variants import create
from vitrail.tasks.classification import Accuracy
from vitrail.weights.answers import OutputKind
from vitrail.weights.bundle import Bundle

CLASSES = ("a", "b", "c")
PREPROCESS = Preprocess(image_size=(14, 21), channels=3, mean=(0.3,), std=(0.4,))
HERE = Readers(0)


class Pictures(MemorySource):
    """Random images. Those of a class are brighter in one channel."""

    def __init__(self, count: int, seed: int = 0, *, labels: list[Target] | None = None, **more: Any) -> None:
        random = np.random.default_rng(seed)
        labels = [index % 3 for index in range(count)] if labels is None else labels
        images = random.integers(0, 200, (count, 9, 12, 3), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            if isinstance(label, int):
                image[..., label] += 40
        super().__init__(images, labels, **more, prefix=f"{seed}/")


def make_bundle(classes: tuple[str, ...] = CLASSES, seed: int = 3, **fields: int) -> Bundle:
    torch.manual_seed(seed)
    network = create(
        "ViT-Pico/7", image_size=(14, 21), num_classes=len(classes), width=16, depth=2, heads=2, mlp_width=32,
        position_std=0.5, **fields,
    )  # fmt: skip
    if classes:
        torch.nn.init.normal_(network.head.weight)
    return Bundle(network, classes, PREPROCESS)


def make_outputs(bundle: Bundle | None = None, **options: object) -> Outputs:
    return Outputs(bundle or make_bundle(), batch_size=7, readers=HERE, **options)  # type: ignore[arg-type]


def counted(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make a bundle's network record the number of images in each call of `embed`."""
    seen: list[int] = []

    def counting(network: Any, images: Tensor) -> Tensor:
        seen.append(len(images))
        return type(network).embed(network, images)

    monkeypatch.setattr(bundle.network, "embed", MethodType(counting, bundle.network))
    return seen


def embedded(bundle: Bundle, source: Pictures, rows: list[int] | None = None) -> np.ndarray:
    """Return the features of some samples, computed by the bundle itself."""
    return bundle.embed([source.images[row] for row in (range(len(source)) if rows is None else rows)]).numpy()


@pytest.mark.slow
def test_few_shot_learns_from_the_layer_of_the_original_and_the_others_from_the_embedding() -> None:
    bundle, train, held_out = make_bundle(head_hidden=5), Pictures(36), Pictures(20, seed=5)
    for evaluator, layer in (
        (ByFewShot(shots=(2,)), "head-inputs"),
        (ByLinear(), "embedding"),
        (ByNeighbours(), "embedding"),
    ):
        assert evaluator.features == layer
        found = {}
        for choice in ("head-inputs", "embedding"):
            outputs = make_outputs(bundle)
            found[choice] = replace(evaluator, features=choice)(outputs, train, held_out)
            assert outputs.features(train, choice).width == {"head-inputs": 5, "embedding": 16}[choice]
        assert evaluator(make_outputs(bundle), train, held_out) == found[layer]


def test_without_a_hidden_layer_both_layers_are_the_same_features() -> None:
    outputs, source = make_outputs(), Pictures(9)
    assert outputs.features(source, "head-inputs") is outputs.features(source)
    assert outputs.has_features(source, "head-inputs")


@pytest.mark.parametrize("output", ["softmax", "sigmoid"])
def test_accuracy_is_what_training_measures_with_intervals_around_it(output: OutputKind) -> None:
    source, bundle = Pictures(40, broken=(3, 17)), replace(make_bundle(), output=output)
    found = ByAccuracy(bootstrap=200)(make_outputs(bundle), source, source)
    known = Accuracy()(make_outputs(bundle), source, source)
    assert found["accuracy"] == known["accuracy"] and 0 < known["accuracy"] < 1
    assert found["cross_entropy"] == pytest.approx(known["cross_entropy"], rel=1e-5)
    assert (found["images"], found["skipped"]) == (38, 2)
    for name in ("accuracy", "balanced_accuracy", "cross_entropy"):
        assert found[f"{name}_low"] < found[name] < found[f"{name}_high"]
    assert not [name for name in ByAccuracy(bootstrap=0)(make_outputs(bundle), source, source) if "_low" in name]


def test_classes_in_another_order_are_found_by_their_names() -> None:
    notes: list[str] = []
    straight = Pictures(30)
    turned = Pictures(30, labels=[2 - index % 3 for index in range(30)], classes=("c", "b", "a"))
    turned.images = straight.images
    bundle = make_bundle()
    found = ByAccuracy(0)(make_outputs(bundle, on_note=notes.append), turned, turned)
    assert found == ByAccuracy(0)(make_outputs(bundle), straight, straight)
    assert notes == ["the data's classes are matched with the model's by their names"]


def test_samples_without_a_label_are_left_out_and_counted() -> None:
    labels: list[Target] = [index % 3 if index % 4 else None for index in range(20)]
    source = Pictures(20, labels=labels)
    found = ByAccuracy(0)(make_outputs(), source, source)
    assert (found["images"], found["unlabelled"]) == (15, 5)
    assert ByNeighbours((1,))(make_outputs(), source, source)["images"] == 15


def check_shots(metrics: dict[str, float], accuracies: dict[int, tuple[float, ...]]) -> None:
    for count, values in accuracies.items():
        assert metrics[f"fewshot_{count}"] == pytest.approx(np.mean(values))
        assert metrics[f"fewshot_{count}_deviation"] == pytest.approx(np.std(values, ddof=1))


def test_metrics_of_one_name_and_unknown_layers_are_refused(types_unchecked: None) -> None:
    outputs, source = make_outputs(), Pictures(6)
    measured: dict[str, Any] = {
        name: lambda *given, value=value: {"mine": value, "no": np.nan, "images": 6 * value}
        for name, value in (("a", 1.0), ("b", 2.0))
    }
    with pytest.raises(ConfigError, match="evaluator b: another evaluator measures another 'mine'"):
        measure(measured, outputs, source, source)
    assert measure({"a": measured["a"], "c": measured["a"]}, outputs, source, source)["mine"] == 1
    timed: Any = {"timed": lambda *given: {"time": 3, "step": np.float32(2)}}  # reserved in a run's journal only
    assert measure(timed, outputs, source, source) == {"time": 3.0, "step": 2.0}
    with pytest.raises(ConfigError, match=r"^layer='head' is not one of"):
        outputs.features(source, "head")  # type: ignore[arg-type]


@pytest.mark.slow
def test_evaluators_measure_the_features_that_the_bundle_embeds() -> None:
    bundle, train, test = make_bundle(), Pictures(45, 1), Pictures(21, 2)
    outputs = make_outputs(bundle)
    known = embedded(bundle, train), truth_of(train), embedded(bundle, test), truth_of(test)
    linear = linear_probe(*known, penalties=(1.0, 0.1), held_out=0.2)
    found = ByLinear((1.0, 0.1), 0.2)(outputs, train, test)
    assert found == {
        "linear": linear.metrics["accuracy"], "linear_penalty": linear.penalty, "training_images": 45, "images": 21,
        "skipped": 0,
    }  # fmt: skip
    votes = knn(*known, k=(1, 4), temperature=0.5)
    found = ByNeighbours((1, 4), 0.5)(outputs, train, test)
    assert [found["knn_1"], found["knn_4"]] == [metrics["accuracy"] for metrics in votes.values()]
    shots = few_shot(*known, shots=(1, 6), seeds=2, l2="loo")
    found = ByFewShot((1, 6), 2, "loo")(outputs, train, test)
    check_shots(found, shots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_formats_of_the_caller_change_no_metric(dtype: torch.dtype) -> None:
    outputs, train, test = make_outputs(), Pictures(24, 1), Pictures(12, 2)

    def found() -> list[dict[str, float]]:
        return [one(outputs, train, test) for one in (ByLinear((1.0,)), ByNeighbours((1, 4)), ByFewShot((1,), 2))]

    expected = found()
    try:
        torch.set_default_dtype(dtype)
        with torch.autocast("cpu"):
            assert found() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_few_shots_need_the_features_of_what_is_drawn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[Target] = [index % 3 if index % 11 else None for index in range(120)]
    bundle, train, test = make_bundle(), Pictures(120, 1, labels=labels), Pictures(9, 2)
    rows = [row for row in range(120) if labels[row] is not None]
    known = embedded(bundle, train, rows), truth_of(train, rows), embedded(bundle, test), truth_of(test)
    seen = counted(bundle, monkeypatch)
    found = ByFewShot((2, 3), 3)(make_outputs(bundle), train, test)
    assert sum(seen) <= 3 * 3 * 3 + 9
    check_shots(found, few_shot(*known, shots=(2, 3), seeds=3))
    one = ByFewShot((2,), 1)(make_outputs(bundle), train, test)
    assert "fewshot_2" in one and "fewshot_2_deviation" not in one, "one seed has no deviation"


def test_few_shots_refuse_images_of_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    train = Pictures(30, 1)
    monkeypatch.setattr(train, "key", lambda index: f"{index // 2}")
    with pytest.raises(DataError, match="the same key"):
        ByFewShot((2,), 2)(make_outputs(), train, Pictures(9, 2))


@pytest.mark.slow
def test_few_shots_learn_from_others_where_some_cannot_be_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tuple(row for row in range(60) if row % 10 in (0, 3, 4, 7))
    train, test, bundle = Pictures(60, 1, broken=broken), Pictures(9, 2), make_bundle()
    outputs, evaluator = make_outputs(bundle), ByFewShot((2,), 3)
    seen = counted(bundle, monkeypatch)
    found = evaluator(outputs, train, test)
    assert sum(seen) < 60 and 0 < len(outputs.skipped) < len(broken)
    after = make_outputs(bundle)
    after.features(train)
    assert evaluator(after, train, test) == found
    with pytest.raises(DataError, match="none of 9 training images can be decoded"):
        evaluator(outputs, Pictures(9, broken=tuple(range(9))), test)
    few = Pictures(9, broken=(2, 5))
    with pytest.raises(DataError, match=r"3 shots need 3 training images per class; these classes have fewer: c \(1\)"):
        ByFewShot((3,))(outputs, few, test)


@pytest.mark.parametrize(("images", "shots"), [(90, {1, 5, 10, 25}), (36, {1, 5, 10}), (4, {1})])
def test_shots_go_as_far_as_every_class_has_images(images: int, shots: set[int]) -> None:
    outputs, train, test = make_outputs(), Pictures(images), Pictures(9, 1)
    figures = ByFewShot()(outputs, train, test)
    assert {int(name.split("_")[1]) for name in figures if name.startswith("fewshot")} == shots
    every = ByFewShot(allow_fewer=True)(outputs, train, test)
    assert {int(name.split("_")[1]) for name in every if name.startswith("fewshot")} == shots
    uneven = Pictures(30, labels=[0] * 26 + [1, 1, 2, 2])
    assert "fewshot_25" in ByFewShot(allow_fewer=True)(outputs, uneven, test) and "fewshot_5" not in ByFewShot()(
        outputs, uneven, test
    )


@pytest.mark.slow
def test_images_of_several_labels_are_for_linear_and_knn() -> None:
    labels: list[Target] = [(index % 3,) if index % 2 else (0, 2) for index in range(24)]
    source = Pictures(24, labels=labels)
    outputs = make_outputs()
    found = measure(evaluators_of("accuracy,linear,knn"), outputs, source, source)
    shares = ("mean_average_precision", "linear_mean_average_precision", "knn_5_mean_average_precision", "exact_match")
    assert all(0 <= found[name] <= 1 for name in shares)


@pytest.mark.parametrize("name", ["accuracy", "linear", "fewshot", "knn"])
def test_data_without_labels_is_refused_before_anything_is_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make_bundle()
    seen = counted(bundle, monkeypatch)
    with pytest.raises(DataError, match=rf"none of 6 images has a label, but {name} needs to know their classes"):
        measure(evaluators_of(name), make_outputs(bundle), Pictures(99), Pictures(6, labels=[None] * 6))
    assert not seen


def test_nothing_that_can_be_decoded_is_an_error() -> None:
    with pytest.raises(DataError, match="none of 3 images can be decoded; the first error: "):
        ByNeighbours()(make_outputs(), Pictures(3, broken=(0, 1, 2)), Pictures(3))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fewshot", {"shot": [1]}, r"evaluator fewshot: unknown field 'shot'; nearest: shots"),
        ("fewshot", {"l2": 0}, r"evaluator fewshot: l2=0.0 is not above 0; loo"),
        ("linear", {"held_out": 1}, r"evaluator linear: penalty_share=1.0 is not in"),
        ("linear", {"penalties": [1, -1]}, r"evaluator linear: penalties=-1.0 is not above 0"),
        ("knn", {"k": ["five"]}, r"evaluator knn: k=\('five',\) is not a list of whole numbers"),
    ],
)
def test_wrong_settings_are_named_with_the_evaluator(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluators_of(name, {name: settings})


def test_settings_of_evaluators_that_are_not_named_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"knn.*linear,accuracy"):
        evaluators_of("linear,accuracy", {"linear": {}, "knn": {"k": [5]}})


def test_settings_are_taken_as_files_give_them() -> None:
    found = evaluators_of("fewshot, knn", {"fewshot": {"l2": 4, "shots": [2, 3]}, "knn": {"temperature": 1}})
    assert found == {"fewshot": ByFewShot((2, 3), l2=4.0), "knn": ByNeighbours(temperature=1.0)}
    assert evaluators_of("fewshot", {"fewshot": {"l2": "loo"}}) == {"fewshot": ByFewShot(l2="loo")}


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ByFewShot(l2="foo"), "l2='foo' is not a number or one of 'loo'"),  # type: ignore[arg-type]
        (lambda: ByFewShot(allow_fewer="no"), "allow_fewer='no' is not true or false"),  # type: ignore[arg-type]
        (lambda: ByNeighbours("5"), "k='5' is not a list of whole numbers"),  # type: ignore[arg-type]
        (lambda: Outputs("small"), "bundle='small' is not an object with the fields of Bundle"),  # type: ignore[arg-type]
        (lambda: ByLinear(penalties=1.0), "penalties=1.0 is not a list of numbers"),  # type: ignore[arg-type]
    ],
)
def test_settings_of_another_type_are_refused_at_once(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
