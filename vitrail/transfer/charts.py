"""Charts as inline SVG: a reliability diagram, a confusion matrix and a scatter plot."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence

from vitrail.charts.axes import Axis, make_axis
from vitrail.charts.lines import STYLE as LINE_STYLE
from vitrail.charts.lines import WIDTH
from vitrail.charts.svg import (
    BOLD_DIGIT_WIDTH,
    DIGIT_WIDTH,
    PlotArea,
    Point,
    dot,
    horizontal_text,
    svg_picture,
    vertical_text,
)
from vitrail.evaluation.predictions.calibration import CalibrationBin
from vitrail.page import escape, printable

__all__ = [
    "STYLE",
    "confusion_matrix",
    "reliability_diagram",
    "scatter_plot",
    "shorten",
]

STYLE = (
    LINE_STYLE
    + """
:root { --heat: #0e3158; --on-heat: #fff; }
@media (prefers-color-scheme: dark) { :root { --heat: #7fadd8; --on-heat: #000; } }
.heat { fill: var(--heat); }
svg .count { fill: CanvasText; } svg .count.on { fill: var(--on-heat); }
"""
)
"""CSS rules of the charts. They use the colours that `vitrail.page` defines. The colour of a confusion matrix's cell is
`--heat`, with a higher opacity for a larger fraction. A number in a cell has the colour of text if the opacity is at
most `INVERT_ABOVE`, and otherwise the colour `--on-heat`. The contrast of the numbers is at least 4.5 to 1 in light and
in dark mode."""

INVERT_ABOVE = 0.66
"""Opacity of a cell above which its number changes colour."""

PAGE_WIDTH = 980.0
"""Width of a page's text in pixels on a desktop."""

SHORTEST_NAME, LONGEST_NAME = 15, 32
"""Numbers of letters between which a confusion matrix shortens class names, depending on the space beside its cells."""


def reliability_diagram(before: Sequence[CalibrationBin], after: Sequence[CalibrationBin] | None, *, label: str) -> str:
    """Return a reliability diagram: accuracy over confidence, with a dot for each bin (1706.04599, figure 4).

    The area of a dot is the bin's fraction of the images. A vertical line through the dot is the 95 % interval of the
    accuracy (Wilson 1927), which is long for a bin of few images. `before` and `after` are the bins before and after
    temperature scaling. If both are given, `after` is drawn in front, as the first series.
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
        total = sum(one.images for one in bins)
        filled = [
            (100 * one.confidence, 100 * one.accuracy, one.images)
            for one in bins
            if one.confidence is not None and one.accuracy is not None
        ]
        ranges = "".join(_range(area, x, *_wilson_interval(y / 100, count)) for x, y, count in filled)
        parts.append(f'<path class="line range {css}" d="{ranges}"/>')
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


def scatter_plot(points: Sequence[Point], titles: Sequence[str], *, label: str) -> str:
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


def confusion_matrix(cells: Iterable[tuple[int, int, int]], names: Sequence[str], *, label: str) -> str:
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
    longest = DIGIT_WIDTH * max(map(_display_width, short))
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
        parts.append(f'<text x="{left - 8:g}" y="{top + middle + 4:g}" text-anchor="end">{text}</text>')
        parts.append(f'<text x="{x:g}" y="{y:g}" transform="rotate(-45 {x:g} {y:g})">{text}</text>')
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
    if _display_width(name) <= max_width:
        return name
    start, end = name[:max_width], name[-max_width:]
    while _display_width(start) + _display_width(end) > max_width - 1:
        if _display_width(start) > _display_width(end):
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


def _range(area: PlotArea, x: float, low: float, high: float) -> str:
    """Return the path data of a vertical line at `x` between two fractions."""
    return f"M{area.x(x):.2f} {area.y(100 * low):.2f}V{area.y(100 * high):.2f}"


def _wilson_interval(fraction: float, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a fraction of `count` samples (Wilson 1927)."""
    z = 1.959964
    centre = (fraction + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(fraction * (1 - fraction) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _display_width(name: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in name)
