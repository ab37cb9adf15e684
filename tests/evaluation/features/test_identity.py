"""Tests of the cache of features: fingerprints of weights and of all kinds of data, folders, and similar entries."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from tests.make import MemorySource, idx_bytes
from vitrail.data.formats.fractals import FractalSource
from vitrail.data.formats.idx import idx_samples
from vitrail.data.formats.pack import pack
from vitrail.data.source import Sample, Source, mixed, subset
from vitrail.data.sources import open_data
from vitrail.evaluation.features.cache import (
    SAMPLED,
    data_fingerprint,
    weights_fingerprint,
)
from vitrail.models.variants import create


def rewrite(path: Path, *, keep_time: bool = True) -> None:
    """Overwrite a file with other bytes of the same length. With `keep_time` the modification time stays the same."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + (0 if keep_time else 1000)))


def train_of(spec: Path | str) -> Source:
    return open_data(str(spec), validation_share=0.0).train


def test_a_file_of_a_folder_that_changes_is_seen_whatever_its_size_and_time(colour_folder: Path) -> None:
    before = data_fingerprint(train_of(colour_folder))
    assert data_fingerprint(train_of(colour_folder)) == before
    rewrite(colour_folder / "green" / "07.png")
    changed = data_fingerprint(train_of(colour_folder))
    (colour_folder / "green" / "07.png").unlink()
    source = train_of(colour_folder)
    gone = data_fingerprint(source)
    assert len({before, changed, gone}) == 3
    (colour_folder / "blue" / "00.png").unlink()  # after it was listed: an image lost, not an error
    assert data_fingerprint(source) not in (before, changed, gone)


def test_a_copy_of_a_folder_is_another(colour_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(colour_folder, tmp_path / "copy")
    assert data_fingerprint(train_of(tmp_path / "copy")) != data_fingerprint(train_of(colour_folder))


def test_a_file_of_a_table_that_changes_is_seen(colour_folder: Path) -> None:
    (colour_folder / "table.csv").write_text("path,label\nblue/00.png,x\ngreen/00.png,y\n")
    before = data_fingerprint(train_of(colour_folder / "table.csv"))
    rewrite(colour_folder / "red" / "00.png")
    assert data_fingerprint(train_of(colour_folder / "table.csv")) == before
    rewrite(colour_folder / "green" / "00.png")
    assert data_fingerprint(train_of(colour_folder / "table.csv")) != before


def test_a_shard_that_changes_is_seen(colour_folder: Path, tmp_path: Path) -> None:
    pack(open_data(str(colour_folder), validation_share=0.0), tmp_path / "shards")
    before = data_fingerprint(train_of(tmp_path / "shards"))
    assert data_fingerprint(train_of(tmp_path / "shards")) == before
    (shard,) = (tmp_path / "shards").glob("*.tar")
    rewrite(shard, keep_time=False)
    assert data_fingerprint(train_of(tmp_path / "shards")) != before


def test_a_parquet_file_that_changes_is_seen(colour_folder: Path, tmp_path: Path) -> None:
    def write(name: str) -> None:
        images = [{"bytes": path.read_bytes(), "path": None} for path in sorted((colour_folder / name).iterdir())]
        table = pyarrow.table({"image": images, "label": [index % 2 for index in range(12)]})
        pyarrow.parquet.write_table(table, tmp_path / "images.parquet")

    write("blue")
    before = data_fingerprint(train_of(tmp_path / "images.parquet"))
    assert data_fingerprint(train_of(tmp_path / "images.parquet")) == before
    write("red")
    assert data_fingerprint(train_of(tmp_path / "images.parquet")) != before


def test_pixels_of_idx_files_are_hashed(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 4, 5), dtype=np.uint8)
    (tmp_path / "labels").write_bytes(idx_bytes(np.arange(9, dtype=np.uint8) % 3))

    def of(array: np.ndarray) -> str:
        (tmp_path / "images").write_bytes(idx_bytes(array))
        return data_fingerprint(idx_samples(tmp_path / "images", tmp_path / "labels"))

    before = of(pixels)
    assert of(pixels) == before
    pixels[5, 2, 3] ^= 1
    assert of(pixels) != before


def test_fractals_are_told_apart_by_what_they_follow_from() -> None:
    def of(*numbers: int) -> str:
        return data_fingerprint(FractalSource(*numbers, size=16))

    assert of(2, 100_000_000) == of(2, 100_000_000) != of(2, 100_000_000, 1)
    parts = {data_fingerprint(subset(FractalSource(2, 8, seed, size=16), [1, 2])) for seed in (0, 0, 1)}
    assert len(parts) == 2


def test_of_a_subset_or_a_mixture_its_own_files_count(colour_folder: Path) -> None:
    def of(make: Callable[[Source], Source]) -> str:
        return data_fingerprint(make(train_of(colour_folder)))

    def part(source: Source) -> Source:
        return subset(source, [3, 30])

    def mixture(source: Source) -> Source:
        return mixed([subset(source, [3]), subset(source, [30])], [0.5, 0.5])

    for make in (part, mixture):
        before = of(make)
        rewrite(colour_folder / "green" / "00.png")
        assert of(make) == before
        rewrite(colour_folder / "red" / "06.png")  # the 31st
        assert of(make) != before


class Noted(MemorySource):
    """A source that cannot detect a changed image, and notes which images are read."""

    def __init__(self, images: list[bytes | np.ndarray]) -> None:
        super().__init__(images, labels=[0] * len(images))
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Sample:
        self.read.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", ["bytes", "arrays"])
def test_of_a_source_that_cannot_say_some_images_are_hashed(kind: str) -> None:
    def make(changed: int | None) -> Noted:
        arrays = [np.full((2, 3, 1), index == changed, np.uint8) for index in range(100)]
        return Noted([array.tobytes() for array in arrays] if kind == "bytes" else arrays)

    source = make(None)
    before = data_fingerprint(source)
    assert len(source.read) == SAMPLED and {0, 99} <= set(source.read)
    for changed in range(100):
        assert (data_fingerprint(make(changed)) != before) == (changed in source.read)
    few = Noted([b"1", b"2", b"3"])
    data_fingerprint(few)
    assert few.read == [0, 1, 2] and data_fingerprint(Noted([])) != before
    mixtures = [mixed([FractalSource(2, 4, size=8), one], [0.5, 0.5]) for one in (source, make(99))]
    assert data_fingerprint(mixtures[0]) != data_fingerprint(mixtures[1])


def test_weights_are_told_apart_to_the_last_bit() -> None:
    def make(**fields: object) -> torch.nn.Module:
        torch.manual_seed(0)
        sizes = {"image_size": (14, 21), "width": 16, "depth": 2, "heads": 2, "mlp_width": 32}
        return create("ViT-Pico/7", **{**sizes, **fields})

    network = make()
    before = weights_fingerprint(network)
    assert before == weights_fingerprint(make().eval()) == weights_fingerprint(network)
    for other in (make(norm_eps=1e-5), make(pool="gap"), make(num_classes=4), make().double(), make().bfloat16()):
        assert weights_fingerprint(other) != before
    for two, others in (({"a": 0.0, "b": 1.0}, {"b": 0.0, "a": 1.0}), ({"a": [0.0, 1.0]}, {"a": [[0.0], [1.0]]})):
        one, other = (
            torch.nn.ParameterDict({name: torch.tensor(value) for name, value in values.items()})
            for values in (two, others)
        )
        assert weights_fingerprint(one) != weights_fingerprint(other)
    with torch.no_grad():
        bias = network.state_dict()["blocks.0.attention.out.bias"]
        bias[2] = torch.nextafter(bias[2], torch.tensor(1.0))
    assert weights_fingerprint(network) != before
