"""Tensors that are divided among processes: the part of this process, and the whole."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["local", "whole"]


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor. A tensor that is not sharded is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor. All processes call this function together if the tensor is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
