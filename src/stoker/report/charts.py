"""The geometry of charts: bars with intervals, stacked bars, strips of single values, lines, a timeline.

A chart is a list of SVG shapes, which templates/macros.html writes down. Colours are the page's CSS classes, so one
drawing serves light and dark. Every mark has its figure as a tooltip.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import floor, log10
from statistics import quantiles

WIDE, HALF = 1000, 480  # width of a chart: one across the page, or two beside each other
RIGHT = 64  # room for the figures behind the bars
ROW, PAD = 22, 8
CHARACTER = 7.2  # about the width of one in the page's font
SERIES = 4  # colours of lines; beyond, they are dashed
TIMELINE_LANES = 12
DOTS = 150  # of a strip: enough to see the shape of thousands

Span = tuple[float, float, float, bool]  # of a request: start, first token and last token after it, failed


@dataclass(frozen=True)
class Bar:
    value: float
    low: float
    high: float
    series: int = 0
    text: str = ""


@dataclass(frozen=True)
class Shape:
    """An SVG element."""

    tag: str
    attributes: dict[str, str]
    text: str = ""


def shape(tag: str, css: str = "", inside: str = "", **attributes: str | float) -> Shape:
    shown = {"class": css} if css else {}
    for name, value in attributes.items():
        shown[name.replace("_", "-")] = value if isinstance(value, str) else f"{round(value, 1):g}"
    return Shape(tag, shown, inside)


def text(x: float, y: float, words: str, anchor: str = "start", css: str = "") -> Shape:
    return shape("text", css, words, x=x, y=y, text_anchor=anchor)


def line(d: str, css: str) -> Shape:
    return shape("path", css, d=d)


@dataclass
class Chart:
    width: int
    label: str = ""
    height: float = 0.0
    groups: list[tuple[str, tuple[Shape, ...]]] = field(default_factory=list)  # tooltip, shapes

    def add(self, *shapes: Shape, tip: str = "") -> None:
        self.groups.append((tip, shapes))

    def name(self, x: float, y: float, name: str, room: float, anchor: str = "start") -> None:
        """Cut where there is no room for it, and whole as a tooltip."""
        most = int(room / CHARACTER + 0.5)
        shown = name if len(name) <= most else f"{name[: most - 1]}…"
        self.add(text(x, y, shown, anchor), tip=name)


class Rows(Chart):
    """A row per name, and values from 0 to at least `most` along it."""

    def __init__(self, names: Iterable[str], most: float, unit: str, width: int) -> None:
        super().__init__(width)
        self.top, self.unit = nice(most), unit
        longest = max((len(name) for name in names), default=0)
        self.left = min(max(90.0, longest * CHARACTER + 16), 0.48 * width)  # names take at most half
        self.y: float = PAD

    def x(self, value: float) -> float:
        return self.left + self.span(value)

    def span(self, value: float) -> float:
        return (self.width - self.left - RIGHT) * value / self.top

    def row_name(self, y: float, name: str) -> None:
        self.name(self.left - 8, y + 4, name, self.left - 16, "end")

    def finish(self) -> Chart:
        """Draws the axis below everything else."""
        rows, self.groups, y = self.groups, [], self.y
        self.add(line(f"M{self.left:.1f} {PAD}V{y:g}H{self.width - RIGHT}", "axis"))
        for tick in ticks(self.top):
            x = self.x(tick)
            self.add(line(f"M{x:.1f} {PAD}V{y:g}", "grid"), text(x, y + 16, f"{tick:g}", "middle"))
        self.add(text(self.width - RIGHT + 18, y + 16, self.unit))
        self.groups += rows
        self.height = y + 26
        return self


def bars(rows: Sequence[tuple[str, Sequence[Bar]]], unit: str, digits: int = 1, width: int = WIDE) -> Chart:
    """A row per name, a bar per series, a whisker for its interval."""
    most = max((bar.high for _, found in rows for bar in found), default=1.0)
    chart = Rows((name for name, _ in rows), most, unit, width)
    for name, found in rows:
        chart.row_name(chart.y + ROW * len(found) / 2, name)
        for bar in found:
            low, high, middle = chart.x(bar.low), chart.x(bar.high), chart.y + ROW / 2
            said = f"{bar.value:.{digits}f} {unit} ({bar.low:.{digits}f}–{bar.high:.{digits}f})"
            chart.add(
                shape(
                    "rect", f"s{bar.series}", x=chart.left, y=chart.y + 3, width=max(chart.span(bar.value), 1),
                    height=ROW - 6, rx=2,
                ),
                line(
                    f"M{low:.1f} {middle:g}H{high:.1f}M{low:.1f} {middle - 4:g}v8M{high:.1f} {middle - 4:g}v8",
                    "whisker",
                ),
                text(max(high, chart.x(bar.value)) + 6, middle + 4, f"{bar.value:.{digits}f}"),
                tip=f"{name}: {said} {bar.text}".strip(),
            )  # fmt: skip
            chart.y += ROW
        chart.y += 6
    return chart.finish()


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str, width: int = WIDE) -> Chart:
    """A bar per name, made of parts that add up."""
    most = max((sum(value for _, value in parts) for _, parts in rows), default=1.0)
    chart = Rows((name for name, _ in rows), most, unit, width)
    for name, pieces in rows:
        before = 0.0
        chart.row_name(chart.y + ROW / 2, name)
        for place, (part, value) in enumerate(pieces):
            bar = shape("rect", f"p{place}", x=chart.x(before), y=chart.y + 3, width=chart.span(value), height=ROW - 6)
            chart.add(bar, tip=f"{name}, {part}: {value:.2f} {unit}")
            before += value
        chart.add(text(chart.x(before) + 6, chart.y + ROW / 2 + 4, f"{before:.2f}"))
        chart.y += ROW + 4
    return chart.finish()


def strips(rows: Sequence[tuple[str, Sequence[float], int]], unit: str, digits: int = 1, width: int = WIDE) -> Chart:
    """Every single value as a dot, the middle half as a band, the median as a line."""
    chart = Rows((name for name, _, _ in rows), max((v for _, vs, _ in rows for v in vs), default=1.0), unit, width)
    for name, values, series in rows:
        ordered, middle = sorted(values), chart.y + ROW / 2
        chart.row_name(middle, name)
        if ordered:
            low, half, high = quantiles(ordered, method="inclusive") if len(ordered) > 1 else ordered * 3
            chart.add(
                shape(
                    "rect", f"band s{series}", x=chart.x(low), y=chart.y + 4, width=max(chart.span(high - low), 1),
                    height=ROW - 8, rx=2,
                ),
                *(shape("circle", f"s{series}", cx=chart.x(value), cy=middle, r=2.5) for value in _thinned(ordered)),
                line(f"M{chart.x(half):.1f} {chart.y + 2:g}v{ROW - 4}", "median"),
                text(chart.x(ordered[-1]) + 8, middle + 4, f"{half:.{digits}f}"),
                tip=f"{name}: median {half:.{digits}f}, {ordered[0]:.{digits}f} to {ordered[-1]:.{digits}f} {unit}",
            )  # fmt: skip
        chart.y += ROW + 2
    return chart.finish()


def lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]], x_name: str, unit: str, width: int = WIDE
) -> Chart:
    """Curves over a few measured places, which are spaced evenly; each has its name at its end."""
    chart = Chart(width)
    places = sorted({x for _, points in series for x, _ in points})
    top = nice(max((y for _, points in series for _, y in points), default=1.0))
    longest = max((len(name) for name, _ in series), default=0)
    height, left, right = 200, 48, width - min(longest * CHARACTER + 16, 0.45 * width)
    step = (right - left - 8) / max(len(places) - 1, 1)
    bottom = PAD + ROW + height

    def at(x: float, y: float) -> tuple[float, float]:
        return left + places.index(x) * step, bottom - height * y / top

    chart.add(line(f"M{left} {PAD + ROW}V{bottom}H{right:.1f}", "axis"), text(left, PAD + 10, unit, "end"))
    for tick in ticks(top):
        y = bottom - height * tick / top
        chart.add(line(f"M{left} {y:.1f}H{right:.1f}", "grid"), text(left - 6, y + 4, f"{tick:g}", "end"))
    chart.add(*(text(at(x, 0)[0], bottom + 16, f"{x:g}", "middle") for x in places))
    chart.add(text((left + right) / 2, bottom + 34, x_name, "middle"))
    ends: list[tuple[float, float, str]] = []
    for number, (name, points) in enumerate(series):
        drawn = [at(x, y) for x, y in sorted(points)]
        colour, kind = number % SERIES, "" if number < SERIES else " dashed"
        chart.add(polyline(drawn, f"l{colour}{kind}"))
        for (x, y), (place, value) in zip(drawn, sorted(points), strict=True):
            chart.add(shape("circle", f"s{colour}", cx=x, cy=y, r=3.5), tip=f"{name} at {place:g}: {value:.1f} {unit}")
        ends += [(drawn[-1][1], drawn[-1][0], name)] if drawn else []
    lowest = 0.0
    for y, x, name in sorted(ends):  # from above, so that names keep the order of their curves
        lowest = max(y + 4, lowest + 13)
        chart.name(x + 8, lowest, name, width - right - 16)
    chart.height = max(bottom + 44, lowest + 8)
    return chart


def timeline(rows: Sequence[tuple[str, Sequence[Span]]], width: int = WIDE) -> Chart:
    """Lanes per name; each request from its start to its last token, lighter until the first, red where it failed."""
    end = max((begin + total for _, spans in rows for begin, _, total, _ in spans), default=1.0) or 1.0
    chart = Rows((name for name, _ in rows), end, "s", width)
    chart.top = end
    for name, spans in rows:
        lanes = _lanes(spans)
        for lane in lanes:
            for begin, first, total, failed in lane:
                x, span = chart.x(begin), max(chart.span(total), 0.8)
                word = "failed" if failed else f"first token after {first:.2f} s"
                chart.add(
                    shape("rect", "bad" if failed else "s0", x=x, y=chart.y, width=span, height=9),
                    shape("rect", "wait", x=x, y=chart.y, width=min(chart.span(first), span), height=9),
                    tip=f"{name}, at {begin:.1f} s: {word}, {total:.2f} s in all",
                )
            chart.y += 11
        chart.row_name(chart.y - 11 * len(lanes) / 2, name)
        chart.y += 6
    return chart.finish()


def polyline(points: Iterable[tuple[float, float]], css: str, tag: str = "polyline") -> Shape:
    return shape(tag, css, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))


def both(draw: Callable[[int], Chart], wide: int = WIDE) -> tuple[Chart, Chart]:
    """For a page and for a telephone, where the words of the wide one would be too small to read."""
    return draw(wide), draw(HALF)


def nice(value: float) -> float:
    """A round number not below the value."""
    if value <= 0:
        return 1.0
    scale = 10 ** floor(log10(value))
    return float(next(step * scale for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * scale >= value))


def ticks(top: float) -> list[float]:
    scale = 10 ** floor(log10(top))
    step = next(s * scale for s in (0.1, 0.2, 0.5, 1, 2) if top / (s * scale) <= 6)
    return [round(n * step, 10) for n in range(int(top / step + 1e-9) + 1)]


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Requests that overlap go on separate lanes; what is too much for the page shares the last one."""
    lanes: list[list[Span]] = []
    for span in sorted(spans):
        free = next((lane for lane in lanes if lane[-1][0] + lane[-1][2] <= span[0] + 1e-6), None)
        if free is None and len(lanes) >= TIMELINE_LANES:
            free = lanes[-1]
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes or [[]]


def _thinned(values: Sequence[float]) -> Sequence[float]:
    if len(values) <= DOTS:
        return values
    return [values[round(place * (len(values) - 1) / (DOTS - 1))] for place in range(DOTS)]
