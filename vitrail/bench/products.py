"""The matrix products of a step without all other operations. Their total time is a lower bound for the step.

The products are recorded during a real step of our network. They are replayed with random numbers of the same shapes,
strides and dtypes. On a CPU, each product of two matrices is replayed by the fastest of PyTorch's kernel and oneDNN's,
so that the bound is that of the processor and not that of one library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.bench.measure import interleave, timed
from vitrail.models.linear.float32 import has_onednn

__all__ = ["Operand", "Product", "Products", "fastest_multiplication", "record"]


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
        replays = {product: _replay(product, inputs[product]) for product in inputs}
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
        kernels += [_by_onednn, _by_onednn_transposed]
    if len(kernels) == 1 or 0 in (*left.stride(), *right.stride()):  # oneDNN takes no expanded tensors
        return torch.mm
    with torch.no_grad():
        timers = {kernel: timed(partial(kernel, left, right)) for kernel in kernels}
        times = interleave(timers, repetitions=3, warmup=1)
    return min(kernels, key=lambda kernel: min(times[kernel]))


def _by_onednn(left: Tensor, right: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")


def _by_onednn_transposed(left: Tensor, right: Tensor) -> Tensor:
    """Return the product as the transpose of `right^T left^T`. oneDNN copies a transposed first factor."""
    return _by_onednn(right.t(), left.t()).t()


def _replay(product: Product, inputs: tuple[Tensor, ...]) -> Callable[..., object]:
    """Return the function that replays a product with these inputs."""
    return fastest_multiplication(*inputs) if product.operation == "mm" else REPLAYS[product.operation]


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
    strides = (
        tensor.stride() if tensor.layout == torch.strided else _contiguous(shape)
    )  # packed tensors have no strides
    return Operand(shape, tuple(strides), tensor.dtype)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


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
