"""Tests of commands that several processes run together: the results of one process, printed once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.make import small_model
from tests.several import command, in_processes
from vitrail.training.log import read_journal

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_model(tmp_path / "model", ("blue", "green", "red"), mean=(0.4,), std=(0.3,))


@pytest.mark.parametrize("cached", [True, False])
def test_evaluate_measures_the_same(cached: bool, model: Path, colour_folder: Path, tmp_path: Path) -> None:
    (colour_folder / "red" / "broken.png").write_bytes(b"no image")
    words = ("evaluate", str(model), "--data", str(colour_folder), "--by", "accuracy,linear,knn", "--json",
             "--batch-size", "4", "--precision", "float32", "--device", "cpu")  # fmt: skip
    found = []
    for world in (1, 2):
        store = ("--cache", str(tmp_path / f"cache-{world}")) if cached else ("--no-cache",)
        found.append(in_processes(world, command, *words, *store))
    (alone,), (first, second) = found
    assert [one.error for one in (alone, first, second)] == [None] * 3
    assert first.result[0] == second.result[0] == 0 and second.result[1:] == ("", "")
    assert json.loads(first.result[1]) == json.loads(alone.result[1])
    assert "skipped red/broken.png" in first.result[2]


@pytest.mark.parametrize("cached", [True, False])
def test_embed_writes_the_same_bytes(cached: bool, model: Path, colour_folder: Path, tmp_path: Path) -> None:
    (colour_folder / "blue" / "broken.png").write_bytes(b"no image")
    words = ("embed", str(model), "--data", str(colour_folder), "--batch-size", "4", "--precision", "float32",
             "--device", "cpu")  # fmt: skip
    for world in (1, 3):
        store = ("--cache", str(tmp_path / f"cache-{world}")) if cached else ("--no-cache",)
        found = in_processes(world, command, *words, "--out", str(tmp_path / f"out-{world}"), *store)
        assert [one.error for one in found] == [None] * world
        assert [one.result[0] for one in found] == [0] * world and found[0].result[1].count("features of") == 1
    one, three = (
        {path.relative_to(tmp_path / name).as_posix(): path for path in (tmp_path / name).rglob("*") if path.is_file()}
        for name in ("out-1", "out-3")
    )
    assert one.keys() == three.keys() and "train/features.npy" in one
    assert all(one[name].read_bytes() == three[name].read_bytes() for name in one)
    assert np.load(one["train/features.npy"]).shape[1] == 16


def test_train_chooses_settings_for_data_by_all_processes(colour_folder: Path, tmp_path: Path) -> None:
    words = ("train", "--data", str(colour_folder), "--budget", "8s", "--run", str(tmp_path / "run"), "--device", "cpu")
    first, second = in_processes(2, command, *words)
    assert (first.error, second.error) == (None, None)
    assert first.result[0] == second.result[0] == 0 and second.result[1:] == ("", "")
    assert "this machine trains about" in first.result[1] and first.result[1].count("The model is in") == 1
    assert read_journal(tmp_path / "run" / "journal.jsonl")[-1]["event"] == "finished"
