"""Runs a plan: warm-up, then measured rounds, servers taking turns. Keeps what is finished when it is interrupted."""

import asyncio
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from stoker.bench import agent, texts
from stoker.bench.answer import Answer, count, needs_tokenizer, read
from stoker.bench.fit import Body, fit
from stoker.bench.journal import Journal
from stoker.bench.measure import spread_metric_steps, to_request
from stoker.bench.metrics_page import passed
from stoker.bench.pulse import Power, Pulse
from stoker.bench.record import Request
from stoker.bench.suites import Cell, Options, Plan
from stoker.bench.target import Target
from stoker.bench.wire import Exchange
from stoker.bench.workloads import WORKLOADS, Prompt, Prompts
from stoker.errors import BenchError

Heard = Callable[[Request, Answer], None]


class Watcher(Protocol):
    """Somebody who looks on, such as a progress bar."""

    def round(self, cell: Cell, server: str, number: int) -> None: ...
    def preparing(self, cell: Cell) -> None: ...
    def finished(self, ok: bool) -> None: ...
    def round_done(self, cell: Cell, server: str, number: int, requests: Sequence[Request]) -> None: ...


class Silent:
    def round(self, cell: Cell, server: str, number: int) -> None: ...
    def preparing(self, cell: Cell) -> None: ...
    def finished(self, ok: bool) -> None: ...
    def round_done(self, cell: Cell, server: str, number: int, requests: Sequence[Request]) -> None: ...


@dataclass
class Landed:
    """An exchange that is over, with what was asked."""

    prompt: Prompt
    exchange: Exchange
    variant: str
    depth: int | None


@dataclass
class Runner:
    targets: Sequence[Target]
    plan: Plan
    options: Options
    journal: Journal
    salt: str
    watcher: Watcher = field(default_factory=Silent)
    power: Power | None = None
    heard: Heard | None = None  # gets every answer, with its token ids
    own: dict[str, list[Prompt]] = field(default_factory=dict)  # prompts given by the user, by cell name
    pulse: Pulse = field(default_factory=Pulse)
    requests: list[Request] = field(default_factory=list)
    interrupted: bool = False
    trouble: str = ""  # why it stopped early on its own

    async def run(self) -> None:
        """Fills `requests`. Cancelled (Ctrl-C) or in trouble, it keeps requests that came to their end."""
        self.requests = list(self.journal.requests)
        self._begin = self.targets[0].clock() - max((r.started_s + (r.total_s or 0) for r in self.requests), default=0)
        # servers are asked the same, word for word, but never one server the same twice: its cache would know it
        apart = len({target.url for target in self.targets}) == len(self.targets)
        self._salts = {target.name: self.salt if apart else f"{self.salt}/{target.name}" for target in self.targets}
        self._prompts = {target.name: Prompts(target, self._salts[target.name]) for target in self.targets}
        try:
            for cell in self.plan.cells:
                await self._cell(cell)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            self.interrupted = True
        except BenchError as error:
            if not self.requests:
                raise
            self.interrupted, self.trouble = True, str(error)

    async def _cell(self, cell: Cell) -> None:
        keys = {
            (number, target.name): f"{cell.title}/{target.name}/{number}"
            for number in range(1, cell.rounds + 1)
            for target in self.targets
        }
        if all(key in self.journal.rounds for key in keys.values()):
            return
        for number in range(cell.rounds + 1):
            for target in self.targets:
                key = keys.get((number, target.name))
                if key in self.journal.rounds:
                    continue
                if number == 0 and cell.seconds is not None:
                    continue  # long rounds warm up on their own
                requests = await self._round(cell, target, number)
                if key is not None:
                    self.journal.add(key, requests)

    async def _round(self, cell: Cell, target: Target, number: int) -> list[Request]:
        self.watcher.round(cell, target.name, number)
        landed: list[Landed] = []
        before = await target.scrape()
        gc.disable()  # a collection in the middle would be measured as the server's pause
        requests: list[Request] = []
        try:
            if cell.histories:
                await self._conversation(cell, target, number, landed)
            elif cell.depth is not None:
                await self._depth(cell, target, landed)
            else:
                await self._streams(cell, target, number, landed)
        finally:
            gc.enable()
            requests = await self._records(cell, target, number, landed)
            if number:
                after = await target.scrape()
                spread_metric_steps(requests, passed(before, after) if after else None)
                self.requests += requests
            self.watcher.round_done(cell, target.name, number, requests)
        return requests

    async def _streams(self, cell: Cell, target: Target, number: int, landed: list[Landed]) -> None:
        self.watcher.preparing(cell)
        names = cell.workloads or (cell.name,)
        streams = cell.concurrency if cell.rate is None else max(4, round(cell.rate))
        own = self.own.get(cell.name)
        # cold rounds repeat the question behind another salt; warm ones ask something else of the same text
        first = number if cell.variant == "warm" else 0
        prompts = [self._capped(prompt) for prompt in own or ()] or [
            self._capped(await self._prompt(cell, target, names[i % len(names)], first + i)) for i in range(streams)
        ]
        await target.open(streams)
        dice = self._prompts[target.name].dice
        loop = asyncio.get_running_loop()

        def salted(prompt: Prompt) -> Prompt:
            return prompt.resalted(dice) if cell.variant == "cold" else prompt

        each = cell.each if number else 1  # one is enough to warm up

        async def stream(place: int, until: float | None) -> None:
            done = 0
            while (until is None and done < each) or (until is not None and loop.time() < until):
                prompt = prompts[(place + done) % len(prompts)]
                await self._ask(target, salted(prompt) if done else prompt, cell.variant, None, landed)
                done += 1

        with self.pulse.beating(self.power):
            until = loop.time() + cell.seconds if cell.seconds is not None else None
            if cell.rate is None:
                await asyncio.gather(*(stream(place, until) for place in range(streams)))
            else:
                await self._arrivals(cell, target, number, prompts, landed)

    async def _arrivals(
        self, cell: Cell, target: Target, number: int, prompts: list[Prompt], landed: list[Landed]
    ) -> None:
        """Requests come at random moments (a Poisson process of known count, so that the rate offered is the rate asked
        for), whether or not earlier ones are answered; at the same moments for every server."""
        loop, seconds, rate = asyncio.get_running_loop(), cell.seconds or 30.0, cell.rate or 0.0
        chance = Random(f"{self.salt}/{cell.title}/{number}")
        moments = sorted(chance.uniform(0.0, seconds) for _ in range(max(round(rate * seconds), 1)))
        began = loop.time()
        asking: list[asyncio.Future[Exchange]] = []
        try:
            for place, moment in enumerate(moments):
                await asyncio.sleep(max(began + moment - loop.time(), 0))
                prompt = prompts[place % len(prompts)].resalted(self._prompts[target.name].dice)
                asking.append(asyncio.ensure_future(self._ask(target, prompt, "cold", None, landed)))
            await asyncio.gather(*asking)
        except asyncio.CancelledError:
            for task in asking:
                task.cancel()
            raise

    async def _conversation(self, cell: Cell, target: Target, number: int, landed: list[Landed]) -> None:
        """The warm-up is a conversation as far as the first point."""
        points = cell.histories if number else cell.histories[:1]
        talk = agent.Conversation(target, f"{self._salts[target.name]}/{number}", self.options.tool_share)
        await target.open(1)
        for turn in agent.turns(points):
            self.watcher.preparing(cell)
            prompt = self._capped(await talk.prompt(turn))
            with self.pulse.beating(self.power):
                variant = "load" if turn.load else "warm"
                exchange = await self._ask(target, prompt, variant, turn.history, landed)
            answer = read(exchange)
            if answer.failure is not None:
                return  # the rest of the conversation has no history to stand on
            talk.answered(answer)

    async def _depth(self, cell: Cell, target: Target, landed: list[Landed]) -> None:
        """As llama-benchy with prefix caching: load `depth` tokens of context, then ask with `pp` tokens more."""
        self.watcher.preparing(cell)
        depth, dice = cell.depth or 0, self._prompts[target.name].dice
        loads, asks = [], []
        for _ in range(cell.concurrency):
            salt = f"{dice.getrandbits(48):012x}"
            load, ask = await _depth_prompts(target, cell, salt)
            loads.append(load)
            asks.append(ask)
        await target.open(cell.concurrency)
        with self.pulse.beating(self.power):
            if depth:
                await asyncio.gather(*(self._ask(target, load, "load", depth, landed) for load in loads if load))
            await asyncio.gather(*(self._ask(target, ask, cell.variant, depth, landed) for ask in asks))

    async def _prompt(self, cell: Cell, target: Target, name: str, number: int) -> Prompt:
        prompts = self._prompts[target.name]
        make = prompts.warm if cell.variant == "warm" else prompts.cold
        return await make(WORKLOADS[name], number)

    def _capped(self, prompt: Prompt) -> Prompt:
        most = self.options.max_tokens
        if most is not None:
            prompt.body["max_tokens"] = min(prompt.body["max_tokens"], most)
        return prompt

    async def _ask(
        self, target: Target, prompt: Prompt, variant: str, depth: int | None, landed: list[Landed]
    ) -> Exchange:
        exchange = await target.ask(prompt.body)
        landed.append(Landed(prompt, exchange, variant, depth))
        self.watcher.finished(exchange.status == 200 and not exchange.failure)
        return exchange

    async def _records(self, cell: Cell, target: Target, number: int, landed: list[Landed]) -> list[Request]:
        """Read what came, now that nothing is being timed."""
        requests = []
        watts = sum(self.pulse.watts) / len(self.pulse.watts) if self.pulse.watts else None
        for each in landed:
            answer = read(each.exchange)
            counted = (
                await target.counter.text(answer.text) if needs_tokenizer(answer) and target.counter.cheap else None
            )
            count(answer, counted)
            request = to_request(
                answer,
                each.exchange,
                server=target.name,
                workload=each.prompt.workload if cell.histories or not cell.workloads else cell.name,
                variant=each.variant,
                concurrency=cell.concurrency,
                round=number,
                rate=cell.rate,
                depth=each.depth,
                began=self._begin,
                wanted=each.prompt.tokens,
                wants_json=each.prompt.wants_json,
                watts=watts,
            )
            if answer.speculation is not None:
                target.speculation = "per response"
            requests.append(request)
            if self.heard is not None and number:
                self.heard(request, answer)
        return requests


async def _depth_prompts(target: Target, cell: Cell, salt: str) -> tuple[Prompt | None, Prompt]:
    material = texts.Material(texts.prose, salt)
    name, depth, context = cell.name, cell.depth or 0, ""

    def loading(filler: str) -> Body:
        return {"messages": [{"role": "system", "content": f"{salt} {filler}"}, {"role": "user", "content": "."}]}

    load: Prompt | None = None
    if depth:
        body, tokens = await fit(loading, material, depth, target.counter)
        context = body["messages"][0]["content"]
        load = Prompt(name, json.loads(json.dumps({**body, "max_tokens": cell.tg})), tokens)

    def asking(filler: str) -> Body:
        before = [{"role": "system", "content": context}] if depth else []
        task = f"{'' if depth else salt} {filler}\n\nContinue this text in the same manner, at length."
        return {"messages": [*before, {"role": "user", "content": task}], "max_tokens": cell.tg}

    more = texts.Material(texts.prose, f"{salt}+")
    body, tokens = await fit(asking, more, depth + cell.pp, target.counter)
    return load, Prompt(name, body, tokens)
