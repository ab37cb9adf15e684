"""Tests of `vitrail data check`."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.make import make_colour_folder
from vitrail.cli import main
from vitrail.data.check.findings import Report
from vitrail.data.check.report import check_data
from vitrail.data.sources import open_data
from vitrail.settings import from_plain


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def broken(colour_folder: Path) -> Path:
    """The folder of colours with a file that is not an image, which is more than a hundredth of the files."""
    (colour_folder / "red" / "broken.png").write_bytes(b"")
    return colour_folder


@pytest.mark.slow
def test_a_clean_set_is_said_to_be_one(colour_folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(colour_folder)]) == 0
    shown = capsys.readouterr().out
    assert "Nothing wrong found in 36 images." in shown
    assert "training images are held out for validation" in shown
    assert "PNG RGB (36)" in shown and "30 x 9 to 20 x 19 (width x height)" in shown
    assert "pictures of it: data-check.html" in shown
    assert (here / "data-check.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_what_training_fails_at_is_exit_code_2_and_one_line(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(broken), "--max-skipped", "0"]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"vitrail: training on {str(broken)!r} would fail: 1 train image cannot be decoded\n"
    assert "train: red/broken.png (is empty (0 bytes))" in captured.out
    assert "skips some of these images and then stops, because --max-skipped allows 0 images." in captured.out
    assert main(["data", "check", str(broken)]) == 0


def test_json_is_the_report(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(broken), "--json", "--page", "None", "--max-skipped", "0"]) == 2
    captured = capsys.readouterr()
    report = from_plain(Report, json.loads(captured.out))
    assert report == check_data(open_data(str(broken), validation_share=0.1), max_skipped=0.0)
    assert captured.err.count("\n") == 1


def test_the_page_goes_where_it_is_told(colour_folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(colour_folder), "--page", "a.html", "--json"]) == 0
    assert [path.name for path in here.iterdir()] == ["a.html"]
    captured = capsys.readouterr()
    assert captured.err == "pictures of it: a.html\n"
    assert main(["data", "check", str(colour_folder), "--page", "None"]) == 0
    assert [path.name for path in here.iterdir()] == ["a.html"]


def test_a_full_disk_leaves_the_earlier_page(
    colour_folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "check", str(colour_folder)]) == 0
    before = (here / "data-check.html").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # no file of this process can grow past it
    try:
        assert main(["data", "check", str(colour_folder)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (here / "data-check.html").read_bytes() == before


def test_a_sample_is_deterministic(colour_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for threads in ("1", "3"):
        words = ["data", "check", str(colour_folder), "--sample", "9", "--json", "--page", "None"]
        assert main([*words, "--threads", threads]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert sum(split["looked_at"] for split in json.loads(shown[0])["splits"]) == 9


def test_copies_are_named_side_by_side(colour_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(colour_folder / "blue" / "03.png", colour_folder / "red" / "again.png")
    assert main(["data", "check", str(colour_folder), "--validation-share", "0"]) == 0
    shown = capsys.readouterr().out
    assert "train: blue/03.png = train: red/again.png" in shown
    assert "warning 2 images in 1 group of copies with different labels (identical pixels)" in shown


@pytest.mark.slow
def test_many_classes_are_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(30):
        (tmp_path / "data" / f"class-{number:02}").mkdir(parents=True)
        for image in range(2):
            pixels = Image.linear_gradient("L").resize((9 + number, 7)).rotate(180 * image)
            pixels.save(tmp_path / "data" / f"class-{number:02}" / f"{image}.png")
    main(["data", "check", str(tmp_path / "data"), "--validation-share", "0"])
    shown = capsys.readouterr().out
    assert "10 more" in shown and "class-19" in shown and "class-20 " not in shown


@pytest.mark.parametrize("typed", [["age", "height"], ["age,height"], ["age,", "height"]])
def test_tables_of_numbers_are_checked(
    typed: list[str], tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["path,age,height"]
    for number in range(20):
        Image.new("L", (9 + number, 7), 90).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{number},{'' if number == 3 else 2 * number}")
    (tmp_path / "people.csv").write_text("\n".join(lines))
    assert main(["data", "check", str(tmp_path / "people.csv"), "--page", "None", "--numbers", *typed]) == 0
    assert "2 of its 20 training images are held out" in capsys.readouterr().out
    out = tmp_path / "shards"
    assert main(["data", "pack", str(tmp_path / "people.csv"), str(out), "--numbers", *typed]) == 0
    packed = open_data(str(out), validation_share=0.0, numbers=("height",))
    assert packed.train.target(19) == (2.0 * int(packed.train.key(19).rpartition("/")[2].partition(".")[0]),)


def test_a_constant_number_is_found(tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["path,age,height"]
    for number in range(10):
        Image.new("L", (9 + number, 7), 90).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{'' if number == 3 else 5},{number}")
    (tmp_path / "people.csv").write_text("\n".join(lines))
    typed = ["--numbers", "age", "height", "--page", "None", "--json"]
    assert main(["data", "check", str(tmp_path / "people.csv"), *typed]) == 0
    findings = {one["kind"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    found = findings["constant-number"]
    assert (found["severity"], found["count"]) == ("warning", 1) and found["text"].endswith(": age")


def test_a_fraction_that_has_no_effect_is_noted(tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_colour_folder(tmp_path / "train")
    make_colour_folder(tmp_path / "val")
    words = ["data", "check", str(tmp_path), "--page", "None"]
    for typed, is_noted in (((), False), (("--validation-share", "0.3"), True)):
        assert main([*words, *typed]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert ("--validation-share has no effect" in shown) == is_noted
    assert main([*words, *typed, "--validation", "train"]) == 0
    assert "no effect" not in capsys.readouterr().out


def test_images_without_labels_are_checked(tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(10):
        Image.new("RGB", (9, 7), (number, 3 * number, 0)).save(tmp_path / "photos" / f"{number}.png")
    words = ["data", "check", str(tmp_path / "photos"), "--page", "None"]
    assert main(words) == 2
    assert "has images but no class folders" in capsys.readouterr().err
    assert main([*words, "--unlabelled"]) == 0
    assert "1 of its 10 training images are held out" in capsys.readouterr().out
    assert main(["data", "pack", str(tmp_path / "photos"), str(tmp_path / "shards"), "--unlabelled"]) == 0
    assert len(open_data(str(tmp_path / "shards"), validation_share=0.0, unlabelled=True).train) == 10


def test_faults_of_the_structure_are_findings(
    colour_folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them at once, in the terminal, in the JSON and on the page."""
    for place in ("bare", "__MACOSX", "red/@eaDir", "val/mauve", "val/red"):
        (colour_folder / place).mkdir(parents=True)
    first = min((colour_folder / "red").glob("*.*"))
    for place in ("red/@eaDir", "__MACOSX", "val/mauve", "val/red"):
        shutil.copy(first, colour_folder / place / "copy.png")
    (colour_folder / ".DS_Store").write_bytes(b"mac")
    (colour_folder / "train").mkdir()
    for entry in [entry for entry in colour_folder.iterdir() if entry.name not in ("train", "val", ".DS_Store")]:
        entry.rename(colour_folder / "train" / entry.name)
    assert main(["data", "check", str(colour_folder)]) == 2
    captured = capsys.readouterr()
    expected = (
        "error", f"{colour_folder}/val has unknown classes: mauve; the known classes are: ",
        "This check leaves out 1 image of val/.",
        f"warning {colour_folder}/train: skipped 1 class folder without images: bare",
        f"note {colour_folder}/train: skipped 2 folders of the system or of other programs: __MACOSX, red/@eaDir",
    )  # fmt: skip
    for text in expected:
        assert text in captured.out
    assert f"would fail: {colour_folder}/val has unknown classes: mauve" in captured.err
    page = (here / "data-check.html").read_text(encoding="utf-8")
    assert "has unknown classes: mauve" in page and "without images: bare" in page
    assert main(["data", "check", str(colour_folder), "--json", "--page", "None"]) == 2
    kinds = [finding["kind"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    assert {"unknown-class", "empty-folder", "system-folder"} <= set(kinds)


def test_labels_are_chosen_by_options(colour_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = sorted(path.relative_to(colour_folder).as_posix() for path in colour_folder.rglob("*.png"))
    labels = ["cat", "fox", "cat|fox", "None"] * 3
    rows = [f"{image},{label}" for image, label in zip(images, labels, strict=False)]
    table = colour_folder / "labels.csv"
    table.write_text("\n".join(["path,label", *rows]) + "\n")

    def classes(*words: str) -> list[str]:
        assert main(["data", "check", str(table), "--page", "None", "--json", *words]) == 0
        return list(json.loads(capsys.readouterr().out)["classes"])

    assert main(["data", "check", str(table)]) == 2
    assert "--label-separator '|'" in capsys.readouterr().err
    assert classes("--label-separator", "|") == ["cat", "fox"]
    assert classes("--label-separator", "none") == ["cat", "cat|fox", "fox"]
    assert classes("--label-separator", "none", "--keep-missing-words") == ["None", "cat", "cat|fox", "fox"]
