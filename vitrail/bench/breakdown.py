"""Where a step's time goes, by the names of its operations (torch.profiler)."""

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
    r"mkldnn::_?linear|aten::(linear|matmul)$",
    "attention": r"aten::_?softmax|aten::.*scaled_dot_product|aten::_(flash|efficient|cudnn)_attention",
    "normalisation": r"aten::.*(layer_norm|group_norm|batch_norm)",
    "activation": r"aten::(gelu|silu|tanh|relu|sigmoid)",
    "copies and casts": r"aten::(copy_|_?to(_copy)?$|clone|contiguous|cat|stack|fill_|zero_|zeros|empty|reshape|"
    r"mkldnn_reorder)|aten::.*_?reorder|mkldnn::_reorder|Memcpy|Memset",
    "optimizer": r"Optimizer\.|aten::_(fused|foreach)",
}
"""Kinds of work, and the operations of each as a pattern; the first that fits counts."""

REST = "the rest"
STEP = "vitrail.bench.step"


def category_of(operation: str) -> str:
    """The kind of work that an operation's name stands for."""
    return next((name for name, pattern in CATEGORIES.items() if re.match(pattern, operation)), REST)


def breakdown(step: Callable[[], object], device: torch.device, *, steps: int = 3) -> dict[str, float]:
    """The share of each category in the time of some steps, in [0, 1]; together they make 1.

    An operation counts without those it calls. On a CPU the rest includes Python between operations; on a GPU it is the
    time of kernels that is shared out. The profiler itself costs some time, most of it where operations are small.
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
        if device.type == "cuda":  # kernels have rows of their own, and would count twice
            on_cpu = event.device_type == torch.profiler.DeviceType.CPU
            seconds[category_of(event.key)] += event.self_device_time_total if on_cpu else 0.0
        else:
            seconds[category_of(event.key)] += event.self_cpu_time_total
    total = sum(seconds.values()) or 1.0
    return {name: value / total for name, value in seconds.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps from the reader what the profiler's own code writes to the standard error, in spite of its log level."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
