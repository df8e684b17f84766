"""Reported figures against what a server of known speed truly did, in every way servers differ or misbehave."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from stoker.bench import answer, measure, summary
from stoker.bench.record import Document
from stoker.bench.suites import Cell
from stoker.report import figures
from tests.bench.drive import bench, check
from tests.bench.mock import Behaviour, Mock, VirtualClock

MANY = (3, 1, 9, 2, 5, 1, 7, 4, 6, 8)  # tokens per chunk, as a drafter has it

CASES = {
    "one token per chunk": Behaviour(),
    "1 to 9 tokens per chunk": Behaviour(per_chunk=MANY),
    "first chunk bundles tokens": Behaviour(per_chunk=MANY, first_chunk=12, chunks=60),
    "reasoning first": Behaviour(per_chunk=MANY, reasoning_chunks=25),
    "reasoning only": Behaviour(per_chunk=MANY, reasoning_chunks=40),
    "role-only first chunk": Behaviour(role_first=0.15),
    "role-only first chunk, reasoning first": Behaviour(role_first=0.15, reasoning_chunks=10, per_chunk=MANY),
    "tool-call deltas": Behaviour(tool_call=True, per_chunk=MANY),
    "reasoning, then a tool call": Behaviour(tool_call=True, reasoning_chunks=8, per_chunk=MANY),
    "no usage, token ids": Behaviour(usage=False, per_chunk=MANY),
    "no usage, no ids, /tokenize": Behaviour(usage=False, ids=False, per_chunk=MANY),
    "usage only": Behaviour(ids=False, per_chunk=MANY, tokenize=False),
    "continuous usage": Behaviour(ids=False, continuous=True, per_chunk=MANY, tokenize=False),
    "continuous usage, no last one": Behaviour(ids=False, usage=False, continuous=True, per_chunk=MANY),
    "usage counts half, token ids": Behaviour(usage_factor=0.5, per_chunk=MANY),
    "usage counts half, /tokenize": Behaviour(usage_factor=0.5, ids=False, per_chunk=MANY),
    "usage counts triple, /tokenize": Behaviour(usage_factor=3.0, ids=False, per_chunk=MANY),
    "continuous usage counts half": Behaviour(usage_factor=0.5, ids=False, continuous=True, per_chunk=MANY),
    "strict about unknown fields": Behaviour(strict=True, ids=False, per_chunk=MANY, tokenize=False),
    "no statistics but /metrics": Behaviour(speculation=False, metrics=True, per_chunk=MANY),
    "no statistics at all": Behaviour(speculation=False, per_chunk=MANY),
    "every 10th refused": Behaviour(error_every=10, per_chunk=MANY),
    "every 10th fails in its stream": Behaviour(error_every=10, error_in_stream=True),
    "a stall in the middle": Behaviour(stall_at=20, stall_s=1.5, per_chunk=MANY),
    "each third closed early": Behaviour(close_after=12, per_chunk=MANY),
}


def measured(how: Behaviour, rounds: int = 4, cell: Cell | None = None, **settings: Any) -> tuple[Document, Mock]:
    async def run() -> tuple[Document, Mock]:
        mock = Mock(how, VirtualClock())
        async with mock.running():
            return await bench(mock, cell or Cell("Q&A", rounds=rounds), **settings), mock

    return asyncio.run(run())


@pytest.mark.parametrize("name", CASES)
def test_figures_are_those_of_the_server(name):
    how = CASES[name]
    found, mock = measured(how, rounds=20 if how.error_every else 6)
    [row] = found.workloads
    check(row, mock)
    assert row.quality_ok


def test_failures_are_counted_by_kind_and_keep_the_servers_words():
    found, _ = measured(CASES["every 10th refused"], rounds=20)
    assert found.headline.failures == {"http 503": 2}
    assert "2 of 20 requests FAILED (http 503: 2)" in found.headline.text
    failed = [request for request in found.requests if request.failure]
    assert {request.failure.message for request in failed if request.failure} == {"the queue is full"}
    found, _ = measured(CASES["every 10th fails in its stream"], rounds=20)
    assert found.headline.failures == {"error in stream": 2}
    found, _ = measured(CASES["each third closed early"], rounds=6)
    assert found.headline.failures == {"closed early": 2}


def test_where_counts_come_from_is_said():
    sources = {
        "no usage, token ids": "token_ids",
        "usage only": "usage",
        "continuous usage": "usage",
        "no usage, no ids, /tokenize": "tokenize",
        "usage counts half, /tokenize": "tokenize",
    }
    for name, source in sources.items():
        found, _ = measured(CASES[name], rounds=1)
        assert found.workloads[0].count_source == source, name
    for name in ("usage counts half, token ids", "usage counts half, /tokenize", "usage counts triple, /tokenize"):
        found, _ = measured(CASES[name], rounds=1)
        assert any("usage is wrong in 1 of 1 answers" in line for line in found.warnings), name


def test_nothing_to_count_with_is_an_estimate_and_says_so():
    found, _ = measured(Behaviour(ids=False, usage=False, tokenize=False, per_chunk=MANY), rounds=1)
    assert found.workloads[0].count_source == "chunks (estimate)"
    assert any("Tokens are estimated from chunks" in line for line in found.warnings)


def test_where_steps_come_from_is_said():
    for name, source in (
        ("1 to 9 tokens per chunk", "response"),
        ("no statistics but /metrics", "metrics"),
        ("no statistics at all", "chunks (estimate)"),
    ):
        found, _ = measured(CASES[name], rounds=1)
        assert found.workloads[0].steps_source == source, name


def test_assumed_acceptance_is_named_wherever_a_figure_of_it_is_shown():
    found, _ = measured(Behaviour(assumed=2.6, per_chunk=MANY), rounds=1)
    row = found.workloads[0]
    assert row.steps_source == "response, acceptance assumed"
    assert "tokens per step (acceptance assumed)" in found.headline.text
    assert any(line.startswith(f"Acceptance assumed on {row.name}") for line in found.warnings)
    assert any(cell.endswith(" assumed") for cell in figures.cells(row, False))
    found, _ = measured(Behaviour(per_chunk=MANY), rounds=1)
    assert not any("assumed" in text for text in (found.headline.text, *found.warnings))


def test_counters_that_saw_somebody_elses_tokens_are_not_believed():
    found, _ = measured(Behaviour(speculation=False, metrics=True, per_chunk=MANY, foreign_tokens=50), rounds=2)
    assert found.workloads[0].steps_source == "chunks (estimate)"


def test_every_request_rejected_is_nothing_measured():
    how = Behaviour(error_every=1, error_status=400, error_text="prompt has 130,817 tokens: 131,073 > context 131,072")
    found, _ = measured(how, rounds=5)
    [row] = found.workloads
    assert (found.headline.completed, found.headline.failed) == (0, 5)
    assert (row.completed, row.failed, row.failures) == (0, 5, {"http 400": 5})
    assert "NOTHING MEASURED: 5 of 5" in found.headline.text
    assert row.decode_tokens_per_s is None
    assert found.requests[0].failure is not None
    assert found.requests[0].failure.message == how.error_text


def test_looping_answers_are_not_part_of_the_headline():
    found, _ = measured(Behaviour(looping=True, per_chunk=MANY), rounds=2)
    assert not found.workloads[0].quality_ok
    assert found.headline.general_decode_tokens_per_s is None
    assert "broken" in found.headline.text


def test_a_server_that_hangs_is_a_timeout():
    async def run() -> Document:
        mock = Mock(Behaviour(ttft_s=0.0, hangs=True))
        async with mock.running():
            return await bench(mock, Cell("Q&A", seconds=0.1, rounds=1), timeout=3.0)

    found = asyncio.run(run())
    assert found.headline.failures == {"timeout": 1}
    assert found.requests[0].failure is not None
    assert "nothing arrived for 3 s" in found.requests[0].failure.message


def test_cached_tokens_are_the_hit_rate_and_no_prefill():
    found, _ = measured(Behaviour(cached_share=0.5), rounds=3, cell=Cell("Q&A", "warm", rounds=3))
    [row] = found.workloads
    assert row.prefix_hit_rate == pytest.approx(0.5)
    assert row.prefill_tokens_per_s == pytest.approx(48 / 0.2, rel=0.02)


# What is often measured wrongly. Each of these must be caught by the checks above.


def _chunks_as_tokens(found: answer.Answer, text_tokens: int | None = None) -> None:
    for chunk in found.chunks:
        chunk.tokens = 1
    found.tokens, found.source = len(found.chunks), "usage"


def _believe_usage(found: answer.Answer, text_tokens: int | None = None) -> None:
    found.tokens, found.source = found.usage_number("completion_tokens"), "usage"
    answer._spread(found.chunks, found.tokens or 0)


def _first_chunk_decoded(request: Any, found: answer.Answer) -> Any:
    right: Any = _TIMED(request, found)
    right.decode_tokens_per_s = right.completion_tokens / right.decode_s
    return right


def _steps_are_chunks(found: answer.Answer) -> tuple[int, str]:
    return len(found.chunks) * 2, "response"


def _gaps_per_chunk(requests: Any) -> tuple[list[float], list[int]]:
    gaps = [b - a for r in requests for a, b in zip(r.chunk_s, r.chunk_s[1:], strict=False)]
    return gaps, [1] * len(gaps)


def _role_is_first(found: answer.Answer, at: float, event: dict[str, Any]) -> None:
    for choice in event.get("choices") or ():
        if choice.get("delta", {}).get("role"):
            found.chunks.append(answer.Chunk(at, "x", [0], None))
    _TAKE(found, at, event)


def _reasoning_ignored(found: answer.Answer, at: float, event: dict[str, Any]) -> None:
    if not any(choice.get("delta", {}).get("reasoning_content") for choice in event.get("choices") or ()):
        _TAKE(found, at, event)


def _calls_ignored(found: answer.Answer, at: float, event: dict[str, Any]) -> None:
    if not any(choice.get("delta", {}).get("tool_calls") for choice in event.get("choices") or ()):
        _TAKE(found, at, event)


def _failures_are_fine(exchange: Any) -> answer.Answer:
    found = _READ(exchange)
    found.failure = None
    return found


_TIMED, _TAKE, _READ = measure.timed, answer._take, answer.read
MISTAKES: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "chunks counted as tokens": (answer, "count", _chunks_as_tokens, "1 to 9 tokens per chunk"),
    "usage believed": (answer, "count", _believe_usage, "usage counts half, token ids"),
    "first chunk's tokens decoded in no time": (measure, "timed", _first_chunk_decoded, "first chunk bundles tokens"),
    "steps made up": (answer, "steps", _steps_are_chunks, "1 to 9 tokens per chunk"),
    "inter-token time per chunk": (summary, "token_gaps", _gaps_per_chunk, "1 to 9 tokens per chunk"),
    "role chunk taken as first token": (answer, "_take", _role_is_first, "role-only first chunk"),
    "reasoning ignored": (answer, "_take", _reasoning_ignored, "reasoning first"),
    "tool calls ignored": (answer, "_take", _calls_ignored, "tool-call deltas"),
    "refusals counted as completed": (answer, "read", _failures_are_fine, "every 10th refused"),
    "closed streams counted as completed": (answer, "read", _failures_are_fine, "each third closed early"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught(name, monkeypatch):
    module, function, wrong, case = MISTAKES[name]
    for where in (module, measure, __import__("stoker.bench.run", fromlist=["run"])):
        if hasattr(where, function):
            monkeypatch.setattr(where, function, wrong)
    found, mock = measured(CASES[case], rounds=20 if CASES[case].error_every else 6)
    with pytest.raises((AssertionError, TypeError)):
        check(found.workloads[0], mock)


def test_in_real_time_over_many_streams():
    """Eight streams on the real clock, against the mock's own record. A wrong definition fails every attempt; a machine
    that stood still for a moment fails one."""

    async def run() -> None:
        mock = Mock(Behaviour(per_chunk=MANY, chunks=30, role_first=0.1, ttft_s=0.3))
        async with mock.running():
            found = await bench(mock, Cell("Q&A", concurrency=8, each=1, rounds=1))
            check(found.workloads[0], mock)

    for attempt in range(8):
        try:
            asyncio.run(run())
        except AssertionError:
            if attempt == 7:
                raise
        else:
            break
