"""The entries of a comparison: our network, its matrix products alone, and networks of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.optim import AdamW

from vitrail.bench.breakdown import breakdown
from vitrail.bench.measure import timed, waits_for
from vitrail.bench.peers import build_peer
from vitrail.bench.products import Products, fastest_multiplication, record
from vitrail.bench.workload import Workload
from vitrail.machine import autocast, keep_freed_memory
from vitrail.models.compiled import Compiled, compile_blocks
from vitrail.models.linear.float8 import use_float8
from vitrail.models.predictor import Predictor
from vitrail.models.variants import build
from vitrail.training.optimization.optimizer import OptimizerConfig, make_optimizer

__all__ = ["COMPILED", "OURS", "PRODUCTS", "Entry", "Runner", "Settings", "entries", "make_step"]

OURS = "vitrail"
PRODUCTS = "products alone"

Settings = Literal["matched", "default", "best", "graphs"]
"""Settings of a library. "matched" uses the workload's precision, by autocast. "default" uses the library's defaults,
with float32. "best" uses the workload's precision and compiles: each block of our network, but other networks as a
whole. "graphs" compiles our network into CUDA graphs."""

COMPILED = {"best": " compiled", "graphs": " graphs"}
"""Settings that need a compiler, with the texts that follow the precision in tables."""

LARGE = 8192
"""Number of rows and columns of the large matrix product on a GPU. On a CPU, the numbers of rows and columns are an
eighth of this."""


@dataclass(frozen=True)
class Entry:
    """A library and its settings in a comparison."""

    library: str
    settings: Settings = "matched"

    def describe(self, workload: Workload) -> str:
        """Return a description of the settings for tables, such as "bf16 compiled"."""
        precision = workload.own_format if self.library == OURS else workload.precision
        return ("float32" if self.settings == "default" else precision) + COMPILED.get(self.settings, "")


def entries(
    workload: Workload,
    peers: tuple[str, ...] = (),
    *,
    best: bool = False,
    compile: Compiled = "off",  # noqa: A002
) -> list[Entry]:
    """Return the libraries and settings to compare, without duplicates. Our network comes first."""
    found = [Entry(OURS)]
    if best or compile == "on":
        found.append(Entry(OURS, "best"))
    if compile == "graphs":
        found.append(Entry(OURS, "graphs"))
    for peer in peers:
        if workload.precision != "float32":
            found.append(Entry(peer, "default"))
        found.append(Entry(peer))
        if best:
            found.append(Entry(peer, "best"))
    return found


class Runner:
    """A library's step in its own process. The first step runs in the constructor, and later steps are timed on
    request.
    """

    def __init__(self, entry: Entry, workload: Workload, threads: int) -> None:
        torch.set_num_threads(threads)
        is_products = entry.library == PRODUCTS
        if is_products or entry.library == OURS:
            keep_freed_memory()  # our commands do the same, but programs with other libraries do not
        self.device, self.precision = workload.device, workload.precision
        self.product_flops = 0
        if entry.library == PRODUCTS:
            entry, workload = Entry(OURS), replace(workload, eight_bits=None)
        self.step = make_step(entry, workload)
        if is_products:
            self.step()
            products = Products(record(self.step), workload.device)
            self.product_flops, self.step = products.flops, products
        for _ in range(3 if entry.settings == "graphs" else 1):  # a CUDA graph is recorded in the second step
            self.step()

    def seconds(self) -> float:
        """Return the seconds of one step."""
        return timed(self.step, waits_for(self.device))()

    def flops(self) -> int:
        """Return the FLOPs of the recorded matrix products. A product that a fused kernel computes twice is counted
        twice.
        """
        return self.product_flops

    def large_flops(self) -> float:
        """Return the FLOPs per second of one large matrix product in the workload's number format."""
        side = LARGE if self.device.type == "cuda" else LARGE // 8
        dtype = torch.float32 if self.precision == "float32" else torch.bfloat16
        factor = torch.randn(side, side, device=self.device).to(dtype)
        multiply = fastest_multiplication(factor, factor)
        timer = timed(lambda: multiply(factor, factor), waits_for(self.device))
        timer()
        return 2 * side**3 / min(timer() for _ in range(5))

    def breakdown(self) -> dict[str, float]:
        """Return the fraction of the step time per category of operation."""
        return breakdown(self.step, self.device)


def make_step(entry: Entry, workload: Workload) -> Callable[[], object]:
    """Return a function that runs one training step of a new network, or predicts one batch with it.

    Raises `ConfigError` if a peer cannot be built.
    """
    if entry.settings == "default":
        workload = replace(workload, precision="float32")
    ours = entry.library == OURS
    network = (build(workload.config) if ours else build_peer(entry.library, workload.config)).to(workload.device)
    run: Callable[[torch.Tensor], torch.Tensor] = network
    if ours:
        if workload.eight_bits == "float8":
            use_float8(network)
        compile_blocks(network, "graphs" if entry.settings == "graphs" else "on" if entry.settings == "best" else "off")
    elif entry.settings == "best":
        run = torch.compile(network)
    if workload.task == "infer":
        run = Predictor(network, "int8" if workload.eight_bits else workload.precision) if ours else run
        network.eval()
        return _prediction(run, workload)
    network.train()
    optimizer = make_optimizer(network, OptimizerConfig()) if ours else AdamW(network.parameters(), fused=True)
    return _training_step(run, optimizer, workload)


def _prediction(run: Callable[[torch.Tensor], torch.Tensor], workload: Workload) -> Callable[[], object]:
    images = workload.images()

    @torch.inference_mode()
    def step() -> torch.Tensor:
        with autocast(workload.precision, workload.device):
            return run(images)

    return step


def _training_step(
    network: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, workload: Workload
) -> Callable[[], object]:
    images, labels = workload.images(), workload.labels()

    def step() -> None:
        with autocast(workload.precision, workload.device):
            logits = network(images)
        loss: Any = F.cross_entropy(logits.float(), labels)  # torch has no type annotation for backward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
