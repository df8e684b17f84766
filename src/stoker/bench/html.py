"""The report: one HTML file without script or network, in light and dark. The drawing is in charts.py."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from importlib.resources import files

from msgspec.structs import replace

from stoker.bench import agent, charts, show
from stoker.bench.charts import Bar
from stoker.bench.compare import statement
from stoker.bench.record import Document, Request, Workload
from stoker.bench.summary import title
from stoker.bench.table import NAMES, SHOWN

TIMELINE_MOST = 400  # requests drawn
COLOURS = ("one", "two", "three", "four")  # of servers, in report.css


def html_report(found: Document) -> str:
    sections = [
        _head(found),
        _cards(found),
        *(f'<p class="warning">{escape(line)}</p>' for line in found.warnings),
        *(f'<p class="failed">Failed: {escape(line)}</p>' for line in show.failures(found)),
        _turns(found),
        _sides(found),
        _table(found),
        _differences(found),
        _accepted(found),
        _distributions(found),
        _prefix(found),
        _curves(found),
        _timeline(found),
        _environment(found),
    ]
    style = files("stoker.bench").joinpath("report.css").read_text(encoding="utf-8")
    name = escape(found.environment.servers[0].model if found.environment.servers else "server")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{name}: stoker bench</title>\n<style>\n{style}</style></head>\n'
        "<body><main>\n" + "\n".join(section for section in sections if section) + "\n</main></body></html>\n"
    )


def _head(found: Document) -> str:
    names = " against ".join(f"{s.model} ({s.engine})" for s in found.environment.servers)
    when = found.environment.started.replace("T", " ").partition("+")[0]
    return (
        f'<p class="soft">stoker bench · suite {escape(found.suite)} · {escape(names)} · {when} UTC · measured</p>'
        f"<h1>{escape(found.headline.text)}</h1>"
        f'<p class="soft">{escape(show.quality(found))} {escape(show.noise(found))}</p>'
    )


def _cards(found: Document) -> str:
    head = found.headline
    shown = [("completed", f"{head.completed}", f"{head.failed} failed")]
    if head.general_decode_tokens_per_s is not None:
        shown.append(("general decode", f"{head.general_decode_tokens_per_s:.1f}", "tok/s, one stream"))
    if head.agent_decode_tokens_per_s is not None:
        shown.append(("agent decode", f"{head.agent_decode_tokens_per_s:.1f}", "tok/s, tool-call turns"))
    if head.accepted_per_step is not None:
        shown.append(("tokens per step", f"{head.accepted_per_step:.2f}", "accepted drafts + 1"))
    if head.ttft_s is not None:
        shown.append(("first token", show.seconds(head.ttft_s), "s, median, cold"))
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card"><span class="soft">{name}</span><b>{value}</b><span class="soft">{unit}</span></div>'
            for name, value, unit in shown
        )
        + "</div>"
    )


def _turns(found: Document) -> str:
    if not found.turns:
        return ""
    two = show.two_servers(found)
    rows = [
        (
            f"{point.server + ', ' if two else ''}{point.history_tokens / 1000:g}K",
            [("first token", point.ttft_s), ("the rest", max(point.seconds.p50 - point.ttft_s, 0.0))],
        )
        for point in found.turns
    ]
    key = '<span class="key"><i style="background:var(--wait)"></i>to its first token'
    key += '<i style="background:var(--one)"></i>the rest</span>'
    lines = "".join(f'<p class="soft">{escape(line)}</p>' for line in show.turns(found))
    return (
        _figure(
            "Seconds per agent turn",
            f"The median turn, by length of history. {key}",
            partial(charts.stacked, rows, "s"),
        )
        + lines
    )


def _sides(found: Document) -> str:
    """General text and agent turns beside each other: they are different numbers."""
    general = [
        w
        for w in found.workloads
        if w.name != agent.NAME and w.concurrency == 1 and w.variant in ("cold", "own") and w.rate is None
    ]
    turns = [w for w in found.workloads if w.name == agent.NAME]
    shown = {"General": _speed_rows(found, general), "Agent turns": _speed_rows(found, turns)}
    note = "Decode tok/s of one stream: median and 95 % interval."
    drawings = {name: (note, partial(charts.bars, rows, "tok/s", 1)) for name, rows in shown.items() if rows}
    return _pair("Decode speed", _key(found), drawings)


def _speed_rows(found: Document, rows: Sequence[Workload]) -> list[tuple[str, list[Bar]]]:
    named: dict[str, list[Bar]] = {}
    for row in rows:
        if row.decode_tokens_per_s is not None and row.decode_spread is not None:
            spread, note = row.decode_spread, "" if row.quality_ok else "(answers broken)"
            bar = Bar(row.decode_tokens_per_s, spread.ci_low, spread.ci_high, _side(found, row.server), note)
            named.setdefault(title(row) + ("" if row.quality_ok else " (broken)"), []).append(bar)
    return list(named.items())


def _table(found: Document) -> str:
    two = show.two_servers(found)
    heads = (*show.HEADS[:-1], "ITL p50", "p99 ms", "prefill tok/s", "cached", "in all tok/s", "ok")
    body = []
    for row in found.workloads:
        itl = row.itl_s
        cells = show.cells(row, two)
        extra = (
            f"{itl.p50 * 1e3:.1f}" if itl else "–",
            f"{itl.p99 * 1e3:.1f}" if itl else "–",
            show.number(row.prefill_tokens_per_s, 0),
            f"{row.prefix_hit_rate:.0%}" if row.prefix_hit_rate is not None else "–",
            show.number(row.aggregate_tokens_per_s, 1) if row.concurrency > 1 or row.rate else "–",
        )
        body.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (*cells[:-1], *extra, cells[-1])) + "</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    note = "* estimated from chunks. " if any("estimate" in w.steps_source for w in found.workloads) else ""
    note += "! answers are broken. " if any(not w.quality_ok for w in found.workloads) else ""
    counted = ", ".join(sorted({row.count_source for row in found.workloads}))
    note += (
        f"ITL: milliseconds per token, not per chunk. In all: streams together. Tokens counted by {escape(counted)}."
    )
    return (
        f'<h2>All figures</h2><p class="soft">Medians. {note}</p>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def _differences(found: Document) -> str:
    if not found.differences:
        return ""
    body = []
    for row in found.differences:
        if row.metric in SHOWN:
            digits = 3 if row.metric == "ttft_s" else 2
            interval, runs = f"{row.ci_low:+.1%} … {row.ci_high:+.1%}", f"{row.runs_a} + {row.runs_b}"
            cells = (f"{row.a:.{digits}f}", f"{row.b:.{digits}f}", f"{row.change:+.1%}", interval, runs)
            body.append(
                f'<tr><td>{escape(title(row))}</td><td class="left">{NAMES[row.metric]}</td>'
                + "".join(f"<td>{cell}</td>" for cell in cells)
                + f'<td class="left {row.verdict}">{row.verdict}</td></tr>'
            )
    heads = "".join(
        f"<th>{name}</th>" for name in ("workload", "metric", "A", "B", "change", "95 %", "runs", "verdict")
    )
    how = "Rounds were interleaved and compared pairwise." if found.differences[0].paired else "Two separate runs."
    return (
        f"<h2>B against A</h2><p>{escape(statement(found.differences))}</p>"
        f'<p class="soft">{how} Bootstrap intervals.</p>'
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def _accepted(found: Document) -> str:
    named: dict[str, list[Bar]] = {}
    for row in found.workloads:
        if row.accepted_per_step is not None and row.accepted_spread is not None:
            spread = row.accepted_spread
            bar = Bar(row.accepted_per_step, spread.ci_low, spread.ci_high, _side(found, row.server), row.steps_source)
            named.setdefault(title(row), []).append(bar)
    if not named:
        return ""
    sources = ", ".join(sorted({row.steps_source for row in found.workloads}))
    note = f"Tokens emitted per forward pass: accepted drafts and one. Source: {sources}. {_key(found)}"
    return _figure("Accepted per step", note, partial(charts.bars, list(named.items()), "tokens", 2))


def _distributions(found: Document) -> str:
    groups: dict[tuple[str, int], list[Request]] = {}
    titles = {_key_of(row): title(row) for row in found.workloads}
    for request in found.requests:
        if request.failure is None and request.round:
            name = titles.get(_key_of_request(request), request.workload)
            groups.setdefault((name, _side(found, request.server)), []).append(request)
    ttft = [(name, [r.ttft_s for r in rs if r.ttft_s is not None], side) for (name, side), rs in groups.items()]
    decode = [
        (name, [r.decode_tokens_per_s for r in rs if r.decode_tokens_per_s], side)
        for (name, side), rs in groups.items()
    ]
    if not any(values for _, values, _ in ttft):
        return ""
    note = "Every request is a dot; the band holds the middle half."
    drawings = {
        "Time to first token": (note, partial(charts.strips, ttft, "s", 3)),
        "Decode speed per request": (note, partial(charts.strips, decode, "tok/s", 1)),
    }
    return _pair("Distributions", _key(found), drawings)


def _prefix(found: Document) -> str:
    lines = show.prefix(found)
    return "<h2>Cold and warm prompts</h2>" + "".join(f"<p>{escape(line)}</p>" for line in lines) if lines else ""


def _curves(found: Document) -> str:
    out = []
    for axis, x_name in (("concurrency", "streams at a time"), ("rate", "requests per second offered")):
        curves: dict[str, list[Workload]] = {}
        for row in found.workloads:
            if getattr(row, axis) is not None and row.variant != "load" and row.aggregate_tokens_per_s:
                name = title(replace(row, concurrency=1, rate=None))
                curves.setdefault(f"{row.server}: {name}" if show.two_servers(found) else name, []).append(row)
        curves = {name: rows for name, rows in curves.items() if len({getattr(row, axis) for row in rows}) > 1}
        drawings = {}
        for head, metric in (
            ("All streams together", "aggregate_tokens_per_s"),
            ("Each stream's decode", "decode_tokens_per_s"),
        ):
            series = [
                (name, [(getattr(row, axis), getattr(row, metric) or 0.0) for row in rows])
                for name, rows in curves.items()
            ]
            drawings[head] = ("", partial(charts.lines, series, x_name, "tok/s"))
        if curves:
            out.append(_pair(f"Throughput by {x_name}", "", drawings))
    return "".join(out)


def _timeline(found: Document) -> str:
    lanes: dict[str, list[tuple[float, float, float, bool]]] = {}
    shown = [request for request in found.requests if request.round][:TIMELINE_MOST]
    for request in shown:
        total = request.total_s if request.total_s is not None else (request.chunk_s[-1] if request.chunk_s else 0.0)
        name = f"{request.server}: {request.workload}" if show.two_servers(found) else request.workload
        lanes.setdefault(name, []).append(
            (request.started_s, request.ttft_s or 0.0, total, request.failure is not None)
        )
    if not lanes:
        return ""
    more = f" The first {TIMELINE_MOST} of {len(found.requests)} requests." if len(shown) < len(found.requests) else ""
    note = f"Each request from start to last token, lighter until the first token, red where it failed.{more}"
    return _figure("Timeline", note, partial(charts.timeline, list(lanes.items())))


def _environment(found: Document) -> str:
    environment = found.environment
    rows = [
        (f"server {s.name}", f"{s.url}, model {s.model}, {s.engine}, context {s.context or 'not told'}")
        for s in environment.servers
    ]
    rows += [(f"prompts for {s.name}", f"fitted by {s.tokenizer}") for s in environment.servers]
    memory = f", {environment.memory_bytes / 2**30:.0f} GiB" if environment.memory_bytes else ""
    rows += [
        ("client machine", f"{environment.processor}, {environment.cpus} CPUs{memory}, {environment.platform}"),
        ("GPUs seen here", ", ".join(environment.gpus) or "none"),
        ("client cost", show.client(found)),
        ("measured", f"{environment.started}, for {environment.duration_s:.0f} s"),
        ("versions", f"stoker {environment.stoker}, Python {environment.python}"),
    ]
    body = "".join(
        f'<tr><td>{escape(name)}</td><td class="left" style="white-space:normal">{escape(text)}</td></tr>'
        for name, text in rows
    )
    return f"<h2>Environment</h2><table>{body}</table><p>Command: <code>{escape(environment.command)}</code></p>"


def _figure(name: str, note: str, draw: Callable[[int], str]) -> str:
    """Across the page, and drawn again for a telephone, where its words would be too small to read."""
    both = f'<div class="wide">{draw(charts.WIDE)}</div><div class="narrow">{draw(charts.HALF)}</div>'
    return f"<h2>{escape(name)}</h2><figure><figcaption>{note}</figcaption>{both}</figure>"


def _pair(name: str, note: str, drawings: Mapping[str, tuple[str, Callable[[int], str]]]) -> str:
    """Drawings beside each other; one alone has the whole width."""
    width = charts.HALF if len(drawings) > 1 else charts.WIDE
    figures = "".join(
        f"<figure><figcaption><b>{escape(head)}</b><br>{text}</figcaption>{draw(width)}</figure>"
        for head, (text, draw) in drawings.items()
    )
    return f'<h2>{escape(name)}</h2>{note}<div class="pair">{figures}</div>' if drawings else ""


def _side(found: Document, name: str) -> int:
    """Which colour a server has."""
    return [server.name for server in found.environment.servers].index(name) % len(COLOURS)


def _key(found: Document) -> str:
    if not show.two_servers(found):
        return ""
    marks = "".join(
        f'<i style="background:var(--{colour})"></i>{escape(f"{server.name}: {server.model}, {server.engine}")}'
        for server, colour in zip(found.environment.servers, COLOURS, strict=False)
    )
    return f'<span class="key soft">{marks}</span>'


def _key_of(row: Workload) -> tuple[str, str, int, float | None, int | None]:
    return row.name, row.variant, row.concurrency, row.rate, row.depth


def _key_of_request(request: Request) -> tuple[str, str, int, float | None, int | None]:
    depth = None if request.workload == agent.NAME else request.depth
    return request.workload, request.variant, request.concurrency, request.rate, depth
