"""What a server expects at each token of a given text: the log-probabilities of the likeliest tokens.

Servers tell in three ways, tried in this order: `prompt_logprobs` (vLLM, Stoker) and `echo` with `logprobs` (OpenAI's
old completions, SGLang) for a whole text at once; or the text is given up to a token, and the next one asked for, which
any server does that gives log-probabilities of what it writes (llama.cpp).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from stoker.bench.target import Target
from stoker.bench.tokens import Refused
from stoker.errors import BenchError

TOP = (20, 5)  # likeliest tokens asked for: vLLM's and Stoker's most, then OpenAI's
FORCED = 24  # positions of a text that are asked one by one
PROBE = "The sum of 12 and 30 is 42.\n"
BROKEN = "\N{REPLACEMENT CHARACTER}"  # half a character: many tokens have this text
ID = "token_id:"  # how vLLM spells tokens with return_tokens_as_token_ids


class Listed(NamedTuple):
    id: int | None
    text: str
    logprob: float


@dataclass(frozen=True)
class Prediction:
    """At one position. `likeliest` are the server's first `top`, and perhaps the token that does stand there."""

    likeliest: tuple[Listed, ...]
    top: int

    @property
    def has_ids(self) -> bool:
        return all(each.id is not None for each in self.likeliest)

    def by(self, ids: bool) -> dict[int | str, float]:
        """Log-probabilities by token id, or by text where a text names one token."""
        if ids:
            return {each.id: each.logprob for each in self.likeliest if each.id is not None}
        return {each.text: each.logprob for each in self.likeliest if BROKEN not in each.text}

    @property
    def least(self) -> float:
        """No token that is not listed is likelier than the last of the top ones."""
        ordered = sorted((each.logprob for each in self.likeliest), reverse=True)
        return ordered[min(self.top, len(ordered)) - 1] if ordered else 0.0


Prompt = str | list[int]
Predictions = dict[int, Prediction]  # by position in the text; not of its first token


class Seen(NamedTuple):
    tokens: tuple[str, ...]  # of the text, where the server spells them; empty where their ids were sent
    predictions: Predictions


class Way:
    """How a server is asked."""

    name = ""
    whole = True  # a text in one request

    def __init__(self, target: Target, top: int) -> None:
        self.target, self.top = target, top

    async def ask(self, prompt: Prompt, positions: Sequence[int] = ()) -> Seen:
        raise NotImplementedError

    async def _choice(self, **body: Any) -> dict[str, Any]:
        asked = {"model": self.target.model, "max_tokens": 1, "temperature": 1.0, **body}
        found = await self.target.post("/v1/completions", asked)
        choice = (found.get("choices") or [{}])[0]
        return {"prompt_logprobs": found.get("prompt_logprobs"), **choice, "usage": found.get("usage") or {}}


class PromptLogprobs(Way):
    name = "prompt_logprobs"

    async def ask(self, prompt: Prompt, positions: Sequence[int] = ()) -> Seen:
        choice = await self._choice(prompt=prompt, prompt_logprobs=self.top)
        listed = choice["prompt_logprobs"]
        if not isinstance(prompt, list) or not listed or len(listed) != len(prompt):
            raise NotGiven("prompt_logprobs")
        found = {
            place: Prediction(
                tuple(
                    Listed(int(token), str(each.get("decoded_token")), float(each["logprob"]))
                    for token, each in entry.items()
                ),
                self.top,
            )
            for place, entry in enumerate(listed)
            if entry
        }
        return Seen((), found)


class Echo(Way):
    name = "echo"

    async def ask(self, prompt: Prompt, positions: Sequence[int] = ()) -> Seen:
        choice = await self._choice(prompt=prompt, echo=True, logprobs=self.top)
        found = choice.get("logprobs") or {}
        tokens, listed = found.get("tokens") or [], found.get("top_logprobs") or []
        made = int(choice["usage"].get("completion_tokens", 1))  # the token that had to be written comes last
        tokens = tokens[: max(len(tokens) - made, 0)]
        if len(tokens) < 2 or not any(listed[: len(tokens)]):
            raise NotGiven("an echo with logprobs")
        if isinstance(prompt, list) and len(tokens) != len(prompt):
            raise NotGiven("an echo of every token")
        predictions = {
            place: Prediction(tuple(_listed(listed[place])), self.top)
            for place in range(1, min(len(tokens), len(listed)))
            if listed[place]
        }
        return Seen(tuple(map(str, tokens)), predictions)


class TeacherForcing(Way):
    name = "teacher forcing"
    whole = False

    async def ask(self, prompt: Prompt, positions: Sequence[int] = ()) -> Seen:
        if not isinstance(prompt, list):
            raise NotGiven("teacher forcing without the ids of tokens")
        found = {}
        for place in positions:
            choice = await self._choice(
                prompt=prompt[:place], logprobs=self.top, return_tokens_as_token_ids=True, temperature=0.0
            )
            given = choice.get("logprobs") or {}
            first = (given.get("content") or given.get("top_logprobs") or [None])[0]
            if not first:
                raise NotGiven("logprobs")
            top = first.get("top_logprobs", first) if isinstance(first, dict) else first
            found[place] = Prediction(tuple(_listed(top)), self.top)
        return Seen((), found)


WAYS: tuple[type[Way], ...] = (PromptLogprobs, Echo, TeacherForcing)


class NotGiven(BenchError):
    """The server answered, and left out what was asked for."""


def _listed(top: Any) -> Iterable[Listed]:
    """A mapping of texts, as completions have it, or a list of entries, as chats and llama.cpp do."""
    if isinstance(top, dict):
        entries: list[dict[str, Any]] = [{"token": text, "logprob": value} for text, value in top.items()]
    else:
        entries = list(top)
    for each in entries:
        text, logprob = str(each["token"]), each["logprob"]
        number = each.get("id", text.removeprefix(ID) if text.startswith(ID) else None)
        yield Listed(None if number is None else int(number), text, float(logprob))


async def token_ids(target: Target, text: str) -> list[int] | None:
    """The tokens of a text as the server would read it, or None if it does not tell."""
    for asked in (
        {"model": target.model, "prompt": text, "add_special_tokens": True},
        {"content": text, "add_special": True},  # llama.cpp
    ):
        try:
            found = (await target.post("/tokenize", asked)).get("tokens")
        except BenchError:
            continue
        if isinstance(found, list) and found and all(isinstance(token, int) for token in found):
            return found
    return None


async def find_way(target: Target, prompt: Prompt) -> Way | None:
    """The first way in which the server says what it expects of a short text."""
    for way in WAYS:
        for top in TOP:
            found = way(target, top)
            try:
                if (await found.ask(prompt, (1,))).predictions:
                    return found
            except (Refused, NotGiven, KeyError, TypeError, ValueError):
                continue
    return None


def positions(count: int, seed: str) -> list[int]:
    """Those of a text of so many tokens that are asked one by one."""
    return sorted(Random(seed).sample(range(1, count), min(FORCED, max(count - 1, 0))))
