"""Asks every server every item, judges the answers, and goes on where an interrupted check stopped."""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stoker.bench import texts
from stoker.bench.answer import count, needs_tokenizer, read
from stoker.bench.fit import fit
from stoker.bench.journal import Journal
from stoker.bench.target import Target
from stoker.bench.tokens import Refused
from stoker.check import sanity
from stoker.check.checkers import Reply, judge
from stoker.check.items import Filler, Item, Message
from stoker.check.record import Asked, Judged
from stoker.errors import BenchError

SHOWN = 4000  # characters of a question that are kept
GIVE_UP = 8  # requests to a server that fail one after another, if none before succeeded or nobody listens any more
GONE = ("connection", "timeout")  # kinds of failure
STOPPED = "Stopped early:"
THINKING_TOKENS = 4096  # that an answer may be longer with thinking on
Found = TypeVar("Found")
OFF: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}


class Watcher:
    """Is told of progress and does nothing; `progress.Bar` draws it."""

    def started(self, tokens: int, done: int) -> None: ...
    def item_done(self, item: Item, asked: Asked) -> None: ...
    def phase(self, name: str, total: int) -> None: ...
    def step(self) -> None: ...


@dataclass
class Runner:
    targets: Sequence[Target]
    items: Sequence[Item]
    journal: Journal[Asked]
    thinking: bool = False
    streams: int = 1  # items asked at a time
    budget: int | None = None  # output tokens of a server; items beyond that are left out
    watcher: Watcher = field(default_factory=Watcher)
    answers: list[Asked] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    switch: dict[str, dict[str, Any]] = field(default_factory=dict)  # what turns thinking off, by server
    _failing: Counter[str] = field(default_factory=Counter)
    _sound: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Fills `answers`. Those that came to their end are kept if it is cancelled (Ctrl-C) or a server fails."""
        kept = {key: entries[0] for key, entries in self.journal.rounds.items() if _sound(entries[0])}
        self.answers = [kept[item.id] for item in self.items if item.id in kept]
        left = [item for item in in_turns(self.items) if item.id not in kept]
        self.watcher.started(sum(item.cost for item in self.items), sum(i.cost for i in self.items if i.id in kept))
        try:
            await self._find_switches()
            await self._ask_all(left)
        except asyncio.CancelledError:
            _uncancel()
            self.interrupted = True
        except BenchError as error:
            if not self.answers:
                raise
            self.interrupted = True
            self.notes.append(f"{STOPPED} {error}")
        self._in_order()

    async def further(self, work: Coroutine[Any, Any, Found]) -> Found | None:
        """What comes after the items: nothing if the check has been interrupted, or is now."""
        if self.interrupted:
            work.close()
            return None
        try:
            return await work
        except asyncio.CancelledError:
            _uncancel()
            self.interrupted = True
        except BenchError as error:
            self.notes.append(str(error))
        return None

    def _in_order(self) -> None:
        order = {item.id: place for place, item in enumerate(self.items)}
        self.answers.sort(key=lambda asked: order[asked.id])

    def spent(self, server: str) -> int:
        return sum(asked.replies[server].reply.tokens for asked in self.answers if server in asked.replies)

    @property
    def thought(self) -> str:
        if self.thinking:
            return "on"
        could = all(self.switch.get(target.name) for target in self.targets)
        return "off" if could else "could not be switched off"

    async def _find_switches(self) -> None:
        """Servers that know no chat_template_kwargs refuse a request with it."""
        if self.thinking:
            return
        for target in self.targets:
            try:
                await target.prompt_tokens({"messages": [{"role": "user", "content": "Hi"}], **OFF})
                self.switch[target.name] = OFF
            except Refused:
                self.switch[target.name] = {}
            except BenchError:  # no usage in the answer, but it was taken
                self.switch[target.name] = OFF

    async def _ask_all(self, items: list[Item]) -> None:
        waiting = list(reversed(items))

        async def stream() -> None:
            while waiting:
                if self.budget is not None and any(self.spent(t.name) >= self.budget for t in self.targets):
                    return
                await self._one(waiting.pop())

        streams = [asyncio.ensure_future(stream()) for _ in range(self.streams)]
        try:
            await asyncio.gather(*streams)
        finally:
            for each in streams:
                each.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        if waiting:
            self.notes.append(
                f"{len(waiting)} items were left out: answers took "
                f"{max(self.spent(t.name) for t in self.targets):,} output tokens, and {self.budget:,} are set aside. "
                "--suite full asks all."
            )

    async def _one(self, item: Item) -> None:
        messages = await self.messages(item)
        replies = await asyncio.gather(*(self.ask(target, item, messages) for target in self.targets))
        judged = await asyncio.gather(*(self._judge(item, reply) for reply in replies))
        asked = Asked(
            id=item.id,
            suite=item.suite,
            kind=item.kind,
            digest=digest(item, messages),
            question=shown(messages),
            expect=item.expect,
            replies={target.name: each for target, each in zip(self.targets, judged, strict=True)},
        )
        self.answers.append(asked)
        self.journal.add(item.id, [asked])
        self.watcher.item_done(item, asked)
        self._watch(asked)

    async def messages(self, item: Item) -> list[Message]:
        """With the text around its facts, as long as the first server's tokenizer says."""
        return await filled(item, self.targets[0]) if item.filler else item.messages

    async def ask(self, target: Target, item: Item, messages: list[Message], **more: Any) -> Reply:
        body = {
            "messages": messages,
            "max_tokens": item.max_tokens + (THINKING_TOKENS if self.thinking else 0),
            **self.switch.get(target.name, {}),
            **more,
        }
        if item.tools:
            body["tools"] = item.tools
        began = time.monotonic()
        answer = read(await target.ask(body))
        seconds = time.monotonic() - began
        if answer.failure is not None and answer.failure.kind != "empty":
            return Reply(failure=f"{answer.failure.kind}: {answer.failure.message}"[:400], seconds=seconds)
        cheap = needs_tokenizer(answer) and target.counter.cheap
        count(answer, await target.counter.text(answer.text) if cheap else None)
        calls = [call for _, call in sorted(answer.calls.items())]
        return Reply(
            text=answer.content,
            calls=calls,
            reasoning=answer.reasoning,
            finish=answer.finish_reason,
            tokens=answer.tokens or 0,
            seconds=seconds,
        )

    async def _judge(self, item: Item, reply: Reply) -> Judged:
        if reply.failure:
            return Judged(reply, None, reply.failure, [])
        mark = await asyncio.to_thread(judge, item.checker, item.expect, reply)
        return Judged(reply, mark.score, mark.why, sanity.problems(item, reply, self.thinking))

    def _watch(self, asked: Asked) -> None:
        for server, judged in asked.replies.items():
            if judged.score is not None:
                self._sound.add(server)
            self._failing[server] = 0 if judged.score is not None else self._failing[server] + 1
            if self._failing[server] < GIVE_UP:
                continue
            if server not in self._sound:
                raise BenchError(f"the first {GIVE_UP} requests to server {server} all failed: {judged.why}")
            if judged.why.startswith(GONE):
                raise BenchError(f"the last {GIVE_UP} requests to server {server} all failed: {judged.why}")


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


def _sound(asked: Asked) -> bool:
    """Items with a failed request are asked again when a check goes on."""
    return all(judged.score is not None for judged in asked.replies.values())


def in_turns(items: Sequence[Item]) -> list[Item]:
    """Suites take turns, in proportion, so that an interrupted check has some of each."""
    sizes, seen = Counter(item.suite for item in items), Counter[str]()
    order: list[tuple[float, int, Item]] = []
    for item in items:
        seen[item.suite] += 1
        order.append((seen[item.suite] / sizes[item.suite], len(order), item))
    return [item for _, _, item in sorted(order, key=lambda each: each[:2])]


async def filled(item: Item, target: Target) -> list[Message]:
    assert item.filler is not None
    filler, *others = item.filler, *item.messages[:-1]
    asked = str(item.messages[-1]["content"])

    def render(text: str) -> dict[str, Any]:
        told = asked.replace("{text}", placed(text, filler))
        body: dict[str, Any] = {"messages": [*others, {"role": "user", "content": told}]}
        return {**body, "tools": item.tools} if item.tools else body

    material = texts.Material(texts.prose, filler.seed)
    body, _ = await fit(render, material, filler.tokens - item.max_tokens, target.counter)
    messages: list[Message] = body["messages"]
    return messages


def placed(text: str, filler: Filler) -> str:
    """The sentences among those of the text, each as deep as it should be."""
    ends = [0, *(place + 2 for place in range(len(text) - 1) if text[place : place + 2] == ". ")]
    for depth, sentence in sorted(filler.sentences, reverse=True):
        at = min(ends, key=lambda end: abs(end - depth * len(text)))
        text = f"{text[:at]}{sentence} {text[at:]}"
    return text


def digest(item: Item, messages: list[Message]) -> str:
    said = json.dumps([messages, item.tools, item.checker, item.expect], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def shown(messages: list[Message]) -> str:
    text = str(messages[-1].get("content") or "")
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}\n…\n{text[-SHOWN // 2 :]}"
