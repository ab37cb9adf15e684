"""Tests of `vitrail embed` and `vitrail nearest`."""

from __future__ import annotations

import csv
import dataclasses
import json
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from torch.nn.functional import cosine_similarity

from tests.cli.conftest import Cli
from tests.make import make_split_colours, small_model
from vitrail import machine
from vitrail.cli import main
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.features import extract as precision
from vitrail.evaluation.features.feature_files import load_features
from vitrail.evaluation.features.index import FeatureIndex
from vitrail.models.network import with_weights
from vitrail.models.reduction import TokenReduction
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
    shown = embed.shows("--batch-size", "33", "--precision", "float32")
    assert f"train: features of 33 images, 16 numbers each, in {tmp_path}/out/train" in shown
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


def test_json_has_the_figures_and_notes_go_elsewhere(embed: Cli, data: Path, tmp_path: Path) -> None:
    (data / "train" / "green" / "03.png").write_bytes(b"")
    printed = embed.call("--json", "--split", "train")
    assert "skipped green/03.png: is empty (0 bytes)" in printed.err
    row = {"images": 32, "skipped": 1, "width": 16, "written": str(tmp_path / "out" / "train")}
    assert json.loads(printed.out) == {"train": row}
    assert [item.key for item in load_features(tmp_path / "out" / "train").skipped] == ["green/03.png"]
    assert not (tmp_path / "out" / "test").exists()


@pytest.mark.slow
def test_parquet_is_a_file_for_each_split(embed: Cli, tmp_path: Path) -> None:
    embed.shows("--format", "parquet")
    rows = {split: len(pyarrow.parquet.read_table(tmp_path / f"out/{split}.parquet")) for split in ("train", "test")}
    assert rows == {"train": 33, "test": 3}
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


def test_features_of_a_split_that_the_data_does_not_have_are_named(embed: Cli, data: Path, tmp_path: Path) -> None:
    embed.call("--split", "test")
    shutil.rmtree(data / "test")
    printed = embed.call("--overwrite", "--no-cache")
    assert f"{tmp_path / 'out' / 'test'} keeps the features of an earlier command" in printed.out + printed.err


def test_features_that_appear_while_others_are_computed_are_kept(
    embed: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(self: Preprocess, images: torch.Tensor) -> torch.Tensor:
        (tmp_path / "out" / "test").mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / "test" / "features.json").touch()
        return normalise(self, images)

    normalise = Preprocess.normalise
    monkeypatch.setattr(Preprocess, "normalise", appear)
    assert "out/test" in embed.refuses("--split", "test", "--precision", "float32")
    assert [file.name for file in (tmp_path / "out" / "test").iterdir()] == ["features.json"]


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
    assert "train: features are computed in bf16" in shown
    about = json.loads((tmp_path / "out" / "train" / "features.json").read_text())["about"]
    assert about["precision"] == "bf16"
    monkeypatch.setattr(precision, "SAFE_COSINE", 1.1)
    assert "read from the cache" in embed.shows("--split", "train", "--overwrite")
    shown = embed.shows("--split", "test", "--no-cache")
    assert "test: features are computed in float32, because bf16 changes them too much" in shown
    assert json.loads((tmp_path / "out" / "test" / "features.json").read_text())["about"]["precision"] == "float32"


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


@pytest.fixture
def nearest(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys, "nearest")


@pytest.fixture
def features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The features of three classes of images, in two splits."""
    root, out = make_split_colours(tmp_path / "data"), tmp_path / "features"
    model = small_model(tmp_path / "model", resize="crop", mean=(0.3,))
    words = ["embed", str(model), "--data", str(root), "--out", str(out), "--no-cache", "--precision", "float32"]
    assert main(words) == 0
    capsys.readouterr()
    return out


def test_neighbours_are_those_of_all_cosines(nearest: Cli, features: Path, tmp_path: Path) -> None:
    query = tmp_path / "data" / "train" / "green" / "03.png"
    printed = nearest.call(features, query, "--json", "--top", "3")
    row = json.loads(printed.out)
    assert printed.err == ""
    images = sorted((tmp_path / "data").rglob("*.png"))
    vectors = load(tmp_path / "model", device="cpu").embed(images)
    cosines = cosine_similarity(vectors[images.index(query)][None], vectors, dim=1)
    expected = [images[place] for place in cosines.argsort(descending=True).tolist() if images[place] != query][:3]
    assert row["image"] == str(query)
    assert [each["image"] for each in row["nearest"]] == [str(path) for path in expected]
    assert [each["label"] for each in row["nearest"]] == [path.parent.name for path in expected]
    found = [each["cosine"] for each in row["nearest"]]
    assert found == pytest.approx([float(cosines[images.index(path)]) for path in expected], abs=1e-5)
    other = tmp_path / "features" / ".." / "data" / "train" / "green" / "03.png"
    assert nearest.json(features, other, "--top", "3")["nearest"] == row["nearest"], "not its own neighbour"


def test_csv_and_table_show_whole_paths(
    nearest: Cli, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, broken = tmp_path / "data" / "test" / "red" / "11.png", tmp_path / "page.jpg"
    broken.write_text("<html>")
    printed = nearest.call(features / "train", query, broken, "--csv", "--top", "2", code=2)
    header, first, second, wrong = csv.reader(printed.out.splitlines())
    assert header == ["image", "rank", "nearest", "cosine", "label", "error"]
    assert first[:2] == [str(query), "1"] and second[:2] == [str(query), "2"] and first[4:] == ["red", ""]
    assert Path(first[2]).is_file() and "data/train/" in first[2]
    assert wrong[0] == str(broken) and "is not an image" in wrong[5] and wrong[5] in printed.err
    monkeypatch.setenv("COLUMNS", "20")
    out = nearest.shows(features / "train", query, "--top", "2")
    assert all(text in out for text in (str(query), first[2], second[2], f"{float(first[3]):.4f}"))


def test_the_weights_of_the_model_are_checked(nearest: Cli, features: Path, tmp_path: Path) -> None:
    query = tmp_path / "data" / "test" / "red" / "11.png"
    expected = nearest.call(features, query, "--json")
    moved = tmp_path / "elsewhere"
    (tmp_path / "model").rename(moved)
    assert "model, does not exist any more; name its new path with --model" in nearest.refuses(features, query)
    assert nearest.call(features, query, "--json", "--model", moved) == expected
    other = small_model(tmp_path / "other", seed=1)
    errors = nearest.refuses(features, query, "--model", other)
    assert f"{other} has other weights than the model that computed the features in" in errors
    about = features / "train" / "features.json"
    content = json.loads(about.read_text())
    content["about"]["weights_sha256"] = "0"
    about.write_text(json.dumps(content))
    errors = nearest.refuses(features, query, "--model", moved)
    assert "hold features of different models; name the folder of one split" in errors


def test_a_model_with_the_same_tensors_is_not_the_same_model(
    nearest: Cli, features: Path, tmp_path: Path, cli: Cli
) -> None:
    query = tmp_path / "data" / "test" / "red" / "11.png"
    bundle = load(tmp_path / "model", device="cpu")
    network = bundle.network
    config = dataclasses.replace(network.config, reduction=TokenReduction(tokens=1))
    others = {"tokens": dataclasses.replace(bundle, network=with_weights(network, config, network.state_dict()))}
    others["mean"] = dataclasses.replace(bundle, preprocess=dataclasses.replace(bundle.preprocess, mean=(0.1,)))
    index = FeatureIndex.open(features)
    index.check(dataclasses.replace(bundle, metrics={"accuracy": 0.5}))
    for name, other in others.items():
        with pytest.raises(ConfigError, match="other preprocessing" if name == "mean" else "other settings"):
            index.check(other)
        model = other.save(tmp_path / name)
        if name != "mean":
            nearest.refuses(features, query, "--model", model)
        (tmp_path / "mixed").mkdir(exist_ok=True)
        shutil.copytree(features / "train", tmp_path / "mixed/train", dirs_exist_ok=True)
        words = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "mixed"), "--overwrite", "--no-cache"]
        cli.shows("embed", model, *words, "--split", "test", "--precision", "float32")
        with pytest.raises(DataError, match="different models"):
            FeatureIndex.open(tmp_path / "mixed")
    expected = nearest.json(features, query)
    again = nearest.json(features, query, "--model", tmp_path / "mean")
    assert again == expected, "prepared as the features are"


def test_vectors_of_a_search_are_rows(features: Path, types_unchecked: None) -> None:
    index = FeatureIndex.open(features)
    assert index.search(index.features[:2].tolist()) == index.search(index.features[:2])
    with pytest.raises(DataError, match=r"vectors of shape \(\d+,\) must be rows"):
        index.search(index.features[0])
    with pytest.raises(ConfigError, match=r"top=1\.5 is not a whole number"):
        index.search(index.features, top=1.5)


def test_features_of_earlier_versions_are_searched_with_a_warning(nearest: Cli, features: Path, tmp_path: Path) -> None:
    about = features / "test" / "features.json"
    content = json.loads(about.read_text())
    content["about"] = {"data": "x"}
    about.write_text(json.dumps(content))
    query = tmp_path / "data" / "train" / "red" / "01.png"
    errors = nearest.refuses(features / "test", query)
    assert "does not record the model that computed its features; name it with --model" in errors
    printed = nearest.call(features / "test", query, "--model", tmp_path / "model", "--json", "--top", "99")
    out, errors = printed.out, printed.err
    assert "does not record the weights of its model" in errors
    assert {each["image"] for each in json.loads(out)["nearest"]} == {"blue/11.png", "green/11.png", "red/11.png"}
