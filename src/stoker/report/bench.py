"""The HTML report of a benchmark: which figures and charts are on the page. The markup is templates/bench.html."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from stoker.bench import agent
from stoker.bench.compare import statement
from stoker.bench.record import Document, Request, Workload
from stoker.bench.summary import group_of, title
from stoker.report import charts, figures
from stoker.report.charts import Bar, Chart, Span
from stoker.report.heading import Story, cards, heading
from stoker.report.page import render

TIMELINE_MOST = 400  # requests drawn
HEADS = (*figures.HEADS[:-1], "ITL p50", "p99 ms", "prefill tok/s", "cached", "all tok/s", "ok")
NARROW = ("workload", "TTFT s", "decode tok/s", "tok/step", "ok")  # columns that a telephone has room for
COLOURS = 4  # for servers, then they repeat: classes s0 to s3 in style.css


@dataclass(frozen=True)
class Panel:
    """A chart beside others."""

    name: str
    note: str
    chart: Chart


def html_report(found: Document, story: Story | None = None) -> str:
    """`story` is what the page says first, where somebody knows better than the figures alone."""
    two = figures.two_servers(found)
    servers = found.environment.servers
    alike = len({(server.model, server.engine) for server in servers}) == 1
    return render(
        "bench.html",
        found=found,
        figures=figures,
        model=servers[0].model if servers else "server",
        against=" against ".join(dict.fromkeys(f"{server.model} ({server.engine})" for server in servers)),
        when=found.environment.started.replace("T", " ").partition("+")[0],
        heading=story.heading if story else heading(found),
        cards=story.cards if story else cards(found),
        legend=[
            (f"s{place % COLOURS}", server.name if alike else f"{server.name}: {server.model}, {server.engine}")
            for place, server in enumerate(servers if two else ())
        ],
        turns=charts.both(partial(charts.stacked, _turns(found), "s")) if found.turns else None,
        speeds=_speeds(found),
        heads=HEADS,
        wide=[place for place, head in enumerate(HEADS) if head not in NARROW],
        rows=[_cells(row, two) for row in found.workloads],
        estimated=any("estimate" in row.steps_source for row in found.workloads),
        broken=any(not row.quality_ok for row in found.workloads),
        counted=", ".join(sorted({row.count_source for row in found.workloads})),
        differences=[figures.compared_cells(row) for row in found.differences if row.metric in figures.METRICS],
        statement=statement(found.differences) if found.differences else "",
        accepted=_accepted(found),
        steps_sources=", ".join(sorted({row.steps_source for row in found.workloads})),
        distributions=_distributions(found),
        curves=_curves(found),
        timeline=_timeline(found),
        timeline_most=TIMELINE_MOST,
        environment=_environment(found),
    )


def _turns(found: Document) -> list[tuple[str, list[tuple[str, float]]]]:
    two = figures.two_servers(found)
    return [
        (
            f"{point.server + ', ' if two else ''}{point.history_tokens / 1000:g}K",
            [("first token", point.ttft_s), ("the rest", max(point.seconds.p50 - point.ttft_s, 0.0))],
        )
        for point in found.turns
    ]


def _speeds(found: Document) -> list[Panel]:
    """General text and agent turns beside each other: they are different numbers."""
    general = [
        w
        for w in found.workloads
        if w.name != agent.NAME and w.concurrency == 1 and w.variant in ("cold", "own") and w.rate is None
    ]
    turns = [w for w in found.workloads if w.name == agent.NAME]
    shown = {"General": _speed_rows(found, general), "Agent turns": _speed_rows(found, turns)}
    kept = {name: rows for name, rows in shown.items() if rows}
    note, width = "Decode tok/s of one stream: median and 95 % interval.", _width(len(kept))
    return [Panel(name, note, charts.bars(rows, "tok/s", 1, width)) for name, rows in kept.items()]


def _speed_rows(found: Document, rows: Sequence[Workload]) -> list[tuple[str, list[Bar]]]:
    named: dict[str, list[Bar]] = {}
    for row in rows:
        if row.decode_tokens_per_s is not None and row.decode_spread is not None:
            spread, note = row.decode_spread, "" if row.quality_ok else "(answers broken)"
            bar = Bar(row.decode_tokens_per_s, spread.ci_low, spread.ci_high, _series(found, row.server), note)
            named.setdefault(title(row) + ("" if row.quality_ok else " (broken)"), []).append(bar)
    return list(named.items())


def _cells(row: Workload, two: bool) -> tuple[str, ...]:
    *cells, done = figures.cells(row, two)
    return (
        *cells,
        f"{row.itl_s.p50 * 1e3:.1f}" if row.itl_s else "–",
        f"{row.itl_s.p99 * 1e3:.1f}" if row.itl_s else "–",
        figures.number(row.prefill_tokens_per_s, 0),
        f"{row.prefix_hit_rate:.0%}" if row.prefix_hit_rate is not None else "–",
        figures.number(row.aggregate_tokens_per_s, 1) if row.concurrency > 1 or row.rate else "–",
        done,
    )


def _accepted(found: Document) -> tuple[Chart, Chart] | None:
    named: dict[str, list[Bar]] = {}
    for row in found.workloads:
        if row.accepted_per_step is not None and row.accepted_spread is not None:
            spread, series = row.accepted_spread, _series(found, row.server)
            bar = Bar(row.accepted_per_step, spread.ci_low, spread.ci_high, series, row.steps_source)
            named.setdefault(title(row), []).append(bar)
    return charts.both(partial(charts.bars, list(named.items()), "tokens", 2)) if named else None


def _distributions(found: Document) -> list[Panel]:
    groups: dict[tuple[str, int], list[Request]] = {}
    titles = {
        (row.name, row.server, row.variant, row.concurrency, row.rate, row.depth): title(row) for row in found.workloads
    }
    for request in found.requests:
        if request.failure is None and request.round:
            name = titles.get(group_of(request), request.workload)
            groups.setdefault((name, _series(found, request.server)), []).append(request)
    ttft = [(name, [r.ttft_s for r in rs if r.ttft_s is not None], side) for (name, side), rs in groups.items()]
    decode = [
        (name, [r.decode_tokens_per_s for r in rs if r.decode_tokens_per_s], side)
        for (name, side), rs in groups.items()
    ]
    if not any(values for _, values, _ in ttft):
        return []
    note = "Every request is a dot; the band holds the middle half."
    return [
        Panel("Time to first token", note, charts.strips(ttft, "s", 3, charts.HALF)),
        Panel("Decode speed per request", note, charts.strips(decode, "tok/s", 1, charts.HALF)),
    ]


def _curves(found: Document) -> list[tuple[str, list[Panel]]]:
    """Throughput by streams, and by requests offered, where several were measured."""
    out = []
    two = figures.two_servers(found)
    for axis, x_name in (("concurrency", "streams at a time"), ("rate", "requests per second offered")):
        curves: dict[str, list[Workload]] = {}
        for row in found.workloads:
            if getattr(row, axis) is not None and row.variant != "load" and row.aggregate_tokens_per_s:
                name = title(replace(row, concurrency=1, rate=None))
                curves.setdefault(f"{row.server}: {name}" if two else name, []).append(row)
        curves = {name: rows for name, rows in curves.items() if len({getattr(row, axis) for row in rows}) > 1}
        panels = []
        for head, metric in (
            ("All streams together", "aggregate_tokens_per_s"),
            ("Each stream's decode", "decode_tokens_per_s"),
        ):
            series = [
                (name, [(getattr(row, axis), getattr(row, metric) or 0.0) for row in rows])
                for name, rows in curves.items()
            ]
            panels.append(Panel(head, "", charts.lines(series, x_name, "tok/s", charts.HALF)))
        if curves:
            out.append((x_name, panels))
    return out


def _timeline(found: Document) -> tuple[Chart, Chart] | None:
    lanes: dict[str, list[Span]] = {}
    for request in [request for request in found.requests if request.round][:TIMELINE_MOST]:
        total = request.total_s if request.total_s is not None else (request.chunk_s[-1] if request.chunk_s else 0.0)
        name = f"{request.server}: {request.workload}" if figures.two_servers(found) else request.workload
        span = (request.started_s, request.ttft_s or 0.0, total, request.failure is not None)
        lanes.setdefault(name, []).append(span)
    return charts.both(partial(charts.timeline, list(lanes.items()))) if lanes else None


def _environment(found: Document) -> list[tuple[str, str]]:
    environment = found.environment
    memory = f", {environment.memory_bytes / 2**30:.0f} GiB" if environment.memory_bytes else ""
    return [
        *(
            (f"server {s.name}", f"{s.url}, model {s.model}, {s.engine}, context {s.context or 'not told'}")
            for s in environment.servers
        ),
        *((f"prompts for {s.name}", f"fitted by {s.tokenizer}") for s in environment.servers),
        ("client machine", f"{environment.processor}, {environment.cpus} CPUs{memory}, {environment.platform}"),
        ("GPUs seen here", ", ".join(environment.gpus) or "none"),
        ("client cost", figures.client(found)),
        ("measured", f"{environment.started}, for {environment.duration_s:.0f} s"),
        ("versions", f"stoker {environment.stoker}, Python {environment.python}"),
    ]


def _width(panels: int) -> int:
    """One alone has the whole width."""
    return charts.HALF if panels > 1 else charts.WIDE


def _series(found: Document, name: str) -> int:
    """Which colour a server has."""
    return [server.name for server in found.environment.servers].index(name) % COLOURS
