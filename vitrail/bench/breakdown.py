"""Breakdown of a step's time by category of operation, measured with torch.profiler."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["CATEGORIES", "breakdown", "category_of"]

CATEGORIES = {
    "products": r"aten::(add)?(mm|mv)(_|$)|aten::(b|baddb)mm|aten::_?addmm|aten::dot|.*convolution|.*conv2d|"
    r"mkldnn::_?linear|onednn::qlinear|aten::(linear|matmul)$",
    "attention": r"aten::_?softmax|aten::.*scaled_dot_product|aten::_(flash|efficient|cudnn)_attention",
    "normalisation": r"aten::.*(layer_norm|group_norm|batch_norm)",
    "activation": r"aten::(gelu|silu|tanh|relu|sigmoid)",
    "copies and casts": r"aten::(copy_|_?to(_copy)?$|clone|contiguous|cat|stack|fill_|zero_|zeros|empty|reshape|"
    r"mkldnn_reorder)|aten::.*_?reorder|mkldnn::_reorder|Memcpy|Memset",
    "optimizer": r"Optimizer\.|aten::_(fused|foreach)",
}
"""Patterns of operation names by category. The first matching pattern decides the category."""

REST = "the rest"
STEP = "vitrail.bench.step"


def category_of(operation: str) -> str:
    """Return the category of an operation."""
    return next((name for name, pattern in CATEGORIES.items() if re.match(pattern, operation)), REST)


def breakdown(step: Callable[[], object], device: torch.device, *, steps: int = 3) -> dict[str, float]:
    """Return the fraction of the step time that each category takes. The fractions add up to 1.

    The time of an operation excludes the time of the operations that it calls. On a CPU, the category of all remaining
    time includes the Python code between operations. On a GPU, only kernels are timed. The profiler adds some time,
    mostly to small operations.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    step()
    with _quiet(), profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            with record_function(STEP):
                step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    seconds = dict.fromkeys([*CATEGORIES, REST], 0.0)
    for event in profiler.key_averages():
        if device.type == "cuda":  # each kernel is also listed on its own and must not be counted twice
            on_cpu = event.device_type == torch.profiler.DeviceType.CPU
            seconds[category_of(event.key)] += event.self_device_time_total if on_cpu else 0.0
        else:
            seconds[category_of(event.key)] += event.self_cpu_time_total
    total = sum(seconds.values()) or 1.0
    return {name: value / total for name, value in seconds.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the lines that the profiler writes to standard error at every log level."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
