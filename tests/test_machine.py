"""What is said of this machine, checked against what the operating system says."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from vitrail.errors import ConfigError
from vitrail.machine import cpu_name, describe, has_bf16_matrix_units, peak_memory, pick_device, total_memory

CPU = torch.device("cpu")
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


def proc_bytes(field: str) -> int:
    """A figure of /proc/self/status: VmRSS is what is held now, VmHWM the most that was."""
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


def test_the_cpu_can_be_asked_for() -> None:
    assert pick_device("cpu") == CPU


@pytest.mark.parametrize("name", ["nonsense", "", "cuda:9999", "gpu", "cpu:x"])
def test_devices_that_are_not_there(name: str) -> None:
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
    block = np.ones(before - proc_bytes("VmRSS") + 2**26, np.uint8)
    during = peak_memory(CPU)
    assert 0.8 * 2**26 < during - before < 1.5 * 2**26
    del block
    assert peak_memory(CPU) >= 0.99 * during  # the kernel's count is off by a few pages a core


@linux
@pytest.mark.skipif(torch.cuda.is_available(), reason="of the GPU's memory then")
def test_total_memory_is_what_the_kernel_lets_this_process_have() -> None:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    installed = int(line.split()[1]) * 1024
    assert proc_bytes("VmHWM") < total_memory() <= installed * 1.001


@linux
def test_bf16_units_are_those_of_the_processor() -> None:
    words = Path("/proc/cpuinfo").read_text().split()
    assert has_bf16_matrix_units(CPU) == any(flag in words for flag in ("amx_bf16", "avx512_bf16", "bf16"))


def test_other_devices_have_no_known_bf16_units() -> None:
    assert not has_bf16_matrix_units(torch.device("meta"))


@linux
def test_cpu_name_is_the_systems() -> None:
    assert cpu_name()
    if "model name" in (text := Path("/proc/cpuinfo").read_text()):
        assert f": {cpu_name()}\n" in text


def test_description_is_plain_json_with_versions() -> None:
    record = describe(CPU)
    assert json.loads(json.dumps(record)) == record
    assert record["device"] == cpu_name()
    assert 1 <= record["cores"] <= (os.cpu_count() or 1)
    assert record["threads"] == torch.get_num_threads()
    assert record["python"] == platform.python_version()
    assert record["versions"]["vitrail"] == vitrail.__version__
    assert record["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert record["versions"]["numpy"] == np.__version__
    assert set(record["versions"]) == {"vitrail", "torch", "numpy", "grain", "pillow"}
