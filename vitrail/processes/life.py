"""Signs of life of processes, which show whether a process has ended or is behind the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

__all__ = ["SignsOfLife"]

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
