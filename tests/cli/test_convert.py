"""Tests of `vitrail convert`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Cli
from vitrail.cli import main
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.variants import AnyConfig, build
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

FIELDS = {"vitrail": "", "timm": "", "huggingface": "", "google": ".npz", "big-vision": ".npz", "torchvision": ".pth"}


def saved(config: AnyConfig, path: Path) -> Path:
    classes = tuple(f"class {number}" for number in range(config.num_classes))
    return Bundle(build(config), classes, Preprocess(image_size=config.image_size)).save(path)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A small Vision Transformer in our own layout."""
    config = ViTConfig(image_size=(8, 8), patch_size=(4, 4), width=12, depth=1, heads=3, mlp_width=24, num_classes=2)
    return saved(config, tmp_path / "ours")


@pytest.mark.parametrize("to", FIELDS)
def test_every_layout(to: str, ours: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / f"out{FIELDS[to]}"
    shown = cli.shows("convert", ours, out, "--to", to).splitlines()
    assert shown[-1] == f"Written as {to}: {out}"
    assert ("not carried: class names" in shown) == (to in ("google", "big-vision", "torchvision"))
    heads = {"heads": 3} if to == "torchvision" else {}
    before, after = load(ours, device="cpu"), load(out, device="cpu", **heads)
    assert after.network.config.num_classes == 2
    torch.testing.assert_close(
        after.network.state_dict()["head.weight"], before.network.state_dict()["head.weight"], atol=0, rtol=0
    )
    if to in ("vitrail", "timm", "huggingface"):
        assert after.classes == before.classes


def test_json(ours: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "out.npz"
    captured = cli.call("convert", ours, out, "--to", "google", "--json")
    result = json.loads(captured.out)
    assert result["written"] == str(out) and result["layout"] == "google" and captured.err == ""
    assert "not carried: class names" in result["notes"] and "not carried: preprocessing" in result["notes"]


def test_what_the_source_does_not_say(ours: Path, tmp_path: Path, cli: Cli) -> None:
    bare = tmp_path / "bare.pth"
    cli.shows("convert", ours, bare, "--to", "torchvision")
    words = ["convert", bare, tmp_path / "out", "--to", "vitrail"]
    assert "no published model has its shape" in cli.refuses(*words)
    words += ["--layout", "torchvision", "--heads", "3", "--image-size", "12", "8", "--num-classes", "5"]
    shown = cli.shows(*words)
    assert "the image size was changed from (8, 8) to (12, 8), and the positions were resized" in shown
    assert "the new head has 5 outputs; its weights start at zero" in shown
    config = load(tmp_path / "out", device="cpu").network.config
    assert (config.heads, config.image_size, config.num_classes) == (3, (12, 8), 5)


def test_the_hidden_layer_can_be_left_out(tmp_path: Path, cli: Cli) -> None:
    config = ViTConfig(
        image_size=(8, 8), patch_size=(4, 4), width=12, depth=1, heads=3, mlp_width=24, num_classes=2, head_hidden=5
    )
    source = saved(config, tmp_path / "ours")
    words = ["convert", source, tmp_path / "out", "--to", "timm"]
    cli.refuses(*words)
    cli.shows(*words, "--drop-head-hidden")


@pytest.mark.parametrize("to", FIELDS)
def test_an_earlier_output_is_replaced_only_with_overwrite(to: str, ours: Path, tmp_path: Path, cli: Cli) -> None:
    out, fresh = tmp_path / f"out{FIELDS[to]}", tmp_path / f"fresh{FIELDS[to]}"
    cli.shows("convert", ours, out, "--to", to)
    words = ["--to", to, "--num-classes", "2"]
    assert f"{out} exists already; choose another" in cli.refuses("convert", ours, out, *words)
    cli.shows("convert", ours, out, *words, "--overwrite")
    cli.shows("convert", ours, fresh, *words)
    for file in [out] if FIELDS[to] else sorted(out.iterdir()):
        twin = fresh if FIELDS[to] else fresh / file.name
        assert file.read_bytes() == twin.read_bytes()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["ours", out.name, fresh.name])


@pytest.mark.parametrize("words", [[], ["--overwrite"]])
@pytest.mark.parametrize("to", [name for name, suffix in FIELDS.items() if not suffix])
@pytest.mark.parametrize("of_a_model", [True, False])
def test_a_folder_with_the_users_own_files_is_never_replaced(
    of_a_model: bool, to: str, words: list[str], ours: Path, tmp_path: Path, cli: Cli
) -> None:
    out = tmp_path / "out"
    if of_a_model:
        cli.shows("convert", ours, out, "--to", to)
    out.mkdir(exist_ok=True)
    (out / "thesis.txt").write_text("years of work")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    error = cli.refuses("convert", ours, out, "--to", to, *words)
    assert f"{out} holds files that Vitrail did not write (thesis.txt), so it is not replaced" in error
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_a_downloaded_model_is_not_taken_for_an_earlier_output(to: str, ours: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_file({"a": torch.zeros(1)}, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text("{}")
    error = cli.refuses("convert", ours, out, "--to", to, "--overwrite")
    assert "holds files that Vitrail did not write (config.json, model.safetensors)" in error
    assert sorted(entry.name for entry in out.iterdir()) == ["config.json", "model.safetensors"]


def test_an_empty_folder_is_written_to(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert main(["convert", str(ours), str(tmp_path / "out"), "--to", "vitrail"]) == 0
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["model.json", "model.safetensors"]
