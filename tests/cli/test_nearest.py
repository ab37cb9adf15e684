"""Tests of `vitrail nearest`."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from torch.nn.functional import cosine_similarity

from tests.cli.conftest import Cli
from tests.make import make_split_colours, small_model
from vitrail.cli import main
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.features.index import FeatureIndex
from vitrail.models.network import with_weights
from vitrail.models.reduction import TokenReduction
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load


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


@pytest.mark.slow
def test_an_image_is_not_its_own_neighbour_under_another_spelling_of_its_folder(
    nearest: Cli, features: Path, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "other").mkdir()
    again = tmp_path / "other" / "features"
    data = tmp_path / "other" / ".." / "data"
    words = ["embed", str(tmp_path / "model"), "--data", str(data), "--out", str(again), "--no-cache"]
    cli.call(*words, "--precision", "float32")
    query = tmp_path / "data" / "train" / "green" / "03.png"
    images = [each["image"] for each in nearest.json(again, query, "--top", "3")["nearest"]]
    assert len(images) == 3 and not any(Path(image).samefile(query) for image in images)


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
    others: dict[str, Bundle] = {}
    for name, changes in {"heads": {"heads": 1}, "reduction": {"reduction": TokenReduction(tokens=1)}}.items():
        config = dataclasses.replace(network.config, **changes)
        others[name] = dataclasses.replace(bundle, network=with_weights(network, config, network.state_dict()))
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
