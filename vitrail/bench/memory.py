"""The peak memory of a step, and the largest batch that fits into memory. Both are measured in new processes."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from vitrail.bench.step import OURS, Entry, make_step
from vitrail.bench.workload import ProcessKilled, Workload, in_process
from vitrail.errors import ConfigError
from vitrail.machine import available_memory, keep_freed_memory, peak_memory
from vitrail.models.cost import training_bytes

STEPS = 2
"""Number of measured steps. At least two are needed, because the first step creates the optimizer's state."""

LARGEST = 2**20


def measure_memory(entry: Entry, workload: Workload) -> int:
    """Return the peak bytes of a step: network, optimizer, batch and activations, without Python and torch.

    Raises `ConfigError` if the operating system does not report memory, and `VitrailError` if the process fails.
    """
    if workload.device.type != "cuda":
        _status("VmRSS")
    return int(in_process(_peak, entry, workload, torch.get_num_threads()))


def largest_batch(workload: Workload, limit: int | None = None) -> dict[str, int]:
    """Find the largest batch whose training step fits into `limit` bytes, by default the free memory, as in the paper's
    Figure 12.

    `batch` is 0 if even one image does not fit. `predicted` is the largest batch that should fit by the formula for
    memory, into the bytes that Python and torch leave of the limit (`left`).

    Every trial runs in a new process with a memory limit, so a batch that is too large cannot exhaust the machine.
    Raises `ConfigError` if the limit leaves no memory for a step or cannot be set.
    """
    limit = available_memory(workload.device) if limit is None else limit
    taken = 0 if workload.device.type == "cuda" else in_process(_own_memory, workload, torch.get_num_threads())
    if limit <= taken:
        raise ConfigError(
            f"memory_limit={limit:,} bytes is not above the {taken:,} bytes that Python and torch use; choose a "
            "higher limit"
        )

    def fits(batch: int) -> bool:
        trial = replace(workload, batch=batch)
        try:
            return bool(in_process(_fits, trial, limit, torch.get_num_threads()))
        except ProcessKilled:
            return False

    config, precision, left = workload.config, workload.precision, limit - taken
    return {
        "batch": find_largest(fits),
        "predicted": find_largest(lambda batch: training_bytes(config, batch, precision=precision) <= left),
        "limit": limit,
        "left": left,
    }


def find_largest(fits: Callable[[int], bool]) -> int:
    """Return a batch size that fits and is within 3 % of the largest such size.

    The search doubles the batch size until it does not fit, and then bisects.
    """
    low = 0
    while low < LARGEST and fits(max(1, 2 * low)):
        low = max(1, 2 * low)
    high = max(1, 2 * low)
    while low < LARGEST and high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def is_out_of_memory(error: Exception) -> bool:
    """Return True for the errors of Python, PyTorch and oneDNN that say that memory cannot be allocated."""
    if not isinstance(error, RuntimeError):  # the base class of torch.OutOfMemoryError
        return isinstance(error, MemoryError)
    return re.search(r"out of memory|allocate|bad_alloc|could not create", str(error), re.IGNORECASE) is not None


def _peak(entry: Entry, workload: Workload, threads: int) -> int:
    """Return the number of bytes by which the peak memory of the steps exceeds the memory before them."""
    _settle(entry, workload, threads)
    if workload.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(workload.device)
        before = torch.cuda.memory_allocated(workload.device)
    else:
        with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
            file.write("5")  # resets the peak
        before = _status("VmRSS")
    _run(entry, workload, steps=STEPS)
    return peak_memory(workload.device) - before


def _fits(workload: Workload, limit: int, threads: int) -> bool:
    """Limit the memory of this process, and return True if a step succeeds within the limit."""
    _settle(Entry(OURS), workload, threads)
    if workload.device.type == "cuda":
        total = torch.cuda.get_device_properties(workload.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), workload.device)
    else:
        # The system limits reserved memory, which exceeds the memory in use.
        addresses = _status("VmData") + limit - _status("VmRSS")
        resource.setrlimit(resource.RLIMIT_DATA, (addresses, addresses))
    try:
        _run(Entry(OURS), workload, steps=STEPS)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _own_memory(workload: Workload, threads: int) -> int:
    """Return the memory in bytes of a process that is ready for its first step."""
    _settle(Entry(OURS), workload, threads)
    return _status("VmRSS")


def _settle(entry: Entry, workload: Workload, threads: int) -> None:
    """Run one small step, so that all libraries are imported and all threads are started before the measurement."""
    torch.set_num_threads(threads)
    config = workload.config
    small = replace(config, depth=1) if config.architecture == "ViT" else config
    _run(entry, replace(workload, batch=1, config=small), steps=1)
    _hand_back()
    if entry.library == OURS:
        keep_freed_memory()  # after the small step, whose memory must be returned to the system


def _hand_back() -> None:
    """Return freed memory to the system. Otherwise the next step would reuse this memory, and would seem to need
    less."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # glibc
        trim(0)


def _run(entry: Entry, workload: Workload, steps: int) -> None:
    step = make_step(entry, workload)
    for _ in range(steps):
        step()


def _status(field: str) -> int:
    """Return the bytes in a line of /proc/self/status. Raises `ConfigError` if the system has no such file."""
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))
    except (OSError, StopIteration):
        raise ConfigError("memory on a CPU is measured with /proc/self/status, which only Linux has") from None
