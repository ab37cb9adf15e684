"""Readers of the journals and weights of runs, for tests that compare runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vitrail.training.log import read_journal


def events_of(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    return [event for event in read_journal(run / "journal.jsonl") if event["event"] == kind]


def steps_of(run: Path, kind: str = "step") -> list[int]:
    return [event["step"] for event in events_of(run, kind)]


def values_of(run: Path, *names: str) -> list[list[float]]:
    return [[event[name] for name in names] for event in events_of(run)]


def curve(run: Path) -> list[list[float]]:
    """Return loss, accuracy and gradient norm of every step of a run of 12 steps."""
    assert steps_of(run) == list(range(1, 13))
    return values_of(run, "loss", "accuracy", "gradient_norm")


def difference(run: Path, other: Path) -> float:
    """Return the largest difference of two curves."""
    return max(
        abs(a - b) for one, two in zip(curve(run), curve(other), strict=True) for a, b in zip(one, two, strict=True)
    )


def model_bytes(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def same_weights(one: Path, other: Path) -> bool:
    """Return True if two files of weights have equal bits."""
    ours, theirs = load_file(one), load_file(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
