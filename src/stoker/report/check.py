"""The HTML report of a check: its figures, charts and examples. The markup is templates/check.html."""

from functools import partial

from stoker.check import statistics
from stoker.check.record import Document, Row
from stoker.report import changes, charts, check_text
from stoker.report.charts import Bar, Chart
from stoker.report.page import render


def html_check(found: Document) -> str:
    servers, two = found.environment.servers, len(found.environment.servers) == 2
    passed = [row for row in found.suites if row.measure == "passed"]
    compared = [row for row in found.suites if row.measure != "parts" and row.difference is not None]
    return render(
        "check.html",
        found=found,
        text=check_text,
        two=two,
        sentence=sentence(found),
        against=" against ".join(f"{server.model} ({server.engine})" for server in servers),
        when=found.environment.started.replace("T", " ").partition("+")[0],
        legend=[(f"s{place}", f"{s.name}: {s.model}, {s.engine}") for place, s in enumerate(servers if two else ())],
        cards=_cards(found, passed, two),
        differences=charts.both(partial(differences, compared)) if compared else None,
        scores=charts.both(partial(_scores, found, passed)) if passed else None,
        heads=check_text.HEADS if two else check_text.ALONE,
        close=[(check_text.close_cells(near), near.verdict) for near in found.closeness],
        rows=[(check_text.cells(row, two), row.verdict) for row in found.suites],
        groups=changes.groups(found.answers, two),
        environment=_environment(found),
    )


def sentence(found: Document) -> str:
    """The verdict as somebody would say it; the figures are in `statement`."""
    rows = [row for row in found.suites if row.measure == "passed"]
    asked = sum(row.items for row in rows)
    listed = changed(found)
    missed = [each.suite for each in found.promises if each.verdict == "not kept"]
    if found.verdict == "nothing measured":
        text = "Nothing was measured: no question was answered."
    elif missed and found.verdict != "worse":
        text = (
            f"{found.environment.servers[0].model} does not reach what {found.recipe} promises on {', '.join(missed)}."
        )
    elif found.verdict == "scored":
        right = sum(round(row.score * row.items) for row in rows)
        text = f"{found.environment.servers[0].model} answered {right} of {asked} questions rightly."
    elif found.verdict in ("worse", "better"):
        text = f"A answers {found.verdict} than B {listed}." if listed else "A predicts otherwise than B does."
    elif found.verdict == "undecided":
        text = "This check cannot say whether A answers worse than B."
    elif rows:
        text = f"A answers as well as B, as far as {asked:,} questions can tell."
    else:
        text = "A predicts as B does, as far as this check can tell."
    return text if found.complete else f"So far: {text}"


def changed(found: Document) -> str:
    """By how much, over all and by suite; nothing if only predictions moved."""
    rows = [row for row in found.suites if row.verdict == found.verdict]
    rows = [row for row in rows if row.measure != "parts"] or rows
    parts = [f"{_points(row)} {_where(row)}" for row in sorted(rows, key=lambda row: row.measure != "pooled")]
    listed = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1] if parts else ""
    return f"by {listed}" if listed else ""


def _where(row: Row) -> str:
    return {"pooled": "over all", "parts": f"in parts of {row.name}"}.get(row.measure, f"on {row.name}")


def _points(row: Row) -> str:
    points = abs(row.difference or 0) * 100
    return f"{points:.0f} points" if points >= 10 else f"{points:.1f} points"


def _cards(found: Document, passed: list[Row], two: bool) -> list[tuple[str, str, str]]:
    asked = sum(row.items for row in passed)
    cards = []
    if asked or not found.closeness:
        cards.append(("questions", f"{asked:,}", "answered by both" if two else "answered"))
    if asked:
        right = sum(row.score * row.items for row in passed) / asked
        cards.append(("A right" if two else "right", f"{right:.0%}", "of all questions"))
    if two and asked:
        other = sum((row.other or 0) * row.items for row in passed) / asked
        cards.append(("B right", f"{other:.0%}", "of all questions"))
        same, both = changes.same_words(found.answers)
        cards.append(("same words", f"{same / both:.0%}" if both else "–", "of both answers"))
    near = next((row for row in found.closeness if row.kind == "all"), None)
    if near is not None:
        cards.append(("predictions apart", f"{near.kl:.3f}", f"nats a token; limit {found.max_kl:g}"))
    cards.append(("failed", f"{found.failed}", "requests"))
    return cards


def _scores(found: Document, passed: list[Row], width: int) -> Chart:
    rows = []
    for row in passed:
        bars = [Bar(row.score * 100, row.low * 100, row.high * 100, 0)]
        if row.other is not None:
            low, high = statistics.wilson(round(row.other * row.items), row.items)
            bars.append(Bar(row.other * 100, low * 100, high * 100, 1))
        rows.append((row.name, bars))
    return charts.bars(rows, "%", 0, width)


def differences(rows: list[Row], width: int) -> Chart:
    """A minus B by suite, with the interval; left of the line A lost."""
    most = charts.nice(max(max(-(row.difference_low or 0), row.difference_high or 0) for row in rows) * 100)
    chart = Chart(width, label="Difference of A and B by suite")
    left = min(max(90.0, max(len(row.name) for row in rows) * charts.CHARACTER + 16), 0.48 * width)
    half = (width - left - charts.RIGHT) / 2
    bottom = charts.PAD + charts.ROW * len(rows)

    def x(points: float) -> float:
        return left + half * (1 + points / most)

    for tick in charts.ticks(most)[:: 1 if width > charts.HALF else 2]:
        for value in {tick, -tick}:
            chart.add(
                charts.line(f"M{x(value):.1f} {charts.PAD}V{bottom}", "grid" if value else "axis"),
                charts.text(x(value), bottom + 16, f"{value:+g}" if value else "0", "middle"),
            )
    for place, row in enumerate(rows):
        y = charts.PAD + charts.ROW * (place + 0.5)
        value, low, high = (100 * (v or 0) for v in (row.difference, row.difference_low, row.difference_high))
        css = "bad" if row.verdict == "worse" else "good" if row.verdict == "better" else "s0"
        chart.name(left - 8, y + 4, row.name, left - 16, "end")
        chart.add(
            charts.line(f"M{x(low):.1f} {y:g}H{x(high):.1f}", "whisker"),
            charts.line(f"M{x(low):.1f} {y - 4:g}v8M{x(high):.1f} {y - 4:g}v8", "whisker"),
            charts.shape("circle", css, cx=x(value), cy=y, r=5),
            charts.text(width - charts.RIGHT + 12, y + 4, f"{value:+.1f}"),
            tip=f"{row.name}: {value:+.1f} points ({low:+.1f} to {high:+.1f}), {row.verdict}",
        )
    chart.add(charts.text(width - charts.RIGHT + 20, bottom + 16, "points"))
    chart.height = bottom + 26
    return chart


def _environment(found: Document) -> list[tuple[str, str]]:
    where = found.environment
    return [
        *((f"server {s.name}", f"{s.url}, model {s.model}, {s.engine}, context {s.context or 'not told'}")
          for s in where.servers),
        *((f"prompts for {s.name}", f"fitted by {s.tokenizer}") for s in where.servers[:1]),
        ("asked", f"{where.started}, for {where.duration_s:.0f} s; suite {found.suite}, seed {found.seed}"),
        ("thinking", found.thinking),
        ("versions", f"stoker {where.stoker}, Python {where.python}, {where.platform}"),
    ]  # fmt: skip
