"""Tests of the choice among PyTorch, OpenVINO and onnxruntime: same answers, measured once, refused if different."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.cli.conftest import Cli
from tests.make import dense_bundle, make_bundle, small_config
from tests.serving.conftest import make_samples
from vitrail import with_engine
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError, ExportFailed
from vitrail.export import engines
from vitrail.export.export import export
from vitrail.export.formats import FORMATS
from vitrail.models.predictor import EngineName
from vitrail.models.vit import VisionTransformer
from vitrail.weights.bundle import Bundle

pytest.importorskip("openvino")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.slow  # the libraries alone take seconds to load

MANY = 10**12
"""A number of images for which a measurement is always worth its time."""


@pytest.fixture(scope="module")
def model() -> Bundle:
    torch.manual_seed(0)
    network = VisionTransformer(small_config(num_classes=3))
    with torch.no_grad():
        network.head.weight.copy_(torch.randn_like(network.head.weight))
    return Bundle(network, ("a", "b", "c"), Preprocess(image_size=network.config.image_size, mean=(0.4,), std=(0.25,)))


@pytest.fixture(scope="module")
def prepared(model: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the files of both runtimes in float32, which take seconds to write."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_DATA", str(folder))
        for name in get_args(EngineName):
            with_engine(model, name)
    return folder


@pytest.fixture(autouse=True)
def cache(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(prepared, tmp_path / "cache")
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache" / "engines"


def pictures(count: int = 5) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (19, 23, 3), dtype=np.uint8) for _ in range(count)]


def times(monkeypatch: pytest.MonkeyPatch, found: Mapping[str, float]) -> None:
    def seconds(runs: Any, image: np.ndarray, sizes: Any) -> dict[str, tuple[float, ...]]:
        for run in runs.values():
            run(np.repeat(image, 2, axis=0))
        return {name: (found[name],) * len(sizes) for name in runs}

    monkeypatch.setattr(engines, "batch_seconds", seconds)


def files(cache: Path) -> set[str]:
    return {file.name for file in cache.rglob("*.*")}


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_a_named_runtime_gives_the_answers_of_pytorch(name: Any, model: Bundle) -> None:
    fast = with_engine(model, name)
    assert fast.engine is not None and fast.engine.name == name
    assert fast.network is model.network and model.engine is None
    for wanted, found in zip(model.predict(pictures()), fast.predict(pictures(), batch_size=2), strict=True):
        assert found.label == wanted.label
        assert dict(found.ranking) == pytest.approx(dict(wanted.ranking), abs=1e-5)
    assert torch.equal(fast.embed(pictures()), model.embed(pictures()))  # PyTorch computes what the file lacks
    assert with_engine(fast, "torch").engine is None


def test_the_runtime_computes_only_in_its_own_precision(model: Bundle) -> None:
    fast = with_engine(model, "openvino", precision="bf16")
    assert fast.predict(pictures()) == model.predict(pictures())  # the model's own precision is float32
    assert fast.predictor("bf16").precision == "bf16"
    x = model.inputs(np.stack([model.preprocess.pixels(one) for one in pictures()]))
    exact = model.predictor().logits(x)
    error, usual = ((exact - one.predictor("bf16").logits(x).float()).norm() for one in (fast, model))
    assert error <= 1.5 * usual + 1e-3 * exact.norm()


def test_outputs_that_are_all_zero_are_computed_in_bf16() -> None:
    bundle = make_bundle()
    torch.nn.init.zeros_(bundle.network.head.weight)
    torch.nn.init.zeros_(bundle.network.head.bias)
    assert with_engine(bundle, "openvino", precision="bf16").predictor("bf16").precision == "bf16"


def test_a_model_without_a_head_and_the_preprocessing_of_tensorflow() -> None:
    bare = make_bundle(num_classes=0, channels=1)
    bare = replace(bare, preprocess=replace(bare.preprocess, resampler="tensorflow"))
    images = [picture[:, :, :1] for picture in pictures()]
    torch.testing.assert_close(with_engine(bare, "onnxruntime").embed(images), bare.embed(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["pyramid", "fine-patches"])
def test_boxes_and_masks(kind: str) -> None:
    dense = dense_bundle(kind)
    x = torch.randn(3, 3, *dense.preprocess.image_size)
    found = with_engine(dense, "openvino").predictor().logits(x)
    torch.testing.assert_close(found, dense.predictor().logits(x), rtol=1e-3, atol=1e-3)


def test_the_fastest_is_measured_once(model: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, {"torch": 3.0, "openvino": 2.0, "onnxruntime": 2.5})
    notes: list[str] = []
    first = with_engine(model, images=MANY, note=notes.append)
    assert first.engine is not None and first.engine.name == "openvino"
    assert len(notes) == 1 and "OpenVINO" in notes[0] and "2,000 ms" in notes[0] and "engine=torch" in notes[0]
    assert "onnxruntime.onnx" not in files(cache)  # a slower file is not kept
    times(monkeypatch, {})
    again = with_engine(model, images=MANY, note=notes.append)
    assert again.engine is not None and again.engine.name == "openvino" and notes[1] == notes[0]
    monkeypatch.delitem(engines.KINDS, "openvino")
    other = replace(model, network=VisionTransformer(model.network.config))
    with pytest.raises(KeyError):  # other weights are measured anew
        with_engine(other, images=MANY)


@pytest.mark.parametrize(("seconds", "chosen"), [(2.95, None), (2.85, "onnxruntime")])
def test_a_few_per_cent_are_no_reason(
    seconds: float, chosen: str | None, model: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    times(monkeypatch, {"torch": 3.0, "openvino": 4.0, "onnxruntime": seconds})
    found = with_engine(model, images=MANY).engine
    assert (None if found is None else found.name) == chosen


def test_real_times_choose_something(model: Bundle, cache: Path) -> None:
    with_engine(model, images=MANY)
    (measured,) = cache.rglob("measured-*.json")
    kept = json.loads(measured.read_text())
    assert set(kept["seconds"]) == {"torch", "openvino", "onnxruntime"} and not kept["refused"]
    assert all(0 < value < 60 for row in kept["seconds"].values() for value in row.values())


def test_few_images_and_small_networks_of_servers_are_left_to_pytorch(model: Bundle, cache: Path) -> None:
    shutil.rmtree(cache)
    assert with_engine(model, images=3).engine is None
    assert with_engine(model).engine is None  # a server
    assert not cache.exists()


def wrong_file(path: Path, precision: str) -> Iterator[Any]:
    """Open a file whose outputs are wrong for one image in eight."""
    text, seal, run = engines.open_onnx(path)

    def spoiled(images: np.ndarray) -> dict[str, np.ndarray]:
        found = run(images)
        next(iter(found.values()))[::8] *= 0.9
        return found

    yield from (text, seal, spoiled)


def test_wrong_outputs_are_refused(model: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(engines.KINDS["onnxruntime"], open=wrong_file)
    monkeypatch.setitem(engines.KINDS, "onnxruntime", wrong)
    shutil.rmtree(cache)
    with pytest.raises(ExportFailed, match="onnxruntime differs from PyTorch by 0"):
        with_engine(model, "onnxruntime")
    assert not files(cache)
    monkeypatch.delitem(engines.KINDS, "openvino")
    times(monkeypatch, {"torch": 3.0, "onnxruntime": 0.1})
    assert with_engine(model, images=MANY).engine is None


def test_a_damaged_file_is_written_anew(model: Bundle, cache: Path) -> None:
    with_engine(model, "onnxruntime")
    (file,) = cache.rglob("*.onnx")
    file.write_bytes(file.read_bytes()[:-100])
    assert with_engine(model, "onnxruntime").predict(pictures())[0].label == model.predict(pictures())[0].label


def test_a_file_of_other_weights_is_written_anew(model: Bundle, cache: Path) -> None:
    other = make_bundle(num_classes=3)
    with_engine(other, "onnxruntime")
    (mine,), (theirs,) = (
        [file for file in cache.rglob("*.onnx") if (file.parent / "openvino.xml").exists() is is_mine]
        for is_mine in (True, False)
    )
    shutil.copyfile(theirs, mine)
    found = with_engine(model, "onnxruntime").predict(pictures())
    assert [one.probability for one in found] == pytest.approx([one.probability for one in model.predict(pictures())])


@pytest.mark.parametrize("change", ["hook", "weights", "data", "method"])
def test_a_network_that_is_changed_later_is_computed_by_pytorch(change: str, model: Bundle) -> None:
    fast = with_engine(copy.deepcopy(model), "onnxruntime")
    before, network = fast.predict(pictures()), fast.network
    if change == "hook":
        network.blocks[0].register_forward_hook(lambda module, given, found: -found)
    elif change == "method":
        network.blocks[0].forward = lambda x, *_, **__: -x
    elif change == "data":
        network.head.weight.data.neg_()
    else:
        with torch.no_grad():
            network.head.weight.neg_()
    assert fast.predict(pictures()) == replace(fast, engine=None).predict(pictures()) != before


def test_a_kept_measurement_that_is_no_measurement_is_made_anew(
    model: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times(monkeypatch, {"torch": 3.0, "openvino": 2.0, "onnxruntime": 2.5})
    with_engine(model, images=MANY)
    (measured,) = cache.rglob("measured-*.json")
    kept = json.loads(measured.read_text())
    kept["seconds"]["other"] = dict.fromkeys(kept["seconds"]["torch"], 1e-9)
    for damaged in ({}, [], {"seconds": [], "refused": {}}, kept):
        measured.write_text(json.dumps(damaged))
        found = with_engine(model, images=MANY).engine
        assert found is not None and found.name == "openvino"


def test_what_cannot_be_computed(model: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"onnxruntime.*bf16.*engine='torch'"):
        with_engine(model, "onnxruntime", precision="bf16")
    with pytest.raises(ConfigError, match="exported file already"):
        path = tmp_path / "model.onnx"
        export(model, path, "onnx", make_samples())
        with_engine(vitrail.load(path), "openvino")
    monkeypatch.setenv("VITRAIL_DATA", "/proc/nothing")
    notes: list[str] = []
    assert with_engine(model, images=MANY, note=notes.append).engine is None
    assert "VITRAIL_DATA" in notes[0]


def test_a_network_that_was_changed_is_not_computed_from_the_cache(model: Bundle) -> None:
    changed = copy.deepcopy(model)
    changed.network.blocks[0].register_forward_hook(lambda module, given, found: -found)
    with pytest.raises(ConfigError, match="network was changed"):
        with_engine(changed, "onnxruntime")
    assert with_engine(changed, images=MANY).engine is None


def test_missing_packages_are_named_only_if_asked_for(model: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    for to in ("openvino", "onnx"):
        monkeypatch.setitem(FORMATS, to, replace(FORMATS[to], needs=("no_such_package",)))
    assert with_engine(model, images=MANY).engine is None
    with pytest.raises(ConfigError, match="no_such_package"):
        with_engine(model, "openvino")


def test_a_saved_or_pickled_model_has_no_engine(model: Bundle, tmp_path: Path) -> None:
    fast = with_engine(model, "onnxruntime")
    fast.save(tmp_path / "model")
    assert vitrail.load(tmp_path / "model").engine is None
    pickled = pickle.loads(pickle.dumps(fast))
    assert pickled.engine is None and pickled.predict(pictures())[0].label == model.predict(pictures())[0].label


def test_the_command(model: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.fromarray(pictures()[0]).save(tmp_path / "one.png")
    cli = Cli(capsys, "predict", model.save(tmp_path / "model"), tmp_path / "one.png", "--engine")
    first, second = (cli.json(engine)["probabilities"] for engine in ("torch", "openvino"))
    assert second == pytest.approx(first, abs=1e-5)
    assert "openvino" in cli.refuses("tensorrt")
