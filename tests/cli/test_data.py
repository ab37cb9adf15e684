"""Tests of `vitrail data check` and `vitrail data pack`."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import Cli
from tests.make import make_colour_folder
from vitrail.data.check.findings import Report
from vitrail.data.check.report import check_data
from vitrail.data.formats.tar import open_shards
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
def test_a_clean_set_is_said_to_be_one(colour_folder: Path, here: Path, cli: Cli) -> None:
    shown = cli.shows("data", "check", colour_folder)
    assert "Nothing wrong found in 36 images." in shown
    assert "training images are held out for validation" in shown
    assert "PNG RGB (36)" in shown and "30 x 9 to 20 x 19 (width x height)" in shown
    assert "pictures of it: data-check.html" in shown
    assert (here / "data-check.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_data_too_small_to_hold_out_a_fraction_is_checked(tmp_path: Path, cli: Cli) -> None:
    shown = cli.shows("data", "check", make_colour_folder(tmp_path / "small", images=1), "--page", "None")
    assert "choose 0 to hold out none" in shown and "PNG RGB (3)" in shown


def test_what_training_fails_at_is_exit_code_2_and_one_line(broken: Path, cli: Cli) -> None:
    captured = cli.call("data", "check", broken, "--max-skipped", "0", code=2)
    assert captured.err == f"vitrail: training on {str(broken)!r} would fail: 1 train image cannot be decoded\n"
    assert "train: red/broken.png (is empty (0 bytes))" in captured.out
    assert "skips some of these images and then stops, because --max-skipped allows 0 images." in captured.out
    cli.shows("data", "check", broken)


def test_the_json_is_the_report_and_the_page_goes_where_it_is_told(broken: Path, here: Path, cli: Cli) -> None:
    words = ["data", "check", broken, "--json", "--max-skipped", "0", "--page"]
    captured = cli.call(*words, "a.html", code=2)
    report = from_plain(Report, json.loads(captured.out))
    assert report == check_data(open_data(str(broken), validation_share=0.1), max_skipped=0.0)
    assert [path.name for path in here.iterdir()] == ["a.html"] and "pictures of it: a.html\n" in captured.err
    captured = cli.call(*words, "None", "--sample", "9", code=2)
    assert sum(split["looked_at"] for split in json.loads(captured.out)["splits"]) == 9
    assert captured.err.count("\n") == 1 and [path.name for path in here.iterdir()] == ["a.html"]


def test_a_full_disk_leaves_the_earlier_page(colour_folder: Path, here: Path, cli: Cli) -> None:
    cli.shows("data", "check", colour_folder)
    before = (here / "data-check.html").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # no file of this process can grow past it
    try:
        cli.call("data", "check", colour_folder, code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (here / "data-check.html").read_bytes() == before


@pytest.mark.parametrize("typed", [["age", "height"], ["age,height"], ["age,", "height"]])
def test_tables_of_numbers_are_checked_and_constant_numbers_found(
    typed: list[str], tmp_path: Path, here: Path, cli: Cli
) -> None:
    lines = ["path,age,height,legs"]
    for number in range(20):
        Image.new("L", (9 + number, 7), 90).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{number},{'' if number == 3 else 2 * number},{'' if number == 3 else 5}")
    (tmp_path / "people.csv").write_text("\n".join(lines))
    shown = cli.shows("data", "check", tmp_path / "people.csv", "--page", "None", "--numbers", *typed)
    assert "2 of its 20 training images are held out" in shown
    report = cli.json("data", "check", tmp_path / "people.csv", "--page", "None", "--numbers", "legs", "height")
    (found,) = (one for one in report["findings"] if one["kind"] == "constant-number")
    assert (found["severity"], found["count"]) == ("warning", 1) and found["text"].endswith(": legs")
    out = tmp_path / "shards"
    cli.shows("data", "pack", tmp_path / "people.csv", out, "--numbers", *typed)
    packed = open_data(str(out), validation_share=0.0, numbers=("height",))
    assert packed.train.target(19) == (2.0 * int(packed.train.key(19).rpartition("/")[2].partition(".")[0]),)


def test_images_without_labels_are_checked(tmp_path: Path, here: Path, cli: Cli) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(10):
        Image.new("RGB", (9, 7), (number, 3 * number, 0)).save(tmp_path / "photos" / f"{number}.png")
    words = ["data", "check", str(tmp_path / "photos"), "--page", "None"]
    assert "1 of its 10 training images are held out" in cli.shows(*words, "--unlabelled")
    cli.shows("data", "pack", tmp_path / "photos", tmp_path / "shards", "--unlabelled")
    assert len(open_data(str(tmp_path / "shards"), validation_share=0.0, unlabelled=True).train) == 10


def test_faults_of_the_structure_are_findings(colour_folder: Path, here: Path, cli: Cli) -> None:
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
    captured = cli.call("data", "check", colour_folder, code=2)
    for text in ("unknown classes: mauve", "leaves out 1 image of val/", "without images: bare"):
        assert text in captured.out
    assert f"would fail: {colour_folder}/val has unknown classes: mauve" in captured.err
    page = (here / "data-check.html").read_text(encoding="utf-8")
    assert "has unknown classes: mauve" in page and "without images: bare" in page
    printed = cli.call("data", "check", colour_folder, "--json", "--page", "None", code=2).out
    kinds = [finding["kind"] for finding in json.loads(printed)["findings"]]
    assert {"unknown-class", "empty-folder"} <= set(kinds)


def test_labels_are_chosen_by_options(colour_folder: Path, cli: Cli) -> None:
    images = sorted(path.relative_to(colour_folder).as_posix() for path in colour_folder.rglob("*.png"))
    labels = ["cat", "fox", "cat|fox", "None"] * 3
    rows = [f"{image},{label}" for image, label in zip(images, labels, strict=False)]
    table = colour_folder / "labels.csv"
    table.write_text("\n".join(["path,label", *rows]) + "\n")

    def classes(*words: str) -> list[str]:
        return list(cli.json("data", "check", table, "--page", "None", *words)["classes"])

    assert "--label-separator '|'" in cli.refuses("data", "check", table)
    assert classes("--label-separator", "|") == ["cat", "fox"]
    assert classes("--label-separator", "none") == ["cat", "cat|fox", "fox"]
    assert classes("--label-separator", "none", "--keep-missing-words") == ["None", "cat", "cat|fox", "fox"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Return a function that makes two class folders with the given number of images in each."""
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))

    def make(count: int) -> Path:
        random = np.random.default_rng(0)
        for name in ("daisy", "rose"):
            (tmp_path / "flowers" / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (20, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "flowers" / name / f"{number:04}.png")
        return tmp_path / "flowers"

    return make


def test_a_folder_is_packed_and_said_to_be(folder: Callable[[int], Path], tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "out"
    source = folder(3)
    (source / "rose" / "bad.jpg").write_bytes(b"no image")
    words = ["data", "pack", str(source), str(out), "--shard-size", "8kB", "--max-side", "10", "--workers", "2"]
    shown = cli.shows(*words)
    assert "train: 7 images, 6 of them scaled down, in 4 shards of 0.0 MB in all" in shown
    assert "1 of the images cannot be read and were copied as they are:\n  rose/bad.jpg: is not an image" in shown
    assert f"The shards are in {out}. Train on them: vitrail train --data {out}" in shown
    assert len(open_shards(str(out), None).train) == 7
    assert cli.shows(*words).endswith(shown)


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_soft_pseudo_labels_become_classes_and_this_is_said(
    labels: str, model: Path, some_images: Path, tmp_path: Path, cli: Cli
) -> None:
    folder, out = str(tmp_path / "labels"), tmp_path / "out"
    words = ["--teacher", str(model), "--pseudo-labels", labels, "--confidence", "0", "--no-balance", "--device", "cpu"]
    cli.shows("data", "label", f"{some_images}[:30]", "--out", folder, *words)
    labelled = open_data(folder, validation_share=0.0).train
    is_told = "only the most likely class of each image is packed" in cli.shows("data", "pack", folder, out)
    assert is_told == (labels == "soft")
    packed = open_shards(str(out), None).train
    assert [packed.target(row) for row in range(30)] == [labelled.target(row) for row in range(30)]


def test_ctrl_c_stops_with_code_75_and_says_how_to_go_on(
    folder: Callable[[int], Path], tmp_path: Path, cli: Cli
) -> None:
    source, out = folder(60), tmp_path / "out put"
    words = ["data", "pack", str(source), str(out), "--shard-size", "30000"]

    def interrupt() -> None:
        while not list(out.glob("train-*.tar")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt)
        errors = cli.call(*words, code=75).err
    assert errors.startswith("vitrail: stopped: ") and "Traceback" not in errors
    assert errors.endswith(f"\nContinue with: vitrail data pack {source} '{out}' --shard-size 30000\n")
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    cli.shows(*words)
    assert kept and all((out / name).stat().st_mtime_ns == changed for name, changed in kept.items())
    assert len(open_shards(str(out), None).train) == 120
