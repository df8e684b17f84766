"""The agent workload: tool calls over a history that grows, and turns that are timed at given lengths of it.

Tool results are scripted, answers are the model's own and stay in the history, as in a real loop: what a server cached
of its own output helps it, or does not. Each point of measurement is reached by one turn with a large result ("load"),
then come ordinary turns, the last of which has exactly that many tokens of history.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from stoker.bench import texts
from stoker.bench.fit import Body, fit
from stoker.bench.workloads import Prompt

if TYPE_CHECKING:
    from stoker.bench.answer import Answer
    from stoker.bench.target import Target

NAME = "Agent"
MAX_TOKENS = 192
TURNS = 4  # ordinary turns at each length
GROWTH = 300  # tokens a turn adds: an answer and a short result
TOOL_SHARE = 0.73  # of real agent traffic on such a box, as published


@dataclass(frozen=True)
class Turn:
    history: int  # the length that this turn is counted under
    tokens: int  # its own prompt
    load: bool


def turns(points: tuple[int, ...]) -> Iterator[Turn]:
    for point in points:
        yield Turn(point, point - TURNS * GROWTH, load=True)
        for number in range(1, TURNS + 1):
            yield Turn(point, point - (TURNS - number) * GROWTH, load=False)


def _tool(name: str, says: str, **parameters: str) -> Body:
    properties = {key: {"type": "string", "description": value} for key, value in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": says, "parameters": schema}}


class Conversation:
    """One agent's session. `salt` is in the first tool, which templates render first: nothing is cached."""

    def __init__(self, target: "Target", salt: str, tool_share: float = TOOL_SHARE) -> None:
        self._target, self._rng, self._share = target, Random(salt), tool_share
        self._salt = salt
        self._messages: list[Body] = [
            {"role": "system", "content": "You are a coding agent. Use the tools; change one thing at a time."},
            {"role": "user", "content": "The nightly job fails for some records. Find out why and repair it."},
        ]
        self._tools = [
            _tool("read_file", f"Read a file (workspace {salt}).", path="Path inside the workspace."),
            _tool("list_directory", "List a directory.", path="Path inside the workspace."),
            _tool("search_text", "Find lines that match.", pattern="Regular expression.", path="Where to look."),
            _tool("run_command", "Run a shell command.", command="The command line."),
            _tool("edit_file", "Replace text in a file.", path="The file.", old="Text to replace.", new="New text."),
        ]

    async def prompt(self, turn: Turn) -> Prompt:
        """The next request, with a tool result that is long enough to bring the prompt to the turn's length."""
        make = texts.code if turn.load else texts.log
        closing = self._closing()
        said, last = self._messages, self._messages[-1]

        def render(filler: str) -> Body:
            shown = f"{filler}\n{closing}" if filler else closing
            if last.get("tool_calls"):
                call = last["tool_calls"][0]["id"]
                result: Body = {"role": "tool", "tool_call_id": call, "content": shown}
            else:
                result = {"role": "user", "content": shown}
            if last["role"] == "user":  # the first turn: the file is part of the task
                messages = [*said[:-1], {"role": "user", "content": f"{last['content']}\n\n{shown}"}]
            else:
                messages = [*said, result]
            return {"messages": messages, "tools": self._tools, "max_tokens": MAX_TOKENS}

        material = texts.Material(make, f"{self._salt}/{len(self._messages)}")
        body, tokens = await fit(render, material, turn.tokens, self._target.counter)
        self._messages = list(body["messages"])
        return Prompt(NAME, body, tokens)

    def answered(self, answer: "Answer") -> None:
        """Add the model's answer to the history. Calls that are not JSON are kept as text: servers refuse them."""
        calls = [call for call in answer.calls.values() if call["name"] and _parses(call["arguments"])][:1]
        message: Body = {"role": "assistant", "content": answer.content or ("" if calls else answer.text)}
        if calls:
            function = {"name": calls[0]["name"], "arguments": calls[0]["arguments"] or "{}"}
            message["tool_calls"] = [{"id": f"call{len(self._messages)}", "type": "function", "function": function}]
        self._messages.append(message)

    def _closing(self) -> str:
        """A last line that provokes a tool call or, in the remaining share of turns, an explanation."""
        thing, state = self._rng.choice(("valve", "pump", "relay", "fuse")), self._rng.choice(("tested", "stored"))
        if self._rng.random() < self._share:
            forms = (
                f"2 matches in src/{thing}/{state}.py. Read that file next.",
                f"src/{thing} has changed since. List the directory src/{thing} next.",
                f"1 test failed in tests/{thing}/test_{state}.py. Run it alone next with pytest.",
                f"The name {state}_{thing} may be used elsewhere. Search for it next.",
            )
            return self._rng.choice(forms)
        return f"Before going on, explain in three sentences what {thing} and {state} have to do with the failure."


def _parses(arguments: str) -> bool:
    try:
        found: Any = json.loads(arguments or "{}")
    except ValueError:
        return False
    return isinstance(found, dict)
