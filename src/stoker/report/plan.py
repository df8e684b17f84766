"""A plan as one page: memory as a bar, speed against acceptance as a chart, evidence, advice. The markup is
templates/plan.html."""

from dataclasses import replace
from functools import partial

from stoker.plan.acceptance import KINDS, acceptance
from stoker.plan.answer import Answer
from stoker.plan.catalog import GIB
from stoker.plan.evidence import MIXED
from stoker.plan.explain import explain
from stoker.plan.speed import Speed, predict
from stoker.report import charts
from stoker.report.charts import CHARACTER, Chart, line, polyline, shape, text
from stoker.report.page import render
from stoker.report.plan_parts import segments
from stoker.sizes.memory import KV_ITEM
from stoker.sizes.step import Draft

WIDE = 840  # of the page's charts
MARKS = {"good": "✓", "degraded": "!", "not suitable": "✗"}


def page(answer: Answer) -> str:
    draft = answer.ask.draft if answer.ask.draft.drafting else _any_drafter(answer)
    return render(
        "plan.html",
        answer=answer,
        GIB=GIB,
        MARKS=MARKS,
        last_prompt=list(answer.first_token.items())[-1],
        speed_chart=charts.both(partial(speed_chart, answer, draft), WIDE) if draft else None,
        memory=charts.both(partial(memory_bar, answer), WIDE),
        segments=segments(answer),
        conflicting=[finding for finding in answer.compat if finding.conflicting],
        flags=" ".join(answer.budget.flags) if answer.fits else "",
        explained="\n".join(explain(answer)),
    )


def memory_bar(answer: Answer, width: int) -> Chart:
    capacity = answer.budget.capacity
    chart = Chart(width, "memory by item", 58)
    scale = (width - 2) / max(capacity, answer.budget.total)
    end, x = capacity * scale, 0.0
    chart.add(shape("rect", "box", x=0.0, y=4.0, width=end, height=30.0))
    for label, colour, size in segments(answer):
        bar = shape("rect", colour, x=x, y=4.0, width=max(size * scale, 0.5), height=30.0)
        chart.add(bar, tip=f"{label}: {size / GIB:.2f} GiB")
        x += size * scale
    chart.add(
        line(f"M{end:.1f} 0V38", "edge"), text(end - 6, 52, f"{capacity / GIB:.1f} GiB in the box", "end", "soft")
    )
    return chart


def speed_chart(answer: Answer, draft: Draft, width: int) -> Chart:
    """Tokens per second over tokens per step, for the drafter that is planned or, without one, one it could have."""
    height, left, top, bottom = 348, 48, 24, 44
    plain = answer.compared[0].general.tokens_per_s  # the table's first line: no drafts
    level_name = f"no drafting ({plain:.0f})"
    right = width - CHARACTER * max(len(f"{draft}, predicted"), len(level_name)) - 12
    most = draft.verified
    steps = [1 + (most - 1) * i / 40 for i in range(41)]
    found = [_at(answer, draft, tokens) for tokens in steps]
    fastest = max(speed.limit for speed in found) * 1.05
    chart = Chart(width, "speed against acceptance", height)

    def at(tokens: float, speed: float) -> tuple[float, float]:
        x = left + (tokens - 1) / (most - 1) * (right - left)
        return x, top + (1 - speed / fastest) * (height - top - bottom)

    def curve(values: list[float]) -> list[tuple[float, float]]:
        return [at(tokens, value) for tokens, value in zip(steps, values, strict=True)]

    for tick in charts.ticks(charts.nice(fastest)):
        if tick <= fastest:
            y = at(1, tick)[1]
            chart.add(line(f"M{left} {y:.1f}H{right:.1f}", "grid"), text(left - 8, y + 4, f"{tick:g}", "end", "soft"))
    for count in range(1, most + 1, max(1, round(most / 10))):
        chart.add(text(at(count, 0)[0], height - bottom + 18, str(count), "middle", "soft"))
    chart.add(text((left + right) / 2, height - 6, "tokens per step (accepted drafts + 1)", "middle", "soft"))
    chart.add(text(left - 8, top - 4, "tok/s", "end", "soft"))
    low, high = curve([speed.low for speed in found]), curve([speed.high for speed in found])
    chart.add(polyline([*low, *reversed(high)], "band s0", "polygon"))
    middle, limit = curve([speed.tokens_per_s for speed in found]), curve([speed.limit for speed in found])
    level = at(1, plain)[1]
    chart.add(polyline(middle, "l0"), polyline(limit, "limit dashed"), line(f"M{left} {level:.1f}H{right:.1f}", "l1"))
    names = [(limit[-1][1], "physical limit", "soft"), (middle[-1][1], f"{draft}, predicted", ""),
             (level, level_name, "soft")]  # fmt: skip
    for y, words, css in _apart(names):
        chart.add(text(right + 8, y + 4, words, css=css))
    if draft.kind in ("mtp", "dflash"):
        for kind in KINDS:
            tokens = acceptance(draft, kind).tokens_per_step
            speed = _at(answer, draft, tokens, kind).tokens_per_s
            x, y = at(tokens, speed)
            tip = f"{kind}: {speed:.1f} tok/s at {tokens:.2f} tokens per step"
            chart.add(shape("circle", "s0", cx=x, cy=y, r=4.0), text(x, y - 9, kind, "end"), tip=tip)
    return chart


def _any_drafter(answer: Answer) -> Draft | None:
    if answer.model.drafter:
        return Draft("dflash", 12)
    return Draft("mtp", 2) if answer.model.mtp_layers else None


def _at(answer: Answer, draft: Draft, tokens: float, kind: str = MIXED) -> Speed:
    ask = answer.ask
    plain = predict(answer.model, answer.weights, answer.box, draft, accepted=tokens, kind=kind, context=ask.context,
                    users=ask.users, kv_item=KV_ITEM[ask.kv], engine=ask.engine)  # fmt: skip
    s = answer.speed  # its correction and range are the curve's
    return replace(plain, factor=s.factor, low_factor=s.low_factor, high_factor=s.high_factor)


def _apart(labels: list[tuple[float, str, str]], least: float = 16.0) -> list[tuple[float, str, str]]:
    """Moves labels down until none lies on another."""
    placed: list[tuple[float, str, str]] = []
    for y, words, css in sorted(labels):
        placed.append((max(y, placed[-1][0] + least) if placed else y, words, css))
    return placed
