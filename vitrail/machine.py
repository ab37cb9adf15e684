"""What this machine is and has: device, number formats, memory, versions."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import sys
from typing import Any, Literal

import torch

from vitrail.errors import ConfigError

__all__ = [
    "Precision",
    "TrainingPrecision",
    "autocast",
    "cpu_name",
    "describe",
    "has_bf16_matrix_units",
    "keep_freed_memory",
    "peak_memory",
    "pick_device",
    "resolve_precision",
    "total_memory",
]

Precision = Literal["auto", "bf16", "float32"]
"""Number format of matrix products; "auto" is bf16 where the processor has matrix units for it, else float32."""
TrainingPrecision = Literal["auto", "float8", "bf16", "float32"]
"""The same for training, where "float8" is of the dense layers in blocks (`models/float8.py`), and bf16 of the rest."""


def pick_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" is the first GPU that is there, else the CPU. Raises `ConfigError`."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={name!r} cannot be used here ({reason}); choices: 'auto', 'cpu', 'cuda'") from None
    return device


def has_bf16_matrix_units(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 beat float32: CUDA from Ampere, AMX, AVX512-BF16, Arm's bf16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line for line in file if line.startswith(("flags", "Features"))]
    except OSError:
        return False
    flags = set(lines[0].split()) if lines else set()
    return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})


def resolve_precision(precision: TrainingPrecision, device: torch.device) -> TrainingPrecision:
    """What "auto" stands for on this device: "bf16" where the processor has matrix units for it, else "float32".

    Raises `ConfigError` for "float8" on a device that cannot multiply such numbers.
    """
    if precision == "float8":
        _check_float8(device)
    if precision != "auto":
        return precision
    return "bf16" if has_bf16_matrix_units(device) else "float32"


def _check_float8(device: torch.device) -> None:
    """Raises `ConfigError` unless the device multiplies 8-bit floating-point numbers: CUDA does from capability 8.9."""
    try:
        one = torch.ones((), device=device)
        square = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
        torch._scaled_mm(square, square.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"precision='float8' needs CUDA of compute capability 8.9 or more, and {device.type!r} here cannot do it "
            f"({reason}); choices: 'auto', 'bf16', 'float32'"
        ) from None


def autocast(precision: TrainingPrecision, device: torch.device) -> torch.autocast:
    """A context in which products run in bfloat16 (or nothing changes). Weights, their gradients and the optimiser's
    state stay in float32: the master copy is the weights themselves."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision in ("bf16", "float8"))


def keep_freed_memory() -> bool:
    """Has this process keep the memory that it frees, for itself; returns whether its C library can (glibc).

    A step frees what the next one allocates. By default glibc hands it back to the system in between, which gives it
    back page by page, zeroed: 80,000 page faults in a step of ViT-S/16, 12 % of the step, 20 % for the smallest
    networks (docs/performance.md). Nothing is handed back from here on, so this is for processes that compute.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
    return bool(mallopt(m_mmap_max, 0)) and bool(mallopt(m_trim_threshold, -1))


def peak_memory(device: torch.device) -> int:
    """The most bytes this process has held: on the GPU where it computes on one, else resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/status", encoding="utf-8") as file:  # getrusage would count the parent's memory in
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def total_memory() -> int:
    """Bytes of memory of the device that "auto" stands for: the GPU's own, else the machine's, or its container's."""
    device = pick_device()
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(limit, encoding="utf-8") as file:
                return min(installed, int(file.read()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return installed


def cpu_name() -> str:
    """The processor's name as the operating system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe(device: torch.device) -> dict[str, Any]:
    """Machine and versions, for the record of a run."""
    packages = ("vitrail", "torch", "numpy", "grain", "pillow")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
