"""Tests of the place of a process, which torchrun and SLURM describe in environment variables."""

from __future__ import annotations

import pytest

from vitrail.errors import ConfigError
from vitrail.processes.group import join_processes
from vitrail.processes.launch import Launch, first_host, launch

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu02",
    "MASTER_PORT": "4711", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "1234567",
}  # fmt: skip


def test_a_process_alone_is_the_only_one() -> None:
    assert launch({}) == Launch(rank=0, world=1, local_rank=0, local_world=1)


def test_an_empty_variable_counts_as_not_set() -> None:
    assert launch(TORCHRUN | {"WORLD_SIZE": ""}) == launch(TORCHRUN | {"RANK": "", "WORLD_SIZE": "1"}) == Launch()
    assert launch(TORCHRUN | {"MASTER_ADDR": ""}).address == ("localhost", 4711)


def test_several_processes_need_their_numbers() -> None:
    of_user = {"WORLD_SIZE": "16", "MASTER_ADDR": "gpu01", "MASTER_PORT": "99"}  # as batch scripts export them
    assert launch(SLURM | of_user) == Launch(9, 16, 1, 8, ("gpu01", 99))
    with pytest.raises(ConfigError, match=r"is incomplete \('RANK'\)"):
        launch(of_user)


@pytest.mark.parametrize("rank", [-1, 8, 9])
def test_a_rank_is_below_the_number_of_processes(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"RANK={rank} .*WORLD_SIZE is 8"):
        launch(TORCHRUN | {"RANK": str(rank)})


def test_torchrun_says_everything() -> None:
    assert launch(TORCHRUN) == Launch(5, 8, 1, 4, ("gpu02", 4711), 2)
    assert launch(SLURM | TORCHRUN) == launch(TORCHRUN)


def test_slurm_says_everything_but_a_port() -> None:
    assert launch(SLURM) == Launch(9, 16, 1, 8, ("gpu03", 20000 + 1234567 % 20000), 0)
    assert launch(SLURM | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "99"}).address == ("10.0.0.7", 99)
    ports = {launch(SLURM | {"SLURM_STEP_ID": str(step)}).address[1] for step in range(20)}
    assert len(ports) == 20 and all(20000 <= port < 40000 for port in ports)


def test_a_batch_script_of_slurm_is_one_process() -> None:
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"}
    assert launch(script).world == 1
    assert launch(script | {"SLURM_STEP_NUM_TASKS": "1"}).world == 1


@pytest.mark.parametrize(("nodes", "first"), [
    ("gpu1", "gpu1"), ("gpu[03-05,9],login1", "gpu03"), ("a[7,9]-x,b", "a7-x"), ("n1,n2", "n1"),
    ("r[2]c[01-04]", "r2c01"),
])  # fmt: skip
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_an_incomplete_environment_is_named() -> None:
    with pytest.raises(ConfigError, match=r"of torchrun or SLURM is incomplete \('SLURM_LOCALID'\); start the command"):
        launch({name: value for name, value in SLURM.items() if name != "SLURM_LOCALID"})
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE='two' "):
        launch(TORCHRUN | {"WORLD_SIZE": "two"})


@pytest.mark.parametrize(("name", "value"), [("MASTER_PORT", "99999"), ("SLURM_STEP_NODELIST", "")])
def test_an_address_that_cannot_be_one_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "")
    monkeypatch.setenv("MASTER_PORT", "")
    for variable, text in {**(TORCHRUN if name == "MASTER_PORT" else SLURM), name: value}.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match="MASTER_PORT="):
        join_processes(timeout=1.0)
