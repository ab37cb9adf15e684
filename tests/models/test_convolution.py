"""Tests of convolutions beside other programs: the same bits, and no waiting for each image."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from vitrail import cores
from vitrail.cores import compute_threads
from vitrail.models.convolution import convolve
from vitrail.models.resnet import StandardisedConv

SIZES = [
    # input, filters, stride, padding
    ((8, 16, 33, 20), (32, 16, 3, 3), (2, 2), (1, 1)),
    ((5, 64, 9, 7), (64, 64, 3, 3), (1, 1), (1, 1)),
    ((4, 16, 11, 12), (64, 16, 1, 1), (1, 1), (0, 0)),
    ((3, 3, 30, 41), (16, 3, 7, 7), (2, 2), (0, 0)),
    ((1, 8, 10, 10), (16, 8, 3, 3), (1, 1), (1, 1)),
]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other programs use the cores, and this one computes on two threads."""
    monkeypatch.setattr(cores._waits, "_ended", threading.Event())
    with compute_threads(None):
        torch.set_num_threads(2)
        yield


def gradients(
    convolution: Callable[..., torch.Tensor], images: tuple[int, ...], filters: tuple[int, ...], *sizes: object
) -> list[torch.Tensor]:
    """Return the result, and the gradients of the input and of the filters."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(images, generator=generator, requires_grad=True)
    weights = torch.randn(filters, generator=generator, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = convolution(x, weights, *sizes)
    loss = (out.float() * torch.randn(out.shape, generator=generator)).sum()
    return [out, *torch.autograd.grad(loss, [x, weights])]


@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients_are_the_same_bits(sizes: tuple[tuple[int, ...], ...], shared: None) -> None:
    images, filters, stride, padding = sizes
    found = gradients(convolve, images, filters, stride, padding)
    expected = gradients(lambda x, w, *rest: F.conv2d(x, w, None, *rest), images, filters, stride, padding)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_frozen_filters_and_inputs(shared: None) -> None:
    layer = StandardisedConv(4, 8, 3, padding=1, eps=(1e-5, "variance"))
    x = torch.randn(2, 4, 6, 5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        torch.autograd.backward(layer(x).float().sum())  # the input needs no gradient
        assert layer.weight.grad is not None
        layer.weight.requires_grad_(False)
        leaf = x.float().requires_grad_()
        torch.autograd.backward(layer(leaf).float().sum())
        assert leaf.grad is not None


def test_function_transforms_and_second_derivatives(shared: None) -> None:
    """Our own backward pass has no rules for transforms, so they do not meet it."""
    weights = torch.randn(4, 3, 3, 3).bfloat16().requires_grad_()
    images = torch.randn(5, 1, 3, 6, 7).bfloat16()

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (convolve(x, w, (1, 1), (1, 1)).float() ** 2).sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, images)
    expected = torch.stack([torch.autograd.grad(loss(weights, x), weights)[0] for x in images])
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.1)
    (first,) = torch.autograd.grad(loss(weights, images[0]), weights, create_graph=True)
    (second,) = torch.autograd.grad(first.float().sum(), weights)
    assert second.shape == weights.shape and bool((second != 0).any())
