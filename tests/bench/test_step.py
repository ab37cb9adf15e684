"""Tests of the steps that a comparison measures, with our network and a fake library, of their parts and memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests.bench.conftest import MakeWork
from vitrail.bench.peers import PEERS
from vitrail.bench.step import (
    CATEGORIES,
    OURS,
    PRODUCTS,
    Entry,
    Runner,
    breakdown,
    category_of,
    entries,
    find_largest,
    largest_batch,
    make_step,
    measure_memory,
)
from vitrail.bench.workload import Format, Workload
from vitrail.errors import ConfigError
from vitrail.models.linear.float32 import has_onednn
from vitrail.models.variants import variant_config

SETTINGS = ("matched", "best", "graphs")
GRAPHS = "reduce-overhead"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """A fake library called timm that builds one linear layer, and a list of the networks that it has built."""
    built: list[nn.Module] = []

    def make(config: Any) -> nn.Module:
        pixels = config.channels * config.image_size[0] * config.image_size[1]
        built.append(nn.Sequential(nn.Flatten(), nn.Linear(pixels, config.num_classes)))
        return built[-1]

    monkeypatch.setitem(PEERS, "timm", make)
    return built


def test_every_setting_is_listed_once(tiny_work: MakeWork) -> None:
    work = tiny_work(precision="bf16")
    assert entries(work) == [Entry(OURS)]
    names = [(entry.library, entry.describe(work)) for entry in entries(work, ("timm",), best=True)]
    assert names == [
        (OURS, "bf16"), (OURS, "bf16 compiled"), ("timm", "float32"), ("timm", "bf16"), ("timm", "bf16 compiled"),
    ]  # fmt: skip
    assert entries(tiny_work(), ("timm",)) == [Entry(OURS), Entry("timm")]
    assert entries(tiny_work(), compile="on") == [Entry(OURS), Entry(OURS, "best")]
    assert entries(tiny_work(), best=True, compile="graphs") == [Entry(OURS, name) for name in SETTINGS]
    float8 = tiny_work(precision="bf16", float8=True)
    described = [
        entry.describe(float8) for entry in (Entry(OURS, "graphs"), Entry(OURS), Entry("timm"), Entry(PRODUCTS))
    ]
    assert described == ["float8 graphs", "float8", "bf16", "bf16"], "8 bits are ours alone"


@pytest.mark.parametrize(("settings", "dtype"), [("default", torch.float32), ("matched", torch.bfloat16)])
def test_a_step_trains_in_its_precision(
    tiny_work: MakeWork, stand_in: list[nn.Module], settings: Any, dtype: torch.dtype
) -> None:
    step = make_step(Entry("timm", settings), tiny_work(precision="bf16"))
    (network,) = stand_in
    seen: list[torch.dtype] = []
    network.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    before = [parameter.detach().clone() for parameter in network.parameters()]
    step()
    assert seen == [dtype] and network.training
    assert all(not torch.equal(old, new) for old, new in zip(before, network.parameters(), strict=True))
    assert all(parameter.grad is None and parameter.dtype == torch.float32 for parameter in network.parameters())


def test_a_prediction_keeps_nothing(tiny_work: MakeWork, stand_in: list[nn.Module]) -> None:
    work = tiny_work(task="infer", precision="bf16")
    for library in (OURS, "timm"):
        logits = make_step(Entry(library), work)()
        assert isinstance(logits, torch.Tensor) and logits.shape == (3, 5)
        assert logits.is_inference() and logits.dtype == torch.bfloat16
    assert not stand_in[0].training


@pytest.mark.parametrize(("settings", "compiles"), [("matched", []), ("best", [{}]), ("graphs", [{"mode": GRAPHS}])])
def test_ours_is_compiled_block_by_block(
    tiny_work: MakeWork, settings: Any, compiles: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append(options))
    make_step(Entry(OURS, settings), tiny_work())()
    assert compiled == 2 * [{"backend": "inductor", **options} for options in compiles]


def test_products_are_in_bf16_where_ours_are_in_float8(tiny_work: MakeWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.bench.step.LARGE", 2048)  # because some processors take a second for 1,024 in bf16
    plain, float8 = tiny_work(precision="bf16"), tiny_work(precision="bf16", float8=True)
    runners = [Runner(Entry(PRODUCTS), work, 1) for work in (plain, float8)]
    assert runners[0].flops() == runners[1].flops() > 0.5 * plain.flops
    assert runners[0].large_flops() > 1e8


@pytest.mark.slow
def test_shares_make_a_whole(tiny_work: MakeWork, capfd: pytest.CaptureFixture[str]) -> None:
    shares = breakdown(make_step(Entry(OURS), tiny_work(batch=16)), torch.device("cpu"))
    assert list(shares) == [*CATEGORIES, "the rest"] and sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) > 0 and capfd.readouterr().err == ""


def test_categories_are_those_of_the_beginning_of_names() -> None:
    names = {"aten::mm": "products", "aten::gelu": "activation", "my::aten::gelu": "the rest", "aten::sum": "the rest"}
    assert {name: category_of(name) for name in names} == names


def test_the_standard_error_comes_back_after_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    step = Mock(side_effect=[None, RuntimeError("no")])
    with pytest.raises(RuntimeError, match="no"):
        breakdown(step, torch.device("cpu"))
    os.write(2, b"seen")
    assert capfd.readouterr().err == "seen"


MARGIN = 0.15
"""Tolerance. The formula is within 10 % of the measurement, and unused heap memory differs by up to 9 % between
runs."""

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
BIG = {"image_size": (224, 224), "width": 64}
"""Settings with which one image keeps some megabytes."""


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 7, 8, 31, 33, 100, 1000, 1023, 77_777, 2**20])
def test_the_largest_is_exact_where_it_is_small_and_close_where_it_is_not(largest: int) -> None:
    calls: list[int] = []

    def fits(batch: int) -> bool:
        calls.append(batch)
        return batch <= largest or largest == 2**20  # a search without an end stops there

    found = find_largest(fits)
    assert found == largest if largest < 100 or largest == 2**20 else 0.96 * largest <= found <= largest
    assert len(calls) < 30


@linux
@pytest.mark.slow
@pytest.mark.skipif(not has_onednn(torch.bfloat16), reason="bfloat16 in software takes half an hour")
def test_a_base_network_trains_within_six_gigabytes() -> None:
    work = Workload(name="ViT-B/16", config=variant_config("ViT-B/16"), batch=32, precision="bf16")
    measured = measure_memory(Entry(OURS), work)
    assert measured < 6e9 and measured == pytest.approx(work.predicted_bytes, rel=MARGIN)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(
    ("name", "batch", "fields"), [("ViT-S/32", 32, {}), ("ViT-S/16", 16, {"pool": "gap"}), ("BiT-R50x1", 8, {})]
)
def test_a_process_needs_what_the_closed_form_says(
    name: str, batch: int, fields: dict[str, Any], precision: Format
) -> None:
    work = Workload(name=name, config=variant_config(name, **fields), batch=batch, precision=precision)
    assert measure_memory(Entry(OURS), work) == pytest.approx(work.predicted_bytes, rel=MARGIN)


def test_the_free_memory_can_fall_after_it_was_read(tiny_work: MakeWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.machine.available_memory", lambda device: 0)
    monkeypatch.setattr("vitrail.bench.step.in_process", lambda *given: 10**15)
    with pytest.raises(ConfigError, match="is not above the 1,000,000,000,000,000 bytes that Python"):
        largest_batch(tiny_work())


@pytest.mark.slow
@linux
def test_a_limit_on_the_process_limits_the_batch(tiny_work: MakeWork) -> None:
    work = tiny_work(**BIG)
    with pytest.raises(ConfigError, match=r"bytes is not above the [\d,]+ bytes that Python and torch use") as refused:
        largest_batch(work, 1_000_000)
    taken = int(str(refused.value).split("above the ")[1].split()[0].replace(",", ""))
    found = largest_batch(work, taken + 40_000_000)
    assert found["limit"] - found["left"] == pytest.approx(taken, rel=0.1)
    assert 1 <= found["batch"] <= 2 * found["predicted"] and 2 <= found["predicted"] <= 100
