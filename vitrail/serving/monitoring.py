"""The log of a server, with a line per request on the standard error output, and its metrics for Prometheus."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector


def log_line(**values: Any) -> None:
    """Write a line with the time and these values."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **values}
    sys.stderr.write(json.dumps(line) + "\n")  # in one call, so that lines of several processes do not mix
    sys.stderr.flush()


FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Variable with a folder in which several processes keep their metrics. It must be set before they start."""

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
MODEL = ("model", "task")
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """Counters and histograms of one server. All processes of a server report the metrics of all of them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "vitrail_requests", "Answered requests", ("path", "status"), registry=self._registry
        )  # fmt: skip
        self.seconds = self._histogram("vitrail_request_seconds", "Time of a request", ("path",))
        self.decoding = self._histogram("vitrail_decode_seconds", "Time for decoding an image", ())
        self.queue = self._histogram("vitrail_queue_seconds", "Longest wait in a batch", MODEL)
        self.inference = self._histogram("vitrail_inference_seconds", "Time for computing a batch", MODEL)
        self.sizes = self._histogram("vitrail_batch_size", "Images in a batch", MODEL, SIZES)
        self.images = self._gauge("vitrail_images", "Images that are accepted and not answered")
        self.bodies = self._gauge("vitrail_body_bytes", "Bytes of all bodies of requests")
        self.ready = self._gauge("vitrail_ready", "Number of processes that accept requests")

    def batches(self, model: str, task: str) -> Callable[[int, float, float], None]:
        """Return a function that records a batch: number of images, longest wait, and time for computing."""
        queue, inference, sizes = (one.labels(model, task) for one in (self.queue, self.inference, self.sizes))

        def record(images: int, waited: float, took: float) -> None:
            sizes.observe(images)
            queue.observe(waited)
            inference.observe(took)

        return record

    def text(self) -> bytes:
        """Return all metrics as text."""
        folder = os.environ.get(FOLDER)
        if folder is None:
            return generate_latest(self._registry)
        everyone = CollectorRegistry()
        MultiProcessCollector(everyone, path=folder)  # type: ignore[no-untyped-call]
        return generate_latest(everyone)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self._registry, multiprocess_mode="livesum")

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...] = SECONDS
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)
