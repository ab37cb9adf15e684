"""Tests of the data check: it finds every planted problem, and nothing else, and no name becomes markup."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.make import MemorySource, encode, make_png, orientation
from vitrail.data.check.findings import Report, quick_check
from vitrail.data.check.images import Oddity, colour_note, has_colour, images_of, look
from vitrail.data.check.report import check_data, page
from vitrail.data.formats.pack import pack
from vitrail.data.source import Sample, Source, samples_of
from vitrail.data.sources import open_data
from vitrail.data.splits import Splits
from vitrail.data.targets import Targets
from vitrail.errors import UndecodableImage
from vitrail.settings import from_plain, to_plain


def picture(seed: int, width: int = 64, height: int = 48) -> Image.Image:
    """Return a smooth random picture in colour that differs for each seed."""
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def save(path: Path, image: Image.Image, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


def make_clean(root: Path) -> Path:
    for number, name in enumerate(("a", "b", "c")):
        for index in range(12):
            save(root / "train" / name / f"{index:02}.png", picture(100 * number + index))
        for index in range(4):
            save(root / "val" / name / f"{index:02}.png", picture(100 * number + 50 + index))
    return root


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the quick check look at all images, also on a busy machine."""
    monkeypatch.setattr("vitrail.data.check.findings.QUICK_SECONDS", math.inf)


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    return make_clean(tmp_path / "clean")


@pytest.fixture(scope="module")
def messy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid data set with one or a few examples of each problem."""
    root = make_clean(tmp_path_factory.mktemp("messy") / "data")
    train, val = root / "train", root / "val"
    shutil.rmtree(val / "c")
    save(train / "lonely" / "1.png", picture(1000))
    save(val / "lonely" / "2.png", picture(1001))
    see_through = picture(1002).convert("RGBA")
    see_through.putalpha(Image.linear_gradient("L").resize(see_through.size))
    save(train / "a" / "rgba.png", see_through)
    save(train / "a" / "cmyk.jpg", picture(1003).convert("CMYK"), quality=95)
    save(train / "a" / "deep.png", Image.fromarray(np.asarray(picture(1004).convert("L")).astype(np.uint16) * 256))
    save(train / "a" / "turned.jpg", picture(1005), exif=orientation(6))
    frames = [picture(1006), picture(1007)]
    save(train / "a" / "moving.gif", frames[0], save_all=True, append_images=frames[1:])
    save(train / "b" / "cut.jpg", picture(1008), quality=95)
    (train / "b" / "cut.jpg").write_bytes((train / "b" / "cut.jpg").read_bytes()[:900])
    (train / "b" / "page.jpg").write_text("<html><body>404</body></html>")
    (val / "b" / "empty.png").write_bytes(b"")
    save(train / "c" / "dot.png", Image.new("RGB", (1, 1), (10, 200, 30)))
    save(train / "c" / "white.png", Image.new("RGB", (64, 48), "white"))
    save(train / "c" / "giant.png", picture(1009, 640, 480))
    shutil.copy(train / "a" / "03.png", val / "a" / "holiday.png")
    save(val / "b" / "smaller.jpg", Image.open(train / "b" / "07.png").resize((48, 36)), quality=85)
    save(train / "b" / "again.jpg", Image.open(train / "b" / "05.png").resize((90, 66)), quality=80)
    save(train / "c" / "same.bmp", Image.open(train / "c" / "02.png"))
    save(train / "b" / "twin.png", Image.open(train / "a" / "08.png"), compress_level=1)
    return root


@pytest.fixture(scope="module")
def messy_report(messy: Path) -> Report:
    return check_data(open_data(str(messy), validation_share=0.1))


def accused(report: Report) -> dict[str, list[list[str]]]:
    """Return the kinds of findings, with the images that they name. Copies of each other are in one group."""
    found = report.findings
    return {each.kind: [sorted(f"{one.split}/{one.key}" for one in group) for group in each.groups] for each in found}


@pytest.mark.slow
def test_every_planted_fault_is_found_and_nothing_else(messy_report: Report) -> None:
    assert accused(messy_report) == {
        "undecodable-in-train": [["train/b/cut.jpg"], ["train/b/page.jpg"]],
        "undecodable-in-validation": [["validation/b/empty.png"]],
        "leak": [["train/a/03.png", "validation/a/holiday.png"]],
        "near-leak": [["train/b/07.png", "validation/b/smaller.jpg"]],
        "contradiction": [["train/a/08.png", "train/b/twin.png"]],
        "duplicates": [["train/c/02.png", "train/c/same.bmp"]],
        "near-duplicates": [["train/b/05.png", "train/b/again.jpg"]],
        "blank": [["train/c/dot.png"], ["train/c/white.png"]],
        "unusual-size": [["train/c/dot.png"], ["train/c/giant.png"]],
        "transparent": [["train/a/rgba.png"]],
        "cmyk": [["train/a/cmyk.jpg"]],
        "deep": [["train/a/deep.png"]],
        "turned": [["train/a/turned.jpg"]],
        "animated": [["train/a/moving.gif"]],
        "missing-in-validation": [],
        "single-image-class": [],
        "imbalance": [],
    }


def test_findings_say_what_and_how_grave(messy: Path, messy_report: Report) -> None:
    """Three broken images are tolerated by default."""
    tolerated = {finding.kind: finding.severity for finding in messy_report.findings}
    assert tolerated["undecodable-in-train"] == "warning"
    report = check_data(open_data(str(messy), validation_share=0.1), max_skipped=0.0)
    found = {finding.kind: finding for finding in report.findings}
    assert [finding.kind for finding in report.errors] == ["undecodable-in-train"] == [report.findings[0].kind]
    broken = found["undecodable-in-train"]
    assert broken.text == "2 train images cannot be decoded" and "--max-skipped allows 0" in broken.training
    assert "is not an image in a format of" in broken.groups[1][0].detail
    assert found["undecodable-in-validation"].severity == "warning"
    assert found["undecodable-in-validation"].groups[0][0].detail == "is empty (0 bytes)"
    assert found["unusual-size"].groups[1][0].detail == "640 x 480"
    assert found["contradiction"].text == "2 images in 1 group of copies with different labels (identical pixels)"
    assert (found["duplicates"].count, found["duplicates"].severity) == (1, "note"), "the pair above is not in it"
    assert (report.sizes.smallest, report.sizes.median, report.sizes.largest) == ((1, 1), (64, 48), (640, 480))
    assert report.kinds["JPEG CMYK"] == 1 and sum(report.kinds.values()) == report.images - 3
    assert report.looked_at == report.images


def test_a_clean_set_has_no_findings(clean: Path) -> None:
    calls: list[tuple[int, int]] = []
    splits = open_data(str(clean), validation_share=0.1)
    report = check_data(splits, progress=lambda done, total: calls.append((done, total)))
    assert report.findings == () and report.notes == () and calls == [(48, 48)]
    assert [(one.name, one.per_class) for one in report.splits] == [("train", (12,) * 3), ("validation", (4,) * 3)]
    assert report.balance.effective == pytest.approx(3)


def test_a_report_is_the_same_with_one_thread_and_goes_through_json(messy: Path, messy_report: Report) -> None:
    assert check_data(open_data(str(messy), validation_share=0.1), threads=1) == messy_report
    assert from_plain(Report, json.loads(json.dumps(to_plain(messy_report)))) == messy_report


@pytest.mark.slow
def test_the_bundled_clothes_have_three_near_duplicates_and_one_that_is_taken_for_one() -> None:
    found = check_data(open_data("bundled", validation_share=0.0)).findings
    assert [(finding.kind, finding.count) for finding in found] == [("near-duplicates", 4)]
    copies = [("334", "4849"), ("1928", "3704"), ("3568", "5448")]
    alike = ("5081", "9664")  # the same jumper with another print
    assert [tuple(one.key for one in group) for group in found[0].groups] == [*copies, alike]


@pytest.mark.slow
def test_a_sample_is_the_same_every_time_and_counts_all_labels(clean: Path) -> None:
    splits = open_data(str(clean), validation_share=0.1)
    reports = [check_data(splits, sample=24, threads=threads) for threads in (1, 3)]
    assert reports[0] == reports[1]
    assert [split.looked_at for split in reports[0].splits] == [18, 6]
    assert sum(reports[0].splits[0].per_class) == 36
    assert reports[0].notes == ("checked 24 of 48 images; copies are found only among these",)
    assert check_data(splits, sample=1000) == check_data(splits)


def arrays(labels: list[object], first: int = 0) -> Source:
    """Return a source in memory of distinct grey pictures with these labels."""
    images = [np.asarray(picture(first + seed).convert("L"))[..., None] for seed in range(len(labels))]
    return MemorySource(images, labels=labels, classes=("x", "y"))


def test_a_file_that_is_gone_is_an_image_lost(clean: Path) -> None:
    splits = open_data(str(clean), validation_share=0.1)
    (clean / "train" / "a" / "03.png").unlink()
    (finding,) = check_data(splits, max_skipped=0.1).findings
    assert (finding.kind, finding.severity) == ("undecodable-in-train", "warning")
    (one,) = finding.groups[0]
    assert one.key == "a/03.png" and one.detail.endswith("a/03.png: No such file or directory")
    assert quick_check(splits)[2].startswith("warning: 1 of 36 checked images cannot be decoded, such as a/03.png: ")


def test_a_shard_that_is_gone_ends_training(clean: Path, tmp_path: Path) -> None:
    pack(open_data(str(clean), validation_share=0.1), tmp_path / "shards")
    splits = open_data(str(tmp_path / "shards"), validation_share=0.1)
    next((tmp_path / "shards").glob("train*.tar")).unlink()
    kinds = {finding.kind: finding for finding in check_data(splits, max_skipped=1.0).findings}
    assert kinds["unreadable-in-train"].severity == "error"
    assert "cannot read" in kinds["unreadable-in-train"].groups[0][0].detail


@pytest.fixture
def counting() -> tuple[Source, list[int]]:
    """A source of 20,000 images, and the numbers of those that were read."""
    read: list[int] = []

    class Counting(MemorySource):
        def __getitem__(self, index: int) -> Sample:
            read.append(index)
            return Sample(str(index), np.zeros((2, 3, 1), np.uint8), 0)

    return Counting(labels=[0, 1] * 10_000, classes=("x", "y")), read


def test_left_early_it_does_not_read_the_rest(counting: tuple[Source, list[int]]) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    source, read = counting
    with pytest.raises(KeyboardInterrupt):
        check_data(Splits(source, None, None), threads=2, progress=stop)
    assert len(read) < 10_000


def test_images_of_several_labels_and_of_none() -> None:
    several = Splits(arrays([(0,), (0, 1), (), (1,), (1,)]), None, None)
    report = check_data(several)
    assert report.findings == () and report.splits[0].per_class == (2, 3)
    (finding,) = check_data(Splits(arrays([0, 1, None, 0, 1]), arrays([0, None, 1], 50), None)).findings
    assert finding.kind == "unlabelled" and finding.text == "without a label: 1 train image, 1 validation image"
    report = check_data(Splits(arrays([0, 1, 0]), arrays([None]), None))
    (finding,) = (one for one in report.findings if one.kind == "unlabelled")
    assert finding.severity == "error" and "validation split" in finding.training
    nothing = check_data(Splits(arrays([None, None]), None, None))
    assert {item.kind for item in nothing.findings} == {"unlabelled", "missing-in-train"} and nothing.balance is None


def test_copies_of_other_labels_contradict_and_those_without_do_not() -> None:
    images = [np.asarray(picture(seed)) for seed in (0, 0, 1, 1, 2, 2)]
    labels = [(0, 1), (0,), 0, None, 1, 1]
    report = check_data(Splits(MemorySource(images, labels=labels, classes=("x", "y")), None, None))
    found = accused(report)
    assert found["contradiction"] == [["train/0", "train/1"]]
    assert found["duplicates"] == [["train/2", "train/3"], ["train/4", "train/5"]]
    texts = check_data(Splits(MemorySource(images[:2], labels=[("a bee",), ("a wasp",)]), None, None))
    assert {one.kind for one in texts.findings} & {"contradiction", "duplicates"} == {"duplicates"}


def test_grey_and_colour_of_the_same_picture_are_the_same() -> None:
    grey = np.asarray(picture(0).convert("L"))
    colour = np.asarray(picture(0))
    images = [grey[..., None], np.stack([grey] * 3, axis=-1), colour, np.ascontiguousarray(colour[..., ::-1])]
    report = check_data(Splits(MemorySource(images, labels=[0, 0, 0, 0], classes=("x", "y")), None, None))
    assert accused(report)["duplicates"] == [["train/0", "train/1"]]
    assert accused(report)["near-duplicates"] == [["train/0", "train/1", "train/2"]]  # the last one has other details


def test_leaks_are_counted_between_all_splits() -> None:
    def source(*seeds: int) -> Source:
        images = [np.asarray(picture(seed)) for seed in seeds]
        return MemorySource(images, labels=[seed % 2 for seed in seeds], classes=("x", "y"))

    splits = Splits(source(0, 1, 2, 3), source(4, 5, 0), source(6, 7, 0, 5, 3))
    found = {finding.kind: finding for finding in check_data(splits).findings}
    assert set(found) == {"leak"}
    assert found["leak"].text == (
        "1 validation image is a copy of a train image; 2 test images are copies of train images; "
        "2 test images are copies of validation images (identical pixels)"
    )
    assert found["leak"].count == 4


def test_a_near_duplicate_of_a_copy_is_counted_once() -> None:
    images = [np.asarray(picture(0)), np.asarray(picture(0, 128, 96)), np.asarray(picture(1))]
    train = MemorySource([images[0], images[2]], labels=[0, 1], classes=("x", "y"))
    test = MemorySource([images[0], images[1], images[1]], labels=[0, 0, 0], classes=("x", "y"))
    found = {finding.kind: finding for finding in check_data(Splits(train, None, test)).findings}
    assert {kind: finding.count for kind, finding in found.items() if "leak" in kind} == {"leak": 1, "near-leak": 2}
    assert found["near-leak"].text == "2 test images are near duplicates of train images"


def test_a_dark_image_among_bright_ones_differs() -> None:
    images = [np.asarray(picture(seed).convert("L"))[..., None] // 8 + 180 for seed in range(30)]
    images[4] = images[4] - 170
    report = check_data(Splits(MemorySource(images, labels=[0, 1] * 15, classes=("x", "y")), None, None))
    assert accused(report) == {"unusual-light": [["train/4"]]}


def test_many_rare_classes_are_an_imbalance() -> None:
    (finding,) = check_data(Splits(arrays([0] * 20 + [1] * 2), None, None)).findings
    assert finding.kind == "imbalance" and "10 times as many" in finding.text
    assert "the entropy of 1.4 classes of equal size" in finding.text  # exp(-(10/11 ln 10/11 + 1/11 ln 1/11)) = 1.356
    assert check_data(Splits(arrays([0] * 19 + [1] * 2), None, None)).findings == ()


def test_measured_numbers_as_classes_name_the_option() -> None:
    def kinds(names: tuple[str, ...], each: int) -> dict[str, str]:
        images = [np.asarray(picture(seed, 8, 6)) for seed in range(len(names) * each)]
        source = MemorySource(images, labels=[*range(len(names))] * each, classes=names)
        return {finding.kind: finding.advice for finding in check_data(Splits(source, None, None)).findings}

    assert "--numbers COLUMN" in kinds(("1.5", "2", "7.25"), 3)["numbers-as-classes"]
    assert "numbers-as-classes" in kinds(tuple(map(str, range(25))), 1)
    assert "numbers-as-classes" not in kinds(tuple(map(str, range(25))), 2)
    assert "numbers-as-classes" not in kinds(("0", "1.0", "2"), 1)


def test_names_that_no_terminal_should_see_are_escaped() -> None:
    images = [np.asarray(picture(0))] * 2
    source = MemorySource(images, labels=[0, 1], keys=["\x1b[2J.png", "\udcff\n.png"], classes=("x", "y"))
    keys = [one.key for one in check_data(Splits(source, None, None)).findings[0].groups[0]]
    assert keys == ["\\x1b[2J.png", "\\udcff\\n.png"]


@pytest.mark.slow
def test_quick_check_is_a_few_lines_and_one_for_each_split_that_lacks_a_class(clean: Path, messy: Path) -> None:
    assert quick_check(open_data(str(clean), validation_share=0.1)) == (
        "images: 36 train, 12 validation; 3 classes of 12 to 12 training images each",
        "checked 36 images: 64 x 48 pixels (width x height), PNG RGB; no problem found",
    )
    lines = quick_check(open_data(str(messy), validation_share=0.1))
    assert len(lines) == 4 and lines[3] == "warning: 1 class without validation images: c"
    assert "1 x 1 to 640 x 480 pixels" in lines[1] and "PNG RGB" in lines[1]
    assert lines[2].startswith("warning: 2 of 50 checked images cannot be decoded, such as b/cut.jpg: ")
    assert lines[2].endswith("(and 2 other findings)")


def test_quick_check_reads_few_images(counting: tuple[Source, list[int]]) -> None:
    source, read = counting
    quick_check(Splits(source, source, None))
    assert 1 <= len(read) <= 64 and read[0] == 0 and read == sorted(read)


def test_numbers_and_unlabelled_images_are_checked_as_well() -> None:
    numbers = Splits(arrays([(0.5, 1.0), None, (2.0, 3.0)]), None, None)
    report = check_data(numbers)
    assert report.splits[0].per_class == () and report.splits[0].unlabelled == 1 and report.balance is None
    assert [finding.kind for finding in report.findings] == ["unlabelled"]
    assert report == from_plain(Report, to_plain(report))
    (empty,) = check_data(Splits(arrays([(0.5, math.nan), (2.0, math.nan)]), None, None)).findings
    assert (empty.kind, empty.severity) == ("unknown-number", "error") and "training image: y" in empty.text
    assert quick_check(numbers)[0].endswith("3 train; 2 numbers") and "x 0.5, y 1" in page(report, numbers, "x")
    unlabelled = replace(samples_of(arrays([None] * 3)), targets=Targets.unknown("none", (), 3))
    plain = Splits(unlabelled, None, None)
    report = check_data(plain)
    assert report.findings == () and quick_check(plain)[0].endswith("3 train; no labels")
    assert "No labels" in page(report, plain, "x") and "<h2>Examples<" in page(report, plain, "x")


def test_colours_of_16_bits_are_deep() -> None:
    for depth, kind, channels in ((16, 2, 3), (16, 6, 4), (8, 2, 3)):  # RGB, and RGB with alpha
        rows = 2 * (b"\0" + bytes(range(channels * 5 * depth // 8)))
        data = make_png(5, 2, depth=depth, kind=kind, rows=rows)
        assert bool(look(data).oddities & Oddity.DEEP) == (depth == 16)


def spotted(*, coloured: bool, mode: str = "RGB", size: tuple[int, int] = (301, 157)) -> Image.Image:
    """Return noise in grey levels, with a red spot of about 2 % of the pixels if `coloured`."""
    grey = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 1), dtype=np.uint8).repeat(3, axis=2)
    if coloured:
        grey[: size[1] // 6, : size[0] // 8] = (200, 20, 20)
    return Image.fromarray(grey).convert(mode)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "WEBP"])
def test_a_small_spot_of_colour_counts_and_grey_stored_as_rgb_does_not(form: str) -> None:
    assert has_colour(encode(spotted(coloured=True), form))
    assert not has_colour(encode(spotted(coloured=False), form))


def test_grey_modes_palettes_and_arrays() -> None:
    assert not has_colour(encode(spotted(coloured=True, mode="L"), "PNG"))
    assert not has_colour(encode(spotted(coloured=True, mode="1"), "PNG"))
    assert has_colour(encode(spotted(coloured=True).quantize(64), "PNG"))
    assert not has_colour(np.zeros((5, 7), np.uint8))
    assert has_colour(np.asarray(spotted(coloured=True, size=(3000, 12))))
    with pytest.raises(UndecodableImage):
        has_colour(b"nothing")


def test_the_note_is_for_grey_networks_and_coloured_images() -> None:
    grey, red = (encode(spotted(coloured=coloured, size=(31, 17)), "PNG") for coloured in (False, True))
    source = MemorySource([grey] * 300 + [red] * 100, labels=[0, 1] * 200)
    note = "the model takes grey images, so colours are dropped; 8 of 32 images looked at have colours"
    assert colour_note(images_of(source), 1) == note
    assert colour_note(images_of(MemorySource(labels=[0])), 3) == "", "no image is read"
    assert colour_note([grey] * 19 + [red], 1) == ""
    assert colour_note([b"broken", red], 1).endswith("dropped; the image has colours")
    assert colour_note([b"broken"], 1) == "" == colour_note([], 1)
    assert list(images_of(MemorySource([], labels=[]))) == []


EVIL = "<script>alert('1 & 2')<"


@pytest.fixture
def evil(tmp_path: Path) -> Splits:
    """Class folders whose names are markup, with a copy and with a file that is not an image."""
    random = np.random.default_rng(0)
    for name in (EVIL, "b\"'>"):
        (tmp_path / name).mkdir()
        for number in range(6):
            pixels = random.integers(0, 256, (20 + 100 * number, 31, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"<b>{number}.png")
    (tmp_path / EVIL / "copy&.png").write_bytes((tmp_path / EVIL / "<b>0.png").read_bytes())
    (tmp_path / EVIL / "broken.png").write_text("<img src=x>")
    return open_data(str(tmp_path), validation_share=0.0)


def test_names_are_never_markup_and_findings_say_what_to_do(evil: Splits, read_page: Callable[[str], Any]) -> None:
    report = check_data(evil)
    reader = read_page(page(report, evil, "<h1>evil</h1>"))
    assert {*reader.names} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "article", "span", "div", "table",
        "thead", "tbody", "tr", "th", "td", "figure", "img", "figcaption", "br", "strong", "wbr",
    }  # fmt: skip
    assert reader.names.count("h1") == 1
    assert EVIL in reader.text and "Check of <h1>evil</h1>" in reader.text
    assert f"train: {EVIL}/<b>0.png" in reader.text
    shown = " ".join(reader.text)
    for finding in report.findings:
        assert finding.text in shown and finding.training in shown and finding.advice in shown
    assert {"undecodable-in-train", "duplicates"} <= {finding.kind for finding in report.findings}
    assert "no picture" in shown


def test_a_clean_set_has_a_page_too(colour_folder: Path, read_page: Callable[[str], Any]) -> None:
    splits = open_data(str(colour_folder), validation_share=0.1)
    text = page(check_data(splits), splits, "colours")
    reader = read_page(text)
    assert "no problem found" in text and "prefers-color-scheme: dark" in text
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in reader.tags
    assert reader.names.count("img") == 15


@pytest.mark.slow
def test_pictures_are_bounded(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number:02}").mkdir()
        for name in ("a", "b", "c"):
            Image.new("L", (4, 4), number).save(tmp_path / f"{number:02}" / f"{name}.png")
    splits = open_data(str(tmp_path), validation_share=0.0)
    text = page(check_data(splits), splits, "many")
    assert text.count("<img") == 24 * 3 + 12 * 3 + 12
    assert "and 48 more of this kind" in text and "and 36 more classes<" in text
