"""`vitrail bench serve`: measure the HTTP server under load."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vitrail.bench.peers import BENCHMARKS, parse_environments
from vitrail.bench.reading import write_photographs
from vitrail.bench.serving import (
    BUSY,
    SERVERS,
    Load,
    check_pythons,
    measure_bare,
    measure_memory,
    measure_overhead,
    measure_servers,
)
from vitrail.cli.console import Column, measurement_title, print_json, terminal_table
from vitrail.cli.options import Call, Command, JsonOption, check_own_effects, names_in
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError
from vitrail.machine import Precision, describe
from vitrail.models.variants import build, is_variant, variant_config
from vitrail.registry import optional_module
from vitrail.settings import Effect, setting
from vitrail.training.stop import interrupted_by_signals
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

IMAGES = 32
"""Number of generated photographs that the clients send in turn."""


LOADS = Effect(lambda own: not own.requests, "without --requests")


@dataclass(frozen=True, kw_only=True)
class BenchServe(JsonOption):
    """Options of `vitrail bench serve`."""

    model: str = setting("ViT-S/16", argument="[MODEL]")
    """Folder of a model or a run, an exported file, a name on the hub, or the name of a network (vitrail models), which
    gets random weights and 1,000 classes."""
    clients: tuple[int, ...] = setting((1, 8, 32), least=1, most=10_000, may_be_empty=True)
    """Numbers of clients of closed loops, in which each client sends the next request after an answer."""
    rates: tuple[float, ...] = setting((0.2, 0.5, 0.8, 1.0, 1.2), effect=LOADS, above=0, may_be_empty=True)
    """Rates of open loops, in which requests arrive at random times, as fractions of the throughput of prediction
    without a server."""
    seconds: float = setting(5.0, effect=LOADS, above=0)
    """Seconds per server and load."""
    rounds: int = setting(1, effect=LOADS, least=1)
    """Number of rounds in which the servers take turns under each load. The seconds are divided among them."""
    against: str = "naive" if BENCHMARKS.exists() else "none"
    """Other servers to measure, with commas between them: naive computes each request alone, on the threads of its
    framework; litserve computes batches; litserve-workers has a process per core; none measures Vitrail only. An
    installed package has no other servers: they are in the repository."""
    environment: tuple[str, ...] = ()
    """Python of a library's own environment, such as litserve=/opt/litserve/bin/python. By default the Python of
    Vitrail."""
    requests: int = setting(0, least=0)
    """Measure the memory instead: after each tenth of this number of requests, from the largest of `clients`."""
    precision: Precision = "float32"
    """Number format of matrix products in all servers."""


COMMAND = Command(
    name="bench serve",
    summary="""Measure the HTTP server under load: latency, throughput, errors, processor time per request, and memory.
    The servers run in processes of their own, and the clients in this process. Only one server is under load at a
    time.""",
    examples=(
        ("vitrail bench serve", "Measure a ViT-S/16 with random weights."),
        (
            "vitrail bench serve --against litserve --environment litserve=litserve/bin/python",
            "Compare with LitServe, which is installed in an environment of its own.",
        ),
        ("vitrail bench serve runs/flowers --requests 50000", "See whether the memory of the servers grows."),
    ),
    options=(BenchServe,),
    essential={
        "Load": ("clients", "rates", "seconds", "rounds"),
        "Measurement and output": ("against", "environment", "requests", "precision", "json"),
    },
)


def main(call: Call, options: BenchServe) -> None:
    check_own_effects(call.options, options)
    _check(options)
    optional_module("uvicorn", "serve")
    names = _servers(options.against)
    pythons = parse_environments(options.environment)
    check_pythons(names, pythons)
    with (
        interrupted_by_signals(),  # otherwise SIGTERM leaves the servers running
        _model(options.model) as (folder, bundle),
        tempfile.TemporaryDirectory(prefix="vitrail-bench-") as name,
    ):
        images = [path.read_bytes() for path in sorted(write_photographs(Path(name), IMAGES).rglob("*.jpg"))]
        shared: dict[str, Any] = {"precision": options.precision, "pythons": pythons}
        if options.requests:
            clients = max(options.clients)
            points = list(measure_memory(names, folder, images, requests=options.requests, clients=clients, **shared))
            plain: dict[str, Any] = {"memory": points}
            tables = [terminal_table(MEMORY_COLUMNS, points, MEMORY_CAPTION)]
        else:
            bare = measure_bare(bundle, images, options.precision, options.seconds / 4)
            loads = [Load(clients=count) for count in options.clients]
            loads += [Load(rate=share * bare.images_per_second) for share in options.rates]
            timing: dict[str, Any] = {"seconds": options.seconds, "rounds": options.rounds}
            measured = list(measure_servers(names, loads, folder, images, **timing, **shared))
            overheads = list(measure_overhead(names, folder, bundle, images, bare, seconds=options.seconds, **shared))
            plain = {"bare": asdict(bare), "servers": measured, "overheads": overheads}
            caption = (
                f"Without a server: {bare.images_per_second:.1f} images/s in batches of {bare.batch}, and "
                f"{1000 * bare.seconds:.1f} ms for one image. p50, p95 and p99: time to the answer in ms, from the "
                "moment when a request was due. per s: answers per second. good: answers within a second, per second. "
                "CPU: processor time of the server per request, in ms."
            )
            tables = [
                terminal_table(LOAD_COLUMNS, measured, caption),
                terminal_table(OVERHEAD_COLUMNS, overheads, OVERHEAD_CAPTION),
            ]
    machine = describe(bundle.device)
    if options.json:
        print_json({"machine": machine, **plain})
        return
    height, width = bundle.preprocess.image_size
    what = f"{options.model}, {options.precision}, images of 500 x 375 pixels to {height} x {width}"
    console = Console()
    for part in (measurement_title(machine, what), *tables):
        console.print(part, highlight=False)


def _check(options: BenchServe) -> None:
    if not options.clients and not options.rates:
        raise ConfigError("clients=() and rates=() leave nothing to measure; give at least one of them")
    if options.requests and not options.clients:
        raise ConfigError(f"requests={options.requests} needs a number of clients, but clients=() has none")


def _servers(against: str) -> list[str]:
    """Return the servers to measure. Raise `ConfigError` for a name that is none."""
    given = names_in(against, "against", [*SERVERS, "none"][1:])
    return ["vitrail", *(name for name in given if name != "none")]


@contextmanager
def _model(name: str) -> Iterator[tuple[Path, Bundle]]:
    """Yield a model with the path under which the servers find it."""
    if not is_variant(name):
        yield Path(name), load(name)
        return
    config = variant_config(name, num_classes=1000)
    bundle = Bundle(build(config), tuple(map(str, range(1000))), Preprocess(image_size=config.image_size))
    with tempfile.TemporaryDirectory(prefix="vitrail-bench-") as folder:
        yield bundle.save(Path(folder) / "model"), bundle


MEMORY_CAPTION = "MB: memory of the server's processes. Pages that several processes share are divided among them."

MEMORY_COLUMNS = (
    Column("server", "server"),
    Column("requests", "requests", ",d"),
    Column("errors", "errors"),
    Column("MB", "memory", lambda size: f"{size / 1e6:,.1f}"),
)


LOAD_COLUMNS = (
    Column("load", "load"),
    Column("server", "server"),
    Column("requests", "requests", ",d"),
    Column("per s", "throughput", ".1f"),
    Column("good", "goodput", ".1f"),
    *(Column(name, name, lambda seconds: f"{1000 * seconds:,.0f}") for name in ("p50", "p95", "p99")),
    Column("errors", "errors"),
    Column("CPU", "cpu_seconds", lambda seconds: f"{1000 * seconds:.0f}"),
    Column("MB", "memory", lambda size: f"{size / 1e6:,.0f}"),
)

OVERHEAD_CAPTION = (
    "Each server in turns with prediction without a server; medians. one client and alone: time for an image with "
    "and without the server on the same number of threads, in ms. added: their difference. "
    f"{BUSY} clients and batches: images per second with "
    "and without the server. of it: their ratio."
)

OVERHEAD_COLUMNS = (
    Column("server", "server"),
    Column("threads", "threads"),
    *(
        Column(heading, key, lambda seconds: f"{1000 * seconds:.1f}")
        for heading, key in (("one client", "alone"), ("alone", "bare"), ("added", "added"))
    ),
    Column(f"{BUSY} clients", "throughput", ".1f"),
    Column("batches", "bare_throughput", ".1f"),
    Column("of it", "fraction", lambda fraction: f"{100 * fraction:.0f} %"),
    Column("errors", "errors"),
)
