"""Tests of the measurement of loading times."""

from __future__ import annotations

import pytest
import torch

from tests.bench.conftest import MakeWork
from vitrail.bench import reading as loading
from vitrail.bench.reading import measure_loading
from vitrail.errors import VitrailError

READS = {"vitrail.load", "safetensors.torch.load_file", "plain read"}
PROGRAMS = {"python", "import torch", "import vitrail", "from vitrail import load", "vitrail predict"}


def test_every_way_is_timed(tiny_work: MakeWork, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(loading, "_process", lambda command: lambda: started.append(command))
    config = tiny_work(channels=1).config
    result = measure_loading(config, device=torch.device("cpu"), repetitions=1, warmup=0)
    assert 4 * config.parameters() < result["file_bytes"] < 4 * config.parameters() + 10_000
    assert set(result["first"]) == set(result["loads"]) == READS and set(result["processes"]) == PROGRAMS
    scripts = [command[1] for command in started if command[0] == "-c"]
    assert sorted(scripts) == ["", "from vitrail import load", "import torch", "import vitrail"]
    (predict,) = [command for command in started if command[0] == "-m"]
    assert predict[1:3] == ["vitrail", "predict"] and predict[5:] == ["--device", "cpu"]


def test_a_process_that_fails_is_an_error() -> None:
    loading._process(["-c", "pass"])()
    with pytest.raises(VitrailError, match=r"^python -c raise SystemExit\(.no model.\) failed:\nno model$"):
        loading._process(["-c", "raise SystemExit('no model')"])()
