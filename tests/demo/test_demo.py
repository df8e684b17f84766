"""`make demo` against mock servers: every method on every kind, the table, and tokens compared."""

import asyncio
import sys
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from stoker.demo import __main__ as demo
from stoker.demo import servers
from stoker.demo.story import story
from stoker.report.bench import html_report
from tests.bench.mock import Behaviour, Mock


def _found(*behaviours: Behaviour) -> tuple[Any, demo.Tokens]:
    async def run() -> Any:
        mocks = [Mock(how) for how in behaviours]
        async with mocks[0].running(), mocks[1].running(), mocks[2].running(), mocks[3].running():
            urls = dict(zip(demo.METHODS, (mock.url for mock in mocks), strict=True))
            found, tokens, answer = await demo._measure(urls, Console(quiet=True))
            assert answer.startswith(" w00000")
            return found, tokens

    return asyncio.run(run())


def test_every_method_is_measured_and_compared_token_for_token():
    quick: dict[str, Any] = {"ttft_s": 0.001, "steps_per_s": 2000.0}
    plain, drafted = Behaviour(chunks=33, **quick), Behaviour(chunks=9, per_chunk=(4,), **quick)  # 33 tokens each
    found, tokens = _found(plain, drafted, drafted, Behaviour(chunks=9, per_chunk=(3,), **quick))  # the last has 25
    for kind in demo.KINDS:
        assert tokens.identical("MTP-3", kind) == (33 * demo.PER_KIND, 33 * demo.PER_KIND)
        assert tokens.identical("adaptive", kind) == (25 * demo.PER_KIND, 33 * demo.PER_KIND)
    console = Console(width=100, record=True, quiet=True)
    console.quiet = False
    with console.capture() as captured:
        console.print(demo._table(found.workloads, tokens))
    shown = captured.get()
    assert shown.count("DFlash-12") == len(demo.KINDS)
    assert f"{33 * demo.PER_KIND}/{33 * demo.PER_KIND}" in shown
    assert {server.name for server in found.environment.servers} == set(demo.METHODS)
    assert {"Q&A", "Agent", *demo.KINDS} <= {row.name for row in found.workloads}
    page = html_report(found, story(found.workloads, list(demo.KINDS), demo.PLAIN, demo.ADAPTIVE, 100, 100))
    assert "adaptive" in page
    assert "all 100 tokens identical.</h1>" in page
    assert page.count("plain → adaptive") == len(demo.KINDS), "a card for each kind of text, like against like"


def test_the_heading_is_a_sentence_about_speed_and_identity() -> None:
    row = next(iter(_found(*4 * [Behaviour(chunks=9, ttft_s=0.001, steps_per_s=2000.0)])[0].workloads))

    def told(same: int, **ratios: float) -> str:
        rows = [
            replace(row, name=kind, server=server, decode_tokens_per_s=100.0 * (ratio if server == "b" else 1.0))
            for kind, ratio in ratios.items()
            for server in ("a", "b")
        ]
        return story(rows, list(ratios), "a", "b", same, 3672).heading

    fast = "Drafting made calls 4.1 times as fast"
    assert told(3672, calls=4.1, JSON=3.0, prose=1.02) == (
        f"{fast} and brought nothing on prose; all 3,672 tokens identical."
    )
    assert told(3672, calls=4.1, prose=0.8) == f"{fast} and prose 20% slower; all 3,672 tokens identical."
    assert told(3672, calls=4.1, prose=1.5) == f"{fast} and prose 1.5 times; all 3,672 tokens identical."
    assert told(3600, calls=1.0) == "Drafting brought nothing here; 72 of 3,672 tokens DIFFER."


def test_a_server_that_does_not_start_is_an_error_with_what_it_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "STOKER", (sys.executable, "-c", "raise SystemExit('error: no room [12 GiB] here')"))
    with pytest.raises(SystemExit) as end:
        demo.run()
    assert end.value.code == 2
    said = capfd.readouterr().err
    assert "error: the demo's server with --draft none did not get ready in" in said
    assert "error: no room [12 GiB] here" in said
    assert "Traceback" not in said
