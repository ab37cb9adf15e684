"""Tests of `vitrail bench`."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.cli.conftest import Cli

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
