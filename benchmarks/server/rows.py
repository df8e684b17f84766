"""The rows that served speed is compared by, asked of any OpenAI-compatible server: how fast answers run for one stream
and for several, how long prompts take, what a turn of an agent costs behind a cached past.

Prompts are random words, so that nothing is cached unless it is meant to be. Tokens are those of `usage`. Decoding is
timed from the first token to the last; a prompt by its first token. Every answer must have the tokens it was asked for.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp

TIMEOUT_S = 900.0
DECODED = 512  # tokens of an answer whose decoding is timed
SHORT = 106  # tokens of a prompt that hardly matters
PROMPTS = (106, 4252, 16952, 25283, 100_000)
AGENT, AGENT_OUT = 6300, 128
PASTS = (6300, 25_300, 100_000)
BESIDE = 25_000  # tokens of a prompt that is computed while a stream runs
MORE, TURN_OUT = 430, 256
WORDS = """
    time person year way day thing man world life hand part child eye woman place work week case point company number
    group problem fact good new first last long great little own other old right big high different small large next
    early young important few public bad same able go see know take think come give look use find want tell put mean
    become leave need feel seem ask show try call keep hold turn follow begin bring like going help start run write set
    move play pay hear include believe allow meet lead live stand happen carry talk appear produce sit offer water room
    mother area money story month book night study home side kind head house service friend father power
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Answered:
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_s: float  # until the first token
    decode_s: float  # from there to the last
    longest_gap_s: float
    started: float  # on the clock of all
    ended: float

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - 1) / max(self.decode_s, 1e-9)


class Asker:
    """One client of one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self._url, self._model = session, url, model
        self._per_word = 1.07  # tokens; corrected by every text that is fitted

    @classmethod
    async def connect(cls, session: aiohttp.ClientSession, url: str) -> "Asker":
        async with session.get(f"{url}/v1/models") as response:
            found = await response.json()
        return cls(session, url, found["data"][0]["id"])

    async def text(self, tokens: int, seed: int) -> str:
        """Random words of about so many tokens, by the server's own tokenizer."""
        words = random.Random(seed).choices(WORDS, k=int(2 * tokens / self._per_word) + 8)
        for _ in range(3):
            count = round(tokens / self._per_word)
            body = {"model": self._model, "prompt": " ".join(words[:count])}
            async with self._session.post(f"{self._url}/tokenize", json=body) as response:
                found = (await response.json())["count"]
            self._per_word = found / count
            if abs(found - tokens) <= max(2, tokens // 500):
                break
        return " ".join(words[:count])

    async def ask(self, prompt: str, tokens: int) -> Answered:
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        started = time.perf_counter()
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise SystemExit(f"{response.status}: {(await response.text())[:400]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"the server answered {event['error']}")
                usage = event.get("usage") or usage
                if event.get("choices"):
                    arrivals.append(time.perf_counter())
        if usage.get("completion_tokens") != tokens:
            raise SystemExit(f"{tokens} tokens were asked for and {usage.get('completion_tokens')} came.")
        gaps = [after - before for before, after in pairwise(arrivals)]
        details = usage.get("prompt_tokens_details") or {}
        return Answered(
            usage["prompt_tokens"],
            details.get("cached_tokens") or 0,
            tokens,
            arrivals[0] - started,
            arrivals[-1] - arrivals[0],
            max(gaps, default=0.0),
            started,
            arrivals[-1],
        )

    async def together(self, prompts: Sequence[str], tokens: int) -> list[Answered]:
        return list(await asyncio.gather(*(self.ask(prompt, tokens) for prompt in prompts)))


def row(name: str, answers: Sequence[Answered], **more: Any) -> dict[str, Any]:
    found = {
        "name": name,
        "streams": len(answers),
        "prompt_tokens": answers[0].prompt_tokens,
        "cached_tokens": answers[0].cached_tokens,
        "completion_tokens": answers[0].tokens,
        "first_token_s": round(statistics.mean(each.first_s for each in answers), 4),
        "seconds": round(max(each.ended for each in answers) - min(each.started for each in answers), 4),
        "tokens_per_s_each": round(statistics.mean(each.tokens_per_s for each in answers), 1),
        **more,
    }
    print(
        f"{name:52} first token {found['first_token_s']:7.3f} s, all {found['seconds']:7.3f} s, "
        f"{found['tokens_per_s_each']:6.1f} tokens/s each, {found['cached_tokens']:,} of "
        f"{found['prompt_tokens']:,} cached" + "".join(f", {key} {value}" for key, value in more.items()),
        flush=True,
    )
    return found


async def measure(
    url: str,
    streams: Sequence[int] = (1, 2, 4, 8),
    prompts: Sequence[int] = PROMPTS,
    pasts: Sequence[int] = PASTS,
    agents: int = 4,
) -> list[dict[str, Any]]:
    """All rows, in an order that leaves nothing behind for the next."""
    rows: list[dict[str, Any]] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        asker = await Asker.connect(session, url)
        row("warm-up, not counted", [await asker.ask(await asker.text(SHORT, 1), 64)])
        for count in streams:
            texts = [await asker.text(SHORT, 100 * count + each) for each in range(count)]
            rows.append(row(f"decode, {count} at once", await asker.together(texts, DECODED)))
        for tokens in prompts:
            found = min([await asker.ask(await asker.text(tokens, seed), 2) for seed in _seeds(tokens)], key=_first)
            rows.append(row(f"prompt of {found.prompt_tokens:,}", [found]))
        for past in pasts:
            text = await asker.text(past, 7)
            await asker.ask(text, 8)
            turns = [f"{text} {await asker.text(MORE, 50 + each)}" for each in range(2)]
            found = min(
                [await asker.ask(turn, TURN_OUT) for turn in turns], key=lambda answer: answer.ended - answer.started
            )
            rows.append(row(f"turn: {MORE} more, {TURN_OUT} out, behind {found.cached_tokens:,}", [found]))
        if agents:
            texts = [await asker.text(AGENT, 900 + each) for each in range(agents)]
            rows.append(row(f"{agents} agents at once, cold", await asker.together(texts, AGENT_OUT)))
            rows.append(await _beside(asker, BESIDE))
    return rows


async def _beside(asker: Asker, tokens: int) -> dict[str, Any]:
    """A stream that runs while a long prompt is computed."""
    text, long = await asker.text(SHORT, 31), await asker.text(tokens, 32)
    running = asyncio.create_task(asker.ask(text, 2 * DECODED))
    await asyncio.sleep(0.5)
    prompt = await asker.ask(long, 2)
    stream = await running
    gap = {"longest_gap_s": round(stream.longest_gap_s, 4), "first_token_of_prompt_s": round(prompt.first_s, 3)}
    return row(f"a stream beside a prompt of {prompt.prompt_tokens:,}", [stream], **gap)


def _first(answer: Answered) -> float:
    return answer.first_s


def _seeds(tokens: int) -> range:
    """The better of two prompts counts, but for very long ones."""
    return range(tokens, tokens + (2 if tokens < 50_000 else 1))
