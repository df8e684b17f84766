"""Tool choice and arguments: one call, two at once, the third turn of a conversation, tools nobody has seen, and
requests that no tool fits."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from stoker.check.items import Item, Message, tokens_of
from stoker.check.words import code, coined, name, several

NAME = "tools"
KINDS = ("single", "parallel", "third turn", "unseen", "none fits")
Call = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """A tool, and how a request for it is worded; `{argument}` stands for a value."""

    name: str
    says: str
    arguments: dict[str, dict[str, Any]]
    asks: tuple[str, ...]

    def schema(self) -> dict[str, Any]:
        properties = {key: {k: v for k, v in how.items() if k != "draw"} for key, how in self.arguments.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.arguments)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.says, "parameters": parameters},
        }

    def use(self, rng: Random) -> tuple[str, Call]:
        """A request, and the call that it asks for."""
        values = {key: _draw(how, rng) for key, how in self.arguments.items()}
        return rng.choice(self.asks).format(**values), {"name": self.name, "arguments": values}


def _text(says: str, draw: str) -> dict[str, Any]:
    return {"type": "string", "description": says, "draw": draw}


def _whole(says: str, low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "description": says, "draw": f"{low}-{high}"}


def _one_of(says: str, *choices: str) -> dict[str, Any]:
    return {"type": "string", "description": says, "enum": list(choices), "draw": "enum"}


def _draw(how: dict[str, Any], rng: Random) -> Any:
    draw = how["draw"]
    if draw == "enum":
        return rng.choice(how["enum"])
    if how["type"] == "integer":
        low, high = (int(part) for part in draw.split("-"))
        return rng.randint(low, high)
    if draw == "name":
        return name(rng)
    if draw == "path":
        return f"{coined(rng)}/{coined(rng)}.{rng.choice(('txt', 'py', 'csv', 'toml'))}"
    return code(rng, draw)


TOOLS = (
    Tool(
        "create_ticket",
        "Opens a ticket in the issue tracker.",
        {
            "assignee": _text("First name of who has to do it.", "name"),
            "priority": _one_of("How urgent.", "low", "normal", "high"),
            "reference": _text("Number of the order it is about.", "LL-####"),
        },
        (
            "Open a ticket of {priority} priority for {assignee} about order {reference}.",
            "{assignee} should look into {reference}: make a {priority} priority ticket of it.",
        ),
    ),
    Tool(
        "move_stock",
        "Moves pieces of an article from one warehouse to another.",
        {
            "article": _text("Article number.", "L####"),
            "pieces": _whole("How many.", 2, 900),
            "source": _text("Warehouse they leave.", "name"),
            "target": _text("Warehouse they go to.", "name"),
        },
        (
            "Bring {pieces} pieces of {article} from {source} over to {target}.",
            "{target} needs {pieces} of article {article}; take them out of {source}.",
        ),
    ),
    Tool(
        "set_thermostat",
        "Sets the temperature of a room.",
        {"room": _text("Name of the room.", "name"), "degrees": _whole("Degrees Celsius.", 15, 26)},
        ("Make it {degrees} degrees in room {room}.", "Room {room} should have {degrees} °C."),
    ),
    Tool(
        "read_file",
        "Reads a text file.",
        {"path": _text("Path of the file.", "path")},
        ("Show me what is in {path}.", "What does {path} say?"),
    ),
    Tool(
        "delete_file",
        "Deletes a file for good.",
        {"path": _text("Path of the file.", "path")},
        ("Get rid of {path}.", "I no longer need {path}; remove it."),
    ),
    Tool(
        "book_room",
        "Books a meeting room for some hours of today.",
        {
            "room": _text("Name of the room.", "name"),
            "start_hour": _whole("0 to 23.", 8, 16),
            "hours": _whole("For how long.", 1, 4),
        },
        (
            "I need room {room} today from {start_hour}:00, for {hours} h.",
            "Reserve {room} at {start_hour}:00 for {hours} hours, please.",
        ),
    ),
    Tool(
        "convert_currency",
        "Converts an amount of money at today's rate.",
        {
            "amount": _whole("How much.", 5, 9000),
            "source": _one_of("From.", "EUR", "USD", "HUF"),
            "target": _one_of("To.", "CHF", "GBP", "PLN"),
        },
        ("How much is {amount} {source} in {target} today?", "Change {amount} {source} into {target}."),
    ),
    Tool(
        "track_parcel",
        "Tells where a parcel is.",
        {"parcel": _text("Number of the parcel.", "LL########")},
        ("Where is parcel {parcel} now?", "Has {parcel} left the depot yet?"),
    ),
    Tool(
        "restart_service",
        "Restarts a service on a host.",
        {"service": _text("Name of the service.", "name"), "host": _text("Name of the host.", "LLL-##")},
        ("Service {service} hangs on {host}. Start it again.", "Please restart {service} on host {host}."),
    ),
    Tool(
        "send_invoice",
        "Sends an invoice to a customer once more.",
        {
            "invoice": _text("Number of the invoice.", "####/###"),
            "language": _one_of("Of the letter.", "en", "hu", "de"),
        },
        (
            "Send invoice {invoice} again, with a letter in language {language}.",
            "The customer lost invoice {invoice}; mail it again, language {language}.",
        ),
    ),
    Tool(
        "list_directory",
        "Lists what a directory contains.",
        {"path": _text("Path of the directory.", "name")},
        ("Which files are in the directory {path}?", "List the directory {path}."),
    ),
    Tool(
        "schedule_backup",
        "Plans a backup of a database.",
        {"database": _text("Name of the database.", "name"), "hour": _whole("0 to 23.", 0, 23)},
        ("Back up database {database} at {hour}:00 from now on.", "Plan the backup of {database} for {hour}:00."),
    ),
)
NO_TOOL = (
    "What is the capital of {country}?",
    "Write one sentence about why bread rises, and mention {name}.",
    "Is {number} an even number?",
    "Which of the words '{name}' and '{country}' is longer?",
    "How do you say 'good morning' in the language of {country}?",
)
COUNTRIES = ("Portugal", "Estonia", "Hungary", "Norway", "Japan", "Peru", "Kenya", "Greece")
SYSTEM = (
    "You have tools. Call them when they fit the request, all at once if it asks for several things. If none fits, "
    "answer yourself and call none."
)


def items(seed: str, count: int) -> list[Item]:
    found = []
    for place in range(count):
        rng = Random(f"{seed}/{NAME}/{place}")
        kind = KINDS[place % len(KINDS)]
        messages, tools, calls = _MAKERS[kind](rng)
        schemas = [tool.schema() for tool in tools]
        rng.shuffle(schemas)
        expected = tokens_of(json.dumps(calls)) + 12 * len(calls) if calls else 40
        found.append(
            Item(
                id=f"{NAME}-{place}",
                suite=NAME,
                kind=kind,
                messages=[{"role": "system", "content": SYSTEM}, *messages],
                tools=schemas,
                checker="tool_calls",
                expect=calls,
                max_tokens=2 * expected + 64,
                answer_tokens=expected,
            )
        )
    return found


_Made = tuple[list[Message], list[Tool], list[Call]]


def _single(rng: Random) -> _Made:
    tools = rng.sample(TOOLS, 6)
    asked, call = tools[0].use(rng)
    return [{"role": "user", "content": asked}], tools, [call]


def _parallel(rng: Random) -> _Made:
    tools = rng.sample(TOOLS, 6)
    uses = [tool.use(rng) for tool in tools[: rng.choice((2, 2, 3))]]
    asked = " And then there is something else. ".join(asked for asked, _ in uses)
    return [{"role": "user", "content": asked}], tools, [call for _, call in uses]


def _third_turn(rng: Random) -> _Made:
    """Its last call needs a value that only an earlier result has told."""
    by_name = {tool.name: tool for tool in TOOLS}
    tools = [by_name[known] for known in ("track_parcel", "create_ticket", "move_stock", "read_file", "list_directory")]
    parcel, order, warehouse, folder, file = (
        code(rng, "LL########"),
        code(rng, "LL-####"),
        name(rng),
        name(rng),
        coined(rng),
    )
    who, priority = name(rng), rng.choice(("low", "normal", "high"))
    steps: list[tuple[str, Call, dict[str, Any]]] = [
        (
            f"Where is parcel {parcel}?",
            {"name": "track_parcel", "arguments": {"parcel": parcel}},
            {"parcel": parcel, "order": order, "place": warehouse, "state": "damaged"},
        ),
        (
            f"What is in the directory {folder}?",
            {"name": "list_directory", "arguments": {"path": folder}},
            {"entries": [f"{folder}/{file}.txt"]},
        ),
    ]
    last: tuple[str, Call] = rng.choice(
        [
            (
                f"Open a ticket of {priority} priority for {who} about the order that this parcel belongs to.",
                {
                    "name": "create_ticket",
                    "arguments": {"assignee": who, "priority": priority, "reference": order},
                },
            ),
            (
                "Now show me what the file in that directory says.",
                {"name": "read_file", "arguments": {"path": f"{folder}/{file}.txt"}},
            ),
        ]
    )
    messages: list[Message] = []
    for number, (asked, call, result) in enumerate(steps):
        said = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        messages += [
            {"role": "user", "content": asked},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": f"call_{number}", "type": "function", "function": said}],
            },
            {"role": "tool", "tool_call_id": f"call_{number}", "content": json.dumps(result)},
            {"role": "assistant", "content": "Done: " + ", ".join(f"{k} {v}" for k, v in result.items()) + "."},
        ]
    messages.append({"role": "user", "content": last[0]})
    return messages, tools, [last[1]]


def _unseen(rng: Random) -> _Made:
    """Coined names throughout: nothing but their descriptions says what they are for."""
    tools = []
    for thing, part, verb in zip(several(rng, 5), several(rng, 5, 3), several(rng, 5), strict=True):
        size = _whole(f"How many {part}s.", 2, 99)
        label = _text(f"Label of the {thing}.", "LL-##")
        mode = _one_of(f"The {verb} mode.", *several(rng, 3))
        tools.append(
            Tool(
                f"{verb}_{thing}",
                f"Gives a {thing} some {part}s, in one of three {verb} modes.",
                {f"{thing}_label": label, f"{part}_count": size, "mode": mode},
                (
                    f"Give the {thing} labelled {{{thing}_label}} {{{part}_count}} {part}s in {verb} mode {{mode}}.",
                    f"{{{part}_count}} {part}s, {verb} mode {{mode}}, for {thing} {{{thing}_label}}, please.",
                ),
            )
        )
    asked, call = tools[0].use(rng)
    return [{"role": "user", "content": asked}], tools, [call]


def _none_fits(rng: Random) -> _Made:
    country = rng.choice(COUNTRIES)
    asked = rng.choice(NO_TOOL).format(country=country, name=name(rng), number=rng.randint(100, 9999))
    return [{"role": "user", "content": asked}], rng.sample(TOOLS, 6), []


_MAKERS = {
    "single": _single,
    "parallel": _parallel,
    "third turn": _third_turn,
    "unseen": _unseen,
    "none fits": _none_fits,
}
