"""What a benchmark's page says first: one sentence that a person would say, and cards of figures that can be compared.

The detailed sentence for terminals and scripts is the document's own headline (bench/headline.py).
"""

from dataclasses import dataclass

from stoker.bench.headline import agent_rows, general_rows
from stoker.bench.record import Document
from stoker.bench.stats import median
from stoker.bench.summary import known
from stoker.report import figures
from stoker.speculate.assumed import LABEL


@dataclass(frozen=True)
class Card:
    """A figure with what it shows, or the figures of several servers below each other."""

    name: str
    value: str
    note: str
    rows: tuple[tuple[str, str], ...] = ()  # server, value


@dataclass(frozen=True)
class Story:
    """A heading and cards of somebody who knows what the benchmark was for."""

    heading: str
    cards: tuple[Card, ...]


def heading(found: Document) -> str:
    head = found.headline
    if not head.completed:
        return head.text
    servers = found.environment.servers
    if len(servers) == 1:
        text = _one(found)
    elif len(servers) == 2:
        text = _two(found)
    else:
        text = ", ".join(f"{s.name} decodes {speed}" for s in servers if (speed := _speeds(found, s.name)))
    text = f"{text or f'{head.completed} requests completed'}."
    if any(LABEL in row.steps_source for row in found.workloads):
        text = f"{text.removesuffix('.')} ({LABEL})."
    if head.failed:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in head.failures.items())
        text += f" {head.failed} of {head.completed + head.failed} requests FAILED ({kinds})."
    return text if found.complete else f"Interrupted. {text}"


def cards(found: Document) -> list[Card]:
    """One per figure; of several servers, each with every server's."""
    names = [server.name for server in found.environment.servers]
    head = found.headline
    shown = [
        ("General text", "tokens/s of one stream, decoding", [_general(found, name) for name in names], 1),
        ("Tool-call turns", "tokens/s of one stream, decoding", [_agents(found, name) for name in names], 1),
        ("Tokens per step", "accepted drafts and one", [_accepted(found, name) for name in names], 2),
        ("First token", "seconds after a new prompt, median", [_first(found, name) for name in names], None),
    ]
    made = []
    for title, note, values, digits in shown:
        if not any(value is not None for value in values):
            continue
        said = [figures.seconds(each) if digits is None else figures.number(each, digits) for each in values]
        rows = tuple(zip(names, said, strict=True)) if len(names) > 1 else ()
        made.append(Card(title, said[0], note, rows))
    failed = f"{head.failed} failed" if head.failed else "none failed"
    return [*made, Card("Requests", f"{head.completed}", f"completed, {failed}")]


def _one(found: Document) -> str:
    (server,) = found.environment.servers
    speeds = _speeds(found, server.name)
    said = [f"{server.model} decodes {speeds}"] if speeds else []
    if found.turns:
        longest = max(found.turns, key=lambda turn: turn.history_tokens)
        said.append(f"a turn behind {longest.history_tokens / 1000:g}K tokens takes {longest.seconds.p50:.1f} s")
    elif (first := _first(found, server.name)) is not None:
        said.append(f"the first token comes after {figures.seconds(first)} s")
    return "; ".join(said)


def _two(found: Document) -> str:
    rows = [row for row in found.differences if row.metric == "decode_tokens_per_s"]
    if not rows:
        return "The two have no workload in common"
    said = []
    for verdict, words in (("better", "faster"), ("worse", "slower")):
        changes = sorted(abs(row.change) for row in rows if row.verdict == verdict)
        if changes:
            by = " to ".join(dict.fromkeys(f"{change:.0%}" for change in (changes[0], changes[-1])))
            said.append(f"{words} on {len(changes)} of {len(rows)} workloads (by {by})")
    if not said:
        return "B decodes as fast as A as far as these runs can tell"
    return f"B decodes {' and '.join(said)} than A" if len(said) == 1 else f"Against A, B decodes {' and '.join(said)}"


def _speeds(found: Document, server: str) -> str:
    general, turns = _general(found, server), _agents(found, server)
    said = [] if general is None else [f"{general:.0f} tokens/s on general text"]
    said += [] if turns is None else [f"{turns:.0f} on tool calls" if said else f"{turns:.0f} tokens/s on tool calls"]
    return " and ".join(said)


def _general(found: Document, server: str) -> float | None:
    return median(known(row.decode_tokens_per_s for row in general_rows(found.workloads, server)))


def _agents(found: Document, server: str) -> float | None:
    return median(known(row.decode_tokens_per_s for row in agent_rows(found.workloads, server)))


def _accepted(found: Document, server: str) -> float | None:
    rows = general_rows(found.workloads, server) + agent_rows(found.workloads, server)
    return median(known(row.accepted_per_step for row in rows))


def _first(found: Document, server: str) -> float | None:
    return median([row.ttft_s.p50 for row in general_rows(found.workloads, server) if row.ttft_s])
