"""`make demo`: the embedded model behind real servers on this CPU, plainly and with three ways of drafting, measured by
`stoker bench` in turns and compared token for token; then the quick suite, and a report with charts."""

import asyncio
import secrets
import sys
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from stoker.bench import document
from stoker.bench.answer import Answer
from stoker.bench.environment import environment
from stoker.bench.journal import Journal
from stoker.bench.progress import Bars
from stoker.bench.record import Document, Request, Workload
from stoker.bench.run import Runner
from stoker.bench.suites import Cell, Options, Plan, plan
from stoker.bench.target import Target
from stoker.bench.workloads import Prompt
from stoker.cli.progress import check_writable, replace_unencodable, say_error, write_result
from stoker.demo import prompts
from stoker.demo.servers import serving
from stoker.demo.story import story
from stoker.errors import StokerError
from stoker.report import figures
from stoker.report.bench import html_report

PLAIN, ADAPTIVE = "plain", "adaptive"
METHODS = {PLAIN: "none", "MTP-3": "mtp:3", "DFlash-12": "dflash:12", ADAPTIVE: "auto"}
KINDS = {"JSON": "JSON", "code": "code", "prose": "prose", "tool calls": "agent"}  # and their names in prompts.json
PER_KIND, TOKENS = 3, 128
PAGE, RESULT = Path("demo-report.html"), Path("demo-report.json")


class Tokens:
    """What every server answered to every prompt."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], list[list[int]]] = {}

    def record(self, request: Request, answer: Answer) -> None:
        self._said.setdefault((request.server, request.workload), []).append(answer.ids)

    def identical(self, server: str, kind: str) -> tuple[int, int]:
        """Tokens that are the plain server's, in their places, of how many."""
        plain = self._said.get((PLAIN, kind), [])
        pairs = [zip(a, b, strict=False) for a, b in zip(plain, self._said.get((server, kind), []), strict=False)]
        return sum(a == b for pair in pairs for a, b in pair), sum(map(len, plain))


def main() -> None:
    console = Console(highlight=False)
    console.print(
        "The embedded model: a Qwen3.5-style hybrid (GatedDeltaNet + attention, mixture of experts) with MTP head and "
        "DFlash drafter, in INT4, FP8, INT8 and BF16. What it was trained on and what it can do: "
        "src/stoker/demo/MODEL_CARD.md\n"
    )
    began = time.monotonic()
    with console.status("starting") as status:
        servers = serving(list(METHODS.values()), status.update)
        with servers as addresses:
            status.stop()
            waited = time.monotonic() - began
            console.print(f"{len(METHODS)} servers (stoker serve --model demo --draft …) ready after {waited:.0f} s\n")
            found, tokens, answer = asyncio.run(_measure(dict(zip(METHODS, addresses, strict=True)), console))
    console.print(prompts()["JSON"][0].partition("user\n")[2].partition("<|im_end|>")[0], markup=False, style="dim")
    console.print(f"\n{answer}\n", markup=False)
    console.print(_table(found.workloads, tokens))
    console.print(
        "On prose drafting brings nothing: too few guesses are right to pay for their verification. A fixed depth "
        "loses there; adaptive drafting gives up and stays near plain decoding.\n"
    )
    same, of = (sum(pair) for pair in zip(*_identities(tokens), strict=True))
    told = story(found.workloads, list(KINDS), PLAIN, ADAPTIVE, same, of)
    console.print(f"{told.heading}\n", style="bold")
    console.print(
        f"tokens identical: {same} of {of} (every drafting server against the plain one). Measured here over HTTP, one "
        f"stream, greedy, {PER_KIND} unseen prompts of each kind, up to {TOKENS} tokens, decoding only, in turns."
    )
    for line in (*figures.turns(found), *figures.throughput(found), figures.noise(found)):
        console.print(line, markup=False, style="dim")
    write_result(PAGE, html_report(found, told))
    write_result(RESULT, document.to_json(found))
    console.print(f"\nThe whole report: {PAGE} (every request: {RESULT}). Yours: stoker bench URL --html report.html")


async def _measure(servers: dict[str, str], console: Console) -> tuple[Document, Tokens, str]:
    """The drafting methods on the demo's own prompts, in turns; then the quick suite on the adaptive server."""
    tokens, started, first = Tokens(), datetime.now(UTC), ""
    asked = {
        kind: [Prompt(kind, {"prompt": text, "max_tokens": TOKENS}, None) for text in prompts()[name][:PER_KIND]]
        for kind, name in KINDS.items()
    }
    own = Plan([Cell(kind, "own", each=PER_KIND, rounds=1) for kind in KINDS])
    options = Options(runs=1, max_tokens=TOKENS)
    async with AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(Target(url, name=name)) for name, url in servers.items()]
        with Bars(console, own.cells, len(targets)) as bars:
            runner = Runner(targets, own, options, Journal(None, {}, Request), secrets.token_hex(8), bars, own=asked)
            runner.on_answer = tokens.record
            await runner.run()
        first = next((r.text for r in runner.requests if r.server == PLAIN and r.workload == "JSON"), "")
        adaptive = [target for target in targets if target.name == ADAPTIVE]
        suite = plan("quick", options, adaptive[0].context)
        with Bars(console, suite.cells, 1) as bars:
            quick = Runner(adaptive, suite, options, Journal(None, {}, Request), secrets.token_hex(8), bars)
            await quick.run()
        later = max((r.started_s + (r.total_s or 0.0) for r in runner.requests), default=0.0)
        for request in quick.requests:
            request.started_s += later
        requests = runner.requests + quick.requests
        facts = environment(started, [], [t.facts() for t in targets], runner.overhead.client(requests))
        return document.document("demo", requests, facts, not quick.interrupted, suite.skipped), tokens, first


def _identities(tokens: Tokens) -> Iterable[tuple[int, int]]:
    return [tokens.identical(method, kind) for method in METHODS if method != PLAIN for kind in KINDS]


def _table(rows: list[Workload], tokens: Tokens) -> Table:
    table = Table(title="decoding with the embedded model", box=SIMPLE, pad_edge=False)
    table.add_column("text", no_wrap=True, min_width=5)
    table.add_column("drafting", no_wrap=True)
    for name in ("tok/s", "steps/s", "tok/step", "speedup", "identical"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind in KINDS:
        plain = next(row for row in rows if (row.name, row.server) == (kind, PLAIN))
        for method in METHODS:
            row = next(row for row in rows if (row.name, row.server) == (kind, method))
            same, of = tokens.identical(method, kind)
            speedup = (row.decode_tokens_per_s or 0.0) / (plain.decode_tokens_per_s or 1.0)
            table.add_row(
                kind if method == PLAIN else "",
                method,
                figures.number(row.decode_tokens_per_s, 0),
                figures.number(row.steps_per_s, 0),
                figures.number(row.accepted_per_step, 2),
                f"{speedup:.2f}",
                f"{same}/{of}",
                end_section=method == list(METHODS)[-1],
            )
    return table


def run() -> None:
    """Entry point. A server that does not start is one sentence with what it said, and exit code 2."""
    replace_unencodable()
    try:
        check_writable(PAGE, RESULT)
        main()
    except StokerError as error:
        say_error(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
