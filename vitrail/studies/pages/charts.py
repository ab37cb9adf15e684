"""The figures of studies as SVG: arms with their intervals, and lines over an axis with bands."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vitrail.analysis.charts import COLOURS, series_look
from vitrail.charts.axes import Axis, log_ticks, make_axis, short_number
from vitrail.charts.svg import DIGIT_WIDTH, PlotArea, dot, horizontal_text, path_data, svg_picture, vertical_text
from vitrail.page import escape
from vitrail.studies.results import PointResult, Results
from vitrail.studies.statistics import Estimate

__all__ = ["arms_chart", "lines_chart"]

WIDTH, ROW, TOP, BOTTOM = 640.0, 24.0, 12.0, 40.0
HEIGHT, LEGEND_LINE = 320.0, 16.0


def arms_chart(results: Results, metric: str, name: str) -> str:
    """Return a row for each point: a small dot for each seed, a large dot for the mean, and a line for its 95 %
    interval. An interval that is wider than the range of all seeds is cut at the edge of the chart."""
    found = [(point, point.estimate(metric)) for point in results.points]
    values = [100 * value for point, _ in found for value in point.values(metric).values()]
    if not values:
        return ""
    margin = max(0.25, 0.25 * (max(values) - min(values)))
    x_axis = make_axis([max(0.0, min(values) - margin), min(100.0, max(values) + margin)])
    left = 16 + DIGIT_WIDTH * max(len(point.name) for point, _ in found)
    bottom = TOP + ROW * len(found)
    area = PlotArea(left, TOP, WIDTH - 16, bottom, x_axis, Axis(0.0, float(len(found)), 1.0, ()))
    parts = [area.grid(x_unit="%")]
    parts += [f'<path class="grid" d="M{area.x(tick):.2f} {TOP:g}V{bottom:g}"/>' for tick in x_axis.ticks]
    for number, (point, mean) in enumerate(found):
        place = len(found) - number - 0.5
        y = area.y(place)
        parts.append(horizontal_text(left - 8, y + 4, point.name, "end"))
        if mean is None:
            parts.append(horizontal_text(left + 8, y + 4, "diverged"))
            continue
        colour = COLOURS[results.arms.index(point.arm) % len(COLOURS)]
        low, high = (min(max(100 * end, x_axis.low), x_axis.high) for end in (mean.low, mean.high))
        if mean.count > 1:
            parts.append(f'<path class="series" stroke="{colour}" d="M{area.x(low):.2f} {y:.2f}H{area.x(high):.2f}"/>')
        for seed, value in point.values(metric).items():
            parts.append(_dot(area, (100 * value, place), colour, f"{point.name}, seed {seed}: {value:.2%}", 2.0))
        title = f"{point.name}: {_text(mean)}"
        parts.append(_dot(area, (100 * mean.mean, place), colour, title, 4.0))
    parts.append(horizontal_text((left + area.right) / 2, bottom + 34, name, "middle"))
    return svg_picture(WIDTH, bottom + BOTTOM, f"{name} of every arm, with 95 % intervals", parts, fixed_size=True)


def lines_chart(results: Results, metric: str, name: str, x_name: str) -> str:
    """Return a line for each arm over a logarithmic x axis, with a band of one standard deviation over seeds."""
    points = [(point, point.estimate(metric)) for point in results.points if point.x]
    known = [(point, mean) for point, mean in points if mean is not None]
    if not known:
        return ""
    ends = [100 * end for _, mean in known for end in _band(mean)]
    y_axis = make_axis(ends, bounds=(0.0, 100.0))
    logs = [math.log10(point.x or 1.0) for point, _ in known]
    low, high = min(logs), max(logs)
    if high - low < 0.1:
        low, high = low - 0.1, high + 0.1
    left = 40 + DIGIT_WIDTH * max(len(y_axis.label(tick)) for tick in y_axis.ticks)
    area = PlotArea(left, TOP, WIDTH - 16, HEIGHT - BOTTOM, Axis(low, high, 1.0, ()), y_axis)
    parts = [area.grid(y_unit="%")]
    for tick in log_ticks(low, high):
        x = area.x(math.log10(tick))
        parts.append(f'<path class="axis" d="M{x:.2f} {area.bottom:g}v4"/>')
        parts.append(horizontal_text(x, area.bottom + 17, short_number(tick), "middle"))
    parts.append(horizontal_text((left + area.right) / 2, HEIGHT - 6, x_name, "middle"))
    parts.append(vertical_text(12.0, (area.top + area.bottom) / 2, name))
    for number, arm in enumerate(results.arms):
        line = sorted(
            ((math.log10(point.x or 1.0), mean, point) for point, mean in known if point.arm == arm),
            key=lambda one: one[0],
        )
        parts.append(_line(area, line, number))
    return svg_picture(
        WIDTH, HEIGHT + LEGEND_LINE * len(results.arms), f"{name} over {x_name}",
        [*parts, *_legend(results.arms)], fixed_size=True,
    )  # fmt: skip


def _line(area: PlotArea, line: Sequence[tuple[float, Estimate, PointResult]], number: int) -> str:
    colour, dashes = series_look(number)
    bands = [(x, *_band(mean)) for x, mean, _ in line]
    upper = path_data(area, [(x, 100 * high) for x, _, high in bands])
    lower = path_data(area, [(x, 100 * low) for x, low, _ in reversed(bands)]).replace("M", "L")
    band = f'<path fill="{colour}" fill-opacity="0.15" d="{upper}{lower}Z"/>' if len(bands) > 1 else ""
    path = path_data(area, [(x, 100 * mean.mean) for x, mean, _ in line])
    dots = "".join(
        _dot(area, (x, 100 * mean.mean), colour, f"{point.name}: {_text(mean)}", 3.0) for x, mean, point in line
    )
    return f'{band}<path class="series" stroke="{colour}"{dashes} d="{path}"/>{dots}'


def _legend(arms: Sequence[str]) -> list[str]:
    parts = []
    for number, arm in enumerate(arms):
        y = HEIGHT + LEGEND_LINE * (number + 0.6)
        colour, dashes = series_look(number)
        parts.append(f'<path class="series" stroke="{colour}"{dashes} d="M14 {y - 4:g}h24"/>')
        parts.append(horizontal_text(44.0, y, arm))
    return parts


def _band(mean: Estimate) -> tuple[float, float]:
    """Return the mean minus and plus one standard deviation. With one seed, both are the mean."""
    deviation = 0.0 if math.isnan(mean.deviation) else mean.deviation
    return max(0.0, mean.mean - deviation), min(1.0, mean.mean + deviation)


def _text(mean: Estimate) -> str:
    if mean.count < 2:
        return f"{mean.mean:.2%} with one seed"
    return f"mean {mean.mean:.2%}, 95 % interval {mean.low:.2%} to {mean.high:.2%} ({mean.count} seeds)"


def _dot(area: PlotArea, point: tuple[float, float], colour: str, title: str, radius: float) -> str:
    return dot(area, point, radius, "", title).replace('class="dot "', f'class="dot" fill="{escape(colour)}"')
