"""The sum of gradients over several processes that have copies of the same network.

PyTorch's DistributedDataParallel does the same around a module's `forward`. Here the loop also needs the sum over parts
of a batch, other methods of the objective, and a loss that is divided by the number of samples of all processes, so the
gradients are added and not averaged.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.errors import ProcessError
from vitrail.processes.group import Later, Processes

__all__ = ["GradientSum"]

BUCKET_BYTES = 25 * 2**20
"""Largest size of the gradients that are sent together. A single weight can be larger."""


class GradientSum:
    """Adds the gradients of all processes while the backward pass computes further gradients.

    Gradients are sent in buckets, in the order of the backward pass: from the last weight to the first. All processes
    send the same buckets in the same order. The first sum decides which weights have gradients.
    """

    def __init__(self, module: nn.Module, processes: Processes) -> None:
        self.processes = processes
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._buckets: list[list[nn.Parameter]] = []
        self._bucket_of: dict[int, int] = {}
        self._awaited: list[int] = []
        """Number of gradients that each bucket still lacks."""
        self._sums: list[Later] = []
        self._is_last = False
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss whose gradients are added."""
        return loss

    def begin(self) -> None:
        """Announce the last backward pass of a step. Gradients are final when this pass has computed them."""
        self._is_last = True
        self._awaited = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Replace the gradients of this process by their sums over all processes. A process without a gradient of a
        weight adds zeros."""
        self._is_last = False
        if not self._buckets:
            self._make_buckets()
        for parameter in self.parameters:
            if id(parameter) in self._bucket_of and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif id(parameter) not in self._bucket_of and parameter.grad is not None:
                raise ProcessError(
                    f"a weight of shape {tuple(parameter.shape)} had no gradient in the first step, but has one now; "
                    "several processes can only train networks that use the same weights in every step"
                )
        self._awaited = [0] * len(self._buckets)
        self._send()
        for bucket, later in zip(self._buckets, self._sums, strict=True):
            later.wait()
            gradients = [_gradient(parameter) for parameter in bucket]
            parts = torch.split(later.tensor, [gradient.numel() for gradient in gradients])
            views = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
            torch._foreach_copy_(gradients, views)
        self._sums = []

    def _take(self, parameter: nn.Parameter) -> None:
        """Send the buckets that are complete with the gradient of this weight."""
        if self._is_last and (number := self._bucket_of.get(id(parameter))) is not None:
            self._awaited[number] -= 1
            self._send()

    def _send(self) -> None:
        while (number := len(self._sums)) < len(self._buckets) and not self._awaited[number]:
            flat = torch.cat([_gradient(parameter).flatten() for parameter in self._buckets[number]])
            self._sums.append(self.processes.sum_later(flat))

    def _make_buckets(self) -> None:
        """Divide the weights that have gradients into buckets. Raises `ProcessError` if the processes have gradients of
        different weights."""
        used = [number for number, parameter in enumerate(self.parameters) if parameter.grad is not None]
        if any(other != used for other in self.processes.gather(used)):
            raise ProcessError(
                "the processes have gradients of different weights; several processes can only train networks that use "
                "the same weights for every image"
            )
        size = 0
        for number in reversed(used):
            parameter = self.parameters[number]
            gradient = _gradient(parameter)
            is_new_type = bool(self._buckets) and gradient.dtype != _gradient(self._buckets[-1][0]).dtype
            if not self._buckets or is_new_type or size + gradient.nbytes > BUCKET_BYTES:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(parameter)
            self._bucket_of[id(parameter)] = len(self._buckets) - 1
            size += gradient.nbytes


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
