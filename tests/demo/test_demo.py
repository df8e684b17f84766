"""`make demo` against mock servers: every method on every kind, the table, and tokens compared."""

import asyncio
import sys
from typing import Any

import pytest
from rich.console import Console

from stoker.demo import __main__ as demo
from stoker.demo import servers
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
    assert "adaptive" in html_report(found)


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
