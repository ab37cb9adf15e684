"""Tests of `vitrail embed`."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch

from tests.cli.conftest import Cli
from tests.make import make_split_colours, small_model
from vitrail import machine
from vitrail.cli import main
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.evaluation.features import extract as precision
from vitrail.evaluation.features.feature_files import load_features
from vitrail.settings import to_plain
from vitrail.weights.bundle import weights_sha256
from vitrail.weights.load import load


@pytest.fixture
def headless(tmp_path: Path) -> Path:
    """A model without a head, for images of 14 x 21 pixels."""
    return small_model(tmp_path / "model")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of three classes with two splits."""
    return make_split_colours(tmp_path / "data")


@pytest.fixture
def embed(
    headless: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cli:
    """Runs the command with its own cache."""
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))
    return Cli(capsys, "embed", headless, "--data", data, "--out", tmp_path / "out")


@pytest.mark.slow
def test_each_split_is_written_as_the_bundle_embeds_it(embed: Cli, headless: Path, data: Path, tmp_path: Path) -> None:
    printed = embed.call("--batch-size", "33", "--precision", "float32")
    shown = printed.out
    assert printed.err == "" and "memory: about " in shown
    assert f"train: features of 33 images, 16 numbers each, in {tmp_path}/out/train" in shown
    assert "test: features of 3 images" in shown
    for split, count in (("train", 33), ("test", 3)):
        features = load_features(tmp_path / "out" / split)
        images = [data / split / key for key in features.keys]
        assert len(images) == count and features.classes == ("blue", "green", "red")
        assert np.array_equal(features.features, load(headless, device="cpu").embed(images).numpy())
        assert [features.classes[label] for label in features.truth.values] == [image.parent.name for image in images]
    about = json.loads((tmp_path / "out" / "train" / "features.json").read_text())["about"]
    bundle = load(headless, device="cpu")
    assert about == {
        "model": str(headless), "data": str(data), "split": "train", "precision": "float32", "image_size": [14, 21],
        "weights_sha256": weights_sha256(bundle.network), "folder": str(data / "train"),
        "preprocess": json.loads(json.dumps(to_plain(bundle.preprocess))),
        "config": json.loads(json.dumps(to_plain(bundle.network.config))),
    }  # fmt: skip


@pytest.mark.slow
def test_the_second_time_features_come_from_the_cache(embed: Cli, tmp_path: Path) -> None:
    embed.shows()
    before = (tmp_path / "out" / "train" / "features.npy").read_bytes()
    assert "cache" not in embed.shows("--overwrite", "--no-cache")
    shown = embed.shows("--overwrite")
    assert f"train: features of 33 images read from the cache, {tmp_path}/cache/features/" in shown
    assert (tmp_path / "out" / "train" / "features.npy").read_bytes() == before
    shown = embed.shows("--overwrite", "--cache", tmp_path / "mine", "--split", "test")
    assert "cache" not in shown and len(list((tmp_path / "mine").glob("*/features.npy"))) == 1


def test_json_has_the_figures_and_notes_go_elsewhere(embed: Cli, data: Path, tmp_path: Path) -> None:
    (data / "train" / "green" / "03.png").write_bytes(b"")
    printed = embed.call("--json", "--split", "train")
    assert "skipped green/03.png: is empty (0 bytes)" in printed.err
    row = {"images": 32, "skipped": 1, "width": 16, "written": str(tmp_path / "out" / "train")}
    assert json.loads(printed.out) == {"train": row}
    assert [item.key for item in load_features(tmp_path / "out" / "train").skipped] == ["green/03.png"]
    assert not (tmp_path / "out" / "test").exists()


def test_another_image_size_resizes_positions(embed: Cli, tmp_path: Path) -> None:
    embed.shows("--split", "test")
    before = load_features(tmp_path / "out" / "test").features.copy()
    shown = embed.shows("--split", "test", "--overwrite", "--image-size", "21", "28")
    assert "the image size was changed from (14, 21) to (21, 28), and the positions were resized" in shown
    assert "the cache has features of this data, but with other weights, preprocessing" in shown
    assert not np.allclose(load_features(tmp_path / "out" / "test").features, before, atol=1e-3)


@pytest.mark.slow
def test_parquet_is_a_file_for_each_split(embed: Cli, tmp_path: Path) -> None:
    embed.shows("--format", "parquet")
    table = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet")
    embed.shows()
    features = load_features(tmp_path / "out" / "train")
    assert np.array_equal(np.array(table["feature"].to_pylist(), np.float32), features.features)
    assert table["key"].to_pylist() == list(features.keys)
    assert table["label"].to_pylist() == features.truth.values.tolist()
    errors = embed.refuses("--format", "parquet")
    assert "train.parquet exists already; choose another file, or replace it with --overwrite" in errors
    embed.shows("--format", "parquet", "--overwrite")


def test_what_is_there_is_kept(embed: Cli, tmp_path: Path) -> None:
    embed.shows("--split", "test")
    assert "out/test exists already; choose another folder, or replace it with --overwrite" in embed.refuses()
    assert not (tmp_path / "out" / "train").exists()
    (tmp_path / "out" / "train").mkdir()
    (tmp_path / "out" / "train" / "mine.png").touch()
    assert "out/train holds files that Vitrail did not write (mine.png)" in embed.refuses("--overwrite")
    assert (tmp_path / "out" / "train" / "mine.png").exists()
    (tmp_path / "out" / "train" / "mine.png").rename(tmp_path / "out" / "train" / "features.npy")
    embed.refuses("--overwrite")  # other programs write files of this name


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_continues_if_it_is_repeated(
    embed: Cli, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Preprocess, images: torch.Tensor) -> torch.Tensor:
        nonlocal batches
        batches += 1
        if batches == 7:  # after 33 images of the training split in six batches
            signal.raise_signal(number)
        return normalise(self, images)

    if number == signal.SIGINT:  # a process that a shell started in the background ignores it
        signal.signal(number, signal.default_int_handler)
    batches, normalise = 0, Preprocess.normalise
    before = signal.getsignal(number)
    monkeypatch.setattr(Preprocess, "normalise", stop)
    errors = embed.call("--precision", "float32", "--batch-size", "6", "--json", code=75).err
    assert f"stopped: features of 0 of 3 images are kept in {tmp_path}/cache/features\n" in errors
    hint = errors.split("Continue with: vitrail embed ")[1]
    assert hint.endswith("--batch-size 6 --json --overwrite\n")
    assert main(["embed", *shlex.split(hint)]) == 0
    assert len(load_features(tmp_path / "out" / "test")) == 3
    batches, words = 2, ("--precision", "float32", "--batch-size", "6")
    errors = embed.call(*words, "--overwrite", "--cache", tmp_path / "other", code=75).err
    assert "stopped: features of 24 of 33 images are kept" in errors
    assert errors.endswith(f"--batch-size 6 --overwrite --cache {tmp_path}/other\n")
    batches = 6
    embed.call(*words, "--overwrite", "--no-cache", code=130)
    assert signal.getsignal(number) is before


@pytest.mark.slow
def test_features_are_bf16_where_that_is_safe(embed: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_bf16_matrix_units", lambda device: True)
    shown = embed.shows("--split", "train")
    assert "train: features are computed in bf16: the smallest cosine of 8 images" in shown
    about = json.loads((tmp_path / "out" / "train" / "features.json").read_text())["about"]
    assert about["precision"] == "bf16"
    monkeypatch.setattr(precision, "SAFE_COSINE", 1.1)
    assert "read from the cache" in embed.shows("--split", "train", "--overwrite")
    shown = embed.shows("--split", "test", "--no-cache")
    assert "test: features are computed in float32, because bf16 changes them too much" in shown
    assert json.loads((tmp_path / "out" / "test" / "features.json").read_text())["about"]["precision"] == "float32"


def test_a_cache_that_cannot_be_written_is_skipped_with_a_note(embed: Cli, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    printed = embed.call()
    assert (tmp_path / "out").exists()
    assert "features are computed but not kept, because the cache cannot be written" in printed.out + printed.err


def test_images_without_classes_are_embedded(headless: Path, data: Path, tmp_path: Path, cli: Cli) -> None:
    photos = data / "train" / "red"
    cli.shows("embed", headless, "--data", photos, "--out", tmp_path / "out", "--no-cache")
    features = load_features(tmp_path / "out" / "train")
    assert len(features) == len(list(photos.glob("*.png"))) and features.classes == ()
    (photos / "list.csv").write_text("file\n03.png\n01.png\n")
    words = ["--data", str(photos / "list.csv"), "--out", str(tmp_path / "listed"), "--no-cache"]
    cli.shows("embed", headless, *words)
    assert load_features(tmp_path / "listed" / "train").keys == ("03.png", "01.png")
    lines = (tmp_path / "out" / "train" / "keys.jsonl").read_text().splitlines()
    assert all(json.loads(line)["label"] is None for line in lines)
