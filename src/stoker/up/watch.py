"""Whether an engine works: it answers, and its tokens advance while requests run. The backoff of restarts."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout
from msgspec import Struct

from stoker.cards import Card, nvidia_cards
from stoker.engines.engine import KEYS, Counters, Deployment, Phase, counters
from stoker.errors import StokerError

log = logging.getLogger("stoker.up")

TIMING = "STOKER_WATCH"  # environment: JSON with other times, for tests
POWER_S, POWER_READINGS = 5.0, 12
LOW_SHARE, LOW_WATTS = 0.12, 20.0  # of a card's limit, and where it states none; decoding draws several times that
IDLE_SHARE = 0.5  # of the patience with an engine without progress whose card draws no power either
INNER_RESTARTS = "stoker:engine_restarts_total"  # of Stoker's own engine process within its server


class Fault(StokerError):
    """Why an engine must be ended, and perhaps started again."""


class Timing(Struct, frozen=True, forbid_unknown_fields=True):
    poll_s: float = 2.0  # between questions
    answer_s: float = 10.0  # that one question may take
    silent_s: float = 30.0  # without an answer, or with "I am down": wedged
    backoff_s: float = 1.0  # before the first restart; doubles with each in a row
    longest_backoff_s: float = 60.0
    stable_s: float = 3600.0  # of health, after which restarts are no longer in a row
    accept_s: float = 1800.0  # that a candidate waits for its acceptance while it keeps another one from serving
    grace_s: float = 10.0  # between SIGTERM and SIGKILL, beyond what requests have to end

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Timing":
        return msgspec.json.decode(environment.get(TIMING, "{}"), type=cls)

    def backoff(self, in_a_row: int) -> float:
        """Seconds before restart number `in_a_row`, from 1."""
        return min(self.longest_backoff_s, self.backoff_s * 2.0 ** min(in_a_row - 1, 30))


class Progress:
    """Whether an engine that has work gets on with it."""

    def __init__(self, now: float) -> None:
        self._since, self._work = now, -1.0

    def see(self, waiting: int, found: Counters | None, now: float) -> float:
        """Seconds without progress. `waiting`: requests that wait for the engine, by the front's own count, since a
        server whose inner engine hangs may go on telling old numbers."""
        busy = found is not None and (waiting or found.running)
        if not busy or found is None or found.work != self._work:
            self._since, self._work = now, found.work if found else self._work
        return now - self._since


class Questions:
    """What an engine is asked over HTTP."""

    def __init__(self, address: str, deployment: Deployment, timing: Timing, keys: Mapping[str, str]) -> None:
        self._address, self._deployment, self._timing = address, deployment, timing
        key = keys.get(KEYS[deployment.engine])
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._session = ClientSession(timeout=ClientTimeout(total=timing.answer_s))

    async def close(self) -> None:
        await self._session.close()

    async def ready(self) -> tuple[bool, Phase | None]:
        """Whether requests are accepted, and the phase that the answer names."""
        try:
            status, body = await self._get(self._deployment.ready_path)
        except (ClientError, OSError, TimeoutError):
            return False, None
        return status == 200, _phase(body)

    async def health(self) -> int:
        """The status of /health."""
        return (await self._get("/health"))[0]

    async def metrics(self) -> tuple[Counters | None, int]:
        """Counters, and how often the server has restarted its inner engine."""
        status, body = await self._get("/metrics")
        text = body.decode("utf-8", "replace")
        if status != 200:
            return None, 0
        restarts = sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(INNER_RESTARTS))
        return counters(text), int(restarts)

    async def _get(self, path: str) -> tuple[int, bytes]:
        async with self._session.get(self._address + path, headers=self._headers) as answer:
            return answer.status, await answer.read()


async def watch(
    ask: Questions,
    deployment: Deployment,
    timing: Timing,
    waiting: Callable[[], int],
    restarted: Callable[[int], None],
    busy: Callable[[bool], None],
    idle: Callable[[], bool] = lambda: False,
) -> None:
    """Watches an engine that is ready until it must be restarted: raises Fault.

    `waiting` counts the requests that wait for it, `restarted` is told how often it has restarted its inner engine
    since the last call, `busy` whether requests run. `idle`: the card draws as little power as if nothing ran on it.
    """
    heard_at = time.monotonic()
    progress = Progress(heard_at)
    inner: int | None = None
    while True:
        await asyncio.sleep(timing.poll_s)
        said = "did not answer /health and /metrics"
        left = heard_at + timing.silent_s - time.monotonic()
        try:
            # Whoever is silent is found when the time is over, and not with the end of the question after that.
            async with asyncio.timeout(left if left > 0 else None):
                status = await ask.health()
                recovers = status != 200 and (await ask.ready())[1] is not None
                found, restarts = await ask.metrics()
        except (ClientError, OSError, TimeoutError):
            status, recovers = 0, False
        else:
            if inner is not None and restarts > inner:
                restarted(restarts - inner)
            inner = restarts
            count = waiting()
            busy(bool(count or (found and found.running)))
            stalled = progress.see(count, found, time.monotonic())
            limit = deployment.stall_s * (IDLE_SHARE if idle() else 1.0)
            if stalled > limit:
                allowed = f"{limit:g} s are allowed" + (" where the card draws little power" if idle() else "")
                raise Fault(f"no token came for {stalled:.0f} s while requests ran, and {allowed}: it is wedged")
            said = f"answered /health with {status}"
        silent = time.monotonic() - heard_at
        if status == 200:
            heard_at = time.monotonic()
        elif silent >= (deployment.start_timeout_s if recovers else timing.silent_s):
            raise Fault(f"it {said} for {silent:.0f} s, and {timing.silent_s:g} s are allowed: it is wedged")


class Power:
    """Whether the card draws power while requests run: a supply that fell back, or clocks that did, looks so."""

    def __init__(self, cards: Callable[[], Sequence[Card]] = nvidia_cards) -> None:
        self.warning = ""
        self.idle = False  # for a minute in which requests ran
        self._cards = cards
        self._watts: list[float] = []  # of the busiest card, readings since requests run without a pause

    async def watch(self, busy: Callable[[], bool]) -> None:
        """Until it is cancelled; returns at once where there is no card."""
        cards = await asyncio.to_thread(self._cards)
        while cards:
            await asyncio.sleep(POWER_S)
            self.read(cards, busy())

    def read(self, cards: Sequence[Card], busy: bool) -> None:
        if not busy:
            self._watts, self.idle = [], False
            return
        watts, busiest = max(((card.watts(), card) for card in cards), key=lambda pair: pair[0])
        self._watts = [*self._watts, watts][-POWER_READINGS:]
        limit = busiest.power_limit()
        low = limit * LOW_SHARE if limit else LOW_WATTS
        self.warning = ""
        self.idle = len(self._watts) == POWER_READINGS and 0.0 < max(self._watts) < low
        if self.idle:
            of = f" of {limit:.0f} W" if limit else ""
            self.warning = (
                f"{busiest.name} drew at most {max(self._watts):.0f} W{of} for a minute in which requests ran: check "
                "its power supply, clocks and temperature (stoker probe)"
            )


def _phase(body: bytes) -> Phase | None:
    """The phase in a JSON answer of /ready."""
    try:
        found: Any = msgspec.json.decode(body)
        name, detail, percent = found["phase"], found.get("detail"), found.get("percent")
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return None
    return Phase(str(name), None if percent is None else float(percent), str(detail or ""))


def environment_timing() -> Timing:
    try:
        return Timing.of(os.environ)
    except msgspec.MsgspecError as error:
        raise StokerError(f"{TIMING} in the environment cannot be read: {error}.") from error
