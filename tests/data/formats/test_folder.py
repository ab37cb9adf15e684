"""Tests of class folders as a source."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.make import encode, keys_of
from vitrail.data.formats.folder import read_folder
from vitrail.data.pixels.decode import SUFFIXES
from vitrail.data.sources import open_data
from vitrail.errors import DataError
from vitrail.testing import check_source

Trees = Callable[..., Path]

RED = Image.new("RGB", (7, 5), "red")


def test_order_does_not_depend_on_that_of_the_file_system(tree: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(*(f"{name}/{part}/{number}.png" for name in "ba" for part in "yx" for number in range(3)))
    expected = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.png"))
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: contextlib.nullcontext(reversed(list(scandir(path)))))
    assert keys_of(read_folder(root).samples) == expected


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_every_suffix_counts_in_any_case(tree: Trees, suffix: str) -> None:
    found = read_folder(tree(f"a/lower{suffix}", f"a/upper{suffix.upper()}", f"a/title{suffix.title()}"))
    source = found.samples
    assert len(source) == 3 and len(found.others) == 0


def test_a_class_whose_images_have_other_suffixes_is_an_error(tree: Trees) -> None:
    root = tree("cat/1.png", "dog/2.png", "dog/notes.txt", "fox/1.happy", "fox/2.sad", "owl/3", "bare/")
    for name, file_format in (("fox/1.happy", "GIF"), ("fox/2.sad", "PNG"), ("owl/3", "JPEG2000")):
        (root / name).write_bytes(encode(RED, file_format))
    (fault,) = (fault for fault in read_folder(root).faults if fault.kind == "unread-images")
    assert (fault.severity, fault.count) == ("error", 3) and "fox, owl" in fault.text and ".happy: 1" in fault.text
    with pytest.raises(DataError, match="fox, owl"):
        open_data(str(root), validation_share=0.0)


def test_images_with_other_suffixes_beside_usual_ones_are_named(tree: Trees) -> None:
    root = tree("cat/1.png", "cat/1.png_original", "dog/2.png", "dog/notes.txt", "dog/.3")
    (root / "cat/1.png_original").write_bytes(encode(RED, "PNG"))
    (fault,) = read_folder(root).faults
    assert (fault.kind, fault.severity, fault.count) == ("unread-images", "warning", 1)
    assert any(".png_original" in note for note in open_data(str(root), validation_share=0.0).notes)
    (fault,) = read_folder(root, unlabelled=True).faults
    assert fault.kind == "unread-images"


def test_files_that_are_no_images_are_counted_unless_they_are_hidden(tree: Trees) -> None:
    hidden = "a/.2.png", "a/.thumbs/3.png", "a/.DS_Store", ".cache/4.png", "a/b/.hidden/5.txt"
    found = read_folder(tree("a/1.png", "a/notes.txt", "a/x/png", "b/2.png.bak", "b/3.png", "read.me", *hidden))
    assert keys_of(found.samples) == ["a/1.png", "b/3.png"] and found.samples.classes == ("a", "b")
    assert len(found.others) == 3


def test_class_folders_that_are_all_empty_are_refused(tree: Trees) -> None:
    expected = r"pictures has no images \(\.apng, \.avif, .*\.webp\) in its class folders: a, b; add images$"
    with pytest.raises(DataError, match=expected):
        read_folder(tree("a/notes.txt", "b/"))


def test_folders_of_systems_are_no_classes_and_their_thumbnails_no_images(tree: Trees) -> None:
    root = tree(
        "a/1.png", "a/@eaDir/1.png/THUMB.jpg", "b/2.png", "b/deep/.cache/3.png", "__MACOSX/a/._1.png", "@eaDir/2.jpg",
        ".DS_Store", "$RECYCLE.BIN/4.png", "System Volume Information/5.png", "b/Lost+Found/6.png",
    )  # fmt: skip
    found = read_folder(root)
    source = found.samples
    assert source.classes == ("a", "b") and keys_of(source) == ["a/1.png", "b/2.png"] and len(found.others) == 0
    (fault,) = found.faults
    assert (fault.kind, fault.severity, fault.count) == ("system-folder", "note", 6)
    assert fault.text.endswith(": $RECYCLE.BIN, @eaDir, System Volume Information and 3 more")
    assert len(read_folder(root, unlabelled=True).samples) == 2


def test_images_beside_class_folders_are_counted(tree: Trees) -> None:
    root = tree("a/1.png", "b/2.png", "cover.jpg", "notes.txt", ".hidden.png")
    (fault,) = read_folder(root).faults
    assert (fault.kind, fault.severity, fault.count) == ("loose-images", "warning", 1)
    assert fault.text == f"{root}: skipped 1 image outside of the class folders"


def test_a_tolerant_source_leaves_out_what_it_does_not_know(tree: Trees) -> None:
    found = read_folder(tree("a/1.png", "b/1.png", "c/1.png"), ("b", "d"), tolerant=True)
    source = found.samples
    assert keys_of(source) == ["b/1.png"] and source.target(0) == 0
    (fault,) = found.faults
    assert (fault.kind, fault.severity, fault.count) == ("unknown-class", "error", 2)
    assert fault.text.endswith("has unknown classes: a, c; the known classes are: b, d")


@pytest.mark.skipif(os.geteuid() != 0, reason="taking on another user takes root")
def test_a_folder_that_may_not_be_read_is_named(tree: Trees) -> None:
    root = tree("a/1.png", "b/2.png")
    (root / "b").chmod(0o711)
    for parent in (root, *root.parents[:4]):  # pytest's own folders, of which there is one more with several workers
        if parent.owner() == "root" and parent != Path(tempfile.gettempdir()):
            parent.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(DataError, match=r"^folder .*pictures/b cannot be read: Permission denied$"):
            read_folder(root)
        os.seteuid(0)
        root.chmod(0o711)
        os.seteuid(65534)
        with pytest.raises(DataError, match=r"^folder .*pictures cannot be read: Permission denied$"):
            read_folder(root)
    finally:
        os.seteuid(0)


def test_links_are_followed_and_no_folder_is_entered_twice(tree: Trees) -> None:
    root = tree("a/1.png", "a/deep/2.png", "b/3.png")
    (root / "a" / "again").symlink_to(root / "a" / "deep")
    (root / "a" / "deep" / "up").symlink_to(root / "a")
    (root / "b" / "linked.png").symlink_to(root / "a" / "1.png")
    (root / "c").symlink_to(tree("x/4.png", name="elsewhere") / "x")
    source = read_folder(root).samples
    assert keys_of(source) == ["a/1.png", "a/again/2.png", "b/3.png", "b/linked.png", "c/4.png"]
    assert source.classes == ("a", "b", "c")
    check_source(source, decodes=False)


def test_a_link_to_itself_is_skipped_and_one_that_leads_nowhere_is_an_image_that_cannot_be_read(tree: Trees) -> None:
    root = tree("a/1.png", "b/2.png")
    (root / "a" / "loop").symlink_to("loop")
    (root / "a" / "gone.png").symlink_to(root / "nowhere.png")
    found = read_folder(root)
    assert keys_of(found.samples) == ["a/1.png", "a/gone.png", "b/2.png"] and len(found.others) == 1
    with pytest.raises(DataError, match=r"cannot read .*a/gone\.png: No such file"):
        found.samples[1]
