"""Charts as inline SVG without a script: bars with intervals, stacked bars, strips of single values, lines, a timeline.

Colours are CSS variables of the page, so one drawing serves light and dark. Every mark has its figure as a tooltip.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

import numpy as np

WIDE, HALF = 1000, 480  # of a chart: one across the page, or two beside each other
RIGHT = 64  # of the figures behind its bars
ROW, PAD = 22, 8
CHARACTER = 7.2  # of the page's font, about
SERIES = 4  # colours of lines; beyond, they are dashed


@dataclass(frozen=True)
class Bar:
    value: float
    low: float
    high: float
    series: int = 0
    text: str = ""


@dataclass(frozen=True)
class Frame:
    """The area of a chart with a row per name and values from 0 to `top`."""

    width: int
    left: float  # where values begin; names stand before
    top: float

    @classmethod
    def around(cls, names: Iterable[str], top: float, width: int) -> "Frame":
        """Wide enough for the names, but never more than half."""
        longest = max((len(name) for name in names), default=0)
        return cls(width, min(max(90.0, longest * CHARACTER + 16), 0.48 * width), top)

    def x(self, value: float) -> float:
        return self.left + self.span(value)

    def span(self, value: float) -> float:
        return (self.width - self.left - RIGHT) * value / self.top

    def name(self, y: float, name: str) -> str:
        return _name(self.left - 8, y, name, self.left - 16, "end")

    def axis(self, y: float, unit: str) -> str:
        out = [f'<path class="axis" d="M{self.left:.1f} {PAD}V{y}H{self.width - RIGHT}"/>']
        for tick in _ticks(self.top):
            x = self.x(tick)
            out.append(f'<path class="grid" d="M{x:.1f} {PAD}V{y}"/>' + _text(x, y + 16, f"{tick:g}", "middle"))
        return "".join(out) + _text(self.width - RIGHT + 18, y + 16, unit)


def bars(rows: Sequence[tuple[str, Sequence[Bar]]], unit: str, digits: int = 1, width: int = WIDE) -> str:
    """A row per name, a bar per series, a whisker for its interval."""
    top = _nice(max((bar.high for _, found in rows for bar in found), default=1.0))
    frame = Frame.around((name for name, _ in rows), top, width)
    parts: list[str] = []
    y = PAD
    for name, found in rows:
        height = ROW * len(found)
        parts.append(frame.name(y + height / 2 + 4, name))
        for bar in found:
            low, high, middle = frame.x(bar.low), frame.x(bar.high), y + ROW / 2
            tip = (
                f"{name}: {bar.value:.{digits}f} {unit} ({bar.low:.{digits}f}–{bar.high:.{digits}f}) {bar.text}".strip()
            )
            parts.append(
                f'<g><title>{escape(tip)}</title><rect class="s{bar.series}" x="{frame.left:.1f}" y="{y + 3}" '
                f'width="{max(frame.span(bar.value), 1):.1f}" height="{ROW - 6}" rx="2"/>'
                f'<path class="whisker" d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8'
                f'M{high:.1f} {middle - 4}v8"/>'
                f"{_text(max(high, frame.x(bar.value)) + 6, middle + 4, f'{bar.value:.{digits}f}')}</g>"
            )
            y += ROW
        y += 6
    return _svg(width, y + 26, frame.axis(y, unit) + "".join(parts))


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str, width: int = WIDE) -> str:
    """A bar per name, made of parts that add up."""
    top = _nice(max((sum(value for _, value in parts) for _, parts in rows), default=1.0))
    frame = Frame.around((name for name, _ in rows), top, width)
    out: list[str] = []
    y = PAD
    for name, pieces in rows:
        x, total = frame.left, sum(value for _, value in pieces)
        out.append(frame.name(y + ROW / 2 + 4, name))
        for place, (part, value) in enumerate(pieces):
            span = frame.span(value)
            tip = escape(f"{name}, {part}: {value:.2f} {unit}")
            out.append(
                f'<rect class="p{place}" x="{x:.1f}" y="{y + 3}" width="{span:.1f}" height="{ROW - 6}">'
                f"<title>{tip}</title></rect>"
            )
            x += span
        out.append(_text(x + 6, y + ROW / 2 + 4, f"{total:.2f}"))
        y += ROW + 4
    return _svg(width, y + 26, frame.axis(y, unit) + "".join(out))


def strips(rows: Sequence[tuple[str, Sequence[float], int]], unit: str, digits: int = 1, width: int = WIDE) -> str:
    """Every single value as a dot, the middle half as a band, the median as a line."""
    top = _nice(max((value for _, values, _ in rows for value in values), default=1.0))
    frame = Frame.around((name for name, _, _ in rows), top, width)
    out: list[str] = []
    y = PAD
    for name, values, series in rows:
        ordered = sorted(values)
        middle = y + ROW / 2
        out.append(frame.name(middle + 4, name))
        if ordered:
            low, half, high = (float(found) for found in np.percentile(ordered, (25, 50, 75)))
            tip = escape(
                f"{name}: median {half:.{digits}f}, {ordered[0]:.{digits}f} to {ordered[-1]:.{digits}f} {unit}"
            )
            span = max(frame.span(high - low), 1)
            out.append(
                f'<g><title>{tip}</title><rect class="band s{series}" x="{frame.x(low):.1f}" y="{y + 4}" '
                f'width="{span:.1f}" height="{ROW - 8}" rx="2"/>'
                + "".join(
                    f'<circle class="s{series}" cx="{frame.x(v):.1f}" cy="{middle}" r="2.5"/>' for v in _thin(ordered)
                )
                + f'<path class="median" d="M{frame.x(half):.1f} {y + 2}v{ROW - 4}"/>'
                + _text(frame.x(ordered[-1]) + 8, middle + 4, f"{half:.{digits}f}")
                + "</g>"
            )
        y += ROW + 2
    return _svg(width, y + 26, frame.axis(y, unit) + "".join(out))


def lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]], x_name: str, unit: str, width: int = WIDE
) -> str:
    """Curves over a few measured places, which are spaced evenly; each has its name at its end."""
    places = sorted({x for _, points in series for x, _ in points})
    top = _nice(max((y for _, points in series for _, y in points), default=1.0))
    longest = max((len(name) for name, _ in series), default=0)
    height, left, right = 200, 48, width - min(longest * CHARACTER + 16, 0.45 * width)
    step = (right - left - 8) / max(len(places) - 1, 1)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + places.index(x) * step, PAD + ROW + height * (1 - y / top)

    bottom = PAD + ROW + height
    out = [f'<path class="axis" d="M{left} {PAD + ROW}V{bottom}H{right:.1f}"/>', _text(left, PAD + 10, unit, "end")]
    for tick in _ticks(top):
        y = PAD + ROW + height * (1 - tick / top)
        out.append(f'<path class="grid" d="M{left} {y:.1f}H{right:.1f}"/>' + _text(left - 6, y + 4, f"{tick:g}", "end"))
    out += [_text(at(x, 0)[0], bottom + 16, f"{x:g}", "middle") for x in places]
    out.append(_text((left + right) / 2, bottom + 34, x_name, "middle"))
    ends: list[tuple[float, float, str]] = []
    for number, (name, points) in enumerate(series):
        drawn = [at(x, y) for x, y in sorted(points)]
        colour, kind = number % SERIES, "" if number < SERIES else " dashed"
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        out.append(f'<polyline class="l{colour}{kind}" points="{joined}"/>')
        for (x, y), (place, value) in zip(drawn, sorted(points), strict=True):
            tip = escape(f"{name} at {place:g}: {value:.1f} {unit}")
            out.append(f'<circle class="s{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{tip}</title></circle>')
        ends += [(drawn[-1][1], drawn[-1][0], name)] if drawn else []
    lowest = 0.0
    for y, x, name in sorted(ends):  # from above, so that names keep the order of their curves
        lowest = max(y + 4, lowest + 13)
        out.append(_name(x + 8, lowest, name, width - right - 16))
    return _svg(width, max(bottom + 44, lowest + 8), "".join(out))


def timeline(rows: Sequence[tuple[str, Sequence[tuple[float, float, float, bool]]]], width: int = WIDE) -> str:
    """A lane per name; each request from its start to its last token, lighter until the first, red where it failed."""
    end = max((begin + total for _, spans in rows for begin, _, total, _ in spans), default=1.0) or 1.0
    frame = Frame.around((name for name, _ in rows), end, width)
    out: list[str] = []
    y = PAD
    for name, spans in rows:
        lanes = _lanes(spans)
        for lane in lanes:
            for begin, first, total, failed in lane:
                x, span = frame.x(begin), max(frame.span(total), 0.8)
                waiting = frame.span(first)
                word = "failed" if failed else f"first token after {first:.2f} s"
                tip = escape(f"{name}, at {begin:.1f} s: {word}, {total:.2f} s in all")
                kind = "bad" if failed else "s0"
                out.append(
                    f'<g><title>{tip}</title><rect class="{kind}" x="{x:.1f}" y="{y}" width="{span:.1f}" height="9"/>'
                    f'<rect class="wait" x="{x:.1f}" y="{y}" width="{min(waiting, span):.1f}" height="9"/></g>'
                )
            y += 11
        out.append(frame.name(y - 11 * len(lanes) / 2 + 4, name))
        y += 6
    return _svg(width, y + 26, frame.axis(y, "s") + "".join(out))


def _lanes(
    spans: Sequence[tuple[float, float, float, bool]], most: int = 12
) -> list[list[tuple[float, float, float, bool]]]:
    """Requests that overlap go on separate lanes; what is too much for the page shares the last one."""
    lanes: list[list[tuple[float, float, float, bool]]] = []
    for span in sorted(spans):
        free = next((lane for lane in lanes if lane[-1][0] + lane[-1][2] <= span[0] + 1e-6), None)
        if free is None and len(lanes) >= most:
            free = lanes[-1]
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes or [[]]


def _thin(values: Sequence[float], most: int = 150) -> Sequence[float]:
    """Enough dots to see the shape of thousands."""
    if len(values) <= most:
        return values
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def _svg(width: int, height: float, inside: str) -> str:
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img">{inside}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _name(x: float, y: float, name: str, room: float, anchor: str = "start") -> str:
    """Cut where there is no room for it, and whole as a tooltip."""
    most = int(room / CHARACTER + 0.5)
    shown = name if len(name) <= most else f"{name[: most - 1]}…"
    return f"<g><title>{escape(name)}</title>{_text(x, y, shown, anchor)}</g>"


def _nice(value: float) -> float:
    """A round number not below the value."""
    if value <= 0:
        return 1.0
    scale = 10 ** floor(log10(value))
    return float(next(step * scale for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * scale >= value))


def _ticks(top: float) -> list[float]:
    scale = 10 ** floor(log10(top))
    step = next(s * scale for s in (0.1, 0.2, 0.5, 1, 2) if top / (s * scale) <= 6)
    return [round(n * step, 10) for n in range(int(top / step + 1e-9) + 1)]
