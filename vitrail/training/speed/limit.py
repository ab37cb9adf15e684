"""The fastest matrix products of this machine, with which the speed of a run's steps is compared."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.machine import TrainingPrecision
from vitrail.models.linear.float32 import has_onednn
from vitrail.processes.group import Processes

__all__ = ["MachineLimit", "product_limit"]

SECONDS = 0.04
"""Time for which products are measured, apart from their first call, which loads the libraries."""
LONG_ENOUGH = 0.002
"""Seconds of a product from which on larger matrices are hardly faster."""
SMALLEST, LARGEST = 256, 4096
"""Sides of the matrices."""
AHEAD = 8
"""Number of products that a GPU computes before they are waited for."""

Multiply = Callable[[Tensor, Tensor], Tensor]


class MachineLimit:
    """The limit with which the speed of a run's steps is compared.

    No step is faster than matrix products alone. If one is, other programs used the machine while the products were
    measured. They are measured again, once. If steps are still faster, there is no limit any more.
    """

    def __init__(
        self, measure: Callable[[bool], float], on_too_low: Callable[[], None], processes: Processes = Processes()
    ) -> None:
        """`measure` returns the FLOPs per second of the products. Its argument is True if it must measure again.
        `on_too_low` is called when the limit is given up."""
        self._measure = measure
        self._on_too_low = on_too_low
        self._processes = processes
        self._is_repeated = False
        self.flops_per_second: float | None = measure(False)
        """None if there is no limit any more."""

    def check(self, rate: float) -> None:
        """Measure the limit again, or give it up, if the steps are faster: they compute `rate` FLOPs per second.

        All processes call this method together, each with the rate that it measured.
        """
        while (limit := self.flops_per_second) is not None and any(self._processes.gather(rate > limit)):
            if self._is_repeated:
                self.flops_per_second = None
                self._on_too_low()
            else:
                self._is_repeated = True
                self.flops_per_second = max(limit, self._measure(True))


def product_limit(
    precision: TrainingPrecision, device: torch.device, processes: Processes = Processes(), *, again: bool = False
) -> float:
    """Return the FLOPs per second of the fastest matrix products of all processes together.

    Square matrices are multiplied in the number format of training for about 40 ms, and the fastest product counts. All
    processes measure at the same time, because they may share cores. While other programs use the machine, the products
    are slower, as the steps are. A process measures once for each number of threads, unless `again` is True. No random
    number is drawn.
    """
    if processes.are_several:
        processes.gather(None)  # so that they begin together
    if again:
        _measured.cache_clear()
    own = _measured(precision, device, torch.get_num_threads())
    return sum(processes.gather(own))


@functools.cache
def _measured(precision: TrainingPrecision, device: torch.device, threads: int) -> float:
    """Return the FLOPs per second of the fastest product of this process. `threads` distinguishes measurements."""
    kernels, side, best = _kernels(precision, device), SMALLEST, 0.0
    left, right = _factors(side, precision, device)
    with torch.no_grad():
        for multiply in kernels:
            _seconds(multiply, left, right)
        end = time.perf_counter() + SECONDS
        while True:
            seconds = min(_seconds(multiply, left, right) for multiply in kernels)
            best = max(best, 2 * side**3 / seconds)
            if time.perf_counter() >= end:
                return best
            if seconds < LONG_ENOUGH and side < LARGEST:
                side *= 2
                left, right = _factors(side, precision, device)


def _seconds(multiply: Multiply, left: Tensor, right: Tensor) -> float:
    """Return the time of one product. A GPU computes several, because waiting for one takes time itself."""
    count = 1 if left.device.type == "cpu" else AHEAD
    begin = time.perf_counter()
    for _ in range(count):
        product = multiply(left, right)
    product[0, 0].item()  # waits for the device
    return (time.perf_counter() - begin) / count


def _factors(side: int, precision: TrainingPrecision, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two matrices of different numbers, because equal numbers take less energy and can be faster."""
    formats = {"float32": torch.float32, "bf16": torch.bfloat16, "float8": torch.float8_e4m3fn}
    numbers = torch.arange(side * side, device=device, dtype=torch.float32).mul_(0.7).sin_().view(side, side)
    left = numbers.to(formats[precision])
    return left, left.flip(0) if precision != "float8" else left.t()


def _kernels(precision: TrainingPrecision, device: torch.device) -> list[Multiply]:
    """Return the functions that multiply two matrices. On a CPU, PyTorch's kernel and oneDNN's are compared."""
    if precision == "float8":
        one = torch.ones((), device=device)
        return [lambda left, right: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)]
    kernels: list[Multiply] = [torch.mm]
    if device.type == "cpu" and has_onednn(torch.bfloat16 if precision == "bf16" else torch.float32):
        kernels.append(lambda left, right: torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], ""))
    return kernels
