"""Servers to measure, each in processes of its own: their start, their processor time and their memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import vitrail
from vitrail.bench.peers import benchmark_script
from vitrail.errors import ConfigError

__all__ = ["SERVERS", "ServerKind", "check_pythons", "cpu_seconds", "memory_bytes", "started"]

PATIENCE = 20.0
"""Seconds in which a server has to end."""


@dataclass(frozen=True)
class ServerKind:
    """A server that can be measured."""

    words: tuple[str, ...]
    """What Python runs. It names its address on the standard error output when it answers."""
    library: str = ""
    """Library that it needs, which can have an environment of its own."""


SERVERS = {
    "vitrail": ServerKind(("-m", "vitrail", "serve", "model={model}", "--port", "0", "--precision", "{precision}")),
    "naive": ServerKind(("{servers}", "naive", "{model}", "{precision}")),
    "litserve": ServerKind(("{servers}", "batches", "{model}", "{precision}"), "litserve"),
    "litserve-workers": ServerKind(("{servers}", "workers", "{model}", "{precision}"), "litserve"),
}
"""Servers by their names."""


def check_pythons(names: Sequence[str], pythons: Mapping[str, str]) -> None:
    """Raise `ConfigError` unless the libraries of these servers can be imported by their Pythons, by default the Python
    that runs Vitrail."""
    if len(names) > 1:
        benchmark_script("servers.py")
    needed = {SERVERS[name].library for name in names} - {""}
    for library in pythons:
        if library not in needed:
            raise ConfigError(
                f"environment: {library!r} is not a library of the servers to measure: {', '.join(names)}"
            )
    for library in sorted(needed):
        python = pythons.get(library, sys.executable)
        script = f"import {library}, vitrail.weights.load"
        try:
            check = subprocess.run([python, "-c", script], capture_output=True, text=True, env=_environment())
        except OSError as error:
            raise ConfigError(
                f"environment: {python} cannot be run as the Python of {library}: {error.strerror}"
            ) from None
        if check.returncode:
            lines = check.stderr.strip().splitlines() or ["it printed nothing"]
            raise ConfigError(
                f"--against {library}: {lines[-1]}. Install {library} and the packages of Vitrail in an environment, "
                f"and name its Python with --environment {library}=PATH/bin/python"
            )


@contextmanager
def started(name: str, model: Path, precision: str, pythons: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """Start a server, and yield the number of its process and its port. Raise `ConfigError` if it does not start."""
    kind = SERVERS[name]
    script = benchmark_script("servers.py") if "{servers}" in kind.words else ""
    words = (word.format(model=model, precision=precision, servers=script) for word in kind.words)
    command = [pythons.get(kind.library, sys.executable), *words]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL,  # a banner would stand before the JSON of this process
        stderr=subprocess.PIPE, text=True, env=_environment(), start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            said = ""
            while (found := re.search(r"http://127\.0\.0\.1:(\d+)", said)) is None:
                line = process.stderr.readline()
                if not line:
                    raise ConfigError(f"against={name!r} did not start: {said.strip()}")
                said += line
            log = process.stderr  # it is read, so that the server never waits for a full pipe
            threading.Thread(target=lambda: [None for _ in log], daemon=True).start()
            yield process.pid, int(found[1])
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            with suppress(ProcessLookupError):  # processes that it has left behind
                os.killpg(process.pid, signal.SIGKILL)


def cpu_seconds(process: int) -> float:
    """Return the processor time of a process and its descendants so far."""
    ticks = 0
    for one in _tree(process):
        with suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_bytes(process: int) -> int:
    """Return the memory of a process and its descendants. Pages that several processes share are divided among them."""
    total = 0
    for one in _tree(process):
        with suppress(OSError):
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def _tree(process: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found = [process]
    for one in found:  # the list grows
        found += children.get(one, [])
    return found


def _environment() -> dict[str, str]:
    """Return the variables of a server: it finds this Vitrail, also from another library's environment."""
    return {**os.environ, "PYTHONPATH": str(Path(vitrail.__file__).parents[1])}
