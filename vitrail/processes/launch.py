"""The place of this process among those that torchrun or SLURM started, from environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from vitrail.errors import ConfigError

__all__ = ["Launch", "launch"]


class Launch(NamedTuple):
    """The place of this process among those that one command started."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """Number of this process on its machine, from 0. It is also the number of its GPU."""
    local_world: int = 1
    """Number of processes on this machine."""
    address: tuple[str, int] = ("", 0)
    """Host and port at which process 0 can be reached."""
    restarts: int = 0
    """Number of times that torchrun or SLURM has started the command again."""


def launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Return the place of this process from the environment variables of torchrun, else from those of SLURM.

    A SLURM job counts only inside `srun`, which sets the number of tasks of the step. Raises `ConfigError` for values
    that are not numbers.
    """
    try:
        if environment.get("RANK") and environment.get("WORLD_SIZE"):
            rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
            if not 0 <= rank < world:
                raise ConfigError(
                    f"RANK={rank} is not from 0 to {world - 1}, although WORLD_SIZE is {world}; give each process its "
                    "own rank below the number of processes"
                )
            return Launch(
                rank,
                world,
                _number(environment, "LOCAL_RANK", rank),
                _number(environment, "LOCAL_WORLD_SIZE", world),
                (environment.get("MASTER_ADDR", "localhost"), _number(environment, "MASTER_PORT", 29500)),
                _number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
            )
        if _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
            per_node = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
            port = _number(environment, "MASTER_PORT", 20000 + _number(environment, "SLURM_JOB_ID") % 20000)
            return Launch(
                _number(environment, "SLURM_PROCID"),
                _number(environment, "SLURM_STEP_NUM_TASKS"),
                _number(environment, "SLURM_LOCALID"),
                int(per_node[0]) if per_node else 1,
                (environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]), port),
                _number(environment, "SLURM_RESTART_COUNT", 0),
            )
    except KeyError as error:
        raise ConfigError(
            f"the environment of torchrun or SLURM is incomplete ({error}); start the command with torchrun or srun"
        ) from None
    return Launch()


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the number in a variable, or the default if the variable is empty or not set. Raise `KeyError` without a
    default, and `ConfigError` for any other text."""
    text = environment.get(name) or default
    if text is None:
        raise KeyError(name)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name}={text!r} in the environment is not a whole number; start the command with torchrun or srun, or "
            f"leave {name} out"
        ) from None


def first_host(nodes: str) -> str:
    """Return the first host of a list in SLURM's notation, such as "gpu[03-05,9],login1"."""
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])
