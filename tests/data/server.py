"""A web server on this machine, for tests of downloads and of files behind URLs."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Serves `files` in ranges. Each entry of `faults` spoils one request, in order. The last entry of "..."
    repeats."""

    def __init__(self) -> None:
        self.files: dict[str, bytes | None] = {}
        self.faults: list[str] = []
        self.states_versions = True
        self.requests: list[tuple[str, str, str]] = []
        self.released = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                """Not to the terminal."""

            def do_HEAD(self) -> None:
                server.answer(self)

            def do_GET(self) -> None:
                server.answer(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.address}/"

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        wanted = handler.headers["Range"] or ""
        self.requests.append((handler.command, handler.path, wanted))
        fault = self.faults.pop(0) if self.faults and self.faults[-1] != "..." else (self.faults or [""])[0]
        if fault == "stall":
            self.released.wait(60)
            return
        if fault.isdigit():
            handler.send_error(int(fault))
            return
        content = self.files.get(handler.path)
        if content is None:
            handler.send_error(404)
            return
        first, last = wanted.removeprefix("bytes=").split("-") if wanted else ("0", "")
        part = content[int(first) : int(last) + 1 if last else None]
        if fault == "short":
            part = part[: len(part) // 2]
        handler.send_response(206 if wanted else 200)
        handler.send_header("Content-Length", str(len(part)))
        handler.send_header("Accept-Ranges", "bytes")
        if self.states_versions:
            handler.send_header("ETag", f'"{hash(content)}"')
        if wanted:
            handler.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(part[: len(part) // 2] if fault == "drop" else part)
