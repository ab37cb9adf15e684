"""The standard streams of a command that are closed, or whose reader or disk is gone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vitrail.errors import SaveError


def open_streams() -> None:
    """Open the standard streams that the caller has closed, so that what is printed is discarded.

    Otherwise the next file that is opened would get the number of a closed stream, and the messages of libraries.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until the process ends)


class Output:
    """The standard output or the standard error output of a command, without the errors of a stream that is lost: the
    reader of a pipe has ended, a disk is full, or a terminal was closed. Everything that follows is discarded.

    A lost standard output ends the command as a closed terminal does. A command that can be continued therefore saves
    its state first, and a command under nohup goes on. Any other command raises `BrokenPipeError` or `SaveError`. If
    the standard error output is lost, the command goes on.
    """

    def __init__(self, stream: Any, *, is_error_output: bool = False) -> None:
        self._stream = stream
        self._is_error_output = is_error_output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._discarding():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._discarding():
            self._stream.flush()

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # where Python also writes what is left when it exits
            os.close(nowhere)
            if self._is_error_output:
                return
            message = f"the standard output cannot be written: {error.strerror}"
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
                print(f"vitrail: {message}", file=sys.stderr)
                signal.raise_signal(signal.SIGHUP)
            elif isinstance(error, BrokenPipeError):
                raise
            else:
                raise SaveError(message) from error
