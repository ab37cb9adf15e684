"""Tests of training on several machines: two network namespaces, which are two hosts for everything that a network
connects. The processes are started as SLURM starts them, without torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.curves import curve, difference
from tests.training.jobs import SMALL

pytestmark = pytest.mark.slow

HOSTS = {"one": "10.77.31.1", "two": "10.77.31.2"}
COMMAND = (
    sys.executable, "-m", "vitrail", "train", "demo", *SMALL, "--threads", "1", "--batch-size", "20",
    "--checkpoints", "3", "--evaluations", "2", "--optimizer", "sgd", "--learning-rate", "0.05",
)  # fmt: skip


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Names of two network namespaces by the names of hosts. They are connected by a cable (veth)."""
    if shutil.which("ip") is None:
        pytest.skip("ip (package iproute2) is not installed")
    names = {host: f"vitrail-{host}-{os.getpid()}" for host in HOSTS}
    ends = [f"vt{os.getpid() % 10**6}{host[0]}" for host in HOSTS]
    made = ip("netns", "add", names["one"])
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    try:
        ip("netns", "add", names["two"]).check_returncode()
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1]).check_returncode()
        for end, (host, address) in zip(ends, HOSTS.items(), strict=True):
            ip("link", "set", end, "netns", names[host], "name", "cable").check_returncode()
            ip("-n", names[host], "addr", "add", f"{address}/24", "dev", "cable").check_returncode()
            for link in ("cable", "lo"):
                ip("-n", names[host], "link", "set", link, "up").check_returncode()
        yield names
    finally:
        for name in names.values():
            ip("netns", "del", name)


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True)


def started(hosts: dict[str, str], *words: str) -> list[subprocess.Popen[str]]:
    """Start four processes as srun does, two on each host."""
    found = []
    for rank in range(4):
        slurm = {
            "SLURM_JOB_ID": "31", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2),
            "SLURM_STEP_NODELIST": ",".join(HOSTS.values()), "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = ["ip", "netns", "exec", list(hosts.values())[rank // 2], *COMMAND, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        found.append(subprocess.Popen(command, env=os.environ | slurm, text=True, **pipes))
    return found


def test_two_machines_of_two_processes_train_as_one_process_does(
    hosts: dict[str, str], three_splits: Path, tmp_path: Path
) -> None:
    words = ("--data", str(three_splits), "--steps", "12")
    alone = [*COMMAND, *words, "--run", str(tmp_path / "one")]
    subprocess.run(alone, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    processes = started(hosts, *words, "--run", str(tmp_path / "four"), "--shard", "hybrid")
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert [bool(output) for output, _ in outputs] == [True, False, False, False], "the first process prints"
    assert len(curve(tmp_path / "four")) == 12 and difference(tmp_path / "one", tmp_path / "four") < 2e-6


def test_an_address_that_cannot_be_reached_is_a_mistake(tmp_path: Path) -> None:
    lonely = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "--run", str(tmp_path / "run"), "--process-timeout", "2s"]
    ended = subprocess.run(command, env=os.environ | lonely, capture_output=True, text=True)
    assert ended.returncode == 2 and not (tmp_path / "run").exists()
    (line,) = ended.stderr.splitlines()
    assert line.startswith("vitrail: MASTER_ADDR=127.0.0.1 MASTER_PORT=1: the 2 processes did not come together within")
    assert line.endswith("; check the address, and that all of them were started")
