"""Starts functions in several processes, as torchrun would start a command.

The processes are forked from a server that has imported the package once, so a test does not wait for each of them to
import torch.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

__all__ = ["Ended", "command", "in_processes", "server"]

SECONDS = 400.0


class Ended(NamedTuple):
    """The end of a process: its result, or the error that it raised. Both are None if it was killed."""

    result: Any = None
    error: BaseException | None = None
    is_reported: bool = False
    code: int | None = 0
    """The exit code, or None if the process had to be killed because it did not end."""


def server() -> Any:
    """Return the context of multiprocessing whose processes are forked from a server that has imported the package."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vitrail.training.run", "vitrail.recipes", "grain", "tests.several"])
    return context


def in_processes(world: int, function: Callable[..., Any], *arguments: Any) -> list[Ended]:
    """Call a function of a module in `world` processes, and return how each of them ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = server()
    started = []
    for rank in range(world):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_call, args=(send, rank, world, port, function, arguments), daemon=True)
        process.start()
        send.close()
        started.append((process, receive))
    ended = []
    for process, receive in started:
        found: tuple[Any, ...] = ()
        try:
            if receive.poll(SECONDS):
                found = receive.recv()
        except EOFError:
            pass
        process.join(SECONDS)
        code = process.exitcode
        if code is None:
            process.kill()
        ended.append(Ended(*(found or (None, None, False)), code))
    return ended


def command(*words: str) -> tuple[int, str, str]:
    """Run `vitrail WORDS...` in this process. Return the exit code, the printed text and the printed errors."""
    from vitrail.cli import main

    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        code = main(words)
    return code, out.getvalue(), errors.getvalue()


def _call(
    send: Any, rank: int, world: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ["VITRAIL_FLOAT32_PRODUCTS"] = "mkl"
    if world > 1:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    import torch

    from vitrail.processes import group

    torch.set_num_threads(1)
    try:
        send.send((function(*arguments), None, False))
    except Exception as error:
        plain = type(error)(str(error)) if len(error.args) == 1 else RuntimeError(f"{type(error).__name__}: {error}")
        send.send((None, plain, getattr(error, "is_reported", False)))
    finally:
        send.close()
        for joined in group._JOINED:  # none, if the processes did not come together: a second attempt would wait
            joined.leave()
