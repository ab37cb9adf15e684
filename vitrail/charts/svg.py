"""Parts of charts in SVG: the area between two axes, points, lines and text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vitrail.charts.axes import Axis
from vitrail.page import escape

__all__ = [
    "BOLD_DIGIT_WIDTH",
    "DIGIT_WIDTH",
    "PlotArea",
    "Point",
    "Series",
    "dot",
    "horizontal_text",
    "isolated",
    "path_data",
    "svg_picture",
    "vertical_text",
]

Point = tuple[float, float]
"""A point (x, y) in the units of the axes."""

DIGIT_WIDTH, BOLD_DIGIT_WIDTH = 7.0, 7.8
"""Width in pixels of a digit and of a bold digit in DejaVu at 11 pixels. DejaVu is the widest of the usual system
fonts."""


@dataclass(frozen=True)
class Series:
    """A line of a chart, with its points in ascending order of x. A point whose y is not finite leaves a gap."""

    name: str
    points: Sequence[Point]

    @property
    def finite(self) -> list[Point]:
        return [point for point in self.points if all(map(math.isfinite, point))]


@dataclass(frozen=True)
class PlotArea:
    """The part of a chart between its axes, with its edges in pixels and the axes that map values to pixels."""

    left: float
    top: float
    right: float
    bottom: float
    x_axis: Axis
    y_axis: Axis

    def x(self, value: float) -> float:
        return self.left + self.x_axis.fraction(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - self.y_axis.fraction(value) * (self.bottom - self.top)

    def grid(self, *, x_unit: str = "", y_unit: str = "") -> str:
        """Return the x axis, horizontal grid lines, and the ticks of both axes with their labels."""
        x_axis, y_axis = self.x_axis, self.y_axis
        lines = "".join(f"M{self.left:.2f} {self.y(tick):.2f}H{self.right:.2f}" for tick in y_axis.ticks)
        ticks = "".join(f"M{self.x(tick):.2f} {self.bottom:g}v4" for tick in x_axis.ticks)
        return "".join(
            [
                f'<path class="grid" d="{lines}"/>',
                f'<path class="axis" d="M{self.left:.2f} {self.bottom:g}H{self.right:.2f}{ticks}"/>',
                *(
                    horizontal_text(self.left - 6, self.y(tick) + 4, y_axis.label(tick, y_unit), "end")
                    for tick in y_axis.ticks
                ),
                *(
                    horizontal_text(self.x(tick), self.bottom + 16, x_axis.label(tick, x_unit), "middle")
                    for tick in x_axis.ticks
                ),
            ]
        )


def path_data(area: PlotArea, points: Sequence[Point]) -> str:
    """Return the path data of straight lines between the points, with gaps at points that are not finite."""
    segments, starts = [], True
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            starts = True
            continue
        segments.append(f"{'M' if starts else 'L'}{area.x(x):.2f} {area.y(y):.2f}")
        starts = False
    return "".join(segments)


def isolated(points: Sequence[Point]) -> list[Point]:
    """Return the points between two gaps. A line does not show such points."""
    finite = [False, *(math.isfinite(x) and math.isfinite(y) for x, y in points), False]
    return [point for at, point in enumerate(points) if finite[at : at + 3] == [False, True, False]]


def dot(area: PlotArea, point: Point, radius: float, css: str, title: str) -> str:
    """Return a circle with a title that is shown under the pointer."""
    return (
        f'<circle class="dot {css}" cx="{area.x(point[0]):.2f}" cy="{area.y(point[1]):.2f}" r="{radius:.2f}">'
        f"<title>{escape(title)}</title></circle>"
    )


def horizontal_text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    """Return text at a point. `anchor` is "start", "middle" or "end"."""
    style = f' class="{css}"' if css else ""
    return f'<text{style} x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'


def vertical_text(x: float, y: float, text: str) -> str:
    """Return text that runs upward, with its middle at a point."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" transform="rotate(-90 {x:g} {y:g})">{escape(text)}</text>'


def svg_picture(width: float, height: float, label: str, parts: Sequence[str], *, fixed_size: bool = False) -> str:
    """Return a picture that fills the width of the page. With `fixed_size` its size in pixels is fixed."""
    size = f' width="{width:.0f}" height="{height:.0f}"' if fixed_size else ""
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}"{size} role="img" aria-label="{escape(label)}">\n{body}\n</svg>'
