"""The numbers of a study as rows: for the page, for CSV and for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.studies.claims import Finding
from vitrail.studies.results import PointResult, Results

__all__ = ["cell_rows", "edge_notes", "plain_results", "point_rows", "trial_rows"]


def point_rows(results: Results, metrics: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each point, with the mean, the deviation and the interval of every metric."""
    return [_point_row(point, metrics) for point in results.points]


def _point_row(point: PointResult, metrics: Mapping[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "arm": point.arm,
        "place": point.label,
        "x": point.x,
        "learning_rates": " ".join(f"{rate:g}" for rate in point.rates),
        "seeds": len(point.cells),
        "diverged": len(point.diverged),
        "parameters": point.parameters,
        "flops": point.flops,
    }
    for metric in metrics:
        found = point.estimate(metric)
        for field in ("mean", "deviation", "low", "high"):
            row[f"{metric}_{field}"] = None if found is None else finite(getattr(found, field))
    return row


def finite(value: float) -> float | None:
    """Return the value, or None if it is infinite or NaN, which JSON does not have."""
    return value if abs(value) < float("inf") else None


def cell_rows(results: Results, metrics: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each point and seed."""
    return [
        {
            "arm": point.arm,
            "place": point.label,
            "x": point.x,
            "seed": seed,
            "cell": cell,
            "seconds": round(point.seconds[seed], 1),
            "diverged": point.diverged.get(seed, ""),
            **{metric: point.metrics.get(seed, {}).get(metric) for metric in metrics},
        }
        for point in results.points
        for seed, cell in point.cells.items()
    ]


def trial_rows(results: Results) -> list[dict[str, Any]]:
    """Return a row for each trial of a learning rate."""
    return [
        {
            "point": trial.tuning,
            "stage": trial.stage + 1,
            "learning_rate": trial.rate,
            "validation_accuracy": trial.value,
            "chosen": trial.chosen,
            "cell": trial.cell,
        }
        for trial in results.trials
    ]


def edge_notes(results: Results) -> list[str]:
    """Return a sentence for the points whose chosen learning rate is the lowest or the highest that was tried, because
    a better one may lie beyond it."""
    edges: dict[str, list[str]] = {"lowest": [], "highest": []}
    for name in dict.fromkeys(trial.tuning for trial in results.trials):
        trials = [trial for trial in results.trials if trial.tuning == name]
        for stage in {trial.stage for trial in trials}:
            rates = sorted(trial.rate for trial in trials if trial.stage == stage)
            chosen = next(trial.rate for trial in trials if trial.stage == stage and trial.chosen)
            if len(rates) > 2 and chosen in (rates[0], rates[-1]):
                place = f"{name} (stage {stage + 1})" if stage else name
                edges["lowest" if chosen == rates[0] else "highest"].append(place)
    return [
        f"The chosen learning rate is the {end} of those tried, so a better one may lie beyond: {', '.join(names)}."
        for end, names in edges.items()
        if names
    ]


def plain_results(results: Results, findings: list[Finding], metrics: Mapping[str, str]) -> dict[str, Any]:
    """Return everything as JSON values."""
    return {
        "points": point_rows(results, metrics),
        "cells": cell_rows(results, metrics),
        "trials": trial_rows(results),
        "verdict": [{"claim": one.claim, "outcome": one.outcome, "evidence": list(one.evidence)} for one in findings],
        "notes": edge_notes(results),
    }
