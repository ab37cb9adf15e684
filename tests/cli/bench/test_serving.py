"""Tests of `vitrail bench serve`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serving.conftest import make_bundle
from vitrail.cli import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--clients", "0"], "--clients: 0 has a value that is not above 0"),
        (["--clients", "--rates"], "leave nothing to measure"),
        (["--against", "litserv"], "--against: 'litserv' is not a server; choices: naive, none"),
        (["ViT-S/17x"], "ViT-S/17x"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_two_servers_under_two_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_bundle().save(tmp_path / "model")
    assert main(["bench", "serve", str(folder), "--clients", "4", "--rates", "0.02", "--seconds", "0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["server"] for one in found["servers"]] == ["vitrail", "naive"] * 2
    assert found["servers"][0]["load"] == "4 clients" and found["bare"]["images_per_second"] > 1
    for one in found["servers"]:
        assert one["errors"] == 0 < one["requests"] and one["memory"] > 5e7
        assert 0 < one["p50"] <= one["p95"] <= one["p99"] and one["cpu_seconds"] >= 0
