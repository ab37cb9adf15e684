"""Tests of features against the network itself, with and without a cache, by one process and by several."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from types import MethodType
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.evaluation.memory import MemorySource
from tests.make import encode
from vitrail.data.formats.folder import read_folder
from vitrail.data.pipeline import Readers
from vitrail.data.pixels import decode
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import subset
from vitrail.data.sources import open_data
from vitrail.data.targets import Target
from vitrail.errors import Interrupted
from vitrail.evaluation.features import cache as feature_rows
from vitrail.evaluation.features.extract import SAFE_COSINE, FeatureSet, Layer, compare_precisions, extract
from vitrail.evaluation.outputs import Outputs
from vitrail.models.variants import create
from vitrail.models.vit import VisionTransformer
from vitrail.processes.group import Processes
from vitrail.processes.launch import Launch
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported import ExportedNetwork, Interface

PREPROCESS = Preprocess(image_size=(14, 21), channels=3, mean=(0.3,), std=(0.4,))
HERE = Readers(0)
"""Reading without threads, because the images of these tests are tiny."""


class Pictures(MemorySource):
    """Random images."""

    def __init__(self, count: int, broken: tuple[int, ...] = (), labels: list[Target] | None = None) -> None:
        images = np.random.default_rng(7).integers(0, 256, (count, 9, 12, 3), dtype=np.uint8)
        super().__init__(images, [index % 3 for index in range(count)] if labels is None else labels, broken)


def make_network(seed: int = 3) -> VisionTransformer:
    torch.manual_seed(seed)
    network = create("ViT-Pico/7", image_size=(14, 21), num_classes=3, width=16, depth=2, heads=2, mlp_width=32)
    assert isinstance(network, VisionTransformer)
    return network


def extracted(network: nn.Module, source: object, layer: Layer = "embedding", **settings: object) -> FeatureSet:
    """Extract features in this process. By default, the batch size follows from the network."""
    names = tuple(f"class {index}" for index in range(network.config.num_classes))
    bundle = Bundle(network, names, settings.pop("preprocess", PREPROCESS))
    return extract(Outputs(bundle, **{"batch_size": None, "readers": HERE, **settings}), source, layer)


def ranks(rank: int, world: int) -> Processes:
    return Processes(Launch(rank, world))


class Watched:
    """Extracts features with a network that counts the images it receives, and keeps the notes."""

    def __init__(self, network: VisionTransformer | None = None) -> None:
        self.network = make_network() if network is None else network
        self.seen = 0
        self.notes: list[str] = []
        self.progress: list[int] = []

        def counting(network: VisionTransformer, images: Tensor) -> Tensor:
            self.seen += len(images)
            return VisionTransformer.embed(network, images)

        self.network.embed = MethodType(counting, self.network)  # type: ignore[method-assign]

    def __call__(self, source: object, cache: Path | None, **options: object) -> FeatureSet:
        settings = {"on_note": self.notes.append, "on_progress": lambda done, total: self.progress.append(done)}
        with patch("vitrail.evaluation.outputs.is_described", return_value=True):  # it calls the network, too
            return extracted(self.network, source, **{"batch_size": 5, "cache": cache, **settings, **options})


def by_hand(network: VisionTransformer, source: Pictures) -> np.ndarray:
    """Return the features, computed one image at a time."""
    rows = []
    network.eval()
    with torch.no_grad():
        for index in range(len(source)):
            if index not in source.broken:
                pixels = torch.from_numpy(PREPROCESS.pixels(source.images[index]))[None]
                rows.append(network.embed(PREPROCESS.normalise(pixels))[0].numpy())
    return np.stack(rows) if rows else np.empty((0, 16), np.float32)


def same(one: FeatureSet, other: FeatureSet) -> bool:
    return (
        one.features.tobytes() == other.features.tobytes()
        and one.features.shape == other.features.shape
        and np.array_equal(one.truth.dense, other.truth.dense)
        and (one.keys, one.classes, one.skipped) == (other.keys, other.classes, other.skipped)
    )


def the_entry(cache: Path) -> Path:
    (found,) = (path for path in cache.iterdir() if path.is_dir())
    return found


def test_an_exported_file_has_its_own_precision() -> None:
    def run(levels: np.ndarray) -> dict[str, np.ndarray]:
        return {"embedding": np.resize(levels.mean(axis=(1, 2)), (len(levels), 16)).astype(np.float32)}

    config = make_network().config.with_head(0)
    exported = ExportedNetwork(config, PREPROCESS, Interface("embedding"), run, "flowers.onnx", "0" * 64)
    with patch("vitrail.machine.has_bf16_matrix_units", return_value=True):
        found = extracted(exported, Pictures(5), feature_precision="auto")
        assert Bundle(exported, (), PREPROCESS).predictor("auto").precision == "float32"
    assert found.precision == "float32" and found.features.shape == (5, 16)


def test_features_are_what_the_bundle_embeds(colour_folder: Path) -> None:
    source = read_folder(colour_folder).samples
    bundle = Bundle(make_network().eval(), ("a", "b", "c"), PREPROCESS)
    features = extracted(bundle.network, source, batch_size=36)
    images = [colour_folder / source.key(index) for index in range(36)]
    assert np.array_equal(features.features, bundle.embed(images, batch_size=36).numpy())
    assert features.truth.dense.tolist() == [0] * 12 + [1] * 12 + [2] * 12
    assert features.keys[12] == "green/00.png" and features.classes == ("blue", "green", "red")
    assert features.truth.kind == "class" and (len(features), features.width) == (36, 16)


@pytest.mark.slow
@settings(max_examples=6)
@given(st.integers(0, 13), st.sets(st.integers(0, 12)), st.integers(1, 15))
def test_every_decodable_image_has_a_row_in_order(count: int, broken: set[int], batch_size: int) -> None:
    source = Pictures(count, tuple(index for index in broken if index < count))
    left = [index for index in range(count) if index not in source.broken]
    network = make_network()
    expected = by_hand(network, source)
    with tempfile.TemporaryDirectory() as folder:
        watched = Watched(network)
        for cache in (None, Path(folder), Path(folder)):
            features = watched(source, cache, batch_size=batch_size)
            assert np.allclose(features.features, expected, atol=1e-5) and features.features.dtype == np.float32
            assert features.features.shape == (len(left), 16)
            assert features.keys == tuple(f"picture {index}" for index in left)
            assert features.truth.dense.tolist() == [index % 3 for index in left]
            assert [item.key for item in features.skipped] == [f"picture {index}" for index in sorted(source.broken)]
            assert all("HTML" in item.reason for item in features.skipped)
            assert watched.progress[-1] == count
        assert watched.seen == 2 * count


def test_labels_of_several_classes_become_targets_and_none_becomes_minus_one(tmp_path: Path) -> None:
    several = extracted(make_network(), Pictures(3, labels=[(0, 2), (), (1,)]))
    assert several.truth.kind == "classes" and several.truth.dense.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    some = extracted(make_network(), Pictures(3, labels=[2, None, 1]), cache=tmp_path)
    assert some.truth.kind == "class" and some.truth.dense.tolist() == [2, -1, 1]


def test_the_second_time_they_are_read_and_mapped(tmp_path: Path) -> None:
    source, watched = Pictures(13, broken=(4,)), Watched()
    first = watched(source, tmp_path)
    assert watched.seen == 13 and watched.notes == [] and watched.progress[:3] == [5, 10, 13]
    second = watched(source, tmp_path, batch_size=3)
    assert watched.seen == 13
    assert watched.notes == [f"features of 12 images read from the cache, {the_entry(tmp_path)}"]
    assert same(first, second) and same(second, watched(source, None))
    for features in (first, second):
        assert isinstance(features.features, np.memmap) and not features.features.flags.writeable
    assert sorted(path.name for path in the_entry(tmp_path).iterdir()) == ["entry.json", "features.npy"]


def test_features_of_a_changed_network_are_not_those_of_the_cache(tmp_path: Path) -> None:
    network, source, notes = make_network(), Pictures(3), list[str]()
    before = extracted(network, source, cache=tmp_path)
    network.blocks[0].register_forward_hook(lambda module, given, found: -found)
    changed = extracted(network, source, cache=tmp_path, on_note=notes.append)
    assert not np.allclose(before.features, changed.features, atol=0.01) and "network was changed" in notes[0]
    assert np.allclose(changed.features, by_hand(network, source), atol=1e-5)
    assert same(before, extracted(make_network(), source, cache=tmp_path))


def test_the_network_is_left_as_it_was(tmp_path: Path) -> None:
    network = make_network().train()
    extracted(network, Pictures(3), cache=tmp_path)
    assert network.training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("bias", "options"),
    [
        (0.5, {}),
        (0.0, {"preprocess": replace(PREPROCESS, interpolation="bicubic")}),
        (9, {"preprocess": replace(PREPROCESS, mean=(0.5,)), "precision": "bf16"}),
    ],
)
def test_features_of_another_network_are_never_used(bias: float, options: dict[str, object], tmp_path: Path) -> None:
    source, watched = Pictures(7), Watched()
    before = watched(source, tmp_path)
    with torch.no_grad():
        watched.network.state_dict()["blocks.1.attention.out.bias"][3] += bias
    after = watched(source, tmp_path, **options)
    assert watched.seen == 14
    assert watched.notes == []
    assert not np.allclose(before.features, after.features, atol=1e-4)
    assert same(after, watched(source, None, **options))


def test_features_of_other_data_are_never_used(tmp_path: Path) -> None:
    source, watched = Pictures(7), Watched()
    watched(source, tmp_path)
    source.images[3] = 255 - source.images[3]
    assert same(watched(source, tmp_path), watched(source, None))
    source.labels[2] = 1
    assert watched(source, tmp_path).truth.dense[2] == 1
    assert watched(subset(source, [1, 2]), tmp_path).keys == ("picture 1", "picture 2")
    assert watched.notes == []
    assert sum(path.is_dir() for path in tmp_path.iterdir()) == 4


@pytest.mark.parametrize("damage", ["cut", "gone", "no array", "type", "order", "json", "other"])
def test_a_damaged_entry_is_computed_anew_and_said_so(damage: str, tmp_path: Path) -> None:
    source, watched = Pictures(7, broken=(2,)), Watched()
    before = watched(source, tmp_path)
    expected = before.features.copy()
    features, about = the_entry(tmp_path) / "features.npy", the_entry(tmp_path) / "entry.json"
    data = features.read_bytes()
    if damage in ("cut", "no array"):
        features.write_bytes({"cut": data[:-5], "no array": b"\0" + data[1:]}[damage])
    elif damage in ("type", "order"):
        np.save(features, expected.astype(np.float64) if damage == "type" else np.asfortranarray(expected))
    elif damage == "gone":
        features.unlink()
    else:
        text = about.read_text()
        about.write_text({"json": text[:40], "other": text.replace('"float32"', '"bf16"')}[damage])
    again = watched(source, tmp_path)
    assert watched.seen == 14 and np.array_equal(again.features, expected)
    (note,) = watched.notes
    assert note.startswith(f"cached features are not used, and are computed again: {the_entry(tmp_path)}")
    watched(source, tmp_path)
    assert watched.seen == 14


def test_images_of_a_decoder_that_is_installed_later_are_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(5).integers(0, 256, (3, 9, 12, 3), dtype=np.uint8)
    for number, kind in enumerate(("PNG", "BMP", "GIF")):
        (tmp_path / f"{number}.{kind}").write_bytes(encode(pixels[number], kind))
    source = open_data(str(tmp_path), validation_share=0.0, unlabelled=True).train
    watched, cache = Watched(), tmp_path / "cache"
    with monkeypatch.context() as patched:
        patched.setattr(decode, "missing_decoder", lambda kind: f"needs a decoder of {kind}" if kind != "PNG" else None)
        assert [len(watched(source, cache).skipped) for _ in range(2)] == [2, 2] and watched.seen == 3
    assert watched(source, cache).keys == ("0.PNG", "1.BMP", "2.GIF") and watched.seen == 6
    assert watched(source, cache).skipped == () and watched.seen == 6


@pytest.mark.parametrize(("size", "marked"), [(200, True), (128 + 13 * 64, False)])
def test_a_partial_entry_without_content_is_begun_anew(size: int, marked: bool, tmp_path: Path) -> None:
    source, watched = Pictures(13), Watched()
    expected = watched(source, tmp_path / "whole")
    name = the_entry(tmp_path / "whole").name
    partial = tmp_path / f"{name}.partial"
    partial.mkdir()
    (partial / "features.npy").write_bytes(bytes(size))
    if marked:
        (partial / "done").write_bytes(b"\1" * 13)
    assert same(watched(source, tmp_path), expected) and watched.seen == 26


def test_a_rank_does_what_the_others_left_undone(tmp_path: Path) -> None:
    source, watched = Pictures(13, broken=(6,)), Watched()
    expected = watched(source, None)
    assert same(watched(source, tmp_path, processes=ranks(1, 3)), expected) and watched.seen == 26
    assert same(watched(source, tmp_path, processes=ranks(0, 3)), expected) and watched.seen == 26


def test_who_comes_second_waits_and_reads(tmp_path: Path) -> None:
    source, first = Pictures(7), Watched()
    expected = first(source, tmp_path / "other")
    name = the_entry(tmp_path / "other").name
    held = os.open(tmp_path / f"{name}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    second, waits, results = Watched(), threading.Event(), []

    def said(note: str) -> None:
        second.notes.append(note)
        waits.set()

    thread = threading.Thread(target=lambda: results.append(second(source, tmp_path, on_note=said)))
    thread.start()
    try:
        assert waits.wait(30)
        assert second.notes == ["another process is computing the same features; waiting for it"] and not results
        (tmp_path / "other" / name).rename(tmp_path / name)
    finally:
        os.close(held)
        thread.join(30)
    assert second.seen == 0 and same(results[0], expected)


def test_a_disk_without_locks_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    watched = Watched()
    features = watched(Pictures(7), tmp_path)
    (note,) = watched.notes
    assert note == f"features are computed but not kept, because the disk of {tmp_path} does not support locks"
    assert same(features, watched(Pictures(7), None))
    assert not any(path.is_dir() for path in tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("reserves", [True, False])
def test_a_full_disk_does_not_end_an_extraction(
    reserves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, watched = Pictures(40), Watched()
    if not reserves:  # as on a disk that cannot set bytes aside
        monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.EOPNOTSUPP, "not supported")))
        monkeypatch.setattr(os, "ftruncate", lambda *arguments: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 + 20 * 64, hard))
    try:
        found = watched(source, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert watched.seen == (40 if reserves else 65)
    monkeypatch.undo()
    (note,) = watched.notes
    assert note.startswith("features are computed but not kept, because the cache cannot be written: could not save")
    assert "File too large" in note
    assert same(found, Watched()(source, None))
    again = watched(source, tmp_path)
    assert same(again, Watched()(source, None))


def test_a_cache_that_cannot_be_made_or_vanishes(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    watched, source = Watched(), Pictures(12)
    expected = Watched()(source, None)
    assert same(watched(source, tmp_path / "file" / "cache"), expected)
    assert "the cache cannot be written: could not save features to" in watched.notes[0]

    def vanish(done: int, total: int) -> None:
        if done == 5:
            shutil.rmtree(tmp_path / "cache")

    again = watched(source, tmp_path / "cache", on_progress=vanish)
    assert "it was removed while it was written" in watched.notes[1] and same(again, expected)


@pytest.mark.skipif(os.geteuid() != 0, reason="taking on another user takes root")
def test_a_cache_that_may_not_be_searched_is_named_and_not_needed(tmp_path: Path) -> None:
    watched, source = Watched(), Pictures(12)
    expected = Watched()(source, None)
    (tmp_path / "closed").mkdir(mode=0)
    os.seteuid(65534)
    try:
        found = watched(source, tmp_path / "closed" / "cache")
    finally:
        os.seteuid(0)
    assert same(found, expected)
    assert "the cache cannot be written: could not save features to" in watched.notes[0]
    assert "Permission denied" in watched.notes[0]


def interrupt_after_ten(watched: Watched, source: Pictures, cache: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watched(source, cache, on_progress=interrupt)


def test_an_exception_loses_nothing_that_was_computed(tmp_path: Path) -> None:
    source, watched = Pictures(13), Watched()
    interrupt_after_ten(watched, source, tmp_path)
    features, expected = watched(source, tmp_path), Watched()(source, None)
    assert watched.seen == 13 and same(features, expected)
    assert watched.notes == ["continuing: features of 10 of 13 images are in the cache"]
    assert watched.progress[:2] == [13, 13]
    interrupt_after_ten(watched, source, tmp_path / "other")
    features = watched(source, tmp_path / "other", batch_size=4)
    assert watched.seen == 13 + 10 + 3, "another batch size goes on too"
    assert np.allclose(features.features, expected.features, atol=1e-5)


@pytest.mark.slow
def test_batches_become_smaller_if_one_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop after a slow batch keeps the images of all batches before it."""
    monkeypatch.setattr(feature_rows, "RECORD_SECONDS", 0.0)
    source, watched = Pictures(70, broken=(3, 66)), Watched()
    features = watched(source, tmp_path, batch_size=None)
    assert watched.progress == [64, 65, 66, 67, 68, 69, 70, 70] and watched.seen == 70
    assert np.allclose(features.features, by_hand(watched.network, source), atol=1e-5)
    watched.progress.clear()
    watched(source, None, batch_size=32)
    assert watched.progress == [32, 64, 70, 70], "a batch size that the user chose stays"


def test_the_rows_of_a_smaller_batch_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_rows, "RECORD_SECONDS", 0.0)
    source, watched = Pictures(70), Watched()

    def interrupt(done: int, total: int) -> None:
        if done == 67:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="features of 67 of 70 images are kept"):
        watched(source, tmp_path, batch_size=None, on_progress=interrupt)
    watched(source, tmp_path, batch_size=None)
    assert watched.seen == 70


@pytest.mark.parametrize("layer", ["embedding", "head-inputs"])
def test_bf16_is_safe_unless_it_loses_what_distinguishes_images(layer: Layer) -> None:
    network, source = make_network(), Pictures(13, broken=(0, 12))
    bundle = Bundle(network, ("a", "b", "c"), PREPROCESS)
    safe = compare_precisions(bundle, source, layer, at_most=64)
    assert len(safe) == 8 and 0.9995 < safe.min() < 1
    with torch.no_grad():  # the projection's bias hides the image in bfloat16, and the positions remove it in float32
        network.patches.projection.bias += 1e4  # type: ignore[operator]
        network.positions.embedding[:, 1:] -= 1e4  # type: ignore[union-attr]
    unsafe = compare_precisions(bundle, source, layer, at_most=5)
    assert len(unsafe) == 5 and not unsafe.min() >= SAFE_COSINE
    assert not len(compare_precisions(bundle, Pictures(2, broken=(0, 1)), layer, at_most=5))


CHILD = """
import os, signal, sys, time
from pathlib import Path
import torch
from vitrail.data.pipeline import Readers
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.formats.folder import read_folder
from vitrail.evaluation.features import cache as feature_rows
from vitrail.evaluation.features import extract as features
from vitrail.evaluation.outputs import Outputs
from vitrail.models.variants import create
from vitrail.processes.group import Processes
from vitrail.processes.launch import Launch
from vitrail.weights.bundle import Bundle

torch.set_num_threads(1)
torch.manual_seed(3)
network = create("ViT-Pico/7", image_size=(14, 21), num_classes=3, width=16, depth=2, heads=2, mlp_width=32)
folder, cache, rank, world = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
preprocess = Preprocess(image_size=(14, 21), channels=3, mean=(0.3,), std=(0.4,))
feature_rows.RECORD_SECONDS = 0.0
written = []

def calling(place, name, before):
    real = getattr(place, name)
    def wrapped(*arguments):
        before(*arguments)
        return real(*arguments)
    setattr(place, name, wrapped)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

{what}
how = Outputs(
    Bundle(network, ("a", "b", "c"), preprocess), batch_size=5, readers=Readers(0), cache=cache,
    processes=Processes(Launch(rank, world)),
)
features.extract(how, read_folder(folder).samples)
print(sum(written))
"""


def child(what: str, *words: object) -> subprocess.Popen[str]:
    script = CHILD.format(what=textwrap.dedent(what))
    command = [sys.executable, "-c", script, *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "remaining"),
    [
        ("calling(feature_rows.Partial, 'write', lambda self, first, *rest: first == 15 and die())", 23),
        ("calling(feature_rows, '_write_at', lambda file, data, place: (len(data), place) == (5, 15) and die())", 23),
        ("calling(feature_rows.Entry, '_remove_rows', lambda *_: die())", 0),
        ("calling(Path, 'replace', lambda self, to: die())", 0),
        ("calling(feature_rows.Entry, '_rename', lambda *_: die())", 0),
        ("calling(Path, 'rename', lambda self, to: self.suffix == '.partial' and die())", 0),
    ],
    ids=["writing", "recording", "leaving out", "replacing", "tidying", "renaming"],
)
def test_a_killed_extraction_goes_on_to_the_same_bytes(
    where: str, remaining: int, colour_folder: Path, tmp_path: Path
) -> None:
    for name in ("blue/05.png", "red/11.png"):
        (colour_folder / name).write_bytes(b"no image")
    (colour_folder / "red" / "zz.png").write_bytes((colour_folder / "blue" / "00.png").read_bytes())
    (colour_folder / "red" / "zzz.png").write_bytes((colour_folder / "blue" / "00.png").read_bytes())
    process = child(where, colour_folder, tmp_path / "cache", 0, 1)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, errors
    source, watched = read_folder(colour_folder).samples, Watched()
    expected = watched(source, tmp_path / "straight")
    assert len(source) == watched.seen == 38
    features = watched(source, tmp_path / "cache")
    assert same(features, expected) and watched.seen == 38 + remaining
    for name in ("features.npy", "entry.json"):
        one, other = the_entry(tmp_path / "cache") / name, the_entry(tmp_path / "straight") / name
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_two_ranks_share_the_work_and_write_the_same_bytes(colour_folder: Path, tmp_path: Path) -> None:
    (colour_folder / "blue" / "05.png").write_bytes(b"no image")
    together = f"""
        def note(self, first, values, valid):
            written.append(len(values))
            (Path({str(tmp_path)!r}) / f"rank {{rank}}").touch()
            while not (Path({str(tmp_path)!r}) / f"rank {{1 - rank}}").exists():
                time.sleep(0.01)
        calling(feature_rows.Partial, "write", note)
    """
    processes = [child(together, colour_folder, tmp_path / "cache", rank, 2) for rank in (0, 1)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [int(output) for output, _ in outputs] == [20, 16]
    source, watched = read_folder(colour_folder).samples, Watched()
    expected = watched(source, tmp_path / "straight")
    assert same(watched(source, tmp_path / "cache"), expected) and watched.seen == 36
