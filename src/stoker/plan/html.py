"""A plan as one page: memory as a bar, speed against acceptance as a chart, evidence, advice. Nothing is loaded from
anywhere; light and dark follow the reader's system."""

from collections.abc import Callable
from html import escape

from stoker.plan.acceptance import KINDS, acceptance
from stoker.plan.answer import Answer
from stoker.plan.catalog import GIB
from stoker.plan.evidence import MIXED
from stoker.plan.explain import explain
from stoker.plan.speed import Speed, predict
from stoker.sizes.memory import KV_ITEM
from stoker.sizes.step import Draft

Place = Callable[[float, float], tuple[float, float]]  # tokens per step, tokens per second -> x, y

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 340, 56, 44, 16
# segments of the memory bar: what an item's name begins with -> (label, colour class)
PARTS = (
    (("weights: MTP", "drafter"), "drafter", "c2"),
    (("weights",), "weights", "c1"),
    (("KV cache",), "KV cache", "c3"),
    (("recurrent",), "recurrent state", "c4"),
    (("prefix",), "prefix cache", "c6"),
    (("graphs", "runtime", "host"), "engine", "c5"),
    (("reserve",), "reserve", "c7"),
)

STYLE = """
:root { color-scheme: light dark; --ink: #1c1b19; --soft: #6b675f; --line: #dcd8cf; --page: #faf8f4; --card: #fff;
  --c1: #2f6b9a; --c2: #7a5aa6; --c3: #2d8a6a; --c4: #b9852b; --c5: #8d8a83; --c6: #5aa2c9; --c7: #c3bfb5;
  --bad: #b3372b; }
@media (prefers-color-scheme: dark) { :root { --ink: #ece8df; --soft: #a49f94; --line: #3a3833; --page: #191816;
  --card: #22211e; --c1: #6aa9d8; --c2: #b097dc; --c3: #62c09c; --c4: #e0b45f; --c5: #8f8b83; --c6: #8cc6e6;
  --c7: #55524b; --bad: #ef7a6d; } }
* { box-sizing: border-box } body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif } main { max-width: 860px; margin: 0 auto; padding: 28px 20px 60px }
h1 { font-size: 24px; margin: 0 0 2px } h2 { font-size: 16px; margin: 34px 0 8px } p { margin: 6px 0 }
.soft { color: var(--soft) } .bad { color: var(--bad) } td:first-child, .nowrap { white-space: nowrap }
.big { font-size: 30px; font-weight: 650; letter-spacing: -.5px }
.row { display: flex; gap: 28px; flex-wrap: wrap; margin-top: 14px } .row div { min-width: 150px }
svg { display: block; width: 100%; height: auto } svg text { fill: var(--ink); font: 12px system-ui, sans-serif }
svg .soft { fill: var(--soft) } .grid { stroke: var(--line) } table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top }
.wide { overflow-x: auto } .wide > table, .wide > svg { min-width: 560px }
th { color: var(--soft); font-weight: 500 } td.n, th.n { text-align: right } td.n { white-space: nowrap }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px }
ul { padding-left: 18px } li { margin: 6px 0 } pre { overflow-x: auto; background: var(--card); padding: 14px;
  border: 1px solid var(--line); border-radius: 6px; font-size: 12px } a { color: var(--c1) }
.flags { white-space: pre-wrap; overflow-wrap: anywhere }
.c1 { fill: var(--c1); background: var(--c1) } .c2 { fill: var(--c2); background: var(--c2) }
.c3 { fill: var(--c3); background: var(--c3) } .c4 { fill: var(--c4); background: var(--c4) }
.c5 { fill: var(--c5); background: var(--c5) } .c6 { fill: var(--c6); background: var(--c6) }
.c7 { fill: var(--c7); background: var(--c7) }
"""


def page(answer: Answer) -> str:
    title = f"{answer.model.name} on {answer.box.name}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>
<h1>{escape(title)}</h1>
<p class="soft">{escape(answer.weights.title)}; drafts: {answer.ask.draft}; {escape(answer.ask.engine)};
{answer.ask.users} × {answer.ask.context:,} tokens, KV {answer.ask.kv}</p>
{_headline(answer)}
<h2>Speed by drafter</h2>{_drafts(answer)}
<h2>Speed against acceptance</h2><div class="wide">{speed_chart(answer)}</div>
<p class="soft">Predicted, for a mix of texts. The band is where four of five published rows of sources the fit never
saw would lie; the dashed line is the physical limit: the same bytes at the bandwidth on paper. Marks: predicted for one
kind of text, at the acceptance published for it.</p>
<h2>Published measurements, nearest first</h2>{_evidence(answer)}
<h2>Memory</h2>{memory_bar(answer)}{_memory_table(answer)}{_flags(answer)}
<h2>Advice</h2>{_advice(answer)}
{_verdicts(answer)}
<h2>The arithmetic</h2><pre>{escape(chr(10).join(explain(answer)))}</pre>
</main></body></html>
"""


def _headline(answer: Answer) -> str:
    s, free = answer.speed, answer.budget.free_bytes / GIB
    fits = f"<span class='big'>{free:.1f} GiB</span> left" if answer.fits else (
        f"<span class='big bad'>{-free:.1f} GiB</span> missing: does not fit"
    )  # fmt: skip
    first = list(answer.first_token.items())[-1]
    each = f", {s.per_user:.0f} each" if s.users > 1 else ""
    condition = "" if answer.fits else ", if it did fit"
    return f"""<div class="row"><div>{fits}<br><span class="soft">of {answer.box.visible_gib:g} GiB</span></div>
<div><span class="big">≈ {s.tokens_per_s:.0f}</span> tok/s predicted{condition}<br><span class="soft">{s.low:.0f} to
{s.high:.0f}{each}; limit {s.limit:.0f}; {escape(answer.question.workload)} text</span></div>
<div><span class="big">≈ {first[1]:.0f} s</span> to the first token<br><span class="soft">of a cold prompt of
{first[0]:,} tokens</span></div></div>"""


def segments(answer: Answer) -> list[tuple[str, str, int]]:
    """label, colour, bytes; every item is in exactly one."""
    sizes: dict[tuple[str, str], int] = {}
    for item in answer.budget.items:
        label, colour = next((label, colour) for starts, label, colour in PARTS if item.name.startswith(starts))
        sizes[label, colour] = sizes.get((label, colour), 0) + item.bytes
    return [(label, colour, size) for (label, colour), size in sizes.items() if size]


def memory_bar(answer: Answer) -> str:
    capacity, total = answer.budget.capacity, answer.budget.total
    scale = WIDTH / max(capacity, total)
    x, bars, keys = 0.0, [], []
    for label, colour, size in segments(answer):
        width = size * scale
        said = f"{label}: {size / GIB:.2f} GiB"
        bars.append(f'<rect class="{colour}" x="{x:.1f}" y="4" width="{max(width, 0.5):.1f}" height="30"><title>{said}'
                    "</title></rect>")  # fmt: skip
        keys.append(f'<span class="nowrap" style="margin-right:16px"><span class="key {colour}"></span>{said}</span>')
        x += width
    end = capacity * scale
    mark = f'<line x1="{end:.1f}" x2="{end:.1f}" y1="0" y2="38" stroke="var(--ink)" stroke-width="2"/>'
    where = f'<text x="{end - 6:.1f}" y="52" text-anchor="end" class="soft">{capacity / GIB:.1f} GiB in the box</text>'
    return (
        f'<svg viewBox="0 0 {WIDTH} 58" role="img" aria-label="memory by item"><rect x="0" y="4" width="{end:.1f}" '
        f'height="30" fill="none" stroke="var(--line)"/>{"".join(bars)}{mark}{where}</svg><p>{" ".join(keys)}</p>'
    )


def speed_chart(answer: Answer) -> str:
    """Tokens per second over tokens per step, for the drafter that is planned or, without one, one it could have."""
    draft = answer.ask.draft if answer.ask.draft.drafting else _any_drafter(answer)
    if draft is None:
        return f"<p>{escape(answer.model.name)} has no drafter: ≈ {answer.speed.tokens_per_s:.1f} tok/s predicted.</p>"
    most = draft.verified
    steps = [1 + (most - 1) * i / 40 for i in range(41)]
    found = [_at(answer, draft, tokens) for tokens in steps]
    top = max(speed.limit for speed in found) * 1.05
    right = WIDTH - 150

    def place(tokens: float, speed: float) -> tuple[float, float]:
        return LEFT + (tokens - 1) / (most - 1) * (right - LEFT), TOP + (1 - speed / top) * (HEIGHT - TOP - BOTTOM)

    def line(values: list[float]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*place(t, v)) for t, v in zip(steps, values, strict=True))

    band = line([s.low for s in found]) + " " + " ".join(reversed(line([s.high for s in found]).split()))
    parts = [_grid(top, most, right, place)]
    parts.append(f'<polygon points="{band}" fill="var(--c1)" opacity="0.18"/>')
    parts.append(f'<polyline points="{line([s.tokens_per_s for s in found])}" fill="none" stroke="var(--c1)" '
                 'stroke-width="2.5"/>')  # fmt: skip
    parts.append(f'<polyline points="{line([s.limit for s in found])}" fill="none" stroke="var(--soft)" '
                 'stroke-dasharray="5 4"/>')  # fmt: skip
    plain = _at(answer, Draft(), 1.0).tokens_per_s
    level = place(1, plain)[1]
    parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{level:.1f}" y2="{level:.1f}" stroke="var(--c4)"/>')
    x, y = place(most, found[-1].limit)
    labels = [(y, "physical limit", "soft"), (place(most, found[-1].tokens_per_s)[1], f"{draft}, predicted", ""),
              (level, f"no drafting ({plain:.0f})", "soft")]  # fmt: skip
    parts += [
        f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" class="{style}">{text}</text>' for y, text, style in _apart(labels)
    ]
    parts.append(_marks(answer, draft, place))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="speed against acceptance">{"".join(parts)}</svg>'
    )


def _any_drafter(answer: Answer) -> Draft | None:
    if answer.model.drafter:
        return Draft("dflash", 12)
    return Draft("mtp", 2) if answer.model.mtp_layers else None


def _at(answer: Answer, draft: Draft, tokens: float, kind: str = MIXED) -> Speed:
    ask = answer.ask
    return predict(answer.model, answer.weights, answer.box, draft, accepted=tokens, kind=kind, context=ask.context,
                   users=ask.users, kv_item=KV_ITEM[ask.kv], engine=ask.engine)  # fmt: skip


def _grid(top: float, most: int, right: float, place: Place) -> str:
    parts = []
    step = next(s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2500, 5000) if top / s <= 7 or s == 5000)
    value = 0.0
    while value <= top:
        _, y = place(1, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" class="soft">{value:g}</text>')
        value += step
    every = max(1, round(most / 10))
    for tokens in range(1, most + 1, every):
        x, _ = place(tokens, 0)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" class="soft">{tokens}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle" class="soft">tokens per step (accepted '
                 "drafts + 1)</text>")  # fmt: skip
    parts.append(f'<text x="14" y="{HEIGHT / 2:.0f}" class="soft" text-anchor="middle" '
                 f'transform="rotate(-90 14 {HEIGHT / 2:.0f})">tok/s</text>')  # fmt: skip
    return "".join(parts)


def _marks(answer: Answer, draft: Draft, place: Place) -> str:
    parts = []
    if draft.kind in ("mtp", "dflash"):
        for kind in KINDS:
            tokens = acceptance(draft, kind).tokens_per_step
            speed = _at(answer, draft, tokens, kind).tokens_per_s
            x, y = place(tokens, speed)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="var(--c1)"/>')
            parts.append(f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="end">{kind}</text>')
    return "".join(parts)


def _apart(labels: list[tuple[float, str, str]], least: float = 16.0) -> list[tuple[float, str, str]]:
    """Moves labels down until none lies on another."""
    placed: list[tuple[float, str, str]] = []
    for y, text, style in sorted(labels):
        placed.append((max(y, placed[-1][0] + least) if placed else y, text, style))
    return placed


def _memory_table(answer: Answer) -> str:
    rows = "".join(
        f'<tr><td>{escape(item.name)}</td><td class="n">{item.bytes:,}</td><td class="n">{item.bytes / GIB:.2f}</td>'
        f'<td class="soft">{escape(item.how)}</td></tr>'
        for item in answer.budget.items
    )
    head = '<tr><th>item</th><th class="n">bytes</th><th class="n">GiB</th><th></th></tr>'
    return f'<div class="wide"><table>{head}{rows}</table></div>'


def _evidence(answer: Answer) -> str:
    if not answer.evidence:
        return "<p>Nobody published a measurement of this model that we know of.</p>"
    rows = []
    for row in answer.evidence:
        source = f'<a href="{escape(row.url)}">{escape(row.source)}</a>' if "://" in row.url else escape(row.link)
        users = f", {row.users} users" if row.users > 1 else ""
        rows.append(
            f'<tr><td class="n">{row.decode_tok_s:g}</td><td>{escape(row.recipe)}</td>'
            f"<td>{escape(row.workload)}{users}</td><td>{row.boxes}× {escape(row.box)}</td>"
            f"<td>{row.timing} ({row.evidence})</td><td>{source}, {row.date}</td></tr>"
        )
    head = '<tr><th class="n">tok/s</th><th>recipe</th><th>workload</th><th>box</th><th>timed</th><th>source</th></tr>'
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>'


def _drafts(answer: Answer) -> str:
    rows = []
    for line in answer.compared:
        name = f"<b>{line.draft} (planned)</b>" if line.draft == answer.ask.draft else str(line.draft)
        rows.append(
            f'<tr><td>{name}</td><td class="n">≈ {line.general.tokens_per_s:.1f}</td>'
            f'<td class="n">≈ {line.agent.tokens_per_s:.1f}</td><td class="n">{line.agent.limit:.0f}</td></tr>'
        )
    head = "".join(f'<th class="n">{name}</th>' for name in ("general tok/s", "agent tok/s", "limit (agent)"))
    return f"<table><tr><th>drafts</th>{head}</tr>{''.join(rows)}</table>"


def _flags(answer: Answer) -> str:
    flags = " ".join(answer.budget.flags) if answer.fits else ""
    return f"<p>The same in vLLM's flags:</p><pre class='flags'>{escape(flags)}</pre>" if flags else ""


def _verdicts(answer: Answer) -> str:
    marks = {"good": "✓", "degraded": "!", "not suitable": "✗"}
    rows = "".join(
        f"<li>{marks[v.grade]} {escape(v.use)}: <b>{v.grade}</b> <span class='soft'>({escape(v.because)}, predicted)"
        "</span></li>"
        for v in answer.verdicts
    )
    return f"<h2>Good for</h2><ul>{rows}</ul>" if rows else ""


def _advice(answer: Answer) -> str:
    lines = [f"<li>{escape(a.text)} <span class='soft'>({escape(a.because)})</span></li>" for a in answer.advice]
    lines += [
        f"<li>{escape(f.topic)}: <b>conflicting</b> – "
        + "; ".join(
            f"{'works' if r.works else 'does not'}: {escape(r.statement)} ({r.engine}, {r.date})" for r in f.standing
        )
        + "</li>"
        for f in answer.compat
        if f.conflicting
    ]
    return f"<ul>{''.join(lines)}</ul>" if lines else "<p>Nothing stands against this plan.</p>"
