"""The smoke test of an engine that has just started: does it answer, call tools, and cache without changing answers.

A streamed chat answer, a tool call, one long prompt twice (cache hits counted, tokens compared), and a fixed greedy
answer whose hash goes into the receipt.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from msgspec import Struct

from stoker.bench import texts
from stoker.bench.answer import Answer, read
from stoker.bench.fit import fit
from stoker.bench.target import Target
from stoker.errors import BenchError, StokerError

LONG = 2048  # tokens of the long prompt, at most a quarter of the context
ANSWER = 64  # tokens of an answer
THINKING = 1024  # and of one that may think before it calls a tool
EARLY = 8  # an answer behind cached tokens must be right for so many tokens, whatever the engine's rounding
HITS = "prefix_cache_hits_total"
CHAT = "In two sentences: why does a kettle sing before it boils?"
GREEDY = "List the days of the week, one per line, and nothing else."
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city."}},
            "required": ["city"],
        },
    },
}


class SmokeError(StokerError):
    """An engine that started and does not do what a service must."""


class Smoke(Struct):
    """What the smoke test saw. Token counts are the engine's."""

    chat_tokens: int = 0
    first_token_s: float = 0.0
    tool_call: str = ""  # as it was made
    tool_choice: str = ""  # auto, or required where auto is not served or made no call
    long_prompt_tokens: int = 0
    cached_tokens: int | None = None  # of the second time; None: the engine does not count them
    identical: bool = False  # both answers, token for token
    context: int | None = None  # most tokens of a request
    greedy_sha256: str = ""
    greedy_text: str = ""
    notes: list[str] = []


async def smoke_test(target: Target, caches: bool, exact: bool, told: Callable[[str], None]) -> Smoke:
    """Raises SmokeError with what went wrong.

    `caches`: prompts must be found again. `exact`: an answer behind a cached prompt must be the same to the token;
    engines that round otherwise there may differ after the first few.
    """
    found = Smoke()
    told("a streamed chat answer")
    await _chat(target, found)
    told("a tool call")
    await _tool(target, found)
    told("one long prompt twice")
    await _twice(target, found, caches, exact)
    told("a fixed greedy answer")
    answer = await _ask(target, "the fixed greedy answer", {"messages": _user(GREEDY), "max_tokens": ANSWER})
    found.greedy_sha256, found.greedy_text = answer.digest, answer.text[:200]
    return found


async def _chat(target: Target, found: Smoke) -> None:
    exchange = await target.ask({"messages": _user(CHAT), "max_tokens": ANSWER})
    answer = _checked("a streamed chat answer", read(exchange))
    found.chat_tokens = answer.usage_number("completion_tokens") or len(answer.ids) or len(answer.chunks)
    found.first_token_s = round(answer.chunks[0].at - exchange.sent, 3)
    if len(answer.chunks) < 2 and found.chat_tokens > ANSWER // 2:
        raise SmokeError(f"the chat answer of {found.chat_tokens} tokens came in one piece: it was not streamed.")
    if not answer.finish_reason:
        raise SmokeError("the chat answer ended without a finish_reason.")


async def _tool(target: Target, found: Smoke) -> None:
    asked = {"messages": _user("What is the weather in Paris? Use the tool."), "tools": [TOOL], "max_tokens": THINKING}
    for choice in ("auto", "required"):
        answer = read(await target.ask({**asked, "tool_choice": choice}))
        refused = answer.failure is not None and answer.failure.kind == "http 400"
        if choice == "auto" and (refused or (answer.failure is None and not answer.calls)):
            why = "refused" if refused else "answered without a call"
            found.notes.append(f"with tool_choice auto the request was {why}; it was forced")
            continue
        call = next(iter(_checked("a tool call", answer).calls.values()), None)
        if call is None:
            raise SmokeError(f"the answer to a forced tool call holds no call; it begins: {answer.text[:80]!r}")
        _check_call(call)
        found.tool_call, found.tool_choice = f"{call['name']}({call['arguments']})"[:200], choice
        return


def _check_call(call: dict[str, str]) -> None:
    try:
        arguments: Any = json.loads(call["arguments"])
    except ValueError:
        raise SmokeError(f"the arguments of a tool call are no JSON: {call['arguments'][:80]!r}") from None
    if call["name"] != "get_weather" or not isinstance(arguments, dict) or not isinstance(arguments.get("city"), str):
        raise SmokeError(f"a tool call is not of the tool that was offered: {call['name']}({call['arguments'][:80]})")


async def _twice(target: Target, found: Smoke, caches: bool, exact: bool) -> None:
    wanted = min(LONG, target.context // 4) if target.context else LONG
    salt, fresh = (f"{Random().getrandbits(48):012d}"[:12] for _ in "ab")

    def render(filler: str) -> dict[str, Any]:
        content = f"Note {salt}.\n\n{filler}\n\nWhat does the text above say about repairs? Answer in a few sentences."
        return {"messages": _user(content), "max_tokens": ANSWER}

    try:
        body, tokens = await fit(render, texts.Material(texts.prose, salt), wanted, target.counter)
    except BenchError as error:
        raise SmokeError(f"a long prompt could not be made: {error}") from error
    found.long_prompt_tokens = tokens or wanted
    body = json.loads(json.dumps(body).replace(salt, fresh))  # counting may have shown it to the engine
    first = await _ask(target, "a long prompt", body)
    before = await target.scrape()
    second = await _ask(target, "the same long prompt again", body)
    after = await target.scrape()
    found.cached_tokens = second.usage_number("prompt_tokens_details", "cached_tokens")
    if HITS in after and not found.cached_tokens:  # vLLM tells it in responses only where it is asked to
        found.cached_tokens = round(after[HITS] - before.get(HITS, 0.0))
    if caches and found.cached_tokens == 0:
        raise SmokeError(
            f"the same prompt of {found.long_prompt_tokens:,} tokens was computed twice: nothing of it was cached."
        )
    if caches and found.cached_tokens is None:
        found.notes.append("the engine does not tell how many tokens were cached")
    same = _common(_tokens(first), _tokens(second))
    found.identical = _tokens(first) == _tokens(second)
    if not found.identical:
        said = f"the answers to one prompt, cold and cached, differ at token {same + 1}"
        if exact or same < EARLY:
            raise SmokeError(f"{said}: {first.text[:60]!r} and {second.text[:60]!r}.")
        found.notes.append(f"{said}; this engine does not promise that they are equal")


def _tokens(answer: Answer) -> list[Any]:
    return list(answer.ids) or list(answer.text)


def _common(first: list[Any], second: list[Any]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def _ask(target: Target, what: str, body: dict[str, Any]) -> Answer:
    return _checked(what, read(await target.ask(body)))


def _checked(what: str, answer: Answer) -> Answer:
    if answer.failure is not None:
        raise SmokeError(f"{what} failed ({answer.failure.kind}): {answer.failure.message[:300]}")
    return answer
