"""Connections: limits that uvicorn does not have, on their number and on the time for the headers of a request."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitrail.serving.answering.service import Service

LINGER = 1.0
"""Seconds in which a refused client can read the answer before its connection is closed."""

GRACE = 0.5
"""Seconds in which a stopping server waits for the request of a connection that has just been made."""


class LimitedProtocol(H11Protocol):
    """One connection: uvicorn's HTTP protocol with the limits of a service."""

    def __init__(self, *args: Any, service: Service, **kwargs: Any) -> None:
        """Take the limits from the settings of `service`. uvicorn gives all other arguments."""
        super().__init__(*args, **kwargs)
        self._service, self._settings = service, service.settings
        self._timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._awaits_request = True  # until an answer was sent; then until the next bytes come

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._settings.max_connections:
            self._refuse("503 Service Unavailable", "retry-after: 1\r\n")
        else:
            self._limit_headers()

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            self._awaits_request = True
            super().data_received(data)
            self._limit_headers()

    def on_response_complete(self) -> None:
        self._awaits_request = False
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection at once or after the present answer, because the server stops."""
        if self._awaits_request:
            self._awaits_request = False
            self.loop.call_later(GRACE, self.shutdown)
        elif not self._is_refused and not self.transport.is_closing():
            super().shutdown()

    def _limit_headers(self) -> None:
        """Limit the time for the headers: start a timer before a request, and cancel it when the headers are
        complete."""
        if self.conn.their_state is not h11.IDLE:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None:  # further bytes do not extend the time
            self._timer = self.loop.call_later(self._settings.receive_seconds, self._end_headers)

    def _end_headers(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._refuse("408 Request Timeout", "")

    def _refuse(self, status: str, headers: str) -> None:
        """Send an answer without waiting for a request, and discard everything that the client still sends."""
        self._is_refused = True
        self.connections.discard(self)
        self._service.metrics.requests.labels("none", status[:3]).inc()
        text = f"HTTP/1.1 {status}\r\n{headers}content-length: 0\r\nconnection: close\r\n\r\n"
        self.transport.write(text.encode())
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER, self.transport.abort)
