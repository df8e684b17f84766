"""Runs a plan: a warm-up, then measured rounds, servers taking turns. Finished requests outlive an interruption."""

import asyncio
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from stoker.bench import agent, replay
from stoker.bench.answer import Answer, count, needs_tokenizer, read
from stoker.bench.journal import Journal
from stoker.bench.measure import counter_gain, spread_metric_steps, to_request
from stoker.bench.overhead import Overhead, Power
from stoker.bench.record import Request
from stoker.bench.suites import Cell, Options, Plan
from stoker.bench.target import Target
from stoker.bench.wire import Exchange
from stoker.bench.workloads import WORKLOADS, Prompt, Prompts, depth_prompts
from stoker.errors import BenchError

OnAnswer = Callable[[Request, Answer], None]


class Watcher:
    """Is told of progress and does nothing; `progress.Bars` draws it."""

    def round_started(self, cell: Cell, server: str, number: int) -> None: ...
    def fitting_prompts(self) -> None: ...
    def request_done(self, ok: bool) -> None: ...
    def round_done(self, cell: Cell, server: str, number: int, requests: Sequence[Request]) -> None: ...


@dataclass
class Finished:
    """A request that is over, whatever came of it."""

    prompt: Prompt
    exchange: Exchange
    variant: str
    depth: int | None
    turn: replay.Turn | None = None  # of a recorded session


@dataclass
class Runner:
    targets: Sequence[Target]
    plan: Plan
    options: Options
    journal: Journal[Request]
    salt: str
    watcher: Watcher = field(default_factory=Watcher)
    power: Power | None = None
    on_answer: OnAnswer | None = None  # gets every answer, with its token ids
    own: dict[str, list[Prompt]] = field(default_factory=dict)  # prompts given by the user, by cell name
    sessions: Sequence[replay.Session] = ()  # recorded ones, for cells that replay them
    overhead: Overhead = field(default_factory=Overhead)
    requests: list[Request] = field(default_factory=list)
    interrupted: bool = False
    stop_reason: str = ""  # why it stopped early, unless it was interrupted

    async def run(self) -> None:
        """Fills `requests`. Those that came to their end are kept if it is cancelled (Ctrl-C) or the server fails."""
        self.requests = list(self.journal.requests)
        self._begin = self.targets[0].clock() - max((r.started_s + (r.total_s or 0) for r in self.requests), default=0)
        # all servers get the same prompts, but no server gets a prompt twice, which its prefix cache would recognise
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
            self.interrupted, self.stop_reason = True, str(error)

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
        self.watcher.round_started(cell, target.name, number)
        finished: list[Finished] = []
        before = await target.scrape()
        gc.disable()  # a collection in the middle would be measured as the server's pause
        requests: list[Request] = []
        try:
            if cell.histories:
                await self._conversation(cell, target, number, finished)
            elif cell.replay:
                await self._replay(cell, target, number, finished)
            elif cell.depth is not None:
                await self._depth(cell, target, finished)
            else:
                await self._streams(cell, target, number, finished)
        finally:
            gc.enable()
            requests = await self._records(cell, target, number, finished)
            if number:
                after = await target.scrape()
                spread_metric_steps(requests, counter_gain(before, after) if after else None)
                self.requests += requests
            self.watcher.round_done(cell, target.name, number, requests)
        return requests

    async def _streams(self, cell: Cell, target: Target, number: int, finished: list[Finished]) -> None:
        self.watcher.fitting_prompts()
        names = cell.workloads or (cell.name,)
        streams = cell.concurrency if cell.rate is None else max(4, round(cell.rate))
        own = self.own.get(cell.name)
        # cold rounds repeat the question behind a new salt; warm rounds ask another question about the same text
        first = number if cell.variant == "warm" else 0
        prompts = [self._capped(prompt) for prompt in own or ()] or [
            self._capped(await self._prompt(cell, target, names[i % len(names)], first + i)) for i in range(streams)
        ]
        await target.open(streams)
        rng = self._prompts[target.name].rng
        loop = asyncio.get_running_loop()

        def salted(prompt: Prompt) -> Prompt:
            return prompt.resalted(rng) if cell.variant == "cold" else prompt

        each = cell.each if number else 1  # one request warms up

        async def stream(place: int, until: float | None) -> None:
            done = 0
            while (until is None and done < each) or (until is not None and loop.time() < until):
                prompt = prompts[(place + done) % len(prompts)]
                await self._ask(target, salted(prompt) if done else prompt, cell.variant, None, finished)
                done += 1

        with self.overhead.measuring(self.power):
            until = loop.time() + cell.seconds if cell.seconds is not None else None
            if cell.rate is None:
                await asyncio.gather(*(stream(place, until) for place in range(streams)))
            else:
                await self._arrivals(cell, target, number, prompts, finished)

    async def _arrivals(
        self, cell: Cell, target: Target, number: int, prompts: list[Prompt], finished: list[Finished]
    ) -> None:
        """Requests start at random moments (a Poisson process of known count, so that the rate is exactly `rate`),
        whether or not earlier ones are answered, and at the same moments for every server."""
        loop, seconds, rate = asyncio.get_running_loop(), cell.seconds or 30.0, cell.rate or 0.0
        chance = Random(f"{self.salt}/{cell.title}/{number}")
        moments = sorted(chance.uniform(0.0, seconds) for _ in range(max(round(rate * seconds), 1)))
        began = loop.time()
        asking: list[asyncio.Future[Exchange]] = []
        try:
            for place, moment in enumerate(moments):
                await asyncio.sleep(max(began + moment - loop.time(), 0))
                prompt = prompts[place % len(prompts)].resalted(self._prompts[target.name].rng)
                asking.append(asyncio.ensure_future(self._ask(target, prompt, "cold", None, finished)))
            await asyncio.gather(*asking)
        except asyncio.CancelledError:
            for task in asking:
                task.cancel()
            raise

    async def _conversation(self, cell: Cell, target: Target, number: int, finished: list[Finished]) -> None:
        """The warm-up round stops after the first length of history."""
        points = cell.histories if number else cell.histories[:1]
        conversation = agent.Conversation(target, f"{self._salts[target.name]}/{number}", self.options.tool_share)
        await target.open(1)
        for turn in agent.turns(points):
            self.watcher.fitting_prompts()
            prompt = self._capped(await conversation.prompt(turn))
            with self.overhead.measuring(self.power):
                variant = "load" if turn.load else "warm"
                exchange = await self._ask(target, prompt, variant, turn.history, finished)
            answer = read(exchange)
            if answer.failure is not None:
                return  # without this answer the following turns have no history
            conversation.answered(answer)

    async def _replay(self, cell: Cell, target: Target, number: int, finished: list[Finished]) -> None:
        """Recorded sessions, turn by turn; as many at a time as there are streams. The warm-up is two turns of one."""
        self.watcher.fitting_prompts()
        salt = f"{self._salts[target.name]}/{number}"
        found = [replay.turns(session, salt) for session in (self.sessions if number else self.sessions[:1])]
        waiting = [await replay.fitting(turns, target) for turns in found]
        left = sum(map(len, found)) - sum(map(len, waiting))
        if left and number == 1:
            self.plan.skipped.append(
                f"{left} recorded turns do not fit the context of {target.name}, {target.context:,}."
            )
        waiting = [turns if number else turns[:2] for turns in reversed(waiting)]
        await target.open(cell.concurrency)

        async def stream() -> None:
            while waiting:
                for turn in waiting.pop():
                    await self._ask(target, self._capped(turn.prompt), turn.variant, None, finished, turn)

        with self.overhead.measuring(self.power):
            await asyncio.gather(*(stream() for _ in range(cell.concurrency)))

    async def _depth(self, cell: Cell, target: Target, finished: list[Finished]) -> None:
        """As llama-benchy with prefix caching: load `depth` tokens of context, then ask with `pp` tokens more."""
        self.watcher.fitting_prompts()
        depth, rng = cell.depth or 0, self._prompts[target.name].rng
        loads, asks = [], []
        for _ in range(cell.concurrency):
            salt = f"{rng.getrandbits(48):012x}"
            load, ask = await depth_prompts(target, cell.name, salt, depth, cell.pp, cell.tg)
            loads.append(load)
            asks.append(ask)
        await target.open(cell.concurrency)
        with self.overhead.measuring(self.power):
            if depth:
                await asyncio.gather(*(self._ask(target, load, "load", depth, finished) for load in loads if load))
            await asyncio.gather(*(self._ask(target, ask, cell.variant, depth, finished) for ask in asks))

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
        self,
        target: Target,
        prompt: Prompt,
        variant: str,
        depth: int | None,
        finished: list[Finished],
        turn: replay.Turn | None = None,
    ) -> Exchange:
        exchange = await target.ask(prompt.body)
        finished.append(Finished(prompt, exchange, variant, depth, turn))
        self.watcher.request_done(exchange.status == 200 and not exchange.failure)
        return exchange

    async def _records(self, cell: Cell, target: Target, number: int, finished: list[Finished]) -> list[Request]:
        """Parses the answers, now that nothing is being timed."""
        requests = []
        watts = sum(self.overhead.watts) / len(self.overhead.watts) if self.overhead.watts else None
        for each in finished:
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
                depth=replay.history(answer.usage_number("prompt_tokens")) if each.turn else each.depth,
                began=self._begin,
                wanted=each.prompt.tokens,
                wants_json=each.prompt.wants_json,
                watts=watts,
                replayed=each.turn.replayed([call for _, call in sorted(answer.calls.items())]) if each.turn else None,
            )
            if answer.speculation is not None:
                target.speculation = "per response"
            requests.append(request)
            if self.on_answer is not None and number:
                self.on_answer(request, answer)
        return requests
