"""Connections: limits that uvicorn does not have, on their number and on the time for the headers of a request."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitrail.serving.answering.service import Service

__all__ = ["protocol_class"]

LINGER = 1.0
"""Seconds in which a refused client can read the answer before its connection is closed."""

GRACE = 0.5
"""Seconds in which a stopping server waits for the request of a connection that has just been made."""


def protocol_class(service: Service) -> type[H11Protocol]:
    """Return uvicorn's HTTP protocol with the limits of a service."""
    settings = service.settings

    class Protocol(H11Protocol):
        timer: asyncio.TimerHandle | None = None
        is_refused = False
        awaits_request = True  # until an answer was sent; then until the next bytes come

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                self._refuse("503 Service Unavailable", "retry-after: 1\r\n")
            else:
                self._limit_headers()

        def data_received(self, data: bytes) -> None:
            if not self.is_refused:
                self.awaits_request = True
                super().data_received(data)
                self._limit_headers()

        def on_response_complete(self) -> None:
            self.awaits_request = False
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.timer is not None:
                self.timer.cancel()
            super().connection_lost(exc)

        def shutdown(self) -> None:
            """Close the connection, or let it be closed after the answer, because the server stops."""
            if self.awaits_request:
                self.awaits_request = False
                self.loop.call_later(GRACE, self.shutdown)
            elif not self.is_refused and not self.transport.is_closing():
                super().shutdown()

        def _limit_headers(self) -> None:
            """Limit the time for the headers: start a timer before a request, and cancel it when the headers are
            complete."""
            if self.conn.their_state is not h11.IDLE:
                if self.timer is not None:
                    self.timer.cancel()
                    self.timer = None
            elif self.timer is None:  # further bytes do not extend the time
                self.timer = self.loop.call_later(settings.receive_seconds, self._end_headers)

        def _end_headers(self) -> None:
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self._refuse("408 Request Timeout", "")

        def _refuse(self, status: str, headers: str) -> None:
            """Send an answer without waiting for a request, and discard everything that the client still sends."""
            self.is_refused = True
            self.connections.discard(self)
            service.metrics.requests.labels("none", status[:3]).inc()
            text = f"HTTP/1.1 {status}\r\n{headers}content-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(text.encode())
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.timer = self.loop.call_later(LINGER, self.transport.abort)

    return Protocol
