"""Charts of measurements as SVG: many lines, a scatter plot, and a map of values with a colour bar; and tiled pictures.

The colours can be distinguished with the common kinds of colour blindness, and lines also differ in their dashes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, UInt8
from markupsafe import Markup
from PIL import Image

from vitrail.report.charts import (
    DIGIT_WIDTH,
    LONGEST_NAME,
    MAX_DOTS,
    Axis,
    PlotArea,
    Point,
    Series,
    display_width,
    dot,
    horizontal_text,
    isolated,
    make_axis,
    make_log_axis,
    path_data,
    shorten,
    svg_picture,
    vertical_text,
)
from vitrail.report.page import escape, picture_file

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#7f7f7f", "#e69f00")
"""Colours of series (Okabe and Ito 2008). Yellow is darkened, so that it is visible on white."""

DASHES = ("", "6 4", "1 4", "8 4 1 4")
"""Dashes of series. They distinguish lines without colours, and series of the same colour have different ones."""

SCALE = ((68, 1, 84), (72, 40, 120), (62, 74, 137), (49, 104, 142), (38, 130, 142), (31, 158, 137), (53, 183, 121),
         (109, 205, 89), (180, 222, 44), (253, 231, 37))  # fmt: skip
"""Colours from the smallest to the largest value: viridis, whose brightness grows evenly."""

STYLE = """
svg { font: 11px system-ui, sans-serif; }
svg text { fill: var(--dim, #5c5c58); }
.grid { stroke: var(--line, #d4d4d0); fill: none; }
.axis { stroke: var(--dim, #5c5c58); fill: none; }
.series { fill: none; stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: round; }
.level { stroke: var(--dim, #5c5c58); stroke-dasharray: 1 3; }
.dot { stroke: none; fill-opacity: .8; }
.dot.ring { fill-opacity: 0; stroke: currentColor; stroke-width: 1.5; }
"""
"""CSS rules of the charts. Outside of a page of `vitrail.report.page`, the colours of light mode apply."""

WIDTH, HEIGHT = 480.0, 280.0
LEGEND_LINE, LEGEND_LETTERS = 15.0, 50
"""Height of a line of a legend, and the largest number of letters of a name in it. Capitals are wider than digits."""

CELL, MAX_SIDE = 22.0, 420.0
"""Largest side of a cell of a heat map, and largest side of the map, in pixels."""


def series_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_name: str,
    y_name: str,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    integers: bool = False,
    is_log: bool = False,
    levels: Sequence[float] = (),
) -> Markup:
    """Return a chart with a line for each series, and a legend below. If no point is finite, return "".

    Series of the same name have the same colour and dashes. `label` describes the chart for screen readers. `bounds`
    are the smallest and largest y that can occur. With `integers`, the ticks of x are whole numbers. With `is_log`,
    the x axis is logarithmic, so that every x is above 0. At the `levels` of y, there are dotted lines.
    """
    points = [point for one in series for point in one.finite]
    if not points:
        return Markup()
    xs, ys = [x for x, _ in points], [*(y for _, y in points), *levels]
    x_axis = make_log_axis(xs) if is_log else make_axis(xs, round_ends=not integers, integers=integers)
    area, frame = _frame(x_axis, make_axis(ys, bounds=bounds), x_name, y_name)
    parts = [frame, *(f'<path class="level" d="M{area.left:g} {area.y(y):.2f}H{area.right:g}"/>' for y in levels)]
    names = list(dict.fromkeys(one.name for one in series))
    for one in series:
        colour, dashes = series_look(names.index(one.name))
        parts.append(
            f'<path class="series" stroke="{colour}"{dashes} d="{path_data(area, one.points)}">'
            f"<title>{escape(one.name)}</title></path>"
        )
        parts += [
            dot(area, (x, y), 2.5, "", f"{one.name}: {x:.4g}, {y:.4g}", f' fill="{colour}"')
            for x, y in (one.finite if len(one.finite) <= MAX_DOTS else isolated(one.points))
        ]
    return _with_legend(parts, names, label, lines=True)


def scatter(
    groups: Mapping[str, Sequence[Point]],
    *,
    label: str,
    x_name: str,
    y_name: str,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    integers: bool = False,
) -> Markup:
    """Return a scatter plot with one colour per group. If there are more groups than colours, every second round of
    colours has rings in place of dots. See `series_chart` for the arguments."""
    finite = {name: [point for point in points if all(map(math.isfinite, point))] for name, points in groups.items()}
    every = [point for points in finite.values() for point in points]
    if not every:
        return Markup()
    x_axis = make_axis([x for x, _ in every], round_ends=not integers, integers=integers)
    area, frame = _frame(x_axis, make_axis([y for _, y in every], bounds=bounds), x_name, y_name)
    parts = [frame]
    for number, (name, points) in enumerate(finite.items()):
        css, look = _dot_look(number)
        parts += [dot(area, (x, y), 3.0, css, f"{name}: {x:.4g}, {y:.4g}", look) for x, y in points]
    return _with_legend(parts, list(finite), label, lines=False)


def heat_map(
    values: Float[np.ndarray, "rows columns"],
    *,
    label: str,
    row_name: str,
    column_name: str,
    unit: str,
    rows: Sequence[str],
    columns: Sequence[str],
    bounds: tuple[float, float] | None = None,
) -> Markup:
    """Return a map of values with a colour bar. `rows` and `columns` name its rows and columns.

    `bounds` are the values of the first and last colour, by default the smallest and largest value. Values that are not
    finite have no colour.
    """
    height, width = values.shape
    side = min(CELL, MAX_SIDE / max(height, width))
    finite = values[np.isfinite(values)].tolist()
    axis = make_axis(bounds or finite or (0.0, 1.0), round_ends=False)
    down, across = shorten(row_name, LONGEST_NAME), shorten(column_name, LONGEST_NAME)
    left = 28 + DIGIT_WIDTH * max(map(len, rows))
    top = max(12.0, (DIGIT_WIDTH * display_width(down) - side * height) / 2)  # a name can be longer than the map
    right, bottom = left + side * width, top + side * max(height, 4)
    half = DIGIT_WIDTH * display_width(across) / 2
    middle = max((left + right) / 2, half)
    parts = []
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if not math.isfinite(value):
                continue
            red, green, blue = colours(np.array([[axis.fraction(float(value))]]))[0, 0]
            parts.append(
                f'<rect x="{left + column * side:.2f}" y="{top + row * side:.2f}" width="{side:.2f}" '
                f'height="{side:.2f}" fill="#{red:02x}{green:02x}{blue:02x}"><title>'
                f"{escape(f'{row_name} {rows[row]}, {column_name} {columns[column]}: {value:.4g} {unit}')}"
                "</title></rect>"
            )
    every = max(1, math.ceil(1.3 * DIGIT_WIDTH * max(map(len, columns)) / side))
    parts += [
        horizontal_text(left + (number + 0.5) * side, top + height * side + 14, name, "middle")
        for number, name in enumerate(columns)
        if number % every == 0
    ]
    every = max(1, math.ceil(12 / side))
    parts += [
        horizontal_text(left - 6, top + (number + 0.5) * side + 4, name, "end")
        for number, name in enumerate(rows)
        if number % every == 0
    ]
    parts.append(horizontal_text(middle, top + height * side + 30, across, "middle"))
    parts.append(vertical_text(10.0, top + height * side / 2, down))
    bar, longest = _colour_bar(axis, right + 16, top, bottom, unit)
    whole = max(right + 36 + DIGIT_WIDTH * longest, right + 22 + DIGIT_WIDTH * len(unit), middle + half)
    return svg_picture(
        whole, max(bottom + 8, top + height * side + max(36, top)), label, [*parts, bar], fixed_size=True
    )


def colours(fractions: Float[np.ndarray, "*n h w"]) -> UInt8[np.ndarray, "*n h w 3"]:
    """Return the colours of values between 0 and 1 on the scale of the charts. Other values are clipped."""
    places = np.linspace(0, 1, len(SCALE))
    channels = [np.interp(fractions, places, [colour[channel] for colour in SCALE]) for channel in range(3)]
    return np.rint(np.stack(channels, axis=-1)).astype(np.uint8)


def mosaic(
    pictures: Float[np.ndarray, "n h w c"], columns: int, *, scale: int = 1, gap: int = 1
) -> UInt8[np.ndarray, "height width 3"]:
    """Return pictures side by side in rows of `columns`, with white gaps of `gap` pixels.

    The numbers of a picture are between 0 and 1. A picture has one channel, which is grey, or three. `scale` enlarges
    the pictures by a whole factor.
    """
    count, height, width, channels = pictures.shape
    levels = np.rint(255 * pictures.clip(0, 1)).astype(np.uint8)
    levels = np.broadcast_to(levels, (count, height, width, 3)) if channels == 1 else levels
    levels = levels.repeat(scale, axis=1).repeat(scale, axis=2)
    down, across = height * scale + gap, width * scale + gap
    rows = math.ceil(count / columns)
    result = np.full((rows * down - gap, min(columns, count) * across - gap, 3), 255, np.uint8)
    for number, picture in enumerate(levels):
        top, left = number // columns * down, number % columns * across
        result[top : top + height * scale, left : left + width * scale] = picture
    return result


def png(picture: UInt8[np.ndarray, "h w 3"]) -> bytes:
    """Return a picture as a PNG file."""
    return picture_file(Image.fromarray(picture), "PNG")


def side_by_side(charts: Sequence[Markup], label: str) -> Markup:
    """Return a picture of several charts in a row."""
    parts, left, tallest = [], 0.0, 0.0
    for chart in map(str, charts):
        width, height = map(float, re.findall(r' (?:width|height)="(\d+)"', chart)[:2])
        parts.append(chart.replace("<svg ", f'<svg x="{left:g}" ', 1))
        left, tallest = left + width, max(tallest, height)
    return svg_picture(left, tallest, label, parts, fixed_size=True)


def standalone(chart: str) -> str:
    """Return a chart as the text of an SVG file, with its own style and a white background."""
    chart = str(chart)  # not HTML that escapes what is joined to it
    start, end = chart.index("<svg ") + 5, chart.index(">")
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {chart[start:end]}>\n<style>{STYLE}</style>\n{background}'
        f"{chart[end + 1 :]}\n"
    )


def _frame(x_axis: Axis, y_axis: Axis, x_name: str, y_name: str) -> tuple[PlotArea, str]:
    """Return the area of a chart with these axes, and its grid with the names of the axes."""
    left = 32 + DIGIT_WIDTH * max(len(y_axis.label(tick)) for tick in y_axis.ticks)
    area = PlotArea(left, 12.0, WIDTH - 16, HEIGHT - 44, x_axis, y_axis)
    names = [
        horizontal_text((area.left + area.right) / 2, HEIGHT - 10, x_name, "middle"),
        vertical_text(12.0, (area.top + area.bottom) / 2, y_name),
    ]
    return area, "".join([area.grid(), *names])


def series_look(number: int) -> tuple[str, str]:
    """Return the colour of a series, and its attribute for dashes."""
    dashes = DASHES[(number + number // len(COLOURS)) % len(DASHES)]
    return COLOURS[number % len(COLOURS)], f' stroke-dasharray="{dashes}"' if dashes else ""


def _dot_look(number: int) -> tuple[str, str]:
    """Return the CSS class of the dots of a group, and the attribute with their colour. Groups that share a colour
    differ: every second has rings."""
    colour = series_look(number)[0]
    is_ring = number // len(COLOURS) % 2 == 1
    return ("ring", f' color="{colour}"') if is_ring else ("", f' fill="{colour}"')


def _with_legend(parts: Sequence[str], names: Sequence[str], label: str, *, lines: bool) -> Markup:
    """Return a chart with a legend of its series below, unless there is only one series."""
    legend, x, y = [], 12.0, HEIGHT + 8
    for number, name in enumerate(names if len(names) > 1 else []):
        shown = shorten(name, LEGEND_LETTERS)
        needed = 30 + DIGIT_WIDTH * display_width(shown)
        if x > 12 and x + needed > WIDTH:
            x, y = 12.0, y + LEGEND_LINE
        (colour, dashes), (css, look) = series_look(number), _dot_look(number)
        sample = (
            f'<path class="series" stroke="{colour}"{dashes} d="M{x:g} {y - 4:g}h18"/>'
            if lines
            else f'<circle class="dot {css}"{look} cx="{x + 9:g}" cy="{y - 4:g}" r="3"/>'
        )
        legend += [sample, horizontal_text(x + 22, y, shown)]
        x += needed
    return svg_picture(WIDTH, y + 6 if legend else HEIGHT, label, [*parts, *legend], fixed_size=True)


def _colour_bar(axis: Axis, left: float, top: float, bottom: float, unit: str) -> tuple[str, int]:
    """Return the colour bar of an axis, and the number of letters of its longest label."""
    steps = 40
    height = (bottom - top - 16) / steps
    parts = [horizontal_text(left, top + 8, unit)]
    for step in range(steps):
        red, green, blue = colours(np.array([[1 - (step + 0.5) / steps]]))[0, 0]
        parts.append(
            f'<rect x="{left:.2f}" y="{top + 16 + step * height:.2f}" width="12" height="{height + 0.3:.2f}" '
            f'fill="#{red:02x}{green:02x}{blue:02x}"/>'
        )
    labels = [(axis.label(tick), bottom - axis.fraction(tick) * (bottom - top - 16)) for tick in axis.ticks]
    parts += [horizontal_text(left + 16, y + 4, text) for text, y in labels]
    return "".join(parts), max((len(text) for text, _ in labels), default=1)
