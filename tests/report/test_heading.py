"""A report begins with a sentence that a person would say, and its cards compare like with like."""

import asyncio
import re

import pytest
from msgspec.structs import replace

from stoker.bench import agent
from stoker.bench.document import compared, document
from stoker.bench.record import Document
from stoker.bench.suites import Cell
from stoker.report.bench import html_report
from stoker.report.heading import cards, heading
from tests.bench.drive import bench
from tests.bench.mock import Behaviour, Mock, VirtualClock


@pytest.fixture(scope="module")
def one() -> Document:
    async def run() -> Document:
        requests = []
        for cell in (Cell("Q&A", rounds=4), Cell(agent.NAME, "warm", histories=(8000,), rounds=2)):
            mock = Mock(Behaviour(per_chunk=(3,), tool_call=cell.name == agent.NAME), VirtualClock())
            async with mock.running():
                found = await bench(mock, cell)
            requests += found.requests
        return document("test", requests, found.environment, True, [])

    return asyncio.run(run())


def _slower(found: Document, share: float) -> Document:
    requests = [
        replace(each, decode_tokens_per_s=each.decode_tokens_per_s and each.decode_tokens_per_s * share)
        for each in found.requests
    ]
    return document("test", requests, found.environment, True, [])


def test_one_server_is_a_sentence_with_its_speed_and_the_seconds_of_a_turn(one: Document) -> None:
    assert re.fullmatch(
        r"mock decodes 75 tokens/s on general text and 75 on tool calls; a turn behind 8K tokens takes \d+\.\d s\.",
        heading(one),
    )
    shown = {card.name: card.value for card in cards(one)}
    assert shown["General text"] == shown["Tool-call turns"] == "75.0"
    assert shown["Tokens per step"] == "3.00"


def test_two_servers_are_a_comparison_and_every_card_has_both(one: Document) -> None:
    both = compared(one, _slower(one, 0.5))
    assert re.fullmatch(r"B decodes slower on \d of \d workloads \(by 50%\) than A\.", heading(both))
    assert heading(compared(one, _slower(one, 1.0))).startswith("B decodes as fast as A")
    for card in cards(both)[:-1]:
        assert [who for who, _ in card.rows] == ["A", "B"]
    assert dict(cards(both)[0].rows) == {"A": "75.0", "B": "37.5"}


def test_failures_and_interruptions_stay_in_the_heading(one: Document) -> None:
    failed = replace(one, complete=False, headline=replace(one.headline, failed=2, failures={"http 503": 2}))
    assert heading(failed).startswith("Interrupted. mock decodes")
    assert heading(failed).endswith("requests FAILED (http 503: 2).")
    nothing = replace(
        one, headline=replace(one.headline, completed=0, text="NOTHING MEASURED: 5 of 5 requests failed.")
    )
    assert heading(nothing) == "NOTHING MEASURED: 5 of 5 requests failed."


def test_assumed_acceptance_is_in_the_heading(one: Document) -> None:
    assumed = replace(one, workloads=[replace(row, steps_source="acceptance assumed") for row in one.workloads])
    assert "(acceptance assumed)." in heading(assumed)


def test_warnings_are_notes_below_the_figures(one: Document) -> None:
    page = html_report(replace(one, warnings=["A long warning."]))
    assert page.index("All figures") < page.index("A long warning.")
    assert 'class="warning"' not in page
    assert '<a href="#notes">1 note on these figures</a>' in page
