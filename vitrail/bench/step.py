"""A step in parts: its matrix products alone, which are a lower bound for its time, and its layers. And its memory.

The products are recorded during a real step of our network. They are replayed with random numbers of the same shapes,
strides and formats.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.bench.peers import RUNTIMES, build_peer, in_runtime
from vitrail.bench.workload import ProcessKilled, Workload, in_process, interleave, timed, waits_for
from vitrail.errors import ConfigError
from vitrail.machine import autocast, available_memory, check_memory, keep_freed_memory, peak_memory, system_bytes
from vitrail.models.compiled import Compiled, compile_blocks
from vitrail.models.cost import training_bytes
from vitrail.models.linear.float8 import use_float8
from vitrail.models.linear.float32 import has_onednn
from vitrail.models.predictor import Predictor
from vitrail.models.variants import build
from vitrail.training.optimizer import OptimizerConfig, make_optimizer


class Operand(NamedTuple):
    """The properties of a tensor that determine the speed of its multiplication."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def random(self, device: torch.device) -> Tensor:
        """Return a random tensor with these properties. Strides may be 0, as in an expanded tensor."""
        size = 1 + sum((side - 1) * step for side, step in zip(self.shape, self.stride, strict=True))
        storage = torch.randn(size, device=device).to(self.dtype)
        return storage.as_strided(self.shape, self.stride)


class Product(NamedTuple):
    """One matrix product: the operation, its operands and its other arguments."""

    operation: str
    """Name of the operation: mm, bmm, convolution or convolution_backward."""
    operands: tuple[Operand, ...]
    arguments: tuple[Any, ...] = ()

    @property
    def flops(self) -> int:
        """The number of FLOPs: twice the multiply-accumulates."""
        if self.operation in ("mm", "bmm"):
            return 2 * math.prod(self.operands[0].shape) * self.operands[1].shape[-1]
        weight = self.operands[-1].shape
        if self.operation == "convolution":
            batch, cells = self.operands[0].shape[0], self.arguments[0]
            return 2 * batch * cells * math.prod(weight)
        batch, cells = self.operands[0].shape[0], math.prod(self.operands[0].shape[2:])
        return 2 * batch * cells * math.prod(weight) * sum(self.arguments[-1][:2])


class Products:
    """A callable that replays recorded matrix products in order. Equal products share their inputs."""

    def __init__(self, recorded: Sequence[Product], device: torch.device) -> None:
        inputs = {
            product: tuple(operand.random(device) for operand in product.operands)
            for product in dict.fromkeys(recorded)
        }
        self.recorded = tuple(recorded)
        replays = {
            product: fastest_multiplication(*tensors) if product.operation == "mm" else REPLAYS[product.operation]
            for product, tensors in inputs.items()
        }
        self._calls = [(replays[product], inputs[product], product.arguments) for product in recorded]

    @property
    def flops(self) -> int:
        """The FLOPs of all products. A product that a fused kernel computes twice is counted twice."""
        return sum(product.flops for product in self.recorded)

    @torch.no_grad()
    def __call__(self) -> None:
        for replay, inputs, arguments in self._calls:
            replay(*inputs, *arguments)


def fastest_multiplication(left: Tensor, right: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that multiplies these two matrices in the shortest time. On a CPU, three calls of each
    function are timed.
    """
    kernels: list[Callable[[Tensor, Tensor], Tensor]] = [torch.mm]
    if left.device.type == "cpu" and has_onednn(left.dtype):
        # oneDNN copies a transposed first factor, which a product of the transposes can avoid.
        kernels += [_by_onednn, lambda left, right: _by_onednn(right.t(), left.t()).t()]
    if len(kernels) == 1 or 0 in (*left.stride(), *right.stride()):  # oneDNN takes no expanded tensors
        return torch.mm
    with torch.no_grad():
        timers = {kernel: timed(partial(kernel, left, right)) for kernel in kernels}
        times = interleave(timers, repetitions=3, warmup=1)
    return min(kernels, key=lambda kernel: min(times[kernel]))


def _by_onednn(left: Tensor, right: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")


def record(step: Callable[[], object]) -> list[Product]:
    """Return the matrix products that a call of `step` computes, in order."""
    with _Recorder() as recorder:
        step()
    return recorder.products


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Recorder of all operations that reach a kernel, including those of backward passes and custom functions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name()  # includes the overload, as in "mm.out", unless it is the default one
        reader = READERS.get(name.removesuffix(".out"))
        if "::_scaled_dot_product" in name and "_math" not in name:
            reader = _attention_backward if name.endswith("_backward") else _attention
        if reader is None:
            with self:  # without gradients, `linear` arrives as a whole; record the operations inside
                parts = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if parts is NotImplemented else parts
        result = func(*args, **kwargs)
        self.products += reader(args, result)
        return result


def _operand(tensor: Tensor) -> Operand:
    shape = tuple(tensor.shape)
    strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))  # packed tensors have none
    return Operand(shape, tensor.stride() if tensor.layout == torch.strided else strides, tensor.dtype)


def _plain_products(operation: str, first: int) -> Callable[[Any, Any], Iterator[Product]]:
    """Return a reader for an operation that multiplies its arguments at the positions `first` and `first` + 1.

    The reader ignores the operation's other arguments.
    """

    def read(args: Any, result: Any) -> Iterator[Product]:
        yield Product(operation, (_operand(args[first]), _operand(args[first + 1])))

    return read


def _linear(weight: int) -> Callable[[Any, Any], Iterator[Product]]:
    """Return a reader for an operation that multiplies rows (..., k) by a transposed weight (n, k)."""

    def read(args: Any, result: Any) -> Iterator[Product]:
        (outputs, inputs), dtype = args[weight].shape, args[0].dtype
        rows = args[0].numel() // inputs
        yield Product(
            "mm", (Operand((rows, inputs), (inputs, 1), dtype), Operand((inputs, outputs), (1, inputs), dtype))
        )

    return read


def _convolution(args: Any, result: Any) -> Iterator[Product]:
    images, weight, _, *rest = args
    yield Product("convolution", (_operand(images), _operand(weight)), (math.prod(result.shape[2:]), *_hashable(rest)))


def _convolution_backward(args: Any, result: Any) -> Iterator[Product]:
    gradient, images, weight, _, *rest, mask = args
    operands = (_operand(gradient), _operand(images), _operand(weight))
    yield Product("convolution_backward", operands, (*_hashable(rest), (mask[0], mask[1], False)))


def _hashable(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(value) if isinstance(value, list | tuple) else value for value in values)


def _attention(args: Any, result: Any) -> Iterator[Product]:
    """Yield the two products of softmax(q k^T) v, over all heads of all images."""
    q, k, v = args[:3]
    yield _heads(q, (q.shape[-2], q.shape[-1]), (k.shape[-1], k.shape[-2]), turned="second")
    yield _heads(q, (q.shape[-2], k.shape[-2]), (v.shape[-2], v.shape[-1]))


def _attention_backward(args: Any, result: Any) -> Iterator[Product]:
    """Yield the products of the backward pass: the scores, which a fused kernel recomputes, and four gradients.

    The gradients are those of v, the softmax, q and k.
    """
    _, q, k, v = args[:4]
    (m, d), n, e = q.shape[-2:], k.shape[-2], v.shape[-1]
    yield _heads(q, (m, d), (d, n), turned="second")
    yield _heads(q, (n, m), (m, e), turned="first")
    yield _heads(q, (m, e), (e, n), turned="second")
    yield _heads(q, (m, n), (n, d))
    yield _heads(q, (n, m), (m, d), turned="first")


def _heads(like: Tensor, first: tuple[int, int], second: tuple[int, int], turned: str = "") -> Product:
    """Return a batched product over all heads of all images, with dense tensors. `turned` names the factor that is
    transposed.
    """

    def operand(rows: int, columns: int, turn: bool) -> Operand:
        stride = (rows * columns, 1, rows) if turn else (rows * columns, columns, 1)
        return Operand((math.prod(like.shape[:-2]), rows, columns), stride, like.dtype)

    return Product("bmm", (operand(*first, turned == "first"), operand(*second, turned == "second")))


READERS: dict[str, Callable[[Any, Any], Iterator[Product]]] = {
    "aten::mm": _plain_products("mm", 0),
    "aten::addmm": _plain_products("mm", 1),
    "aten::bmm": _plain_products("bmm", 0),
    "aten::baddbmm": _plain_products("bmm", 1),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "mkldnn::_linear_pointwise": _linear(1),
    "mkldnn::_linear_pointwise.binary": _linear(2),
}
"""Functions by the name of an operation. Each returns the matrix products of the operation from its arguments and its
result."""

REPLAYS: dict[str, Callable[..., object]] = {
    "bmm": torch.bmm,
    "convolution": lambda images, weight, cells, *rest: torch.ops.aten.convolution(images, weight, None, *rest),
    "convolution_backward": lambda gradient, images, weight, *rest: torch.ops.aten.convolution_backward(
        gradient, images, weight, None, *rest
    ),
}


# Breakdown of a step's time by category of operation, measured with torch.profiler.


CATEGORIES = {
    "products": r"aten::(add)?(mm|mv)(_|$)|aten::(b|baddb)mm|aten::_?addmm|aten::dot|.*convolution|.*conv2d|"
    r"mkldnn::_?linear|onednn::qlinear|aten::(linear|matmul)$",
    "attention": r"aten::_?softmax|aten::.*scaled_dot_product|aten::_(flash|efficient|cudnn)_attention",
    "normalisation": r"aten::.*(layer_norm|group_norm|batch_norm)",
    "activation": r"aten::(gelu|silu|tanh|relu|sigmoid)",
    "copies and casts": r"aten::(copy_|_?to(_copy)?$|clone|contiguous|cat|stack|fill_|zero_|zeros|empty|reshape|"
    r"mkldnn_reorder)|aten::.*_?reorder|mkldnn::_reorder|Memcpy|Memset",
    "optimizer": r"Optimizer\.|aten::_(fused|foreach)",
}
"""Patterns of operation names by category. The first matching pattern decides the category."""

REST = "the rest"
STEP = "vitrail.bench.step"


def category_of(operation: str) -> str:
    """Return the category of an operation."""
    return next((name for name, pattern in CATEGORIES.items() if re.match(pattern, operation)), REST)


def breakdown(step: Callable[[], object], device: torch.device, *, steps: int = 3) -> dict[str, float]:
    """Return the fraction of the step time that each category takes. The fractions add up to 1.

    The time of an operation excludes the time of the operations that it calls. On a CPU, the category of all remaining
    time includes the Python code between operations. On a GPU, only kernels are timed. The profiler adds some time,
    mostly to small operations.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    step()
    with _quiet(), profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            with record_function(STEP):
                step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    seconds = dict.fromkeys([*CATEGORIES, REST], 0.0)
    for event in profiler.key_averages():
        if device.type == "cuda":  # each kernel is also listed on its own and must not be counted twice
            on_cpu = event.device_type == torch.profiler.DeviceType.CPU
            seconds[category_of(event.key)] += event.self_device_time_total if on_cpu else 0.0
        else:
            seconds[category_of(event.key)] += event.self_cpu_time_total
    total = sum(seconds.values()) or 1.0
    return {name: value / total for name, value in seconds.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the lines that the profiler writes to standard error at every log level."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


# The entries of a comparison: our network, its matrix products alone, and networks of other libraries.


OURS = "vitrail"
PRODUCTS = "products alone"

Settings = Literal["matched", "default", "best", "graphs"]
"""Settings of a library. "matched" uses the workload's precision, by autocast. "default" uses the library's defaults,
with float32. "best" uses the workload's precision and compiles: each block of our network, but other networks as a
whole. "graphs" compiles our network into CUDA graphs."""

COMPILED = {"best": " compiled", "graphs": " graphs"}
"""Settings that need a compiler, with the texts that follow the precision in tables."""

GPU_SECONDS = 0.3
"""Seconds of steps that are timed together on a GPU."""

LARGE = 8192
"""Number of rows and columns of the large matrix product on a GPU. On a CPU, the numbers of rows and columns are an
eighth of this."""


@dataclass(frozen=True)
class Entry:
    """A library and its settings in a comparison."""

    library: str
    settings: Settings = "matched"

    def describe(self, workload: Workload) -> str:
        """Return a description of the settings for tables, such as "bf16 compiled"."""
        precision = workload.own_format if self.library == OURS else workload.precision
        return ("float32" if self.settings == "default" else precision) + COMPILED.get(self.settings, "")


def entries(
    workload: Workload,
    peers: tuple[str, ...] = (),
    *,
    best: bool = False,
    compile: Compiled = "off",  # noqa: A002
) -> list[Entry]:
    """Return the libraries and settings to compare, without duplicates. Our network comes first."""
    found = [Entry(OURS)]
    if best or compile == "on":
        found.append(Entry(OURS, "best"))
    if compile == "graphs":
        found.append(Entry(OURS, "graphs"))
    for peer in peers:
        if workload.precision != "float32":
            found.append(Entry(peer, "default"))
        found.append(Entry(peer))
        if best and peer not in RUNTIMES:
            found.append(Entry(peer, "best"))
    return found


class Runner:
    """A library's step in its own process. The first step runs in the constructor, and later steps are timed on
    request.
    """

    def __init__(self, entry: Entry, workload: Workload, threads: int) -> None:
        torch.set_num_threads(threads)
        is_products = entry.library == PRODUCTS
        if is_products or entry.library == OURS:
            keep_freed_memory()  # our commands do the same, but programs with other libraries do not
        self.device, self.precision = workload.device, workload.precision
        if is_products:
            entry, workload = Entry(OURS), replace(workload, float8=False)
        self.step = make_step(entry, workload)
        if is_products:
            self.step()
            self.step = Products(record(self.step), workload.device)
        for _ in range(3 if entry.settings == "graphs" else 1):  # a CUDA graph is recorded in the second step
            self.step()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def seconds(self) -> float:
        """Return the seconds of one step: on a GPU the mean of several steps, because each of them is short and begins
        before the last one has ended.

        On a GPU, freed memory is given back afterwards: all rows together need more than a GPU has. An untimed step
        takes it again.
        """
        if self.device.type != "cuda":
            return timed(self.step, waits_for(self.device))()
        one = min(self._of_steps(1) for _ in range(2))
        found = self._of_steps(max(1, round(GPU_SECONDS / one)))
        torch.cuda.empty_cache()
        return found

    def _of_steps(self, number: int) -> float:
        """Return the mean seconds of a step among this number of steps."""
        return timed(lambda: [self.step() for _ in range(number)], waits_for(self.device))() / number

    def flops(self) -> int:
        """Return the FLOPs of the recorded matrix products (`Products.flops`)."""
        assert isinstance(self.step, Products), "only the products alone are counted"
        return self.step.flops

    def large_flops(self) -> float:
        """Return the FLOPs per second of one large matrix product in the workload's number format."""
        side = LARGE if self.device.type == "cuda" else LARGE // 8
        dtype = torch.float32 if self.precision == "float32" else torch.bfloat16
        factor = torch.randn(side, side, device=self.device).to(dtype)
        multiply = fastest_multiplication(factor, factor)
        timer = timed(lambda: multiply(factor, factor), waits_for(self.device))
        timer()
        return 2 * side**3 / min(timer() for _ in range(5))

    def breakdown(self) -> dict[str, float]:
        """Return the fraction of the step time per category of operation."""
        return breakdown(self.step, self.device)


def make_step(entry: Entry, workload: Workload) -> Callable[[], object]:
    """Return a function that runs one training step of a new network, or predicts one batch with it.

    Raises `ConfigError` if a peer cannot be built.
    """
    if entry.settings == "default":
        workload = replace(workload, precision="float32")
    if entry.library in RUNTIMES:
        images = workload.images()
        run_there = in_runtime(entry.library, build(workload.config), images, workload.precision)
        return partial(run_there, images)
    ours = entry.library == OURS
    network = (build(workload.config) if ours else build_peer(entry.library, workload.config)).to(workload.device)
    run: Callable[[torch.Tensor], torch.Tensor] = network
    if ours:
        if workload.float8:
            use_float8(network)
        compile_blocks(network, "graphs" if entry.settings == "graphs" else "on" if entry.settings == "best" else "off")
    elif entry.settings == "best":
        run = torch.compile(network)
    if workload.task == "infer":
        run = Predictor(network, workload.precision) if ours else run
        network.eval()
        return _prediction(run, workload)
    network.train()
    optimizer = make_optimizer(network, OptimizerConfig()) if ours else AdamW(network.parameters(), fused=True)
    return _training_step(run, optimizer, workload)


def _prediction(run: Callable[[torch.Tensor], torch.Tensor], workload: Workload) -> Callable[[], object]:
    images = workload.images()

    @torch.inference_mode()
    def step() -> torch.Tensor:
        with autocast(workload.precision, workload.device):
            return run(images)

    return step


def _training_step(
    network: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, workload: Workload
) -> Callable[[], object]:
    images, labels = workload.images(), workload.labels()

    def step() -> None:
        with autocast(workload.precision, workload.device):
            logits = network(images)
        loss: Any = F.cross_entropy(logits.float(), labels)  # torch has no type annotation for backward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# The peak memory of a step, and the largest batch that fits into memory. Both are measured in new processes.


STEPS = 2
"""Number of measured steps. At least two are needed, because the first step creates the optimizer's state."""

LARGEST = 2**20


def measure_memory(entry: Entry, workload: Workload) -> int:
    """Return the peak bytes of a step: network, optimizer, batch and activations, without Python and torch.

    Raises `ConfigError` if the operating system does not report memory, and `VitrailError` if the process fails.
    """
    if workload.device.type != "cuda":
        _status("VmRSS")
    return int(in_process(_peak, entry, workload, torch.get_num_threads()))


def largest_batch(workload: Workload, limit: int | None = None) -> dict[str, int]:
    """Find the largest batch whose training step fits into `limit` bytes, by default the free memory, as in the paper's
    Figure 12.

    `batch` is 0 if even one image does not fit. `predicted` is the largest batch that should fit by the formula for
    memory, into the bytes that Python and torch leave of the limit (`left`).

    Every trial runs in a new process with a memory limit, so a batch that is too large cannot exhaust the machine.
    Raises `ConfigError` if the limit leaves no memory for a step or cannot be set.
    """
    if limit is None:
        limit = available_memory(workload.device)
    else:
        check_memory(limit, workload.device, f"memory_limit={limit}: a step of that size", "choose a lower limit")
    taken = 0 if workload.device.type == "cuda" else in_process(_own_memory, workload, torch.get_num_threads())
    if limit <= taken:
        raise ConfigError(
            f"memory_limit={limit:,} bytes is not above the {taken:,} bytes that Python and torch use; choose a "
            "higher limit"
        )

    def fits(batch: int) -> bool:
        trial = replace(workload, batch=batch)
        try:
            return bool(in_process(_fits, trial, limit, torch.get_num_threads()))
        except ProcessKilled:
            return False

    config, precision, left = workload.config, workload.precision, limit - taken
    return {
        "batch": find_largest(fits),
        "predicted": find_largest(lambda batch: training_bytes(config, batch, precision=precision) <= left),
        "limit": limit,
        "left": left,
    }


def find_largest(fits: Callable[[int], bool]) -> int:
    """Return a batch size that fits and is within 3 % of the largest such size.

    The search doubles the batch size until it does not fit, and then bisects.
    """
    low = 0
    while low < LARGEST and fits(max(1, 2 * low)):
        low = max(1, 2 * low)
    high = max(1, 2 * low)
    while low < LARGEST and high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def is_out_of_memory(error: Exception) -> bool:
    """Return True for the errors of Python, PyTorch and oneDNN that say that memory cannot be allocated."""
    if not isinstance(error, RuntimeError):  # the base class of torch.OutOfMemoryError
        return isinstance(error, MemoryError)
    return re.search(r"out of memory|allocate|bad_alloc|could not create", str(error), re.IGNORECASE) is not None


def _peak(entry: Entry, workload: Workload, threads: int) -> int:
    """Return the number of bytes by which the peak memory of the steps exceeds the memory before them."""
    _settle(entry, workload, threads)
    if workload.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(workload.device)
        before = torch.cuda.memory_allocated(workload.device)
    else:
        with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
            file.write("5")  # resets the peak
        before = _status("VmRSS")
    _run(entry, workload, steps=STEPS)
    return peak_memory(workload.device) - before


def _fits(workload: Workload, limit: int, threads: int) -> bool:
    """Limit the memory of this process, and return True if a step succeeds within the limit."""
    _settle(Entry(OURS), workload, threads)
    if workload.device.type == "cuda":
        total = torch.cuda.get_device_properties(workload.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), workload.device)
    else:
        # The system limits reserved memory, which exceeds the memory in use.
        addresses = _status("VmData") + limit - _status("VmRSS")
        resource.setrlimit(resource.RLIMIT_DATA, (addresses, addresses))
    try:
        _run(Entry(OURS), workload, steps=STEPS)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _own_memory(workload: Workload, threads: int) -> int:
    """Return the memory in bytes of a process that is ready for its first step."""
    _settle(Entry(OURS), workload, threads)
    return _status("VmRSS")


def _settle(entry: Entry, workload: Workload, threads: int) -> None:
    """Run one small step, so that all libraries are imported and all threads are started before the measurement."""
    torch.set_num_threads(threads)
    config = workload.config
    small = replace(config, depth=1) if config.architecture == "ViT" else config
    _run(entry, replace(workload, batch=1, config=small), steps=1)
    _hand_back()
    if entry.library == OURS:
        keep_freed_memory()  # after the small step, whose memory must be returned to the system


def _hand_back() -> None:
    """Return freed memory to the system. Otherwise the next step would reuse this memory, and would seem to need
    less."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # glibc
        trim(0)


def _run(entry: Entry, workload: Workload, steps: int) -> None:
    step = make_step(entry, workload)
    for _ in range(steps):
        step()


def _status(field: str) -> int:
    """Return the bytes in a line of /proc/self/status. Raises `ConfigError` if the system has no such file."""
    if (found := system_bytes("self/status", field)) is None:
        raise ConfigError("memory on a CPU is measured with /proc/self/status, which only Linux has")
    return found
