"""Tests of a model on disk: a saved model loads unchanged, predictions are the network's, and damage is detected."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import pickle
import re
import resource
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn
from torch.nn.utils import prune

import vitrail
from tests.make import assert_close, assert_same, dense_bundle, encode, make_bundle
from vitrail.errors import BundleError, ConfigError, DataError, DestinationError, SaveError, UndecodableImage
from vitrail.export.export import check_export
from vitrail.models.variants import build
from vitrail.models.vit import VisionTransformer
from vitrail.weights.answers import Detections, NumberPrediction, Prediction, rank
from vitrail.weights.bundle import Bundle, load_bundle, write_bundle
from vitrail.weights.load import convert


def images(count: int, *shape: int) -> list[np.ndarray]:
    """Return random uint8 arrays, by default of the size that the network takes."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, shape or (12, 10, 3), dtype=np.uint8) for _ in range(count)]


def logits(bundle: Bundle, arrays: list[np.ndarray]) -> Tensor:
    """Return the network's logits for images of its own size, with an independent normalisation."""
    pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        return bundle.network.eval()((pixels / 255 - 0.4) / 0.25)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def rewrite(folder: Path, **fields: Any) -> None:
    """Replace fields of `model.json` at the top level."""
    path = folder / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def replace_weights(folder: Path, data: bytes) -> None:
    """Replace the weights, and record their size and hash."""
    (folder / "model.safetensors").write_bytes(data)
    rewrite(folder, weights={"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})


@pytest.fixture
def saved(bundle: Bundle, tmp_path: Path) -> Path:
    return bundle.save(tmp_path / "model")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pool": "gap", "head_hidden": 5, "activation": "gelu-tanh", "norm_eps": 1e-5, "output": "sigmoid"},
        {"num_classes": 0},
        {"channels": 1, "dropout": 0.1, "stochastic_depth": 0.2, "position_std": 0.3},
    ],
)
def test_what_is_saved_is_what_is_loaded(tmp_path: Path, fields: dict[str, Any]) -> None:
    bundle = make_bundle(**fields)
    path = bundle.save(tmp_path / "out")
    assert path == tmp_path / "out" and sorted(snapshot(path)) == ["model.json", "model.safetensors"]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    loaded = load_bundle(path)
    assert torch.equal(torch.get_rng_state(), before), "loading draws no random numbers"
    assert_same(bundle, loaded)
    for name in ("classes", "preprocess", "output", "precision", "metrics", "provenance"):
        assert getattr(loaded, name) == getattr(bundle, name), name
    assert not loaded.network.training and loaded.device == torch.device("cpu")
    assert all(parameter.requires_grad for parameter in loaded.network.parameters())


def test_the_same_model_gives_the_same_bytes_in_plain_safetensors(bundle: Bundle, saved: Path, tmp_path: Path) -> None:
    assert snapshot(make_bundle().save(tmp_path / "again")) == snapshot(saved)
    assert set(load_file(saved / "model.safetensors")) == set(bundle.network.state_dict())
    description = json.loads((saved / "model.json").read_text(encoding="utf-8"))
    assert description["classes"] == ["rose", "tulip", "黒い花 / black"] and description["format"] == 2
    assert len({file.stat().st_mode for file in saved.iterdir()}) == 1, "all files have the same permissions"


@pytest.mark.parametrize("count", [255, 256])
def test_masks_of_too_many_classes_are_refused(count: int) -> None:
    made = dense_bundle("patches")
    names = tuple(map(str, range(count)))
    network = build(dataclasses.replace(made.network.config, num_classes=count))
    with pytest.raises(BundleError, match="at most 255 classes") if count > 255 else contextlib.nullcontext():
        Bundle(network, names, made.preprocess, output="mask")


def test_fields_that_a_file_lacks_take_their_defaults_and_unknown_ones_are_named(saved: Path, bundle: Bundle) -> None:
    description = json.loads((saved / "model.json").read_text(encoding="utf-8"))
    for name in ("output", "precision", "metrics", "provenance"):
        del description[name]
    for name in ("position_resize", "norm_eps", "patch_dropout", "attention", "root"):
        description["config"].pop(name, None)
    del description["preprocess"]["pad_value"]
    (saved / "model.json").write_text(json.dumps(description), encoding="utf-8")
    loaded = load_bundle(saved)
    assert (loaded.output, loaded.precision, loaded.metrics) == ("softmax", "float32", {})
    assert (loaded.provenance, loaded.notes) == ({}, ())
    assert loaded.network.config == bundle.network.config and loaded.preprocess == bundle.preprocess
    rewrite(saved, extra=1, another={"deep": None})
    (note,) = load_bundle(saved).notes
    assert "unknown fields are ignored: another, extra" in note


@pytest.mark.parametrize("output", ["softmax", "sigmoid"])
def test_predictions_are_the_networks(output: str) -> None:
    bundle, arrays = make_bundle(output=output), images(6)
    expected = logits(bundle, arrays)
    expected = expected.softmax(1) if output == "softmax" else expected.sigmoid()
    assert len({int(index) for index in expected.argmax(1)}) > 1
    for prediction, row in zip(bundle.predict(arrays, batch_size=4), expected, strict=True):
        assert isinstance(prediction, Prediction)
        assert dict(prediction.ranking) == pytest.approx(dict(zip(bundle.classes, row.tolist(), strict=True)), abs=1e-6)
        values = [value for _, value in prediction.ranking]
        assert values == sorted(values, reverse=True)
        assert (prediction.label, prediction.probability) == prediction.ranking[0]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("output", ["softmax", "sigmoid", "numbers"])
def test_outputs_that_are_not_finite_are_refused(output: str, wrong: float) -> None:
    bundle = make_bundle(output=output)
    images = [np.full((7, 9, 3), level, np.uint8) for level in (0, 90)]
    assert bundle.embed(images).isfinite().all()
    with torch.no_grad():
        bundle.network.head.bias[0] = wrong
    with pytest.raises(BundleError, match="not finite for 2 of 2 images"):
        bundle.predict(images)
    with torch.no_grad():
        bundle.network.norm.bias.fill_(wrong)
    with pytest.raises(BundleError, match="not finite for 2 of 2 images"):
        bundle.embed(images)


@given(
    rows=st.lists(st.tuples(*[st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])] * 7), min_size=1, max_size=4),
    count=st.integers(1, 7),
)
def test_equally_likely_classes_keep_their_order(rows: list[tuple[float, ...]], count: int) -> None:
    classes = tuple("abcdefg")
    for row, prediction in zip(rows, rank(torch.tensor(rows), classes, count), strict=True):
        order = sorted(range(7), key=lambda index: (-row[index], index))[:count]
        assert [name for name, _ in prediction.ranking] == [classes[index] for index in order]
        assert [value for _, value in prediction.ranking] == pytest.approx([row[index] for index in order])


def test_a_ranking_of_few_classes_makes_no_list_of_all() -> None:
    probabilities = torch.rand(2, 200_000, generator=torch.Generator().manual_seed(0))
    classes = tuple(map(str, range(200_000)))
    rank(probabilities[:, :3], classes[:3], 3)  # the first call also compiles the checks of types
    tracemalloc.start()
    predictions = rank(probabilities, classes, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert [prediction.label for prediction in predictions] == [str(int(row.argmax())) for row in probabilities]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("top", 1.5), ("top", True), ("top", 0), ("batch_size", "2"), ("batch_size", 1.5),
        ("batch_size", 0), ("precision", ""), ("precision", "bfloat16"), ("undecodable", None), ("undecodable", "skip"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(argument: str, value: Any, bundle: Bundle, types_unchecked: None) -> None:
    with pytest.raises(ConfigError, match=f"^{argument}={value!r} is "):
        bundle.predict(images(1), **{argument: value})


@pytest.mark.parametrize("classes", ["abc", (1, 2, 3), {"a"}, None], ids=repr)
def test_classes_that_are_no_list_of_names_are_refused(classes: Any, bundle: Bundle, types_unchecked: None) -> None:
    with pytest.raises(BundleError, match=r"^classes="):
        dataclasses.replace(bundle, classes=classes)
    with pytest.raises(BundleError, match="output='odds' is not one of"):
        dataclasses.replace(bundle, output="odds")
    assert dataclasses.replace(bundle, classes=["a", "b", "c"]).classes == ("a", "b", "c")


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metrics", None), ("metrics", [1.0]), ("metrics", {"a": "high"}), ("provenance", None), ("provenance", [1]),
        ("notes", "resized"), ("preprocess", None), ("output", ["softmax"]), ("precision", None), ("engine", "onnx"),
        ("words", "clip"),
    ],
)  # fmt: skip
def test_fields_of_another_type_are_refused_before_they_are_saved(field: str, value: Any, bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=rf"^{field}\b.* is not "):
        dataclasses.replace(bundle, **{field: value})


def test_metrics_of_numpy_and_pytorch_are_saved(bundle: Bundle, tmp_path: Path, types_unchecked: None) -> None:
    metrics: Any = {"a": np.float32(0.5), "b": torch.tensor(2), "c": np.array(1.0)}
    found = load_bundle(dataclasses.replace(bundle, metrics=metrics).save(tmp_path / "model")).metrics
    assert found == {"a": 0.5, "b": 2.0, "c": 1.0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_weights_of_other_number_formats_are_saved_in_float32(
    dtype: torch.dtype, tmp_path: Path, types_unchecked: None
) -> None:
    bundle = make_bundle()
    bundle.network.to(dtype)
    with pytest.raises(ConfigError, match=rf"{dtype}, in which precision='float32' .* network\.float\(\)"):
        bundle.predict(images(1))
    loaded = vitrail.load(bundle.save(tmp_path / "model"), device="cpu")
    bundle.network.float()
    assert_same(loaded, bundle)
    assert loaded.predict(images(2)) == bundle.predict(images(2))
    with pytest.raises(ConfigError, match="stored='float16' is not one of"):
        bundle.save(tmp_path / "other", stored=cast(Any, "float16"))


def test_one_image_and_more_classes_than_there_are_can_be_asked_for(tmp_path: Path) -> None:
    bundle = make_bundle()
    (tmp_path / "a.png").write_bytes(encode(images(1)[0], "PNG"))
    (expected,) = bundle.predict(images(1))
    for one in (tmp_path / "a.png", str(tmp_path / "a.png"), (tmp_path / "a.png").read_bytes()):
        assert bundle.predict(one, top=9) == [expected]


def test_numbers_are_the_networks_outputs(tmp_path: Path) -> None:
    bundle, arrays = make_bundle(output="numbers"), images(5)
    assert load_bundle(bundle.save(tmp_path / "model")).output == "numbers"
    for prediction, row in zip(bundle.predict(arrays, batch_size=2), logits(bundle, arrays), strict=True):
        assert isinstance(prediction, NumberPrediction)
        assert prediction.names == bundle.classes and prediction.values == pytest.approx(row.tolist(), abs=1e-5)
        assert prediction["tulip"] == prediction.values[1] and "tulip" in prediction and "lily" not in prediction
        with pytest.raises(KeyError, match="lily"):
            prediction["lily"]
    broken = bundle.predict([b"nothing", arrays[0]], undecodable="return")
    assert isinstance(broken[0], UndecodableImage) and isinstance(broken[1], NumberPrediction)
    with pytest.raises(ConfigError, match="predicts numbers, which have no probabilities"):
        bundle.probabilities(torch.zeros(1, 3))
    with pytest.raises(ConfigError, match="top=2 ranks classes, but this model predicts numbers"):
        bundle.predict(arrays, top=2)


def test_every_form_of_an_image_gives_the_same(bundle: Bundle, tmp_path: Path) -> None:
    array = images(1, 23, 31, 3)[0]
    path = tmp_path / "ros é.png"
    path.write_bytes(encode(array, "PNG"))
    forms = [path, str(path), path.read_bytes(), array, np.asfortranarray(array), Image.fromarray(array)]
    predictions = bundle.predict(forms)
    assert len(predictions) == 6 and all(prediction == predictions[0] for prediction in predictions)
    embeddings = bundle.embed(forms)
    torch.testing.assert_close(embeddings, embeddings[:1].expand(6, -1), atol=1e-5, rtol=0)


def test_an_array_of_four_axes_holds_images_and_any_other_is_one_image(bundle: Bundle) -> None:
    arrays = images(5, 13, 21, 3)
    first = arrays[:1]
    for whole, listed in ((np.stack(arrays), arrays), (arrays[0], first), (Image.fromarray(arrays[0]), first)):
        assert bundle.predict(whole) == bundle.predict(listed)
        assert torch.equal(bundle.embed(whole), bundle.embed(listed))
    plane = arrays[0][..., 0]
    grey = [plane, plane[..., None], np.repeat(plane[..., None], 3, axis=2), Image.fromarray(plane)]
    for model in (bundle, make_bundle(channels=1)):
        first_answer, *others = model.predict(grey)
        assert all(other == first_answer for other in others)
        assert model.predict(plane) == model.predict(plane[..., None]) == model.predict([plane])


@pytest.mark.parametrize(
    "given",
    [torch.zeros(3, 13, 21), np.zeros((2, 13, 21), np.uint8), 5, bytearray(), np.zeros(7, np.uint8), {"rose.jpg"}],
    ids=type,
)
def test_what_is_neither_a_list_nor_an_image_is_refused(bundle: Bundle, given: Any, types_unchecked: None) -> None:
    for method in (bundle.predict, bundle.embed):
        with pytest.raises(ConfigError, match=r"pass a list of .*\(n, h, w, 3\)"):
            method(given)


@pytest.mark.parametrize(
    "image",
    [
        None, 5, bytearray(b"x"), torch.zeros(4, 4, 3, dtype=torch.uint8),
        np.ma.masked_array(np.zeros((4, 4, 3), np.uint8), mask=True),
    ],
    ids=lambda image: type(image).__name__,
)  # fmt: skip
def test_items_that_are_no_images_are_refused(image: Any, bundle: Bundle, types_unchecked: None) -> None:
    with pytest.raises(ConfigError, match="its items must be paths, "):
        bundle.predict([image], undecodable="return")


@pytest.mark.parametrize("output", ["softmax", "numbers"])
@pytest.mark.parametrize("outputs", [2, 7])
def test_a_replaced_head_of_other_outputs_is_refused(outputs: int, output: str) -> None:
    bundle = make_bundle(output=output)
    bundle.network.head = nn.Linear(12, outputs)
    with pytest.raises(BundleError, match=rf"{outputs} outputs, but there are 3 class names; .*with_head"):
        bundle.predict(images(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("positions", ["learned", "sincos-2d"])
def test_the_default_number_format_of_pytorch_changes_no_output(dtype: torch.dtype, positions: str) -> None:
    bundle = make_bundle(positions=positions)
    colours = {"mean": (0.35 + 1e-4 * dtype.itemsize,), "std": (0.217,)}  # that no other test has used before
    bundle = dataclasses.replace(bundle, preprocess=dataclasses.replace(bundle.preprocess, **colours))
    torch.set_default_dtype(dtype)
    try:
        during = bundle.embed(images(3))
    finally:
        torch.set_default_dtype(torch.float32)
    pixels = torch.from_numpy(np.stack(images(3))).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        expected = bundle.network.embed((pixels - colours["mean"][0]) / 0.217)
    torch.testing.assert_close(during, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(bundle.embed(images(3)), during)


def test_the_default_device_of_pytorch_changes_no_output(bundle: Bundle, tmp_path: Path) -> None:
    with torch.device("meta"):  # any device but that of the network
        embeddings, predictions = bundle.embed(images(2)), bundle.predict(images(2))
        bundle.save(tmp_path / "model")
    assert torch.equal(embeddings, bundle.embed(images(2))) and predictions == bundle.predict(images(2))


def test_models_that_are_made_in_inference_mode_can_be_trained_and_saved(bundle: Bundle, tmp_path: Path) -> None:
    bundle.save(tmp_path / "model")
    with torch.inference_mode():
        loaded = vitrail.load(tmp_path / "model", device="cpu")
        made = vitrail.create("ViT-Pico/8", image_size=16, depth=1, width=12)
    for network in (loaded.network, made):
        network(torch.zeros(1, network.config.channels, *network.config.image_size)).sum().backward()
    loaded.save(tmp_path / "again")


def test_embeddings_are_what_the_head_sees() -> None:
    bundle, arrays = make_bundle(head_hidden=5), images(4)
    embeddings = bundle.embed(arrays, batch_size=3)
    assert embeddings.shape == (4, 12) and embeddings.dtype == torch.float32 and embeddings.device.type == "cpu"
    network = bundle.network
    with torch.no_grad():
        expected = network.head(torch.tanh(network.head_hidden(embeddings)))
    torch.testing.assert_close(expected, logits(bundle, arrays), atol=1e-5, rtol=1e-5)
    assert bundle.predict([]) == [] and bundle.embed([]).shape == (0, 12)


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_an_undecodable_image_takes_its_place_among_the_others(bundle: Bundle, tmp_path: Path, batch_size: int) -> None:
    good = images(3)
    path = tmp_path / "cut.png"
    path.write_bytes(encode(good[0], "PNG")[:60])
    given = [b"nothing", good[0], path, np.zeros((3, 3), np.float32), good[1], good[2], b""]
    results = bundle.predict(given, batch_size=batch_size, undecodable="return")
    assert [isinstance(result, UndecodableImage) for result in results] == [True, False, True, True, False, False, True]
    assert str(path) in str(results[2]) and "float32" in str(results[3])
    for call in (bundle.predict, bundle.embed):
        with pytest.raises(UndecodableImage, match=re.escape(str(path))):
            call([good[0], path])
    expected = bundle.predict(good)
    for result, other in zip([results[1], results[4], results[5]], expected, strict=True):
        assert isinstance(result, Prediction) and result.label == other.label
        assert dict(result.ranking) == pytest.approx(dict(other.ranking), abs=1e-6)


def test_a_path_that_does_not_exist_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rose\.jpg': No such file") as caught:
        bundle.predict([tmp_path / "rose.jpg"], undecodable="return")
    assert not isinstance(caught.value, UndecodableImage)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model.json", None, r"model is not a model: it has no model\.json"),
        ("model.safetensors", None, r"model is incomplete: model\.safetensors is missing"),
        ("model.json", lambda content: content[:-40], r"model\.json is damaged: "),
        ("model.json", lambda content: b"\xff\xfe{}", r"model\.json is damaged: "),
        ("model.json", lambda content: b"[]", r"model\.json is damaged: it must be an object"),
        ("model.json", lambda content: b'{"format": 2}', r"model\.json lacks the field architecture"),
        ("model.safetensors", lambda content: content[:-1], r"model\.safetensors was altered"),
        ("model.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1]), r"safetensors was altered"),
    ],
)
def test_a_damaged_file_is_refused(
    saved: Path, file: str, change: Callable[[bytes], bytes] | None, message: str
) -> None:
    content = (saved / file).read_bytes()
    (saved / file).unlink()
    if change is not None:
        (saved / file).write_bytes(change(content))
    with pytest.raises(BundleError, match=message):
        load_bundle(saved)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("classes", "abc", r"classes must be a list, not 'abc'"),
        ("classes", ["a", 1, "c"], r"model\.json: classes=\('a', 1, 'c'\) is not a list of texts"),
        ("classes", ["a", "b"], r"there are 2 class names, but the network has 3 outputs"),
        ("format", 3, r"has format 3, written by a newer version of Vitrail; this version reads formats up to 2"),
        ("format", "1", r"format='1' is not a whole number above 0"),
        ("format", 1, r"has format 1, which no release of Vitrail wrote"),
        ("architecture", "CNN", r"architecture='CNN' is not one of 'ViT', 'BiT'"),
        ("output", "odds", r"model\.json: output='odds' is not one of 'softmax', 'sigmoid', 'numbers'"),
        ("metrics", [], r"metrics must be a dict, not \[\]"),
        ("config", {"widht": 12}, r"'widht', which this version of Vitrail does not know; nearest: width"),
        ("config", {"width": "12"}, r"config: width='12' is not a whole number"),
        ("config", {"root": {"deep": 1}}, r"config: unknown field 'deep'"),
        ("config", {"width": 10, "heads": 3}, r"width=10 is not divisible by heads=3"),
        ("preprocess", {"size": 3}, r"preprocess has the field 'size', .* nearest: resize"),
        ("preprocess", {}, r"preprocess: image_size is missing"),
        ("preprocess", {"image_size": [10, 12]}, r"preprocessing makes images of \(3, 10, 12\), but the network takes"),
        ("weights", {}, r"model\.safetensors was altered"),
        ("precision", "bf17", r"precision='bf17' is not one of 'auto', 'bf16', 'float32'"),
    ],
)
def test_a_description_that_cannot_be_is_refused(saved: Path, name: str, value: Any, message: str) -> None:
    rewrite(saved, **{name: value})
    with pytest.raises(BundleError, match=message):
        load_bundle(saved)


def test_weights_of_another_number_format_are_refused(bundle: Bundle, saved: Path) -> None:
    replace_weights(saved, safetensors_bytes(bundle.network.half().state_dict()))
    with pytest.raises(BundleError, match=r"not float32 or bfloat16: .* is float16"):
        load_bundle(saved)


def test_weights_that_do_not_fit_are_all_named(bundle: Bundle, saved: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in bundle.network.state_dict().items()}
    del tensors["norm.weight"], tensors["prefix.cls"]
    tensors["norm.scale"] = torch.zeros(12)
    tensors["head.weight"] = torch.zeros(4, 12)
    replace_weights(saved, safetensors_bytes(tensors))
    with pytest.raises(BundleError) as caught:
        load_bundle(saved)
    first, *problems = str(caught.value).splitlines()
    assert first == f"the weights in {saved} do not fit its architecture:"
    assert sorted(line.strip() for line in problems) == [
        "misshaped: head.weight is (4, 12), the network has (3, 12)",
        "missing: norm.weight (12,)",
        "missing: prefix.cls (1, 1, 12)",
        "unexpected: norm.scale (12,)",
    ]


def test_a_pickle_in_place_of_the_weights_is_not_run(bundle: Bundle, saved: Path, tmp_path: Path) -> None:
    marker = tmp_path / "was run"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(marker)!r}, 'w').close()",)

    pickled = pickle.dumps(Evil())
    pickle.loads(pickled)
    assert marker.exists()
    marker.unlink()
    archive = io.BytesIO()
    torch.save({**bundle.network.state_dict(), "evil": Evil()}, archive)
    for data in (pickled, archive.getvalue()):
        (saved / "model.safetensors").write_bytes(data)
        with pytest.raises(BundleError, match="was altered"):
            load_bundle(saved)
        replace_weights(saved, data)
        loaded = None
        with contextlib.suppress(Exception):
            loaded = load_bundle(saved)
        assert loaded is None and not marker.exists()


@pytest.fixture
def old(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    """A folder that holds a model and has no siblings, with the bytes of its files."""
    path = make_bundle(seed=1).save(tmp_path / "kept" / "model")
    return path, snapshot(path)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "notes"), [(1_000, 0), (60_000, 100_000)], ids=["weights", "description"])
def test_a_full_disk_leaves_the_old_model(
    bundle: Bundle, old: tuple[Path, dict[str, bytes]], tmp_path: Path, limit: int, notes: int
) -> None:
    new = bundle.save(tmp_path / "new")
    assert 5_000 < (new / "model.safetensors").stat().st_size < 60_000
    bundle.provenance["notes"] = "x" * notes
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # no file of this process can grow past it
    try:
        with pytest.raises(SaveError, match="File too large"):
            bundle.save(old[0], overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    path, before = old
    assert snapshot(path) == before and [entry.name for entry in path.parent.iterdir()] == ["model"]
    bundle.save(path, overwrite=True)
    assert load_bundle(path).provenance["notes"] == "x" * notes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_model_on_the_gpu_predicts_the_same(bundle: Bundle, saved: Path) -> None:
    arrays = images(5)
    loaded = vitrail.load(saved, device="cuda")
    assert isinstance(loaded.network, VisionTransformer) and loaded.device.type == "cuda"
    for one, other in zip(loaded.predict(arrays), bundle.predict(arrays), strict=True):
        assert dict(one.ranking) == pytest.approx(dict(other.ranking), abs=1e-3)


def test_a_model_takes_the_place_of_another_on_request_and_through_a_link(
    bundle: Bundle, old: tuple[Path, dict[str, bytes]]
) -> None:
    path, before = old
    (path.parent / "link").symlink_to(path)
    with pytest.raises(DestinationError, match="exists already; choose another folder, or replace it"):
        bundle.save(path)
    assert snapshot(path) == before
    for place in (path, path.parent / "link"):
        bundle.save(place, overwrite=True)
        assert_same(load_bundle(path), bundle)
    assert sorted(snapshot(path)) == ["model.json", "model.safetensors"]
    assert (path.parent / "link").is_symlink()
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["link", "model"]


@pytest.mark.parametrize("is_model", [False, True])
def test_saving_never_deletes_other_files(bundle: Bundle, tmp_path: Path, is_model: bool) -> None:
    folder = tmp_path / "mine"
    if is_model:
        bundle.save(folder)
    folder.mkdir(exist_ok=True)
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(DestinationError, match=r"mine holds files that Vitrail did not write \(thesis.txt\)"):
        bundle.save(folder, overwrite=True)
    with pytest.raises(DestinationError, match=r"thesis\.txt is a file; choose another path for the folder to write"):
        bundle.save(folder / "thesis.txt", overwrite=True)
    write_bundle(bundle, folder)  # as a run does with its own model
    assert (folder / "thesis.txt").read_text() == "years of work"
    assert sorted(entry.name for entry in folder.iterdir()) == ["model.json", "model.safetensors", "thesis.txt"]


def test_weights_are_rounded_to_bfloat16_in_the_file_alone(tmp_path: Path) -> None:
    bundle = make_bundle(num_classes=0)
    before = {name: tensor.clone() for name, tensor in bundle.network.state_dict().items()}
    whole, half = bundle.save(tmp_path / "whole"), bundle.save(tmp_path / "half", stored="bfloat16")
    assert all(torch.equal(before[name], tensor) for name, tensor in bundle.network.state_dict().items())
    values = sum(tensor.numel() for tensor in before.values())
    for path, size in ((whole, 4), (half, 2)):
        stored = load_file(path / "model.safetensors").values()
        assert sum(tensor.nbytes for tensor in stored) == size * values
    loaded = vitrail.load(half, device="cpu").network.state_dict()
    for name, tensor in before.items():
        assert loaded[name].dtype == torch.float32 and torch.equal(loaded[name], tensor.bfloat16().float()), name
    again = load_bundle(half).save(tmp_path / "again", stored="bfloat16")
    assert (again / "model.safetensors").read_bytes() == (half / "model.safetensors").read_bytes()


def test_a_network_without_a_head_says_so() -> None:
    bundle = make_bundle(num_classes=0)
    with pytest.raises(ConfigError, match="has no head, so it cannot predict; fine-tune it"):
        bundle.predict(images(1))
    assert bundle.embed(images(1)).shape == (1, 12)


def test_the_precision_is_saved_and_used(bundle: Bundle, tmp_path: Path) -> None:
    lower = dataclasses.replace(bundle, precision="bf16")
    loaded = load_bundle(lower.save(tmp_path / "model"))
    assert loaded.precision == "bf16"
    arrays = images(2, 20, 17, 3)
    assert loaded.predict(arrays) == bundle.predict(arrays, precision="bf16") != bundle.predict(arrays)
    assert loaded.predict(arrays, precision="float32") == bundle.predict(arrays)
    assert not torch.equal(loaded.embed(arrays), bundle.embed(arrays))
    with pytest.raises(BundleError, match="the layout timm cannot store precision='bf16', which only vitrail"):
        convert(tmp_path / "model", tmp_path / "timm", "timm")


def test_a_network_of_torch_compile_is_used_without_it(bundle: Bundle, tmp_path: Path) -> None:
    compiled = dataclasses.replace(bundle, network=torch.compile(bundle.network, backend="eager"))
    assert compiled.network is bundle.network and any("torch.compile" in note for note in compiled.notes)
    compiled.network = torch.compile(bundle.network, backend="eager")
    arrays = images(2, 20, 17, 3)
    assert compiled.predict(arrays) == bundle.predict(arrays)
    assert_close(bundle, load_bundle(compiled.save(tmp_path / "model")), atol=0, rtol=0)


CHANGES: dict[str, Callable[[Any], object]] = {
    "pruned": lambda network: prune.l1_unstructured(network.blocks[0].mlp.up, "weight", 0.5),
    "another activation": lambda network: setattr(network.blocks[0].mlp, "activation", torch.nn.ReLU()),
    "another head": lambda network: setattr(network, "head", torch.nn.Sequential(torch.nn.Linear(12, 3))),
    "a hook": lambda network: network.blocks[0].register_forward_hook(lambda module, args, output: output * 2),
}


def test_a_provenance_that_no_file_can_hold_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="provenance must be plain JSON values"):
        dataclasses.replace(bundle, provenance={"photo": tmp_path})


@pytest.mark.parametrize("change", CHANGES)
def test_a_network_that_would_be_loaded_as_another_is_not_saved(change: str, tmp_path: Path) -> None:
    bundle = make_bundle()
    CHANGES[change](bundle.network)
    bundle.network.train()
    with pytest.raises(BundleError, match="the network cannot be saved"):
        bundle.save(tmp_path / "model")
    assert not (tmp_path / "model").exists() and bundle.network.training and bundle.network.blocks[0].training


def test_a_network_without_values_is_not_saved(bundle: Bundle, tmp_path: Path) -> None:
    with torch.device("meta"):
        network = build(bundle.network.config)
    with pytest.raises(BundleError, match="device meta"):
        dataclasses.replace(bundle, network=network).save(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(ConfigError, match="device meta"):
        dataclasses.replace(bundle, network=network).predict(images(1))


def test_blocks_that_share_weights_are_saved(tmp_path: Path) -> None:
    bundle = make_bundle(depth=2)
    bundle.network.blocks[1] = bundle.network.blocks[0]
    assert_close(bundle, load_bundle(bundle.save(tmp_path / "model")), atol=0, rtol=0)


@pytest.mark.usefixtures("types_unchecked")
def test_a_text_is_not_permission_to_overwrite(tmp_path: Path) -> None:
    bundle = make_bundle()
    bundle.save(tmp_path / "model")
    for write in (
        lambda: bundle.save(tmp_path / "model", overwrite="no"),  # type: ignore[arg-type]
        lambda: convert(tmp_path / "model", tmp_path / "new", "vitrail", overwrite="no"),  # type: ignore[arg-type]
        lambda: check_export(tmp_path / "new.onnx", "onnx", overwrite="no"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match="overwrite='no' is not true or false"):
            write()


def test_an_object_at_the_threshold_is_shown_whatever_the_runtime_rounds() -> None:
    bundle = dataclasses.replace(dense_bundle(), metrics={"validation_score_threshold": 0.7})
    scores = np.array([0.7, 0.7 - 1e-7, 0.699])
    found = Detections(bundle.classes, np.tile([0.0, 0, 9, 9], (3, 1)), scores, np.zeros(3, np.int64), (32, 40))
    shown = bundle.shown(found)
    assert isinstance(shown, Detections) and len(shown) == 2
    given = bundle.shown(found, 0.7)
    assert isinstance(given, Detections) and len(given) == 1, "a given threshold is exact"
