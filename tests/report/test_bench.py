"""The page of a benchmark has everything it promises, escapes every word, stays small, and is drawn without a flaw."""

import asyncio

import pytest
from msgspec.structs import replace

from stoker.bench import agent
from stoker.bench.document import document
from stoker.bench.record import Document
from stoker.bench.suites import Cell
from stoker.report.bench import html_report
from tests.bench.drive import bench
from tests.bench.mock import Behaviour, Mock, VirtualClock
from tests.report.browser import NEEDS_CHROMIUM, VIEWS, charts_drawn

CELLS = (
    Cell("Q&A", rounds=3),
    Cell("Code", rounds=3),
    Cell(agent.NAME, "warm", histories=(8000, 32000, 100000), rounds=1),
    Cell("Long-RAG-8K", "cold", rounds=2),
    Cell("Long-RAG-8K", "warm", rounds=2),
)


@pytest.fixture(scope="module")
def found() -> Document:
    async def run() -> Document:
        documents = []
        for cell in CELLS:
            talks = cell.name == agent.NAME
            how = Behaviour(per_chunk=(1, 5, 3), error_every=0 if talks else 3, tool_call=talks)
            mock = Mock(how, VirtualClock())
            async with mock.running():
                documents.append(await bench(mock, cell))
        for streams in (1, 2, 4):
            mock = Mock(Behaviour(ttft_s=0.01, steps_per_s=200, chunks=8))
            async with mock.running():
                documents.append(await bench(mock, Cell("Math", concurrency=streams, rounds=1)))
        requests = [request for each in documents for request in each.requests]
        return document("test", requests, documents[0].environment, True, ["A warning with <angle> brackets & such."])

    return asyncio.run(run())


def test_everything_a_report_promises_is_in_it(found):
    page = html_report(found)
    for words in (
        "Seconds per agent turn",
        "100K",
        "General",
        "Agent turns",
        "Accepted per step",
        "Time to first token",
        "Decode speed per request",
        "Throughput by streams at a time",
        "Timeline",
        "Environment",
        "Command:",
        "Cold and warm prompts",
        "FAILED",
        "the queue is full",
        "&lt;angle&gt;",
    ):
        assert words in page, words
    assert len(page.encode()) < 1_000_000
    assert "http://" not in page.replace(found.environment.servers[0].url, "")
    assert "<script" not in page


def test_words_of_servers_and_users_are_never_markup(found):
    evil = '"><script>alert(1)</script>'
    requests = [
        replace(request, workload=evil, failure=request.failure and replace(request.failure, kind=evil, message=evil))
        for request in found.requests
    ]
    server = replace(found.environment.servers[0], model=evil, engine=evil, url=evil)
    environment = replace(found.environment, servers=[server], gpus=[evil], command=evil)
    html = html_report(document(evil, requests, environment, True, [evil]))
    assert "<script" not in html
    assert html.count("&lt;script&gt;") > 20


def test_a_page_of_a_thousand_requests_is_under_a_megabyte(found):
    requests = found.requests * (1000 // len(found.requests) + 1)
    many = document("test", requests, found.environment, True, [])
    assert len(html_report(many).encode()) < 1_000_000


@NEEDS_CHROMIUM
@pytest.mark.parametrize(("scheme", "width"), VIEWS)
def test_a_browser_draws_it_and_has_nothing_to_say(found, scheme, width, tmp_path):
    long = [
        replace(request, workload="prompts of a user's own with a name beyond measure") for request in found.requests
    ]
    both = document("test", found.requests + long, found.environment, True, [])
    assert charts_drawn(html_report(both), scheme, width, tmp_path) >= 7
