"""Charts as inline SVG for a page that needs no other file: lines over steps, a heat map, a reliability diagram."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vitrail.evaluation.predictions.calibration import CalibrationBin
from vitrail.page import escape, printable

__all__ = [
    "STYLE",
    "Axis",
    "Mark",
    "Point",
    "Series",
    "axis",
    "heat_map",
    "key",
    "line_chart",
    "reliability_diagram",
    "shorten",
]

Point = tuple[float, float]
"""x and y of a line, in the units of what is drawn."""

STYLE = """
:root { --heat: #0e3158; --on-heat: #fff; }
@media (prefers-color-scheme: dark) { :root { --heat: #7fadd8; --on-heat: #000; } }
.charts { display: grid; align-items: end; gap: 1rem 1.2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 18.5rem), 1fr)); }
.charts figure { width: auto; max-width: 26rem; }
.charts figcaption { color: CanvasText; font-size: .9rem; line-height: 1.4; }
.key { margin-right: .9rem; white-space: nowrap; }
.key::before { content: ""; display: inline-block; width: 1.2rem; margin: 0 .35rem .25rem 0; vertical-align: middle;
  border-top: 2px solid var(--note); }
.key.two::before { border-top: 2px dashed var(--warning); }
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
.faint { opacity: .45; }
svg .strong { fill: CanvasText; font-weight: 600; }
.heat { fill: var(--heat); }
svg .count { fill: CanvasText; } svg .count.on { fill: var(--on-heat); }
"""
"""Goes behind that of `vitrail.page`, whose colours it uses. The colour of heat is so chosen that numbers on its shades
have a contrast of 4.5 to 1, in light and in dark: up to `FLIP` in the colour of text, from there on in the other."""

FLIP = 0.66
"""Opacity of a shade."""

WIDTH, HEIGHT = 320.0, 200.0
"""Of a line chart, in pixels as it is drawn on a telephone: three stand side by side on a desk."""

LETTER, STRONG = 7.0, 7.8
"""Width in pixels of a digit of 11 pixels, plain and bold, in the widest fonts that systems have for pages (DejaVu)."""

MOST_DOTS = 40
"""Points of a line that are also drawn as dots. More are a line alone."""

NAMES = ("one", "two")
"""Style classes of the first and the second series."""


@dataclass(frozen=True)
class Series:
    """A line: x and y of each point, in the order of x. A y that is not finite leaves a gap."""

    name: str
    points: Sequence[Point]

    @property
    def finite(self) -> list[Point]:
        return [point for point in self.points if all(map(math.isfinite, point))]


@dataclass(frozen=True)
class Mark:
    """A point of a line that has something to say."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Axis:
    """The values between two edges of a chart, and the round ones among them that are written at it."""

    low: float
    high: float
    step: float
    """From tick to tick."""
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Where a value lies between the edges, 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def label(self, tick: float, unit: str = "") -> str:
        """With as many digits as tell one tick from the next."""
        most = max(abs(self.low), abs(self.high))
        if 1e-4 <= most < 1e7:
            return f"{tick:,.{max(_digits(self.step), 0)}f}{unit}"
        return f"{tick:.{math.floor(math.log10(most)) + _digits(self.step) + 1}g}{unit}"


def axis(
    values: Iterable[float],
    *,
    round_edges: bool = True,
    within: tuple[float, float] = (-math.inf, math.inf),
    whole: bool = False,
    steps: int = 5,
) -> Axis:
    """An axis for finite values, with about `steps` steps of 1, 2 or 5 times a power of ten.

    Its edges are ticks, unless `round_edges` is False: then they are the least and the greatest value. They stay
    `within` bounds, as the values do. `whole` keeps ticks to whole numbers. One value alone has room on either side.
    """
    found = list(values)
    low, high = min(found), max(found)
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        room = max(0.1 * abs(high), 1.0 if whole or not high else 0.0)
        low, high = max(low - room, within[0]), min(high + room, within[1])
    step = _round_step((high - low) / steps)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(number * step, _digits(step)) for number in range(first, last + 1))
    if round_edges:
        low, high = max(ticks[0], within[0]), min(ticks[-1], within[1])
    return Axis(low, high, step, tuple(tick for tick in ticks if low <= tick <= high))


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    unit: str = "",
    zero: bool = False,
    within: tuple[float, float] = (-math.inf, math.inf),
    mark: Mark | None = None,
) -> str:
    """One or two lines over steps, counted from 0. Nothing where there is no finite point.

    `label` says in a sentence what there is to see. With `zero` the axis begins at 0, as for amounts. `within` bounds
    what values there can be.
    """
    points = [point for one in series for point in one.finite]
    if not points:
        return ""
    across = axis([0.0, *(x for x, _ in points)], round_edges=False, within=(0.0, math.inf), whole=True)
    up = axis([*(y for _, y in points), *([0.0] if zero else [])], within=within)
    left = 12 + LETTER * max(len(up.label(tick, unit)) for tick in up.ticks)
    box = _Box(left, 22.0, WIDTH - 26, HEIGHT - 36, across, up)
    parts = [box.frame(unit), _text(box.right, HEIGHT - 6, "step", "end")]
    for one, name in zip(series, NAMES, strict=False):
        parts.append(f'<path class="line {name}" d="{_path(box, one.points)}"/>')
        parts += [
            _dot(box, point, 2.5, name, f"{one.name}, step {point[0]:,.0f}: {point[1]:,.4g}{unit}")
            for point in (one.finite if len(one.finite) <= MOST_DOTS else _alone(one.points))
        ]
    if mark is not None:
        x = box.x(mark.x)
        parts.append(f'<path class="mark" d="M{x:.2f} {box.top:g}V{box.bottom:g}"/>')
        parts.append(_dot(box, (mark.x, mark.y), 4.0, "one", mark.text))
        half = STRONG * len(mark.text) / 2
        parts.append(_text(min(max(x, half), WIDTH - half), 14.0, mark.text, "middle", "strong"))
    return _svg(WIDTH, HEIGHT, label, parts)


def reliability_diagram(before: Sequence[CalibrationBin], after: Sequence[CalibrationBin] | None, *, label: str) -> str:
    """Over what was claimed, what came true: a dot for each bin with images, whose area is their share.

    `before` is drawn like a second line, and `after` like a first, which is the one to look at. Guo et al.
    (1706.04599, figure 4).
    """
    width, height = 320.0, 310.0
    hundred = axis([0.0, 100.0])
    box = _Box(52.0, 12.0, 302.0, 262.0, hundred, hundred)
    middle = (box.top + box.bottom) / 2
    parts = [
        box.frame("%", "%"),
        _text((box.left + box.right) / 2, height - 8, "confidence", "middle"),
        f'<text x="10" y="{middle:g}" text-anchor="middle" transform="rotate(-90 10 {middle:g})">accuracy</text>',
        f'<path class="ideal" d="M{box.left:g} {box.bottom:g}L{box.right:g} {box.top:g}"/>',
    ]
    for name, bins in [("one", before)] if after is None else [("two", before), ("one", after)]:
        total = sum(one.images for one in bins)
        filled = [
            (100 * one.confidence, 100 * one.accuracy, one.images)
            for one in bins
            if one.confidence is not None and one.accuracy is not None
        ]
        parts.append(f'<path class="line faint {name}" d="{_path(box, [(x, y) for x, y, _ in filled])}"/>')
        parts += [
            _dot(
                box,
                (x, y),
                max(9 * math.sqrt(count / total), 1.5),
                name,
                f"claimed {x:.1f}%, right {y:.1f}% of {count:,}",
            )
            for x, y, count in filled
        ]
    return _svg(width, height, label, parts)


def heat_map(cells: Iterable[tuple[int, int, int]], names: Sequence[str], *, label: str) -> str:
    """A confusion matrix: rows are true classes, columns predicted ones, and a colour is a share of its row.

    `cells` are row, column and count, where the count is not 0. Its size is in pixels: it scrolls where it is too wide.
    """
    found = list(cells)
    totals = [0] * len(names)
    for row, _, count in found:
        totals[row] += count
    short = [shorten(name, 15) for name in names]
    longest = LETTER * max(map(_units, short))
    side = max(20, min(40, 480 // len(names)))
    left, top = max(longest, STRONG * 11) + 12, max(0.75 * longest + 20, 36.0)  # the corner has words of its own
    extent = len(names) * side
    width, height = left + extent + max(0.75 * longest - side / 2 + 6, 2.0), top + extent + 2
    lines = "".join(
        f"M{left:g} {top + at * side:g}h{extent}M{left + at * side:g} {top:g}v{extent}" for at in range(len(names) + 1)
    )
    parts = [
        _text(left - 8, top - 22, "predicted →", "end", "strong"),
        _text(left - 8, top - 7, "true ↓", "end", "strong"),
        f'<path class="grid" d="{lines}"/>',
    ]
    for number, (name, shown) in enumerate(zip(names, short, strict=True)):
        middle = (number + 0.5) * side
        full = f"<title>{escape(name)}</title>{escape(shown)}"
        x, y = left + middle + 3, top - 6
        parts.append(f'<text x="{left - 8:g}" y="{top + middle + 4:g}" text-anchor="end">{full}</text>')
        parts.append(f'<text x="{x:g}" y="{y:g}" transform="rotate(-45 {x:g} {y:g})">{full}</text>')
    for row, column, count in found:
        share = count / totals[row]
        strength = 0.05 + 0.95 * share  # so that one image among very many is seen
        text = f"{count:,}" if count < 10_000 else f"{count / 1000:.0f}k"
        letters = min(11.0, 0.9 * side / (0.6 * len(text)))
        x, y = left + column * side, top + row * side
        about = f"{shorten(names[row], 60)} → {shorten(names[column], 60)}: {count:,} of {totals[row]:,} ({share:.1%})"
        parts.append(
            f'<g><title>{escape(about)}</title><rect class="heat" x="{x + 0.5:g}" y="{y + 0.5:g}" width="{side - 1}" '
            f'height="{side - 1}" fill-opacity="{strength:.3f}"/><text class="count{" on" * (strength > FLIP)}" '
            f'x="{x + side / 2:g}" y="{y + side / 2 + 0.36 * letters:.2f}" text-anchor="middle" '
            f'font-size="{letters:.3g}">{text}</text></g>'
        )
    return _svg(width, height, label, parts, size=True)


def key(names: Sequence[str]) -> str:
    """What tells the lines of a chart apart, for its caption; nothing where there is one line."""
    if len(names) < 2:
        return ""
    shown = (f'<span class="key {css}">{escape(name)}</span>' for name, css in zip(names, NAMES, strict=False))
    return "<br>" + " ".join(shown)


def shorten(name: str, most: int) -> str:
    """A name as text of at most so many letters: of longer ones both ends. East Asian letters count as two."""
    name = printable(name)
    if _units(name) <= most:
        return name
    begin, end = name[:most], name[-most:]
    while _units(begin) + _units(end) > most - 1:
        if _units(begin) > _units(end):
            begin = begin[:-1]
        else:
            end = end[1:]
    return f"{begin.rstrip()}…{end.lstrip()}"


@dataclass(frozen=True)
class _Box:
    """The part of a chart between its axes, in pixels, and what it shows."""

    left: float
    top: float
    right: float
    bottom: float
    across: Axis
    up: Axis

    def x(self, value: float) -> float:
        return self.left + self.across.share(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - self.up.share(value) * (self.bottom - self.top)

    def frame(self, unit: str, unit_across: str = "") -> str:
        """Grid lines, ticks and what is written at them."""
        grid = "".join(f"M{self.left:.2f} {self.y(tick):.2f}H{self.right:.2f}" for tick in self.up.ticks)
        marks = "".join(f"M{self.x(tick):.2f} {self.bottom:g}v4" for tick in self.across.ticks)
        return "".join(
            [
                f'<path class="grid" d="{grid}"/>',
                f'<path class="axis" d="M{self.left:.2f} {self.bottom:g}H{self.right:.2f}{marks}"/>',
                *(_text(self.left - 6, self.y(tick) + 4, self.up.label(tick, unit), "end") for tick in self.up.ticks),
                *(
                    _text(self.x(tick), self.bottom + 16, self.across.label(tick, unit_across), "middle")
                    for tick in self.across.ticks
                ),
            ]
        )


def _path(box: _Box, points: Sequence[Point]) -> str:
    """Straight lines from point to point, with a gap where a value is not finite."""
    words, begin = [], True
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            begin = True
            continue
        words.append(f"{'M' if begin else 'L'}{box.x(x):.2f} {box.y(y):.2f}")
        begin = False
    return "".join(words)


def _alone(points: Sequence[Point]) -> list[Point]:
    """Points between two gaps, where a line does not show them."""
    there = [False, *(math.isfinite(x) and math.isfinite(y) for x, y in points), False]
    return [point for at, point in enumerate(points) if there[at : at + 3] == [False, True, False]]


def _dot(box: _Box, point: Point, radius: float, css: str, about: str) -> str:
    return (
        f'<circle class="dot {css}" cx="{box.x(point[0]):.2f}" cy="{box.y(point[1]):.2f}" r="{radius:.2f}">'
        f"<title>{escape(about)}</title></circle>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    look = f' class="{css}"' if css else ""
    return f'<text{look} x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: float, height: float, label: str, parts: Sequence[str], *, size: bool = False) -> str:
    fixed = f' width="{width:.0f}" height="{height:.0f}"' if size else ""
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}"{fixed} role="img" aria-label="{escape(label)}">\n{body}\n</svg>'
    )


def _units(name: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in name)


def _digits(step: float) -> int:
    """Digits behind the point of 1, 2 or 5 times a power of ten; of 10 and more, minus the zeros before it."""
    return -math.floor(math.log10(step) + 1e-9)


def _round_step(least: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below this."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
