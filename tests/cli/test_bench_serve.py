"""Tests of `vitrail bench serve`."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.serving.conftest import make_bundle
from vitrail.bench.serving import started
from vitrail.cli.bench_serve import _model
from vitrail.training.stop import interrupted_by_signals


@pytest.mark.slow
def test_two_servers_under_two_loads(tmp_path: Path, cli: Cli) -> None:
    folder = make_bundle().save(tmp_path / "model")
    load = ["--clients", "4", "--rates", "0.5", "--seconds", "1", "--rounds", "2"]
    found = cli.json("bench", "serve", folder, *load)
    assert [one["server"] for one in found["servers"]] == ["vitrail", "naive"] * 2
    assert found["servers"][0]["load"] == "4 clients" and found["bare"]["images_per_second"] > 1
    for one in found["servers"]:
        assert one["errors"] == 0 < one["requests"] and one["memory"] > 5e7
        assert 0 < one["p50"] <= one["p95"] <= one["p99"] and one["cpu_seconds"] >= 0
    assert [one["server"] for one in found["overheads"]] == ["vitrail", "naive"]
    for one in found["overheads"]:
        assert one["errors"] == 0 < one["bare"] and one["alone"] > 0 and one["threads"] >= 1
        assert math.isfinite(one["added"]) and one["throughput"] > 0 and one["fraction"] > 0


def test_a_model_in_a_folder_with_a_name_like_that_of_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_bundle().save("ViT-mine/1")
    with _model("ViT-mine/1") as (folder, bundle):
        assert folder == Path("ViT-mine/1") and bundle.classes == make_bundle().classes


@pytest.mark.slow
def test_the_memory_of_servers(tmp_path: Path, cli: Cli) -> None:
    folder = make_bundle().save(tmp_path / "model")
    arguments = ["--requests", "203", "--clients", "3", "--against", "none"]
    points = cli.json("bench", "serve", folder, *arguments)["memory"]
    assert [point["requests"] for point in points] == [20, 40, 60, 81, 101, 121, 142, 162, 182, 203]
    assert all(point["errors"] == 0 and point["memory"] > 3e7 for point in points)


@pytest.mark.slow
def test_a_terminated_measurement_leaves_no_server_behind(tmp_path: Path) -> None:
    folder = make_bundle().save(tmp_path / "model")
    words = ["bench", "serve", str(folder), "--clients", "1", "--rates", "--seconds", "8", "--against", "none"]
    with subprocess.Popen([sys.executable, "-m", "vitrail", *words], stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 300
            while len(_commands_with(folder)) < 2:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and "interrupted" in errors
    assert not _commands_with(folder)


def test_a_signal_while_a_server_starts_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[int] = []

    class Interrupted(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            servers.append(self.pid)
            signal.raise_signal(signal.SIGTERM)  # before the caller has the process

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt), interrupted_by_signals(), started("vitrail", Path("/absent"), "float32", {}):
        pass
    assert len(servers) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(servers[0], 0)


def _commands_with(path: Path) -> list[str]:
    """Return the command lines of all processes that name this path, as the measurement and its servers do."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # the process has ended meanwhile
            continue
        if str(path) in words:
            found.append(words)
    return found
