"""Tests of the watcher: which files are read, when a model is replaced, and what becomes of the old one."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.conftest import make_bundle
from tests.words import square_model_with_words
from vitrail.errors import BundleError, SaveError
from vitrail.export.engines import with_engine
from vitrail.models.predictor import EngineChoice
from vitrail.models.text import TextTower
from vitrail.serving.batching import Row
from vitrail.serving.server import ModelFiles, Watcher
from vitrail.serving.service import Service
from vitrail.serving.settings import ServeSettings
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.load import convert
from vitrail.weights.saved import DESCRIPTION, WEIGHTS


def changed_bundle(step: float = 0.5) -> Bundle:
    """The usual model with other weights and other names of classes."""
    bundle = make_bundle()
    for parameter in bundle.network.parameters():
        parameter.data.add_(step)
    return replace(bundle, classes=("oak", "ash", "elm"))


@pytest.fixture
def folder(bundle: Bundle, tmp_path: Path) -> Path:
    return bundle.save(tmp_path / "flowers" / "model").parent


def watch(path: Path, work: Callable[[Service, Watcher], Awaitable[None]], engine: EngineChoice = "torch") -> None:
    """Run `work` with a service of the model at a path, and its watcher."""

    async def run() -> None:
        files = ModelFiles.of(str(path))
        state = files.state()
        service = Service({"flowers": with_engine(files.load(), engine)}, ServeSettings(max_batch=4))
        await service.start()
        try:
            await work(service, Watcher(service, {"flowers": files}, {"flowers": state}))
        finally:
            await service.stop()

    asyncio.run(run())


async def outputs(service: Service, image: bytes) -> Row:
    (row,) = await service.all_file_outputs(service.model(), ["classes"], [image])
    return row


def test_a_new_model_is_served_when_its_files_have_settled(
    folder: Path, bundle: Bundle, images: list[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    new = changed_bundle()

    async def replaced(service: Service, watcher: Watcher) -> weakref.ref[Any]:
        """Replace the model, ask both, and return a reference to the network of the old one."""
        before, asked = await outputs(service, images[0]), service.model()
        new.save(folder / "model", overwrite=True)
        await watcher.look("flowers")
        assert service.model() is asked  # the files could still change
        await watcher.look("flowers")
        assert service.model().sha256 == weights_sha256(new.network) and service.model().bundle.classes == new.classes
        after = await outputs(service, images[0])
        assert after["logits"].tolist() != before["logits"].tolist()
        (row,) = await service.all_file_outputs(asked, ["classes"], [images[0]])  # of a request that began before
        assert row["logits"].tolist() == before["logits"].tolist() and asked.bundle.classes == bundle.classes
        return weakref.ref(asked.bundle.network)

    async def work(service: Service, watcher: Watcher) -> None:
        gc.disable()
        try:
            old = await replaced(service, watcher)
            deadline = time.monotonic() + 20
            while old() is not None:  # the thread that computed drops its task soon after the answer
                assert time.monotonic() < deadline
                await asyncio.sleep(0.001)
        finally:
            gc.enable()
        await watcher.look("flowers")
        assert service.model().sha256 == weights_sha256(new.network)

    watch(folder, work)
    (line,) = map(json.loads, capfd.readouterr().err.splitlines())
    shas = {"sha256": weights_sha256(new.network), "before": weights_sha256(bundle.network), "engine": "torch"}
    assert {**line, "time": ""} == {"time": "", "event": "model replaced", "model": "flowers", **shas}


def test_a_new_model_without_its_runtime_and_with_a_note(
    folder: Path, images: list[bytes], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Bundle:
        raise SaveError("could not save the network of another runtime")

    async def work(service: Service, watcher: Watcher) -> None:
        changed_bundle().save(folder / "model", overwrite=True)
        monkeypatch.setattr(ModelFiles, "load", lambda self: replace(changed_bundle(), notes=("it was assumed",)))
        monkeypatch.setattr("vitrail.serving.service.with_engine", fail)
        for _ in range(2):
            await watcher.look("flowers")
        await outputs(service, images[0])

    watch(folder, work)
    (line,) = map(json.loads, capfd.readouterr().err.splitlines())
    assert (line["event"], line["engine"], line["notes"]) == ("model replaced", "torch", ["it was assumed"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [DESCRIPTION, WEIGHTS])
def test_half_of_a_model_is_never_served(
    folder: Path, bundle: Bundle, images: list[bytes], name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Files are written over, as `cp` and `rsync --inplace` do: first one of the two and half of the other."""
    source = changed_bundle().save(tmp_path / "new")
    other = WEIGHTS if name == DESCRIPTION else DESCRIPTION
    half = (source / other).read_bytes()

    async def work(service: Service, watcher: Watcher) -> None:
        before = await outputs(service, images[0])
        shutil.copyfile(source / name, folder / "model" / name)
        (folder / "model" / other).write_bytes(half[: len(half) // 2])
        for _ in range(4):
            await watcher.look("flowers")
            assert service.model().sha256 == weights_sha256(bundle.network)
            assert (await outputs(service, images[0]))["logits"].tolist() == before["logits"].tolist()
        with (folder / "model" / other).open("ab") as file:
            file.write(half[len(half) // 2 :])
        for _ in range(2):
            await watcher.look("flowers")
        assert service.model().bundle.classes == ("oak", "ash", "elm")

    watch(folder, work)
    refused, replaced = map(json.loads, capfd.readouterr().err.splitlines())
    assert refused["event"] == "model refused" and refused["sha256"] == weights_sha256(bundle.network)
    assert refused["error"].startswith(f"BundleError: {folder / 'model'}") and "serve-" not in refused["error"]
    assert replaced["event"] == "model replaced"


def test_a_folder_that_vanishes_leaves_the_model(
    folder: Path, images: list[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    async def work(service: Service, watcher: Watcher) -> None:
        shutil.rmtree(folder)
        for _ in range(4):
            await watcher.look("flowers")
        await outputs(service, images[0])
        changed_bundle().save(folder)  # the model itself, where there was a run with a model
        for _ in range(2):
            await watcher.look("flowers")
        assert service.model().bundle.classes == ("oak", "ash", "elm")

    watch(folder, work)
    refused, replaced = map(json.loads, capfd.readouterr().err.splitlines())
    assert refused["error"] == f"BundleError: {folder} does not exist any more"
    assert replaced["event"] == "model replaced"


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "pt2", "openvino"])
def test_an_exported_file_is_replaced(
    to: str, exported: Callable[[str], Path], images: list[bytes], tmp_path: Path, bundle: Bundle
) -> None:
    """The old file is cut while it is in use."""
    pytest.importorskip({"onnx": "onnxruntime", "pt2": "torch"}.get(to, to))
    source = exported(to)
    path = tmp_path / source.name
    for suffix in {source.suffix, ".bin"} if to == "openvino" else {source.suffix}:
        shutil.copyfile(source.with_suffix(suffix), path.with_suffix(suffix))

    async def work(service: Service, watcher: Watcher) -> None:
        before = await outputs(service, images[0])
        sha256 = service.model().sha256
        whole = {file: file.read_bytes() for file in tmp_path.iterdir()}
        for file, content in whole.items():
            file.write_bytes(content[: len(content) // 3])
        for _ in range(3):
            await watcher.look("flowers")
        assert (await outputs(service, images[0]))["logits"].tolist() == before["logits"].tolist()
        for file, content in whole.items():
            file.write_bytes(content)
        model = service.model()
        for _ in range(2):
            await watcher.look("flowers")
        assert service.model() is not model and service.model().sha256 == sha256

    watch(path, work)


def test_the_files_that_are_watched(folder: Path, tmp_path: Path, bundle: Bundle) -> None:
    (folder / "journal.jsonl").write_text("x")
    files = ModelFiles.of(str(folder))
    state = files.state()
    assert [name for name, *_ in state] == [f"flowers/model/{WEIGHTS}", f"flowers/model/{DESCRIPTION}"]
    (folder / "journal.jsonl").write_text("another step of training")
    assert files.state() == state
    missing = ModelFiles.of(str(tmp_path / "nowhere"))
    assert missing.state() == ()
    with pytest.raises(BundleError, match="nowhere"):
        missing.load()


def test_files_that_change_while_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another layout than ours has no hash of its weights."""
    copy = shutil.copyfile

    def copy_and_change(source: Path, target: Path) -> None:
        copy(source, target)
        if source.name == DESCRIPTION:
            source.write_text("{}")

    monkeypatch.setattr("vitrail.serving.server.shutil.copyfile", copy_and_change)
    with pytest.raises(BundleError, match="changed while it was read"):
        ModelFiles.of(str(folder)).load()


def test_a_folder_that_is_removed_while_it_is_listed_has_no_files(tmp_path: Path) -> None:
    folder, stops = tmp_path / "model", threading.Event()

    def come_and_go() -> None:
        while not stops.is_set():
            folder.mkdir()
            (folder / "config.json").touch()
            (folder / "config.json").unlink()
            folder.rmdir()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        found = {len(ModelFiles(folder).state()) for _ in range(3000)}
    finally:
        stops.set()
        thread.join()
    assert found <= {0, 1} and 0 in found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["vitrail", "huggingface-clip"])
def test_a_model_with_a_text_tower_is_watched_with_it(layout: str, tmp_path: Path) -> None:
    def write(name: str, model: Bundle) -> None:
        convert(model.save(tmp_path / name), tmp_path / "served", layout, overwrite=True)

    model = square_model_with_words()
    assert model.words is not None
    tower = TextTower(model.words.tower.config)
    other = replace(model, words=replace(model.words, tower=tower))
    write("model", model)

    async def work(service: Service, watcher: Watcher) -> None:
        for wanted, name in ((model, "again"), (other, "other")):
            write(name, wanted)
            for _ in range(2):
                await watcher.look("flowers")
            found = service.model().bundle.embed_texts(["a bee", "x"])
            assert torch.allclose(found, wanted.embed_texts(["a bee", "x"]), atol=1e-6)

    watch(tmp_path / "served", work)


@pytest.mark.slow
def test_a_new_model_is_computed_by_the_runtime_of_the_old_one(
    folder: Path, images: list[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    new = changed_bundle(0.01)

    async def work(service: Service, watcher: Watcher) -> None:
        assert service.model().bundle.engine is not None
        new.save(folder / "model", overwrite=True)
        for _ in range(2):
            await watcher.look("flowers")
        found = (await outputs(service, images[0]))["logits"]
        expected = new.network(new.inputs([new.preprocess.pixels(images[0])]))[0]
        assert torch.allclose(torch.as_tensor(found), expected, atol=1e-3)

    watch(folder, work, engine="onnxruntime")
    (line,) = map(json.loads, capfd.readouterr().err.splitlines())
    assert (line["event"], line["engine"]) == ("model replaced", "onnxruntime")
