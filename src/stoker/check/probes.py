"""Does an answer depend on what it must not depend on? The same question beside seven others, with the same seed again,
and with drafts switched off.

Many engines change a greedy answer with the batch it is computed in: that is counted and told. It is a concern where
the answers get worse by it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.bench.answer import read
from stoker.bench.target import Target
from stoker.check import sanity
from stoker.check.checkers import Reply, judge
from stoker.check.items import Item
from stoker.check.record import Sanity
from stoker.check.run import Runner
from stoker.check.suites import PROBE_TOKENS
from stoker.errors import BenchError

ASKED = 8  # questions, which are also how many are asked at once
TOKENS = PROBE_TOKENS // (5 * ASKED)  # of an answer: each question is answered five times
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 26}
# What switches drafts off for one request: Stoker's field, llama.cpp's.
UNDRAFTED: dict[str, Any] = {"draft": False, "speculative.n_max": 0}
BESIDE, SEED, DRAFTS = "changed beside seven others", "changed with the same seed", "changed without drafts"


@dataclass
class Found:
    """Of one server and one probe."""

    changed: int = 0
    of: int = 0
    worse: int = 0  # right before, wrong now, or with a sign of a broken answer that was not there
    better: int = 0
    failed: int = 0  # questions without an answer
    notes: list[str] = field(default_factory=list)


async def probes(runner: Runner, items: Sequence[Item]) -> list[Sanity]:
    """A row for each probe, with the counts of every server that could be asked."""
    chosen = choose(items)
    if not chosen:
        return []
    runner.watcher.phase("sanity", len(runner.targets) * len(chosen) * 4)
    found: dict[str, dict[str, Found]] = {BESIDE: {}, SEED: {}, DRAFTS: {}}
    for target in runner.targets:
        asker = _Asker(runner, target, chosen)
        alone = [await asker.one(item) for item in chosen]
        together = await asyncio.gather(*map(asker.one, chosen))
        found[BESIDE][target.name] = asker.compare(alone, together)
        found[SEED][target.name] = asker.compare(
            [await asker.one(item, **SAMPLED) for item in chosen], [await asker.one(item, **SAMPLED) for item in chosen]
        )
        found[DRAFTS][target.name] = await asker.undrafted(alone)
    return [row(name, servers) for name, servers in found.items()]


def choose(items: Sequence[Item]) -> list[Item]:
    """Short questions, of as many suites as there are."""
    by_suite: dict[str, list[Item]] = {}
    for item in items:
        if item.filler is None:
            by_suite.setdefault(item.suite, []).append(item)
    chosen: list[Item] = []
    while len(chosen) < ASKED and any(by_suite.values()):
        for found in by_suite.values():
            if found and len(chosen) < ASKED:
                chosen.append(found.pop(0))
    return chosen


def row(name: str, servers: dict[str, Found]) -> Sanity:
    notes = [f"{server}: {note}" for server, each in servers.items() for note in each.notes]
    for server, each in servers.items():
        if each.worse or each.better:
            notes.append(f"{each.worse} of these became worse on {server}, {each.better} better")
    first = next(iter(servers.values()))
    expected_same = name != BESIDE
    return Sanity(
        name=name,
        counts={server: each.changed for server, each in servers.items()},
        of={server: each.of for server, each in servers.items()},
        concern=first.worse > first.better + 1
        or (expected_same and 2 * first.changed > first.of)
        or first.failed > first.of,
        note="; ".join(notes),
    )


class _Asker:
    """Asks one server."""

    def __init__(self, runner: Runner, target: Target, items: Sequence[Item]) -> None:
        self.runner, self.target, self.items = runner, target, items
        self.drafted = 0  # tokens, in the answers since it was last set to 0
        self.tells = False  # whether the server says how many tokens it drafted

    async def one(self, item: Item, **more: Any) -> Reply:
        body = {
            "messages": item.messages,
            "max_tokens": TOKENS,
            **self.runner.switch.get(self.target.name, {}),
            **({"tools": item.tools} if item.tools else {}),
            **more,
        }
        answer = read(await self.target.ask(body))
        self.runner.watcher.step()
        told = answer.speculation or {}
        if isinstance(told.get("num_draft_tokens"), int):
            self.tells, self.drafted = True, self.drafted + told["num_draft_tokens"]
        if answer.failure is not None and answer.failure.kind != "empty":
            return Reply(failure=f"{answer.failure.kind}: {answer.failure.message}"[:400])
        calls = [call for _, call in sorted(answer.calls.items())]
        return Reply(answer.content, calls, answer.reasoning, answer.finish_reason)

    def compare(self, before: Sequence[Reply], after: Sequence[Reply]) -> Found:
        found = Found()
        for item, first, second in zip(self.items, before, after, strict=True):
            if first.failure or second.failure:
                continue
            found.of += 1
            if (first.text, first.calls, first.reasoning) == (second.text, second.calls, second.reasoning):
                continue
            found.changed += 1
            change = _quality(item, second) - _quality(item, first)
            found.worse += change < 0
            found.better += change > 0
        found.failed = len(before) - found.of
        if found.failed:
            found.notes.append(f"{found.failed} of {len(before)} questions failed")
        return found

    async def undrafted(self, alone: Sequence[Reply]) -> Found:
        """With and without drafts, where the server's own counts show that the switch did something."""
        if not self.tells:
            return Found(notes=["does not tell of drafts"])
        if not self.drafted:
            return Found(notes=["drafted nothing"])
        self.drafted = 0
        try:
            off = [await self.one(item, **UNDRAFTED) for item in self.items]
        except BenchError as error:
            return Found(notes=[f"cannot switch drafts off: {error}"])
        if all(reply.failure for reply in off):
            return Found(notes=["refuses to switch drafts off for a request"])
        if self.drafted:
            return Found(notes=[f"has no switch for drafts: {self.drafted} tokens were drafted all the same"])
        return self.compare(alone, off)


def _quality(item: Item, reply: Reply) -> int:
    """Signs of a broken answer count against it; a right answer for it. Cut answers are wrong before and after."""
    signs = [sign for sign in sanity.problems(item, reply, True) if sign != "cut off"]
    return int(judge(item.checker, item.expect, reply).passed) - len(signs)
