"""The curves of the runs of 12 steps that tests compare."""

from __future__ import annotations

from pathlib import Path

from vitrail.training.log import read_journal


def curve(run: Path) -> list[list[float]]:
    """Return loss, accuracy and gradient norm of every step."""
    events = [event for event in read_journal(run / "journal.jsonl") if event["event"] == "step"]
    assert [event["step"] for event in events] == list(range(1, 13))
    return [[event[name] for name in ("loss", "accuracy", "gradient_norm")] for event in events]


def difference(run: Path, other: Path) -> float:
    """Return the largest difference of two curves."""
    return max(
        abs(a - b) for one, two in zip(curve(run), curve(other), strict=True) for a, b in zip(one, two, strict=True)
    )
