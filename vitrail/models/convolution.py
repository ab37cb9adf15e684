"""Convolutions that keep their speed beside other programs, with the same bits.

oneDNN computes the gradient of the weights in bfloat16 on several threads in one of two ways, depending on the sizes.
If it divides the images among the threads, it adds their sums at the end. If it divides the output channels, the
threads wait for each other twice for every image, and a waiting thread keeps its core. Beside a program that needs the
core, each wait takes a slice of the scheduler's time. Both take 8 ms for an image on Linux, which can be a hundred
times as long as the arithmetic (docs/performance.md). One thread adds in the same order as threads that divide the
channels, so it computes the same bits without waiting.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitrail.cores import are_cores_shared, compute_threads
from vitrail.models.shortcuts import can_fuse

FORMATS = torch.float32, torch.bfloat16
Pair = tuple[int, int]


def convolve(
    x: Float[Tensor, "b c h w"], filters: Float[Tensor, "d c kh kw"], stride: Pair, padding: Pair
) -> Float[Tensor, "b d gh gw"]:
    """Return `F.conv2d(x, filters, None, stride, padding)`. In bfloat16 on a CPU, while other programs use the cores,
    the gradient of the filters is computed by one thread if this gives the same bits."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    is_trained = torch.is_grad_enabled() and filters.requires_grad
    if not (are_cores_shared() and is_trained and dtype == torch.bfloat16 and can_fuse((x, filters), FORMATS)):
        return F.conv2d(x, filters, None, stride, padding)
    found: Tensor = _Convolution.apply(x.to(dtype), filters.to(dtype), stride, padding)  # type: ignore[no-untyped-call]
    return found


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(x, filters)
        ctx.sizes = stride, padding
        return F.conv2d(x, filters, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (gradient,), (x, filters), sizes = gradients, ctx.saved_tensors, ctx.sizes
        of_x = _gradient_of(0, gradient, x, filters, *sizes) if ctx.needs_input_grad[0] else None
        threads = torch.get_num_threads()
        if threads > 1 and _divides_channels(tuple(x.shape), tuple(filters.shape), *sizes, threads):
            threads = 1
        with compute_threads(threads):
            return of_x, _gradient_of(1, gradient, x, filters, *sizes), None, None


def _gradient_of(
    part: Literal[0, 1], gradient: Tensor, x: Tensor, filters: Tensor, stride: Pair, padding: Pair
) -> Tensor:
    """Return the gradient of the input (0) or of the filters (1)."""
    mask = [part == 0, part == 1, False]
    found = torch.ops.aten.convolution_backward(
        gradient, x, filters, None, stride, padding, (1, 1), False, (0, 0), 1, mask
    )
    wanted: Tensor = found[part]
    return wanted


@functools.lru_cache(maxsize=1024)
def _divides_channels(
    images: tuple[int, ...], filters: tuple[int, ...], stride: Pair, padding: Pair, threads: int
) -> bool:
    """Return True if one thread adds in the same order as `threads` threads for these shapes.

    Both compute sums that are zero but for rounding: the second half of the images repeats the first half with opposite
    gradients. What is left depends on the order of the additions in nearly every weight.
    """
    generator = torch.Generator().manual_seed(0)
    half = images[0] // 2
    if not half:
        return False
    x, weights = torch.zeros(images).bfloat16(), torch.zeros(filters).bfloat16()
    gradient = torch.zeros_like(F.conv2d(x, weights, None, stride, padding))
    x[:half] = torch.randn(half, *images[1:], generator=generator)
    gradient[:half] = torch.randn(half, *gradient.shape[1:], generator=generator)
    x[half : 2 * half], gradient[half : 2 * half] = x[:half], -gradient[:half]
    found = []
    for number in (threads, 1):
        with compute_threads(number):
            found.append(_gradient_of(1, gradient, x, weights, stride, padding))
    return bool(torch.equal(*found)) and bool((found[0] != 0).any())
