"""Processes of the server: one that loads models and serves them on a socket, or several under a supervisor.

Workers of a supervisor share one listening socket. A worker that dies is started again. Connections that no worker has
accepted stay with the socket, so the other workers or the new one answer them.
"""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import torch
import uvicorn
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitrail.errors import BundleError, ConfigError, ProcessError, VitrailError
from vitrail.evaluation.features.index import FeatureIndex
from vitrail.export.engines import with_engine
from vitrail.machine import Precision, environment, keep_freed_memory
from vitrail.models.predictor import EngineChoice
from vitrail.serving.app import make_app
from vitrail.serving.service import FOLDER, OverlayMaker, Service, log_line
from vitrail.serving.settings import ServeSettings
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported import exported_file
from vitrail.weights.load import TOKENIZERS, find, load, looks_like_hub_name, model_name
from vitrail.weights.saved import DESCRIPTION, NAMES
from vitrail.weights.tensors import SUFFIXES

# --- one connection


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


# --- one server


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
        watch: Callable[[], Coroutine[Any, Any, None]] | None = None,
        supervisor: int | None = None,
    ) -> None:
        """`on_start` is called when the server listens. `watch()` replaces models while the server runs. `supervisor`
        is the process of a worker's supervisor."""
        settings = service.settings
        keep_alive: Any = settings.keep_alive_seconds  # the event loop takes fractions, unlike the type in uvicorn
        protocol: Any = partial(LimitedProtocol, service=service)
        super().__init__(
            uvicorn.Config(
                make_app(service, watch), http=protocol, ws="none", lifespan="on", log_level="error",
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
    except (OSError, TypeError) as error:  # TypeError: no name of a host can be so long
        opened.close()
        advice = (
            "another port, or 0 for a free one"
            if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
            else "an address of this machine, such as 127.0.0.1"
        )
        raise ConfigError(
            f"port={settings.port} on host={settings.host!r} cannot be used: {getattr(error, 'strerror', error)}; "
            f"choose {advice}"
        ) from None
    return opened


def _allow_files(wanted: int) -> int:
    """Let this process open at least this many files, as far as the system permits it. Return the number of them that
    it permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    permitted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (permitted, hard))
    return permitted


# --- one process


@dataclass(frozen=True, kw_only=True)
class ServeJob:
    """The models to serve, and the settings of the server."""

    models: Mapping[str, str]
    """Paths of the models, or their names on the hub, by the names under which they are served."""
    settings: ServeSettings
    device: str = "auto"
    precision: Precision | None = None
    engine: EngineChoice = "auto"
    """Runtime that computes on a CPU."""
    overlays: OverlayMaker | None = None
    """Function that draws the relevance of an image's parts. It can be pickled."""
    index: Path | None = None
    """Folder of features that are searched."""


def named_models(models: Sequence[str]) -> dict[str, str]:
    """Return the paths of models by the names under which they are served. Raise `ConfigError` for two models of the
    same name."""
    paths: dict[str, str] = {}
    for text in models:
        name, equals, path = text.partition("=")
        if not equals or "/" in name or Path(text).exists():
            name, path = model_name(text), text
        if not name or not path:
            raise ConfigError(f"MODEL: {text!r} lacks a name or a path; give NAME=MODEL")
        if name != name.strip() or not name.isprintable():
            raise ConfigError(
                f"MODEL: {name!r} begins or ends with a space, or has control characters; give NAME=MODEL"
            )
        if name in paths:
            raise ConfigError(f"MODEL: two models are called {name!r}; give another name to one of them: NAME=MODEL")
        paths[name] = path
    return paths


def serve(
    job: ServeJob,
    listening: socket.socket,
    *,
    on_start: Callable[[], None],
    on_note: Callable[[str], None],
    supervisor: int | None = None,
) -> None:
    """Load the models, and serve them until a signal stops the process. Raise `VitrailError` for a model that cannot be
    loaded or served. `on_note` is called with each note on loading, and `on_start` when the server listens.
    `supervisor` is the process of a worker's supervisor."""
    keep_freed_memory()  # otherwise each batch gets its memory from the system anew
    wanted = 2 * job.settings.max_connections + FILES
    if (permitted := _allow_files(wanted)) < wanted:
        on_note(
            f"{job.settings.max_connections:,} connections need {wanted:,} open files, and the system permits "
            f"{permitted:,}; raise that limit (ulimit -n), or choose max_connections={max(1, (permitted - FILES) // 2)}"
        )
    watched = job.models if job.settings.watch else {}
    files = {name: ModelFiles.of(path, job.device) for name, path in watched.items()}
    states = {name: one.state() for name, one in files.items()}
    index = None if job.index is None else FeatureIndex.open(job.index)  # before the models are loaded in vain
    service = Service(load_models(job, files, on_note), job.settings, job.precision, job.overlays, index)
    watch = Watcher(service, files, states).run if files else None
    Server(service, on_start, watch=watch, supervisor=supervisor).run(sockets=[listening])


def serve_as_worker(
    job: ServeJob, on_note: Callable[[str], None], number: int, listening: socket.socket, told: Connection
) -> None:
    """Serve in one of several processes that serve the same models, with a part of the compute threads. The first
    worker alone reports notes, which are the same for all. `functools.partial` of the first two arguments is the
    function of a `Supervisor`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the server has its own rule
    torch.set_num_threads(max(1, torch.get_num_threads() // job.settings.workers))
    try:
        serve(
            job,
            listening,
            on_start=lambda: told.send(None),
            on_note=on_note if number == 0 else lambda _: None,
            supervisor=os.getppid(),
        )
    except VitrailError as error:
        told.send(error)
        raise SystemExit(error.exit_code) from None


def load_models(job: ServeJob, files: Mapping[str, ModelFiles], on_note: Callable[[str], None]) -> dict[str, Bundle]:
    """Return the models of a server with their runtimes. Those of `files` are read from a private copy."""
    bundles = {}
    for name, path in job.models.items():
        bundle = files[name].load() if name in files else load(path, device=job.device)
        for note in bundle.notes:
            on_note(note)
        bundles[name] = with_engine(bundle, job.engine, precision=job.precision, note=on_note)
    return bundles


Work = Callable[[int, socket.socket, Connection], None]
"""The function of a worker: its number, the socket, and a connection to which it sends None when it listens, or the
`VitrailError` for which it cannot. It can be pickled."""


# --- several processes


SETTLED = 60.0
"""Seconds after which the death of a worker counts as the first one again."""

LONGEST = 30.0
"""Longest pause in seconds before a worker is started again."""


@dataclass(eq=False)
class _Running:
    number: int
    process: SpawnProcess
    told: Connection
    begun: float = field(default_factory=time.monotonic)
    is_ready: bool = False


class Supervisor:
    """Starts worker processes, forwards signals to them, and starts those again that die.

    SIGTERM or SIGINT lets all workers answer what they have received, and a second signal ends them at once. A worker
    that gets SIGTERM from someone else does the same, and another one takes its place.
    """

    def __init__(self, count: int, work: Work, listening: socket.socket, on_start: Callable[[], None]) -> None:
        """`on_start` is called when all workers listen for the first time."""
        self._count, self._work, self._listening, self._on_start = count, work, listening, on_start
        self._context = multiprocessing.get_context("spawn")  # a forked process could not use threads or a GPU
        self._workers: list[_Running] = []
        self._deaths = [0] * count
        self._due: dict[int, float] = {}  # when a worker is started again, by its number
        self._signals = 0
        self._has_started = False
        self._metrics = ""

    def run(self) -> None:
        """Run until a signal has stopped all workers. Raise the `VitrailError` of a worker that cannot start, and
        `ProcessError` if a worker dies before all have started."""
        made = tempfile.TemporaryDirectory(prefix="vitrail-metrics-")
        with made as self._metrics, environment(FOLDER, made.name), self._waking() as woken:
            try:
                for number in range(self._count):
                    self._start(number)
                while self._workers or (self._due and not self._signals):
                    self._wait(woken)
            finally:
                for worker in self._workers:
                    worker.process.kill()
                    worker.process.join()

    def _start(self, number: int) -> None:
        told, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=self._work, args=(number, self._listening, theirs))
        process.start()
        theirs.close()
        self._workers.append(_Running(number, process, told))

    def _wait(self, woken: socket.socket) -> None:
        """Wait for the next event, and act on it."""
        now = time.monotonic()
        pause = min((due - now for due in self._due.values()), default=None)
        waiting: list[Any] = [woken, *(worker.process.sentinel for worker in self._workers)]
        waiting += [worker.told for worker in self._workers if not worker.told.closed]
        ready = wait(waiting, None if pause is None else max(0.0, pause))
        if woken in ready:
            woken.recv(4096)
            self._stop()
        for worker in list(self._workers):
            if worker.told in ready:
                self._read_report(worker)
            if worker.process.sentinel in ready:
                self._remove_ended(worker)
        for number in [number for number, due in self._due.items() if due <= time.monotonic()]:
            del self._due[number]
            self._start(number)

    def _read_report(self, worker: _Running) -> None:
        """Read the only message of a worker."""
        try:
            error: VitrailError | None = worker.told.recv()
        except EOFError:  # it died before
            error = None
        else:
            worker.is_ready = error is None
        worker.told.close()
        if error is not None:
            if not self._has_started:
                raise error
            log_line(event="worker failed", worker=worker.number, pid=worker.process.pid, error=str(error))
        if worker.is_ready:
            log_line(event="worker started", worker=worker.number, pid=worker.process.pid)
        if not self._has_started and all(one.is_ready for one in self._workers):
            self._has_started = True
            self._on_start()

    def _remove_ended(self, worker: _Running) -> None:
        """Remove a worker that has ended, and plan another one in its place."""
        worker.process.join()
        worker.told.close()
        self._workers.remove(worker)
        mark_process_dead(worker.process.pid, self._metrics)  # type: ignore[no-untyped-call]
        if self._signals:
            return
        code = worker.process.exitcode or 0
        name = next((one.name for one in signal.Signals if one == -code), -code)  # real-time signals have none
        cause = f"signal {name}" if code < 0 else f"exit code {code}"
        log_line(event="worker ended", worker=worker.number, pid=worker.process.pid, cause=cause)
        if not self._has_started:
            raise ProcessError(f"a worker ended with {cause} before all of them had started; is there enough memory?")
        lived = time.monotonic() - worker.begun
        deaths = self._deaths[worker.number] = 1 if lived > SETTLED else self._deaths[worker.number] + 1
        self._due[worker.number] = time.monotonic() + (min(LONGEST, 2.0 ** (deaths - 2)) if deaths > 1 else 0.0)

    def _stop(self) -> None:
        """Forward a signal. Workers that still load their models end at once."""
        self._due.clear()
        self._listening.close()  # or connections would wait for nobody after the workers have stopped listening
        for worker in self._workers:
            if self._signals > 1:
                worker.process.kill()
            else:
                worker.process.terminate()

    @contextmanager
    def _waking(self) -> Iterator[socket.socket]:
        """Yield a socket that can be read when a signal has arrived."""

        def handle(number: int, frame: FrameType | None) -> None:
            self._signals += 1

        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
            earlier = signal.set_wakeup_fd(theirs.fileno())
            try:
                yield ours
            finally:
                signal.set_wakeup_fd(earlier)
                for number, handler in before.items():
                    signal.signal(number, handler)


# --- replacement of models whose files change while they are served
#
# A model is read from a private copy of its files. Weights are mapped into memory when they are loaded, so a program
# that writes over the files of a model in use would otherwise change its answers or end the server.


INTERVAL = 0.5
"""Seconds between two checks of the files. Files are read when two checks find the same state."""

State = tuple[tuple[str, int, int, int], ...]
"""Names, sizes, times of modification and inodes of the files of a model."""


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, which other programs may replace or write over at any time."""

    path: Path
    device: str = "auto"

    @classmethod
    def of(cls, model: str, device: str = "auto") -> ModelFiles:
        """Return the files of a model by its path. Raise `ConfigError` for a name on the hub."""
        if looks_like_hub_name(model):
            raise ConfigError(f"watch=True needs files, but {model!r} is a name on the hub; give a folder or a file")
        return cls(find(model)[0], device)

    def state(self) -> State:
        """Return the state of the files. It is empty if there are none."""
        try:
            files = self._files()
        except OSError:  # the folder was removed while it was listed
            return ()
        found = []
        for file in files:
            with suppress(OSError):  # it was removed
                status, name = file.stat(), str(file.relative_to(self.path.parent))
                found.append((name, status.st_size, status.st_mtime_ns, status.st_ino))
        return tuple(found)

    def load(self) -> Bundle:
        """Return the model in these files. Raise `VitrailError` for files that are no model, that do not agree with
        each other, or that change while they are read."""
        before = self.state()
        with tempfile.TemporaryDirectory(prefix="vitrail-serve-") as folder:
            for name, *_ in before:
                target = Path(folder) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    shutil.copyfile(self.path.parent / name, target)
                except OSError as error:
                    raise BundleError(f"{self.path} cannot be read: {error.strerror or error}") from None
            if self.state() != before:
                raise BundleError(f"{self.path} changed while it was read")
            try:
                return load(Path(folder) / self.path.name if before else self.path, device=self.device)
            except BundleError as error:
                raise BundleError(str(error).replace(folder, str(self.path.parent))) from None

    def _files(self) -> list[Path]:
        path = self.path
        if not path.is_dir():
            return [path, path.with_suffix(".bin")] if path.suffix.lower() == ".xml" else [path]
        if exported_file(path):
            return sorted(file for file in path.rglob("*") if file.is_file())
        for folder in (path, path / "model"):
            if (folder / DESCRIPTION).exists():
                return [folder / name for name in NAMES if (folder / name).exists()]
        tokenizers = {name for files in TOKENIZERS for name in files}
        return sorted(
            file for file in path.iterdir() if file.name.endswith((*SUFFIXES, ".json")) or file.name in tokenizers
        )


class Watcher:
    """Replaces the models of a service when their files change.

    Files that are being written are left alone until they have stopped changing. The weights must have the hash that
    the description of a model states, so half of a new model is never served. If the new files cannot be served, the
    old model stays, and the log has the reason.
    """

    def __init__(self, service: Service, files: Mapping[str, ModelFiles], states: Mapping[str, State]) -> None:
        """`files` are the files of models by the models' names, and `states` their states before they were loaded."""
        self._service = service
        self._files = files
        self._known = dict(states)
        self._seen = dict(states)

    async def run(self) -> None:
        """Watch until the task is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            for name in self._files:
                await self.look(name)

    async def look(self, name: str) -> None:
        """Replace a model if its files have changed since they were last read, and not since the last check."""
        state = await asyncio.to_thread(self._files[name].state)
        is_settled = state == self._seen[name]
        self._seen[name] = state
        if not is_settled or state == self._known[name]:
            return
        self._known[name] = state
        before = self._service.models[name].sha256
        try:
            if not state:
                raise BundleError(f"{self._files[name].path} does not exist any more")
            bundle = await asyncio.to_thread(self._files[name].load)
            made = await self._service.replace(name, bundle)
        except Exception as error:  # whatever is wrong with the files, the old model answers
            log_line(event="model refused", model=name, sha256=before, error=f"{type(error).__name__}: {error}")
        else:
            engine = "torch" if made.bundle.engine is None else made.bundle.engine.name
            log_line(
                event="model replaced", model=name, sha256=made.sha256, before=before, engine=engine,
                **({"notes": bundle.notes} if bundle.notes else {}),
            )  # fmt: skip
