"""Function calling: one to three user turns, several tools on offer, answers read back from what the tools said."""

import json
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TypeVar

from training.data import words
from training.data.sample import Chat, Message, Split, assistant, calls, tool, user
from training.data.tools import Tool, Wish, catalogue, reply, tell, wish

T = TypeVar("T")

SMALL_TALK = [
    ("Thanks, that is all.", "You are welcome."),
    ("Hello!", "Hello! How can I help?"),
    ("Who are you?", "I am a small assistant that can call tools."),
    ("Köszönöm!", "Szívesen!"),
    ("Thank you.", "You are welcome."),
]
SYSTEMS = ["You are a helpful assistant.", "Answer briefly.", "You help with everyday office work.", "Légy tömör."]


@cache
def _tools(split: Split) -> tuple[Tool, ...]:
    return tuple(catalogue(split))


def make(split: Split, index: int) -> Chat:
    """The usual mix: mostly one user turn, sometimes two or three."""
    rng = words.rng_for("calls", split, index)
    return conversation(rng, split, turns=rng.choices([1, 2, 3], [6, 2, 2])[0], small_talk=True)


def single_turn(split: Split, index: int) -> Chat:
    """One request, answered by one call: the conversation ends there."""
    rng = words.rng_for("single", split, index)
    offered = _offer(rng, split)
    want = wish(rng, rng.choice(offered))
    return Chat([user(want.text), calls((want.tool.name, want.arguments))], [t.schema for t in offered])


def three_turns(split: Split, index: int) -> Chat:
    return conversation(words.rng_for("three", split, index), split, turns=3, small_talk=False)


def conversation(rng: random.Random, split: Split, turns: int, small_talk: bool) -> Chat:
    return talk(rng, _offer(rng, split), turns, small_talk, wish, partial(_stranger, split))


def confusable(split: Split, index: int) -> Chat:
    """The tools on offer share their verbs and their things; more often than not there are three turns."""
    rng = words.rng_for("confusable", split, index)
    offered = crossed_offer(rng, split)
    return talk(
        rng, offered, rng.choices([1, 2, 3], [3, 2, 5])[0], True, wish_often_hungarian, partial(_stranger, split)
    )


def confusable_three_turns(split: Split, index: int) -> Chat:
    rng = words.rng_for("confusable three", split, index)
    return talk(rng, crossed_offer(rng, split), 3, False, wish_often_hungarian, partial(_stranger, split))


def wish_often_hungarian(rng: random.Random, tool: Tool) -> Wish:
    return wish(rng, tool, hungarian_share=0.25)


def talk(
    rng: random.Random,
    offered: list[Tool],
    turns: int,
    small_talk: bool,
    ask: Callable[[random.Random, Tool], Wish],
    stranger: Callable[[random.Random, list[Tool]], Tool],
) -> Chat:
    """`ask` words a request for a tool; `stranger` gives a tool for something that nothing on offer handles."""
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for turn in range(turns):
        if small_talk and rng.random() < 0.08:
            question, answer = rng.choice(SMALL_TALK)
            messages += [user(question), assistant(answer)]
            continue
        if small_talk and rng.random() < 0.06:
            messages += _nothing_fits(ask(rng, stranger(rng, offered)))
            continue
        messages += _request(rng, offered, ask, answered=turn < turns - 1 or rng.random() < 0.4)
    return Chat(messages, [t.schema for t in offered])


def _offer(rng: random.Random, split: Split) -> list[Tool]:
    """One to four tools of different names; sometimes two that act on the same thing, to be told apart by verb."""
    tools = _tools(split)
    offered = list(rng.sample(tools, rng.randint(1, 3)))
    if rng.random() < 0.4:
        offered.append(rng.choice([t for t in tools if t.thing == offered[0].thing and t.verb != offered[0].verb]))
    unique = {t.name: t for t in offered}
    return rng.sample(list(unique.values()), len(unique))


def crossed(rng: random.Random, verbs: Sequence[str], things: Sequence[T]) -> list[tuple[str, T]]:
    """Two to four of two verbs with two things each; every pair shares its verb or its thing with another."""
    pairs = [(verb, thing) for verb in verbs for thing in things]
    count = rng.choices([2, 3, 4], [1, 1, 3])[0]
    return [pairs[0], rng.choice(pairs[1:3])] if count == 2 else rng.sample(pairs, count)


def crossed_offer(rng: random.Random, split: Split) -> list[Tool]:
    tools = _tools(split)
    verbs, things = (sorted({getattr(t, part) for t in tools}) for part in ("verb", "thing"))
    pairs = crossed(rng, rng.sample(verbs, 2), rng.sample(things, 2))
    offered = [rng.choice([t for t in tools if (t.verb, t.thing) == pair]) for pair in pairs]
    return rng.sample(offered, len(offered))


def _request(
    rng: random.Random, offered: list[Tool], ask: Callable[[random.Random, Tool], Wish], answered: bool
) -> list[Message]:
    wishes = [ask(rng, rng.choice(offered))]
    if rng.random() < 0.12:  # two things at once: two calls in one turn
        wishes.append(ask(rng, rng.choice(offered)))
    text = " ".join(w.text for w in wishes)
    messages = [user(text), calls(*((w.tool.name, w.arguments) for w in wishes))]
    if answered:
        replies = [reply(rng, w.tool) for w in wishes]
        messages += [tool(json.dumps(facts, ensure_ascii=False)) for facts in replies]
        told = [tell(rng, w.tool, facts) for w, facts in zip(wishes, replies, strict=True)]
        messages.append(assistant(" ".join(told)))
    return messages


def _stranger(split: Split, rng: random.Random, offered: list[Tool]) -> Tool:
    things = {t.thing for t in offered}
    return rng.choice([t for t in _tools(split) if t.thing not in things])


def _nothing_fits(other: Wish) -> list[Message]:
    thing = other.tool.thing.replace("_", " ")
    return [user(other.text), assistant(f"I have no tool for that: none of mine handles {words.a(thing)}.")]
