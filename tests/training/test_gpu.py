"""Tests of training on a GPU: order, automatic bf16, compiled blocks, 8 bits, and no waiting for the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vitrail
from tests.training.jobs import Make, values_of
from vitrail.cli import main
from vitrail.errors import ConfigError
from vitrail.machine import has_bf16_matrix_units, pick_device
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.job import prepare
from vitrail.training.loop import train_step
from vitrail.training.run import train
from vitrail.training.state import make_network, make_state, random_state, restore_random_state
from vitrail.weights.load import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("types_unchecked"),  # type checks would be compiled as well
    pytest.mark.filterwarnings("default"),  # the compiler warns of its own parts
]


def losses(folder: Path) -> list[float]:
    return [loss for (loss,) in values_of(folder, "loss")]


def test_auto_picks_the_gpu_and_bf16() -> None:
    device = pick_device("auto")
    assert device.type == "cuda"
    assert has_bf16_matrix_units(device) == (torch.cuda.get_device_capability() >= (8, 0))


def test_float32_follows_the_cpu(tiny: Make, tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        train(tiny(device=device, run=str(tmp_path / device), steps=12))
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


def test_a_model_from_the_gpu_predicts_alike_on_the_cpu(tiny: Make) -> None:
    result = train(tiny(device="cuda", precision="bf16", steps=12))
    paths = [example.path for example in result.examples]
    here, there = (load(result.folder, device=name).predict(paths) for name in ("cpu", "cuda"))
    for ours, theirs in zip(here, there, strict=True):
        assert dict(ours.ranking) == pytest.approx(dict(theirs.ranking), abs=1e-4)
    assert result.summary["peak_memory_bytes"] == torch.cuda.max_memory_allocated()


def test_the_generators_of_all_devices_come_back() -> None:
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    torch.manual_seed(8)
    state = random_state()
    assert len(state["cuda"]) == len(devices)
    expected = [torch.rand(9, device=device) for device in devices]
    torch.manual_seed(9)
    restore_random_state(json.loads(json.dumps(state)))
    assert all(
        torch.equal(torch.rand(9, device=device), numbers) for device, numbers in zip(devices, expected, strict=True)
    )


def test_a_run_continues_on_the_gpu_what_began_on_the_cpu_and_back(tiny: Make) -> None:
    for first, second in (("cpu", "cuda"), ("cuda", "cpu")):
        config = tiny(device=first, steps=12, overwrite=True)
        result = train(config)
        setup = prepare(config.override(device=second))
        state = make_state(setup, make_network(setup, None)[0])
        assert Checkpoints(result.folder / "checkpoints").restore(state) == [] and state.step == 12
        assert next(state.objective.parameters()).device.type == second
        state.batches.close()


@pytest.mark.parametrize("how", ["on", "graphs"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_compiled_training_follows_the_plain_one(tiny: Make, tmp_path: Path, how: str, accumulation: int) -> None:
    """Evaluations happen in between, as in every run. There is no dropout, which draws other numbers when compiled."""
    fields = {"device": "cuda", "steps": 12, "accumulation": accumulation, "dropout": 0.0, "stochastic_depth": 0.0}
    for name in ("off", how):
        train(tiny(compile=name, run=str(tmp_path / name), **fields))
    assert losses(tmp_path / how) == pytest.approx(losses(tmp_path / "off"), rel=1e-3)
    found, expected = (load(tmp_path / name).network.state_dict() for name in (how, "off"))
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("how", ["off", "on"])
def test_float8_trains_or_is_refused(tiny: Make, tmp_path: Path, how: str) -> None:
    fields = {"device": "cuda", "steps": 40, "compile": how, "dropout": 0.0, "stochastic_depth": 0.0}
    if torch.cuda.get_device_capability() < (8, 9):
        with pytest.raises(ConfigError, match=r"^precision='float8' needs CUDA of compute capability 8\.9 or more"):
            train(tiny(precision="float8", **fields))
        return
    for precision in ("bf16", "float8"):
        train(tiny(precision=precision, run=str(tmp_path / precision), **fields))
    ends = {precision: sum(losses(tmp_path / precision)[-10:]) / 10 for precision in ("bf16", "float8")}
    assert ends["float8"] < losses(tmp_path / "float8")[0]
    assert ends["float8"] == pytest.approx(ends["bf16"], rel=0.1)


class Attention(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in func.name():
            self.kernels.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="needs Ampere")
@pytest.mark.parametrize("variant", ["ViT-B/16", "ViT-L/16", "ViT-H/14"])
def test_attention_in_bf16_is_one_fused_kernel_without_a_matrix_of_weights(variant: str) -> None:
    network = vitrail.create(variant, depth=2, pool="gap").cuda()
    with Attention() as seen:
        with torch.autocast("cuda", torch.bfloat16):
            logits = network(torch.randn(2, 3, 224, 224, device="cuda"))
        logits.float().sum().backward()
    assert len(seen.kernels) == 4
    assert all("flash" in name or "cudnn" in name for name in seen.kernels), seen.kernels


@pytest.mark.parametrize("fields", [{}, {"average": 0.9, "layer_decay": 0.5, "class_weights": "balanced"}], ids=str)
def test_a_step_waits_for_nothing_on_the_gpu(
    fields: dict[str, Any], tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing the learning rate does not wait either. CUDA itself reports every wait."""

    def strictly(job: Any, state: Any, batch: Any) -> Any:
        if state.step < 2:
            return train_step(job, state, batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return train_step(job, state, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr("vitrail.training.loop.train_step", strictly)
    train(tiny(device="cuda", precision="bf16", steps=6, **fields))


def test_bench_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ViT-S/16", "--batch-size", "8", "--device", "cuda", "--compile", "graphs", "--memory", "--json"]
    assert main(["bench", "train", *words, "--repetitions", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["ran_with"] for row in result["rows"]] == ["bf16", "bf16", "bf16 graphs"] and not result["skipped"]
    assert all(row["share_of_limit"] > 0.05 for row in result["rows"])
    assert result["large_gflops"] > max(row["gflops"] for row in result["rows"])
