"""Tests of the comparison of libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from operator import truediv
from pathlib import Path

import pytest

from vitrail.bench.compare import ALONE, _ready, _row, compare
from vitrail.bench.step import OURS, Entry
from vitrail.bench.workload import Workload
from vitrail.errors import ConfigError


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm cannot be imported; vit-pytorch is one dense layer."""
    (tmp_path / "timm.py").write_text("raise OSError('built for another torch')")
    (tmp_path / "vit_pytorch.py").write_text(
        "from torch.nn import Flatten, Linear, Sequential\n"
        "def ViT(image_size, channels, num_classes, **sizes):\n"
        "    return Sequential(Flatten(), Linear(channels * image_size[0] * image_size[1], num_classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.slow
def test_ours_comes_first_and_those_that_cannot_are_named(tiny_work: Callable[..., Workload]) -> None:
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
def test_figures_of_a_row_follow_from_its_times(tiny_work: Callable[..., Workload]) -> None:
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
    busy: int, share: float | None, tiny_work: Callable[..., Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [2.0] * busy + [0.5] * 2  # of the products, in each measurement; a step of ours takes one second

    def measured(timers: Iterable[Entry], **_: int) -> dict[Entry, list[float]]:
        products = seconds.pop(0)
        return {entry: [products if entry == ALONE else 1.0] * 3 for entry in timers}

    monkeypatch.setattr("vitrail.bench.compare.interleave", measured)
    ours, products = compare(tiny_work(), profile=False)["rows"]
    assert (ours["share_of_limit"], products["share_of_limit"]) == (share, 1) and len(seconds) == busy


def test_compiled_is_set_beside_compiled(tiny_work: Callable[..., Workload]) -> None:
    seconds = {(OURS, "matched"): 4.0, (OURS, "best"): 2.0, ("timm", "matched"): 8.0, ("timm", "best"): 3.0}
    times = {Entry(library, settings): [each] for (library, settings), each in seconds.items()}
    times |= {ALONE: [1.0], Entry("timm", "default"): [12.0]}
    ratios = {entry: _row(entry, tiny_work(), times, None)["vitrail_times_as_fast"] for entry in times}
    assert ratios[Entry("timm", "best")] == 1.5 and ratios[Entry("timm")] == 2
    assert ratios[Entry("timm", "default")] == 3, "float32, not compiled, beside ours as it was asked for"
    assert ratios[Entry(OURS, "best")] == 0.5 and ratios[ALONE] == 0.25
    del times[Entry(OURS, "best")]
    assert _row(Entry("timm", "best"), tiny_work(), times, None)["vitrail_times_as_fast"] == 0.75


@pytest.mark.slow
@pytest.mark.usefixtures("stand_ins")
def test_a_compiler_that_fails_is_no_error_of_ours(tiny_work: Callable[..., Workload], tmp_path: Path) -> None:
    with (tmp_path / "vit_pytorch.py").open("a") as file:
        file.write("import torch\ndef fail(network):\n    raise RuntimeError('no C++ compiler\\nand much more')\n")
        file.write("torch.compile = fail\n")
    work = tiny_work(precision="bf16", task="infer")
    found, skipped = ready([Entry("vit-pytorch"), Entry("vit-pytorch", "best")], work)
    assert found == [Entry("vit-pytorch")]
    assert skipped == {"vit-pytorch compiled": "no C++ compiler"}


def ready(wanted: list[Entry], work: Workload) -> tuple[list[Entry], dict[str, str]]:
    with ExitStack() as stack:
        workers, skipped = _ready(wanted, work, stack)
        return list(workers), skipped


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_compiled_networks_take_part(tiny_work: Callable[..., Workload]) -> None:
    result = compare(tiny_work(task="infer"), best=True, repetitions=1, warmup=0, profile=False)
    assert [row["ran_with"] for row in result["rows"]] == ["float32", "float32", "float32 compiled"] or result[
        "skipped"
    ]


@pytest.mark.slow
def test_a_peer_that_needs_more_memory_is_skipped(
    tiny_work: Callable[..., Workload], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vit_pytorch.py").write_text(
        "import torch\ndef ViT(**sizes):\n    raise torch.OutOfMemoryError('CUDA out of memory. Tried 9 GB')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with ExitStack() as stack:
        workers, skipped = _ready([Entry(OURS), Entry("vit-pytorch")], tiny_work(), stack)
        assert list(workers) == [Entry(OURS)]
    assert skipped == {"vit-pytorch": "CUDA out of memory"}


def test_unknown_peers_are_refused_before_anything_is_built(tiny_work: Callable[..., Workload]) -> None:
    with pytest.raises(ConfigError, match="unknown library 'keras'"):
        compare(tiny_work(), peers=["keras"])
