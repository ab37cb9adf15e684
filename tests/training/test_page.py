"""The pages of runs, their example images, and the pictures of runs without labels."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.make import MemorySource, make_bundle
from tests.training.jobs import Make, events_of, train_until
from vitrail.data.formats.folder import read_folder
from vitrail.data.pixels.decode import decode
from vitrail.errors import SaveError
from vitrail.report.page import is_our_page
from vitrail.tasks.pictures import Picture, PictureTable
from vitrail.training import page as progress
from vitrail.training.page import ProgressPage, write_examples, write_pictures
from vitrail.training.run import resume, train


@pytest.mark.slow
def test_the_page_grows_with_the_run(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, versions = tmp_path / "a <run>", []
    plain = ProgressPage.write

    def kept(self: ProgressPage) -> None:
        plain(self)
        versions.append((run / "progress.html").read_text(encoding="utf-8"))

    monkeypatch.setattr(ProgressPage, "write", kept)
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    train_until(small(run, threads=0, learning_rate=0.005), 9)
    assert "The run is in progress: 4 of 24 steps were done" in versions[0]
    assert "The run was stopped after 9 of 24 steps. Continue it with vitrail train --resume" in versions[-1]
    stopped = versions[-1]
    assert "<h2>Held-out images</h2>" not in versions[-1] and "a &lt;run&gt;" in versions[-1]
    resume(run)
    assert any("The run is in progress: " in version for version in versions[versions.index(stopped) + 1 :])
    page = (run / "progress.html").read_text(encoding="utf-8")
    assert page == versions[-1] and "The run is finished, after 24 of 24 steps." in page
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["Held-out images", "Curves", "Settings"]
    assert "<td>learning rate</td><td>0.005</td>" in page and "<td>weight decay rule</td>" not in page
    *_, tested = events_of(run, "evaluation")
    assert tested["split"] == "test" and f"<td>test</td><td>accuracy {tested['accuracy']:.2%}</td>" in page
    pairs = re.findall(r"true: (.*?)<br>predicted: (.*?)<br>[\d.]+%", page)
    right = [truth == predicted for truth, predicted in pairs]
    assert len(pairs) == 10 and right == sorted(right), "the wrong ones first"
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", ""), "the page asks for nothing"


@pytest.mark.slow
def test_versions_are_half_a_minute_apart(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(ProgressPage, "write", lambda self: written.append(1))
    train(small(tmp_path / "run", threads=0, steps=8, evaluations=4, checkpoints=4))
    assert len(written) == 2, "after the first evaluation, and at the end"


def test_they_are_spread_over_the_source(colour_folder: Path, tmp_path: Path) -> None:
    bundle, source = make_bundle(), read_folder(colour_folder).samples
    examples = write_examples(bundle, source, tmp_path / "examples", count=6)
    assert [example.label for example in examples] == ["blue", "blue", "green", "green", "red", "red"]
    assert [example.path.name for example in examples] == [
        "00-blue.png", "01-blue.png", "02-green.png", "03-green.png", "04-red.png", "05-red.png",
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "examples").iterdir()) == [e.path.name for e in examples]
    for number, example in enumerate(examples):
        original = (colour_folder / source.key(number * 36 // 6)).read_bytes()
        assert np.array_equal(decode(example.path.read_bytes(), 3), decode(original, 3))
        expected = bundle.predict([original])[0]
        assert example.prediction.label == expected.label
        assert dict(example.prediction.ranking) == pytest.approx(dict(expected.ranking), abs=1e-6)


def test_broken_and_unlabelled_samples_are_left_out(tmp_path: Path) -> None:
    classes, folder = ("T-shirt/top", "../escape", "\u4e2d"), tmp_path / "run" / "examples"
    images = [b"" if index == 1 else np.full((20, 10, 3), 50 * index, np.uint8) for index in range(5)]
    examples = write_examples(make_bundle(), MemorySource(images, labels=[0, 0, None, 1, 2], classes=classes), folder)
    assert [example.label for example in examples] == [*classes]
    assert {path.parent for path in (example.path for example in examples)} == {folder}
    assert sorted(path.name for path in folder.iterdir()) == ["00-T-shirt-top.png", "01--escape.png", "02-中.png"]


ROW = tuple(Picture(Image.new("L", (4, 3), number), (f"picture {number}", "<b>")) for number in range(3))


def test_a_page_has_metrics_and_every_picture(tmp_path: Path) -> None:
    tables = [PictureTable("Restored patches", "One & two.", (ROW, ROW)), PictureTable("More", "Text.", (ROW,))]
    path = tmp_path / "report.html"
    write_pictures(tmp_path, "A <network>", [("validation", "patch loss 0.1235")], tables)
    assert is_our_page(path)
    page = path.read_text(encoding="utf-8")
    assert page.count("<img ") == 9 and page.count('<div class="strip">') == 3 and "A &lt;network&gt;" in page
    assert "patch loss 0.1235" in page and "&lt;b&gt;" in page and "One &amp; two." in page
    assert page.index("patch loss 0.1235") < page.index("Restored patches") < page.index("More")
    assert not list(tmp_path.glob("*partial*"))


def test_without_pictures_there_is_no_page(tmp_path: Path) -> None:
    write_pictures(tmp_path, "A network", [("test", "loss 1")], ())
    assert not list(tmp_path.iterdir())


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="the report"):
        write_pictures(tmp_path / "missing", "A network", (), [PictureTable("More", "Text.", (ROW,))])
