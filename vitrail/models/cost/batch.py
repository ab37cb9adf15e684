"""The default batch size for predictions, from the formulas of arithmetic and memory."""

from __future__ import annotations

from typing import Any

import torch

from vitrail.machine import Precision, resolve_precision, total_memory
from vitrail.models.cost.footprint import FootprintPrecision, prediction_bytes

LARGEST = {"cpu": 64, "cuda": 256}
"""Largest default batch size for each type of device. On a CPU, larger batches are not faster."""

MACS_PER_THREAD = 32 * 10**9
"""Multiply-accumulates of a batch for each CPU thread: a second or two of work, so that a stop loses little."""

MEMORY_FRACTION = 1 / 8
"""Fraction of the memory of the machine or GPU that a batch may need."""

USUAL = 64
"""Batch size for networks without formulas, which are of the user's own class."""


def prediction_batch(
    network: torch.nn.Module, image_size: tuple[int, int], device: torch.device, precision: Precision = "float32"
) -> int:
    """Return the default batch size for predictions of a network. It is a power of two.

    A batch needs at most an eighth of the memory. On a CPU its arithmetic is limited as well. The result is the same
    for every call on the same machine with the same number of threads, so that the bytes of the outputs are too.
    """
    config: Any = getattr(network, "config", None)
    if not hasattr(config, "footprint"):
        return USUAL
    largest = LARGEST.get(device.type, LARGEST["cuda"])
    if device.type == "cpu":
        largest = min(largest, MACS_PER_THREAD * torch.get_num_threads() // max(1, config.macs(image_size)))
    found: FootprintPrecision = "bf16" if resolve_precision(precision, device) == "bf16" else "float32"
    empty, one = (prediction_bytes(config, count, image_size, found) for count in (0, 1))
    free = MEMORY_FRACTION * total_memory() - empty
    largest = min(largest, int(free // (one - empty)))
    return 2 ** (max(1, largest).bit_length() - 1)
