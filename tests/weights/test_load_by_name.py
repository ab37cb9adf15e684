"""Tests of models on the hub, against a server of its protocol, and of the models in the package."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from pytest import CaptureFixture, MonkeyPatch

from tests.weights.hub_server import Hub, cut_off, restart_client, serving
from tests.words import square_model_with_words
from vitrail.cli import main
from vitrail.errors import BundleError
from vitrail.recipes import RECIPES
from vitrail.serving.server import ModelFiles
from vitrail.tasks.tokenizer import load_tokenizer
from vitrail.weights import load as loading
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import FOLDER, convert, load, looks_like_hub_name, model_name, shipped_folder

OTHERS = {
    "README.md": b"# A model", ".gitattributes": b"", "tf_model.h5": b"h5", "flax_model.msgpack": b"flax",
    "onnx/model.onnx": b"onnx", "logs/model.safetensors": b"another",
}  # fmt: skip
"""Files that repositories have and models do not need."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server that replaces the hub for the client."""
    with serving(tmp_path / "home", monkeypatch) as server:
        yield server


def download(name: str) -> Path:
    return loading.download(name)[0]


def files_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def message(name: str, kind: type[Exception] = BundleError) -> str:
    """Return the message for a model that cannot be loaded. It is one line, without another exception as its cause."""
    with pytest.raises(kind) as caught:
        download(name)
    assert caught.value.__cause__ is None and (caught.value.__suppress_context__ or caught.value.__context__ is None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "timm/vit_base_patch16_224.augreg_in21k_ft_in1k", "a/b", "org/name@v1.0.2", "org/name@refs/pr/4",
        "hf-hub:timm/vit_tiny_patch16_224@main", "hf:org/name.bin", "hf:no name at all",
    ],
)  # fmt: skip
def test_names_of_the_hub(text: str) -> None:
    assert looks_like_hub_name(text) and looks_like_hub_name(Path(text))


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "model", "./org/name", "../name", "/org/name", "~/name", "org/name/", "a/b/c", "org//name", "org/",
        "runs/model.npz", "runs/model.PT", "runs/pytorch_model.bin",
        "runs/model.safetensors.index.json", "runs/model.pth@main", "org/na me", "org/näme", "org/na--me", "org/na..me",
        "org/name.git", "org/name.git@main", "org/name@", "org/name@a b", "org/name@../../x", "org/name@a@b",
        "-org/name", "org/.name", "org/name\n", "org\\name", "https://huggingface.co/org/name", f"org/{'n' * 97}",
        "org/\0",
    ],
)  # fmt: skip
def test_not_names_of_the_hub(text: str) -> None:
    assert not looks_like_hub_name(text)


def test_what_exists_is_never_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    assert looks_like_hub_name("org/name")
    (tmp_path / "org/name").mkdir()
    (tmp_path / "org/link").symlink_to("nowhere")
    assert not looks_like_hub_name("org/name")
    assert not looks_like_hub_name("org/link")
    assert looks_like_hub_name("org/name@main")
    assert looks_like_hub_name("hf:org/name")


NEEDED = [
    (["model.json", "model.safetensors", "config.json", "pytorch_model.bin"], ["model.json", "model.safetensors"]),
    (
        ["config.json", "preprocessor_config.json", "processor_config.json", "model.safetensors", "vit.npz"],
        ["config.json", "preprocessor_config.json", "processor_config.json", "model.safetensors"],
    ),
    (["config.json", "pytorch_model.bin", "training_args.bin"], ["config.json", "pytorch_model.bin"]),
    (["config.json", "vit.safetensors", "vit.pth"], ["config.json", "vit.safetensors"]),
    (["ViT-B_16.npz"], ["ViT-B_16.npz"]),
    (["model.json", "weights.pt"], ["weights.pt"]),
    (
        ["config.json", "merges.txt", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.json"],
        ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"],
    ),
    (["merges.txt", "model.safetensors", "vocab.json"], ["vocab.json", "merges.txt", "model.safetensors"]),
    (
        ["open_clip_config.json", "open_clip_model.safetensors", "open_clip_pytorch_model.bin", "tokenizer.json"],
        ["open_clip_config.json", "tokenizer.json", "open_clip_model.safetensors"],
    ),
    (["model.safetensors", "spiece.model", "tokenizer.json"], ["spiece.model", "model.safetensors"]),
]
"""Files of repositories, with those that are fetched."""


@pytest.mark.slow
def test_only_what_a_model_needs_is_fetched(hub: Hub) -> None:
    for number, (files, needed) in enumerate(NEEDED):
        content = {name: name.encode() for name in files}
        commit = hub.add(f"org/name{number}", {**OTHERS, **content})
        folder = download(f"org/name{number}")
        assert hub.fetched() == needed
        assert folder.name == commit and files_in(folder) == set(needed)
        assert {name: (folder / name).read_bytes() for name in needed} == {name: content[name] for name in needed}


@pytest.mark.slow
@pytest.mark.parametrize("whole", ["model.safetensors", "pytorch_model.bin"])
def test_shards_come_with_their_index(hub: Hub, whole: str) -> None:
    stem, _, suffix = whole.partition(".")
    first, second = (f"{stem}-0000{number}-of-00002.{suffix}" for number in (1, 2))
    index = f'{{"weight_map": {{"a": "{second}", "b": "{first}", "c": "{second}"}}}}'.encode()
    stray = {f"{stem}-00003-of-00003.{suffix}": b"from another time", "other.npz": b"npz"}
    files = {"config.json": b"{}", f"{whole}.index.json": index, first: b"1", second: b"2"}
    hub.add("org/name", {**OTHERS, **stray, **files})
    folder = download("org/name")
    assert hub.fetched() == ["config.json", f"{whole}.index.json", first, second]
    assert files_in(folder) == set(files)


BAD_INDICES = {
    b'{"weight_map": {"a": "lost.safetensors"}}': "incomplete: model.safetensors.index.json names lost.safetensors",
    b'{"weight_map": {"a": "../b.safetensors"}}': "points outside its folder: '../b.safetensors'",
    b'{"weight_map": {"a": 3}}': "points outside its folder: 3",
    b'{"weight_map": {"a": ["b"]}}': "does not name the file of each tensor",
    b'{"weight_map": []}': "does not name the file of each tensor",
    b"[]": "does not name the file of each tensor",
    b"{": "does not name the file of each tensor",
}


@pytest.mark.slow
def test_a_bad_index(hub: Hub) -> None:
    for number, (index, expected) in enumerate(BAD_INDICES.items()):
        hub.add(f"org/name{number}", {"model.safetensors.index.json": index})
        assert expected in message(f"org/name{number}")


@pytest.mark.slow
def test_a_second_time_only_what_changed_is_fetched(hub: Hub) -> None:
    hub.add("org/name", {"config.json": b"{}", "model.safetensors": b"weights"})
    folder = download("org/name")
    assert hub.fetched() == ["config.json", "model.safetensors"]
    restart_client()
    assert download("hf:org/name") == folder
    assert len(hub.requests) == 2  # which commit, and whether the branch is still there
    assert hub.fetched() == []
    hub.add("org/name", {"config.json": b"{}", "model.safetensors": b"new"})
    assert (download("org/name") / "model.safetensors").read_bytes() == b"new"
    assert hub.fetched() == ["model.safetensors"]  # the description is the same, and was there


@pytest.mark.slow
def test_a_revision_is_kept_to(hub: Hub) -> None:
    old = hub.add("org/name", {"config.json": b"{}", "model.safetensors": b"old"})
    repository = hub.repositories["org/name"]
    repository.refs["v1.0"] = repository.refs["refs/pr/1"] = old
    new = repository.commit({"config.json": b"{}", "model.safetensors": b"new"})
    names = {"org/name": new, "org/name@v1.0": old, "org/name@refs/pr/1": old, f"hf-hub:org/name@{old}": old}
    for name, commit in names.items():
        folder = download(name)
        assert folder.name == commit
        assert (folder / "model.safetensors").read_bytes() == (b"new" if commit == new else b"old")
    hub.close()
    restart_client()
    assert {name: download(name).name for name in names} == names


@pytest.mark.slow
@pytest.mark.parametrize("way", ["offline", "down", "broken"])
def test_without_a_network_the_cache_serves(hub: Hub, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    shards = {"a.safetensors": b"a", "b.safetensors": b"b"}
    index = b'{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'
    hub.add("org/name", {**OTHERS, **shards, "model.safetensors.index.json": index, "config.json": b"{}"})
    folder = download("org/name")
    restart_client()
    expected = cut_off(hub, monkeypatch, way)
    hub.requests.clear()
    assert download("org/name") == folder
    assert not hub.requests or way == "broken"

    assert expected in message("org/other")
    assert "neither a file or folder here nor in the cache" in message("org/other")
    assert str(folder.parents[2]) in message("org/other")  # where the cache is
    assert "nor in the cache" in message("org/name@v2")

    (folder / "b.safetensors").unlink()
    assert "incomplete in the cache" in message("org/name") and "lacks b.safetensors" in message("org/name")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "a.safetensors").unlink()
    assert "has no weights" in message("org/name") and expected in message("org/name")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cut", "shrunk"])
def test_a_download_that_breaks_off(hub: Hub, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    old = hub.add("org/name", {"config.json": b"{}", "model.safetensors": b"old"})
    folder = download("org/name")
    new = hub.add("org/name", {"config.json": b"{ }", "model.safetensors": b"w" * 5000})
    if way == "cut":
        hub.cut["model.safetensors"] = [2000, *[0] * 10]
    else:
        hub.shrunk["model.safetensors"] = 4000
    text = message("org/name")
    assert "model.safetensors of model 'org/name' could not be downloaded: " in text and "Run the command again" in text
    assert not (folder.parent / new / "model.safetensors").exists()
    with monkeypatch.context() as patch:  # offline, the branch is still the commit that is whole
        patch.setenv("HF_HUB_OFFLINE", "1")
        restart_client()
        assert download("org/name").name == old
    restart_client()
    hub.cut.clear()
    hub.shrunk.clear()
    hub.fetched()
    assert (download("org/name") / "model.safetensors").read_bytes() == b"w" * 5000
    assert hub.fetched() == ["model.safetensors"]


def test_a_file_with_another_hash_is_deleted(hub: Hub) -> None:
    hub.add("org/name", {"model.safetensors": b"weights"})
    hub.altered["model.safetensors"] = b"Weights"
    assert "SHA-256" in message("org/name")
    hub.altered.clear()
    assert (download("org/name") / "model.safetensors").read_bytes() == b"weights"


def test_a_note_names_a_model_that_comes_from_the_cache(hub: Hub, bundle: Bundle, tmp_path: Path) -> None:
    hub.add("org/name", {file.name: file.read_bytes() for file in bundle.save(tmp_path / "model").iterdir()})
    assert load("org/name", device="cpu").notes == ()
    hub.status = 503
    notes = load("org/name", device="cpu").notes
    assert len(notes) == 1 and "'org/name' was read from the cache" in notes[0] and "503" in notes[0]
    assert convert("org/name", tmp_path / "copy", "vitrail") == notes


def test_a_codebook_on_the_hub_is_seen_and_paths_begin_at_home(
    hub: Hub, bundle: Bundle, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert bundle.save("~/model") == tmp_path / "model"
    Image.new("RGB", (4, 4)).save(tmp_path / "rose.png")
    assert bundle.predict("~/rose.png") == bundle.predict(tmp_path / "rose.png")
    (tmp_path / "model/tokenizer.safetensors").write_bytes(b"codebook")
    hub.add("org/name", {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()})
    for number, source in enumerate(("org/name", "~/model")):
        assert "codebook" in convert(source, f"~/copy{number}", "vitrail")[0]
        assert (tmp_path / f"copy{number}/model.json").is_file()
    assert ModelFiles.of("~/model").state()
    with pytest.raises(BundleError, match="is damaged"):
        load_tokenizer("org/name")


def test_a_repository_without_weights_or_with_several_and_a_name_that_is_none(hub: Hub) -> None:
    hub.add("org/name", {**OTHERS, "config.json": b"{}", "model.json": b"{}"})
    text = message("org/name")
    assert "model 'org/name' has no weights (.safetensors, .npz, .pth" in text
    assert "README.md, config.json, flax_model.msgpack" in text
    hub.add("org/empty", {})
    assert message("org/empty").endswith("its files are none")
    hub.add("org/inside", {"vit/model.safetensors": b""})
    assert "vit/model.safetensors" in message("org/inside")
    hub.add("org/several", {"B_16.npz": b"", "L_16.npz": b"", "b.pth": b""})
    assert "has several files of weights, B_16.npz, L_16.npz: download one" in message("org/several")
    assert hub.fetched() == []
    assert message("hf:vit").startswith("model 'hf:vit' is not a name on the hub, which has the form org/name")


def test_a_server_that_goes_down_between_files(hub: Hub) -> None:
    hub.add("org/name", {"config.json": b"{}", "model.safetensors": b"weights"})
    handle = hub.repositories["org/name"].resolve

    def once(revision: str) -> str | None:
        hub.status = 500
        return handle(revision)

    hub.repositories["org/name"].resolve = once
    assert re.search(r"config.json of model 'org/name' could not be downloaded: .*500", message("org/name"))


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (200, "cannot be reached"), (400, "the hub refuses model 'org/name'"),
        (None, "model 'org/name' is neither a file or folder here nor a repository at http://127.0.0.1"),
    ],
)  # fmt: skip
def test_answers_of_other_servers_and_of_a_hub_without_the_repository(
    status: int | None, expected: str, hub: Hub
) -> None:
    hub.status = status
    assert expected in (text := message("org/name")) and (status or "HF_TOKEN" in text)


def test_an_unknown_revision(hub: Hub) -> None:
    commit = hub.add("org/name", {"config.json": b"{}", "model.safetensors": b"weights"})
    hub.repositories["org/name"].refs["v1.0"] = commit
    assert message("org/name@v1.1") == "model 'org/name' has no revision 'v1.1'; nearest: v1.0"
    assert message("org/name@xyz") == "model 'org/name' has no revision 'xyz'; choices: main, v1.0"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["vitrail", "huggingface-clip", "open-clip"])
def test_a_model_with_a_text_tower_reads_texts(layout: str, hub: Hub, tmp_path: Path) -> None:
    model = square_model_with_words()
    convert(model.save(tmp_path / "model"), tmp_path / "other", layout)
    hub.add("org/name", {**OTHERS, **{file.name: file.read_bytes() for file in (tmp_path / "other").iterdir()}})
    texts = ["a photo of a bee", "a wasp"]
    assert torch.allclose(load("org/name", device="cpu").embed_texts(texts), model.embed_texts(texts), atol=1e-6)


@pytest.mark.slow
def test_load_takes_names_in_a_process_of_its_own(hub: Hub, bundle: Bundle, tmp_path: Path) -> None:
    """A model on disk is loaded without the client."""
    folder = bundle.save(tmp_path / "model")
    hub.add("org/name", {file.name: file.read_bytes() for file in folder.iterdir()})
    script = f"""
import sys, torch, vitrail
here = vitrail.load({str(folder)!r}, device="cpu")
assert "huggingface_hub" not in sys.modules
there = vitrail.load("org/name", device="cpu")
assert there.classes == here.classes
weights = here.network.state_dict()
assert all(torch.equal(tensor, weights[name]) for name, tensor in there.network.state_dict().items())
"""
    finished = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert sorted(hub.fetched()) == ["model.json", "model.safetensors"]


DATA = "fractals:200:1000:0:32:colour"


def test_small_is_the_network_of_its_recipe() -> None:
    bundle, recipe = load("small", device="cpu"), RECIPES["fractals"]()
    assert bundle.network.config == recipe.model.resolve(num_classes=200, image_size=(32, 32), channels=3)
    assert bundle.preprocess == recipe.images
    assert bundle.notes == () and model_name("small") == "small"
    assert bundle.provenance["data"] == recipe.data.spec == DATA
    assert bundle.provenance["recipe"] == "fractals" and bundle.provenance["step"] == 9375
    weights = bundle.network.state_dict()
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights.values()), "stored in bfloat16"


def test_a_folder_of_the_same_name_comes_first(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bundle = load("small", device="cpu")
    bundle.provenance["recipe"] = "mine"
    bundle.save("small")
    assert shipped_folder("small") is None
    assert load("small", device="cpu").provenance["recipe"] == "mine"
    shutil.rmtree("small")
    assert load("small", device="cpu").provenance["recipe"] == "fractals"
    assert ModelFiles.of("small").path == FOLDER / "small" and ModelFiles.of("small", "cpu").load().classes
    with pytest.raises(BundleError, match=r"model 'smal' does not exist: .*Vitrail itself contains small"):
        load("smal")


@pytest.mark.parametrize("name", ["ViT-S/16", "R50+ViT-B/16", "BiT-R50x1", "BiT-Pico"])
def test_the_name_of_a_network_without_weights_is_refused_as_such(
    name: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BundleError, match=rf"model '{re.escape(name)}' .*without weights.*--variant {re.escape(name)}"):
        load(name)
    load("small", device="cpu").save(name)
    assert load(name, device="cpu").classes


@pytest.mark.slow
def test_the_stated_accuracy_is_measured_again(capsys: CaptureFixture[str]) -> None:
    arguments = ["--data", DATA, "--validation-share", "0.01", "--split", "validation", "--device", "cpu", "--json"]
    assert main(["evaluate", "small", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["validation"]["images"] == 2000
    assert found["validation"]["accuracy"] == pytest.approx(load("small").metrics["validation_accuracy"], abs=5e-4)
