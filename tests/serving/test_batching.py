"""Tests of batching: an idle batcher computes at once, a busy one collects, and neighbours do not matter."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from vitrail.serving.batching import Batcher, Compute, TooLate, choose_batch, choose_threads
from vitrail.serving.service import Metrics, ModelOutputs, ServedModel
from vitrail.serving.settings import ServeSettings
from vitrail.weights.bundle import Bundle


class Gate:
    """A network that computes only after `open` is set, and remembers its batches."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = threading.Event()
        self.batches: list[list[float]] = []

    def __call__(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        self.begun.set()
        assert self.open.wait(20)
        self.batches.append(pixels.ravel().tolist())
        if 13 in pixels:
            raise RuntimeError("a fault of the network")
        return {"logits": 2 * pixels}


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def batcher(gate: Gate) -> Iterator[Batcher]:
    compute = Compute(1, 1)
    yield Batcher(gate, compute, largest=3, seconds=20.0)
    gate.open.set()
    compute.stop()


def image(value: float) -> np.ndarray:
    return np.full((1,), value)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_an_idle_batcher_computes_at_once_and_a_busy_one_collects(batcher: Batcher, gate: Gate) -> None:
    async def work() -> list[Any]:
        first = asyncio.ensure_future(batcher.compute([image(1)]))
        await until(gate.begun.is_set)
        rest = [asyncio.ensure_future(batcher.compute([image(value)])) for value in (2, 3, 4, 5)]
        await asyncio.sleep(0)
        gate.open.set()
        rows = await asyncio.gather(first, *rest)
        return [row["logits"].item() for (row,) in rows]

    assert asyncio.run(work()) == [2, 4, 6, 8, 10]
    assert gate.batches == [[1], [2, 3, 4], [5]]


def test_a_batch_alone_has_all_or_the_chosen_threads_and_several_divide_them() -> None:
    compute = Compute(2, 2)
    threads: dict[str, int] = {}
    both, noted, one_left = threading.Barrier(2), threading.Barrier(2), threading.Event()

    def note(name: str) -> None:
        compute.divide()  # as a network does before each block
        threads[name] = torch.get_num_threads()

    def run(pixels: np.ndarray) -> dict[str, np.ndarray]:
        note(f"{pixels[0].item():g} begins")
        if pixels[0] == 2:
            both.wait(20)
            note("2 is not alone")
            noted.wait(20)
            assert one_left.wait(20)
            note("2 is alone again")
        if pixels[0] == 3:
            both.wait(20)
            noted.wait(20)
        return {"logits": pixels}

    async def work() -> None:
        batcher = Batcher(run, compute, largest=1, seconds=20.0)
        await batcher.compute([image(1)])
        second, third = (asyncio.ensure_future(batcher.compute([image(value)])) for value in (2, 3))
        await third
        one_left.set()
        await second
        await Batcher(run, compute, largest=1, seconds=20.0, threads=1).compute([image(4)])
        compute.stop()

    before = torch.get_num_threads()
    asyncio.run(work())
    compute.divide()  # this thread is no worker
    most = min(2, len(os.sched_getaffinity(0)))
    assert threads == {
        "1 begins": most, "2 begins": 1, "3 begins": 1, "2 is not alone": 1, "2 is alone again": most, "4 begins": 1,
    }  # fmt: skip
    assert torch.get_num_threads() == before


def test_networks_divide_the_threads_before_each_block(bundle: Bundle) -> None:
    calls: list[int] = []
    outputs = ModelOutputs(bundle, "float32", lambda: calls.append(len(calls)))
    pixels = np.zeros((1, 3, 12, 10), np.uint8)
    outputs.run("classes")(pixels)
    assert len(calls) == 2  # the network has two blocks
    outputs.run("embedding")(pixels)
    bundle.predict([pixels[0].transpose(1, 2, 0)])  # the network itself has no hooks
    assert len(calls) == 4


def test_images_of_clients_that_have_gone_need_no_memory(batcher: Batcher, gate: Gate) -> None:
    async def work() -> None:
        first = asyncio.ensure_future(batcher.compute([image(1)]))
        await until(gate.begun.is_set)
        pixels = image(2)
        waits = weakref.ref(pixels)
        gone = asyncio.ensure_future(batcher.compute([pixels]))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        del pixels, gone
        await asyncio.sleep(0.01)  # the event loop forgets the task
        gc.collect()
        assert waits() is None  # although the batcher still computes the first image
        gate.open.set()
        await first

    asyncio.run(work())


def test_workers_compute_a_short_queue_one_by_one_and_a_long_one_in_batches(gate: Gate) -> None:
    def batches(images: int) -> list[list[float]]:
        """Return the batches of images 1, 2, ... that arrive while both workers compute others."""
        gate.open.clear()
        gate.batches.clear()

        async def work() -> None:
            compute = Compute(2, 2)
            batcher = Batcher(gate, compute, largest=3, seconds=20.0)
            first = [asyncio.ensure_future(batcher.compute([image(value)])) for value in (1, 2)]
            await until(lambda: compute.running == 2)
            rest = asyncio.ensure_future(batcher.compute([image(-value) for value in range(1, images + 1)]))
            await asyncio.sleep(0)
            gate.open.set()
            await asyncio.gather(rest, *first)
            compute.stop()

        asyncio.run(work())
        return sorted(sorted(-value for value in batch) for batch in gate.batches if batch[0] < 0)

    assert batches(7) == [[1], [2], [3], [4], [5], [6], [7]]
    assert batches(9) == [[1, 2], [3], [4], [5], [6], [7], [8], [9]]
    assert batches(14) == [[1, 2, 3], [4, 5], [6, 7], [8], [9], [10], [11], [12], [13], [14]]


def test_an_image_that_waits_too_long_is_dropped(gate: Gate) -> None:
    async def work() -> None:
        compute = Compute(1, 1)
        batcher = Batcher(gate, compute, largest=3, seconds=0.05)
        first = asyncio.ensure_future(batcher.compute([image(1)]))
        await until(gate.begun.is_set)
        late = asyncio.ensure_future(batcher.compute([image(2)]))
        await asyncio.sleep(0.1)
        gate.open.set()
        await first
        with pytest.raises(TooLate):
            await late
        compute.stop()

    asyncio.run(work())
    assert gate.batches == [[1]]


def test_a_fault_of_the_network_fails_its_batch_only(batcher: Batcher, gate: Gate) -> None:
    gate.open.set()

    async def work() -> float:
        with pytest.raises(RuntimeError, match="a fault of the network"):
            await batcher.compute([image(13)])
        (row,) = await batcher.compute([image(14)])
        return row["logits"].item()

    assert asyncio.run(work()) == 28


def chosen(choose: Callable[..., int], seconds: Callable[[int], float], *most: int) -> tuple[int, int]:
    """Return a choice, and the number of measurements. `seconds` returns the time for a size of batches or for a number
    of threads."""
    now, trials = 0.0, 0

    def run(batch: np.ndarray) -> dict[str, np.ndarray]:
        nonlocal now, trials
        trials += 1
        now += seconds(len(batch) if choose is choose_batch else torch.get_num_threads())
        return {}

    return choose(run, np.zeros((1, 2, 2)), *most, lambda: now), trials


@pytest.mark.parametrize(("seconds", "size"), [
    (lambda images: 0.01 * max(images, 4), 4),
    (lambda images: 0.01 * images, 1),
    (lambda images: 0.01 * (images + 0.1), 2),  # 1 reaches 91 % of the best
    (lambda images: 0.1, 16),
    (lambda images: 0.2 * (images + 1), 1),  # 2 images would take longer than half a second
    (lambda images: 9.0, 1),
])  # fmt: skip
def test_the_largest_batch_is_the_smallest_that_is_nearly_as_fast_as_the_best(
    seconds: Callable[[int], float], size: int
) -> None:
    assert chosen(choose_batch, seconds)[0] == size


def test_the_number_of_threads_is_measured() -> None:
    cores = len(os.sched_getaffinity(0))
    many = min(2, cores)
    assert chosen(choose_threads, lambda threads: 0.08 / threads, 2) == (many, 16)
    assert chosen(choose_threads, lambda threads: 0.05 / threads, 1) == (1, 0)
    assert chosen(choose_threads, lambda threads: 0.001, 2) == (1, 16)
    tries = 2 * (5 if cores > 1 else 8)  # 1.5 seconds are over
    assert chosen(choose_threads, lambda threads: 0.1 * threads, 2) == (1, tries)
    assert chosen(choose_threads, lambda threads: 9.0 / threads, 2) == (many, 4)
    assert chosen(choose_threads, lambda threads: {1: 0.1, 2: 0.088}[threads], 2)[0] == 1, "less than 15 % are saved"


def test_neighbours_in_a_batch_do_not_change_an_answer(bundle: Bundle) -> None:
    draws = np.random.default_rng(1)
    model = ServedModel("flowers", bundle, ServeSettings(max_batch=4), Metrics(), Compute(1, 1))
    one = draws.integers(0, 256, (3, 12, 10), dtype=np.uint8)
    for run in (model.computed.run("classes"), model.computed.run("embedding")):
        rows = []
        for _ in range(4):
            batch = draws.integers(0, 256, (4, 3, 12, 10), dtype=np.uint8)
            batch[2] = one
            rows.append({name: values[2] for name, values in run(batch).items()})
        for row in rows[1:]:
            for name in row:
                np.testing.assert_array_equal(row[name], rows[0][name])
        for name, values in run(one[None]).items():  # another batch size may round otherwise
            np.testing.assert_allclose(values[0], rows[0][name], rtol=1e-5, atol=1e-6)
