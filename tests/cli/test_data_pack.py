"""Tests of `vitrail data pack`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import Cli
from vitrail.cli import main
from vitrail.data.formats.tar import open_shards
from vitrail.data.sources import open_data


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Return a function that makes two class folders with the given number of images in each."""
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))

    def make(count: int) -> Path:
        random = np.random.default_rng(0)
        for name in ("daisy", "rose"):
            (tmp_path / "flowers" / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (20, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "flowers" / name / f"{number:04}.png")
        return tmp_path / "flowers"

    return make


def test_a_folder_is_packed_and_said_to_be(folder: Callable[[int], Path], tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "out"
    source = folder(3)
    (source / "rose" / "bad.jpg").write_bytes(b"no image")
    words = ["data", "pack", str(source), str(out), "--shard-size", "8kB", "--max-side", "10", "--workers", "2"]
    shown = cli.shows(*words)
    assert "train: 7 images, 6 of them scaled down, in 4 shards of 0.0 MB in all" in shown
    assert (
        "1 of the images cannot be read and were copied as they are:\n  rose/bad.jpg: is not an image in a format"
        in shown
    )
    assert f"The shards are in {out}. Train on them: vitrail train --data {out}" in shown
    assert len(open_shards(str(out), None).train) == 7
    assert cli.shows(*words) == shown


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_soft_pseudo_labels_become_classes_and_this_is_said(
    labels: str, model: Path, some_images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = str(tmp_path / "labels"), tmp_path / "out"
    words = ["--teacher", str(model), "--pseudo-labels", labels, "--confidence", "0", "--no-balance", "--device", "cpu"]
    assert main(["data", "label", f"{some_images}[:30]", "--out", folder, *words]) == 0
    labelled = open_data(folder, validation_share=0.0).train
    capsys.readouterr()
    assert main(["data", "pack", folder, str(out)]) == 0
    is_told = "only the most likely class of each image is packed. To train on the" in capsys.readouterr().out
    assert is_told == (labels == "soft")
    packed = open_shards(str(out), None).train
    assert [packed.target(row) for row in range(30)] == [labelled.target(row) for row in range(30)]


def test_ctrl_c_stops_with_code_75_and_says_how_to_go_on(
    folder: Callable[[int], Path], tmp_path: Path, cli: Cli
) -> None:
    source, out = folder(60), tmp_path / "out put"
    words = ["data", "pack", str(source), str(out), "--shard-size", "30000"]

    def interrupt() -> None:
        while not list(out.glob("train-*.tar")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt)
        errors = cli.call(*words, code=75).err
    assert errors.startswith("vitrail: stopped: ") and "Traceback" not in errors
    assert errors.endswith(f"\nContinue with: vitrail data pack {source} '{out}' --shard-size 30000\n")
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    cli.shows(*words)
    assert kept and all((out / name).stat().st_mtime_ns == changed for name, changed in kept.items())
    assert len(open_shards(str(out), None).train) == 120
