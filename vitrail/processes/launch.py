"""The place of this process among those that were started together, and signs that they are alive."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from vitrail.errors import ConfigError


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
    that are not numbers, and for several processes of which this one has no number.
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
                (environment.get("MASTER_ADDR") or "localhost", _number(environment, "MASTER_PORT", 29500)),
                _number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
            )
        if _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
            per_node = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
            # Steps of a job can run side by side, so each has a port of its own.
            step = _number(environment, "SLURM_JOB_ID") + 997 * _number(environment, "SLURM_STEP_ID", 0)
            return Launch(
                _number(environment, "SLURM_PROCID"),
                _number(environment, "SLURM_STEP_NUM_TASKS"),
                _number(environment, "SLURM_LOCALID"),
                int(per_node[0]) if per_node else 1,
                (
                    environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
                    _number(environment, "MASTER_PORT", 20000 + step % 20000),
                ),
                _number(environment, "SLURM_RESTART_COUNT", 0),
            )
        if _number(environment, "WORLD_SIZE", 1) > 1:
            raise KeyError("RANK")
    except KeyError as error:
        raise ConfigError(
            f"the environment of torchrun or SLURM is incomplete ({error}); start the command with torchrun or srun, "
            "or leave WORLD_SIZE out"
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


# Signs of life of processes, which show whether a process has ended or is behind the others.


BEAT_SECONDS = 1.0
"""Seconds between two signs of life of a process."""


class SignsOfLife:
    """A thread that writes every second how many exchanges this process has begun, and reads those of the others."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store = store
        self.reader = store.clone()  # a connection of its own, because a thread uses the other one
        self.rank = rank
        self.count = 0
        self._ended = threading.Event()
        self._beats = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name="signs of life")
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(2 * BEAT_SECONDS)

    def missing(self, ranks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the ranks that give no signs of life, and those that have begun fewer exchanges than this process.
        Raises `RuntimeError` if the store cannot be reached."""
        before = self._read(ranks)
        time.sleep(3 * BEAT_SECONDS)
        after = self._read(ranks)
        gone = [rank for rank in ranks if before[rank] == after[rank]]
        counts = {rank: int(text.split()[1]) for rank, text in after.items() if rank not in gone}
        return gone, [rank for rank, count in counts.items() if count < self.count]

    def _read(self, ranks: Sequence[int]) -> dict[int, str]:
        return {rank: self.reader.get(f"life/{rank}").decode() for rank in ranks}

    def _run(self) -> None:
        with suppress(Exception):  # the store ends with the first process
            while True:
                self._beats += 1
                self.store.set(f"life/{self.rank}", f"{self._beats} {self.count}")
                if self._ended.wait(BEAT_SECONDS):
                    return


# Function calls with a time limit.


T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work`, or raise its error. Raise `TimeoutError` if it takes longer than this time.

    `work` runs in a thread, which continues in the background after the time limit and may never end. For example, a
    read from a network that was cut waits for ever.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)  # so that a call that never ends does not block the exit
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError("no answer")
    return results[0]
