"""Number formats: float32 weights throughout, and matrix products in bfloat16 where that is faster."""

from __future__ import annotations

import torch

from vitrail.machine import has_bf16_matrix_units
from vitrail.training.config import Precision

__all__ = ["autocast", "resolve_precision"]


def resolve_precision(precision: Precision, device: torch.device) -> Precision:
    """What "auto" stands for on this device: "bf16" where the processor has matrix units for it, else "float32"."""
    if precision != "auto":
        return precision
    return "bf16" if has_bf16_matrix_units(device) else "float32"


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """A context in which products run in bfloat16 (or nothing changes). Weights, their gradients and the optimiser's
    state stay in float32: the master copy is the weights themselves."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
