"""Tests of tar shards: the samples of a tar file, their positions, the forms of a location, and all kinds of damage."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tarfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.make import encode, keys_of, targets_of, write_tar
from vitrail.data.formats import tar as shards_module
from vitrail.data.formats import tar_index
from vitrail.data.formats.tar import locate, looks_like_shards, open_shards
from vitrail.data.formats.tar_index import members, open_shard
from vitrail.data.source import Source, samples_of
from vitrail.data.sources import open_data
from vitrail.errors import DataError

Members = Mapping[str, bytes]


def picture(number: int) -> bytes:
    return encode(np.full((3, 5 + number % 4, 3), number, np.uint8), "PNG")


def write(path: Path, files: Members | list[tuple[str, bytes]], tar_format: int = tarfile.GNU_FORMAT) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tar(path, files.items() if isinstance(files, Mapping) else files, tar_format)
    return str(path)


def labelled(*names: str) -> dict[str, bytes]:
    """Return an image and a label file for each "key:label"."""
    files = {}
    for name in names:
        key, _, label = name.partition(":")
        files |= {f"{key}.jpg": f"image {key}".encode(), f"{key}.cls": label.encode()}
    return files


def test_a_sample_is_what_shares_a_name_up_to_the_first_dot(tmp_path: Path) -> None:
    files = {
        "b/2.jpg": b"two", "b/2.cls": b"1\n", "./a/1.cls": b" 0 ", "./a/1.PNG": b"one", "c/3.json": b'{"label": 2}',
        "c/3.jpeg": b"three", "d.e/4.webp": b"four", "d.e/4.seg.png": b"mask", "README": b"", ".hidden.jpg": b"",
        "5.cls": b"1", "c/3.txt": b"",
    }  # fmt: skip
    splits = open_shards(write(tmp_path / "x.tar", files), None)
    assert splits.validation is None and splits.test is None
    source = splits.train
    assert keys_of(source) == ["b/2", "a/1", "c/3", "d.e/4"]
    assert targets_of(source) == [1, 0, 2, None] and source.classes == ("0", "1", "2")
    assert [source[index].image for index in range(4)] == [b"two", b"one", b"three", b"four"]
    assert "x.tar, train: skipped 4 files" in splits.notes[0] and "1 of 4 images without a label" in splits.notes[1]


def test_names_with_several_dots_are_read_up_to_the_last_one(tmp_path: Path) -> None:
    files = {
        "img_v1.001.PNG": b"one", "img_v1.001.cls": b"1", "d/img_v1.002.png": b"two",
        "d/img_v1.002.json": b'{"cls": 0}', "plain.jpg": b"three", "plain.mask.png": b"", "plain.mask.json": b"{}",
        "a.b.c.webp": b"four", "x.1.txt": b"",
    }  # fmt: skip
    splits = open_shards(write(tmp_path / "x.tar", files), None)
    source = splits.train
    assert keys_of(source) == ["plain", "img_v1.001", "d/img_v1.002", "a.b.c"]
    assert targets_of(source) == [None, 1, 0, None] and "train: skipped 3 files" in splits.notes[0]
    assert [source[index].image for index in range(4)] == [b"three", b"one", b"two", b"four"]


def test_held_out_shards_without_labels_or_images_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "train.tar", labelled("1:0", "2:1"))
    write(tmp_path / "val.tar", {})
    write(tmp_path / "test.tar", {"9.jpg": b""})
    splits = open_data(str(tmp_path), validation_share=0.0)
    assert (splits.validation, splits.test) == (None, None)
    assert any("validation split is skipped" in note for note in splits.notes)
    assert any("test split is skipped" in note for note in splits.notes)
    numbers = {"1.jpg": b"", "1.json": b'{"__numbers__": [1.5]}', "2.jpg": b"", "2.json": b'{"__numbers__": [2]}'}
    write(tmp_path / "train.tar", numbers)
    assert any("validation split is skipped" in note for note in open_shards(str(tmp_path), None).notes)


def test_shards_of_splits_are_chosen(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"fold{number}.tar", labelled(f"{number}a:0", f"{number}b:1"))
    with pytest.raises(DataError, match="has the folds"):
        open_data(str(tmp_path), validation_share=0.0)
    splits = open_data(f"{tmp_path}?train=fold0&train=fold1&test=fold2", validation_share=0.0)
    assert len(splits.train) == 4 and keys_of(splits.test) == ["2a", "2b"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"1.jpg": b"", "1.cls": b"\n"}, r"x\.tar: the label in '1\.cls' cannot be read \(it holds ''\)"),
        ({"1.jpg": b"", "1.cls": b"a\nb"}, r"the label in '1\.cls' cannot be read"),
        ({"1.jpg": b"", "1.cls": b"\xff"}, r"the label in '1\.cls' cannot be read"),
        ({"1.jpg": b"", "1.json": b"{"}, r"the label in '1\.json' cannot be read"),
        ({"1.jpg": b"", "1.json": b"[" * 50_000}, r"the label in '1\.json' cannot be read"),
        ({"1.jpg": b"", "1.json": b'{"label": 1.5}'}, r"cannot be read \(it is 1\.5\)"),
        ({"1.jpg": b"", "1.json": b'{"label": [true]}'}, r"cannot be read \(it is True\)"),
        ({"1.jpg": b"", "1.json": b'{"__key__": "\\ud800", "label": 1}'}, r"the label in '1\.json' cannot be read"),
        ({"1.jpg": b"", "1.cls": b" " * 2_000_000}, r"'1\.cls' has 2,000,000 bytes, but a label may have at most"),
        (labelled("1:-1"), r"sample '1' has the label -1; it is not among the known classes"),
        (labelled("1:2000000"), r"the label 2000000 of '1' is not a class number"),
        (labelled("1:0", "2:rose"), r"the label 0 of '1' is a number, but other labels are names, such as 'rose'"),
        (labelled("1:a\tb"), r"unprintable names: \['a\\tb'\]"),
        ({**labelled("1:0"), "2.jpg": b"", "2.json": b'{"label": [1]}'}, r"some images have a list of labels"),
        ({"1.jpg": b"", "2.jpg": b"", "2.json": b'{"label": [1]}'}, r"some images have a list of labels"),
        ({"0.jpg": b"", "0.json": b'{"__numbers__": [1.5]}', "1.jpg": b"", "1.json": b'{"label": 1}'},
         "some samples have 1 numbers, and others have classes"),
        ({"0.jpg": b"", "0.json": b'{"__numbers__": [1.5]}', "1.jpg": b"", "1.json": b'{"__numbers__": [1, 2]}'},
         "others have classes or another count of numbers"),
        ({"0.jpg": b"", "0.json": b'{"__numbers__": ["x"]}'}, r"'0\.json' cannot be read \('x' is not a finite number"),
        ({"1.cls": b"3", "README": b""}, r"x\.tar: there are no images, but 2 other files; a sample is"),
        ({}, r"x\.tar: there are no images; a sample is"),
    ],
)  # fmt: skip
def test_labels_that_cannot_be(tmp_path: Path, files: Members, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_shards(write(tmp_path / "x.tar", files), None)


def test_a_cls_goes_before_a_json_whichever_comes_first(tmp_path: Path) -> None:
    files = [("1.json", b'{"label": 5}'), ("1.cls", b"1"), ("1.jpg", b""), ("2.cls", b"0"), ("2.json", b'{"label": 6}'),
             ("2.jpg", b"")]  # fmt: skip
    same = [("3.cls", b"1"), ("3.json", b'{"label": "1"}'), ("3.jpg", b"")]
    splits = open_shards(write(tmp_path / "x.tar", [*files, *same]), None)
    assert targets_of(splits.train) == [1, 0, 1] and splits.classes == ("0", "1")
    assert any("2 images with another label or text in the .json file" in note for note in splits.notes)


def test_a_cls_may_begin_with_the_mark_of_some_editors(tmp_path: Path) -> None:
    files = [("1.jpg", b""), ("1.cls", b"\xef\xbb\xbf1\r\n"), ("2.jpg", b""), ("2.cls", b"0")]
    assert targets_of(open_shards(write(tmp_path / "x.tar", files), None).train) == [1, 0]


def test_several_labels_in_a_json_are_noted_and_a_field_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    files = [("1.jpg", b""), ("1.json", b'{"class": "b", "label": 1}'), ("2.jpg", b""), ("2.json", b'{"cls": 0}')]
    splits = open_shards(write(tmp_path / "x.tar", files), None)
    assert targets_of(splits.train) == [1, 0]
    assert any("1 image with another label" in note for note in splits.notes)
    both = open_shards(write(tmp_path / "both.tar", [*files, ("1.cls", b"0")]), None)
    assert any("1 image with another label" in note for note in both.notes), "each image once"
    other = [*files[:-1], ("2.json", b'{"cls": 0, "from": {"camera": 1, "camera": 2}}')]
    assert targets_of(open_shards(write(tmp_path / "other.tar", other), None).train) == [1, 0]
    files[-1] = ("2.json", b'{"label": 0, "label": 1}')
    with pytest.raises(DataError, match=r"2\.json.* 'label' occurs twice"):
        open_shards(write(tmp_path / "y.tar", files), None)


def test_an_index_that_was_copied_with_its_shard_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = write(tmp_path / "x.tar", labelled("1:rose", "2:daisy"))
    open_shards(location, None)
    monkeypatch.setattr(tar_index, "_scan", None)
    (tmp_path / "copy").mkdir()
    for name in ("x.tar", "x.tar.index"):
        shutil.copy2(tmp_path / name, tmp_path / "copy" / name)
        time.sleep(0.01)
    assert targets_of(open_shards(str(tmp_path / "copy" / "x.tar"), None).train) == [1, 0]


def test_a_shard_of_the_same_size_and_time_is_another_one(tmp_path: Path) -> None:
    location = write(tmp_path / "x.tar", labelled("1:rose", "2:daisy"))
    before = open_shards(location, None).train
    times = Path(location).stat().st_mtime_ns
    time.sleep(0.01)
    write(tmp_path / "x.tar", labelled("1:daisy", "2:rose"))
    os.utime(location, ns=(times, times))
    after = open_shards(location, None).train
    assert targets_of(before) == [1, 0] and targets_of(after) == [0, 1]
    assert samples_of(before).stamp(0) != samples_of(after).stamp(0)


def test_classes_of_a_model_are_matched_by_name(tmp_path: Path) -> None:
    names = write(tmp_path / "names.tar", labelled("1:rose", "2:daisy"))
    assert targets_of(open_shards(names, ("daisy", "iris", "rose")).train) == [2, 0]
    numbers = write(tmp_path / "numbers.tar", labelled("1:2", "2:0"))
    assert targets_of(open_shards(numbers, ("0", "10", "2")).train) == [2, 0]
    with pytest.raises(DataError, match=r"sample '1' has the label 'rose'; it is not among .*\(nearest: roses\)"):
        open_shards(names, ("daisy", "roses"))
    for classes in (("daisy", "iris", "rose"), ("0", "1")):
        with pytest.raises(DataError, match=r"sample '1' has the label 2; it is not among the known classes"):
            open_shards(numbers, classes)


def test_names_beside_the_shards_are_what_numbers_mean(tmp_path: Path) -> None:
    location = write(tmp_path / "x.tar", labelled("1:2", "2:0", "3:rose"))
    (tmp_path / "classes.json").write_text('["daisy", "iris", "rose"]')
    source = open_shards(location, None).train
    assert source.classes == ("daisy", "iris", "rose") and targets_of(source) == [2, 0, 2]
    other = open_shards(location, ("rose", "daisy")).train
    assert other.classes == ("rose", "daisy") and targets_of(other) == [0, 1, 0]
    with pytest.raises(DataError, match="sample '1' has the label 2, which is 'rose'; it is not among"):
        open_shards(location, ("daisy", "iris"))
    (tmp_path / "classes.json").write_text('["daisy", "daisy"]')
    with pytest.raises(DataError, match=r"classes\.json must be a list of names without repetitions"):
        open_shards(location, None)


def test_other_splits_are_indexed_by_the_classes_of_training(tmp_path: Path) -> None:
    write(tmp_path / "train-0.tar", labelled("1:rose", "2:daisy"))
    write(tmp_path / "val-0.tar", labelled("3:rose"))
    splits = open_shards(str(tmp_path), None)
    assert splits.validation.classes == ("daisy", "rose")
    assert targets_of(splits.validation) == [1]
    write(tmp_path / "test.tar", labelled("3:tulip", "4:rose", "5:tulip"))
    (fault,) = (splits := open_shards(str(tmp_path), None)).faults
    assert (fault.kind, fault.severity, fault.count) == ("unknown-class", "error", 2)
    assert f"{tmp_path / 'test.tar'}: sample '3' has the label 'tulip'" in fault.text
    assert "counts 2 images of the test split as unlabelled" in fault.training
    assert targets_of(splits.test) == [None, 1, None]
    with pytest.raises(DataError, match=r"test\.tar: sample '3' has the label 'tulip'"):
        open_data(str(tmp_path), validation_share=0.0)
    with pytest.raises(DataError, match=r"test\.tar: sample '3' has the label 'tulip'"):
        open_shards(str(tmp_path), ("daisy", "rose"))
    write(tmp_path / "test.tar", {"1.jpg": b"", "1.json": b'{"label": ["rose"]}'})
    with pytest.raises(DataError, match="one label per image in one split and lists of labels in another"):
        open_shards(str(tmp_path), None)


@pytest.mark.parametrize(
    ("paths", "location", "expected"),
    [
        (["a.tar", "b.tar"], "", {"train": ["a.tar", "b.tar"]}),
        (["train/1.tar", "val/1.tar", "TEST/1.tar"], "",
         {"train": ["train/1.tar"], "validation": ["val/1.tar"], "test": ["TEST/1.tar"]}),
        (["train-0.tar", "train-1.tar", "valid-0.tar", "other/0.tar", ".x.tar"], "",
         {"train": ["train-0.tar", "train-1.tar"], "validation": ["valid-0.tar"]}),
        (["val-0.tar"], "val-0.tar", {"train": ["val-0.tar"]}),
        ([f"x-{n:02}.tar" for n in range(12)], "x-{03..10}.tar", {"train": [f"x-{n:02}.tar" for n in range(3, 11)]}),
        (["x-9.tar", "x-10.tar"], "x-{9..10}.tar", {"train": ["x-10.tar", "x-9.tar"]}),
        (["train-0.tar", "train-1.tar", "val-0.tar", "val-1.tar"], "{train,val}-{0..1}.tar",
         {"train": ["train-0.tar", "train-1.tar"], "validation": ["val-0.tar", "val-1.tar"]}),
        (["a/1.tar", "b/2.tar", "b/2.tar.index", "c/3.tar"], "[ab]/?.tar*", {"train": ["a/1.tar", "b/2.tar"]}),
        (["val-0.tar", "val-1.tar"], "val-*.tar", {"train": ["val-0.tar", "val-1.tar"]}),
        (["x[1].tar", "x1.tar"], "x[1].tar", {"train": ["x[1].tar"]}),
    ],
)  # fmt: skip
def test_what_a_location_means(tmp_path: Path, paths: list[str], location: str, expected: dict[str, list[str]]) -> None:
    root = tmp_path / "test"  # a folder above the location does not influence splits
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    place = f"{root}/{location}" if location else str(root)
    assert locate(place).shards == {split: [f"{root}/{path}" for path in found] for split, found in expected.items()}
    assert looks_like_shards(place)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("", "has no shards; it needs .tar files"),
        ("x-{0..3}.tar", r"2 of 4 shards are missing, such as .*/x-2\.tar"),
        ("y-*.tar", "no file matches this pattern"),
        ("z.tar", r"shard .*/z\.tar does not exist"),
        ("x-{3..1}.tar", "is not a range from a number to a larger one"),
        ("x-{0..9999}{0..9999}.tar", "stands for more than 1,000,000 shards"),
    ],
)
def test_locations_of_nothing(tmp_path: Path, location: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "x-0.tar", labelled("1:0"))
    write(tmp_path / "x-1.tar", labelled("2:0"))
    with pytest.raises(DataError, match=message):
        open_shards(str(tmp_path / (location or "empty")), None)


def test_what_does_not_look_like_shards(tmp_path: Path, tree: Callable[..., Path]) -> None:
    assert not looks_like_shards(str(tree("rose/1.jpg", "stray.tar")))
    assert not looks_like_shards(str(tree("1.jpg", "2.csv", name="flat")))
    assert not looks_like_shards(str(tmp_path / "nothing")) and not looks_like_shards("bundled")
    assert looks_like_shards("s3://bucket/data") and looks_like_shards("https://host/x.tar?key=1")
    assert not looks_like_shards("https://host/x.csv")


def test_names_with_a_prefix_or_of_another_archive_are_read(tmp_path: Path) -> None:
    prefixed = "p" * 100 + "/" + "x" * 90
    path = write(tmp_path / "ustar.tar", {f"{prefixed}.jpg": b"prefixed"}, tarfile.USTAR_FORMAT)
    assert keys_of(open_shards(path, None).train) == [prefixed]
    assert keys_of(open_shards(write(tmp_path / "b.tar", {"BZh.jpg": b""}), None).train) == ["BZh"]


@given(
    names=st.lists(st.text(st.characters(exclude_characters="\0/", codec="utf-8"), max_size=130), max_size=6),
    sizes=st.lists(st.integers(0, 1600), min_size=6, max_size=6),
    tar_format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)  # fmt: skip
def test_members_are_those_that_python_finds(names: list[str], sizes: list[int], tar_format: int) -> None:
    file = io.BytesIO()
    pairs = enumerate(zip(names, sizes, strict=False))
    write_tar(file, ((f"{number} {name}", bytes(size)) for number, (name, size) in pairs), tar_format)
    data = file.getvalue()
    found = list(members("x.tar", lambda start, count: data[start : start + count], len(data)))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [tuple(one) for one in found] == [(one.name, one.offset_data, one.size) for one in tar.getmembers()]


def test_a_shard_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = Path(write(tmp_path / "whole.tar", labelled("1:0", "2:1", "3:0")))
    data, cut = whole.read_bytes(), tmp_path / "cut.tar"
    content = 6 * 1024  # a header and a block each
    for length in [1, 511, 512, 513, 1000, 1024, 3000, 4096, content - 1, content, content + 511]:
        cut.write_bytes(data[:length])
        expected = r"cut\.tar is truncated: it ends at byte" if length >= 512 else r"cut\.tar is not a tar file"
        with pytest.raises(DataError, match=expected):
            open_shards(str(cut), None)
    cut.write_bytes(data[: content + 512])  # one block of zeros is an end
    assert len(open_shards(str(cut), None).train) == 3
    cut.write_bytes(data[: 2049 + 512])
    with pytest.raises(DataError, match=r"ends at byte 2,561, inside '2\.jpg', which extends to 2,567; copy"):
        open_shards(str(cut), None)
    cut.write_bytes(data[:2048])
    with pytest.raises(DataError, match=r"ends at byte 2,048, after '1\.cls', without the zeros that end a tar"):
        open_shards(str(cut), None)


@pytest.mark.parametrize("name", ["/etc/x.jpg", "../x.jpg", "a/../../x.jpg", "a/.."])
def test_hostile_paths_are_refused(tmp_path: Path, name: str) -> None:
    location = write(tmp_path / "x.tar", {**labelled("1:0"), name: b""})
    with pytest.raises(DataError, match=rf"x\.tar has a file called {name!r}, which leads out of the folder"):
        open_shards(location, None)


@pytest.mark.parametrize(
    ("kind", "size", "content", "message"),
    [
        (tarfile.SYMTYPE, 0, b"", "has the link '1'; pack the file itself"),
        (tarfile.LNKTYPE, 0, b"", "has the link '1'; pack the file itself"),
        (tarfile.FIFOTYPE, 0, b"", "has '1', which is not an ordinary file"),
        (tarfile.GNUTYPE_SPARSE, 0, b"", "has '1', which is not an ordinary file"),
        (tarfile.GNUTYPE_LONGLINK, 2**80, b"", "is truncated: it ends at byte"),
        (tarfile.GNUTYPE_LONGNAME, 2**80, b"", "the stated length of a name is 1,208,925,819,614,629,174"),
        (tarfile.REGTYPE, 2**80, b"", "is truncated: it ends at byte"),
        (tarfile.REGTYPE, -1, b"", "is damaged at byte 0"),
        (tarfile.XHDTYPE, 9, b"9999 a=b\n", "is damaged at byte 0: its pax header cannot be read"),
        (tarfile.XHDTYPE, 5, b"5 ab\n", "is damaged at byte 0: its pax header cannot be read"),
        (tarfile.XHDTYPE, 23, b"23 GNU.sparse.major=1 \n", "has a sparse file, which cannot be read"),
        (tarfile.XHDTYPE, 5010, b"5010 size=" + b"9" * 4999 + b"\n", "there are no images"),
    ],
)  # fmt: skip
def test_links_devices_and_headers_that_lie_are_refused(
    tmp_path: Path, kind: bytes, size: int, content: bytes, message: str
) -> None:
    about = tarfile.TarInfo("1")
    about.type, about.size = kind, size
    data = about.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)
    (tmp_path / "x.tar").write_bytes(data + tarfile.TarInfo("2").tobuf() + bytes(1024))
    with pytest.raises(DataError, match=message):
        open_shards(str(tmp_path / "x.tar"), None)


def test_folders_in_a_tar_are_passed_over(tmp_path: Path) -> None:
    about = tarfile.TarInfo("a")
    about.type = tarfile.DIRTYPE
    (tmp_path / "y.tar").write_bytes(about.tobuf() + Path(write(tmp_path / "x.tar", labelled("a/1:0"))).read_bytes())
    splits = open_shards(str(tmp_path / "y.tar"), None)
    assert keys_of(splits.train) == ["a/1"] and splits.train[0].image == b"image a/1" and not splits.notes


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"\x1f\x8b\x08" + bytes(600), r"is compressed \(gzip\); samples are read in random order, .* decompress it"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), r"is compressed \(zstd\)"),
        (b"PK\x03\x04" + bytes(600), "is not a tar file"),
        (b"text", "is not a tar file"),
    ],
)
def test_what_is_not_a_tar(tmp_path: Path, start: bytes, message: str) -> None:
    (tmp_path / "x.tar.gz").write_bytes(start)
    with pytest.raises(DataError, match=message):
        open_shards(str(tmp_path / "x.tar.gz"), None)


@given(place=st.integers(0, 511), flip=st.integers(1, 255))
def test_a_flipped_byte_in_a_header_is_noticed(tmp_path_factory: pytest.TempPathFactory, place: int, flip: int) -> None:
    path = tmp_path_factory.mktemp("flip") / "x.tar"
    data = bytearray(Path(write(path, labelled("1:0", "2:1"))).read_bytes())
    data[2048 + place] ^= flip
    path.write_bytes(data)
    try:
        found = keys_of(open_shards(str(path), None).train)
    except DataError:
        return
    assert found == ["1", "2"]  # a digit of the sum became another blank, so the value is the same


@given(st.binary(max_size=1500), st.integers(0, 3000))
def test_garbage_is_a_data_error(tmp_path_factory: pytest.TempPathFactory, garbage: bytes, place: int) -> None:
    path = tmp_path_factory.mktemp("garbage") / "x.tar"
    data = Path(write(path, {**labelled("1:0", "2:1"), "é" * 70 + ".jpg": b""}, tarfile.PAX_FORMAT)).read_bytes()
    path.write_bytes(data[:place] + garbage + data[place + len(garbage) :])
    try:
        open_shards(str(path), None)
    except DataError as error:
        assert "x.tar" in str(error)


def test_a_key_that_comes_twice_is_refused(tmp_path: Path) -> None:
    twice = write(tmp_path / "x.tar", [("1.jpg", b"a"), ("2.jpg", b"b"), ("1.png", b"c")])
    with pytest.raises(DataError, match=r"x\.tar has the sample '1' twice: '1\.png' belongs to the second"):
        open_shards(twice, None)
    renamed = {"1.jpg": b"", "1.json": b'{"__key__": "same"}', "2.jpg": b"", "2.json": b'{"__key__": "same"}'}
    with pytest.raises(DataError, match=r"x\.tar has two samples with the key 'same'"):
        open_shards(write(tmp_path / "x.tar", renamed), None)
    write(tmp_path / "x.tar", labelled("1:0", "2:1"))
    write(tmp_path / "y.tar", labelled("3:0", "1:1"))
    with pytest.raises(DataError, match=r"x\.tar and .*/y\.tar both have a sample '1'; keys must be unique"):
        open_shards(str(tmp_path), None)


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the shards whose headers were read."""
    scanned: list[str] = []

    def count(shard: str, read: Callable[[int, int], bytes], size: int) -> object:
        scanned.append(shard)
        return members(shard, read, size)

    monkeypatch.setattr(tar_index, "members", count)
    return scanned


def same(one: Source, other: Source) -> bool:
    return keys_of(one) == keys_of(other) and [one[i] for i in range(len(one))] == [other[i] for i in range(len(one))]


def test_a_shard_is_scanned_once_until_it_changes(tmp_path: Path, scans: list[str]) -> None:
    location = write(tmp_path / "x.tar", labelled("1:rose", "2:daisy"))
    first = open_shards(location, None).train
    assert scans == [location] and (tmp_path / "x.tar.index").is_file()
    assert same(open_shards(location, None).train, first) and scans == [location]
    write(tmp_path / "x.tar", labelled("1:rose", "2:tulip", "3:tulip"))
    assert open_shards(location, None).train.classes == ("rose", "tulip") and scans == [location] * 2


def test_a_scan_reads_headers_and_labels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = write(tmp_path / "x.tar", {"1.jpg": bytes(1_000_000), "1.cls": b"7", "2.jpg": bytes(500_000)})
    counts: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, place: counts.append(count) or pread(file, count, place))
    assert len(open_shards(location, None).train) == 2
    assert sum(counts) == 4 * 512 + 1


@pytest.mark.parametrize("garbage", [b"", b"PK\x03\x04 nonsense", None])
def test_a_damaged_index_is_made_again(tmp_path: Path, scans: list[str], garbage: bytes | None) -> None:
    location = write(tmp_path / "x.tar", labelled("1:rose", "2:daisy"))
    expected = open_shards(location, None).train
    index = tmp_path / "x.tar.index"
    index.write_bytes(index.read_bytes()[:-40] if garbage is None else garbage)
    assert same(open_shards(location, None).train, expected)
    assert same(open_shards(location, None).train, expected) and len(scans) == 2


def test_an_index_that_points_out_of_its_shard_is_not_used(tmp_path: Path, scans: list[str]) -> None:
    location = write(tmp_path / "x.tar", labelled("1:rose", "2:daisy"))
    shard = open_shard(location)
    for name, value in (("offsets", 10**9), ("sizes", -1), ("codes", 2), ("codes", -2), ("key_ends", 0)):
        array = getattr(shard.index, name).copy()
        array[1] = value
        fields = {**vars(shard.index), name: array}
        tar_index._save(location, shard.version, tar_index.ShardIndex(**fields))
        before = len(scans)
        assert keys_of(open_shards(location, None).train) == ["1", "2"] and len(scans) == before + 1


@pytest.mark.parametrize(("is_foreign", "has_cache"), [(False, True), (True, True), (False, False)])
def test_where_the_index_cannot_be_beside_its_shard_it_is_in_the_cache_if_there_is_one(
    tmp_path: Path, cache: Path, scans: list[str], is_foreign: bool, has_cache: bool
) -> None:
    """A file of another program is not replaced, and a file cannot have the name of a folder, even for root, whom
    permissions do not stop."""
    location = write(tmp_path / "x.tar", labelled("1:rose", "2:daisy"))
    own = tmp_path / "x.tar.index"
    own.write_text("1.jpg 512\n") if is_foreign else own.mkdir()
    if not has_cache:
        cache.write_text("a file")
    for _ in range(2):
        assert keys_of(open_shards(location, None).train) == ["1", "2"]
    assert len(scans) == (1 if has_cache else 2) and (not has_cache or len(list((cache / "shards").iterdir())) == 1)
    assert own.read_text() == "1.jpg 512\n" if is_foreign else own.is_dir()
    assert not list(tmp_path.glob("*.partial"))


def test_threads_may_open_one_shard_at_the_same_time(tmp_path: Path) -> None:
    location = write(tmp_path / "x.tar", labelled(*(f"{number}:{number % 3}" for number in range(200))))
    with ThreadPoolExecutor(8) as pool:
        sources = list(pool.map(lambda _: open_shards(location, None).train, range(16)))
    assert all(same(source, sources[0]) for source in sources)
    assert [path.name for path in tmp_path.glob("x*")] in (["x.tar", "x.tar.index"], ["x.tar.index", "x.tar"])


def test_threads_read_more_shards_than_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "OPEN_FILES", 2)
    for shard in range(7):
        write(tmp_path / f"{shard}.tar", labelled(*(f"{shard}-{number}:0" for number in range(5))))
    source = open_shards(str(tmp_path), None).train
    order = np.random.default_rng(0).permutation(np.tile(np.arange(35), 20)).tolist()
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(lambda index: source[index].image, order))
    assert images == [f"image {source.key(index)}".encode() for index in order]
    held = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.exists()]
    assert len([path for path in held if path.is_relative_to(tmp_path)]) <= 2


def test_another_process_reads_the_same(tmp_path: Path) -> None:
    source = open_shards(write(tmp_path / "x.tar", labelled("1:0", "2:1")), None).train
    assert source[1].image == b"image 2"  # a file is open now
    assert same(pickle.loads(pickle.dumps(source)), source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, where other threads are alive
        child = os.fork()
    if child == 0:
        os._exit(0 if source[0].image == b"image 1" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_shard_that_changes_while_it_is_in_use(tmp_path: Path) -> None:
    location = write(tmp_path / "x.tar", labelled("1:0", "2:1"))
    source = open_shards(location, None).train
    os.utime(location, ns=(0, 0))
    with pytest.raises(DataError, match=r"x\.tar was changed after it was opened; run the command again"):
        source[0]
    source = open_shards(location, None).train
    assert source[0].image == b"image 1"
    os.truncate(location, 600)
    with pytest.raises(DataError, match=r"x\.tar was truncated while it was in use"):
        source[1]
    source = open_shards(write(tmp_path / "y.tar", labelled("1:0", "2:1")), None).train
    (tmp_path / "y.tar").unlink()
    with pytest.raises(DataError, match=r"cannot read shard .*/y\.tar: No such file"):
        source[0]
