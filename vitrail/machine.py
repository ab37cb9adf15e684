"""The machine that the process runs on: device, number formats, memory and versions."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch

from vitrail.errors import ConfigError

Precision = Literal["auto", "bf16", "float32"]
"""Number format of matrix products. "auto" is bf16 if the processor has matrix units for it, else float32."""
TrainingPrecision = Literal["auto", "float8", "bf16", "float32"]
"""Number format of matrix products during training. "float8" applies to the dense layers in blocks
(`models/linear/float8.py`); all other matrix products then use bf16."""
P = TypeVar("P", Precision, TrainingPrecision)


def pick_device(name: str = "auto") -> torch.device:
    """Return the device of this name. "auto" is the first GPU if there is one, else the CPU. Raises `ConfigError`."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise ConfigError(f"device={name!r} cannot be used here ({reason}); choices: 'auto', 'cpu', 'cuda'") from None
    return device


def has_bf16_matrix_units(device: torch.device) -> bool:
    """Return True if the device has matrix units for bfloat16: CUDA since Ampere, AMX, AVX512-BF16 or Arm's bf16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and bool(cpu_flags() & {"amx_bf16", "avx512_bf16", "bf16"})


def resolve_precision(precision: P, device: torch.device) -> P:
    """Return the precision with "auto" resolved: "bf16" if the device has matrix units for it, else "float32".

    Raises `ConfigError` for an unknown precision, and for "float8" on a device that cannot multiply 8-bit
    floating-point numbers.
    """
    known = get_args(TrainingPrecision)
    if precision not in known:
        raise ConfigError(f"precision={precision!r} is not one of {', '.join(map(repr, known))}")
    if precision == "float8":
        _check_float8(device)
    if precision != "auto":
        return precision
    return "bf16" if has_bf16_matrix_units(device) else "float32"


def _check_float8(device: torch.device) -> None:
    """Raise `ConfigError` unless the device multiplies 8-bit floating-point numbers (CUDA capability 8.9 or more)."""
    try:
        one = torch.ones((), device=device)
        square = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
        torch._scaled_mm(square, square.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            "precision='float8' needs CUDA of compute capability 8.9 or more, and the device "
            f"{device.type!r} cannot multiply 8-bit numbers ({reason}); choices: 'auto', 'bf16', 'float32'"
        ) from None


def autocast(precision: TrainingPrecision, device: torch.device) -> torch.autocast:
    """Return a context in which matrix products are computed in bfloat16. For "float32" the context changes nothing.

    Weights, gradients and the optimizer's state stay in float32, so no master copy of the weights is needed.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=precision in ("bf16", "float8"))


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the `with` block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)  # another thread may have ended the same block
        os.environ |= {} if before is None else {name: before}


def keep_freed_memory() -> bool:
    """Make this process keep the memory that it frees. Return True if the C library supports this setting, as glibc
    does.

    Each training step frees the memory that the next step allocates. By default glibc returns that memory to the
    system, which fills it with zeros page by page at the next allocation. On a CPU this takes a considerable fraction
    of a step (docs/performance.md). After this call, the process returns no memory to the system until it exits.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
    return bool(mallopt(m_mmap_max, 0)) and bool(mallopt(m_trim_threshold, -1))


@contextmanager
def deterministic_algorithms(*, enabled: bool = True) -> Iterator[None]:
    """Compute with PyTorch's deterministic algorithms inside the `with` block, if `enabled`. PyTorch raises
    `RuntimeError` for operations that have none."""
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS depends on timing
    before, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before > 0, warn_only=before == 1)
        torch.backends.cudnn.benchmark = benchmark


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated GPU memory for CUDA, else resident main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = system_bytes("self/status", "VmHWM")  # getrusage can report the parent's memory
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found or (peak if sys.platform == "darwin" else peak * 1024)


def total_memory() -> int:
    """Return the memory of the GPU in bytes. Without a GPU, return the memory of the machine or container."""
    device = pick_device()
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([installed, *(limit for limit, _ in _memory_limits())])


CONTROL_GROUPS = Path("/sys/fs/cgroup")

LIMIT_FILES = {
    "": ("", "memory.max", "memory.current"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Folder, limit and use of control groups: those of version 2, and the controller of memory of version 1."""

KEPT = ("active_file", "inactive_file", "slab_reclaimable")
"""Fields of memory.stat, a file that some systems lack. This memory holds copies of files and folders, which the system
gives up for programs."""


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group that this process is in, such as that of a container or of a job in a batch
    system, and what is free of it, in bytes. Copies of files count as free."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        place, *names = LIMIT_FILES.get(controllers, ("",))
        inner = CONTROL_GROUPS / place / path.lstrip("/")
        for folder in (inner, *inner.parents) if names else ():
            with suppress(OSError, ValueError):  # a group of another container, or without a limit
                limit, used = (int((folder / name).read_text(encoding="utf-8")) for name in names)
                details = folder / "memory.stat"
                text = details.read_text(encoding="utf-8") if details.exists() else ""
                stated = dict(line.split() for line in text.splitlines())
                cached = (int(stated.get(f"total_{kind}", stated.get(kind, 0))) for kind in KEPT)
                yield limit, limit - used + sum(cached)


def available_memory(device: torch.device) -> int:
    """Return the bytes that a new process can allocate on the device without taking memory from other processes.

    Raises `ConfigError` if the operating system does not report free memory.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = system_bytes("meminfo", "MemAvailable")
    if free is None:
        raise ConfigError("the free memory is unknown: this system has no /proc/meminfo; set --memory-limit")
    return free if torch.cuda.is_available() else max(0, min([free, *(left for _, left in _memory_limits())]))


def check_memory(needed: int, device: torch.device, work: str, advice: str) -> str:
    """Return a sentence about the memory that some work needs and the memory that is free.

    Raises `ConfigError` with `advice` if work on the CPU needs more than is free, because the system would kill the
    process. On other devices the number is an estimate from the formulas for CPUs, and nothing is refused.
    """
    try:
        free = available_memory(device)
    except ConfigError:
        return f"memory: about {_gigabytes(needed)}"
    if device.type == "cpu" and needed > free:
        raise ConfigError(
            f"{work} needs about {_gigabytes(needed)} of memory, and {_gigabytes(free)} are free on this machine; "
            f"{advice}"
        )
    return f"memory: about {_gigabytes(needed)}, and {_gigabytes(free)} are free"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.0f} MB"


def cpu_name() -> str:
    """Return the processor's name as the operating system reports it."""
    return _system_field("cpuinfo", "model name") or platform.processor() or platform.machine()


def cpu_vendor() -> str:
    """Return the vendor's name in /proc/cpuinfo, such as "AuthenticAMD", or "" if the system does not report it."""
    return _system_field("cpuinfo", "vendor_id")


def cpu_flags() -> frozenset[str]:
    """Return the names of the processor's instruction sets in /proc/cpuinfo, such as "avx512f". Without this file, the
    set is empty.
    """
    return frozenset(_system_field("cpuinfo", "flags", "Features").split())


def system_bytes(file: str, name: str) -> int | None:
    """Return the bytes in a line of a file of /proc, which has kilobytes. Return None if the system does not report
    them."""
    found = _system_field(file, f"{name}:")
    return 1024 * int(found.split()[0]) if found else None


def _system_field(file: str, *names: str) -> str:
    """Return the value of the first line of a file of /proc that begins with one of the names, or "" without such a
    line."""
    with suppress(OSError), open(f"/proc/{file}", encoding="utf-8") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
    return ""


def describe(device: torch.device) -> dict[str, Any]:
    """Return the machine and the package versions as JSON values."""
    packages = ("vitrail", "torch", "numpy", "grain", "pillow")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
