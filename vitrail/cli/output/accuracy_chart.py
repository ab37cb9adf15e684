"""The curves of `vitrail bench accuracy` as an SVG file: accuracy over time, and over counted operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from vitrail.bench.accuracy.cell import Point
from vitrail.bench.accuracy.results import Curves
from vitrail.charts.axes import Axis, log_ticks, make_axis, short_number
from vitrail.page import escape

__all__ = ["accuracy_chart"]

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 440.0, 300.0, 52.0, 16.0, 44.0, 24.0
"""Size of one of the two charts in pixels, with its margins."""

LINE = 18.0
"""Height of a line of the legend."""

COLOURS = ("#2d6cb5", "#c2571a", "#2f8f5b", "#8d4bb0", "#b8322f", "#6b6b1f", "#17808a", "#a3477f")
"""Colours of the entries, with a contrast of at least 3 to 1 on white and on the dark background."""

DASHES = ("", "6 3", "2 3", "8 3 2 3", "", "6 3", "2 3", "8 3 2 3")
"""Dashes of the entries, so that lines differ not only in their colours."""

STYLE = """
svg { font: 12px system-ui, sans-serif; background: #fff; }
text { fill: #444; } .strong { fill: #000; } .grid { stroke: #ddd; } .axis { stroke: #777; }
.target { stroke: #777; stroke-dasharray: 1 3; } path { fill: none; } .line { stroke-width: 1.6; }
@media (prefers-color-scheme: dark) {
  svg { background: #161614; } text { fill: #b5b5b0; } .strong { fill: #fff; } .grid { stroke: #383835; }
}
"""


def accuracy_chart(curves: Curves, targets: Sequence[float], budget: float | None) -> str:
    """Return an SVG picture with a line for each cell. Both x axes are logarithmic. Evaluations after the budget are
    not drawn."""
    height = HEIGHT + LINE * len(curves) + 12
    charts = (("seconds of training", lambda point: point.seconds), ("counted FLOPs", lambda point: point.flops))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH + GAP:g} {height:g}" role="img">',
        "<title>Validation accuracy over seconds of training and over counted FLOPs</title>",
        f"<style>{STYLE}</style>",
    ]
    for number, (label, cost) in enumerate(charts):
        left = number * (WIDTH + GAP)
        parts.append(f'<g transform="translate({left:g} 0)">{_chart(curves, targets, budget, label, cost)}</g>')
    for number, (entry, cells) in enumerate(curves.items()):
        y = HEIGHT + LINE * (number + 0.7)
        seeds = f"seed {next(iter(cells))}" if len(cells) == 1 else f"{len(cells)} seeds"
        parts.append(
            f'<path class="line" {_stroke(number)} d="M{LEFT:g} {y - 4:g}h34"/>'
            f'<text class="strong" x="{LEFT + 42:g}" y="{y:g}">{escape(entry)}, {seeds}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _chart(
    curves: Curves, targets: Sequence[float], budget: float | None, label: str, cost: Callable[[Point], float]
) -> str:
    """Return one chart: a line for each cell, and a dotted line for each target."""
    lines = [
        (number, [(cost(one), 100 * one.accuracy) for one in result.points if budget is None or one.seconds <= budget])
        for number, cells in enumerate(curves.values())
        for result in cells.values()
    ]
    points = [(x, y) for _, line in lines for x, y in line if x > 0]
    if not points:
        return f'<text x="{LEFT:g}" y="{TOP + 20:g}">no evaluation within the budget</text>'
    y_axis = make_axis([*(y for _, y in points), *(100 * target for target in targets)], bounds=(0.0, 100.0))
    low, high = math.log10(min(x for x, _ in points)), math.log10(max(x for x, _ in points))
    if high - low < 0.1:
        low, high = low - 0.1, high + 0.1
    right, bottom = WIDTH - 12, HEIGHT - BOTTOM

    def at_x(value: float) -> float:
        return LEFT + (math.log10(value) - low) / (high - low) * (right - LEFT)

    def at_y(value: float) -> float:
        return bottom - y_axis.fraction(value) * (bottom - TOP)

    parts = [_grid(y_axis, at_y, right, bottom)]
    for tick in log_ticks(low, high):
        x = at_x(tick)
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom:g}v4"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 17:g}" text-anchor="middle">{short_number(tick)}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle:g}" y="{bottom + 36:g}" text-anchor="middle">{label}</text>')
    parts += [f'<path class="target" d="M{LEFT:g} {at_y(100 * target):.1f}H{right:g}"/>' for target in targets]
    for number, line in lines:
        path = "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in line if x > 0)
        if path:
            parts.append(f'<path class="line" {_stroke(number)} d="M{path}"/>')
    return "\n".join(parts)


def _grid(y_axis: Axis, at_y: Callable[[float], float], right: float, bottom: float) -> str:
    lines = "".join(f"M{LEFT:g} {at_y(tick):.1f}H{right:g}" for tick in y_axis.ticks)
    labels = (
        f'<text x="{LEFT - 6:g}" y="{at_y(tick) + 4:.1f}" text-anchor="end">{y_axis.label(tick, "%")}</text>'
        for tick in y_axis.ticks
    )
    return f'<path class="grid" d="{lines}"/><path class="axis" d="M{LEFT:g} {bottom:g}H{right:g}"/>' + "".join(labels)


def _stroke(number: int) -> str:
    """Return the attributes of the line of an entry."""
    dashes = DASHES[number % len(DASHES)]
    return f'stroke="{COLOURS[number % len(COLOURS)]}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")
