"""Tests of the comparison of libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import truediv
from pathlib import Path

import pytest

from tests.bench.conftest import MakeWork
from vitrail.bench.compare import ALONE, _row, compare
from vitrail.bench.step import OURS, Entry


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


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("text", "best", "found", "skipped"),
    [
        (FAILING, True, ["float32"], {"vit-pytorch compiled": "no C++ compiler"}),
        (FULL, False, [], {"vit-pytorch": "CUDA out of memory"}),
    ],
)
def test_a_peer_whose_compiler_fails_or_that_needs_more_memory_is_skipped(
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
