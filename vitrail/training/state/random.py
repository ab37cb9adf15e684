"""The states of PyTorch's random-number generators, as plain JSON values."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import torch
from torch import Tensor

__all__ = ["process_seed", "random_state", "restore_random_state", "state_text"]


def process_seed(seed: int, rank: int) -> int:
    """Return the seed of one of several processes, whose dropout and stochastic depth must differ. The first process
    keeps the seed."""
    text = f"process {rank} of {seed}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1 if rank else seed


def random_state() -> dict[str, Any]:
    """Return the states of the generators of the CPU and of every CUDA device.

    The result has the same keys on every machine. "cuda" is an empty list if this process has not used CUDA, because no
    random number was then drawn there.
    """
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {"cpu": state_text(torch.get_rng_state()), "cuda": [state_text(state) for state in devices]}


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned, also on a machine with more, fewer or no CUDA devices.

    The states of devices that this machine does not have are ignored. Devices without a state in `state` keep their
    current state.
    """
    torch.set_rng_state(_tensor(state["cpu"]))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, text in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(_tensor(text), device)


def state_text(state: Tensor) -> str:
    """Return the bytes of a generator's state in base64."""
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
