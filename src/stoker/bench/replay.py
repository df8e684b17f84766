"""Recorded agent sessions, asked again turn by turn. `python -m stoker.bench.replay FILE` prints MLPerf's form in ours.

Ours is JSONL, a session per line: a chat request as an agent sends it at the end, with all of its messages and the
answer to it. Every message of the assistant is a turn: it is asked for with what stands before it, as it was recorded,
so that all servers get the same prompts whatever they answer.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.bench.agent import NAME
from stoker.bench.record import Call, Replayed
from stoker.bench.suites import Cell, Options
from stoker.bench.workloads import Prompt
from stoker.errors import BenchError

if TYPE_CHECKING:
    from stoker.bench.target import Target

MAX_TOKENS = 1024  # of an answer, where the session does not say; MLPerf's own limit
ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]


class Session(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    messages: list[Message]
    id: str = ""
    tools: list[dict[str, Any]] = []
    max_tokens: int = MAX_TOKENS

    @property
    def turns(self) -> list[int]:
        """Where the assistant's messages stand."""
        return [place for place, message in enumerate(self.messages) if message["role"] == "assistant" and place]


@dataclass(frozen=True)
class Turn:
    prompt: Prompt
    session: str
    number: int  # from 1
    recorded: list[Call]

    @property
    def variant(self) -> str:
        return "warm" if self.number > 1 else "load"

    def replayed(self, calls: Sequence[dict[str, str]]) -> Replayed:
        return Replayed(self.session, self.number, self.recorded, [canonical(call) for call in calls])


def read(path: Path, most: int | None = None) -> list[Session]:
    """Sessions of a file in our form or in MLPerf's (a message per line), at most so many."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BenchError(f"--replay {path} cannot be read: {error.strerror}") from error
    rows = [(number, _object(line, path, number)) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise BenchError(f"--replay {path} holds no session")
    first = rows[0][1]
    found = list(_of_mlperf(rows, path) if "conversation_id" in first or "_type" in first else _of_ours(rows, path))
    names = [session.id for session in found]
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise BenchError(f"--replay {path} has two sessions with the id {double!r}")
    return found[:most]


def cells(sessions: Sequence[Session], options: Options) -> list[Cell]:
    """One per number of sessions at a time."""
    digest = hashlib.sha256(msgspec.json.encode(list(sessions))).hexdigest()[:16]
    streams = options.concurrency or (1,)
    return [Cell(NAME, "warm", count, rounds=options.runs, replay=digest) for count in streams]


def turns(session: Session, salt: str) -> list[Turn]:
    """The session's prompts. `salt` stands where templates begin, so that no cache knows the session from before."""
    messages, tools = _salted(session, salt)
    shared: dict[str, Any] = {"tools": tools} if tools else {}
    return [
        Turn(
            Prompt(NAME, {"messages": messages[:place], **shared, "max_tokens": session.max_tokens}, None),
            session.id,
            number,
            [canonical(call["function"]) for call in session.messages[place].get("tool_calls") or ()],
        )
        for number, place in enumerate(session.turns, 1)
    ]


async def fitting(found: list[Turn], target: "Target") -> list[Turn]:
    """Those turns whose prompt and answer fit the server's context, by its tokenizer; all where that is not known."""
    if target.context is None or not target.counter.cheap or not found:
        return found
    low, high = 0, len(found)  # prompts grow from turn to turn
    while low < high:
        middle = (low + high + 1) // 2
        body = found[middle - 1].prompt.body
        if await target.counter.chat(body) + body["max_tokens"] <= target.context:
            low = middle
        else:
            high = middle - 1
    return found[:low]


def history(prompt_tokens: int | None) -> int | None:
    """The length that a turn is counted under: 1K, 2K, 4K ..., whichever is nearest."""
    if not prompt_tokens:
        return None
    return 1000 * 2 ** max(round(math.log2(prompt_tokens / 1000)), 0)


def canonical(call: dict[str, Any]) -> Call:
    """Arguments as JSON with sorted keys, so that their order and white space are no difference."""
    said = call.get("arguments") or "{}"
    try:
        given = json.loads(said) if isinstance(said, str) else said
    except ValueError:
        return Call(str(call.get("name")), str(said))
    return Call(str(call.get("name")), json.dumps(given, ensure_ascii=False, sort_keys=True))


def _salted(session: Session, salt: str) -> tuple[list[Message], list[dict[str, Any]]]:
    """In the first tool's description, which templates render first; else in the first message."""
    if session.tools:
        first = session.tools[0]
        function = {**first["function"], "description": f"{first['function'].get('description', '')} (session {salt})"}
        return session.messages, [{**first, "function": function}, *session.tools[1:]]
    first = session.messages[0]
    content = first.get("content")
    if isinstance(content, list):
        content = [{"type": "text", "text": f"Session {salt}."}, *content]
    else:
        content = f"Session {salt}.\n\n{content or ''}"
    return [{**first, "content": content}, *session.messages[1:]], []


def _of_ours(rows: list[tuple[int, dict[str, Any]]], path: Path) -> Iterator[Session]:
    for number, row in rows:
        try:
            session = msgspec.convert(row, Session)
        except msgspec.ValidationError as error:
            raise BenchError(f"--replay {path}, line {number}: {error}") from error
        yield _sound(msgspec.structs.replace(session, id=session.id or str(number)), f"{path}, line {number}")


def _of_mlperf(rows: list[tuple[int, dict[str, Any]]], path: Path) -> Iterator[Session]:
    """Rows with `conversation_id`, `turn` and `role`, as in mlcommons/endpoints, examples/11_Edge_Agentic_Example."""
    talks: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, row in rows:
        if row.get("_type") == "dataset_metadata":
            continue
        if not isinstance(row.get("conversation_id"), str) or not isinstance(row.get("turn"), int):
            raise BenchError(f"--replay {path}, line {number}: a row has a conversation_id and a turn")
        talks.setdefault(row["conversation_id"], []).append((number, row))
    for name, talk in talks.items():
        talk.sort(key=lambda each: each[1]["turn"])
        found = [row for _, row in talk]
        system = next((row["system"] for row in found if row.get("system")), None)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for number, row in talk:
            messages += _messages(row, f"--replay {path}, line {number}")
        limits = [row.get("max_completion_tokens") or row.get("max_new_tokens") for row in found]
        most = max((limit for limit in limits if isinstance(limit, int)), default=MAX_TOKENS)
        tools: list[dict[str, Any]] = next((row["tools"] for row in found if row.get("tools")), [])
        yield _sound(Session(messages, name, tools, most), f"{path}, conversation {name}")


def _messages(row: dict[str, Any], where: str) -> list[Message]:
    if row.get("role") == "tool":
        try:
            return [
                {"role": "tool", "tool_call_id": result["tool_call_id"], "content": result["content"]}
                for result in row["tool_results"]
            ]
        except (KeyError, TypeError) as error:
            raise BenchError(f"{where}: a tool's row has tool_results, each with tool_call_id and content") from error
    kept = {key: row[key] for key in ("role", "name", "reasoning_content", "tool_calls") if row.get(key)}
    return [{**kept, "content": row.get("content")}]


def _sound(session: Session, where: str) -> Session:
    for place, message in enumerate(session.messages, 1):
        if message.get("role") not in ROLES:
            raise BenchError(f"--replay {where}: message {place} has the role {message.get('role')!r}")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(c, dict) and _named(c.get("function")) for c in calls):
            raise BenchError(f"--replay {where}: message {place} has a tool call without a function and its name")
    if not all(_named(tool.get("function")) for tool in session.tools):
        raise BenchError(f"--replay {where}: a tool has no function with a name")
    if not session.turns:
        raise BenchError(f"--replay {where}: there is no answer of the assistant in it, so there is no turn to ask")
    return session


def _named(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise BenchError(f"--replay {path}, line {number} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BenchError(f"--replay {path}, line {number} is no JSON object")
    return found


if __name__ == "__main__":
    for each in read(Path(sys.argv[1])):
        sys.stdout.write(msgspec.json.encode(each).decode() + "\n")
