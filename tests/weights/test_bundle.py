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
from torch import Tensor
from torch.nn.utils import prune

import vitrail
from tests.make import assert_same, dense_bundle, make_bundle
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError, ConfigError, DataError, DestinationError, SaveError, UndecodableImage
from vitrail.models.predictor import Predictor
from vitrail.models.variants import build, create
from vitrail.models.vit import VisionTransformer
from vitrail.weights.answers import NumberPrediction, Prediction, rank
from vitrail.weights.bundle import Bundle, load_bundle, read_image, write_bundle
from vitrail.weights.load import convert


def images(count: int, *shape: int) -> list[np.ndarray]:
    """Return random uint8 arrays, by default of the size that the network takes."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, shape or (12, 10, 3), dtype=np.uint8) for _ in range(count)]


def png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


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


# --- save and load


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
    loaded = load_bundle(path, device="cpu")
    before, after = bundle.network.state_dict(), loaded.network.state_dict()
    assert list(before) == list(after)
    for name in before:
        assert torch.equal(before[name], after[name]) and after[name].dtype == torch.float32, name
    assert loaded.network.config == bundle.network.config
    for name in ("classes", "preprocess", "output", "precision", "metrics", "provenance"):
        assert getattr(loaded, name) == getattr(bundle, name), name
    assert not loaded.network.training and loaded.device == torch.device("cpu")
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in loaded.network.parameters())
    assert all(parameter.requires_grad for parameter in loaded.network.parameters())


def test_the_weights_are_plain_safetensors(bundle: Bundle, saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    assert set(tensors) == set(bundle.network.state_dict())
    description = json.loads((saved / "model.json").read_text(encoding="utf-8"))
    data = (saved / "model.safetensors").read_bytes()
    assert description["weights"] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert description["classes"] == ["rose", "tulip", "黒い花 / black"]
    assert description["format"] == 2 and description["output"] == "softmax"


def test_all_files_have_the_same_permissions(saved: Path) -> None:
    assert len({file.stat().st_mode for file in saved.iterdir()}) == 1


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = make_bundle().save(tmp_path / "a"), make_bundle().save(tmp_path / "b")
    assert snapshot(first) == snapshot(second)


def test_the_folder_of_a_run_holds_its_model(bundle: Bundle, tmp_path: Path) -> None:
    bundle.save(tmp_path / "run" / "model")
    (tmp_path / "run" / "run.json").write_text("{}")
    assert load_bundle(tmp_path / "run", device="cpu").classes == bundle.classes


def test_loading_draws_no_random_numbers(saved: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    loaded = load_bundle(saved, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(parameter.is_meta for parameter in loaded.network.parameters())


# --- a model that does not agree with itself


def test_the_output_must_be_known(bundle: Bundle, types_unchecked: None) -> None:
    with pytest.raises(BundleError, match="output='odds' is not one of 'softmax', 'sigmoid', 'numbers'"):
        Bundle(bundle.network, bundle.classes, bundle.preprocess, output="odds")


@pytest.mark.parametrize("count", [255, 256])
def test_masks_of_too_many_classes_are_refused(count: int) -> None:
    made = dense_bundle("patches")
    names = tuple(map(str, range(count)))
    network = build(dataclasses.replace(made.network.config, num_classes=count))
    with pytest.raises(BundleError, match="at most 255 classes") if count > 255 else contextlib.nullcontext():
        Bundle(network, names, made.preprocess, output="mask")


# --- versions of the format


def test_fields_that_a_file_lacks_take_their_defaults(saved: Path, bundle: Bundle) -> None:
    description = json.loads((saved / "model.json").read_text(encoding="utf-8"))
    for name in ("output", "precision", "metrics", "provenance"):
        del description[name]
    for name in ("position_resize", "norm_eps", "patch_dropout", "attention", "root"):
        description["config"].pop(name, None)
    del description["preprocess"]["pad_value"]
    (saved / "model.json").write_text(json.dumps(description), encoding="utf-8")
    loaded = load_bundle(saved, device="cpu")
    assert (loaded.output, loaded.precision, loaded.metrics) == ("softmax", "float32", {})
    assert (loaded.provenance, loaded.notes) == ({}, ())
    assert loaded.network.config == bundle.network.config and loaded.preprocess == bundle.preprocess


def test_unknown_fields_at_the_top_are_ignored_with_a_note(saved: Path) -> None:
    rewrite(saved, extra=1, another={"deep": None})
    assert load_bundle(saved, device="cpu").notes == (
        f"{saved / 'model.json'}: unknown fields are ignored: another, extra",
    )


# --- predictions


def test_predictions_are_the_networks(bundle: Bundle) -> None:
    arrays = images(6)
    expected = logits(bundle, arrays).softmax(1)
    assert len({int(index) for index in expected.argmax(1)}) > 1
    predictions = bundle.predict(arrays, batch_size=4)
    for prediction, row in zip(predictions, expected, strict=True):
        assert isinstance(prediction, Prediction)
        by_name = dict(prediction.ranking)
        assert set(by_name) == set(bundle.classes) and len(prediction.ranking) == 3
        for name, value in zip(bundle.classes, row.tolist(), strict=True):
            assert by_name[name] == pytest.approx(value, abs=1e-6)
        values = [value for _, value in prediction.ranking]
        assert values == sorted(values, reverse=True)
        assert sum(values) == pytest.approx(1, abs=1e-6)
        assert (prediction.label, prediction.probability) == prediction.ranking[0]
        assert prediction.label == bundle.classes[int(row.argmax())]


def test_sigmoid_scores_are_for_each_class_by_itself() -> None:
    bundle, arrays = make_bundle(output="sigmoid"), images(4)
    expected = logits(bundle, arrays).sigmoid()
    assert (expected.sum(1) - 1).abs().max() > 0.05
    for prediction, row in zip(bundle.predict(arrays), expected, strict=True):
        by_name = dict(prediction.ranking)
        assert [by_name[name] for name in bundle.classes] == pytest.approx(row.tolist(), abs=1e-6)


def test_answers_are_the_predictions_of_outputs(bundle: Bundle) -> None:
    arrays = images(3)
    inputs = bundle.inputs([bundle.preprocess.pixels(array) for array in arrays])
    outputs = Predictor(bundle.network).logits(inputs)
    torch.testing.assert_close(bundle.probabilities(outputs), logits(bundle, arrays).softmax(1), atol=1e-6, rtol=0)
    assert bundle.answers(outputs) == bundle.predict(arrays)
    assert bundle.answers(outputs, top=2) == bundle.predict(arrays, top=2)


# --- the likeliest classes


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
    rows=st.lists(
        st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]), min_size=7, max_size=7), min_size=1, max_size=4
    ),
    count=st.integers(1, 7),
)
def test_equally_likely_classes_keep_their_order(rows: list[list[float]], count: int) -> None:
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


@pytest.mark.parametrize("top", [0, 4, -1])
def test_a_ranking_out_of_range(bundle: Bundle, top: int) -> None:
    with pytest.raises(ConfigError, match=f"^top={top} is out of range, because this model has 3 classes$"):
        bundle.predict(images(1), top=top)


# --- numbers


def test_unknown_choices_are_refused(bundle: Bundle, types_unchecked: None) -> None:
    for precision in ("nonsense", "bfloat16", "float8"):
        with pytest.raises(ConfigError, match="precision"):
            Predictor(bundle.network, cast(Any, precision))
        with pytest.raises(ConfigError, match="precision"):
            bundle.predict([np.zeros((4, 4, 3), np.uint8)], precision=cast(Any, precision))
    with pytest.raises(ConfigError, match="undecodable='skip' is not one of 'raise', 'return'"):
        bundle.predict([b"no image"], undecodable=cast(Any, "skip"))
    with pytest.raises(ConfigError, match="engine='tensorrt' is not one of 'auto'"):
        vitrail.with_engine(bundle, cast(Any, "tensorrt"))


@pytest.mark.parametrize(
    ("argument", "value"),
    [("top", 1.5), ("top", True), ("batch_size", "2"), ("batch_size", 1.5), ("precision", ""), ("undecodable", None)],
)
def test_arguments_of_other_types_are_refused(argument: str, value: Any, bundle: Bundle, types_unchecked: None) -> None:
    with pytest.raises(ConfigError, match=f"^{argument}={value!r} is not "):
        bundle.predict(images(1), **{argument: value})


@pytest.mark.parametrize("image", [None, 5, bytearray(b"x"), torch.zeros(4, 4, 3, dtype=torch.uint8)], ids=repr)
def test_items_that_are_no_images_are_refused(image: Any, bundle: Bundle, types_unchecked: None) -> None:
    for undecodable in ("raise", "return"):
        with pytest.raises(ConfigError, match="its items must be paths, "):
            bundle.predict([image], undecodable=cast(Any, undecodable))


@pytest.mark.parametrize("classes", ["abc", (1, 2, 3), {"a"}, None], ids=repr)
def test_classes_that_are_no_list_of_names_are_refused(classes: Any, bundle: Bundle, types_unchecked: None) -> None:
    with pytest.raises(BundleError, match=r"^classes=.* must be a list of names"):
        dataclasses.replace(bundle, classes=classes)
    assert dataclasses.replace(bundle, classes=["a", "b", "c"]).classes == ("a", "b", "c")


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


def test_numbers_are_the_networks_outputs(tmp_path: Path) -> None:
    bundle, arrays = make_bundle(output="numbers"), images(5)
    assert load_bundle(bundle.save(tmp_path / "model"), device="cpu").output == "numbers"
    for prediction, row in zip(bundle.predict(arrays, batch_size=2), logits(bundle, arrays), strict=True):
        assert isinstance(prediction, NumberPrediction)
        assert prediction.names == bundle.classes and prediction.values == pytest.approx(row.tolist(), abs=1e-5)
        assert prediction["tulip"] == prediction.values[1]
        with pytest.raises(KeyError, match="lily"):
            prediction["lily"]
    broken = bundle.predict([b"nothing", arrays[0]], undecodable="return")
    assert isinstance(broken[0], UndecodableImage) and isinstance(broken[1], NumberPrediction)


def test_numbers_have_no_probabilities_and_no_ranking() -> None:
    bundle = make_bundle(output="numbers")
    with pytest.raises(ConfigError, match="this model predicts numbers, which have no probabilities; use predict"):
        bundle.probabilities(torch.zeros(1, 3))
    with pytest.raises(ConfigError, match="top=2 ranks classes, but this model predicts numbers; leave top out"):
        bundle.predict(images(1), top=2)


def test_every_form_of_an_image_gives_the_same(bundle: Bundle, tmp_path: Path) -> None:
    array = images(1, 23, 31, 3)[0]
    path = tmp_path / "ros é.png"
    path.write_bytes(png(array))
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
    grey = arrays[0][..., 0]
    assert bundle.predict(grey) == bundle.predict(grey[..., None]) == bundle.predict([grey])


@pytest.mark.parametrize("given", [torch.zeros(3, 13, 21), np.zeros((2, 13, 21), np.uint8), 5, np.zeros(7, np.uint8)])
def test_what_is_neither_a_list_nor_an_image_is_refused(bundle: Bundle, given: Any, types_unchecked: None) -> None:
    for method in (bundle.predict, bundle.embed):
        with pytest.raises(ConfigError, match=r"\(n, h, w, 3\)"):
            method(given)


def test_grey_images_for_a_colour_network_and_the_reverse() -> None:
    colour, grey = make_bundle(), make_bundle(channels=1)
    plane = images(1, 20, 30)[0]
    stacked = np.repeat(plane[..., None], 3, axis=2)
    for bundle in (colour, grey):
        first, *others = bundle.predict([plane, plane[..., None], stacked, Image.fromarray(plane)])
        assert all(other == first for other in others)


def test_embeddings_are_what_the_head_sees() -> None:
    bundle, arrays = make_bundle(head_hidden=5), images(4)
    embeddings = bundle.embed(arrays, batch_size=3)
    assert embeddings.shape == (4, 12) and embeddings.dtype == torch.float32 and embeddings.device.type == "cpu"
    network = bundle.network
    assert network.head_hidden is not None and network.head is not None
    with torch.no_grad():
        expected = network.head(torch.tanh(network.head_hidden(embeddings)))
    torch.testing.assert_close(expected, logits(bundle, arrays), atol=1e-5, rtol=1e-5)


def test_nothing_in_gives_nothing_out(bundle: Bundle) -> None:
    assert bundle.predict([]) == []
    assert bundle.embed([]).shape == (0, 12)


# --- images that are none


def test_an_undecodable_image_raises_with_its_name(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "broken.jpg"
    path.write_bytes(b"not an image")
    for call in (bundle.predict, bundle.embed):
        with pytest.raises(UndecodableImage, match=re.escape(f"{path} is not an image")):
            call([images(1)[0], path])
    with pytest.raises(UndecodableImage, match=r"^is empty"):
        bundle.predict([b""])


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_an_undecodable_image_takes_its_place_among_the_others(bundle: Bundle, tmp_path: Path, batch_size: int) -> None:
    good = images(3)
    path = tmp_path / "cut.png"
    path.write_bytes(png(good[0])[:60])
    given = [b"nothing", good[0], path, np.zeros((3, 3), np.float32), good[1], good[2], b""]
    results = bundle.predict(given, batch_size=batch_size, undecodable="return")
    assert [isinstance(result, UndecodableImage) for result in results] == [True, False, True, True, False, False, True]
    assert str(path) in str(results[2]) and "float32" in str(results[3])
    expected = bundle.predict(good)
    for result, other in zip([results[1], results[4], results[5]], expected, strict=True):
        assert isinstance(result, Prediction) and result.label == other.label
        assert dict(result.ranking) == pytest.approx(dict(other.ranking), abs=1e-6)


@pytest.mark.parametrize("undecodable", ["raise", "return"])
def test_a_path_that_does_not_exist(bundle: Bundle, tmp_path: Path, undecodable: str) -> None:
    message = re.escape(f"cannot read image {str(tmp_path / 'rose.jpg')!r}: No such file or directory")
    with pytest.raises(DataError, match=message) as caught:
        bundle.predict([tmp_path / "rose.jpg"], undecodable=undecodable)
    assert not isinstance(caught.value, UndecodableImage)
    with pytest.raises(DataError, match=message):
        bundle.embed([str(tmp_path / "rose.jpg")])
    with pytest.raises(DataError, match=r"cannot read image .*: Is a directory"):
        read_image(tmp_path)


# --- damage


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model.json", None, r"model is not a model: it has no model\.json"),
        ("model.safetensors", None, r"model is incomplete: model\.safetensors is missing"),
        ("model.json", lambda content: content[:-40], r"model\.json is damaged: "),
        ("model.json", lambda content: b"", r"model\.json is damaged: "),
        ("model.json", lambda content: b"\xff\xfe{}", r"model\.json is damaged: "),
        ("model.json", lambda content: b"[]", r"model\.json must be an object of named fields, not list"),
        ("model.json", lambda content: b"{}", r"format=None is not the number of a format"),
        ("model.json", lambda content: b'{"format": 2}', r"model\.json lacks the field architecture; a model has the"),
        ("model.safetensors", lambda content: content[:-1], r"was altered: its size or SHA-256 .*copy the model again"),
        ("model.safetensors", lambda content: b"", r"model\.safetensors was altered"),
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
        load_bundle(saved, device="cpu")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("classes", "abc", r"classes must be a list, not 'abc'"),
        ("classes", ["a", 1, "c"], r"classes must be a list of names"),
        ("classes", ["a", "b"], r"there are 2 class names, but the network has 3 outputs"),
        ("classes", list("abcd"), r"there are 4 class names, but the network has 3 outputs"),
        (
            "format",
            3,
            r"has format 3, written by a newer version of Vitrail; this version reads formats up to 2\. Update",
        ),
        ("format", "1", r"format='1' is not the number of a format, which is 2 or higher"),
        ("format", 1, r"has format 1, which no release of Vitrail wrote"),
        ("format", True, r"format=True is not the number of a format"),
        ("format", 0, r"format=0 is not the number of a format"),
        ("architecture", "CNN", r"architecture='CNN' is not one of 'ViT', 'BiT'"),
        ("output", "odds", r"output='odds' is not one of 'softmax', 'sigmoid', 'numbers'"),
        ("metrics", [], r"metrics must be a dict, not \[\]"),
        (
            "config",
            {"widht": 12},
            r"'widht', which this version of Vitrail does not know; nearest: width.*\. If a newer",
        ),
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
        load_bundle(saved, device="cpu")


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"model '.*nowhere' does not exist: there is no such folder"):
        load_bundle(tmp_path / "nowhere", device="cpu")


@pytest.mark.parametrize(("position", "bit"), [(0, 7), (-2000, 0)])
def test_one_flipped_bit_is_seen(saved: Path, position: int, bit: int) -> None:
    path = saved / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(BundleError, match=r"model\.safetensors was altered"):
        load_bundle(saved, device="cpu")


def test_weights_that_do_not_fit_are_all_named(bundle: Bundle, saved: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in bundle.network.state_dict().items()}
    del tensors["norm.weight"], tensors["prefix.cls"]
    tensors["norm.scale"] = torch.zeros(12)
    tensors["head.weight"] = torch.zeros(4, 12)
    replace_weights(saved, safetensors_bytes(tensors))
    with pytest.raises(BundleError) as caught:
        load_bundle(saved, device="cpu")
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
            load_bundle(saved, device="cpu")
        replace_weights(saved, data)
        loaded = None
        with contextlib.suppress(Exception):
            loaded = load_bundle(saved, device="cpu")
        assert loaded is None and not marker.exists()


# --- saving that fails


@pytest.fixture
def old(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    """A folder that holds a model and has no siblings, with the bytes of its files."""
    path = make_bundle(seed=1).save(tmp_path / "kept" / "model")
    return path, snapshot(path)


def assert_intact(old: tuple[Path, dict[str, bytes]]) -> None:
    path, before = old
    assert snapshot(path) == before
    assert [entry.name for entry in path.parent.iterdir()] == ["model"]
    load_bundle(path, device="cpu")


def test_a_model_takes_the_place_of_another(bundle: Bundle, old: tuple[Path, dict[str, bytes]]) -> None:
    path, before = old
    bundle.save(path, overwrite=True)
    assert sorted(snapshot(path)) == ["model.json", "model.safetensors"] and snapshot(path) != before
    assert torch.equal(load_bundle(path, device="cpu").network.state_dict()["head.bias"], bundle.network.head.bias)
    assert [entry.name for entry in path.parent.iterdir()] == ["model"]


def test_an_exception_while_saving_leaves_the_old_model(bundle: Bundle, old: tuple[Path, dict[str, bytes]]) -> None:
    bundle.provenance["image"] = Path("x")  # not a JSON value, which is noticed only after the weights were written
    with pytest.raises(TypeError, match="not JSON serializable"):
        bundle.save(old[0], overwrite=True)
    assert_intact(old)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "notes"), [(1_000, 0), (5_000, 0), (60_000, 100_000)], ids=["weights", "later weights", "description"]
)
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
    assert_intact(old)
    bundle.save(old[0], overwrite=True)
    assert load_bundle(old[0], device="cpu").provenance["notes"] == "x" * notes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_model_on_the_gpu_predicts_the_same(bundle: Bundle, saved: Path) -> None:
    arrays = images(5)
    loaded = load_bundle(saved, device="cuda")
    assert isinstance(loaded.network, VisionTransformer) and loaded.device.type == "cuda"
    for one, other in zip(loaded.predict(arrays), bundle.predict(arrays), strict=True):
        assert dict(one.ranking) == pytest.approx(dict(other.ranking), abs=1e-3)


def test_a_linked_folder_is_written_to_again_and_again(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(3):
        bundle.save(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "model.json").is_file()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "real"]


def test_a_file_in_the_way_is_named(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(DestinationError, match="model is a file; choose another path for the folder to write"):
        bundle.save(tmp_path / "model", overwrite=True)
    assert (tmp_path / "model").read_text() == "mine"


def test_a_model_is_replaced_only_on_request(bundle: Bundle, tmp_path: Path) -> None:
    bundle.save(tmp_path / "model")
    with pytest.raises(DestinationError, match="model exists already; choose another folder, or replace it"):
        bundle.save(tmp_path / "model")
    bundle.save(tmp_path / "model", overwrite=True)
    (tmp_path / "model/model.json").unlink()
    with pytest.raises(DestinationError, match="files that Vitrail did not write"):
        bundle.save(tmp_path / "model", overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("is_model", [False, True])
def test_saving_never_deletes_other_files(bundle: Bundle, tmp_path: Path, is_model: bool, overwrite: bool) -> None:
    folder = tmp_path / "mine"
    if is_model:
        bundle.save(folder)
    folder.mkdir(exist_ok=True)
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(DestinationError, match=r"mine holds files that Vitrail did not write \(thesis.txt\)"):
        bundle.save(folder, overwrite=overwrite)
    assert (folder / "thesis.txt").read_text() == "years of work"
    write_bundle(bundle, folder)  # as a run does with its own model
    assert sorted(entry.name for entry in folder.iterdir()) == ["model.json", "model.safetensors", "thesis.txt"]


def test_other_number_formats_are_refused(bundle: Bundle, saved: Path) -> None:
    replace_weights(saved, safetensors_bytes(bundle.network.half().state_dict()))
    with pytest.raises(BundleError, match=r"not float32 or bfloat16: .* is float16"):
        load_bundle(saved, device="cpu")


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
    again = load_bundle(half, device="cpu").save(tmp_path / "again", stored="bfloat16")
    assert (again / "model.safetensors").read_bytes() == (half / "model.safetensors").read_bytes()


def test_one_image_needs_a_list(bundle: Bundle) -> None:
    with pytest.raises(ConfigError, match="pass a list of"):
        bundle.predict("rose.jpg")
    with pytest.raises(ConfigError, match="batch_size=0 is less than 1"):
        bundle.embed([b""], batch_size=0)


def test_a_network_without_a_head_says_so() -> None:
    headless = create("ViT-Pico/7", image_size=14, num_classes=0, width=8, heads=1, depth=1, mlp_width=8)
    bundle = Bundle(headless, (), Preprocess(image_size=(14, 14)))
    with pytest.raises(ConfigError, match="has no head, so it cannot predict; fine-tune it"):
        bundle.predict([np.zeros((14, 14, 3), np.uint8)])
    assert bundle.embed([np.zeros((14, 14, 3), np.uint8)]).shape == (1, 8)


# --- precision


def test_the_precision_is_saved_and_used(bundle: Bundle, tmp_path: Path) -> None:
    lower = dataclasses.replace(bundle, precision="bf16")
    loaded = load_bundle(lower.save(tmp_path / "model"), device="cpu")
    assert loaded.precision == "bf16"
    arrays = images(2, 20, 17, 3)
    assert loaded.predict(arrays) == bundle.predict(arrays, precision="bf16") != bundle.predict(arrays)
    assert loaded.predict(arrays, precision="float32") == bundle.predict(arrays)
    assert not torch.equal(loaded.embed(arrays), bundle.embed(arrays))


def test_other_layouts_refuse_a_precision(bundle: Bundle, tmp_path: Path) -> None:
    dataclasses.replace(bundle, precision="bf16").save(tmp_path / "model")
    with pytest.raises(BundleError, match="the layout timm cannot store precision='bf16', which only vitrail"):
        convert(tmp_path / "model", tmp_path / "timm", "timm")


# --- networks that their config does not make again


def _pruned(network: Any) -> None:
    prune.l1_unstructured(network.blocks[0].mlp.up, "weight", 0.5)


def _other_activation(network: Any) -> None:
    network.blocks[0].mlp.activation = torch.nn.ReLU()


def _own_head(network: Any) -> None:
    network.head = torch.nn.Sequential(torch.nn.Linear(network.config.width, network.config.num_classes))


def _hook(network: Any) -> None:
    network.blocks[0].register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize("change", [_pruned, _other_activation, _own_head, _hook])
def test_a_network_that_would_be_loaded_as_another_is_not_saved(change: Callable[[Any], None], tmp_path: Path) -> None:
    bundle = make_bundle()
    change(bundle.network)
    bundle.network.train()
    with pytest.raises(BundleError, match="the network cannot be saved"):
        bundle.save(tmp_path / "model")
    assert not (tmp_path / "model").exists() and bundle.network.training and bundle.network.blocks[0].training


def test_blocks_that_share_weights_are_saved(tmp_path: Path) -> None:
    bundle = make_bundle(depth=2)
    bundle.network.blocks[1] = bundle.network.blocks[0]
    again = load_bundle(bundle.save(tmp_path / "model"), device="cpu")
    config = bundle.network.config
    images = torch.randn(2, config.channels, *config.image_size)
    assert torch.equal(again.network(images), bundle.network.eval()(images))
