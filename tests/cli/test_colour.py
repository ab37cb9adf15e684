"""Tests that every command says when a grey model drops the colours of images, and that --channels 3 keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Cli
from tests.make import make_colour_folder
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.variants import create
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

DROPPED = "the model takes grey images, so colours are dropped;"
ADVICE = "to learn from colours, choose --channels 3"
QUICK = ["--steps", "3", "--batch-size", "8", "--device", "cpu", "--threads", "1", "--precision", "float32"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a grey model and a folder of coloured images."""
    torch.manual_seed(0)
    network = create(
        "ViT-Pico/4", width=16, depth=1, heads=2, mlp_width=16, num_classes=3, image_size=(8, 12), channels=1
    )
    Bundle(network, ("blue", "green", "red"), Preprocess(image_size=(8, 12), channels=1)).save(tmp_path / "grey")
    make_colour_folder(tmp_path / "colours")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        pytest.param(["train", "--init", "grey", "--data", "colours", "--image-size", "8", "12", "--run", "r", *QUICK],
                     ADVICE, marks=pytest.mark.slow),
        pytest.param(["train", "--data", "colours", "--channels", "1", "--variant", "ViT-Pico/8", "--image-size", "16",
                      "16", "--run", "r", *QUICK], ADVICE, marks=pytest.mark.slow),
        pytest.param(["finetune", "grey", "--data", "colours", "--image-size", "8", "12", "--run", "r", *QUICK],
                     ADVICE, marks=pytest.mark.slow),
        (["evaluate", "grey", "--data", "colours", "--device", "cpu"], ""),
        (["embed", "grey", "--data", "colours", "--out", "features", "--device", "cpu", "--no-cache"], ""),
        (["predict", "grey", "colours", "--device", "cpu"], ""),
    ],
    ids=lambda words: words[0] if words else "",
)  # fmt: skip
@pytest.mark.usefixtures("place")
def test_dropped_colours_are_told(words: list[str], advice: str, cli: Cli) -> None:
    captured = cli.call(*words)
    shown = " ".join((captured.out + captured.err).split())
    assert DROPPED in shown and advice in shown
    if words[0] == "finetune":
        page = Path("r/report.html").read_text(encoding="utf-8")
        assert DROPPED in page and "To learn from colours, train with --channels 3." in page


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "finetune"])
def test_three_channels_keep_the_colours_of_a_grey_start(command: str, place: Path, cli: Cli) -> None:
    start = ["--init", "grey"] if command == "train" else ["grey"]
    words = [command, *start, "--data", "colours", "--channels", "3", "--image-size", "8", "12", "--run", "r", *QUICK]
    shown = " ".join(cli.shows(*words, "--validation-share", "0.2").split())
    assert DROPPED not in shown
    assert "the grey model was given 3 channels: the weights of its first layer were repeated" in shown
    bundle = load(place / "r")
    assert (bundle.network.config.channels, bundle.preprocess.channels) == (3, 3)
    assert json.loads((place / "r" / "run.json").read_text())["init"]["network"]["channels"] == 3
    assert DROPPED not in cli.call("predict", "r", "colours").err
    if command == "finetune":
        assert DROPPED not in (place / "r" / "report.html").read_text(encoding="utf-8")
