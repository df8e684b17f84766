"""Recorded sessions are asked turn by turn as they were recorded, and it is counted on how many turns calls agree."""

import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from typer.testing import CliRunner

from stoker.bench import replay
from stoker.bench.agreement import agreements
from stoker.bench.document import load, schema
from stoker.bench.journal import Journal
from stoker.bench.record import Document, Request
from stoker.bench.run import Runner
from stoker.bench.suites import Options, Plan
from stoker.bench.target import Target
from stoker.cli.main import app
from stoker.errors import BenchError
from stoker.report import figures
from tests.bench.mock import Behaviour, Mock

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "sessions.jsonl"
QUICK = Behaviour(ttft_s=0.001, steps_per_s=2000, chunks=3, tool_call=True, cached_share=0.5)
CALLED = '{"path": " w00001 w00002"}'  # what the mock calls read_file with


def rows_of_mlperf(session: replay.Session) -> list[dict[str, Any]]:
    """The same session as mlcommons/endpoints writes it: a row per message, results of one step together."""
    rows: list[dict[str, Any]] = []
    system = [m for m in session.messages if m["role"] == "system"]
    for message in session.messages:
        if message["role"] == "system":
            continue
        row: dict[str, Any] = {"conversation_id": session.id, "turn": len(rows) + 1, "role": message["role"]}
        if message["role"] == "tool":
            row["tool_results"] = [{"tool_call_id": message["tool_call_id"], "content": message["content"]}]
            row["delay_seconds"] = 0.25
        else:
            row |= {key: message[key] for key in ("content", "tool_calls", "reasoning_content") if message.get(key)}
        if not rows:
            row |= {"tools": session.tools, **({"system": system[0]["content"]} if system else {})}
        rows.append(row)
    return rows


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_mlperfs_form_is_read_as_the_same_sessions(tmp_path: Path):
    ours = replay.read(EXAMPLE)
    rows = [row for session in ours for row in rows_of_mlperf(session)]
    path = write(tmp_path / "theirs.jsonl", {"_type": "dataset_metadata", "version": 1}, *rows)
    theirs = replay.read(path)
    assert [session.id for session in theirs] == ["nightly", "version"]

    def plain(session: replay.Session) -> list[dict[str, Any]]:
        return [{**message, "content": message["content"] or None} for message in session.messages]

    assert list(map(plain, theirs)) == list(map(plain, ours))
    assert [session.tools for session in theirs] == [session.tools for session in ours]
    assert {session.max_tokens for session in theirs} == {1024}
    ran = subprocess.run(
        [sys.executable, "-m", "stoker.bench.replay", str(path)], capture_output=True, text=True, check=True
    )
    again = tmp_path / "ours.jsonl"
    again.write_text(ran.stdout, encoding="utf-8")
    assert replay.read(again) == theirs


def test_results_of_parallel_calls_are_messages_of_their_own():
    row = {
        "role": "tool",
        "tool_results": [{"tool_call_id": "a", "content": "1"}, {"tool_call_id": "b", "content": ""}],
    }
    assert replay._messages(row, "") == [
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
    ]


def test_a_turn_is_asked_with_what_was_recorded_before_it_and_a_salt_at_the_front():
    nightly, version = replay.read(EXAMPLE)
    turns = replay.turns(nightly, "SALT")
    assert [len(turn.prompt.body["messages"]) for turn in turns] == [2, 4, 6]
    assert [turn.prompt.body["messages"] for turn in turns] == [nightly.messages[:n] for n in (2, 4, 6)]
    assert all("SALT" in turn.prompt.body["tools"][0]["function"]["description"] for turn in turns)
    assert {turn.prompt.body["max_tokens"] for turn in turns} == {256}
    assert [turn.variant for turn in turns] == ["load", "warm", "warm"]
    assert [[call.name for call in turn.recorded] for turn in turns] == [["list_directory"], ["read_file"], []]
    bare = replay.turns(msgspec.structs.replace(version, tools=[]), "SALT")
    assert bare[0].prompt.body["messages"][0]["content"].startswith("Session SALT.")
    assert "tools" not in bare[0].prompt.body
    assert "SALT" not in json.dumps([version.messages, version.tools]), "the recording itself stays as it is"


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ('{"x": 1, "y": 2}', '{"y":2,"x":1}', True),
        ('{"x": 1}', '{"x": "1"}', False),
        ("{broken", "{broken", True),
        ("", "{}", True),
    ],
)
def test_the_order_and_the_form_of_arguments_are_no_difference(a: str, b: str, same: bool):
    one, other = (replay.canonical({"name": "f", "arguments": said}) for said in (a, b))
    assert (one == other) is same


def session(name: str, *arguments: str) -> dict[str, Any]:
    """A session that calls read_file with these arguments; an empty one is an answer in words."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"begin {name}"}]
    for number, said in enumerate(arguments):
        function = {"name": "read_file", "arguments": said}
        calls = {"tool_calls": [{"id": f"c{number}", "type": "function", "function": function}]} if said else {}
        messages.append({"role": "assistant", "content": "" if said else "done", **calls})
        follows = {"role": "tool", "tool_call_id": f"c{number}"} if said else {"role": "user"}
        messages.append({**follows, "content": "more"})
    return {"id": name, "messages": messages}


def replays(path: Path, *mocks: Mock, runs: int = 1, streams: int = 1, **settings: Any) -> tuple[list[Request], Plan]:
    async def go() -> tuple[list[Request], Plan]:
        found = replay.read(path)
        plan = Plan(replay.cells(found, Options(runs=runs, concurrency=(streams,))))
        async with AsyncExitStack() as stack:
            targets = []
            for name, mock in zip("AB", mocks, strict=False):
                await stack.enter_async_context(mock.running())
                targets.append(await stack.enter_async_context(Target(mock.url, name=name, **settings)))
                mock.asked.clear()
            runner = Runner(targets, plan, Options(), Journal(None, {}, Request), "salt", sessions=found)
            await runner.run()
        return runner.requests, plan

    return asyncio.run(go())


def test_servers_get_the_same_prompts_and_agreement_is_counted(tmp_path: Path):
    other = '{"path": "elsewhere"}'
    path = write(tmp_path / "s.jsonl", session("one", CALLED, other, ""), session("two", CALLED))
    same, also = Mock(QUICK), Mock(QUICK)
    requests, _ = replays(path, same, also, runs=2)
    assert len(requests) == 2 * 2 * 4
    prompts = [[body["messages"] for body in mock.asked] for mock in (same, also)]
    assert prompts[0] == prompts[1]
    first = [json.dumps(messages[0]) for messages in prompts[0]]
    assert len(set(first)) == 5, "a salt per round: one session in the warm-up, two in each of two rounds"
    found = {row.between: row for row in agreements(requests)}
    assert found["A and B"].same_calls == 1.0
    assert found["A and B"].turns == 8
    assert found["A and itself, a round later"].same_calls == 1.0
    recording = found["B and the recording"]
    assert (recording.same_calls, recording.same_tools, recording.same_decision) == (0.5, 0.75, 0.75)
    assert recording.low is None, "two sessions are too few for an interval"
    longer = Mock(Behaviour(ttft_s=0.001, steps_per_s=2000, chunks=4, tool_call=True))
    silent = Mock(Behaviour(ttft_s=0.001, steps_per_s=2000, chunks=3))
    [row, *_] = agreements(replays(path, Mock(QUICK), longer)[0])
    assert (row.between, row.same_calls, row.same_tools) == ("A and B", 0.0, 1.0)
    [row, *_] = agreements(replays(path, Mock(QUICK), silent)[0])
    assert (row.same_calls, row.same_tools, row.same_decision) == (0.0, 0.0, 0.0)


def test_an_interval_is_told_for_five_sessions_and_more(tmp_path: Path):
    path = write(tmp_path / "s.jsonl", *(session(f"{n}", CALLED, CALLED if n % 2 else "{}") for n in range(8)))
    rows = {row.between: row for row in agreements(replays(path, Mock(QUICK), streams=3)[0])}
    row = rows["A and the recording"]
    assert row.same_calls == 0.75
    assert row.low is not None
    assert 0.5 <= row.low < 0.75 < (row.high or 0) <= 1.0


def test_turns_that_do_not_fit_the_context_are_left_out_and_that_is_said(tmp_path: Path):
    path = write(tmp_path / "s.jsonl", session("one", *[CALLED] * 30))
    requests, plan = replays(path, Mock(QUICK), context=1200)
    asked = len(requests)
    assert 3 < asked < 30
    assert plan.skipped == [f"{30 - asked} recorded turns do not fit the context of A, 1,200."]
    assert not any(request.failure for request in requests)


def test_failed_turns_are_in_no_agreement(tmp_path: Path):
    path = write(tmp_path / "s.jsonl", session("one", *[CALLED] * 9))
    broken = Mock(Behaviour(ttft_s=0.001, steps_per_s=2000, chunks=3, tool_call=True, error_every=3))
    requests, _ = replays(path, broken)
    failed = sum(request.failure is not None for request in requests)
    assert failed == 3
    assert agreements(requests)[0].turns == 9 - failed


def test_the_command_replays_the_example_on_two_servers(tmp_path: Path):
    """Speed, cache hits and agreement in one table; the result follows its schema and reads back."""
    file, page = tmp_path / "r.json", tmp_path / "r.html"

    async def go() -> str:
        one, two = Mock(QUICK), Mock(QUICK)
        async with one.running(), two.running():
            given = [one.url, "--against", two.url, "--replay", str(EXAMPLE), "--runs", "1"]
            process = await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", "stoker", "bench", *given, "--json", str(file), "--html", str(page)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            said, errors = await process.communicate()
            assert process.returncode == 0, errors.decode()
            return said.decode()

    said = asyncio.run(go())
    assert "Calls of A and B: the same on 100.0% of 5 turns" in said
    found: Document = load(file)
    assert found.suite == "agent replay"
    row = next(row for row in found.workloads if (row.server, row.variant) == ("B", "warm"))
    assert row.completed == 3
    assert row.prefix_hit_rate == pytest.approx(0.5, abs=0.02)
    assert row.accepted_per_step is not None
    assert {point.server for point in found.turns} == {"A", "B"}
    jsonschema.validate(json.loads(file.read_text()), schema())
    assert "Do the calls agree" in page.read_text()
    assert figures.agreement(found)[0] in page.read_text()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["{"], "line 1 is no JSON"),
        (["[]"], "line 1 is no JSON object"),
        ([""], "holds no session"),
        ([{"id": "a", "messages": [{"role": "user", "content": "x"}]}], "there is no answer of the assistant"),
        ([{"id": "a", "messages": [{"content": "x"}]}], "message 1 has the role None"),
        ([{"id": "a", "message": []}], "line 1: Object"),
        ([session("a", CALLED), session("a", CALLED)], "two sessions with the id 'a'"),
        ([{"messages": [{"role": "user"}, {"role": "assistant", "tool_calls": [{}]}]}], "without a function"),
        ([{**session("a", CALLED), "tools": [{"name": "f"}]}], "a tool has no function"),
        ([{"conversation_id": "c", "role": "user"}], "has a conversation_id and a turn"),
        ([{"conversation_id": "c", "turn": 1, "role": "tool", "content": "x"}], "a tool's row has tool_results"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, rows: list[Any], said: str):
    path = tmp_path / "s.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    with pytest.raises(BenchError) as raised:
        replay.read(path)
    assert said in str(raised.value)


def test_prompts_and_a_replay_exclude_each_other(tmp_path: Path):
    prompts = write(tmp_path / "p.json", {"mine": ["Hi"]})
    ran = CliRunner().invoke(app, ["bench", "http://x", "--prompts", str(prompts), "--replay", str(EXAMPLE)])
    assert "give one of them" in str(ran.exception)
