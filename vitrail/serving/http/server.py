"""The process of the server: listening, and stopping without losing requests."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from vitrail.errors import ConfigError
from vitrail.serving.answering.service import Service
from vitrail.serving.answering.settings import ServeSettings
from vitrail.serving.answering.watch import Watcher
from vitrail.serving.http.app import make_app
from vitrail.serving.http.connections import LimitedProtocol

FILES = 256
"""Number of files that a process opens in addition to its connections."""


class Server(uvicorn.Server):
    """A server whose `run` serves until SIGTERM or SIGINT, and answers all requests that it has received by then.

    After the first signal the probe `ready` answers 503 for `drain_seconds`, while requests are still accepted. Then
    the server stops listening and answers what it has. A second signal stops it at once.

    A worker of a supervisor leaves SIGINT, which a terminal sends to all processes, and second signals to its
    supervisor. It also stops if its supervisor dies.
    """

    def __init__(
        self,
        service: Service,
        on_start: Callable[[], None] = lambda: None,
        *,
        watcher: Watcher | None = None,
        supervisor: int | None = None,
    ) -> None:
        """`on_start` is called when the server listens. `watcher` replaces models while the server runs. `supervisor`
        is the process of a worker's supervisor."""
        settings = service.settings
        keep_alive: Any = settings.keep_alive_seconds  # the event loop takes fractions, unlike the type in uvicorn
        protocol: Any = partial(LimitedProtocol, service=service)
        super().__init__(
            uvicorn.Config(
                make_app(service, watcher), http=protocol, ws="none", lifespan="on", log_level="error",
                access_log=False, server_header=False, timeout_keep_alive=keep_alive,
                h11_max_incomplete_event_size=32768,
                timeout_graceful_shutdown=int(settings.deadline_seconds + settings.receive_seconds) + 1,
            )
        )  # fmt: skip
        self._service = service
        self._on_start = on_start
        self._supervisor = supervisor
        self._stops_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        _allow_files(2 * self._service.settings.max_connections + FILES)
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._supervisor is not None and (sig == signal.SIGINT or self._stops_at is not None):
            return
        if self._stops_at is not None or not self.started:
            self.should_exit = self.force_exit = True
            return
        self._begin_stop()  # `on_tick` does the rest

    async def on_tick(self, counter: int) -> bool:
        if self._stops_at is None and self._supervisor not in (None, os.getppid()):
            self._begin_stop()
        if self._stops_at is not None and not self._service.is_draining:
            self._service.drain()
        if self._stops_at is not None and time.monotonic() >= self._stops_at:
            self.should_exit = True
        return await super().on_tick(counter)

    def _begin_stop(self) -> None:
        self._stops_at = time.monotonic() + self._service.settings.drain_seconds


def open_socket(settings: ServeSettings) -> socket.socket:
    """Return a socket that is bound to the address. Raise `ConfigError` if the address is not free or does not
    exist."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Without the number of the protocol, asyncio does not set TCP_NODELAY, and answers wait for acknowledgements.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((settings.host, settings.port))
    except OSError as error:
        opened.close()
        raise ConfigError(
            f"port={settings.port} on host={settings.host!r} cannot be used: {error.strerror}; choose another port, or "
            "0 for a free one"
        ) from None
    return opened


def _allow_files(wanted: int) -> None:
    """Let this process open at least this many files, as far as the system permits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
