"""Tests of the description of this machine against the operating system."""

from __future__ import annotations

import json
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from vitrail.errors import ConfigError
from vitrail.machine import (
    available_memory,
    cpu_name,
    describe,
    deterministic_algorithms,
    environment,
    has_bf16_matrix_units,
    keep_freed_memory,
    peak_memory,
    pick_device,
    resolve_precision,
    total_memory,
)

CPU = torch.device("cpu")
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


def proc_bytes(field: str) -> int:
    """Return a number of /proc/self/status in bytes: VmRSS is the current memory, VmHWM its peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def test_auto_is_a_device_that_computes() -> None:
    device = pick_device()
    assert device == pick_device("auto")
    assert float(torch.ones(3, device=device).sum()) == 3
    if torch.cuda.is_available():
        assert device.type == "cuda"
    elif not torch.backends.mps.is_available():
        assert device == CPU


@pytest.mark.parametrize("name", ["nonsense", "", "cuda:9999", "gpu", "cpu:x", None])
def test_devices_that_are_not_there(name: Any, types_unchecked: None) -> None:
    with pytest.raises(ConfigError) as caught:
        pick_device(name)
    message = str(caught.value)
    assert message.startswith(f"device={name!r} cannot be used here (")
    assert message.endswith("choices: 'auto', 'cpu', 'cuda'") and "\n" not in message


@linux
def test_peak_memory_is_at_least_the_kernels_high_water_mark() -> None:
    assert proc_bytes("VmHWM") * 0.99 < peak_memory(CPU) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@linux
def test_peak_memory_grows_with_the_peak_and_stays() -> None:
    before = peak_memory(CPU)
    block = mmap.mmap(-1, before - proc_bytes("VmRSS") + 2**26)  # and not from the heap, which may have kept some
    np.frombuffer(block, np.uint8)[:] = 1
    during = peak_memory(CPU)
    assert 0.8 * 2**26 < during - before < 1.5 * 2**26
    block.close()
    assert peak_memory(CPU) >= 0.99 * during  # the kernel's count is off by a few pages a core


@linux
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, these are figures of its memory")
def test_total_memory_is_what_the_kernel_lets_this_process_have() -> None:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    installed = int(line.split()[1]) * 1024
    assert proc_bytes("VmHWM") < total_memory() <= installed * 1.001
    assert 0 < available_memory(CPU) <= total_memory()


@linux
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, these are figures of its memory")
def test_memory_is_that_of_the_control_groups_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.machine.CONTROL_GROUPS", tmp_path)
    files = {
        "": {"memory.max": "90000000\n", "memory.current": "60000000\n"},
        "memory": {"memory.limit_in_bytes": "90000000\n", "memory.usage_in_bytes": "60000000\n"},
    }
    for _, controllers, path in (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()):
        inner = tmp_path / controllers / path.lstrip("/")
        inner.mkdir(parents=True, exist_ok=True)
        for name, text in files.get(controllers, {}).items():
            (inner / name).write_text(text)
            (inner / "memory.stat").write_text(
                "anon 1\nactive_file 3000000\ninactive_file 1500000\nslab_reclaimable 500000\n"
            )
    assert total_memory() == 90_000_000 and available_memory(CPU) == 35_000_000
    for details in tmp_path.rglob("memory.stat"):
        details.unlink()  # some systems have limits without this file
    assert total_memory() == 90_000_000 and available_memory(CPU) == 30_000_000


def test_an_environment_variable_that_another_thread_has_deleted() -> None:
    with environment("VITRAIL_TEST", "1"):
        assert os.environ.pop("VITRAIL_TEST") == "1"
    assert "VITRAIL_TEST" not in os.environ


@linux
def test_bf16_units_are_those_of_the_processor() -> None:
    words = Path("/proc/cpuinfo").read_text().split()
    assert has_bf16_matrix_units(CPU) == any(flag in words for flag in ("amx_bf16", "avx512_bf16", "bf16"))


def test_description_is_plain_json_with_versions() -> None:
    record = describe(CPU)
    assert json.loads(json.dumps(record)) == record
    assert record["device"] == cpu_name() != ""
    assert 1 <= record["cores"] <= (os.cpu_count() or 1)
    assert record["threads"] == torch.get_num_threads()
    assert record["versions"]["vitrail"] == vitrail.__version__
    assert set(record["versions"]) == {"vitrail", "torch", "numpy", "grain", "pillow"}


@pytest.mark.parametrize("units", [True, False])
def test_auto_is_bf16_only_with_matrix_units(units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.machine.has_bf16_matrix_units", lambda device: units)
    assert resolve_precision("auto", CPU) == ("bf16" if units else "float32")
    assert resolve_precision("bf16", CPU) == "bf16" and resolve_precision("float32", CPU) == "float32"


@pytest.mark.slow
@linux
def test_what_a_step_frees_the_next_one_finds_without_a_page_fault() -> None:
    program = """
import resource, torch
from vitrail.machine import keep_freed_memory
def step():
    kept = [torch.ones(10 * 2**20) for _ in range(4)]  # 42 MB each, freed together
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def faults_of_three_steps():
    step()
    before = faults()
    for _ in range(3):
        step()
    return faults() - before
print(faults_of_three_steps())
assert keep_freed_memory()
for _ in range(5):  # the heap grows to its size
    step()
print(faults_of_three_steps())
"""
    if platform.libc_ver()[0] != "glibc":
        assert keep_freed_memory() is False
        return
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    handed_back, kept = map(int, done.stdout.split())
    assert 2 * kept < handed_back, "3 steps of 168 MB are 123,000 pages"


@pytest.mark.parametrize("warns", [False, True])
def test_the_callers_deterministic_algorithms_are_given_back(warns: bool) -> None:
    try:
        torch.use_deterministic_algorithms(True, warn_only=warns)
        with deterministic_algorithms():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warns
    finally:
        torch.use_deterministic_algorithms(False)
