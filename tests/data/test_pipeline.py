"""Tests of the pipeline: order, epochs, resuming, samples that cannot be decoded, and batches."""

from __future__ import annotations

import errno
import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.make import MemorySource, encode
from vitrail.data import pipeline
from vitrail.data.augment.draws import torchvision_crop
from vitrail.data.batch import Batch, LocalViews, Rows
from vitrail.data.formats.folder import read_folder
from vitrail.data.pipeline import Readers, Stage, TrainingBatches, evaluation_batches, skips_allowed
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Files, Samples, Source, mixed
from vitrail.data.targets import Targets
from vitrail.errors import ConfigError, DataError, ProcessError
from vitrail.processes.launch import Launch

FIELDS = ("images", "labels", "valid", "samples", "epochs", "views")
SMALL = Preprocess(image_size=(2, 3), channels=1)


def numbered(count: int) -> Source:
    """Return a source of images that are filled with their own number, with the classes 0 to 3 in turn."""
    images = [np.full((2, 3, 1), index, np.uint8) for index in range(count)]
    return MemorySource(images, labels=[index % 4 for index in range(count)])


def training(
    source: Source, preprocess: Preprocess = SMALL, *, batch_size: int = 4, seed: int = 0, threads: int = 0,
    local: LocalViews | None = None, later: tuple[Stage, ...] = (), ranks: Launch = Launch(), keep: bool = False,
    **rows: Any,
) -> TrainingBatches:  # fmt: skip
    stages = (Stage(preprocess, batch_size, local=local), *later)
    readers = Readers(threads)
    return TrainingBatches(source, stages, seed=seed, readers=readers, ranks=ranks, rows=Rows(**rows), keep=keep)


def samples_of(batches: Iterator[Batch], count: int) -> list[int]:
    """Return the next `count` samples, from whole batches."""
    found: list[int] = []
    while len(found) < count:
        found += next(batches).samples.tolist()
    return found[:count]


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in FIELDS)
        assert one.skipped == other.skipped


@pytest.mark.slow
@settings(max_examples=8)
@given(count=st.integers(1, 25), batch_size=st.integers(1, 30), seed=st.integers(0, 2**32 - 1))
def test_every_epoch_is_a_permutation_and_the_same_for_any_batch_size(count: int, batch_size: int, seed: int) -> None:
    found = samples_of(training(numbered(count), batch_size=batch_size, seed=seed), 60)
    assert found == samples_of(training(numbered(count), batch_size=5, seed=seed), 60)
    for begin in range(0, 60 // count * count, count):
        assert sorted(found[begin : begin + count]) == list(range(count))


@pytest.mark.slow
def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    source = numbered(16)
    batches = [batch for seed in range(4) for batch in islice(training(source, batch_size=16, seed=seed), 4)]
    orders = {tuple(batch.samples.tolist()) for batch in batches}
    assert len(orders) == 16
    assert tuple(range(16)) not in orders


@pytest.mark.slow
def test_orders_are_mixed_well() -> None:
    orders = np.array([batch.samples.tolist() for batch in islice(training(numbered(20), batch_size=20), 40)])
    assert np.abs(orders.mean(0) - 9.5).max() < 4.5 * np.sqrt((20**2 - 1) / 12 / 40)
    follows = (np.diff(orders, axis=1) == 1).mean()
    assert abs(follows - 1 / 20) < 0.04


@pytest.mark.parametrize(("count", "batch_size"), [(10, 4), (3, 8), (5, 5)])
def test_epochs_are_right_where_a_batch_straddles_their_end(count: int, batch_size: int) -> None:
    batches = list(islice(training(numbered(count), batch_size=batch_size), 6))
    epochs, samples = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("epochs", "samples"))
    assert torch.equal(epochs, torch.arange(6 * batch_size) // count)
    assert sorted(samples[:count].tolist()) == sorted(samples[count : 2 * count].tolist()) == list(range(count))


@pytest.mark.parametrize("threads", [0, 2])
def test_every_part_of_a_batch_belongs_to_its_sample(threads: int) -> None:
    batch = next(training(numbered(30), batch_size=16, threads=threads))
    assert len(batch) == 16 and batch.images.dtype == torch.uint8 and batch.images.shape == (16, 1, 2, 3)
    assert torch.equal(batch.images, batch.samples.to(torch.uint8)[:, None, None, None].expand(-1, 1, 2, 3))
    assert torch.equal(batch.labels, batch.samples % 4)
    assert batch.valid.all() and batch.skipped == ()


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "later", "taken"), [(0, 0, 0), (0, 2, 3), (2, 2, 5), (2, 1, 11), (8, 0, 3)])
def test_resuming_goes_on_after_the_batch_with_any_number_of_threads(threads: int, later: int, taken: int) -> None:
    """With 20 samples in batches of 4, an epoch has exactly five batches."""
    source = numbered(20)
    whole = training(source, threads=threads)
    list(islice(whole, taken))
    state = json.loads(json.dumps(whole.state()))
    expected = list(islice(training(source), taken + 7))[taken:]
    for _ in range(3):
        assert_same(list(islice(whole, 7)), expected)
        whole.restore(state)
    resumed = training(source, threads=later)
    resumed.restore(state)
    assert_same(list(islice(resumed, 3)), expected[:3])
    again = training(source, threads=threads)
    again.restore(json.loads(json.dumps(resumed.state())))
    assert_same(list(islice(again, 4)), expected[3:])


@pytest.mark.slow
@pytest.mark.parametrize("threads", [0, 2])
def test_a_sample_that_cannot_be_decoded_keeps_its_place(threads: int) -> None:
    white = encode(np.full((5, 5), 255, np.uint8), "PNG")
    images = [white, b"", white, b"<html>", white, white[: len(white) // 2]]
    broken = MemorySource(images, labels=[0, 1, 2, 3, 0, 1], keys=[f"{name}.png" for name in "abcdef"])
    whole = MemorySource([white] * 6, labels=broken.labels, keys=broken.keys)
    for batch, expected in zip(islice(training(broken, threads=threads), 6), training(whole), strict=False):
        assert torch.equal(batch.samples, expected.samples) and torch.equal(batch.labels, expected.labels)
        assert torch.equal(batch.epochs, expected.epochs)
        assert batch.valid.tolist() == [sample in (0, 2, 4) for sample in batch.samples.tolist()]
        assert (batch.images[batch.valid] == 255).all() and (batch.images[~batch.valid] == 0).all()
        assert [skipped.key for skipped in batch.skipped] == [broken.keys[i] for i in batch.samples[~batch.valid]]
    reasons = {s.key: s.reason for batch in evaluation_batches(broken, SMALL, batch_size=4) for s in batch.skipped}
    assert reasons.keys() == {"b.png", "d.png", "f.png"}
    assert reasons["b.png"] == "is empty (0 bytes)" and reasons["d.png"].startswith("is not an image in a format of")


@pytest.mark.parametrize("threads", [0, 2])
def test_a_file_that_went_away_is_skipped(tmp_path: Path, threads: int) -> None:
    for name in ("a/1.png", "a/2.png", "b/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (9, 5), "white").save(tmp_path / name)
    source = read_folder(tmp_path).samples
    (tmp_path / "a" / "2.png").unlink()
    (batch,) = evaluation_batches(source, SMALL, batch_size=3, readers=Readers(threads))
    assert batch.valid.tolist() == [True, False, True] and batch.labels.tolist() == [0, 0, 1]
    (skipped,) = batch.skipped
    assert skipped.key == "a/2.png" and skipped.reason.endswith("a/2.png: No such file or directory")


@pytest.mark.parametrize("threads", [0, 2])
def test_other_errors_of_a_source_are_not_swallowed(threads: int) -> None:
    class Unreadable(MemorySource):
        def __getitem__(self, index: int) -> None:
            raise DataError(f"cannot read sample {index}")

    with pytest.raises(DataError, match="cannot read sample"):
        next(training(Unreadable(labels=[0, 1]), threads=threads))


@pytest.mark.parametrize(
    ("threads", "count", "sizes"), [(0, 10, [4, 4, 2]), (1, 8, [4, 4]), (2, 3, [3]), (8, 10, [4, 4, 2]), (None, 1, [1])]
)
def test_evaluation_sees_every_sample_once_in_order(threads: int | None, count: int, sizes: list[int]) -> None:
    batches = list(evaluation_batches(numbered(count), SMALL, batch_size=4, readers=Readers(threads)))
    assert [len(batch) for batch in batches] == sizes
    assert torch.cat([batch.samples for batch in batches]).tolist() == list(range(count))
    assert torch.cat([batch.images[:, 0, 0, 0] for batch in batches]).tolist() == list(range(count))
    assert not torch.cat([batch.epochs for batch in batches]).any()


def test_a_batch_moves_to_a_device_whole() -> None:
    source = MemorySource([b"", np.ones((2, 3, 1), np.uint8)], labels=[(1,), (0,)])
    (batch,) = evaluation_batches(source, SMALL, batch_size=2, readers=Readers(0))
    moved = batch.to(torch.device("meta"))
    kept = ("samples", "epochs", "views")
    devices = {name: getattr(moved, name).device.type for name in FIELDS}
    assert devices == {name: "cpu" if name in kept else "meta" for name in FIELDS}
    assert all(getattr(moved, name).shape == getattr(batch, name).shape for name in FIELDS)
    assert moved.targets.device.type == "meta" and moved.skipped == batch.skipped and len(moved.skipped) == 1
    assert batch.images.device.type == "cpu"


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (16, 16), (64, 16), (None, 1)])
def test_threads_are_one_a_core_up_to_16(monkeypatch: pytest.MonkeyPatch, cores: int | None, threads: int) -> None:
    monkeypatch.setattr(pipeline.os, "cpu_count", lambda: cores)
    assert pipeline.default_threads() == threads


@pytest.mark.slow
@pytest.mark.parametrize(("world", "threads"), [(1, 0), (2, 2), (4, 0)])
def test_ranks_together_see_what_one_sees(world: int, threads: int) -> None:
    source = numbered(23)
    whole = list(islice(training(source, batch_size=8), 9))
    ranks = [training(source, batch_size=8, threads=threads, ranks=Launch(rank, world)) for rank in range(world)]
    for expected in whole:
        parts = [next(rank) for rank in ranks]
        assert [len(part) for part in parts] == [8 // world] * world
        found = torch.cat([torch.stack([part.epochs, part.samples]) for part in parts], dim=1)
        assert torch.equal(found, torch.stack([expected.epochs, expected.samples]))


def test_resuming_may_change_the_number_of_ranks() -> None:
    source = numbered(10)
    whole = training(source, batch_size=4)
    list(islice(whole, 7))
    state = whole.state()
    ranks = [training(source, batch_size=4, ranks=Launch(rank, 2)) for rank in range(2)]
    for rank in ranks:
        rank.restore(state)
    found = torch.cat([next(rank).samples for rank in ranks])
    assert sorted(found.tolist()) == sorted(next(whole).samples.tolist())


def test_ranks_must_divide_the_batch_and_a_sample_has_a_view() -> None:
    with pytest.raises(ConfigError, match=r"batch_size=10 is not a multiple of the number of processes \(4\)"):
        training(numbered(5), batch_size=10, ranks=Launch(0, 4))
    with pytest.raises(ConfigError, match=r"views=0 is less than 1"):
        training(numbered(5), views=0)


@given(count=st.integers(1, 30), world=st.integers(1, 5), batch_size=st.integers(1, 7))
@settings(max_examples=12)
def test_evaluation_reads_every_sample_once_on_any_number_of_ranks(count: int, world: int, batch_size: int) -> None:
    options: dict[str, Any] = {"batch_size": batch_size, "readers": Readers(0)}
    found: list[int] = []
    for rank in range(world):
        for batch in evaluation_batches(numbered(count), SMALL, **options, ranks=Launch(rank, world)):
            found += batch.samples.tolist()
    assert sorted(found) == list(range(count))


@pytest.mark.slow
def test_a_mixture_is_drawn_in_its_shares_each_part_in_epochs_of_its_own() -> None:
    both = mixed([numbered(10), numbered(100)], [0.75, 0.25])
    batches = training(both, batch_size=40)
    found = [*islice(batches, 5)]
    samples, epochs = torch.cat([one.samples for one in found]), torch.cat([one.epochs for one in found])
    first = samples < 10
    assert int(first.sum()) == 150 and sorted(set(epochs[first].tolist())) == list(range(15))
    for epoch in range(15):
        assert sorted(samples[first & (epochs == epoch)].tolist()) == list(range(10))
    assert set(epochs[~first].tolist()) == {0} and len(set(samples[~first].tolist())) == 50
    resumed = training(both, batch_size=40)
    resumed.restore({"batches": 4})
    assert torch.equal(next(resumed).samples, samples[160:])


NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "classes", "known", "labels", "targets", "counted"),
    [
        ("class", "abcd", [1, None, 0, 2], [1, -1, 0, 2], None, [True, False, True, False]),
        ("classes", "abcd", [(0, 2), (), (3,), (1,)], [-1] * 4,
         [[1, 0, 1, 0], [0] * 4, [0, 0, 0, 1], [0, 1, 0, 0]], [True, True, True, False]),
        ("numbers", ("age", "size"), [None, (1.5, -2.0), (NAN, 4.0), (7.0, 1e-3)], [-1] * 4,
         [[NAN] * 2, [1.5, -2.0], [NAN, 4.0], [7.0, 1e-3]], [False, True, True, False]),
        ("none", (), [None] * 4, [-1] * 4, None, [False] * 4),
    ],
)  # fmt: skip
def test_what_has_no_image_or_no_target_does_not_count(
    kind: str, classes: Sequence[str], known: list[Any], labels: list[int], targets: Any, counted: list[bool]
) -> None:
    images = [*[np.zeros((2, 3, 1), np.uint8)] * 3, b""]
    source = MemorySource(images, labels=known, classes=tuple(classes))
    (batch,) = evaluation_batches(source, SMALL, batch_size=5, readers=Readers(0))
    assert batch.target_kind == kind == next(training(source)).target_kind
    assert batch.labels.tolist() == labels and batch.labels.dtype == torch.int64
    assert batch.valid.tolist() == [True, True, True, False] and batch.counted.tolist() == counted
    assert (batch.targets is None) == (targets is None)
    for part, rows in zip(batch.chunks(2), (slice(2), slice(2, 4)), strict=True):
        assert part.target_kind == kind and part.counted.tolist() == counted[rows]
        if targets is not None:
            np.testing.assert_array_equal(part.targets, np.array(targets[rows], np.float32))


def test_fractions_of_levels_are_kept_for_evaluation_only() -> None:
    """Augmentation needs whole levels. A sample that cannot be decoded is black in either case."""
    images = [np.random.default_rng(n).integers(0, 256, (9, 8, 3)).astype(np.uint8) for n in range(3)]
    source = MemorySource([*images, b"broken"], labels=[0, 1, 0, 1])
    preprocess = Preprocess(image_size=(5, 7)).with_geometry("vision_transformer")
    (measured,) = evaluation_batches(source, preprocess, batch_size=4, readers=Readers(0))
    assert measured.images.dtype == torch.float32 and not measured.images[3].any()
    for image, expected in zip(measured.images.numpy(), images, strict=False):
        assert np.array_equal(image, preprocess.pixels(expected))
    trained = next(training(source, preprocess))
    assert trained.images.dtype == torch.uint8
    assert torch.equal(trained.images[trained.samples.argsort()], measured.images.round().to(torch.uint8))


def all_processes_end() -> bool:
    """Return True if the processes of this one end on their own. On a busy machine that takes a while."""
    for process in multiprocessing.active_children():
        process.join(60)
    return not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "free"), [(1, 0), (2, 1 << 40)])
def test_processes_have_no_say_in_the_order_with_and_without_shared_memory(
    processes: int, free: int, colour_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not influence resuming either, and they end with the iterator."""
    monkeypatch.setattr(pipeline.os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))
    source, preprocess = read_folder(colour_folder).samples, Preprocess(image_size=(5, 7))

    def start(readers: Readers) -> TrainingBatches:
        return TrainingBatches(source, [Stage(preprocess, 7)], seed=3, readers=readers)

    expected = list(islice(start(Readers(0)), 8))
    batches = start(Readers(1, processes))
    assert_same(list(islice(batches, 3)), expected[:3])
    state = batches.state()
    batches.close()
    assert all_processes_end()
    other = start(Readers(2))
    other.restore(state)
    assert_same(list(islice(other, 5)), expected[3:])
    other.close()
    measured = list(evaluation_batches(source, preprocess, batch_size=7, readers=Readers(1, 1)))
    assert_same(measured, list(evaluation_batches(source, preprocess, batch_size=7, readers=Readers(0))))
    assert all_processes_end()


@pytest.mark.parametrize(
    ("images", "share", "allowed"),
    [(9, 0.01, 0), (20, 0.01, 2), (29, 0.01, 2), (30, 0.01, 3), (300, 0.01, 3), (1000, 0.01, 10), (1000, 0.0, 0),
     (7, 1.0, 7)],
)  # fmt: skip
def test_a_few_broken_images_are_borne_in_small_folders(images: int, share: float, allowed: int) -> None:
    assert skips_allowed(images, share) == allowed


def varied(count: int = 5) -> Source:
    """Colour images of odd sizes, one of which cannot be decoded."""
    random = np.random.default_rng(1)
    images = [random.integers(0, 256, (9 + number, 14 - number, 3), dtype=np.uint8) for number in range(count)]
    return MemorySource([*images[:-1], b""], labels=[(number % 3,) for number in range(count)])


def assert_cut(batch: Batch, source: Source, preprocess: Preprocess, area: tuple[float, float]) -> None:
    """Assert that each row shows the box of its sample, epoch and view, or is black if its image cannot be decoded."""
    keys = zip(batch.epochs.tolist(), batch.samples.tolist(), batch.views.tolist(), strict=True)
    for row, (epoch, place, view) in enumerate(keys):
        image, expected = source[place].image, np.zeros((3, *preprocess.image_size), np.uint8)
        if batch.valid[row]:
            box = torchvision_crop(3, epoch, place, *image.shape[:2], area=area, view=view)
            expected = preprocess.pixels(image, box)
        assert np.array_equal(batch.images[row].numpy(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("scaled_decode", [False, True])
def test_views_of_a_sample_are_rows_side_by_side(scaled_decode: bool) -> None:
    source, preprocess = varied(), Preprocess(image_size=(5, 7), scaled_decode=scaled_decode)

    def batches(views: int) -> TrainingBatches:
        crop = functools.partial(torchvision_crop, 3, area=(0.1, 0.9))
        return training(source, preprocess, seed=3, crop=crop, views=views)

    for one, three in zip(islice(batches(1), 5), islice(batches(3), 5), strict=True):
        assert len(three) == 12 and three.views_per_sample == 3 and one.views_per_sample == 1
        assert three.views.tolist() == [0, 1, 2] * 4 and one.views.tolist() == [0] * 4
        for name in FIELDS:
            assert torch.equal(getattr(three, name)[::3], getattr(one, name)), f"view 0 has other {name}"
        assert torch.equal(three.targets, one.targets.repeat_interleave(3, 0))
        assert three.skipped == one.skipped, "a sample is skipped once"
        readable = three.valid[::3]
        assert not (three.images[0::3] == three.images[1::3]).flatten(1).all(1)[readable].any()
        assert_cut(three, source, preprocess, (0.1, 0.9))


def test_views_without_a_box_are_equal_until_they_are_augmented() -> None:
    batch = next(training(varied(), Preprocess(image_size=(5, 7)), batch_size=3, views=2))
    assert torch.equal(batch.images[::2], batch.images[1::2])


@given(size=st.integers(1, 20), views=st.integers(1, 4), count=st.integers(1, 25))
def test_chunks_are_nearly_equal_parts_in_order_with_all_views_of_samples(size: int, views: int, count: int) -> None:
    rows = torch.arange(size * views)
    batch = Batch(rows[:, None, None, None], rows, rows % 3 > 0, rows // views, rows * 7, rows % views)
    chunks = batch.chunks(count)
    parts = rows[:size].tensor_split(min(count, size))
    assert [len(chunk) // views for chunk in chunks] == [*map(len, parts)]
    assert all(chunk.views_per_sample == views and chunk.views[0] == 0 for chunk in chunks)
    for name in FIELDS:
        assert torch.equal(torch.cat([getattr(chunk, name) for chunk in chunks]), getattr(batch, name))


@pytest.mark.slow
@pytest.mark.parametrize("scaled_decode", [False, True])
@pytest.mark.parametrize("is_cropped", [False, True])
def test_local_views_have_boxes_and_a_size_of_their_own(scaled_decode: bool, is_cropped: bool) -> None:
    source, preprocess = varied(), Preprocess(image_size=(5, 7), scaled_decode=scaled_decode)
    small = replace(preprocess, image_size=(3, 2))
    crop = functools.partial(torchvision_crop, 3, area=(0.1, 0.3))
    options: dict[str, Any] = {"seed": 3, "views": 2}
    options["crop"] = functools.partial(torchvision_crop, 3, area=(0.5, 0.9)) if is_cropped else None
    plain = training(source, preprocess, **options)
    with_local = training(source, preprocess, **options, local=LocalViews(3, small, crop))
    for usual, batch in zip(islice(plain, 3), islice(with_local, 3), strict=True):
        local = batch.local
        assert local is not None and local.local is None and usual.local is None
        assert torch.equal(batch.images, usual.images) and batch.skipped == usual.skipped and not local.skipped
        assert local.images.shape == (12, 3, 3, 2) and local.views.tolist() == [2, 3, 4] * 4
        assert (batch.views_per_sample, local.views_per_sample) == (2, 3)
        for name in ("labels", "valid", "samples", "epochs", "targets"):
            assert torch.equal(getattr(local, name)[::3], getattr(batch, name)[::2]), f"local views have other {name}"
        assert_cut(local, source, small, (0.1, 0.3))
        parts = batch.chunks(3)
        assert [(len(part), len(part.local or ())) for part in parts] == [(4, 6), (2, 3), (2, 3)]
        for part in parts:
            assert part.local is not None and set(part.samples.tolist()) == set(part.local.samples.tolist())
        doubled = batch.with_images(lambda images: 2 * images)
        assert doubled.local is not None and torch.equal(doubled.local.images, 2 * local.images)


class CountingImages(list[Any]):
    """Images that count how often each of them is read."""

    def __init__(self, images: list[Any]) -> None:
        super().__init__(images)
        self.reads = [0] * len(images)

    def __getitem__(self, index: Any) -> Any:
        self.reads[index] += 1
        return super().__getitem__(index)


def counted() -> tuple[Source, CountingImages]:
    """Return a source of five colour images of odd sizes, the last of which cannot be decoded, and their counters."""
    plain: Any = varied()
    images = CountingImages(plain.images)
    return MemorySource(images, labels=plain.labels), images


@pytest.mark.slow
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("views", [1, 2])
def test_kept_pixels_are_read_once_and_give_equal_batches(threads: int, views: int) -> None:
    source, images = counted()
    preprocess = Preprocess(image_size=(5, 7))
    options: dict[str, Any] = {"batch_size": 3, "seed": 2, "views": views}
    expected = list(islice(training(source, preprocess, **options), 10))
    assert images.reads == [6] * 5, "30 samples are six epochs"
    images.reads[:] = [0] * 5
    batches = training(source, preprocess, **options, threads=threads, keep=True)
    found = list(islice(batches, 4))
    batches.use_readers(Readers(0))
    state = batches.state()
    batches.restore(state)
    assert_same([*found, *islice(batches, 6)], expected)
    assert images.reads[:4] == [1] * 4 or (threads and max(images.reads[:4]) <= threads)
    assert images.reads[4] >= 6, "an image that cannot be decoded is tried in every epoch"
    later = training(source, preprocess, **options, keep=True)
    first = next(later)
    first.images.zero_()
    later.restore({"batches": 0})
    assert torch.equal(next(later).images, expected[0].images), "a batch is a copy of the kept pixels"


@pytest.mark.slow
def test_pixels_are_kept_for_one_size_at_a_time() -> None:
    source, images = counted()
    small, large = Preprocess(image_size=(5, 7)), Preprocess(image_size=(9, 8))
    stages = (Stage(large, 2, first=5),)
    batches = training(source, small, batch_size=3, seed=2, later=stages, keep=True)
    plain = training(source, small, batch_size=3, seed=2, later=stages)
    images.reads[:] = [0] * 5
    assert_same(list(islice(batches, 15)), list(islice(plain, 15)))
    assert [count - 7 for count in images.reads[:4]] == [2] * 4, "35 samples without keeping, and once for each size"


@pytest.mark.parametrize("local", [False, True])
def test_random_boxes_are_cut_from_the_image_in_every_epoch(local: bool) -> None:
    source, images = counted()
    crop = functools.partial(torchvision_crop, 3, area=(0.1, 0.9))
    options: dict[str, Any] = {"local": LocalViews(2, SMALL, crop)} if local else {"crop": crop}
    batches = training(source, replace(SMALL, channels=3), batch_size=5, seed=2, keep=True, **options)
    list(islice(batches, 2))
    assert images.reads[:4] == [2] * 4


def test_worker_processes_keep_no_pixels() -> None:
    """Each of them would have a copy of its own."""
    batches = training(varied(), batch_size=5, seed=2, keep=True)
    next(batches)
    assert batches._kept is not None
    batches._readers = Readers(1, processes=1)
    batches._ahead()
    assert batches._kept is None


class Killing(Files):
    """Images whose reading kills the worker process, as a full shared memory does."""

    def image(self, place: int) -> Any:
        os.kill(os.getpid(), signal.SIGBUS)


@pytest.mark.slow
def test_a_worker_process_that_is_killed_is_named(colour_folder: Path) -> None:
    images = Killing(colour_folder, ["1.png"] * 36, [0] * 36)
    batches = training(Samples((images,), range(36), Targets.unknown("none", (), 36)))
    batches.use_readers(Readers(1, processes=1))
    with pytest.raises(ProcessError, match=r"exit code -7.*/dev/shm"):
        next(batches)


def test_worker_processes_without_shared_memory_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", full)
    batches = training(varied(), batch_size=5, seed=2)
    batches.use_readers(Readers(1, processes=1))
    with pytest.raises(ProcessError, match=r"No space left on device.*/dev/shm"):
        next(batches)


@pytest.mark.slow  # another process imports everything again
def test_a_program_keeps_its_own_logging() -> None:
    script = (
        "import logging; from vitrail.data.pipeline import evaluation_batches;"
        "from vitrail.data.pixels.preprocess import Preprocess; from vitrail.data.sources import open_data;"
        "images = open_data('fractals:2:4', validation_share=0.5).train;"
        "next(iter(evaluation_batches(images, Preprocess(image_size=(8, 8)), batch_size=2)));"
        "assert not logging.root.handlers, logging.root.handlers"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")
