"""Tests of the comparison of libraries, and of sizes and kinds of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import truediv
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.bench.conftest import MakeWork
from vitrail.bench.compare import (
    ALONE,
    SIDES,
    _row,
    attention_workloads,
    cheaper_from,
    compare,
    exponent,
    faster_from,
    layer_times,
    mixings,
    scaling,
    sweep,
)
from vitrail.bench.step import OURS, Entry
from vitrail.errors import ConfigError
from vitrail.models.attention import ATTENTION
from vitrail.models.cost import attention_costs, layer_costs, of_pixels
from vitrail.models.vit_config import ViTConfig


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that writes a module in place of vit-pytorch. timm cannot be imported."""
    (tmp_path / "timm.py").write_text("raise OSError('built for another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    return lambda text: (tmp_path / "vit_pytorch.py").write_text(text)  # type: ignore[return-value]


LAYER = """
from torch.nn import Flatten, Linear, Sequential

def ViT(image_size, channels, num_classes, **sizes):
    return Sequential(Flatten(), Linear(channels * image_size[0] * image_size[1], num_classes))
"""
"""A stand-in for vit-pytorch of one dense layer."""


@pytest.mark.slow
def test_ours_comes_first_and_those_that_cannot_are_named(tiny_work: MakeWork, stand_in: Callable[[str], None]) -> None:
    stand_in(LAYER)
    peers = ["timm", "vit-pytorch", "torchvision", "timm"]
    result = compare(tiny_work(precision="bf16", task="infer"), peers=peers, repetitions=3, warmup=1)
    names = [(row["library"], row["ran_with"]) for row in result["rows"]]
    assert names == [
        (OURS, "bf16"), ("products alone", "bf16"), ("vit-pytorch", "float32"), ("vit-pytorch", "bf16"),
    ]  # fmt: skip
    assert result["skipped"] == {
        "timm": "cannot be imported (OSError: built for another torch)",
        "torchvision": "supports only square images, not 28 x 21",
    }  # fmt: skip
    assert all(len(row["seconds"]) == 3 for row in result["rows"])
    assert sum(result["breakdown"].values()) == pytest.approx(1)


@pytest.mark.slow
def test_figures_of_a_row_follow_from_its_times(tiny_work: MakeWork) -> None:
    work = tiny_work()
    result = compare(work, repetitions=3, warmup=0, profile=False)
    ours, products = result["rows"]
    assert (
        products["library"] == ALONE.library and ours["vitrail_times_as_fast"] == 1 and products["share_of_limit"] == 1
    )
    assert ours["share_of_limit"] == pytest.approx(sorted(map(truediv, products["seconds"], ours["seconds"]))[1])
    speed, seconds = ours["images_per_second"], sorted(ours["seconds"])
    assert speed["low"] <= speed["median"] <= speed["high"]
    assert speed["median"] == pytest.approx(work.batch / seconds[1])
    assert ours["gflops"] == pytest.approx(work.flops / seconds[1] / 1e9)
    assert result["breakdown"] is None and result["skipped"] == {} and ours["memory_bytes"] is None
    assert result["product_flops"] > 0.5 * work.flops and (result["large_gflops"] or 1) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("busy", "share"), [(1, 0.5), (2, None)])
def test_a_step_faster_than_its_products_is_measured_again(
    busy: int, share: float | None, tiny_work: MakeWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [2.0] * busy + [0.5] * 2  # of the products, in each measurement; a step of ours takes one second

    def measured(timers: Iterable[Entry], **_: int) -> dict[Entry, list[float]]:
        products = seconds.pop(0)
        return {entry: [products if entry == ALONE else 1.0] * 3 for entry in timers}

    monkeypatch.setattr("vitrail.bench.compare.interleave", measured)
    ours, products = compare(tiny_work(), profile=False)["rows"]
    assert (ours["share_of_limit"], products["share_of_limit"]) == (share, 1) and len(seconds) == busy


def test_compiled_is_set_beside_compiled(tiny_work: MakeWork) -> None:
    seconds = {(OURS, "matched"): 4.0, (OURS, "best"): 2.0, ("timm", "matched"): 8.0, ("timm", "best"): 3.0}
    times = {Entry(library, settings): [each] for (library, settings), each in seconds.items()}
    times |= {ALONE: [1.0], Entry("timm", "default"): [12.0]}
    ratios = {entry: _row(entry, tiny_work(), times, None)["vitrail_times_as_fast"] for entry in times}
    assert ratios[Entry("timm", "best")] == 1.5 and ratios[Entry("timm")] == 2
    assert ratios[Entry("timm", "default")] == 3, "float32, not compiled, beside ours as it was asked for"
    assert ratios[Entry(OURS, "best")] == 0.5 and ratios[ALONE] == 0.25
    del times[Entry(OURS, "best")]
    assert _row(Entry("timm", "best"), tiny_work(), times, None)["vitrail_times_as_fast"] == 0.75


FAILING = (
    LAYER
    + """
import torch

def fail(network):
    raise RuntimeError('no C++ compiler\\nand much more')

torch.compile = fail
"""
)
FULL = """
import torch

def ViT(**sizes):
    raise torch.OutOfMemoryError('CUDA out of memory. Tried 9 GB')
"""
BROKEN = "def ViT(**sizes): raise RuntimeError('operator torchvision::nms does not exist')"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("text", "best", "found", "skipped"),
    [
        (FAILING, True, ["float32"], {"vit-pytorch compiled": "no C++ compiler"}),
        (FULL, False, [], {"vit-pytorch": "CUDA out of memory"}),
        (BROKEN, False, [], {"vit-pytorch": "operator torchvision::nms does not exist"}),
    ],
)
def test_a_peer_that_fails_is_skipped(
    tiny_work: MakeWork, stand_in: Callable[[str], None], text: str, best: bool, found: list[str],
    skipped: dict[str, str],
) -> None:  # fmt: skip
    stand_in(text)
    work = tiny_work(task="infer")
    result = compare(work, peers=["vit-pytorch"], best=best, repetitions=1, warmup=0, profile=False)
    assert [row["ran_with"] for row in result["rows"] if row["library"] == "vit-pytorch"] == found
    assert result["skipped"].items() >= skipped.items()
    ours = [row["ran_with"] for row in result["rows"] if row["library"] == OURS]
    assert ours == ["float32", *(["float32 compiled"] if best else [])] or f"{OURS} compiled" in result["skipped"]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0, -1.5])
def test_power_laws_are_found_exactly(power: float) -> None:
    xs = [1, 2, 5, 12]
    assert exponent(xs, [3.7 * x**power for x in xs]) == pytest.approx(power)


def test_values_of_a_sweep(tiny_work: MakeWork) -> None:
    work = tiny_work(batch=48, width=96, heads=3, mlp_width=384, depth=6)
    assert list(sweep(work, "batch")) == [3, 6, 12, 24, 48]
    widths = sweep(work, "width")
    assert list(widths) == [24, 48, 72, 96]
    for width, point in widths.items():
        assert isinstance(point.config, ViTConfig)
        assert point.config.mlp_width == 4 * width and point.config.width % point.config.heads == 0
    sizes = [point.config.image_size for point in sweep(work, "tokens").values()]
    assert (28, 21) in sizes and all(height % 7 == width % 7 == 0 for height, width in sizes)


def test_a_resnet_grows_in_tokens_alone(tiny_work: MakeWork) -> None:
    resnet = tiny_work("BiT-R26x1", image_size=(128, 64))
    assert len(sweep(resnet, "tokens")) >= 3
    with pytest.raises(ConfigError, match="--scaling width needs a transformer; for BiT-R26x1, choose batch or tokens"):
        sweep(resnet, "width")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.slow
def test_time_and_memory_of_every_point(tiny_work: MakeWork) -> None:
    result = scaling(tiny_work(batch=4), "batch", repetitions=2, warmup=0)
    assert [point["value"] for point in result["points"]] == [1, 2, 4]
    assert all(len(point["seconds"]) == 2 and point["memory_bytes"] >= 0 for point in result["points"])
    exponents = result["exponents"]
    assert exponents["flops"] == pytest.approx(1) and exponents["activation_bytes"] == pytest.approx(1)
    weights_stay = exponents["predicted_bytes"]
    assert weights_stay is not None and 0 < weights_stay < 1
    infer = scaling(tiny_work(task="infer"), "batch", repetitions=1, warmup=0)["exponents"]
    assert infer["predicted_bytes"] is None and infer["flops"] == pytest.approx(1)


def test_grids_go_from_196_to_4096_patches(tiny_work: MakeWork) -> None:
    found = attention_workloads(tiny_work(), ["linformer"])
    assert [works["linformer"].config.tokens for works in found.values()] == [side**2 + 1 for side in (14, 28, 48, 64)]
    assert list(found) == [14, 28, 48, 64]
    with pytest.raises(ConfigError, match="--attention: BiT-Pico is a ResNet, which has no attention"):
        attention_workloads(tiny_work("BiT-Pico", image_size=(32, 32)), ["local"])
    with pytest.raises(ConfigError, match="window=15 is larger than the grid of 14 x 14 patches"):
        attention_workloads(tiny_work(), ["local:window=15"])


@pytest.mark.slow
def test_a_kind_is_cheaper_from_the_first_grid_with_fewer_flops(tiny_work: MakeWork) -> None:
    config = tiny_work(pool="gap", class_token=False).config
    found = cheaper_from(config, "linformer:rows=8")
    side = round(found**0.5)
    for patches, is_cheaper in ((side, True), (side - 1, False)):
        one = replace(config, image_size=(7 * patches, 7 * patches), attention="linformer:rows=8")  # type: ignore[arg-type]
        assert (one.training_flops() < replace(one, attention="full").training_flops()) == is_cheaper
    assert cheaper_from(config, "linformer:rows=100000") is None


def test_a_kind_is_faster_from_where_it_stays_faster() -> None:
    times = {"full": (2.0, 2.0, 2.0, 2.0), "axial": (1.0, 3.0, 1.0, 1.0), "lsh": (9.0, 9.0, 9.0, 9.0)}
    points = [
        {"attention": name, "patches": side * side, "median": medians[number]}
        for number, side in enumerate(SIDES)
        for name, medians in times.items()
    ]
    assert faster_from(points, "axial") == 48 * 48
    assert faster_from(points, "lsh") is None


KINDS = tuple(name for name in (*ATTENTION, "axial:sum=on") if name != "full")
CONFIG = ViTConfig(image_size=(16, 18), patch_size=(2, 2), width=16, heads=2, depth=3)
"""A network with a grid of 8 x 9 patches."""


@pytest.mark.slow
def test_what_is_measured_is_what_the_closed_forms_count() -> None:
    expected = {cost.kind: cost.macs for cost in (*layer_costs(73, 16), *attention_costs(CONFIG, KINDS))}
    expected |= {of_pixels(cost.kind): cost.macs for cost in layer_costs(16 * 18, 16)}
    found = mixings(CONFIG, KINDS, most_macs=500_000)
    assert set(found) == set(expected)
    for name, mixing in found.items():
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            mixing.run()
        assert counter.get_total_flops() * mixing.tokens == 2 * expected[name] * mixing.computed, name
    parts = [name for name, mixing in found.items() if mixing.computed < mixing.tokens]
    assert parts == ["self-attention of pixels"]


def test_times_are_scaled_to_all_tokens() -> None:
    times = layer_times(CONFIG, ("axial", "local:window=9"), repetitions=2, warmup=0)
    assert "axial" in times and "local:window=9" not in times, "a window of 9 does not fit 8 x 9 patches"
    assert all(time.seconds > 0 for time in times.values())
    assert times["recurrence of pixels"].computed == 16 * 18
