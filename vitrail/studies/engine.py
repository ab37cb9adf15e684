"""The engine of studies: it chooses the learning rate of every arm, and then measures every point with every seed.

Learning rates are chosen on a cut of the training split, with a seed that no reported cell has. Only then is the test
split measured, by cells whose settings are fixed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import plural
from vitrail.evaluation.metrics.numbers import merit
from vitrail.experiments.runner import Pool, experiment
from vitrail.studies.cell import CellResult, Measured, StudyCell, make_cell
from vitrail.studies.claims import PointResult, Results, TuningTrial
from vitrail.studies.study import Point, Settings, Study

TRIAL_SEED = 1000
"""Seed of the trials that choose learning rates. Reported cells have other seeds."""

RECORD = "study.json"
FORMAT = 1


def chain(point: Point, rates: Sequence[float], seed: int, *, is_trial: bool = False) -> list[StudyCell]:
    """Return the cells of the first `len(rates)` stages of a point with these learning rates. Each cell starts from the
    one before it.

    The last cell measures the test split. The last cell of a trial measures the cut of the training split, with the
    seed of trials.
    """
    cells: list[StudyCell] = []
    for number, rate in enumerate(rates):
        is_last = number == len(rates) - 1
        measured: Measured = "test" if is_last and not is_trial else "validation"
        config = point.stages[number].config.override(
            learning_rate=rate, seed=TRIAL_SEED if is_last and is_trial else seed
        )
        cells.append(
            make_cell(
                config,
                by=point.by if measured == "test" else (),
                evaluator_settings=point.evaluator_settings if measured == "test" else None,
                measured=measured,
                start=cells[-1].name if cells else None,
            )
        )
    return cells


def tuned_points(points: Sequence[Point]) -> dict[str, Point]:
    """Return the point on which learning rates are chosen, by the name under which points share them."""
    found: dict[str, Point] = {}
    for point in points:
        found.setdefault(point.tuning, point)
    return found


def planned_cells(points: Sequence[Point], seeds: Sequence[int]) -> tuple[dict[str, StudyCell], dict[str, StudyCell]]:
    """Return the cells of the trials and the other cells, by name. The learning rates of the latter are the first ones
    to try, because the others are not chosen yet. They have the same cost."""
    trials: dict[str, StudyCell] = {}
    final: dict[str, StudyCell] = {}
    for point in tuned_points(points).values():
        for number, stage in enumerate(point.stages):
            first = [one.rates[0] for one in point.stages[:number]]
            for rate in stage.rates if len(stage.rates) > 1 else ():
                cells = chain(point, [*first, rate], seeds[0], is_trial=True)
                trials[cells[-1].name] = cells[-1]
    for point, seed in itertools.product(points, seeds):
        final |= {cell.name: cell for cell in chain(point, [stage.rates[0] for stage in point.stages], seed)}
    return trials, final


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """A study with its choices, in a folder."""

    study: Study
    settings: Settings
    points: tuple[Point, ...]
    seeds: tuple[int, ...]
    folder: Path

    def held(self) -> AbstractContextManager[None]:
        """Hold the folder inside a `with` block. Raises `RunError` if it holds something else."""
        settings = {
            "format": FORMAT,
            "study": self.study.name,
            "scale": self.settings.scale,
            "data": self.settings.data,
            "fingerprint": self.settings.fingerprint,
        }
        return experiment(self.folder / RECORD, settings, "a study", "--out")

    def measure(self, pool: Pool[StudyCell, CellResult]) -> Results:
        """Run all cells that the folder does not have, and return the results. Raises the errors of `Pool.run`."""
        trials, rates = self._choose(pool)
        chains = {
            (point.name, seed): chain(point, rates[point.tuning], seed)
            for seed in self.seeds  # all points with a seed before the next seed, so that slow hours hit all points
            for point in self.points
        }
        results = pool.run(
            [one for (name, seed), cells in chains.items() for one in _labelled(cells, f"{name}, seed {seed}")]
        )
        points = [self._point(point, rates[point.tuning], chains, results) for point in self.points]
        machines = dict.fromkeys(_machine(result) for result in results.values())
        return Results(points, trials, list(machines))

    def _choose(self, pool: Pool[StudyCell, CellResult]) -> tuple[list[TuningTrial], dict[str, tuple[float, ...]]]:
        """Return all trials, and the chosen learning rates of every stage by the name under which points share them."""
        tuned = tuned_points(self.points)
        rates: dict[str, tuple[float, ...]] = dict.fromkeys(tuned, ())
        trials: list[TuningTrial] = []
        for number in range(max(len(point.stages) for point in tuned.values())):
            chains = {
                (name, rate): chain(point, [*rates[name], rate], self.seeds[0], is_trial=True)
                for name, point in tuned.items()
                if number < len(point.stages) and len(point.stages[number].rates) > 1
                for rate in point.stages[number].rates
            }
            results = pool.run(
                [one for (name, rate), cells in chains.items() for one in _labelled(cells, f"{name}, rate {rate:g}")]
            )
            for name, point in tuned.items():
                if number >= len(point.stages):
                    continue
                stage = point.stages[number]
                found = {rate: results[chains[name, rate][-1].name] for rate in stage.rates if (name, rate) in chains}
                best = max(found, key=lambda rate: _merit(found[rate])) if found else stage.rates[0]
                rates[name] = (*rates[name], best)
                trials += [
                    TuningTrial(
                        name, number, rate, result.metrics.get("validation_accuracy"), rate == best,
                        chains[name, rate][-1].name,
                    )
                    for rate, result in found.items()
                ]  # fmt: skip
        return trials, rates

    def _point(
        self,
        point: Point,
        rates: tuple[float, ...],
        chains: Mapping[tuple[str, int], list[StudyCell]],
        results: Mapping[str, CellResult],
    ) -> PointResult:
        cells = {seed: chains[point.name, seed][-1].name for seed in self.seeds}
        found = {seed: results[name] for seed, name in cells.items()}
        known = [result for result in found.values() if not result.diverged]
        return PointResult(
            arm=point.arm,
            x=point.x,
            label=point.label,
            rates=rates,
            metrics={seed: result.metrics for seed, result in found.items() if not result.diverged},
            diverged={seed: result.diverged for seed, result in found.items() if result.diverged},
            cells=cells,
            flops=max((result.flops for result in known), default=0.0),
            seconds={seed: result.seconds for seed, result in found.items()},
            parameters=max((result.parameters for result in known), default=0),
        )


def _machine(result: CellResult) -> str:
    """Return the machine of a cell in words."""
    threads = plural(int(result.machine["threads"]), "thread")
    return f"{result.machine['device']}, {threads} for each cell, {result.machine['precision']}"


def _merit(result: CellResult) -> tuple[float, float]:
    """Return the merit of a trial. One that diverged has no metrics, and is worse than all others."""
    return merit(*map(result.metrics.get, ("validation_accuracy", "validation_cross_entropy")))


def _labelled(cells: Sequence[StudyCell], label: str) -> list[tuple[str, StudyCell]]:
    """Return the cells of a chain with their labels, each after the cell that it starts from."""
    return [(label if cell is cells[-1] else f"pre-training of {label}", cell) for cell in cells]
