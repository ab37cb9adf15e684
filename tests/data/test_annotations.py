"""Boxes and masks: COCO, YOLO, Pascal VOC and masks are read, refused, checked, and written into each other."""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.make import MemorySource, keys_of, make_masks_folder, orientation, png_chunk
from vitrail.cli import main
from vitrail.data.check.findings import quick_check
from vitrail.data.check.report import check_data
from vitrail.data.formats.convert import WRITERS, AnnotationFormat, convert
from vitrail.data.objects import Mask, Objects, Runs, drawn
from vitrail.data.sources import open_data, open_whole
from vitrail.data.splits import Splits
from vitrail.data.targets import Targets
from vitrail.errors import ConfigError, DataError, UndecodableImage
from vitrail.tasks.segmentation import Segmentation

SIZES = [(33, 57), (64, 40), (21, 21)]
BLANK = np.zeros((40, 60), np.uint8)
NAN = float("nan")


def picture(path: Path, size: tuple[int, int] = (40, 60)) -> Path:
    """Write a picture of a height and width with different pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    levels = np.random.default_rng(len(str(path))).integers(0, 255, (*size, 3), np.uint8)
    Image.fromarray(levels).save(path)
    return path


def coco(root: Path, **changes: Any) -> dict[str, Any]:
    """Write two pictures and a COCO file whose numbers of categories have gaps, and return its content."""
    for name in ("a", "b"):
        picture(root / f"{name}.png")
    values: dict[str, Any] = {
        "images": [
            {"id": 7, "file_name": "a.png", "height": 40, "width": 60},
            {"id": 3, "file_name": "b.png", "height": 40, "width": 60},
        ],
        "categories": [{"id": 90, "name": "toothbrush"}, {"id": 5, "name": "plane"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 90, "bbox": [6, 4, 30, 20], "area": 400.0, "iscrowd": 0},
            {"id": 2, "image_id": 7, "category_id": 5, "bbox": [0, 0, 60, 40], "iscrowd": 1},
        ],
    }
    values |= changes
    (root / "_annotations.coco.json").write_text(json.dumps(values))
    return values


def run_lengths(counts: Any) -> dict[str, Any]:
    return {"size": [40, 60], "counts": counts}


def box(*numbers: float, **fields: Any) -> list[dict[str, Any]]:
    return [{"id": 1, "image_id": 7, "category_id": 5, "bbox": list(numbers), **fields}]


def foreign(root: Path, text: str, name: str = "a.json") -> None:
    picture(root / "a.png")
    (root / name).write_text(text)


def voc(root: Path, objects: str = "", name: str = "a", size: str = "<width>60</width><height>40</height>") -> None:
    picture(root / f"JPEGImages/{name}.png")
    path = root / f"Annotations/{name}.xml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<annotation>\n<size>{size}</size>\n{objects}\n</annotation>")


def turned(root: Path) -> None:
    """Give the picture of `voc` an EXIF tag for a quarter turn."""
    path = root / "JPEGImages/a.png"
    Image.open(path).save(path, exif=orientation(6))


def spoilt(root: Path) -> None:
    (root / "JPEGImages/a.png").write_bytes(b"\x89PNG\r\n\x1a\n")


def main_list(root: Path, split: str, text: str) -> None:
    (root / "ImageSets/Main").mkdir(parents=True, exist_ok=True)
    (root / f"ImageSets/Main/{split}.txt").write_text(text)


def listed(root: Path, folder: str, names: str) -> None:
    """Replace the description of `yolo` by lists of classes in its folders."""
    (root / "data.yaml").unlink(missing_ok=True)
    (root / f"labels/{folder}").mkdir()
    (root / f"labels/{folder}/classes.txt").write_text(names)


def classes(root: Path) -> None:
    (root / "classes.txt").write_text("one\ntwo\n")


def unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")  # whose first byte cannot be read


def voc_object(xmin: float, ymin: float, xmax: float, ymax: float, name: str = "cell", more: str = "") -> str:
    sides = f"<xmin>{xmin}</xmin><ymin>{ymin}</ymin><xmax>{xmax}</xmax><ymax>{ymax}</ymax>"
    return f"<object><name>{name}</name><bndbox>{sides}</bndbox>{more}</object>"


def yolo(root: Path, text: str = "0 0.5 0.5 0.2 0.2\n", names: Any = ("one", "two"), **more: Any) -> None:
    picture(root / "images/train/a.png")
    (root / "labels/train").mkdir(parents=True, exist_ok=True)
    (root / "labels/train/a.txt").write_text(text)
    (root / "data.yaml").write_text(json.dumps({"train": "images/train", "names": list(names), **more}))


def described(root: Path, text: str) -> None:
    """Replace the description of `yolo`."""
    yolo(root)
    (root / "data.yaml").write_text(f"train: images/train\n{text}\n")


def masks(
    root: Path, values: Any, names: str = "sky\nroad\n", size: tuple[int, int] = (40, 60), name: str = "train/a"
) -> None:
    picture(root / f"images/{name}.png", size)
    path = root / f"masks/{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(values)).save(path)
    (root / "classes.txt").write_text(names)


def opened(root: Path, **more: Any) -> Splits:
    return open_data(str(root), validation_share=0.0, **more)


@pytest.mark.parametrize("side", [2**70, "40"])
def test_sizes_that_no_image_has_are_read_from_the_images(side: Any, tmp_path: Path) -> None:
    images = [{"id": 7, "file_name": "a.png", "height": side, "width": 60}]
    coco(tmp_path / "coco", images=images, annotations=box(6, 4, 30, 20))
    voc(tmp_path / "voc", voc_object(6, 4, 36, 24), size="<width>60</width><height>1e999</height>")
    for name in ("coco", "voc"):
        source = opened(tmp_path / name).train
        assert source[0].target.size == (40, 60)
        np.testing.assert_allclose(source[0].target.boxes, [[0.1, 0.1, 0.6, 0.6]])


def test_coco_is_read_with_its_numbers(tmp_path: Path) -> None:
    coco(tmp_path)
    splits = opened(tmp_path)
    source = splits.train
    assert splits.target_kind == "boxes" and splits.classes == ("plane", "toothbrush")
    assert source.targets.ids == (5, 90) and source.readers[0].ids == [7, 3]
    target = source.target(0)
    np.testing.assert_allclose(target.boxes * [60, 40, 60, 40], [[6, 4, 36, 24], [0, 0, 60, 40]])
    assert target.labels.tolist() == [1, 0] and target.crowd.tolist() == [False, True]
    assert target.areas[0] * 2400 == pytest.approx(400) and np.isnan(target.areas[1])
    assert len(source.target(1)) == 0, "a picture without objects is kept"
    assert any("without any object" in note for note in splits.notes)


@pytest.mark.parametrize(
    ("numbers", "kept", "words"),
    [
        ((-5, 10, 20, 10), [[0, 10, 15, 20]], "reaches beyond the image: "),
        ((50, 30, 10.3, 10.2), [[50, 30, 60, 40]], "at most 1 %"),
        ((70, 10, 5, 5), [], "outside of the image"),
        ((10, 10, 0, 5), [], "no width or no height"),
        ((10, 10, -4, 5), [], "no width or no height"),
    ],
)
def test_odd_boxes_are_clipped_or_left_out_and_named(
    tmp_path: Path, numbers: tuple[float, ...], kept: list[list[float]], words: str
) -> None:
    good = [{"id": 2, "image_id": 3, "category_id": 5, "bbox": [0, 0, 9, 9]}]
    coco(tmp_path, annotations=[*box(*numbers), *good])
    splits = opened(tmp_path)
    target = splits.train.target(0)
    np.testing.assert_allclose(target.boxes * [60, 40, 60, 40], np.reshape(kept, (-1, 4)))
    assert any(words in note and "annotation 1" in note for note in splits.notes), splits.notes


def test_objects_that_stand_twice_or_have_the_field_ignore_are_named(tmp_path: Path) -> None:
    one, other = "0 0.5 0.5 0.2 0.2\n", "1 0.5 0.5 0.2 0.2\n"
    for text, lines in ((one + other, []), (one + other + one, ["labels/train/a.txt, line 3"])):
        yolo(tmp_path / "yolo", text)
        faults = open_whole(str(tmp_path / "yolo"), tolerant=True).whole.faults
        assert [fault.text.rpartition(": ")[2] for fault in faults if fault.kind == "repeated-box"] == lines
    coco(tmp_path / "coco", annotations=[*box(1, 2, 3, 4, ignore=1), *box(5, 6, 7, 8, ignore=2, iscrowd=1)])
    faults = open_whole(str(tmp_path / "coco"), tolerant=True).whole.faults
    (fault,) = (fault for fault in faults if fault.kind == "ignored")
    assert (fault.count, fault.severity) == (1, "note") and "iscrowd" in fault.advice


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_outlines_of_coco_are_those_of_its_own_program(tmp_path: Path) -> None:
    """Runs, compressed and as a list, and a polygon, against masks by pycocotools."""
    tools = pytest.importorskip("pycocotools.mask")
    pixels = np.zeros((40, 60), np.uint8)
    pixels[5:20, 7:31] = pixels[11, 50] = 1
    packed = tools.encode(np.asfortranarray(pixels))
    lengths = np.flatnonzero(np.diff(np.concatenate([[0], pixels.T.ravel(), [2]])))
    plain = np.diff(np.concatenate([[0], lengths])).tolist()
    polygon = [10.0, 5.0, 40.0, 8.0, 30.0, 35.0]
    outlines: list[Any] = [run_lengths(packed["counts"].decode()), run_lengths(plain), [polygon]]
    coco(tmp_path, annotations=[
        {"id": n, "image_id": 7, "category_id": 5, "segmentation": one} for n, one in enumerate(outlines)
    ])  # fmt: skip
    target = opened(tmp_path).train.target(0)
    for row in range(2):
        np.testing.assert_array_equal(target.mask(row, (40, 60)), pixels > 0)
    np.testing.assert_allclose(target.boxes[0] * [60, 40, 60, 40], [7, 5, 51, 20])
    np.testing.assert_allclose(target.boxes[2] * [60, 40, 60, 40], [10, 5, 40, 35])
    np.testing.assert_array_equal(target.mask(2, (40, 60)), tools.decode(tools.frPyObjects([polygon], 40, 60)[0]) > 0)


def test_coco_files_are_named_after_splits_beside_a_word_that_all_have(tmp_path: Path) -> None:
    whole = coco(tmp_path)
    (tmp_path / "_annotations.coco.json").unlink()
    for split, image in zip(("train", "val"), whole["images"], strict=True):
        found = [dict(one, image_id=image["id"]) for one in whole["annotations"]]
        (tmp_path / f"pets_{split}.json").write_text(json.dumps(whole | {"images": [image], "annotations": found}))
    splits = opened(tmp_path)
    assert len(splits.train) == 1 and splits.validation is not None and splits.validation.key(0) == "b.png"


def test_pictures_are_found_by_the_end_of_their_paths(tmp_path: Path) -> None:
    """A labelling program wrote paths of its own storage, and splits and their folders have files of the same name."""
    for split in ("train", "valid"):
        picture(tmp_path / split / "more/b.png")
        values = coco(tmp_path / split)
        values["images"][0]["file_name"] = "upload\\1f\\a.png"
        (tmp_path / split / "_annotations.coco.json").write_text(json.dumps(values))
    splits = opened(tmp_path)
    assert keys_of(splits.train) == ["train/a.png", "train/b.png"] and splits.validation.key(0) == "valid/a.png"
    coco(tmp_path / "other")
    (tmp_path / "other/a.png").unlink()
    for split in ("train", "valid"):
        (tmp_path / split / "_annotations.coco.json").unlink()
        (tmp_path / split).rename(tmp_path / f"some-{split[0]}")
    assert any("annotations such as other" in note for note in opened(tmp_path).notes)
    with pytest.raises(DataError, match="have this name"):
        (tmp_path / "other/_annotations.coco.json").rename(tmp_path / "all.json")
        opened(tmp_path / "all.json")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda root: coco(root, categories=[]), "no categories"),
        (lambda root: coco(root, categories=None), "no list of categories"),
        (lambda root: coco(root, categories=[{"id": 5, "name": "x"}, {"id": 5, "name": "y"}]), "have the number 5"),
        (lambda root: coco(root, annotations=box(1, 2, 3, 4, category_id=6)), "a category that is .*: .*annotation 1"),
        (lambda root: coco(root, annotations=box(1, 2, 3, 4, image_id=99)), "images that are not listed"),
        (lambda root: coco(root, annotations=box(1, 2, NAN, 4)), "not made of numbers"),
        (lambda root: coco(root, annotations=box(1, 2, 3, 4, 0.3)), "rotated"),
        (lambda root: coco(root, annotations=box(1, 2, 3, 4, segments_info=[])), "panoptic"),
        (lambda root: coco(root, annotations=box(1, 2, 3, 4, iscrowd="yes")), "iscrowd is 'yes'"),
        (lambda root: coco(root, annotations=box(1, 2, 3, 4, iscrowd=2)), "iscrowd is 2"),
        (lambda root: coco(root, annotations=[]), "no image has an object"),
        (lambda root: coco(root, images=[{"id": 7, "file_name": "gone.png"}]), "cannot be found: gone.png"),
        (lambda root: coco(root, images=[{"id": [7], "file_name": "a.png"}]), r"of the image a.png is \[7\]"),
        (lambda root: coco(root, annotations=box(1, 2, 3, 4, image_id=[7])), r"not listed: .*image_id \[7\]"),
        (lambda root: coco(root, annotations=box(1, 2, 3, 4, segmentation=[[1, 1, 9, 1, 9, NAN]])), "neither polygons"),
        (lambda root: coco(root, annotations=box(1, 2, 3, 4, segmentation=run_lengths([2400, 1]))), "the 2400 pixels"),
        (lambda root: coco(root, annotations=box(1, 2, 3, 4, segmentation=run_lengths([2399.5, 0.5]))), "add up"),
        (lambda root: coco(root, annotations=box(1, 2, 3, 4, segmentation=run_lengths("~~"))), "add up"),
        (lambda root: (voc(root, voc_object(1, 2, 3, 4), size=""), turned(root)), "whose EXIF tag turns or mirrors it"),
        (lambda root: (voc(root, voc_object(1, 2, 3, 4), size=""), spoilt(root)), "a.png, which cannot be read"),
        (lambda root: voc(root, "<object><name>x</name><robndbox/></object>"), "rotated"),
        (lambda root: voc(root, voc_object(1, 2, NAN, 4)), "not made of numbers: .*a.xml, line 3"),
        (lambda root: voc(root), "no image has an object"),
        (lambda root: yolo(root, "2 0.5 0.5 0.2 0.2\n"), "1 to 2, and YOLO counts from 0"),
        (lambda root: yolo(root, "0 .5 .5 .2 .2\n7 0.5 0.5 0.2 0.2\n"), r"a.txt, line 2 \(class 7\)"),
        (lambda root: yolo(root, "0 0.5 0.5 0.2 0.2 0.9\n"), "predictions"),
        (lambda root: yolo(root, "0 .5 .5 .2 .2\nx .5 .5 .2 .2\n"), "line 2 .x .5"),
        (lambda root: (yolo(root), (root / "labels/train/a.txt").write_bytes(b"\xff")), "a.txt as UTF-8"),
        (lambda root: (masks(root, BLANK), (root / "classes.txt").write_bytes(b"\xe9\n")), "as UTF-8"),
        (lambda root: (yolo(root), listed(root, "a", "two\none\n"), listed(root, "b", "one\n")), "different classes"),
        (lambda root: (voc(root, voc_object(1, 2, 3, 4)), main_list(root, "train", "gone\n")), "no list in ImageSets"),
        (lambda root: [picture(root / f"{folder}/a.jpg") for folder in ("images", "masks")], "masks are PNG"),
        (lambda root: yolo(root, names=("a",), nc=3), "states nc: 3"),
        (lambda root: yolo(root, kpt_shape=[17, 3]), "keypoints"),
        (lambda root: described(root, "names: {0: a, x: b}"), "are not 0, 1, 2"),
        (lambda root: described(root, "names: [a, b"), "data.yaml is not valid YAML"),
        (lambda root: (described(root, "val: [x\nnames: [a]"), classes(root)), "data.yaml is not valid YAML"),
        (lambda root: (yolo(root), classes(root), unreadable(root / "data.yaml")), "data.yaml"),
        (lambda root: described(root, "names: {0: cat, 0: dog, 1: cow}"), "data.yaml states 0 twice"),
        (lambda root: described(root, "names: [cat]\nnames: [dog]"), "data.yaml states names twice"),
        (lambda root: yolo(root, train="elsewhere"), "'elsewhere' is neither a folder"),
        (lambda root: (yolo(root), coco(root)), "several formats: COCO's JSON, YOLO's text"),
        (lambda root: foreign(root, '{"version": "5", "shapes": []}'), "a.json is an annotation of LabelMe"),
        (lambda root: foreign(root, '{"a.png1": {"filename": "a.png", "regions": []}}'), "of VGG Image Annotator"),
        (lambda root: foreign(root, '[{"image": "a.png", "annotations": [{"coordinates": {}}]}]'), "of CreateML"),
        (lambda root: foreign(root, '{"objects": [{"classTitle": "cat"}]}', "a.png.json"), "of Supervisely"),
        (lambda root: foreign(root, "<annotations>\n <version>1.1</version>", "a.xml"), "annotation of CVAT"),
        (lambda root: masks(root, BLANK, "sky\nsky\n"), "several classes are called sky"),
        (lambda root: masks(root, BLANK, "sky\n\nroad\n"), "classes.txt: line 2 is empty"),
        (lambda root: (yolo(root), listed(root, "more", "one\n \ntwo\n\n")), "classes.txt: line 2 is empty"),
        (lambda root: (masks(root, BLANK), (root / "classes.txt").unlink()), "classes.txt"),
        (lambda root: masks(root, BLANK, "1: sky\n2: road\n"), "1, 2, are not 0, 1, 2"),
        (lambda root: (masks(root, BLANK), (root / "masks/classes.txt").write_text("road\n")), "different classes"),
        (
            lambda root: [picture(root / f"ds/{name}/a.png") for name in ("img", "masks_human", "masks_machine")],
            "masks_human/ beside img/",
        ),
    ],
)
def test_data_that_cannot_be_learned_is_refused(tmp_path: Path, write: Callable[[Path], Any], words: str) -> None:
    write(tmp_path)
    with pytest.raises(DataError, match=words):
        opened(tmp_path)


def test_a_size_that_is_not_stated_is_read_from_the_picture(tmp_path: Path) -> None:
    voc(tmp_path / "voc", voc_object(6, 4, 36, 24), size="<width>0</width><height>0</height>")
    coco(tmp_path / "coco", images=[{"id": 7, "file_name": "a.png"}, {"id": 3, "file_name": "b.png", "width": 0}])
    for root in (tmp_path / "voc", tmp_path / "coco"):
        splits = opened(root)
        target = splits.train.target(0)
        np.testing.assert_allclose(target.boxes[0] * [60, 40, 60, 40], [6, 4, 36, 24])
        assert any("so it is read from them" in note for note in splits.notes)


TRIANGLE = "<polygon><x1>1</x1><y1>2</y1><x2>30</x2><y2>2</y2><x3>9</x3><y3>20</y3></polygon>"


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda root: voc(root, voc_object(1, 2, 30, 20, more=TRIANGLE)), "1 object with a polygon"),
        (lambda root: yolo(root, "0 .1 .1 .9 .1 .9 .9 .1 .9\n"), "every object has four corners"),
        (lambda root: yolo(root, names=("dog", "Dog")), "differ only in case or spaces: 'dog' and 'Dog'"),
        (lambda root: [coco(root / "train"), coco(root / "test", annotations=[])], "the test split is skipped"),
        (lambda root: yolo(root, train="../images/train", val="../valid/photos"), "'../valid/photos' has no images"),
        (lambda root: [coco(root), picture(root / "c.png")], "no COCO file lists them: c.png"),
    ],
)
def test_what_is_odd_but_can_be_learned_is_noted(tmp_path: Path, write: Callable[[Path], Any], words: str) -> None:
    write(tmp_path)
    splits = opened(tmp_path)
    assert any(words in note for note in splits.notes) and splits.held_out is None


def test_annotations_of_voc_that_name_another_picture_are_noted(tmp_path: Path) -> None:
    for name, stated in (("a", "b.png"), ("b", "b.jpg"), ("c", "gone.png"), ("d", "d.png")):
        voc(tmp_path, f"<filename>{stated}</filename>" + voc_object(1, 2, 30, 20), name)
    (note,) = opened(tmp_path).notes
    assert "1 annotation whose filename" in note and "a.xml" in note


def test_lists_divide_the_pictures_of_voc(tmp_path: Path) -> None:
    for name in ("photo 1", "photo 0", "c", "d"):
        voc(tmp_path, voc_object(1, 2, 30, 20) + voc_object(5, 5, 9, 9, "other"), name)
    picture(tmp_path / "JPEGImages/alone.png")
    (tmp_path / "Annotations/._photo 1.xml").write_bytes(b"\0\5")
    main_list(tmp_path, "train", "photo 1\nphoto 0\n")
    main_list(tmp_path, "val", "c\n")
    main_list(tmp_path, "trainval", "photo 1\nphoto 0\nc\n")
    main_list(tmp_path, "cell_train", "photo 1  1\nphoto 0 -1\n")
    splits = opened(tmp_path)
    assert keys_of(splits.train) == ["JPEGImages/photo 1.png", "JPEGImages/photo 0.png"]
    assert keys_of(splits.validation) == ["JPEGImages/c.png"] and splits.classes == ("cell", "other")
    notes = "\n".join(splits.notes)
    assert "d.png, which no split contains" in notes and "alone.png" in notes
    with pytest.raises(DataError, match="nothing named elsewhere, which is chosen as the validation split"):
        open_data(f"{tmp_path}?train=train&validation=elsewhere", validation_share=0.0)
    main_list(tmp_path, "val", "photo 0\n")
    with pytest.raises(DataError, match="training must not see"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("images", "folder"),
    [
        ("img", "gt"),
        ("photographs", "masks"),
        ("data/train", "masks/train"),
        ("train/images", "train/masks"),
        ("img_dir/train", "ann_dir/train"),
        ("train", "train_masks"),
        ("default", "defaultannot"),
    ],
)
def test_masks_lie_beside_any_folder_of_images(tmp_path: Path, images: str, folder: str) -> None:
    for name, mask in (("a", "a_mask.png"), ("b", "b.PNG")):
        picture(tmp_path / f"{images}/{name}.png")
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(BLANK).save(tmp_path / f"{folder}/{mask}")
    (tmp_path / "classes.txt").write_text("sky\nroad\n")
    splits = opened(tmp_path)
    assert splits.target_kind == "mask" and [splits.train.key(n) for n in (0, 1)] == [f"{images}/{n}.png" for n in "ab"]
    assert splits.notes == () and splits.faults == ()
    other = next(iter({"img", "photographs", "data"} & set(Path(images).parts)), "")
    if other in ("photographs", "data"):  # listed classes that are folders, and masks without an image
        (tmp_path / "classes.txt").write_text(f"{other}\nmasks\n")
        assert set(opened(tmp_path).classes) == {other, "masks"}
        (tmp_path / "classes.txt").write_text("sky\nroad\n")
        picture(tmp_path / f"{folder}/c.png")
        assert set(opened(tmp_path).classes) == {other, "masks"}


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (("cat/1.png", "cat/1_gt.png", "cat/2.png", "dog/1.png"), "kitten\npuppy\n"),  # some names like masks
        (("cat/1.png", "cat/1_gt.png", "dog/1.png", "dog/1_gt.png"), "0: cat\n1: dog\n"),
        (("cat/1.png", "cat/1_gt.png", "dog/1.png"), "cat\n\ndog\n"),
        (("face/1.png", "face_mask/1.png"), "0 a\n1 b\n"),
    ],
)
def test_folders_of_classes_are_no_masks_by_some_names(tmp_path: Path, names: tuple[str, ...], lines: str) -> None:
    for name in names:
        picture(tmp_path / name)
    (tmp_path / "classes.txt").write_text(lines)
    splits = opened(tmp_path)
    assert splits.classes == tuple(sorted({name.partition("/")[0] for name in names}))
    assert keys_of(splits.train) == list(names)


def test_masks_in_two_formats_are_read_from_png(tmp_path: Path) -> None:
    masks(tmp_path, BLANK)
    for mask in list((tmp_path / "masks").rglob("*.png")):
        Image.fromarray(BLANK + 1).save(mask.with_suffix(".bmp"))
    assert opened(tmp_path).train.target(0).name.endswith(".png")


def test_images_that_all_lie_in_folders_of_masks_are_refused_without_labels(tmp_path: Path) -> None:
    coco(tmp_path)
    (tmp_path / "masks").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / name).rename(tmp_path / "masks" / name)
    with pytest.raises(DataError, match="all images lie in folders of masks"):
        open_data(tmp_path, validation_share=0.0, unlabelled=True)


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_equal_channels_of_a_mask_are_one_number(tmp_path: Path, channels: int) -> None:
    values = np.full((40, 60, channels), 1, np.uint8)
    if channels != 3:
        values[..., -1] = 255  # opaque
    masks(tmp_path, values)
    target = opened(tmp_path).train.target(0)
    assert (target.indices() == 1).all()


@pytest.mark.parametrize(
    ("image", "mask", "name", "lines"),
    [
        ("train/a.jpg", "train/a_mask.png", "train/_classes.csv", "Pixel Value, Class\n0, sky\n1, road"),
        ("train/a_sat.jpg", "train/a_mask.png", "class_dict.csv", "name,r,g,b\nsky,0,0,0\nroad,1,1,1"),
        ("shots/a.png", "drawn/a_L.png", "label_colors.txt", "0 0 0\tsky\n1 1 1\troad"),
        ("JPEGImages/a.jpg", "SegmentationClassPNG/a.png", "labels.txt", "__ignore__\nsky\nroad"),
        ("images/a_RGB.tif", "masks/a_label.tif", "classes.txt", "0: sky\n1: road"),
        ("leftImg8bit/val/x/a_leftImg8bit.png", "gtFine/val/x/a_gtFine_labelIds.png", "classes.txt", "sky\nroad"),
    ],
)
def test_masks_of_other_programs_are_read(tmp_path: Path, image: str, mask: str, name: str, lines: str) -> None:
    picture(tmp_path / image)
    (tmp_path / mask).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(BLANK + 1).save(tmp_path / mask)
    (tmp_path / name).write_text(lines)
    (source,) = filter(len, open_whole(str(tmp_path), needs_training=False).whole.sources.values())
    assert (keys_of(source), source.classes) == ([image], ("sky", "road"))
    assert (source.target(0).indices((40, 60)) == 1).all()
    (tmp_path / name).unlink()  # without names of classes, masks in folders of their own are still not pictures
    if "_mask" not in mask and "drawn" not in mask:
        alone = open_whole(str(tmp_path), unlabelled=True, needs_training=False).whole.sources.values()
        assert [key for one in alone for key in keys_of(one)] == [image]


def test_cityscapes_is_read_by_its_own_names(tmp_path: Path) -> None:
    for split, value in (("train", 1), ("test", 255)):
        for kind, values in (("labelTrainIds", BLANK + value), ("labelIds", BLANK + 8), ("instanceIds", BLANK)):
            picture(tmp_path / f"leftImg8bit/{split}/bonn/{split}_leftImg8bit.png")
            (tmp_path / f"gtFine/{split}/bonn").mkdir(parents=True, exist_ok=True)
            Image.fromarray(values).save(tmp_path / f"gtFine/{split}/bonn/{split}_gtFine_{kind}.png")
    splits = opened(tmp_path)
    assert splits.classes[splits.train.target(0).indices()[0, 0]] == "sidewalk" and len(splits.classes) == 19
    note, other = splits.notes
    assert "labelTrainIds.png are read" in note and "instanceIds" in note
    assert splits.test is None and "test" in other, "the masks of the test images are secret"
    for path in tmp_path.rglob("*_labelTrainIds.png"):
        path.unlink()
    splits = opened(tmp_path)
    assert splits.classes[splits.train.target(0).indices()[0, 0]] == "sidewalk" and len(splits.classes) == 33


def cvat(root: Path) -> None:
    (root / "obj.names").write_text("one\n")
    for folder in ("obj_Train_data", "obj_Validation_data"):
        picture(root / f"{folder}/{folder}.png")
        (root / f"{folder}/{folder}.txt").write_bytes(b"\xef\xbb\xbf0 .5 .5 .2 .2\r\n")


@pytest.mark.parametrize(
    "write", [cvat, lambda root: [voc(root, voc_object(1, 2, 30, 20), f"{split}/a") for split in ("train", "val")]]
)
def test_folders_divide_the_annotations_of_voc_and_of_cvat(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    write(tmp_path)
    splits = opened(tmp_path)
    assert [len(splits.train), len(splits.validation)] == [1, 1]


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("names: [no, 010]", ("no", "010")),
        ("nc: 2\nnames: {1: null, 0: yes}", ("yes", "null")),
        ("names: [cat, dog]\nauthor: one\nauthor: two", ("cat", "dog")),  # what is not read may stand twice
    ],
)
def test_names_of_yolo_are_texts_whatever_yaml_makes_of_it(tmp_path: Path, text: str, classes: tuple[str, ...]) -> None:
    described(tmp_path, text)
    (tmp_path / "notes.json").write_text('{"categories": [{"id": 0, "name": "one"}], "info": {}}')  # is not COCO
    assert opened(tmp_path).classes == classes


def test_spaces_at_the_ends_of_lines_do_not_hide_the_folder_of_an_image(tmp_path: Path) -> None:
    yolo(tmp_path, train="list.txt", val="images/val")
    picture(tmp_path / "images/val/a.png")
    (tmp_path / "list.txt").write_text("images/train/a.png \n")
    assert opened(tmp_path).train.key(0) == "images/train/a.png"


@pytest.mark.parametrize(("images", "folder"), [("img_dir", "ann_dir"), ("leftImg8bit", "gtFine")])
def test_masks_are_no_images_of_a_task_without_labels(tmp_path: Path, images: str, folder: str) -> None:
    masks(tmp_path, BLANK)
    for old, new in (("images", images), ("masks", folder)):
        (tmp_path / old).rename(tmp_path / new)
    assert opened(tmp_path).train.key(0) == f"{images}/train/a.png"
    assert len(opened(tmp_path, unlabelled=True).train) == 1


def test_other_yaml_and_long_lists_of_folders_are_beside_the_point(tmp_path: Path) -> None:
    yolo(tmp_path, path="/content/data", train=[f"/{'long' * 20}/images/train"] * 60)
    (tmp_path / "notes.yaml").write_bytes("author: José".encode("latin-1"))
    assert len(opened(tmp_path).train) == len(opened(tmp_path / "data.yaml").train) == 1
    (tmp_path / "data.yaml").write_bytes("names: [José, b]\ntrain: images/train".encode("latin-1"))
    with pytest.raises(DataError, match=r"data\.yaml is not valid YAML: unacceptable character #xdce9"):
        opened(tmp_path)


def test_folders_called_mask_below_images_hold_pictures(tmp_path: Path) -> None:
    yolo(tmp_path, "", train="images")
    for name in ("mask", "no_mask"):
        picture(tmp_path / f"images/{name}/{name}.png")
        (tmp_path / f"labels/{name}").mkdir()
        (tmp_path / f"labels/{name}/{name}.txt").write_text("0 .5 .5 .2 .2\n")
    source = opened(tmp_path).train
    assert [source.key(row) for row in range(3)] == [
        "images/mask/mask.png", "images/no_mask/no_mask.png", "images/train/a.png",
    ]  # fmt: skip


def test_coco_with_a_mark_of_its_encoding_or_called_like_our_own_files(tmp_path: Path) -> None:
    values = coco(tmp_path, annotations=box(6, 4, 30, 20, iscrowd="0"))
    (tmp_path / "_annotations.coco.json").unlink()
    (tmp_path / "labels.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(values).encode())
    target = opened(tmp_path).train.target(0)
    assert target.crowd.tolist() == [False]


@pytest.mark.parametrize("to", ["yolo", "voc", "coco", "masks"])
def test_pictures_that_share_a_name_keep_their_own_annotations(tmp_path: Path, to: AnnotationFormat) -> None:
    places = ("a/1.png", "b/1.png", "a_1.png", "A/1.PNG", "2.png", "2.PNG")
    for place in places:
        picture(tmp_path / "in" / place)
    images = [{"id": row, "file_name": place, "height": 40, "width": 60} for row, place in enumerate(places)]
    annotations = []
    for row in range(len(places)):
        outline = [row, row, row + 20, row, row + 20, row + 10, row, row + 10]
        annotations += box(row, row, 20, 10, image_id=row, segmentation=[outline])
    coco(tmp_path / "in", images=images, annotations=annotations)
    convert(opened(tmp_path / "in"), tmp_path / "out", to)
    found = opened(tmp_path / "out").train
    assert len(found) == len(places)
    if to != "masks":
        corners = {round(float(found.target(row).boxes[0][0]) * 60) for row in range(len(places))}
        assert corners == set(range(len(places)))


@pytest.mark.parametrize("to", ["yolo", "voc", "coco", "masks"])
@pytest.mark.parametrize("name", ["bad\udcff", "two\nlines", "par\u2028t", "c\x01", "tab\t\x7f", " a ", "a "])
def test_unusual_names_of_pictures_are_read_again_or_refused(tmp_path: Path, to: AnnotationFormat, name: str) -> None:
    values = coco(tmp_path / "in", annotations=box(6, 4, 30, 20))
    (tmp_path / "in/a.png").rename(tmp_path / "in" / f"{name}.png")
    values["images"][0]["file_name"] = f"{name}.png"
    (tmp_path / "in/_annotations.coco.json").write_text(json.dumps(values))
    if to == "voc" and not {"\t", " "} & {*name}:
        with pytest.raises(DataError, match="VOC names each image on a line of text"):
            convert(opened(tmp_path / "in"), tmp_path / "out", to)
        assert not (tmp_path / "out").exists()
        return
    convert(opened(tmp_path / "in"), tmp_path / "out", to)
    assert name in {Path(key).stem for key in keys_of(opened(tmp_path / "out").train)}


def test_a_separator_of_lines_in_unicode_does_not_begin_another_class(tmp_path: Path) -> None:
    masks(tmp_path, np.full((40, 60), 1, np.uint8), "sky\u2028above\nroad\n")
    with pytest.raises(DataError, match="unprintable names"):
        opened(tmp_path)


def test_yolo_reads_boxes_polygons_lists_and_pictures_without_labels(tmp_path: Path) -> None:
    yolo(tmp_path, "1 0.5 0.5 0.2 0.4\n0 .1 .1 .9 .2 .5 .8\n", path="/content/data", train="list.txt", val="images/val")
    picture(tmp_path / "images/val/empty.png")
    picture(tmp_path / "images/spare/c.png")
    (tmp_path / "labels/train/lost.txt").write_text("0 .5 .5 .1 .1\n")
    (tmp_path / "list.txt").write_text("/content/data/images/train/a.png\n")
    splits = opened(tmp_path)
    target = splits.train.target(0)
    assert (isinstance(target, Objects) and splits.validation is None) or len(splits.validation or ()) == 1
    np.testing.assert_allclose(target.boxes, [[0.4, 0.3, 0.6, 0.7], [0.1, 0.1, 0.9, 0.8]])
    assert target.outlines[0] is None and len(target.outlines[1][0]) == 3
    notes = "\n".join(splits.notes)
    assert "c.png, which no split contains" in notes and "lost.txt" in notes


def test_a_description_of_yolo_elsewhere_states_the_folder_of_its_data(tmp_path: Path) -> None:
    yolo(tmp_path / "data", path=str(tmp_path / "data"))
    (tmp_path / "data/data.yaml").rename(tmp_path / "data.yaml")
    assert opened(tmp_path / "data.yaml").train.key(0) == "images/train/a.png"


@pytest.mark.parametrize("missing", ["valid/images", "other/valid/images/train", "/elsewhere/valid/images"])
def test_a_missing_folder_of_yolo_is_not_that_of_another_split(tmp_path: Path, missing: str) -> None:
    yolo(tmp_path, val=missing)
    splits = opened(tmp_path)
    assert splits.validation is None and missing in "\n".join(splits.notes)
    yolo(tmp_path, train="/elsewhere/images/train", val="/elsewhere/images/train")
    with pytest.raises(DataError, match="training must not see held-out images"):  # what is stated twice is not missing
        opened(tmp_path)


@pytest.mark.parametrize(
    ("values", "names", "words"),
    [
        (np.full((40, 60), 7, np.uint8), "sky\nroad\n", "holds the value 7"),
        (np.full((40, 60, 3), (0, 0, 1), np.uint8), "sky\nroad\n", "is in colour"),
        (np.full((40, 60, 2), (1, 0), np.uint8), "sky\nroad\n", "is in colour"),
        (np.zeros((41, 60), np.uint8), "sky\nroad\n", "60 x 41 pixels .* has 60 x 40"),
        (np.full((40, 60, 3), 9, np.uint8), "sky 1 2 3\nroad 9 9 8\n", r"colour \(9, 9, 9\) at column 0, row 0"),
        (np.zeros((40, 60, 4), np.uint8), "sky 255 255 255\nroad 0 0 0\n", "has transparent pixels"),
    ],
)
def test_masks_that_do_not_fit_are_findings(tmp_path: Path, values: Any, names: str, words: str) -> None:
    masks(tmp_path, values, names)
    report = check_data(open_whole(str(tmp_path), tolerant=True).splits(validation_share=0.0))
    (finding,) = [one for one in report.findings if one.kind == "misfit"]
    assert finding.severity == "error"
    with pytest.raises(UndecodableImage, match=words):
        target = opened(tmp_path).train.target(0)
        target.indices((40, 60))


def test_masks_hold_numbers_or_colours_and_ignored_values(tmp_path: Path) -> None:
    values = np.array([[0, 1, 2, 255]] * 40, np.uint8).repeat(15, axis=1)
    masks(tmp_path / "a", values, "sky\nvoid\nroad\n")
    colours = np.array([[9, 9, 9], [0, 200, 0], [1, 2, 3], [4, 4, 4]], np.uint8)
    opaque = np.full((40, 60, 1), 255, np.uint8)
    pixels = np.dstack([np.broadcast_to(colours[None].repeat(15, axis=1), (40, 60, 3)), opaque])
    masks(tmp_path / "b", pixels, "sky 9 9 9\nroad: 0,200,0\ntree #1, 2, 3\nvoid(4, 4, 4)\n")
    expected = {("a", ""): [0, 255, 1, 255], ("a", "none"): [0, 1, 2, 255], ("a", "0"): [255, 0, 1, 255],
                ("b", ""): [0, 1, 2, 255], ("b", "road"): [0, 255, 1, 2]}  # fmt: skip
    for (folder, ignored), found in expected.items():
        spec = f"{tmp_path / folder}" + (f"?ignore={ignored}" if ignored else "")
        target = opened(Path(spec)).train.target(0)
        assert target.indices()[0, ::15].tolist() == found, (folder, ignored)
    (tmp_path / "b/classes.txt").unlink()
    (tmp_path / "b/labelmap.txt").write_text("# label:color_rgb:parts:actions\nsky:9,9,9::\nroad:0,200,0::\n"
                                             "tree:1,2,3::\nvoid:4,4,4::\n")  # fmt: skip
    assert opened(tmp_path / "b").classes == ("sky", "road", "tree")
    with pytest.raises(DataError, match="neither a value from 0 to 2 nor the name"):
        opened(Path(f"{tmp_path / 'a'}?ignore=9"))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_numbers_in_grey_of_few_bits_are_those_of_the_file(tmp_path: Path, bits: int) -> None:
    values = np.resize(np.arange(2**bits, dtype=np.uint8), (40, 60))
    masks(tmp_path, BLANK, "".join(f"{number}\n" for number in range(2**bits)))
    levels = np.unpackbits(values[..., None], axis=2)[..., -bits:].reshape(40, -1)
    rows = b"".join(b"\0" + row.tobytes() for row in np.packbits(levels, axis=1))
    header = struct.pack(">2I5B", 60, 40, bits, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    content = b"\x89PNG\r\n\x1a\n" + b"".join(itertools.starmap(png_chunk, chunks))
    (tmp_path / "masks/train/a.png").write_bytes(content)
    target = opened(tmp_path).train.target(0)
    np.testing.assert_array_equal(target.indices(), values)


def test_a_mask_in_a_jpeg_file_is_refused(tmp_path: Path) -> None:
    masks(tmp_path, BLANK)
    for kind in ({"format": "JPEG"}, {"format": "TIFF", "compression": "jpeg"}):
        Image.fromarray(BLANK).save(tmp_path / "masks/train/a.png", **kind)
        with pytest.raises(UndecodableImage, match="JPEG"):
            opened(tmp_path).train.target(0).indices()


@pytest.mark.parametrize("write", [coco, voc, yolo, lambda root: masks(root, np.zeros((9, 9), np.uint8))])
def test_tasks_without_labels_use_the_pictures_alone(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    write(tmp_path)
    (tmp_path / "classes.txt").unlink(missing_ok=True)
    splits = opened(tmp_path, unlabelled=True)
    keys = [splits.train.key(index) for index in range(len(splits.train))]
    assert splits.target_kind == "none" and {key.rpartition("/")[2][0] for key in keys} <= {"a", "b"}
    assert not any("masks" in key for key in keys) and "not their boxes or masks" in splits.notes[-1]


def test_tasks_without_labels_hold_out_what_the_annotations_hold_out(tmp_path: Path) -> None:
    values = coco(tmp_path / "pictures")
    (tmp_path / "pictures/_annotations.coco.json").unlink()
    picture(tmp_path / "pictures/c.png")
    for name, image in zip(("train", "val"), values["images"], strict=True):
        objects = [{**values["annotations"][0], "image_id": image["id"]}]
        part = {**values, "images": [image], "annotations": objects}
        (tmp_path / f"instances_{name}.json").write_text(json.dumps(part))
    splits = opened(tmp_path, unlabelled=True)
    assert keys_of(splits.train) == ["pictures/a.png", "pictures/c.png"]  # no file lists the third
    assert keys_of(splits.validation) == ["pictures/b.png"]
    for name in ("a", "b"):
        voc(tmp_path / "voc", voc_object(1, 2, 30, 20), name)
    main_list(tmp_path / "voc", "train", "a\n")
    main_list(tmp_path / "voc", "test", "b\n")
    assert keys_of(opened(tmp_path / "voc", unlabelled=True).test) == ["JPEGImages/b.png"]


def test_folders_of_pictures_with_cocos_file_are_not_classes(tmp_path: Path) -> None:
    for name in ("one/c.jpg", "two/d.jpg"):
        picture(tmp_path / name)
    images = [{"id": n, "file_name": f"{name}.jpg", "height": 40, "width": 60} for n, name in enumerate("cd")]
    polygons = [[[1, 1, 20, 1, 20, 20], [5, 5]], [[26, 31, 50, 31]]]
    boxes = [box(2, 3, 9, 9, image_id=number, segmentation=one)[0] for number, one in enumerate(polygons)]
    coco(tmp_path, images=images, annotations=boxes)
    splits = opened(tmp_path)
    assert (splits.classes, splits.target_kind) == (("plane", "toothbrush"), "boxes")
    text = "\n".join(splits.notes)
    assert "not read as classes" in text and "2 outlines with a polygon of fewer than three points" in text
    outlines = [splits.train.target(index).outlines for index in range(2)]
    assert [one[0] is None or len(one[0]) for one in outlines] == [1, True]


def test_labels_of_yolo_for_several_pictures_are_named(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.png", "b.JPG"):
        picture(tmp_path / "train/Images" / name)
    (tmp_path / "train/Labels").mkdir()
    for name in "ab":
        (tmp_path / f"train/Labels/{name}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    (tmp_path / "data.yaml").write_text("train: train/Images\nnames: [cell]\n")
    splits = opened(tmp_path)
    assert [len(splits.train.target(index)) for index in range(3)] == [1, 1, 1]
    assert "1 file of labels with several images of the same name: train/Labels/a.txt" in "\n".join(splits.notes)


def test_what_lies_beside_boxes_and_masks_is_named(tmp_path: Path) -> None:
    """A table wins over masks, and boxes win over both. A file of another kind of XML is no annotation."""
    masks(tmp_path, np.zeros((40, 60), np.uint8))
    table = tmp_path / "labels.csv"
    picture(tmp_path / "images/train/b.png")
    table.write_text("path,label\nimages/train/a.png,one\nimages/train/b.png,two\n")
    (tmp_path / "sitemap.xml").write_text("<urlset></urlset>")
    assert opened(tmp_path).target_kind == "class"
    voc(tmp_path, voc_object(1, 2, 30, 20), "v")
    (tmp_path / "sitemap.xml").unlink()
    splits = opened(tmp_path)
    notes = "\n".join(splits.notes)
    assert splits.target_kind == "boxes" and "its masks are not read" in notes and "labels.csv" in notes
    chosen = opened(Path(f"{tmp_path}?ignore=255"))
    assert chosen.target_kind == "mask" and "those of classes.txt, and labels.csv" in "\n".join(chosen.notes)
    with pytest.raises(DataError, match="its masks are not read"):
        Segmentation().check_data(splits)


def test_a_sample_of_masks_says_nothing_about_classes_in_others(tmp_path: Path) -> None:
    for number in range(4):
        masks(tmp_path, np.full((40, 60), number % 2, np.uint8))
        for folder in ("images", "masks"):
            (tmp_path / folder / "train/a.png").rename(tmp_path / folder / f"train/{number}.png")
    splits = open_whole(str(tmp_path), tolerant=True).splits(validation_share=0.0)
    kinds = [{one.kind for one in check_data(splits, sample=count).findings} for count in (1, None)]
    assert "few-examples" in kinds[1] and not {"few-examples", "missing-in-train"} & kinds[0]


def test_masks_of_one_class_are_not_learned_and_masks_are_not_counted_per_class(tmp_path: Path) -> None:
    masks(tmp_path, BLANK + 1, "void\nroad\n")
    with pytest.raises(DataError, match="only one class, 'road'"):
        Segmentation().check_data(opened(tmp_path))
    report = check_data(open_whole(str(tmp_path), tolerant=True).splits(validation_share=0.0))
    assert "one-class" in {one.kind for one in report.errors}
    with pytest.raises(DataError, match=r"per_class=1: .* has masks"):
        opened(tmp_path, per_class=1)


def test_a_run_says_that_masks_have_no_pixel_of_a_class_or_do_not_fit(tmp_path: Path) -> None:
    values = BLANK.copy()
    values[:10] = 255  # many programs write masks of 0 and 255
    masks(tmp_path, values)
    (line,) = quick_check(opened(tmp_path))[2:]
    assert line.startswith("warning") and "road" in line and "25% of their pixels are ignored" in line
    masks(tmp_path, np.full((40, 60), 7, np.uint8))
    assert "holds the value 7" in quick_check(opened(tmp_path))[2]


@pytest.mark.parametrize(("count", "severity"), [(1, "warning"), (2, "error")])
def test_masks_that_do_not_fit_are_an_error_if_training_would_stop(tmp_path: Path, count: int, severity: str) -> None:
    make_masks_folder(tmp_path, train=12, validation=1, test=0)
    for number in range(count):
        Image.fromarray(np.zeros((3, 3), np.uint8)).save(tmp_path / f"masks/train/{number:03}.png")
    report = check_data(open_whole(str(tmp_path), tolerant=True).splits(validation_share=0.0))
    (finding,) = [one for one in report.findings if one.kind == "misfit"]
    assert (finding.severity, finding.count) == (severity, count)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_without_a_usable_mask_is_checked(tmp_path: Path, split: str) -> None:
    for name in ("train", "val"):
        masks(tmp_path, BLANK if name == split else BLANK[:3], name=f"{name}/a")
    report = check_data(open_whole(str(tmp_path), tolerant=True).splits(validation_share=0.0))
    assert sorted(one.per_class for one in report.splits) == [(0, 0), (1, 0)]
    assert main(["data", "check", str(tmp_path), "--page", str(tmp_path / "page.html")]) == 2 * (split == "val")


def test_boxes_of_another_size_are_findings(tmp_path: Path) -> None:
    voc(tmp_path, voc_object(1, 2, 30, 20), size="<width>40</width><height>60</height>")
    report = check_data(open_whole(str(tmp_path), tolerant=True).splits(validation_share=0.0))
    (finding,) = [one for one in report.findings if one.kind == "misfit"]
    assert "EXIF" in finding.text and "60 x 40" in finding.text


outlines = st.sampled_from([None, "polygon", "two", "runs"])
boxes = st.tuples(*(st.floats(0, 0.45) for _ in range(2)), *(st.floats(0.5, 1) for _ in range(2)))


@st.composite
def objects(draw: st.DrawFn, size: tuple[int, int]) -> Objects:
    """Objects with boxes of at least a twentieth of the picture, some with outlines."""
    found = draw(st.lists(boxes, max_size=4))
    shapes: list[Any] = []
    for left, top, right, bottom in found:
        kind = draw(outlines)
        corners = np.array([(left, top), (right, top), (right, bottom), (left, bottom), (left, (top + bottom) / 2)])
        both = (corners, corners * 0.5 + 0.25 * (left + right))
        pixels = drawn((corners,), size)
        shapes.append({None: None, "polygon": (corners,), "two": both, "runs": Runs.of(pixels)}[kind])
    crowd = np.array(draw(st.lists(st.booleans(), min_size=len(found), max_size=len(found))), np.bool_)
    labels = draw(st.lists(st.integers(0, 2), min_size=len(found), max_size=len(found)))
    more = {"outlines": tuple(shapes)} if any(one is not None for one in shapes) else {}
    return Objects.of(labels, found, crowd=crowd, size=size, **more)


def in_memory(targets: Sequence[Objects]) -> MemorySource:
    images = [np.full((*target.size, 3), index, np.uint8) for index, target in enumerate(targets)]
    keys = [f"{index % 2}/p{index // 2}.png" for index in range(len(targets))]
    return MemorySource(images, labels=targets, keys=keys, classes=("a cell", "b", "ç"))


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(["coco", "yolo", "voc"]))
def test_objects_are_the_same_after_they_were_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, to: Any
) -> None:
    first = Objects.of([2], [(0.1, 0.2, 0.9, 0.8)], size=SIZES[0])
    targets = [first, *(data.draw(objects(size)) for size in SIZES)]
    folder = tmp_path_factory.mktemp("written") / "data"
    notes = convert(Splits(in_memory(targets), in_memory([first]), None), folder, to)
    splits = opened(folder)
    order = [splits.train.key(index) for index in range(len(splits.train))]
    assert len(order) == len(targets) and splits.validation is not None
    for index, target in enumerate(targets):
        found = splits.train.target(next(n for n, key in enumerate(order) if f"{index % 2}_p{index // 2}." in key))
        kept = np.ones(len(target), np.bool_) if to == "coco" else ~target.crowd
        names = [("a cell", "b", "ç")[label] for label in target.labels[kept]]
        assert [splits.classes[label] for label in found.labels] == names
        height, width = target.size
        boxes = target.boxes[kept] * [width, height, width, height]
        np.testing.assert_allclose(found.boxes * [width, height, width, height], boxes, atol=2e-3)
        if to == "coco":
            assert found.crowd.tolist() == target.crowd.tolist()
            for row, outline in enumerate(target.outlines):
                mine = found.outlines[row] if found.outlines else None
                assert type(mine) is type(outline)
                if isinstance(outline, Runs):
                    assert mine == outline
                elif outline is not None:
                    for one, other in zip(outline, mine or (), strict=True):
                        np.testing.assert_allclose(one, other, atol=1e-5)
    lost = any(target.crowd.any() for target in targets)
    assert to == "coco" or lost == any("crowd" in note for note in notes)


def test_masks_survive_their_own_format_and_cocos(tmp_path: Path) -> None:
    values = np.random.default_rng(0).choice(np.array([0, 1, 2, 255], np.uint8), (40, 60))
    masks(tmp_path / "a", values, "sky\nroad\ntree\n")
    convert(opened(tmp_path / "a"), tmp_path / "b", "masks")
    target = opened(tmp_path / "b").train.target(0)
    np.testing.assert_array_equal(target.indices(), values)
    (note,) = convert(opened(tmp_path / "a"), tmp_path / "c", "coco")
    assert "1 mask with pixels without a class" in note
    found = opened(tmp_path / "c").train.target(0)
    assert found.labels.tolist() == [0, 1, 2]
    for label in range(3):
        np.testing.assert_array_equal(found.mask(label, (40, 60)), values == label)


def test_what_a_format_does_not_hold_is_said_or_refused(tmp_path: Path) -> None:
    yolo(tmp_path / "a", names=("one", "two"))
    (note,) = convert(opened(tmp_path / "a"), tmp_path / "b", "voc")
    assert "1 class without an object (two)" in note
    for name in ("# 1", "Model 1 2 3"):
        yolo(tmp_path / "a", names=("one", name))
        with pytest.raises(DataError, match="masks cannot have the class names"):
            convert(opened(tmp_path / "a"), tmp_path / "c", "masks")
        assert not (tmp_path / "c").exists()


def test_numbers_and_objects_that_a_format_does_not_hold_are_counted(tmp_path: Path) -> None:
    objects = [{"id": n, "image_id": 7, "category_id": 90, "bbox": [5 * n, 2, 4, 4]} for n in range(3)]
    coco(tmp_path / "gaps", annotations=objects)
    categories = [{"id": number, "name": f"n{number}"} for number in (1, 2)]
    coco(tmp_path / "plain", categories=categories, annotations=[{**one, "category_id": 2} for one in objects])
    kept = ("coco", "gaps"), ("coco", "plain"), ("masks", "plain")
    for to, name in itertools.product(WRITERS, ("gaps", "plain")):
        notes = "\n".join(convert(opened(tmp_path / name), tmp_path / f"{name}-{to}", to))
        assert ("whose numbers" in notes) == ((to, name) not in kept), notes
        assert ("3 objects in images with several" in notes) == (to == "masks"), notes
    masks(tmp_path / "void", BLANK + 1, "void\nroad\nsky\n")
    assert "(1, 2)" in "".join(convert(opened(tmp_path / "void"), tmp_path / "again", "masks"))


def test_places_beyond_an_image_and_digits_of_places(tmp_path: Path) -> None:
    """YOLO's programs refuse all labels of an image if one of them is beyond it."""
    beyond = box(-6, 20, 36, 40, segmentation=[[-6, 20, 30, 20, 30, 60, -6, 60]])
    amodal = box(10.5, 4.25, 30, 20, segmentation=[[10.5, 4.25, 20.5, 4.25, 20.5, 14.25]])
    coco(tmp_path / "a", annotations=[*beyond, *amodal, *box(12.1234, 3, 9, 9)])
    notes = "\n".join(convert(opened(tmp_path / "a"), tmp_path / "yolo", "yolo"))
    assert "1 outline partly beyond the image" in notes and "1 box other than that around the outline" in notes
    lines = (tmp_path / "yolo/labels/train/a.txt").read_text().splitlines()
    assert all(0 <= float(number) <= 1 for line in lines for number in line.split()[1:])
    np.testing.assert_allclose(opened(tmp_path / "yolo").train.target(0).boxes[0], [0, 0.5, 0.5, 1])
    convert(opened(tmp_path / "a"), tmp_path / "voc", "voc")
    assert "<xmin>12.1234</xmin>" in (tmp_path / "voc/Annotations/a.xml").read_text()


def test_masks_of_objects_beside_those_of_classes_are_no_images(tmp_path: Path) -> None:
    """Pascal VOC has a mask of both kinds for an image, and more images."""
    for name in ("a", "b"):
        picture(tmp_path / f"JPEGImages/{name}.png")
    for folder in ("SegmentationClass", "SegmentationObject"):
        (tmp_path / folder).mkdir()
        Image.fromarray(BLANK).save(tmp_path / folder / "a.png")
    (tmp_path / "classes.txt").write_text("sky\nroad\n")
    splits = opened(tmp_path)
    assert keys_of(splits.train) == ["JPEGImages/a.png"]
    assert any("skipped 1 image," in note and "JPEGImages/b.png" in note for note in splits.notes)


def test_targets_of_boxes_are_selected_renumbered_and_joined() -> None:
    pictures = [Objects.of([1, 0, 1], [(0, 0, 0.1 * n, 1) for n in (1, 2, 3)]), Objects.of([], []),
                Objects.of([2], [(0, 0, 0.4, 1)])]  # fmt: skip
    targets = Targets.of(pictures, "boxes", ("a", "b", "c"))
    assert [str(targets[n]) for n in range(3)] == [str(one) for one in pictures]
    turned = targets.rows(np.array([2, 0]))
    assert [str(turned[n]) for n in range(2)] == [str(pictures[2]), str(pictures[0])]
    fewer = targets.renumbered([-1, 1, 0], ("c", "b"))[0]
    assert fewer.labels.tolist() == [1, 1]
    np.testing.assert_allclose(fewer.boxes[:, 2], [0.1, 0.3])
    both = Targets.joined([targets, Targets.of(pictures[:1], "boxes", ("b", "d", "x"))])
    last = both[3]
    assert both.names == ("a", "b", "c", "d", "x") and isinstance(last, Objects) and last.labels.tolist() == [3, 1, 3]
    numbered = replace(targets, ids=(7, 3, 9))
    assert numbered.renumbered([-1, 1, 0], ("c", "b")).ids == (9, 3)
    assert numbered.renumbered([0, 1, 2], ("a", "b", "c", "d")).ids == (), "a class has no number"
    more = replace(Targets.of(pictures[:1], "boxes", ("b", "d", "x")), ids=(3, 1, 2))
    assert Targets.joined([numbered, more]).ids == (7, 3, 9, 1, 2) and both.ids == ()
    for ids in ((4, 1, 2), (3, 9, 2)):
        with pytest.raises(DataError):
            Targets.joined([numbered, replace(more, ids=ids)])


def test_the_check_counts_objects_by_the_area_that_is_measured(tmp_path: Path) -> None:
    """A line across the image is small, although its box is not."""
    line = {"segmentation": [[0, 0, 60, 38, 60, 40, 0, 2]]}
    values = coco(tmp_path, annotations=box(0, 0, 60, 40, **line))
    values["annotations"] += [{**box(0, 0, 40, 40)[0], "id": 2, "image_id": 3}]
    (tmp_path / "_annotations.coco.json").write_text(json.dumps(values))
    report = check_data(open_data(str(tmp_path), validation_share=0.0))
    assert [*report.amounts.values()] == [1, 1, 0]


def test_the_commands_check_convert_and_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "valid"):
        coco(tmp_path / "a" / split)
    page = tmp_path / "page.html"
    assert main(["data", "check", str(tmp_path / "a"), "--page", str(page), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["target_kind"] == "boxes" and sum(report["amounts"].values()) == 2, "crowds are not counted"
    assert [split["per_class"] for split in report["splits"]] == [[0, 1], [0, 1]]
    kinds = {finding["kind"] for finding in report["findings"]}
    assert "missing-in-train" in kinds and "missing-in-validation" not in kinds, "the class is named once"
    assert 'class="maps"' in page.read_text()
    assert main(["data", "pack", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "yolo"]) == 0
    assert "crowd" in capsys.readouterr().out
    assert main(["data", "pack", str(tmp_path / "a"), str(tmp_path / "tar")]) == 2
    assert "--to" in capsys.readouterr().err
    classes = ["--task", "classification", "--run", str(tmp_path / "run")]
    assert main(["train", "--data", str(tmp_path / "a"), *classes]) == 2
    assert "boxes of objects" in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert main(["data", "check", f"{tmp_path / 'a'}", "--ignore-label", "3", "--page", "None"]) == 2
    with pytest.raises(ConfigError):
        open_data(f"{tmp_path / 'a'}?splits=x", validation_share=0.0)
    with pytest.raises(DataError, match="--splits"):
        open_data(f"{tmp_path / 'a/train/_annotations.coco.json'}?train=a&test=b", validation_share=0.0)


@pytest.mark.usefixtures("types_unchecked")
def test_an_own_mask_can_hold_truth_values() -> None:
    mask = Mask("own", lambda: np.array([[True, False]]), (3, 5))
    assert mask.indices((1, 2)).tolist() == [[5, 3]]
