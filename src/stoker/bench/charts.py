"""Charts as inline SVG without a script: bars with intervals, stacked bars, strips of single values, lines, a timeline.

Colours are CSS variables of the page, so one drawing serves light and dark. Every mark has its figure as a tooltip.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

WIDE, HALF = 1000, 480  # of a chart: one across the page, or two beside each other
LABEL, RIGHT = 150, 64  # of its row labels, of the figures behind its bars
ROW, PAD = 22, 8


@dataclass(frozen=True)
class Bar:
    value: float
    low: float
    high: float
    series: int = 0
    text: str = ""


def bars(rows: Sequence[tuple[str, Sequence[Bar]]], unit: str, digits: int = 1, width: int = WIDE) -> str:
    """A row per name, a bar per series, a whisker for its interval."""
    top = _nice(max((bar.high for _, found in rows for bar in found), default=1.0))
    parts: list[str] = []
    y = PAD
    for name, found in rows:
        height = ROW * len(found)
        parts.append(_text(LABEL - 8, y + height / 2 + 4, name, "end"))
        for bar in found:
            length = _x(bar.value, top, width) - LABEL
            low, high, middle = _x(bar.low, top, width), _x(bar.high, top, width), y + ROW / 2
            tip = (
                f"{name}: {bar.value:.{digits}f} {unit} ({bar.low:.{digits}f}–{bar.high:.{digits}f}) {bar.text}".strip()
            )
            parts.append(
                f'<g><title>{escape(tip)}</title><rect class="s{bar.series}" x="{LABEL}" y="{y + 3}" '
                f'width="{max(length, 1):.1f}" height="{ROW - 6}" rx="2"/>'
                f'<path class="whisker" d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8'
                f'M{high:.1f} {middle - 4}v8"/>'
                f"{_text(max(high, LABEL + length) + 6, middle + 4, f'{bar.value:.{digits}f}')}</g>"
            )
            y += ROW
        y += 6
    return _svg(width, y + 26, _axis(top, y, unit, width) + "".join(parts))


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str, width: int = WIDE) -> str:
    """A bar per name, made of parts that add up."""
    top = _nice(max((sum(value for _, value in parts) for _, parts in rows), default=1.0))
    out: list[str] = []
    y = PAD
    for name, pieces in rows:
        x, total = float(LABEL), sum(value for _, value in pieces)
        out.append(_text(LABEL - 8, y + ROW / 2 + 4, name, "end"))
        for place, (part, value) in enumerate(pieces):
            span = _x(value, top, width) - LABEL
            tip = escape(f"{name}, {part}: {value:.2f} {unit}")
            out.append(
                f'<rect class="p{place}" x="{x:.1f}" y="{y + 3}" width="{span:.1f}" height="{ROW - 6}">'
                f"<title>{tip}</title></rect>"
            )
            x += span
        out.append(_text(x + 6, y + ROW / 2 + 4, f"{total:.2f}"))
        y += ROW + 4
    return _svg(width, y + 26, _axis(top, y, unit, width) + "".join(out))


def strips(rows: Sequence[tuple[str, Sequence[float], int]], unit: str, digits: int = 1, width: int = WIDE) -> str:
    """Every single value as a dot, the middle half as a band, the median as a line."""
    top = _nice(max((value for _, values, _ in rows for value in values), default=1.0))
    out: list[str] = []
    y = PAD
    for name, values, series in rows:
        ordered = sorted(values)
        middle = y + ROW / 2
        out.append(_text(LABEL - 8, middle + 4, name, "end"))
        if ordered:
            low, half, high = (_at(ordered, share) for share in (0.25, 0.5, 0.75))
            tip = escape(
                f"{name}: median {half:.{digits}f}, {ordered[0]:.{digits}f} to {ordered[-1]:.{digits}f} {unit}"
            )
            span = max(_x(high, top, width) - _x(low, top, width), 1)
            out.append(
                f'<g><title>{tip}</title><rect class="band s{series}" x="{_x(low, top, width):.1f}" y="{y + 4}" '
                f'width="{span:.1f}" height="{ROW - 8}" rx="2"/>'
                + "".join(
                    f'<circle class="s{series}" cx="{_x(v, top, width):.1f}" cy="{middle}" r="2.5"/>'
                    for v in _thin(ordered)
                )
                + f'<path class="median" d="M{_x(half, top, width):.1f} {y + 2}v{ROW - 4}"/>'
                + _text(max(_x(ordered[-1], top, width), LABEL) + 8, middle + 4, f"{half:.{digits}f}")
                + "</g>"
            )
        y += ROW + 2
    return _svg(width, y + 26, _axis(top, y, unit, width) + "".join(out))


def lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]], int, bool]], x_name: str, unit: str, width: int = WIDE
) -> str:
    """Curves over a few measured places, which are spaced evenly. The last flag makes a curve dashed."""
    places = sorted({x for _, points, _, _ in series for x, _ in points})
    top = _nice(max((y for _, points, _, _ in series for _, y in points), default=1.0))
    height, left = 200, 60
    step = (width - left - 150) / max(len(places) - 1, 1)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + places.index(x) * step, PAD + height * (1 - y / top)

    out = [f'<path class="axis" d="M{left} {PAD}V{PAD + height}H{width - 140}"/>']
    for tick in _ticks(top):
        y = at(places[0], tick)[1] if places else PAD
        out.append(
            f'<path class="grid" d="M{left} {y:.1f}H{width - 140}"/>' + _text(left - 6, y + 4, f"{tick:g}", "end")
        )
    out += [_text(at(x, 0)[0], PAD + height + 16, f"{x:g}", "middle") for x in places]
    out.append(_text(left + (width - 140 - left) / 2, PAD + height + 34, x_name, "middle"))
    out.append(_text(4, PAD + 10, unit))
    ends: list[float] = []
    for name, points, colour, dashed in series:
        drawn = [at(x, y) for x, y in sorted(points)]
        kind = f"l{colour}" + (" dashed" if dashed else "")
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        out.append(f'<polyline class="{kind}" points="{joined}"/>')
        for (x, y), (place, value) in zip(drawn, sorted(points), strict=True):
            tip = escape(f"{name} at {place:g}: {value:.1f} {unit}")
            out.append(f'<circle class="s{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{tip}</title></circle>')
        if drawn:
            y = drawn[-1][1] + 4
            while any(abs(y - other) < 13 for other in ends):
                y += 13
            ends.append(y)
            out.append(_text(drawn[-1][0] + 8, y, name))
    return _svg(width, PAD + height + 44, "".join(out))


def timeline(rows: Sequence[tuple[str, Sequence[tuple[float, float, float, bool]]]], width: int = WIDE) -> str:
    """A lane per name; each request from its start to its last token, lighter until the first, red where it failed."""
    end = max((begin + total for _, spans in rows for begin, _, total, _ in spans), default=1.0) or 1.0
    out: list[str] = []
    y = PAD
    for name, spans in rows:
        lanes = _lanes(spans)
        for lane in lanes:
            for begin, first, total, failed in lane:
                x, span = _x(begin, end, width), max((width - LABEL - RIGHT) * total / end, 0.8)
                waiting = (width - LABEL - RIGHT) * first / end
                word = "failed" if failed else f"first token after {first:.2f} s"
                tip = escape(f"{name}, at {begin:.1f} s: {word}, {total:.2f} s in all")
                kind = "bad" if failed else "s0"
                out.append(
                    f'<g><title>{tip}</title><rect class="{kind}" x="{x:.1f}" y="{y}" width="{span:.1f}" height="9"/>'
                    f'<rect class="wait" x="{x:.1f}" y="{y}" width="{min(waiting, span):.1f}" height="9"/></g>'
                )
            y += 11
        out.append(_text(LABEL - 8, y - 11 * len(lanes) / 2 + 4, name, "end"))
        y += 6
    return _svg(width, y + 26, _axis(end, y, "s", width) + "".join(out))


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


def _axis(top: float, y: float, unit: str, width: int) -> str:
    out = [f'<path class="axis" d="M{LABEL} {PAD}V{y}H{width - RIGHT}"/>']
    for tick in _ticks(top):
        x = _x(tick, top, width)
        out.append(f'<path class="grid" d="M{x:.1f} {PAD}V{y}"/>' + _text(x, y + 16, f"{tick:g}", "middle"))
    return "".join(out) + _text(width - RIGHT + 18, y + 16, unit)


def _x(value: float, top: float, width: int) -> float:
    return LABEL + (width - LABEL - RIGHT) * value / top


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


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


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]
