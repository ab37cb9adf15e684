"""The processes that train one network together, and everything that they agree on.

torchrun and SLURM start the same command several times, and describe the processes in environment variables. No other
module reads these variables or asks torch.distributed: whatever needs to know about other processes asks `Processes`.
A process that was started alone is the trivial case, in which every method returns at once.
"""

from __future__ import annotations

import atexit
import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from vitrail.errors import ConfigError, NonFiniteLoss, ProcessError, Stopped, VitrailError
from vitrail.processes.launch import Launch, SignsOfLife, launch, within

T = TypeVar("T")

STORE_SECONDS = 15.0
"""Longest time in which the store of the processes must answer."""

REPORT_SECONDS = 10.0
"""Longest time in which a process waits for the error of the first process, or for the others to read its own."""

LOOK_SECONDS = 5.0
"""Seconds between two looks for signs of life of the first process while the others wait for a long computation."""


class Processes:
    """The processes that train one network together, seen from one of them. By default this process is alone.

    All processes must call the methods that exchange something in the same order. Such a method raises `ProcessError`
    if another process has ended, or does not answer within the time that `join_processes` was given.
    """

    def __init__(self, place: Launch = Launch(), store: Any = None, timeout: float = 600.0) -> None:
        self.place = place
        self.rank = place.rank
        self.world = place.world
        self.group: Any = None
        """The process group of torch.distributed for exchanges. None is the default one."""
        self._store = store
        """The store that the processes share. None for a process that is alone, or if the store is lost."""
        self._life = None if store is None else SignsOfLife(store.clone(), place.rank)
        self._timeout = timedelta(seconds=timeout)
        self._flag: Callable[[], Tensor] | None = None
        self._long = 0
        """Number of long computations of the first process so far."""

    def beside(self) -> Processes:
        """Return the same processes with a process group of its own on the CPU, whose exchanges can take place in a
        thread. All processes call this method together."""
        found = copy.copy(self)
        if self.are_several:
            with self.exchange("a process group"):
                found.group = dist.new_group(backend="gloo", timeout=self._timeout)
        return found

    @property
    def are_several(self) -> bool:
        """True if other processes train the same network."""
        return self.world > 1

    @property
    def is_first(self) -> bool:
        """True if this process prints and writes files. Exactly one of the processes does."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """Name of this process in messages."""
        return f"process {self.rank} of {self.world}"

    def device_name(self, name: str) -> str:
        """Return the name of this process's device, if `name` is the one that the user chose for all processes."""
        if self.are_several and name in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{self.place.local_rank}"
        return name

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over all processes, and return it."""
        return self.sum_later(tensor)()

    def sum_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to replace a tensor by its sum over all processes while this process does something else. Return a
        function that waits for the sum, and returns it."""
        if not self.are_several:
            return lambda: tensor
        with self.exchange("a sum"):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None

        def wait() -> Tensor:
            with self.exchange("a sum", begins=False):
                work.wait()
            return tensor

        return wait

    def sum_with_gradients(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, through which gradients pass. The gradient is that of the sum
        of the losses of all processes."""
        return _Sum.apply(tensor, self) if self.are_several else tensor  # type: ignore[no-untyped-call]

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes in their order. Gradients pass as in `sum_with_gradients`. All processes
        must have equally many rows."""
        parts = [rows if rank == self.rank else torch.zeros_like(rows) for rank in range(self.world)]
        return self.sum_with_gradients(torch.cat(parts)) if self.are_several else rows

    def any_earlier(self, value: bool) -> bool:
        """Return True if any process passed True in the call before this one. A process that is alone gets its own
        value at once.

        All processes get the same answer. The values are exchanged while the processes compute, so nothing waits.
        """
        if not self.are_several:
            return value
        earlier, self._flag = self._flag, self.sum_later(torch.tensor(int(value)))
        if earlier is None:
            return False
        return bool(earlier())

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes in their order. Values are pickled."""
        if not self.are_several:
            return [value]
        found: list[Any] = [None] * self.world
        with self.exchange("an exchange of values"):
            dist.all_gather_object(found, value, group=self.group)
        return found

    def from_first(self, value: T) -> T:
        """Return the value of the first process. Values are pickled."""
        if not self.are_several:
            return value
        found = [value]
        with self.exchange("a value of the first process"):
            dist.broadcast_object_list(found, src=0, group=self.group, device=torch.device("cpu"))
        return found[0]

    def on_first(self, function: Callable[[], T], *, is_long: bool = False) -> T:
        """Call a function on the first process only, and return its result on all processes. If the function raises an
        error, the error is raised on all processes.

        A function that computes for long (`is_long`) may exceed the time-out. The others then wait as long as the first
        process gives signs of life.
        """
        if not self.are_several:
            return function()
        result: Any = None
        error: BaseException | None = None
        if self.is_first:
            try:
                result = function()
            except Exception as caught:
                error = caught
        if is_long:
            self._await_first()
        result, kind, message = self.from_first((result, type(error), "" if error is None else str(error)))
        if error is not None:
            raise error
        if kind is not type(None):
            told = kind(message) if issubclass(kind, VitrailError) else ProcessError(f"{kind.__name__}: {message}")
            told.is_reported = True
            raise told
        return result

    def _await_first(self) -> None:
        """Wait until the first process calls this method too, without a time-out. Raises `ProcessError` if the first
        process ends."""
        self._long += 1
        key, store, life = f"computed/{self._long}", self._store, self._life
        assert life is not None
        with self.exchange("a computation of the first process"):
            if self.is_first:
                store.set(key, "")
                return
            missed = 0
            while not within(LOOK_SECONDS + STORE_SECONDS, lambda: _appear(store, [key], LOOK_SECONDS)):
                missed = missed + 1 if within(STORE_SECONDS, lambda: life.missing([0]))[0] else 0
                if missed == 2:  # a process on a busy machine can be late once
                    raise RuntimeError("the first process has ended")

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by those of the first process."""
        if self.are_several:
            for tensor in tensors:
                with self.exchange("a tensor of the first process"):
                    dist.broadcast(tensor.detach(), src=0, group=self.group)

    @contextmanager
    def exchange(self, what: str, *, begins: bool = True) -> Iterator[None]:
        """Raise the errors of torch.distributed inside the `with` block as `ProcessError`, with the name of the
        exchange. A process that is alone has no such errors."""
        if begins and self._life is not None and self.group is None:  # threads exchange at different times
            self._life.count += 1
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            if not self.are_several:
                raise
            raise ProcessError(self._cause(what, error)) from error

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell the other processes about an error in the `with` block, so that their messages can name it.

        If the first process reports the same error, `is_reported` of this one is set, and only the first process prints
        it. All processes stop and diverge together. Errors of exchanges that PyTorch begins by itself, such as those of
        sharded weights, are raised as `ProcessError`.
        """
        try:
            try:
                yield
            except RuntimeError as error:
                # Gloo raises plain errors that name its files.
                if self.are_several and (isinstance(error, dist.DistError) or "/gloo/" in str(error)):
                    raise ProcessError(self._cause("an exchange", error)) from error
                raise
        except Exception as error:
            if not self.are_several:
                raise
            if not isinstance(error, VitrailError):
                self._report(f"{type(error).__name__}: {error}")
                raise
            is_told = self._report(str(error)) or isinstance(error, Stopped | NonFiniteLoss)
            error.is_reported = error.is_reported or (is_told and not self.is_first)
            if not self.is_first and not error.is_reported and not str(error).startswith(self.name):
                error.args = (f"{self.name}: {error}", *error.args[1:])
            raise

    def leave(self) -> None:
        """End the signs of life, and leave the group of processes."""
        if self._life is not None:
            self._life.stop()
            with suppress(Exception):
                dist.destroy_process_group()

    def _report(self, message: str) -> bool:
        """Report an error to the other processes. Return True if the first process has reported the same error."""

        def tell() -> bool:
            self._store.set(f"error/{self.rank}", message)
            if self.is_first:  # the store can end with this process, so it waits until the others have read its error
                _appear(self._store, [f"heard/{rank}" for rank in range(1, self.world)], REPORT_SECONDS)
                return False
            told = _appear(self._store, ["error/0"], REPORT_SECONDS) and self._store.get("error/0").decode() == message
            self._store.set(f"heard/{self.rank}", "")
            return bool(told)

        if self._store is not None:
            with suppress(Exception):
                return within(STORE_SECONDS, tell)
        return False

    def _cause(self, what: str, error: RuntimeError | TimeoutError) -> str:
        """Return a message about an exchange that failed: the error of another process, else the processes that have
        ended or do not answer."""
        assert self._life is not None
        ranks = [rank for rank in range(self.world) if rank != self.rank]
        life, store = self._life, self._store

        def look() -> tuple[list[int], list[int], str | None]:
            gone, behind = life.missing(ranks)
            told = [rank for rank in ranks if store.check([f"error/{rank}"])]
            if not told:
                return gone, behind, None
            message = store.get(f"error/{told[0]}").decode()
            return gone, behind, message if told[0] == 0 else f"process {told[0]} of {self.world} failed: {message}"

        try:
            gone, behind, message = within(STORE_SECONDS, look)
        except (RuntimeError, TimeoutError):  # the store is in the first process, or in its torchrun
            gone, behind, message = [0], [], None
            self._store = None
        if message is not None:
            return message
        for those, verb in ((gone, "ended, or its machine cannot be reached"), (behind, "does not answer")):
            if those:
                names = " and ".join(map(str, those))
                return (
                    f"process {names} of {self.world} {verb}, while the others waited for {what}; resume the run "
                    "from its last checkpoint, or start it with torchrun --max-restarts"
                )
        return f"{what} of {self.world} processes failed: {(str(error).splitlines() or [''])[0]}"


class _Sum(torch.autograd.Function):
    """The sum over all processes. The gradient of a process's addend is the sum of the gradients of all processes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        return processes.sum(tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.processes.sum(gradient.clone(memory_format=torch.contiguous_format)), None


def _appear(store: Any, keys: list[str], seconds: float) -> bool:
    """Return True when keys appear in a store, or False if they do not appear within this time. Raises `RuntimeError`
    if the store cannot be reached."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # the time is over
        return bool(store.check(keys))
    return True


_JOINED: list[Processes] = []


def join_processes(timeout: float = 600.0) -> Processes:
    """Join the processes that the same command started, and return them. Further calls return the same object.

    `timeout` is the time in seconds after which an exchange fails if a process does not take part. Raises `ConfigError`
    if the processes do not come together within this time.
    """
    if _JOINED:
        _JOINED[0]._flag = None  # a stop of an earlier run does not stop the next one
        return _JOINED[0]
    place = launch()
    if place.world == 1:
        return Processes()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place.address[0], str(place.address[1])
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank)
    limit = timedelta(seconds=timeout)
    try:
        store, _, _ = next(rendezvous("env://", place.rank, place.world, timeout=limit))
        store.set_timeout(limit)
        store = PrefixStore(f"start {place.restarts}", store)  # torchrun keeps the store when it starts processes again
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        joined = Processes(place, PrefixStore("vitrail", store), timeout)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=limit)
    except (RuntimeError, OSError, ValueError) as error:  # ValueError: an address that cannot be one
        host, port = place.address
        raise ConfigError(
            f"MASTER_ADDR={host} MASTER_PORT={port}: the {place.world} processes did not come together within "
            f"{timeout:.0f} s ({str(error).splitlines()[0]}); check the address, and that all of them were started"
        ) from None
    _JOINED.append(joined)
    atexit.register(joined.leave)
    return joined


# Tensors that are divided among processes: the part of this process, and the whole.


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor. A tensor that is not sharded is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor. All processes call this function together if the tensor is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
