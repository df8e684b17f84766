"""Function calling with tools nobody has seen: verbs, things and arguments from an open space, offered so that the
right one must be told from others that share its verb or its thing."""

import random
from functools import partial
from typing import Any

from training.data import names, words
from training.data.calls import crossed, talk
from training.data.names import Name
from training.data.sample import Chat, Split, calls, user
from training.data.tool_parts import KINDS, VERBS, VERBS_HU
from training.data.tools import Tool, Wish, draw_arguments, say, spoken_value

BY_NAME = ["{name} {}", "{name} {}", "{name}: {}", "{name} = {}", "with {name} {}", "{name} set to {}", "{name} is {}"]
OPENINGS = ["{verb}", "{verb}", "{verb}", "Please {verb}", "I want to {verb}", "Can you {verb}", "Now {verb}"]
LOOK_ALIKE = frozenset(["count", "id"])  # both may be bare figures after the same words


def make(split: Split, index: int) -> Chat:
    rng = words.rng_for("coined calls", split, index)
    offered = offer(rng, split)
    return talk(rng, offered, rng.choices([1, 2, 3], [5, 2, 3])[0], True, ask, partial(_stranger, split))


def single_turn(split: Split, index: int) -> Chat:
    """One request, answered by one call."""
    rng = words.rng_for("coined single", split, index)
    offered = offer(rng, split)
    want = ask(rng, rng.choice(offered))
    return Chat([user(want.text), calls((want.tool.name, want.arguments))], [t.schema for t in offered])


def offer(rng: random.Random, split: Split) -> list[Tool]:
    """Two to five tools: two verbs crossed with two things, and sometimes one more that has nothing to do with them."""
    verbs = list(dict.fromkeys(_verb(rng, split) for _ in range(3)))
    while len(verbs) < 3:
        verbs = list(dict.fromkeys([*verbs, _verb(rng, split)]))
    *crossing, other = names.several(rng, split, 3)
    pairs = crossed(rng, verbs[:2], crossing)
    if rng.random() < 0.25:
        pairs.append((verbs[2], other))
    form = rng.randint(0, 5)
    same_form = rng.random() < 0.5
    most = 3 if len(pairs) > 3 else 4
    made = [_tool(rng, split, verb, thing, form if same_form else rng.randint(0, 5), most) for verb, thing in pairs]
    unique = {tool.name: tool for tool in made}
    return rng.sample(list(unique.values()), len(unique))


def _verb(rng: random.Random, split: Split) -> str:
    return rng.choice(sorted(VERBS)) if rng.random() < 0.3 else names.verb(rng, split)


def _tool(rng: random.Random, split: Split, verb: str, thing: Name, form: int, most: int) -> Tool:
    spell = [names.snake, names.camel, names.kebab][form % 3]
    name = spell((verb, *thing) if form < 3 else (*thing, verb))
    kinds = rng.sample(sorted(KINDS), rng.randint(1, most))
    if len(kinds) > 1 and rng.random() < 0.15:  # two arguments of a kind, told apart by their names
        kinds[1] = kinds[0]
    spell_argument = rng.choice([names.snake, names.snake, names.camel])
    arguments: dict[str, str] = {}
    for kind, coined in zip(kinds, names.several(rng, split, len(kinds)), strict=True):
        ordinary = [n for n in KINDS[kind].names if n not in arguments and n not in names.HELD_WORDS]
        use_open = rng.random() < 0.8 or split == "unseen" or not ordinary
        arguments[spell_argument(coined) if use_open else rng.choice(ordinary)] = kind
    facts = tuple(map(spell_argument, names.several(rng, split, rng.randint(1, 3))))
    required = tuple(list(arguments)[: max(1, len(arguments) - rng.randint(0, 1))])
    return Tool(name, verb, names.snake(thing), arguments, required, facts, held_out=False)


def ask(rng: random.Random, tool: Tool) -> Wish:
    """The request in words: arguments by their names or by what is usually said of their kind."""
    arguments = draw_arguments(rng, tool)
    spoken = list(arguments)
    rng.shuffle(spoken)
    thing = words.spoken(tool.thing)
    if tool.verb in VERBS_HU and rng.random() < 0.2:
        opening = f"{VERBS_HU[tool.verb]}: {thing}; "
        return Wish(tool, opening + ", ".join(_say(rng, tool, n, arguments[n], True) for n in spoken) + ".", arguments)
    named = [_say(rng, tool, name, arguments[name], False) for name in spoken]
    if tool.verb in VERBS:
        verb = rng.choice(VERBS[tool.verb])
    else:
        also = names.ALSO_SAID.get(tool.verb, tool.verb)
        verb = rng.choice(OPENINGS).format(verb=also if rng.random() < 0.3 else tool.verb)
    text = f"{verb[0].upper()}{verb[1:]} {rng.choice([f'the {thing}', words.a(thing), f'my {thing}'])} "
    polite = [".", ".", "." if verb.startswith("Please") else ", please."]
    end = "?" if verb.startswith(("Can you", "What")) else rng.choice(polite)
    return Wish(tool, text + ", ".join(named) + end, arguments)


def _say(rng: random.Random, tool: Tool, name: str, value: Any, hungarian: bool) -> str:
    kind = tool.kinds[name]
    alike = [other for other in tool.kinds.values() if other == kind or {kind, other} == LOOK_ALIKE]
    if len(alike) > 1 or rng.random() < 0.45:
        form = "{name}: {}" if hungarian else rng.choice(BY_NAME)
        return form.replace("{name}", words.spoken(name)).replace("{}", spoken_value(value))
    return say(rng, tool, name, value, hungarian)


def _stranger(split: Split, rng: random.Random, offered: list[Tool]) -> Tool:
    """A tool that is not on offer, for a thing that none of those handles, though perhaps with a verb of theirs."""
    things = {tool.thing for tool in offered}
    while names.snake(thing := names.name(rng, split)) in things:
        pass
    verb = rng.choice(offered).verb if rng.random() < 0.5 else _verb(rng, split)
    return _tool(rng, split, verb, thing, 0, 2)
