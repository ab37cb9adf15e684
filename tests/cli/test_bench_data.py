"""Tests of `vitrail bench data`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from vitrail.cli import main


@pytest.mark.slow
def test_a_table_of_photographs_in_three_forms(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path))
    words = "bench data --images 4 --batch-size 2 --image-size 21 28 --threads 1 --repetitions 1 --warmup 0"
    assert main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("4 images of " in line and "to 21 x 28, in batches of 2, 1 thread" in line for line in lines)
    rows = [line for line in lines if line.startswith(("folder", "shards", "Parquet", "decoding alone", "Pillow,"))]
    assert len(rows) == 5 and rows[3].split()[-2] == "1.00x" and rows[4].split()[-1] == "1.00x"


def test_json_of_a_data_set(cli: Cli, colour_folder: Path) -> None:
    words = ["bench", "data", str(colour_folder), "--images", "20", "--batch-size", "8", "--image-size", "5", "7"]
    printed = cli.call(*words, "--repetitions", "2", "--json")
    found = json.loads(printed.out)
    assert "--images 20: each round reads 16" in " ".join(printed.err.split())
    assert found["images"] == 16
    assert list(found["seconds"]) == [str(colour_folder), "decoding alone", "Pillow, one by one"]
    assert [len(times) for times in found["seconds"].values()] == [2, 2, 2]
    assert cli.json("bench", "data", "--entries", "150")["images"] == 150


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--against", "tim"], "unknown loader 'tim' in --against; nearest: timm"),
        (["SPEC", "--against", "timm"], "--against: it needs generated images; leave SPEC out"),
        (["SPEC", "--file-size", "30", "40"], "--file-size: it needs generated images; leave SPEC out"),
        (["--against", "datasets"], "--against datasets: datasets is not installed"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: list[str], message: str, cli: Cli) -> None:
    assert message in " ".join(cli.refuses("bench", "data", *words).split())
