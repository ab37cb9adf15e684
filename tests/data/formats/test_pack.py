"""Tests of packing: no sample is lost, shards have the same bytes in every run, and a stopped command continues."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.make import MemorySource, encode, full_disk, orientation, targets_of
from vitrail.data.formats.pack import FILE, IMAGES, UNFINISHED, pack, packed_before, parse
from vitrail.data.formats.tar import looks_like_shards, open_shards
from vitrail.data.pixels.decode import decode
from vitrail.data.source import Sample, fingerprint
from vitrail.data.sources import open_data
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError, DestinationError, SaveError, Stopped
from vitrail.files import partial_path
from vitrail.testing import check_source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of several formats and sizes in two splits. Some names collide, and some contain dots."""
    random = np.random.default_rng(0)
    formats = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "JPEG": "JPEG"}
    for split, count in (("train", 9), ("val", 3)):
        for name in ("rose", "ox eye.daisy"):
            place = tmp_path / "flowers" / split / name / "é"
            place.mkdir(parents=True)
            for number in range(count):
                suffix = list(formats)[number % len(formats)]
                pixels = random.integers(0, 256, (30 + number * 3, 50 - number, 3), dtype=np.uint8)
                (place / f"{number // 2}.a.{suffix}").write_bytes(encode(pixels, formats[suffix]))
    return tmp_path / "flowers"


def opened(folder: Path) -> Splits:
    return open_data(str(folder), validation_share=0.0)


def samples_of(source: object) -> list[Sample]:
    return [source[index] for index in range(len(source))]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".index"}


def test_what_is_packed_comes_out_again(folder: Path, tmp_path: Path) -> None:
    splits = opened(folder)
    manifest = pack(splits, tmp_path / "out", shard_size=20_000)
    again = open_shards(str(tmp_path / "out"), None)
    assert again.validation is not None and again.test is None
    assert again.classes == splits.classes == ("ox eye.daisy", "rose") and again.notes == ()
    assert samples_of(again.train) == samples_of(splits.train)
    assert samples_of(again.validation) == samples_of(splits.validation)
    assert manifest.packing.fingerprint == fingerprint(again.train, again.validation)
    check_source(again.train)
    assert pack(again, tmp_path / "twice", shard_size=20_000) == manifest
    assert files_of(tmp_path / "twice") == files_of(tmp_path / "out")


def test_shards_are_plain_tars_of_the_size_that_was_asked_for(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = pack(opened(folder), out, shard_size=20_000)
    written = json.loads((out / FILE).read_text())
    assert parse("it", (out / FILE).read_bytes()) == manifest
    assert written["classes"] == ["ox eye.daisy", "rose"] and written["samples"] == {"train": 18, "validation": 6}
    number = 0
    for record in manifest.shards["train"]:
        data = (out / record.name).read_bytes()
        assert len(data) == record.size <= 20_000 and hashlib.sha256(data).hexdigest() == record.sha256
        with tarfile.open(out / record.name) as tar:
            names = tar.getnames()
            assert len(names) == 2 * record.samples
            assert {(one.mtime, one.uid, one.gid, one.mode, one.uname) for one in tar} == {(0, 0, 0, 0o644, "")}
        stems = [name.partition(".")[0] for name in names[::2]]
        assert stems == [f"{number + row:08}" for row in range(record.samples)]
        number += record.samples
    assert number == 18 and manifest.shards["validation"][0].name == "validation-000000.tar"
    assert not list(out.glob("*.partial")) and not (out / UNFINISHED).exists()
    manifest = pack(opened(folder), tmp_path / "small", shard_size=1)
    assert [record.samples for record in manifest.shards["train"]] == [1] * 18, "a larger sample has its own shard"


@pytest.mark.slow
@pytest.mark.parametrize("max_side", [None, 35])
def test_any_number_of_workers_writes_the_same_bytes(folder: Path, tmp_path: Path, max_side: int | None) -> None:
    for workers in (1, 3):
        pack(opened(folder), tmp_path / str(workers), shard_size=9_000, max_side=max_side, workers=workers)
    assert len(files_of(tmp_path / "1")) > 6 and files_of(tmp_path / "1") == files_of(tmp_path / "3")


def test_larger_images_are_scaled_down_and_others_are_copied(folder: Path, tmp_path: Path) -> None:
    splits = opened(folder)
    manifest = pack(splits, tmp_path / "out", max_side=45)
    before, after = samples_of(splits.train), samples_of(open_shards(str(tmp_path / "out"), None).train)
    rescaled = 0
    for old, new in zip(before, after, strict=True):
        assert (old.key, old.target) == (new.key, new.target)
        height, width, _ = decode(old.image, 3).shape
        if max(height, width) <= 45:
            assert new.image == old.image
            continue
        rescaled += 1
        pixels = decode(new.image, 3)
        assert new.image.startswith(b"\xff\xd8") and max(pixels.shape) == 45
        assert abs(pixels.shape[0] / pixels.shape[1] - height / width) < 0.02
    assert 0 < rescaled < len(before) and sum(record.rescaled for record in manifest.shards["train"]) == rescaled
    assert manifest.packing.max_side == 45 and manifest.packing.jpeg_quality == 95


def test_scaled_images_stay_grey_and_turn_upright(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 60 * 100).reshape(60, 100).astype(np.uint8)
    exif = orientation(6)  # a quarter turn clockwise
    images = [encode(ramp, "PNG"), encode(np.dstack([ramp] * 3), "JPEG", exif=exif), ramp[:, :, None]]
    source = MemorySource(images, labels=[0, 1, 2])
    pack(Splits(source, None, None), tmp_path / "out", max_side=20)
    grey, turned, array = (sample.image for sample in samples_of(open_shards(str(tmp_path / "out"), None).train))
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as tar:
        assert tar.getnames()[::2] == ["00000000.jpg", "00000001.jpg", "00000002.png"]
    assert decode(grey, 1).shape == (12, 20, 1) and decode(array, 1).shape == (12, 20, 1)
    assert grey.count(b"\xff\xc0\x00\x0b") == 1  # a frame of one channel
    upright = decode(turned, 3)
    assert upright.shape == (20, 12, 3) and upright[:, -1].mean() < upright[:, 0].mean()


def test_arrays_become_png(idx_folder: Callable[..., Path], tmp_path: Path) -> None:
    splits = opened(idx_folder(train=[0, 1, 2, 1], t10k=[2, 0]))
    pack(splits, tmp_path / "out")
    again = open_shards(str(tmp_path / "out"), None)
    assert splits.test is not None and again.classes == ("0", "1", "2")
    for one, other in ((splits.train, again.train), (splits.test, again.test)):
        for old, new in zip(samples_of(one), samples_of(other), strict=True):
            assert (old.key, old.target) == (new.key, new.target) and new.image.startswith(b"\x89PNG")
            assert np.array_equal(decode(new.image, 1), old.image)


def test_strange_keys_and_labels_come_out_again(tmp_path: Path) -> None:
    image = encode(np.zeros((3, 2, 3), np.uint8), "PNG")
    keys = ["../1.jpg", "/etc/2", "x" * 300, "\udcff.png", "a\nb", "5.tar"]
    labels = [(0, 2), (), (3,), (1,), (0,), (0, 1, 2, 3)]
    source = MemorySource([image] * 6, labels=labels, keys=keys)
    pack(Splits(source, None, None), tmp_path / "out")
    again = open_shards(str(tmp_path / "out"), None).train
    assert [(again.key(index), again.target(index)) for index in range(6)] == list(zip(keys, labels, strict=True))
    unlabelled = MemorySource([image] * 2, labels=[None, None])
    pack(Splits(unlabelled, None, None), tmp_path / "unlabelled")
    assert open_shards(str(tmp_path / "unlabelled"), None).train.target(1) is None


@pytest.mark.parametrize("max_side", [None, 8])
def test_unreadable_images_are_copied_and_named(tmp_path: Path, max_side: int | None) -> None:
    good = encode(np.zeros((9, 12, 3), np.uint8), "JPEG")
    images = [good, b"", b"no image", good[:-60], encode(np.zeros((9, 12, 3), np.uint8), "PNG")]
    source = MemorySource(images, labels=[0, 0, 1, 1, 2], keys=["good", "empty", "\udcffbad", "cut", "png"])
    manifest = pack(Splits(source, None, None), tmp_path / "out", max_side=max_side)
    after = [sample.image for sample in samples_of(open_shards(str(tmp_path / "out"), None).train)]
    assert after[1:4] == images[1:4]
    unreadable = manifest.shards["train"][0].unreadable
    if max_side is None:
        assert unreadable == {} and after == images
    else:
        assert list(unreadable) == ["empty", "\\udcffbad", "cut"]
        assert unreadable["empty"] == "is empty (0 bytes)" and "is not an image" in unreadable["\\udcffbad"]


def test_a_pack_that_was_stopped_goes_on_after_its_whole_shards(folder: Path, tmp_path: Path) -> None:
    pack(opened(folder), tmp_path / "straight", shard_size=9_000)
    out, seen = tmp_path / "out", []
    for limit in (1, 7, 11, 20):
        seen.clear()
        with pytest.raises(Stopped, match=r"stopped: \d+ of 24 images are in complete shards in .*/out") as stopped:
            pack(opened(folder), out, shard_size=9_000, progress=seen.append, stop=lambda most=limit: seen[-1] >= most)
        assert stopped.value.run == out and not list(out.glob("*.partial"))
    kept = packed_before(parse("it", (out / UNFINISHED).read_bytes()))
    assert 11 <= kept <= 20 and seen[0] <= 12 and seen[-1] == 20
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    with pytest.raises(DataError, match=rf"is not packed completely; .* vitrail data pack SPEC {out}"):
        open_shards(str(out), None)
    assert looks_like_shards(str(out))
    pack(opened(folder), out, shard_size=9_000, progress=seen.append)
    assert files_of(out) == files_of(tmp_path / "straight") and seen[-1] == 24
    assert all((out / name).stat().st_mtime_ns == changed for name, changed in times.items())


def test_a_pack_does_not_go_on_with_images_that_changed(folder: Path, tmp_path: Path) -> None:
    out, seen = tmp_path / "out", []
    with pytest.raises(Stopped):
        pack(opened(folder), out, shard_size=9_000, progress=seen.append, stop=lambda: len(seen) == 9)
    image = folder / "train/ox eye.daisy/é/0.a.jpg"
    image.write_bytes(image.read_bytes() + b"!")
    with pytest.raises(ConfigError, match="shards of images that have changed since"):
        pack(opened(folder), out, shard_size=9_000)
    for path in out.iterdir():
        path.unlink()
    pack(opened(folder), out, shard_size=9_000)
    assert not (out / IMAGES).exists()


def test_a_pack_goes_on_after_an_image_was_mended_that_is_in_no_shard_yet(folder: Path, tmp_path: Path) -> None:
    out, broken = tmp_path / "out", sorted((folder / "train" / "rose").rglob("*.jpg"))[-1]
    content, splits = broken.read_bytes(), opened(folder)
    broken.unlink()
    with pytest.raises(DataError, match="cannot read"):
        pack(splits, out, shard_size=9_000)
    assert not list(out.glob("*.partial"))
    broken.write_bytes(content)
    pack(opened(folder), out, shard_size=9_000)
    pack(opened(folder), tmp_path / "straight", shard_size=9_000)
    assert files_of(out) == files_of(tmp_path / "straight")


def test_the_description_of_finished_shards_stays_until_it_is_written_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(opened(folder), tmp_path / "out", shard_size=9_000)

    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(SaveError, match="No space left"):
        patched.setattr("vitrail.data.formats.pack.write_json", full)
        pack(opened(folder), tmp_path / "out", shard_size=9_000)
    assert (tmp_path / "out" / "dataset.json").is_file()


def test_what_is_done_is_not_done_again(folder: Path, tmp_path: Path) -> None:
    first = pack(opened(folder), tmp_path / "out", shard_size=9_000)
    expected, seen = files_of(tmp_path / "out"), []
    assert pack(opened(folder), tmp_path / "out", shard_size=9_000, progress=seen.append) == first and seen == []
    spoilt = tmp_path / "out" / first.shards["train"][1].name
    for spoil in (spoilt.unlink, lambda: os.truncate(spoilt, 1024)):
        spoil()
        assert pack(opened(folder), tmp_path / "out", shard_size=9_000) == first
        assert files_of(tmp_path / "out") == expected


SCRIPT = """
import sys, time
from pathlib import Path
from vitrail.data.formats.pack import pack
from vitrail.data.sources import open_data
pack(open_data(sys.argv[1], validation_share=0.0), Path(sys.argv[2]), shard_size=9_000, workers=2,
     progress=lambda done: (print(done, flush=True), time.sleep(0.02)))
"""


@pytest.mark.slow
def test_a_pack_that_was_killed_goes_on_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    pack(opened(folder), tmp_path / "straight", shard_size=9_000)
    out = tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder), str(out)], stdout=subprocess.PIPE, text=True)
    while int(child.stdout.readline()) < 8:
        pass
    child.kill()
    child.communicate()
    assert child.returncode == -signal.SIGKILL and (out / UNFINISHED).is_file() and not (out / FILE).exists()
    assert list(out.glob("*.tar")) and list(out.glob("*.partial"))
    pack(opened(folder), out, shard_size=9_000)
    assert files_of(out) == files_of(tmp_path / "straight")


def test_a_pack_that_was_killed_while_it_began_goes_on(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    partial_path(out / UNFINISHED).write_text("{")
    pack(opened(folder), out)
    pack(opened(folder), tmp_path / "straight")
    assert files_of(out) == files_of(tmp_path / "straight")


def test_a_second_pack_into_the_same_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    def again(done: int) -> None:
        with pytest.raises(DestinationError, match="shards is being written by another process"):
            pack(opened(folder), tmp_path / "shards", shard_size=8192)

    pack(opened(folder), tmp_path / "shards", shard_size=8192, progress=again)
    pack(opened(folder), tmp_path / "alone", shard_size=8192)
    assert files_of(tmp_path / "shards") == files_of(tmp_path / "alone")


def test_other_folders_are_left_alone(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not empty and has no shards to continue; choose another folder"):
        pack(opened(folder), folder)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file; shards are written to a folder"):
        pack(opened(folder), tmp_path / "file")
    out = tmp_path / "out"
    pack(opened(folder), out, shard_size=9_000)
    before = files_of(out)
    for options, message in (
        ({"shard_size": 8_000}, "its shard_size is 9000, not 8000"),
        ({"shard_size": 9_000, "max_side": 40}, "its max_side is None, not 40"),
    ):
        with pytest.raises(ConfigError, match=f"has shards of other data or with other options: {message}; choose"):
            pack(opened(folder), out, **options)
    (folder / "train/rose/é/0.a.jpg").rename(folder / "train/rose/é/new.jpg")
    with pytest.raises(ConfigError, match="its keys or labels differ"):
        pack(opened(folder), out, shard_size=9_000)
    (folder / "train/rose/é/new.jpg").unlink()
    with pytest.raises(ConfigError, match="its number of samples is"):
        pack(opened(folder), out, shard_size=9_000)
    assert files_of(out) == before


@pytest.mark.parametrize("options", [{"shard_size": 0}, {"max_side": 0}, {"workers": 0}])
def test_options_out_of_range(folder: Path, tmp_path: Path, options: dict[str, int]) -> None:
    name = next(iter(options))
    with pytest.raises(ConfigError, match=f"{name}=0 is less than 1"):
        pack(opened(folder), tmp_path / "out", **options)


def test_a_full_disk_is_an_error_after_which_it_goes_on(folder: Path, tmp_path: Path) -> None:
    pack(opened(folder), tmp_path / "straight", shard_size=40_000)
    out = tmp_path / "out"
    with full_disk(10_000), pytest.raises(SaveError, match=r"save a shard to .*/train-000000\.tar: File too large"):
        pack(opened(folder), out, shard_size=40_000)
    assert {path.name for path in out.iterdir()} == {UNFINISHED, IMAGES}
    pack(opened(folder), out, shard_size=40_000)
    assert files_of(out) == files_of(tmp_path / "straight")


def test_a_shard_of_another_size_than_was_written_is_noticed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = pack(opened(folder), out, shard_size=9_000)
    name = manifest.shards["train"][1].name
    with (out / name).open("ab") as file:
        file.write(bytes(512))
    with pytest.raises(DataError, match=rf"{name} has [\d,]+ bytes, but the dataset\.json beside it states"):
        open_shards(str(out), None)
    (out / name).unlink()
    with pytest.raises(DataError, match=rf"shard .*{name} does not exist"):
        open_shards(str(out), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "vitrail shards 2"}, "has the format 'vitrail shards 2', but this version of Vitrail reads"),
        ({"classes": 3}, "is not a description of packed shards"),
        ({"shards": {"traning": []}}, "has invalid names of splits or shards: traning"),
        ({"shards": {}}, "has no training split"),
    ],
)
def test_a_description_that_cannot_be(folder: Path, tmp_path: Path, change: dict[str, object], message: str) -> None:
    out = tmp_path / "out"
    pack(opened(folder), out)
    (out / FILE).write_text(json.dumps({**json.loads((out / FILE).read_text()), **change}))
    with pytest.raises(DataError, match=message):
        open_shards(str(out), None)
    (out / FILE).write_text("{")
    with pytest.raises(DataError, match=r"dataset\.json is not a description of packed shards"):
        open_shards(str(out), None)


def test_numbers_come_out_again(tmp_path: Path) -> None:
    image = encode(np.zeros((3, 2, 3), np.uint8), "PNG")
    labels = [(0.1, 2.0), None, (float("nan"), -1e300), (0.1, 2.0)]
    source = MemorySource([image] * 4, labels=labels, classes=("age", "size"))
    pack(Splits(source, None, None), tmp_path / "out", shard_size=2_048)
    for _ in range(2):  # scanned, and then by the index
        again = open_data(str(tmp_path / "out"), validation_share=0.0)
        assert again.classes == ("age", "size") and again.target_kind == "numbers"
        assert [str(again.train.target(index)) for index in range(4)] == list(map(str, labels))
    size = open_data(str(tmp_path / "out"), validation_share=0.0, numbers=("size",))
    assert targets_of(size.train) == [(2.0,), None, (-1e300,), (2.0,)]
    with pytest.raises(DataError, match=r"out' has no column 'sizes' of numbers; nearest: size"):
        open_data(str(tmp_path / "out"), validation_share=0.0, numbers=("sizes",))
    classes = MemorySource([image] * 4, labels=[0, 1, 0, 1])
    pack(Splits(classes, None, None), tmp_path / "classes")
    with pytest.raises(DataError, match=r"has no numbers in its shards, but numbers=age asks for some"):
        open_data(str(tmp_path / "classes"), validation_share=0.0, numbers=("age",))
