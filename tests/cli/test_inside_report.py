"""Tests of `vitrail report`."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from tests.analysis.test_comparison import BIT, bundle_of
from tests.cli.conftest import Cli
from tests.make import make_colour_folder
from vitrail.data.formats import parquet


@pytest.fixture
def report(colour_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Reports on the model in `tmp_path / "model"`."""
    return Cli(capsys, "report", tmp_path / "model", "--data", colour_folder, "--out", tmp_path / "report")


FAST = ("--images", "4", "--bootstrap", "0", "--probe-images", "0", "--saliency-images", "0")


@pytest.mark.slow
def test_a_page_figures_and_numbers_are_written(tmp_path: Path, report: Cli) -> None:
    bundle_of(seed=3).save(tmp_path / "model")
    out = tmp_path / "report"
    given = ["--images", "8", "--saliency-images", "4"]
    shown = report.shows(*given)
    found = json.loads((out / "report.json").read_text())
    assert f"{found['accuracy']['value']:.2%} accuracy on {found['images']} images" in shown
    assert len(found["probes"]) == len(found["similarity"]) == 2
    page = (out / "report.html").read_text()
    assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")
    figures = [*out.glob("*.svg")]
    assert {"deletion", "distance", "embedding", "probes", "similarity"} <= {path.stem for path in figures}
    assert all(ElementTree.parse(path).getroot().tag.endswith("svg") for path in figures)
    for name in ("filters", "positions", "patches"):
        with Image.open(out / f"{name}.png") as picture:
            assert min(picture.size) > 4
    (_, *rows) = csv.reader((out / "saliency.csv").read_text().splitlines())
    assert [row[0] for row in rows] == [one["name"] for one in found["saliency"]]
    assert [float(row[1]) for row in rows] == [one["deletion"]["value"] for one in found["saliency"]]
    assert rows[-1][0] == "random" and rows[-1][3:] == ["", ""], "a random order has no maps to compare"
    assert report.json(*given, "--overwrite") == found


@pytest.mark.slow
def test_a_resnet_has_no_pictures_of_attention(tmp_path: Path, report: Cli) -> None:
    bundle_of(size=(16, 16), **BIT).save(tmp_path / "model")
    out = tmp_path / "report"
    report.shows("--images", "4", "--probe-images", "0")
    assert not (out / "saliency.csv").exists()
    assert sorted(path.name for path in out.iterdir() if path.suffix in (".svg", ".png")) == [
        "distance.svg", "embedding.svg", "patches.png", "similarity.svg",
    ]  # fmt: skip
    assert "Not shown: a network of the architecture" in (out / "report.html").read_text()


@pytest.mark.slow
def test_the_embeddings_are_a_table_for_other_programs(
    colour_folder: Path, tmp_path: Path, report: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of(seed=3)
    bundle.save(tmp_path / "model")
    out = tmp_path / "report"
    assert "use --split all to measure every image" in report.shows(*FAST)
    every = (*FAST, "--split", "all", "--overwrite")
    report.shows(*every)
    rows = list(csv.DictReader((out / "embedding.csv").read_text().splitlines()))
    found = pyarrow.parquet.read_table(out / "embedding.parquet")
    assert found.column_names == ["key", "class", "predicted", "probability", "component_1", "component_2", "feature"]
    assert str(found.schema.field("feature").type) == "fixed_size_list<element: float>[8]"
    columns = found.to_pydict()
    for name in found.column_names[:-1]:
        assert [str(value) for value in columns[name]] == [row[name] for row in rows]
    files = [colour_folder / key for key in columns["key"]]
    assert len(files) == 36 and columns["class"] == [file.parent.name for file in files]
    assert np.allclose(np.array(columns["feature"]), bundle.embed(files).numpy(), atol=1e-5)
    assert columns["predicted"] == [one.label for one in bundle.predict(files)]
    parquet.pyarrow.cache_clear()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    needs = "embedding.parquet was not written: writing Parquet needs pyarrow: pip install 'vitrail[parquet]'"
    assert needs in report.shows(*every)
    assert not (out / "embedding.parquet").exists() and (out / "embedding.csv").is_file()


def test_a_model_without_a_head_has_a_report(tmp_path: Path, report: Cli) -> None:
    bundle_of(seed=3, classes=()).save(tmp_path / "model")
    out = tmp_path / "report"
    shown = report.shows("--split", "train", "--images", "8")
    found = json.loads((out / "report.json").read_text())
    assert f"a model without a head, looked into on {found['images']} images" in shown
    assert "accuracy" not in found and found["saliency"] is None and found["errors"] == []
    page = (out / "report.html").read_text()
    assert "A model without a head, looked into on" in page and "<h2>Embeddings" in page and "<h2>Classes" not in page
    assert "Not shown: measurements of saliency maps, which need the classes of a head." in page
    assert (out / "embedding.csv").read_text().startswith("key,class,component_1,component_2\n")
    assert not (out / "classes.csv").exists()


def test_images_without_labels_show_what_a_model_without_a_head_learned(tmp_path: Path, cli: Cli) -> None:
    bundle_of(seed=3, classes=()).save(tmp_path / "model")
    photos = make_colour_folder(tmp_path / "colours", images=5) / "red"
    words = ["report", tmp_path / "model", "--data", photos, "--split", "all", "--out", tmp_path / "report"]
    shown = cli.call(*words, "--images", "4", "--json")
    assert json.loads(shown.out)["images"] == 5 and "without labels" in shown.err
    rows = csv.DictReader((tmp_path / "report" / "embedding.csv").read_text().splitlines())
    assert {row["class"] for row in rows} == {""}
    bundle_of(seed=3).save(tmp_path / "model", overwrite=True)
    assert "no class folders" in cli.refuses(*words, "--overwrite")


def test_what_needs_a_head_is_refused_without_one(tmp_path: Path, report: Cli) -> None:
    bundle_of(seed=3, classes=()).save(tmp_path / "model")
    assert "--examples: 3" in report.refuses("--examples", "3")
    bundle_of(seed=3, output="numbers").save(tmp_path / "model", overwrite=True)
    assert "predicts numbers" in report.refuses("--data", tmp_path / "nowhere")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder of training and test images, each with a JPEG that cannot be decoded."""
    for split in ("train", "test"):
        folder = make_colour_folder(tmp_path / "data" / split, images=3)
        (folder / "red" / f"{split}.jpg").write_bytes(b"\xff\xd8\xff\xe0 nothing more")
    return tmp_path / "data"


@pytest.mark.slow
def test_all_reports_on_the_images_of_every_split(broken: Path, tmp_path: Path, cli: Cli) -> None:
    bundle_of(seed=3).save(tmp_path / "model")
    given = ["report", tmp_path / "model", "--data", broken, "--out", tmp_path / "report", "--json", "--split", "all"]
    shown = cli.call(*given, "--bootstrap", "0", "--saliency-images", "0")
    found = json.loads(shown.out)
    assert found["images"] == 18 and not found["probes"]
    assert "a linear model of each layer, which would be measured on images that it learned from" in found["notes"]
    assert "skipped 1:red/train.jpg" in shown.err and "skipped 2:red/test.jpg" in shown.err
