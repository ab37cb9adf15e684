"""Tests of a user's first steps: a messy folder is checked, trained on and predicted from, and is never changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.make import make_colour_folder
from vitrail.cli import main


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """Images of three colours in different sizes, with all kinds of images and of broken files that folders can
    have."""
    root = make_colour_folder(tmp_path / "colours", images=30)
    red = np.full((20, 31, 3), (230, 40, 40), np.uint8)
    Image.fromarray(red).convert("CMYK").save(root / "red" / "cmyk.jpg")
    Image.fromarray(red).convert("RGBA").save(root / "red" / "UPPER.PNG")
    Image.fromarray(red).convert("P").save(root / "red" / "palette.gif")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(red).save(root / "red" / "turned.jpg", exif=turned)
    (root / "blue" / "page.jpg").write_text("<html>not found</html>")
    whole = root / "blue" / "00.png"
    (root / "blue" / "cut.png").write_bytes(whole.read_bytes()[:-40])
    shutil.copy(root / "green" / "03.png", root / "green" / "copy of 03.png")
    (root / "green" / "Thumbs.db").write_bytes(b"\0")
    (root / "green" / "deeper").mkdir()
    Image.fromarray(np.full((9, 50, 3), (40, 230, 40), np.uint8)).save(root / "green" / "deeper" / "wide.webp")
    return root


@pytest.mark.slow
def test_check_train_predict(messy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    code = main(["data", "check", str(messy), "--page", str(page), "--max-skipped", "0.1", "--json"])
    report = json.loads(capsys.readouterr().out)
    said = json.dumps(report["findings"])
    assert code == 0 and "blue/page.jpg" in said and "blue/cut.png" in said and "copy of 03.png" in said
    assert "page.jpg" in page.read_text(encoding="utf-8")

    words = "--image-size 16 16 --variant ViT-Pico/8 --width 32 --heads 2 --depth 2 --mlp-width 64 --steps 60"
    settings = "--batch-size 16 --max-skipped 0.1 --crop-area 0.5 1 --randaugment-layers 0 --device cpu --threads 1"
    run = tmp_path / "run"
    assert main(["train", "--data", str(messy), "--run", str(run), *words.split(), *settings.split()]) == 0
    out = capsys.readouterr().out
    assert "are held out for validation" in out and "skipped 1 file" in out and "checked" in out
    journal = (run / "journal.jsonl").read_text().splitlines()
    skipped = {event["key"] for event in map(json.loads, journal) if event["event"] == "skipped"}
    assert skipped == {"blue/page.jpg", "blue/cut.png"}

    assert main(["predict", str(run / "model"), str(messy / "red"), "--json"]) == 0
    labels = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]
    assert len(labels) == 34 and labels.count("red") > 25
