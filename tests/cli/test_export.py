"""Tests of `vitrail convert` and `vitrail export`, and of exported files in other commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Cli
from tests.make import make_colour_folder
from vitrail import RECIPES, train
from vitrail.cli.export import Export, _images
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.sources import open_data
from vitrail.models.variants import build
from vitrail.models.vit_config import ViTConfig
from vitrail.training.run import RunResult
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

FIELDS = {"vitrail": "", "timm": "", "huggingface": "", "google": ".npz", "big-vision": ".npz", "torchvision": ".pth"}


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A small Vision Transformer in our own layout."""
    config = ViTConfig(image_size=(8, 8), patch_size=(4, 4), width=12, depth=1, heads=3, mlp_width=24, num_classes=2)
    return Bundle(build(config), ("a", "b"), Preprocess(image_size=(8, 8))).save(tmp_path / "ours")


def test_options_say_what_the_source_does_not_and_what_is_left_out(ours: Path, tmp_path: Path, cli: Cli) -> None:
    bare = tmp_path / "bare.pth"
    cli.shows("convert", ours, bare, "--to", "torchvision")
    words = ["convert", bare, tmp_path / "out", "--to", "vitrail"]
    assert "no published model has its shape" in cli.refuses(*words)
    words += ["--layout", "torchvision", "--heads", "3", "--image-size", "12", "8", "--num-classes", "5"]
    shown = cli.shows(*words)
    assert "the image size was changed from (8, 8) to (12, 8), and the positions were resized" in shown
    assert "the new head has 5 outputs; its weights start at zero" in shown
    config = load(tmp_path / "out", device="cpu").network.config
    assert (config.heads, config.image_size, config.num_classes) == (3, (12, 8), 5)
    config = replace(config, head_hidden=5)
    hidden = Bundle(build(config), tuple("abcde"), Preprocess(image_size=(12, 8))).save(tmp_path / "hidden")
    words = ["convert", hidden, tmp_path / "timm", "--to", "timm"]
    assert "head_hidden=5" in cli.refuses(*words)
    cli.shows(*words, "--drop-head-hidden")


@pytest.mark.parametrize("to", FIELDS)
def test_an_earlier_output_is_replaced_only_with_overwrite(to: str, ours: Path, tmp_path: Path, cli: Cli) -> None:
    out, fresh = tmp_path / f"out{FIELDS[to]}", tmp_path / f"fresh{FIELDS[to]}"
    if not FIELDS[to]:
        out.mkdir()  # an empty folder is written to
    captured = cli.call("convert", ours, out, "--to", to, "--json")
    result = json.loads(captured.out)
    assert (result["written"], result["layout"], captured.err) == (str(out), to, "")
    assert ("not carried: class names" in result["notes"]) == bool(FIELDS[to])
    words = ["--to", to, "--num-classes", "2"]
    assert f"{out} exists already; choose another" in cli.refuses("convert", ours, out, *words)
    cli.shows("convert", ours, out, *words, "--overwrite")
    assert cli.shows("convert", ours, fresh, *words).splitlines()[-1] == f"Written as {to}: {fresh}"
    heads = ["--heads", "3"] if to == "torchvision" else []
    cli.shows("convert", out, out, *words, *heads, "--overwrite")  # onto itself
    for file in [out] if FIELDS[to] else sorted(out.iterdir()):
        twin = fresh if FIELDS[to] else fresh / file.name
        assert file.read_bytes() == twin.read_bytes()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["ours", out.name, fresh.name])


@pytest.mark.parametrize("words", [[], ["--overwrite"]])
@pytest.mark.parametrize("to", [name for name, suffix in FIELDS.items() if not suffix])
@pytest.mark.parametrize("of_a_model", [True, False])
def test_a_folder_with_the_users_own_files_is_never_replaced(
    of_a_model: bool, to: str, words: list[str], ours: Path, tmp_path: Path, cli: Cli
) -> None:
    out = tmp_path / "out"
    if of_a_model:
        cli.shows("convert", ours, out, "--to", to)
    out.mkdir(exist_ok=True)
    (out / "thesis.txt").write_text("years of work")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    error = cli.refuses("convert", ours, out, "--to", to, *words)
    assert f"{out} holds files that Vitrail did not write (thesis.txt), so it is not replaced" in error
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_a_downloaded_model_is_not_taken_for_an_earlier_output(to: str, ours: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_file({"a": torch.zeros(1)}, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text("{}")
    error = cli.refuses("convert", ours, out, "--to", to, "--overwrite")
    assert "holds files that Vitrail did not write (config.json, model.safetensors)" in error
    assert sorted(entry.name for entry in out.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.slow
def test_accuracy_is_measured_on_images_that_training_held_out(colour_folder: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    data = RECIPES["demo"]().override(
        data=str(colour_folder), run=str(run), steps=1, width=16, depth=1, heads=2, mlp_width=32, batch_size=8,
        precision="float32", device="cpu", validation_share=0.2, cut_method="stratified",
    )  # fmt: skip
    held_out = open_data(str(colour_folder), validation_share=0.2).validation
    assert held_out is not None and 0 < len(held_out) < 36
    wanted = {held_out.key(index) for index in range(len(held_out))}
    bundle = load(train(data).folder)
    images = _images(Export(model=str(run), to="pt2", data=str(colour_folder)), bundle, is_int8=False)
    assert {sample.key for sample in images.samples} == wanted and all(s.target is not None for s in images.samples)

    other = make_colour_folder(tmp_path / "other", classes=("cat", "dog"))
    images = _images(Export(model=str(run), to="pt2", data=str(other)), bundle, is_int8=False)
    assert len(images.samples) == 24 and all(sample.target is None for sample in images.samples)


@pytest.mark.slow
@pytest.mark.usefixtures("here", "fewer_bundled")
def test_files_in_8_bit_integers_in_every_verb(trained: RunResult, cli: Cli) -> None:
    run, picture = str(trained.folder), str(trained.examples[0].path)
    words = ["export", run, "--to", "onnx,openvino", "--precision", "float32,int8", "--data", "bundled"]
    written = cli.json(*words, "--max-drop", "5", "--calibration-images", "32", "--images", "100")
    names = ["run.onnx", "run-int8.onnx", "run.xml", "run-int8.xml"]
    assert [(one["written"], one["precision"]) for one in written["files"]] == [
        (name, "int8" if "int8" in name else "float32") for name in names
    ]
    assert written["failures"] == [] and set(written["network"]["milliseconds"]) == {"1", "8"}
    for one in written["files"]:
        assert one["parity"]["labelled"] == 100 and one["parity"]["drop"]["value"] <= 5
        assert set(one["milliseconds"]) == {"1", "8"} and one["milliseconds"]["8"] > 0
    shown = {}
    for model in (run, "run.onnx", "run-int8.onnx", "run-int8.xml"):
        shown[model] = cli.json("predict", model, picture)["probabilities"]
        cli.call("evaluate", model, "--data", "bundled[:40]", "--json")
    assert shown["run-int8.onnx"] == pytest.approx(shown[run], abs=0.1)
    assert shown["run.onnx"] == pytest.approx(shown[run], abs=1e-4)
    error = cli.refuses("predict", "run.onnx", picture, "--precision", "bf16")
    assert "run.onnx computes in its own number format; choose" in error
    error = cli.refuses("embed", "run-int8.onnx", "--data", "bundled[:40]", "--out", "f", "--precision", "float32")
    assert "was exported with output='logits'" in error
    speed = cli.json("bench", "infer", "run-int8.onnx", "--batch-size", "2", "--repetitions", "2")
    assert speed["precision"] == "int8" and len(speed["milliseconds"]) == 2
    error = cli.refuses("bench", "infer", "run-int8.onnx", "--precision", "bf16")
    assert "--precision: an exported file has its own network and number format" in error
    # With a tolerance that nothing meets, all other files are written, and the exit code says that one is missing.
    words = [*words, "--tolerance", "1e-12", "--overwrite", "--images", "40"]
    refused = json.loads(cli.call(*words[:3], "onnx", *words[4:], "--json", code=1).out)
    assert "run.onnx differs from the network by" in refused["failures"][0]


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_bundled")
def test_calibration_reads_training_images_only(trained: RunResult) -> None:
    options = Export(model="", to="onnx", data="bundled", precision="int8", images=200, calibration_images=50)
    found = _images(options, load(trained.folder), True)
    assert found.int8 is not None and len(found.int8.calibration) == 50 and len(found.samples) == 200
    seen = {bytes(np.asarray(sample.image)) for sample in found.int8.calibration}
    assert not seen & {bytes(np.asarray(sample.image)) for sample in found.samples}
