"""A check of servers whose faults are known: the verdict, the counts and what an interruption leaves behind."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import jsonschema
import pytest

from stoker.bench.journal import Journal
from stoker.bench.target import Target
from stoker.check.document import compared, document, load, schema, to_json
from stoker.check.items import Filler, Item, user
from stoker.check.record import Asked, Document, Where
from stoker.check.run import OFF, Runner, in_turns, placed
from stoker.check.suites import arithmetic, draw, invoices, long_context, tools
from stoker.errors import BenchError
from tests.check.mock import KnowingServer, share

KNOWN = [*invoices.items("1", 60), *tools.items("1", 100), *arithmetic.items("1", 60)]


def where(targets: list[Target]) -> Where:
    return Where("0", "3", "here", "2026-01-01T00:00:00+00:00", 1.0, "stoker check", [t.facts() for t in targets])


async def checked(*servers: KnowingServer, path: Path | None = None, **settings: object) -> tuple[Document, Runner]:
    """Runs a check and makes its document."""
    targets = [Target(server.url, name=name) for server, name in zip(servers, "AB", strict=False)]
    for target in targets:
        await target.__aenter__()
    try:
        journal = Journal(path, {"test": 1}, Asked, what="check")
        runner = Runner(targets, servers[0].items, journal, **settings)  # type: ignore[arg-type]
        await runner.run()
        found = document(
            "test", "1", runner.answers, where(targets), complete=not runner.interrupted, notes=runner.notes
        )
        return found, runner
    finally:
        for target in targets:
            await target.__aexit__(None, None, None)


def run(*servers: KnowingServer, **settings: object) -> Document:
    async def go() -> Document:
        for server in servers:
            await server.running_now.__aenter__()  # type: ignore[attr-defined]
        try:
            return (await checked(*servers, **settings))[0]  # type: ignore[arg-type]
        finally:
            for server in servers:
                await server.running_now.__aexit__(None, None, None)  # type: ignore[attr-defined]

    for server in servers:
        server.running_now = server.running()  # type: ignore[attr-defined]
    return asyncio.run(go())


def test_a_server_that_is_right_scores_all_and_alone_there_is_nothing_to_compare():
    found = run(KnowingServer(KNOWN))
    assert found.verdict == "scored"
    assert {row.name: row.score for row in found.suites if row.measure == "passed"} == {
        "invoices": 1.0,
        "tools": 1.0,
        "arithmetic": 1.0,
    }
    assert "Without --against" in found.statement
    assert next(row for row in found.suites if row.name == "invoices").low < 0.95
    assert found.output_tokens["A"] > 500


def test_a_server_beside_one_as_good_is_not_called_worse_and_the_interval_is_told():
    found = run(KnowingServer(KNOWN, share(0.05, "a")), KnowingServer(KNOWN, share(0.05, "b")))
    assert found.verdict == "no difference found"
    row = next(row for row in found.suites if row.name == "tools")
    assert "no difference larger than" in row.words
    assert row.difference_low is not None
    assert row.difference_low < 0 < (row.difference_high or 0)
    assert row.items_needed["3"] > row.items_needed["5"] > 50


def test_a_server_that_lost_a_quarter_of_a_suite_is_worse_there():
    found = run(KnowingServer(KNOWN, lambda i: i.suite == "tools" and share(0.25, "a")(i)), KnowingServer(KNOWN))
    assert found.verdict == "worse"
    rows = {(row.name, row.measure): row.verdict for row in found.suites}
    assert rows[("tools", "passed")] == "worse"
    assert rows[("invoices", "passed")] == rows[("arithmetic", "passed")] == "no difference found"
    assert "tools: worse by" in found.statement
    assert found.statement.startswith("Worse:")
    other = run(KnowingServer(KNOWN), KnowingServer(KNOWN, lambda i: i.suite == "tools" and share(0.25, "a")(i)))
    assert other.verdict == "better"


def test_failed_requests_are_in_no_score_and_in_the_verdict():
    found = run(KnowingServer(KNOWN, fails=share(0.04, "x")), KnowingServer(KNOWN))
    assert 0 < found.failed < 0.05 * len(KNOWN)
    assert found.verdict == "no difference found"
    assert f"{found.failed} of {len(KNOWN)} requests to A failed" in found.statement
    assert found.failures["A"] == {"http 503": found.failed}
    assert sum(row.failed for row in found.suites if row.measure == "passed") == found.failed
    assert all(row.score == 1.0 for row in found.suites)
    many = run(KnowingServer(KNOWN), KnowingServer(KNOWN, fails=share(0.3, "x")))
    assert many.verdict == "undecided"
    assert "too many" in many.statement


def test_a_server_that_only_refuses_is_given_up_early():
    server = KnowingServer(KNOWN, fails=lambda _: True)
    found = run(server)
    assert found.verdict == "nothing measured"
    assert not found.complete
    assert len(server.asked) == 8
    assert any("the queue is full" in note for note in found.notes)


def test_an_interrupted_check_goes_on_with_what_is_missing_and_failed(tmp_path: Path):
    async def go() -> None:
        path, items = tmp_path / "j", KNOWN[:40]
        server = KnowingServer(items, fails=lambda item: item.id == items[0].id)
        async with server.running():
            task = asyncio.ensure_future(checked(server, path=path))
            while len(server.asked) < 12:
                await asyncio.sleep(0.001)
            task.cancel()
            found, runner = await task
            assert runner.interrupted
            assert not found.complete
            assert "interrupted" in found.statement
            kept, server.fails = len(found.answers), lambda _: False
            assert 8 < kept < 40
            server.asked.clear()
            found, _ = await checked(server, path=path)
            failed = any(asked.id == items[0].id for asked in runner.answers)
            assert len(server.asked) == 40 - kept + failed
            assert found.complete
            assert [asked.id for asked in found.answers] == [item.id for item in items]

    asyncio.run(go())


def test_thinking_is_switched_off_where_the_server_can():
    server = KnowingServer(KNOWN[:3])
    run(server)
    assert all(body["chat_template_kwargs"] == OFF["chat_template_kwargs"] for body in server.asked)
    assert all(body["temperature"] == 0 for body in server.asked)
    server = KnowingServer(KNOWN[:3])
    server.refuses_switch = True
    assert run(server).verdict == "scored"
    assert all("chat_template_kwargs" not in body for body in server.asked)


def test_more_output_than_is_set_aside_ends_quick_and_is_told():
    found = run(KnowingServer(KNOWN), budget=400)
    assert 400 <= found.output_tokens["A"] < 600
    assert any("were left out" in note for note in found.notes)
    assert found.complete


def test_suites_take_turns():
    first = Counter(item.suite for item in in_turns(KNOWN)[:44])
    assert first == {"invoices": 12, "tools": 20, "arithmetic": 12}


def test_facts_stand_in_a_text_that_is_as_long_as_was_asked():
    items = [item for item in long_context.items("1", 6) if item.filler and item.filler.tokens <= 16_000]
    server = KnowingServer(items)
    found = run(server)
    assert [row.score for row in found.suites] == [1.0]
    lengths = sorted(len(str(body["messages"][0]["content"]).split()) for body in server.asked)
    assert lengths == [1000 - 64, 4000 - 64, 16_000 - 64]
    for item in items:
        assert item.filler is not None
        assert any(all(said in str(body) for _, said in item.filler.sentences) for body in server.asked)


def test_a_sentence_stands_as_deep_as_it_should():
    text = "".join(f"Sentence number {n:03}. " for n in range(100))
    found = placed(text, Filler(0, "", [(0.25, "First fact."), (0.9, "Second fact.")]))
    assert found.index("First fact.") / len(found) == pytest.approx(0.25, abs=0.02)
    assert found.index("Second fact.") / len(found) == pytest.approx(0.9, abs=0.02)
    assert ". First fact. Sentence" in found


def test_the_document_follows_its_schema_and_reads_back(tmp_path: Path):
    found = run(KnowingServer(KNOWN[:20], share(0.2, "a")), KnowingServer(KNOWN[:20]))
    path = tmp_path / "r.json"
    path.write_text(to_json(found), encoding="utf-8")
    again = load(path)
    assert [row.difference for row in again.suites] == pytest.approx([row.difference for row in found.suites], abs=1e-6)
    assert [asked.replies["B"].reply.text for asked in again.answers] == [
        a.replies["B"].reply.text for a in found.answers
    ]
    jsonschema.validate(json.loads(path.read_text()), schema())
    published = Path(__file__).parents[2] / "docs" / "check-schema.json"
    assert json.loads(published.read_text()) == schema(), "python -m stoker.check.document > docs/check-schema.json"
    path.write_text("{}")
    with pytest.raises(BenchError, match="not written by stoker check"):
        load(path)


def test_two_checks_are_compared_item_by_item():
    before, after = run(KnowingServer(KNOWN)), run(KnowingServer(KNOWN, share(0.2, "a")))
    found = compared(before, after)
    assert found.verdict == "worse"
    assert [server.name for server in found.environment.servers] == ["A", "B"]
    changed = run(KnowingServer([*KNOWN[:50], *tools.items("2", 20)]))
    found = compared(before, changed)
    assert found.notes == ["20 of 70 items are not in the earlier check and were left out."]
    assert found.verdict == "no difference found"


def test_items_longer_than_the_context_are_left_out():
    assert not [item for item in draw("full", "1", context=8192) if item.filler and item.filler.tokens > 8000]
    one = Item(id="x", messages=user("x"), checker="exact", expect="x", max_tokens=100)
    assert one.cost == 50
