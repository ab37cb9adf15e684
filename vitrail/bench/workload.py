"""The measured workload, one training step or one prediction, and its measurement in processes of its own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitrail.errors import ConfigError, VitrailError
from vitrail.models.cost import activation_bytes, training_bytes
from vitrail.models.variants import AnyConfig
from vitrail.settings import problem_of, raise_problems

Task = Literal["train", "infer"]
Format = Literal["float32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step on one batch of random images. Raises `ConfigError` for settings that cannot be run."""

    name: str
    """Name of the network in tables."""
    config: AnyConfig
    task: Task = "train"
    """"train": forward, cross-entropy, backward and AdamW. "infer": logits only."""
    batch: int = 32
    """Images per step."""
    precision: Format = "float32"
    """Format of matrix products. Weights are always float32."""
    float8: bool = False
    """Train the dense layers of our blocks in 8 bits. All other layers and other libraries use `precision`."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        raise_problems([problem_of("batch_size", self.batch, int, {"least": 1})])
        if self.task == "train" and not self.config.num_classes:
            raise ConfigError("num_classes=0 leaves nothing to train; set 1 or more, or use bench infer")
        if self.float8 and self.task == "infer":
            raise ConfigError("precision='float8' is for training only; choices: 'auto', 'bf16', 'float32'")

    @property
    def flops(self) -> int:
        """The FLOPs of all matrix products of a step, by formula."""
        each = self.config.training_flops() if self.task == "train" else self.config.inference_flops()
        return self.batch * each

    @property
    def whole_flops(self) -> int:
        """The FLOPs of all matrix products in other libraries, whose last block also computes tokens that the head
        ignores.
        """
        if self.config.architecture == "BiT" or self.config.pool != "cls":
            return self.flops
        return replace(self, config=replace(self.config, pool="gap", class_token=True)).flops

    @property
    def predicted_bytes(self) -> int | None:
        """Bytes of a training step, by formula. None for predictions and float8, for which there is no formula."""
        if self.task == "infer" or self.float8:
            return None
        return training_bytes(self.config, self.batch, precision=self.precision)

    @property
    def activation_bytes(self) -> int | None:
        """The part of `predicted_bytes` that grows with the batch."""
        if self.task == "infer" or self.float8:
            return None
        return self.batch * activation_bytes(self.config, precision=self.precision)

    @property
    def own_format(self) -> str:
        """Name of the format of our dense layers."""
        return "float8" if self.float8 else self.precision

    def images(self) -> Float[Tensor, "b c h w"]:
        """Return random normalised pixels, the same in every call."""
        shape = self.batch, self.config.channels, *self.config.image_size
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.device)

    def labels(self) -> Int64[Tensor, " b"]:
        """Return random classes, the same in every call."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.config.num_classes, (self.batch,), generator=generator).to(self.device)

    def plain(self) -> dict[str, Any]:
        """Return the workload as JSON values."""
        return {
            "name": self.name,
            "task": self.task,
            "image_size": list(self.config.image_size),
            "channels": self.config.channels,
            "num_classes": self.config.num_classes,
            "tokens": self.config.tokens,
            "batch_size": self.batch,
            "precision": self.own_format,
            "device": str(self.device),
            "flops": self.flops,
        }


# Interleaved timing. Each round times every function once, so a change of the machine's speed affects all functions
# alike.


Key = TypeVar("Key")


@dataclass(frozen=True)
class Spread:
    """The median and the range of repeated measurements, in the unit of the measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def interleave(
    timers: Mapping[Key, Callable[[], float]], *, repetitions: int, warmup: int = 0
) -> dict[Key, list[float]]:
    """Return the seconds of each timer in each round after the warm-up. A round calls every timer once."""
    for _ in range(warmup):
        for timer in timers.values():
            timer()
    times: dict[Key, list[float]] = {name: [] for name in timers}
    for _ in range(repetitions):
        for name, timer in timers.items():
            times[name].append(timer())
    return times


def timed(step: Callable[[], object], synchronise: Callable[[], object] = lambda: None) -> Callable[[], float]:
    """Return a function that runs a step and returns its time in seconds.

    `synchronise` is called before and after the step. It waits for an asynchronous device.
    """

    def timer() -> float:
        synchronise()
        begun = time.perf_counter()
        step()
        synchronise()
        return time.perf_counter() - begun

    return timer


def waits_for(device: torch.device) -> Callable[[], object]:
    """Return a function that waits until the device has finished all work."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None


# Worker processes, which keep the measured libraries from sharing memory or settings. Workers are forked from one
# process that has only imported torch ("forkserver"), so they start clean and quickly.


class ProcessKilled(VitrailError):
    """A process ended without an answer, because of a signal or a lack of memory."""


class Worker:
    """A process that makes an object and calls the object's methods on request.

    The constructor raises the error of making the object, and `ProcessKilled` if the process dies.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        # Creating the first optimizer imports torch._dynamo, which is slow.
        context.set_forkserver_preload(["vitrail.bench.step", "torch._dynamo"])
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


def in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `work` in a new process.

    Raises the errors of `work`, and `ProcessKilled` if the process dies.
    """
    worker = Worker(partial, work, *arguments)
    try:
        return worker.call("__call__")
    finally:
        worker.close()


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
