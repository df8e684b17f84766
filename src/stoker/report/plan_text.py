"""A plan in a terminal: one screen that answers, and behind --explain everything that the answer stands on.

Plain text, made without rich, whose import would take a third of the time that a plan has.
"""

import textwrap
from collections.abc import Iterator, Sequence

from stoker.plan.advice import Advice
from stoker.plan.answer import SHORT, Answer
from stoker.plan.catalog import GIB
from stoker.plan.evidence import Row
from stoker.plan.explain import explain
from stoker.report.plan_parts import segments

MARKS = {"good": "+", "degraded": "!", "not suitable": "x"}
NARROWEST, WIDEST = 40, 120
ROWS, NOTES = 4, 2  # on the screen


def screen(found: Answer, width: int) -> list[str]:
    """What was asked comes first: does it fit, how fast, says who, and what to type."""
    width = max(NARROWEST, min(width, WIDEST))
    lines = [f"{found.model.name} on {found.box.name}"]
    lines += _wrap(_asked(found), width)
    lines += ["", *_wrap(_fit(found), width), *_speed(found, width)]
    lines += ["", *_drafts(found, width)]
    lines += ["", *_evidence(found.evidence[:ROWS], width)]
    lines += _memory(found, width)
    unknown = [f"{found.model.name} is {found.model.note}."] if found.model.note else []
    notes = [*unknown, *_conflicts(found), *(a.text for a in found.advice if _urgent(a, found))][:NOTES]
    lines += [part for note in notes for part in _wrap(f"! {note}", width, "  ")]
    lines += ["", "To run it:", *_commands(found, width)]
    lines += [
        "",
        *_wrap("More: --explain (sources, arithmetic), --boxes, --html FILE.", width),
    ]
    return lines


def everything(found: Answer, width: int) -> list[str]:
    """What --explain adds."""
    width = max(NARROWEST, min(width, WIDEST))
    lines = ["", "Measured runs nearest to this plan, and where they are published:"]
    for row in found.evidence:
        said = f"{row.id}  {_measured(row)}: {row.recipe}; {row.workload}; {row.timing}, graded {row.evidence}"
        lines += _wrap(f"{said}; {row.link}, {row.date}", width, "      ")
    if found.budget.flags:
        lines += ["", "vLLM's flags for it:", *_wrap(" ".join(found.budget.flags), width, "  ")]
    lines += ["", *_compat(found, width)] if found.compat else []
    lines += [""] + [part for a in found.advice for part in _wrap(f"- {a.text} ({a.because})", width, "  ")]
    if found.verdicts:
        lines += ["", "What it is good for (predicted; + good, ! degraded, x not suitable):"]
        for v in found.verdicts:
            lines += _wrap(f"{MARKS[v.grade]} {v.use}: {v.because}", width, "  ")
    return [*lines, "", *explain(found)]


def _asked(found: Answer) -> str:
    ask = found.ask
    users = "1 user" if ask.users == 1 else f"{ask.users} users"
    return f"{found.weights.title}; {ask.engine}; {users} x {ask.context:,} tokens, KV {ask.kv}"


def _fit(found: Answer) -> str:
    free, total, all_of = (n / GIB for n in (found.budget.free_bytes, found.budget.total, found.budget.capacity))
    if not found.fits:
        most = found.budget.max_context
        shorter = f" With {most:,} tokens of context it would fit." if most else ""
        lacks = f"{-found.budget.free_bytes:,} bytes ({-free:.1f} GiB) are missing"
        return f"Does not fit: {lacks} of {total:.1f} GiB.{shorter}"
    return (
        f"Fits: {total:.1f} of {all_of:.1f} GiB, {free:.1f} left. {found.concurrent:,} requests of "
        f"{found.ask.context:,} tokens at a time."
    )


def _speed(found: Answer, width: int) -> Iterator[str]:
    s, ask = found.speed, found.ask
    each = f", {s.per_user:.1f} each" if ask.users > 1 else ""
    lead = "" if found.fits else "If it did: "
    yield from _wrap(
        f"{lead}≈ {s.tokens_per_s:.1f} tok/s predicted ({s.low:.0f} to {s.high:.0f}{each}) on "
        f"{found.question.workload} text; ≈ {found.short.tokens_per_s:.0f} at {min(SHORT, ask.context)} tokens of "
        f"context; physical limit {s.limit:.0f}.",
        width,
    )
    yield from _wrap(_corrected(found), width)
    if found.cold is not None:
        new = "as asked" if found.question.fresh else "all but a turn of each prompt cached"
        yield from _wrap(
            f"Prompts count: {s.prompts_s:.1f} s of them between answers of {s.answer} tokens ({new}); with every "
            f"prompt cold ≈ {found.cold.tokens_per_s:.1f} tok/s.",
            width,
        )
    if ask.draft.drafting:
        assumed = ", acceptance assumed" if found.acceptance.assumed else ""
        yield from _wrap(
            f"{found.acceptance.tokens_per_step:.2f} tokens per step ({found.acceptance.said_by}{assumed}).", width
        )
    if ask.engine == "stoker":
        yield from _wrap(
            "Stoker's engine has not been measured on this box; its steps are assumed to cost vLLM's.", width
        )
    first = ", ".join(f"{n:,}: {sec:.1f} s" for n, sec in found.first_token.items())
    yield from _wrap(f"First token of a cold prompt, predicted, by tokens: {first}.", width)


def _corrected(found: Answer) -> str:
    if not found.correction.towards:
        return ""
    rows = found.correction.towards[:4]
    more = f" and {len(found.correction.towards) - 4} more" if len(found.correction.towards) > 4 else ""
    said = ", ".join(f"{row.id} {row.decode_tok_s:g}" for row in rows)
    return (
        f"Corrected: the arithmetic alone says {found.speed.uncorrected:.1f}; measured runs of this recipe lie outside "
        f"its range ({said}{more})."
    )


def _drafts(found: Answer, width: int) -> Iterator[str]:
    yield from _wrap(f"Drafter: {found.ask.draft}, {found.choice.because}.", width)
    if len(found.compared) < 2:
        return
    yield f"{'drafts':<12}{'general tok/s':>15}{'agent tok/s':>13}{'limit':>7}"
    for line in found.compared:
        mark = "*" if line.draft == found.ask.draft else ""
        general, agent = f"≈ {line.general.tokens_per_s:.1f}", f"≈ {line.agent.tokens_per_s:.1f}"
        yield f"{str(line.draft) + mark:<12}{general:>15}{agent:>13}{line.agent.limit:>7.0f}"


def _evidence(rows: Sequence[Row], width: int) -> Iterator[str]:
    if not rows:
        yield from _wrap("Nobody published a measurement of this model that we know of.", width)
        return
    yield "Measured nearest to it (tok/s, box, recipe, text, grade):"
    for row in rows:
        head = f"{row.decode_tok_s:>6g}  {place(row)}, "
        tail = f" ({row.evidence}) {row.id}"
        room = width - len(head) - len(tail)
        yield head + _cut(f"{short(row)}; {row.workload}", room).ljust(room) + tail


def place(row: Row) -> str:
    count = f"{row.boxes}x " if row.boxes > 1 else ""
    users = f" {row.users} users" if row.users > 1 else ""
    return f"{count}{row.box}{users}"


def short(row: Row) -> str:
    """Weights and drafter, as the planner calls them."""
    depth = f":{row.depth}" if row.drafter != "none" and row.depth else ""
    draft = "" if row.drafter == "none" else f" {row.drafter}{depth}"
    context = f" @{row.context_tokens // 1000}K" if row.context_tokens and row.context_tokens >= 1000 else ""
    return f"{row.weights or row.weights_stated or '?'}{draft}{context}"


def _measured(row: Row) -> str:
    users = f", {row.users} users {'together' if row.scope == 'aggregate' else 'each'}" if row.users > 1 else ""
    context = f" at {row.context_tokens:,} tokens" if row.context_tokens else ""
    steps = f", {row.tokens_per_step:g} per step" if row.drafter != "none" and row.tokens_per_step else ""
    return f"{row.decode_tok_s:g} tok/s on {place(row)}{context}{users}{steps}"


def _memory(found: Answer, width: int) -> Iterator[str]:
    parts: dict[str, int] = {}
    for label, _, size in segments(found):
        parts[label] = parts.get(label, 0) + size
    said = ", ".join(f"{label} {size / GIB:.1f}" for label, size in parts.items())
    yield from _wrap(f"GiB: {said}; {found.budget.total / GIB:.1f} in all.", width)


def _conflicts(found: Answer) -> Iterator[str]:
    disputed = [finding.topic for finding in found.compat if finding.conflicting]
    if disputed:
        yield f"{' and '.join(disputed)}: sources contradict each other (--explain)."
    for finding in found.compat:
        if finding.verdict == "does not work":
            rule = finding.standing[0] if finding.standing else finding.rules[0]
            yield f"{finding.topic}: {rule.statement}."


def _urgent(advice: Advice, found: Answer) -> bool:
    return advice.urgent or not found.fits


def _compat(found: Answer, width: int) -> Iterator[str]:
    for finding in found.compat:
        yield f"{finding.topic}: {finding.verdict}"
        for rule in finding.standing or finding.rules[:1]:
            said = "works" if rule.works else "does not"
            yield from _wrap(f"  {said}: {rule.statement} ({rule.engine}, {rule.date}, {rule.source})", width, "    ")


def _commands(found: Answer, width: int) -> Iterator[str]:
    for command in found.commands:
        if command.line:
            yield from folded(command.line, width)
        if command.what:
            yield from _wrap(f"    # {command.what}", width, "    # ")


def folded(line: str, width: int) -> Iterator[str]:
    """A command over several lines that a shell reads as one."""
    words = _arguments(line)
    current = f"  {words[0]}"
    for word in words[1:]:
        if len(current) + 1 + len(word) > width - 2:
            yield f"{current} \\"
            current = f"    {word}"
        else:
            current += f" {word}"
    yield current


def _arguments(line: str) -> list[str]:
    """An option and its value stay together."""
    first, *options = line.split(" --")
    return [first, *(f"--{option}" for option in options)]


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(0, room - 1)] + "…"
