"""Charts as inline SVG: lines with intervals, a reliability diagram, a confusion matrix and a scatter plot."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from markupsafe import Markup

from vitrail.report.page import PACKAGE, escape, printable

# Axes of charts: their range, and ticks at round values.


UNBOUNDED = (-math.inf, math.inf)


@dataclass(frozen=True)
class Axis:
    """The range of values that a chart shows, and the values of its ticks."""

    low: float
    high: float
    step: float
    """Distance between two ticks."""
    ticks: tuple[float, ...]
    is_log: bool = False
    """True if equal distances on the axis are equal ratios."""

    def fraction(self, value: float) -> float:
        """Return the position of a value on the axis: 0 at the low end, 1 at the high end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def label(self, tick: float, unit: str = "") -> str:
        """Return a tick's label, with enough digits to distinguish neighbouring ticks."""
        if self.is_log:
            return f"{tick:g}" if 1e-3 <= tick < 1e5 else f"{tick:.0e}".replace("e+", "e")
        largest = max(abs(self.low), abs(self.high))
        if 1e-4 <= largest < 1e7:
            return f"{tick:,.{max(_decimals(self.step), 0)}f}{unit}"
        return f"{tick:.{math.floor(math.log10(largest)) + _decimals(self.step) + 1}g}{unit}"


def make_axis(
    values: Iterable[float],
    *,
    round_ends: bool = True,
    bounds: tuple[float, float] = UNBOUNDED,
    integers: bool = False,
    steps: int = 5,
) -> Axis:
    """Return an axis for finite values, with about `steps` steps of 1, 2 or 5 times a power of ten.

    With `round_ends` the axis ends at ticks, otherwise at the smallest and the largest value. The axis never leaves
    `bounds`, which contain all values. With `integers` every tick is a whole number. If all values are equal, the axis
    extends on both sides of them.
    """
    found = list(values)
    low, high = min(found), max(found)
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        margin = max(0.1 * abs(high), 1.0 if integers or not high else 0.0)
        low, high = max(low - margin, bounds[0]), min(high + margin, bounds[1])
    step = _round_step((high - low) / steps)
    step = max(step, 1.0) if integers else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(number * step, _decimals(step)) for number in range(first, last + 1))
    if round_ends:
        low, high = max(ticks[0], bounds[0]), min(ticks[-1], bounds[1])
    return Axis(low, high, step, tuple(tick for tick in ticks if low <= tick <= high))


def make_log_axis(values: Iterable[float]) -> Axis:
    """Return a logarithmic axis from the smallest to the largest of some values above 0, at least a quarter apart. It
    has at most about six ticks, at round values."""
    exponents = [math.log10(value) for value in values]
    low, high = min(exponents), max(exponents)
    if high - low < 0.1:
        low, high = low - 0.1, high + 0.1
    powers = range(math.floor(low), math.ceil(high) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        ticks = [tick for tick in ticks if low - 1e-9 <= math.log10(tick) <= high + 1e-9]
        if len(ticks) <= 6:
            break
    return Axis(10.0**low, 10.0**high, 0.0, tuple(ticks), is_log=True)


def _decimals(step: float) -> int:
    """Return the number of decimal places that a step needs. It is negative for steps of 10 and more.

    The step is 1, 2 or 5 times a power of ten.
    """
    return -math.floor(math.log10(step) + 1e-9)


def _round_step(smallest: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least `smallest`."""
    power = 10.0 ** math.floor(math.log10(smallest))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= smallest * (1 - 1e-9))


# A chart of one or two lines over training steps, as inline SVG.


WIDTH, HEIGHT = 320.0, 200.0
"""Width and height of a line chart in pixels. A phone's screen is about as wide as a chart. On a desktop, three charts
fit side by side."""

MAX_DOTS = 40
"""Maximum number of points that a line draws as dots. A line with more points has no dots."""

SERIES_CLASSES = ("one", "two")
"""CSS classes of the first and of the second series."""


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    unit: str = "",
    from_zero: bool = False,
    bounds: tuple[float, float] = UNBOUNDED,
    mark: tuple[Point, str] | None = None,
) -> Markup:
    """Return a chart of one or two lines over training steps. If no point is finite, return "".

    `label` describes the chart in a sentence for screen readers. With `from_zero` the y axis starts at 0. `bounds` are
    the smallest and the largest y that can occur. `mark` is a point that is highlighted, and its label.
    """
    points = [point for one in series for point in one.finite]
    if not points:
        return Markup()
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
        point, text = mark
        x, half = area.x(point[0]), BOLD_DIGIT_WIDTH * len(text) / 2
        parts += [
            f'<path class="mark" d="M{x:.2f} {area.top:g}V{area.bottom:g}"/>',
            dot(area, point, 4.0, "one", text),
            horizontal_text(min(max(x, half), WIDTH - half), 14.0, text, "middle", "strong"),
        ]
    return svg_picture(WIDTH, HEIGHT, label, parts)


@dataclass(frozen=True)
class Chart:
    """A chart with its caption."""

    caption: str
    svg: Markup
    names: tuple[str, ...] = ()
    """Names of its lines for the caption, if there are several."""


STYLE = (PACKAGE / "report" / "charts.css").read_text(encoding="utf-8")
"""CSS rules of the charts. They use the colours that `vitrail.report.page` defines. The colour of a confusion
matrix's cell is `--heat`, with a higher opacity for a larger fraction. A number in a cell has the colour of
text if the opacity is at most `INVERT_ABOVE`, and otherwise the colour `--on-heat`. The contrast of the numbers
is at least 4.5 to 1 in light and in dark mode."""

INVERT_ABOVE = 0.66
"""Opacity of a cell above which its number changes colour."""

Bin: TypeAlias = tuple[float, float, int, tuple[float, float]]
"""Mean confidence, accuracy, number of images, and ends of the accuracy's interval, of the images whose confidence lies
between two limits."""

PAGE_WIDTH = 980.0
"""Width of a page's text in pixels on a desktop."""

SHORTEST_NAME, LONGEST_NAME = 15, 32
"""Numbers of letters between which a confusion matrix shortens class names, depending on the space beside its cells."""


def reliability_diagram(before: Sequence[Bin], after: Sequence[Bin] | None, *, label: str) -> Markup:
    """Return a reliability diagram: accuracy over confidence, with a dot for each bin (1706.04599, figure 4).

    The area of a dot is the bin's fraction of the images. A vertical line through the dot is the interval of the
    accuracy, which is long for a bin of few images. `before` and `after` are the bins before and after temperature
    scaling, without empty ones. If both are given, `after` is drawn in front, as the first series.
    """
    width, height = 320.0, 310.0
    percent = make_axis([0.0, 100.0])
    area = PlotArea(52.0, 12.0, 302.0, 262.0, percent, percent)
    parts = [
        area.grid(x_unit="%", y_unit="%"),
        horizontal_text((area.left + area.right) / 2, height - 8, "confidence", "middle"),
        vertical_text(10.0, (area.top + area.bottom) / 2, "accuracy"),
        _diagonal(area),
    ]
    for css, bins in [("one", before)] if after is None else [("two", before), ("one", after)]:
        total = sum(images for _, _, images, _ in bins)
        filled = [(100 * confidence, 100 * accuracy, images) for confidence, accuracy, images, _ in bins]
        lines = [
            f"M{area.x(100 * confidence):.2f} {area.y(100 * low):.2f}V{area.y(100 * high):.2f}"
            for confidence, _, _, (low, high) in bins
        ]
        parts.append(f'<path class="line range {css}" d="{"".join(lines)}"/>')
        parts += [
            dot(
                area,
                (x, y),
                max(9 * math.sqrt(count / total), 1.5),
                css,
                f"confidence {x:.1f}%, accuracy {y:.1f}%, images {count:,}",
            )
            for x, y, count in filled
        ]
    return svg_picture(width, height, label, parts)


def scatter_plot(points: Sequence[Point], titles: Sequence[str], *, label: str) -> Markup:
    """Return a scatter plot of predicted over true values, with a dot per sample and the line on which both are equal.

    Each point is a true and a predicted value, both finite. `titles` describe the points, in the same order.
    """
    common, longest = _common_axis([value for point in points for value in point])
    left, top, right = 26 + longest, 12.0, WIDTH - 2 - longest / 2
    area = PlotArea(left, top, right, top + right - left, common, common)
    height = area.bottom + 40
    parts = [
        area.grid(),
        horizontal_text((area.left + area.right) / 2, height - 8, "true", "middle"),
        vertical_text(12.0, (area.top + area.bottom) / 2, "predicted"),
        _diagonal(area),
        *(dot(area, point, 2.5, "sample", title) for point, title in zip(points, titles, strict=True)),
    ]
    return svg_picture(WIDTH, height, label, parts)


def confusion_matrix(cells: Iterable[tuple[int, int, int]], names: Sequence[str], *, label: str) -> Markup:
    """Return a confusion matrix. Rows are true classes, and columns are predicted classes.

    The shade of a cell is its fraction of the row. Each item of `cells` is a row, a column and a count above 0. The
    picture has a fixed size in pixels, so the page scrolls it if it is too wide.
    """
    found = list(cells)
    totals = [0] * len(names)
    for row, _, count in found:
        totals[row] += count
    side = max(20, min(40, 480 // len(names)))
    room = (PAGE_WIDTH - 20 - len(names) * side) / (1.75 * DIGIT_WIDTH)
    short = [shorten(name, max(SHORTEST_NAME, min(LONGEST_NAME, math.floor(room)))) for name in names]
    longest = DIGIT_WIDTH * max(map(display_width, short))
    left, top = max(longest, BOLD_DIGIT_WIDTH * 11) + 12, max(0.75 * longest + 20, 36.0)  # the corner has text
    extent = len(names) * side
    width, height = left + extent + max(0.75 * longest - side / 2 + 6, 2.0), top + extent + 2
    lines = "".join(
        f"M{left:g} {top + at * side:g}h{extent}M{left + at * side:g} {top:g}v{extent}" for at in range(len(names) + 1)
    )
    parts = [
        horizontal_text(left - 8, top - 22, "predicted →", "end", "strong"),
        horizontal_text(left - 8, top - 7, "true ↓", "end", "strong"),
        f'<path class="grid" d="{lines}"/>',
    ]
    for number, (name, shown) in enumerate(zip(names, short, strict=True)):
        middle = (number + 0.5) * side
        text = f"<title>{escape(name)}</title>{escape(shown)}"
        x, y = left + middle + 3, top - 6
        parts += [
            f'<text x="{left - 8:g}" y="{top + middle + 4:g}" text-anchor="end">{text}</text>',
            f'<text x="{x:g}" y="{y:g}" transform="rotate(-45 {x:g} {y:g})">{text}</text>',
        ]
    for row, column, count in found:
        fraction = count / totals[row]
        opacity = 0.05 + 0.95 * fraction  # a minimum opacity keeps the cell of a single image visible
        text = f"{count:,}" if count < 10_000 else f"{count / 1000:.0f}k"
        font_size = min(11.0, 0.9 * side / (0.6 * len(text)))
        x, y = left + column * side, top + row * side
        title = (
            f"{shorten(names[row], 60)} → {shorten(names[column], 60)}: {count:,} of {totals[row]:,} ({fraction:.1%})"
        )
        parts.append(
            f'<g><title>{escape(title)}</title><rect class="heat" x="{x + 0.5:g}" y="{y + 0.5:g}" width="{side - 1}" '
            f'height="{side - 1}" fill-opacity="{opacity:.3f}"/><text class="count{" on" * (opacity > INVERT_ABOVE)}" '
            f'x="{x + side / 2:g}" y="{y + side / 2 + 0.36 * font_size:.2f}" text-anchor="middle" '
            f'font-size="{font_size:.3g}">{text}</text></g>'
        )
    return svg_picture(width, height, label, parts, fixed_size=True)


def shorten(name: str, max_width: int) -> str:
    """Return a name as printable text, shortened in the middle to at most `max_width` letters.

    East Asian letters count as two.
    """
    name = printable(name)
    if display_width(name) <= max_width:
        return name
    start, end = name[:max_width], name[-max_width:]
    while display_width(start) + display_width(end) > max_width - 1:
        if display_width(start) > display_width(end):
            start = start[:-1]
        else:
            end = end[1:]
    return f"{start.rstrip()}…{end.lstrip()}"


def _common_axis(values: Sequence[float]) -> tuple[Axis, float]:
    """Return an axis that a square chart uses for x and y, and the width of its widest label.

    The labels of its ticks do not overlap.
    """
    for steps in (5, 4, 3, 2):
        common = make_axis(values, steps=steps)
        widest = DIGIT_WIDTH * max(len(common.label(tick)) for tick in common.ticks)
        distance = (WIDTH - 28 - 1.5 * widest) * common.step / (common.high - common.low)
        if widest + DIGIT_WIDTH <= distance:
            break
    return common, widest


def _diagonal(area: PlotArea) -> str:
    return f'<path class="ideal" d="M{area.left:g} {area.bottom:g}L{area.right:g} {area.top:g}"/>'


def display_width(name: str) -> int:
    """Return the width of a name in letters. East Asian letters count as two."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in name)


# Parts of charts in SVG: the area between two axes, points, lines and text.


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


def dot(area: PlotArea, point: Point, radius: float, css: str, title: str, colour: str = "") -> str:
    """Return a circle with a title that is shown under the pointer. `colour` is an attribute such as ` fill="red"`."""
    return (
        f'<circle class="dot {css}"{colour} cx="{area.x(point[0]):.2f}" cy="{area.y(point[1]):.2f}" r="{radius:.2f}">'
        f"<title>{escape(title)}</title></circle>"
    )


def horizontal_text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    """Return text at a point. `anchor` is "start", "middle" or "end"."""
    style = f' class="{css}"' if css else ""
    return f'<text{style} x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'


def vertical_text(x: float, y: float, text: str) -> str:
    """Return text that runs upward, with its middle at a point."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" transform="rotate(-90 {x:g} {y:g})">{escape(text)}</text>'


def svg_picture(width: float, height: float, label: str, parts: Sequence[str], *, fixed_size: bool = False) -> Markup:
    """Return a picture that fills the width of the page. With `fixed_size` its size in pixels is fixed."""
    size = f' width="{width:.0f}" height="{height:.0f}"' if fixed_size else ""
    body = "\n".join(parts)
    opening = f'<svg viewBox="0 0 {width:.0f} {height:.0f}"{size} role="img" aria-label="{escape(label)}">'
    return Markup(f"{opening}\n{body}\n</svg>")
