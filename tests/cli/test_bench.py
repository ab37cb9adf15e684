"""Tests of `vitrail bench`, `vitrail bench data` and `vitrail bench serve`."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Cli
from tests.serving.conftest import make_bundle
from vitrail.bench.serving import started
from vitrail.cli import main
from vitrail.training.stop import interrupted_by_signals

SHAPE = (
    "--image-size", "28", "21", "--num-classes", "5", "--width", "32", "--depth", "2", "--heads", "2", "--mlp-width",
    "48",
)  # fmt: skip
TINY = (*SHAPE, "--batch-size", "4", "--repetitions", "2", "--warmup", "1")


@pytest.mark.slow
def test_json_of_training(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("timm", "timm.models"):
        monkeypatch.setitem(sys.modules, name, None)
    result = cli.json("bench", "train", "ViT-Pico/7", *TINY, "--against", "timm, torchvision", "--precision", "bf16")
    assert result["workload"]["image_size"] == [28, 21] and result["workload"]["precision"] == "bf16"
    assert [row["library"] for row in result["rows"]] == ["vitrail", "products alone"]
    for row in result["rows"]:
        assert len(row["seconds"]) == 2 and list(row["images_per_second"]) == ["median", "low", "high"]
        assert {"ran_with", "gflops", "share_of_limit", "vitrail_times_as_fast", "memory_bytes"} <= row.keys()
    assert result["skipped"].pop("timm").startswith("is not installed")
    assert result["skipped"] == {"torchvision": "supports only square images, not 28 x 21"}
    assert "products" in result["breakdown"]


@pytest.mark.slow
def test_tables_of_inference_and_of_loading(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["infer", "ViT-Pico/7", *TINY, "--against", "torchvision", "--memory", "--precision", "float32"]
    text = cli.shows("bench", *words, "--threads", "1", "--device", "cpu")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in text
    assert any(line.split()[:2] == ["vitrail", "float32"] and line.split()[-1] == "1.00x" for line in lines)
    assert any(line.startswith("products alone  float32") and " 100% " in line for line in lines)
    assert "skipped: torchvision: supports only square images, not 28 x 21" in text
    assert any(line.startswith("vitrail") and line.split()[-1] == "MB" for line in lines)
    before = torch.get_num_threads()
    result = cli.json("bench", "infer", "ViT-Pico/7", *TINY, "--threads", "2", "--no-profile")
    assert result["machine"]["threads"] == 2 and torch.get_num_threads() == before
    assert result["breakdown"] is None and any(line.split()[:1] == ["normalisation"] for line in lines)
    shown = cli.shows("bench", "load", "ViT-Pico/7", *SHAPE, "--warmup", "1", "--repetitions", "1")
    assert "…" not in shown and "vitrail predict" in shown and "safetensors.torch.load_file" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "option", "least"), [("train", ("--patch-dropout", "0.5"), 0.3), ("infer", ("--reduce-tokens", "4"), 0.5)]
)
def test_fewer_tokens_have_fewer_products(kind: str, option: tuple[str, str], least: float, cli: Cli) -> None:
    words = kind, "ViT-Pico/7", *TINY, "--no-profile", "--precision", "float32"
    whole, fewer = cli.json("bench", *words), cli.json("bench", *words, *option)
    assert least < fewer["product_flops"] / whole["product_flops"] < 0.9
    assert least < fewer["workload"]["flops"] / whole["workload"]["flops"] < 0.9


@pytest.mark.slow
def test_scaling(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["train", "ViT-Pico/7", *TINY, "--scaling", "depth"]
    grown = cli.json("bench", *words)["scaling"]
    assert grown["axis"] == "depth" and [point["value"] for point in grown["points"]] == [1, 2]
    assert set(grown["exponents"]) == {"seconds", "flops", "memory", "predicted_bytes", "activation_bytes"}
    text = cli.shows("bench", *words)
    assert "grows as depth to the power of" in text and "…" not in text


@pytest.mark.slow
def test_kinds_of_attention(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.bench.compare.SIDES", (3, 4))
    monkeypatch.setattr("vitrail.bench.compare.measure_memory", lambda entry, workload: 10**6)
    words = ["train", "ViT-Pico/7", *SHAPE[3:], "--batch-size", "2", "--repetitions", "1", "--warmup", "0"]
    words += ["--attention", "blocks:size=2,axial", "--scaling", "tokens"]
    found = cli.json("bench", *words)["attention"]
    assert [point["attention"] for point in found["points"]] == 2 * ["full", "blocks:size=2", "axial"]
    assert found["points"][4]["patches"] == 16 and found["points"][4]["memory_bytes"] == 10**6
    monkeypatch.setenv("COLUMNS", "80")
    text = cli.shows("bench", *words)
    assert "fewer FLOPs than full from" in text and "measured faster from" in text and "…" not in text


@pytest.mark.slow
def test_largest_batch(cli: Cli) -> None:
    words = ["train", "ViT-Pico/7", *SHAPE[3:], "--image-size", "224", "224", "--largest-batch"]
    largest = cli.json("bench", *words, "--memory-limit", "500MB")["largest_batch"]
    assert largest["limit"] == 500_000_000 and 1 <= largest["batch"] <= 2 * largest["predicted"]


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
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode(errors="replace")
        except OSError:  # the process has ended meanwhile
            continue
        if str(path) in words:
            found.append(words)
    return found
