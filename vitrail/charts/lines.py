"""A chart of one or two lines over training steps, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vitrail.charts.axes import UNBOUNDED, make_axis
from vitrail.charts.svg import (
    BOLD_DIGIT_WIDTH,
    DIGIT_WIDTH,
    PlotArea,
    Series,
    dot,
    horizontal_text,
    isolated,
    path_data,
    svg_picture,
)
from vitrail.page import escape

__all__ = ["STYLE", "MarkedPoint", "legend", "line_chart"]

STYLE = """
.charts { display: grid; align-items: end; gap: 1rem 1.2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 18.5rem), 1fr)); }
.charts figure { width: auto; max-width: 26rem; }
.charts figcaption { color: CanvasText; font-size: .9rem; line-height: 1.4; }
.legend { margin-right: .9rem; white-space: nowrap; }
.legend::before { content: ""; display: inline-block; width: 1.2rem; margin: 0 .35rem .25rem 0; vertical-align: middle;
  border-top: 2px solid var(--note); }
.legend.two::before { border-top: 2px dashed var(--warning); }
svg { display: block; font: 11px system-ui, sans-serif; }
.charts svg { width: 100%; height: auto; }
.scroll svg { margin-bottom: 1rem; }
svg text { fill: var(--dim); }
.grid { stroke: var(--line); fill: none; }
.axis, .ideal, .mark { stroke: var(--dim); fill: none; }
.ideal, .mark { stroke-dasharray: 2 3; }
.line { fill: none; stroke: var(--note); stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: round; }
.line.two { stroke: var(--warning); stroke-dasharray: 5 4; }
.dot { fill: var(--note); stroke: Canvas; } .dot.two { fill: var(--warning); }
.line.range { opacity: .5; stroke-width: 1; }
.dot.sample { fill-opacity: .5; stroke: none; }
svg .strong { fill: CanvasText; font-weight: 600; }
"""
"""CSS rules of the charts. They use the colours that `vitrail.page` defines."""

WIDTH, HEIGHT = 320.0, 200.0
"""Width and height of a line chart in pixels. A phone's screen is about as wide as a chart. On a desktop, three charts
fit side by side."""

MAX_DOTS = 40
"""Maximum number of points that a line draws as dots. A line with more points has no dots."""

SERIES_CLASSES = ("one", "two")
"""CSS classes of the first and of the second series."""


@dataclass(frozen=True)
class MarkedPoint:
    """A point of a line that is highlighted and labelled."""

    x: float
    y: float
    text: str


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    unit: str = "",
    from_zero: bool = False,
    bounds: tuple[float, float] = UNBOUNDED,
    mark: MarkedPoint | None = None,
) -> str:
    """Return a chart of one or two lines over training steps. If no point is finite, return "".

    `label` describes the chart in a sentence for screen readers. With `from_zero` the y axis starts at 0. `bounds` are
    the smallest and the largest y that can occur.
    """
    points = [point for one in series for point in one.finite]
    if not points:
        return ""
    x_axis = make_axis([0.0, *(x for x, _ in points)], round_ends=False, bounds=(0.0, math.inf), integers=True)
    y_axis = make_axis([*(y for _, y in points), *([0.0] if from_zero else [])], bounds=bounds)
    left = 12 + DIGIT_WIDTH * max(len(y_axis.label(tick, unit)) for tick in y_axis.ticks)
    area = PlotArea(left, 22.0, WIDTH - 26, HEIGHT - 36, x_axis, y_axis)
    parts = [area.grid(y_unit=unit), horizontal_text(area.right, HEIGHT - 6, "step", "end")]
    for one, css in zip(series, SERIES_CLASSES, strict=False):
        parts.append(f'<path class="line {css}" d="{path_data(area, one.points)}"/>')
        parts += [
            dot(area, point, 2.5, css, f"{one.name}, step {point[0]:,.0f}: {point[1]:,.4g}{unit}")
            for point in (one.finite if len(one.finite) <= MAX_DOTS else isolated(one.points))
        ]
    if mark is not None:
        x = area.x(mark.x)
        parts.append(f'<path class="mark" d="M{x:.2f} {area.top:g}V{area.bottom:g}"/>')
        parts.append(dot(area, (mark.x, mark.y), 4.0, "one", mark.text))
        half = BOLD_DIGIT_WIDTH * len(mark.text) / 2
        parts.append(horizontal_text(min(max(x, half), WIDTH - half), 14.0, mark.text, "middle", "strong"))
    return svg_picture(WIDTH, HEIGHT, label, parts)


def legend(names: Sequence[str]) -> str:
    """Return the names of a chart's lines with line samples, for the caption. For a single line, return ""."""
    if len(names) < 2:
        return ""
    samples = (
        f'<span class="legend {css}">{escape(name)}</span>' for name, css in zip(names, SERIES_CLASSES, strict=False)
    )
    return "<br>" + " ".join(samples)
