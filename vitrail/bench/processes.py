"""Worker processes, which keep the measured libraries from sharing memory or settings.

Workers are forked from one process that has only imported torch ("forkserver"), so they start clean and quickly.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from vitrail.errors import VitrailError

__all__ = ["ProcessKilled", "Worker"]


class ProcessKilled(VitrailError):
    """A process ended without an answer, because of a signal or a lack of memory."""


class Worker:
    """A process that makes an object and calls the object's methods on request.

    The constructor raises the error of making the object, and `ProcessKilled` if the process dies.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        # Creating the first optimizer imports torch._dynamo, which is slow.
        context.set_forkserver_preload(["vitrail.bench.entries", "torch._dynamo"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def call(self, method: str) -> Any:
        """Call a method of the object and return the result. Raises the errors of the method."""
        self._connection.send(method)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join()

    def _answer(self) -> Any:
        try:
            error, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise ProcessKilled(f"a process ended with exit code {self._process.exitcode} and no answer") from None
        if error is not None:
            raise error
        return value


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the expected messages of libraries that run out of memory
    try:
        made = make(*arguments)
        connection.send((None, None))
        while True:
            value = getattr(made, connection.recv())()
            connection.send((None, value))
    except EOFError:  # the other side has closed the connection
        return
    except Exception as error:
        connection.send((_portable(error), None))


def _portable(error: Exception) -> Exception:
    """Return the error if it can be pickled, else a `VitrailError` with its message."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return VitrailError(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
