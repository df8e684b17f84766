"""Tools made of parts: a JSON schema, a request in words, the call it asks for, and what the tool answers."""

import random
from dataclasses import dataclass
from typing import Any

from training.data import words
from training.data.sample import Split
from training.data.tool_parts import (
    HELD_THINGS,
    HELD_VERBS,
    HELD_VERBS_HU,
    KINDS,
    THINGS,
    VERBS,
    VERBS_HU,
)


@dataclass(frozen=True)
class Tool:
    name: str
    verb: str
    thing: str
    kinds: dict[str, str]  # argument name -> kind
    required: tuple[str, ...]
    facts: tuple[str, ...]  # keys of the answer
    held_out: bool

    @property
    def schema(self) -> dict[str, Any]:
        properties: dict[str, Any] = {}
        for name, kind in self.kinds.items():
            of = KINDS[kind]
            properties[name] = {"type": of.type, "description": of.about}
            if of.options:
                properties[name]["enum"] = list(of.options)
            if of.type == "array":
                properties[name]["items"] = {"type": "string"}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": f"{self.verb.capitalize()} {self.thing.replace('_', ' ')}",
                "parameters": {"type": "object", "properties": properties, "required": list(self.required)},
            },
        }


def catalogue(split: Split) -> list[Tool]:
    """Every tool of a split: each verb with each thing, in three variants of names and arguments."""
    held_out = split == "unseen"
    things, verbs = (HELD_THINGS, HELD_VERBS) if held_out else (THINGS, VERBS)
    return [_tool(verb, thing, variant, held_out) for verb in verbs for thing in things for variant in range(3)]


def _tool(verb: str, thing: str, variant: int, held_out: bool) -> Tool:
    rng = words.rng_for("tool", verb, thing, variant)
    kinds, facts = (HELD_THINGS if held_out else THINGS)[thing]
    chosen = words.some(rng, kinds, 1, len(kinds))
    named: dict[str, str] = {}
    for kind in chosen:
        options = KINDS[kind].held_names if held_out else KINDS[kind].names
        named[rng.choice([name for name in options if name not in named])] = kind
    joined = f"{verb}_{thing}"
    camel = verb + "".join(part.capitalize() for part in thing.split("_"))
    name = [joined, camel, f"{thing}_{verb}"][variant]
    required = tuple(list(named)[: max(1, len(named) - 1)])
    return Tool(name, verb, thing, named, required, facts, held_out)


@dataclass(frozen=True)
class Wish:
    """What the user says and the call that fulfils it."""

    tool: Tool
    text: str
    arguments: dict[str, Any]


def draw_arguments(rng: random.Random, tool: Tool) -> dict[str, Any]:
    """A value for every required argument and for half of the others."""
    given = [name for name in tool.kinds if name in tool.required or rng.random() < 0.5]
    return {name: KINDS[tool.kinds[name]].draw(rng) for name in given}


def wish(rng: random.Random, tool: Tool, hungarian_share: float = 0.15) -> Wish:
    arguments = draw_arguments(rng, tool)
    given = list(arguments)
    hungarian = rng.random() < hungarian_share
    spoken = given[:]
    rng.shuffle(spoken)
    thing = tool.thing.replace("_", " ")
    if hungarian:
        opening = (HELD_VERBS_HU if tool.held_out else VERBS_HU)[tool.verb]
        text = f"{opening}: {thing}; " + ", ".join(say(rng, tool, name, arguments[name], True) for name in spoken) + "."
    else:
        verb = rng.choice((HELD_VERBS if tool.held_out else VERBS)[tool.verb])
        parts = [say(rng, tool, name, arguments[name], False) for name in spoken]
        text = f"{verb} {rng.choice([f'the {thing}', words.a(thing), f'my {thing}'])} " + ", ".join(parts)
        text += rng.choice([".", ", please.", ".", "?" if verb.startswith("What") else "."])
    return Wish(tool, text, arguments)


def spoken_value(value: Any) -> str:
    return (
        ", ".join(value) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else str(value)
    )


def say(rng: random.Random, tool: Tool, name: str, value: Any, hungarian: bool) -> str:
    """One argument in words; its kind has ways to say it."""
    kind = KINDS[tool.kinds[name]]
    form = rng.choice(kind.says_hu if hungarian else kind.says)
    # two arguments of like kinds are told apart by name half of the time, and so are ambiguous words
    if not hungarian and rng.random() < 0.35:
        form = "{name} {}"
    return form.replace("{name}", words.spoken(name)).replace("{}", spoken_value(value))


def reply(rng: random.Random, tool: Tool) -> dict[str, Any]:
    """What the tool answers: some facts, as JSON."""
    draws = [
        lambda: rng.randint(1, 999),
        lambda: words.code(rng),
        lambda: rng.choice(["open", "done", "pending", "confirmed", "sent", "delayed"]),
        lambda: f"{rng.randint(1, 400)}.{rng.randint(0, 9)}",
        lambda: words.phrase(rng),
    ]
    return {fact: rng.choice(draws)() for fact in tool.facts}


def tell(rng: random.Random, tool: Tool, facts: dict[str, Any]) -> str:
    """The assistant's sentence about a tool's answer."""
    thing = tool.thing.replace("_", " ")
    parts = [f"{words.spoken(fact)} {value}" for fact, value in facts.items()]
    openings = [f"Done. The {thing} has", f"Here is the {thing}:", f"The {thing} shows"]
    return f"{rng.choice(openings)} {', '.join(parts)}."
