"""`stoker bench`: measure any OpenAI-compatible server, or two of them taking turns."""

import asyncio
import json
import secrets
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.bench.suites import NAMES, Options
from stoker.cli.counts import context as count_context
from stoker.cli.counts import tokens
from stoker.cli.progress import check_writable, error_console, output_console, write_result
from stoker.errors import BenchError, RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.bench.record import Document
    from stoker.bench.replay import Session

SUITE_HELP = (
    f"{', '.join(NAMES)}. quick: a few minutes; single: one stream, nine workloads; agent: tool calls over a growing "
    "history; mix: several streams; prefix: cold against warm prompts; depth: Spark Arena v2 (pp2048/tg128 by depth "
    "and concurrency); sweep: concurrency or request rate; soak: half an hour or --seconds."
)
DEFAULTS = Options()
STOPPED = "Stopped early:"


def bench(
    url: Annotated[str, typer.Argument(help="The server, e.g. http://localhost:8000", show_default=False)],
    suite: Annotated[str, typer.Option(help=SUITE_HELP)] = "quick",
    model: Annotated[str, typer.Option(help="Which of its models; the first it lists if not said.")] = "",
    runs: Annotated[int, typer.Option(help="Measured runs of each workload, after one warm-up.")] = DEFAULTS.runs,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write every request and figure (docs/bench-schema.json); - is stdout."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with charts: one file, no network needed.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write llama-benchy's CSV, for Spark Arena.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown.")] = None,
    against: Annotated[str, typer.Option(help="A second server: both are measured in turns, ABAB.")] = "",
    against_model: Annotated[str, typer.Option(help="The second server's model.")] = "",
    workload: Annotated[
        list[str] | None, typer.Option(help="Only these workloads; may be given several times.")
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Streams at a time, e.g. 1,2,4 (mix, depth, sweep, soak).")] = "",
    rate: Annotated[str, typer.Option(help="Requests per second, e.g. 0.5,1,2 (sweep), arriving at random.")] = "",
    seconds: Annotated[float | None, typer.Option(help="How long each round lasts (mix, sweep, soak).")] = None,
    depths: Annotated[str, typer.Option(help="Tokens of context, e.g. 0,4096,32k (depth).")] = "",
    pp: Annotated[int, typer.Option(help="Tokens of the prompt behind the context (depth).")] = DEFAULTS.pp,
    tg: Annotated[int, typer.Option(help="Tokens of the answer, at most (depth).")] = DEFAULTS.tg,
    history: Annotated[str, typer.Option(help="Tokens of history agent turns are measured at, e.g. 8000,32k.")] = "",
    tool_share: Annotated[
        float, typer.Option(help="Share of agent turns that ask for a tool call.")
    ] = DEFAULTS.tool_share,
    max_tokens: Annotated[int | None, typer.Option(help="No answer longer than this.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Your own prompts instead of a suite: JSON, name to a list of texts or of messages."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Recorded agent sessions instead of a suite: JSONL, ours or MLPerf's (docs/benchmarks.md)."),
    ] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="Replay only the first so many sessions.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The model's tokenizer.json, for servers without /tokenize.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            parser=count_context,
            metavar="TOKENS",
            help="The server's context length, as 131072 or 128k, where it does not tell.",
        ),
    ] = None,
    body: Annotated[str, typer.Option(help='JSON added to every request, e.g. {"chat_template_kwargs":{...}}.')] = "",
    timeout: Annotated[float, typer.Option(help="Give a request up when nothing arrives for so many seconds.")] = 300.0,
    api_key: Annotated[
        str, typer.Option(envvar="STOKER_API_KEY", help="Sent as a bearer token; never written down.")
    ] = "",
    against_api_key: Annotated[str, typer.Option(help="The second server's; it never gets the first one's.")] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not go on with an interrupted run of this file.")] = False,
) -> None:
    """Measure a server: tokens instead of chunks, failures counted, cold and warm prompts, decode and end-to-end speed.

    Ctrl-C keeps what was measured; with --json the same command goes on later. Exit code 1: nothing could be measured.
    """
    from stoker.bench.target import Target

    options = Options(
        runs=runs,
        concurrency=tuple(_numbers(concurrency, "--concurrency", int)),
        rates=tuple(_numbers(rate, "--rate", float)),
        seconds=seconds,
        depths=tuple(_numbers(depths, "--depths", _depth)),
        histories=tuple(_numbers(history, "--history", _depth)),
        tool_share=tool_share,
        workloads=tuple(workload or ()),
        max_tokens=max_tokens,
        pp=pp,
        tg=tg,
    )
    extra = _object(body, "--body") if body else {}
    own = read_prompts(prompts) if prompts else {}
    if prompts and replay:
        raise BenchError("--prompts and --replay are two ways to say what is asked; give one of them")
    recorded = read_sessions(replay, sessions) if replay else []
    shared: dict[str, Any] = {
        "extra": extra,
        "tokenizer": tokenizer,
        "context": context,
        "timeout": timeout,
    }
    targets = [Target(url, model, api_key, name="A", **shared)]
    if against:
        targets.append(Target(against, against_model, against_api_key, name="B", **shared))
    console = error_console()
    check_writable(json_file, html, csv, markdown)
    try:
        found = asyncio.run(_measure(targets, suite, options, own, recorded, json_file, fresh, console))
    except KeyboardInterrupt:
        console.print("Interrupted. With --json, complete rounds are kept, and the same command goes on with them.")
        raise typer.Exit(130) from None
    write(found, json_file, html, csv, markdown, console)
    if not found.headline.completed:
        raise typer.Exit(1)
    if any(warning.startswith(STOPPED) for warning in found.warnings):
        raise typer.Exit(1)
    if not found.complete:
        if json_file and str(json_file) != "-":
            console.print(f"Interrupted. The same command goes on with what is missing ({_partial(json_file)}).")
        raise typer.Exit(130)


def write(
    found: "Document",
    json_file: Path | None,
    html: Path | None,
    csv: Path | None,
    markdown: Path | None,
    out: "Console",
) -> None:
    """The table to the terminal, the rest to files; with --json - the document is the last thing on stdout."""
    from stoker.bench import document
    from stoker.report.bench import html_report
    from stoker.report.spark_arena import spark_arena
    from stoker.report.text import markdown as as_markdown
    from stoker.report.text import print_document

    to_stdout = str(json_file) == "-"
    screen = output_console()
    if not screen.is_terminal:
        screen.width = 120  # a file or a pipe has no edge
    print_document(found, out if to_stdout else screen)
    files = {html: html_report, csv: spark_arena, markdown: as_markdown}
    if json_file and not to_stdout:
        files[json_file] = document.to_json
    for path, render in files.items():
        if path is not None:
            write_result(path, render(found))
            out.print(f"wrote {path}", markup=False)
    if to_stdout:
        sys.stdout.write(document.to_json(found))


async def _measure(
    targets: "Sequence[Any]",
    suite: str,
    options: Options,
    own: dict[str, list[Any]],
    recorded: "Sequence[Session]",
    json_file: Path | None,
    fresh: bool,
    console: "Console",
) -> "Document":
    from contextlib import AsyncExitStack

    from stoker.bench.document import document
    from stoker.bench.environment import environment
    from stoker.bench.journal import Journal
    from stoker.bench.overhead import find_power
    from stoker.bench.progress import Bars
    from stoker.bench.record import Request
    from stoker.bench.replay import cells as replayed
    from stoker.bench.run import Runner
    from stoker.bench.suites import Cell, Plan, plan

    async with AsyncExitStack() as stack:
        for target in targets:
            await stack.enter_async_context(target)
        known = [target.context for target in targets if target.context is not None]
        smallest = min(known, default=None)
        if own:
            chosen = Plan([Cell(name, "own", rounds=options.runs, each=len(texts)) for name, texts in own.items()])
        elif recorded:
            chosen = Plan(replayed(recorded, options))
        else:
            chosen = plan(suite, options, smallest)
        identity = {
            "servers": [[target.url, target.model] for target in targets],
            "suite": suite,
            **chosen.fingerprint(options),
        }
        path = _partial(json_file) if json_file and str(json_file) != "-" else None
        journal = Journal(path, identity, Request, fresh)
        if journal.rounds:
            console.print(f"Going on: rounds already in {path}: {len(journal.rounds)}.", markup=False)
        power = find_power()
        started = datetime.now(UTC)
        with Bars(console, chosen.cells, len(targets)) as watcher:
            runner = Runner(targets, chosen, options, journal, secrets.token_hex(8), watcher, power, own=own)
            runner.sessions = recorded
            await runner.run()
        facts = environment(
            started, power.names if power else [], [t.facts() for t in targets], runner.overhead.client(runner.requests)
        )
        notes = chosen.skipped + ([f"{STOPPED} {runner.stop_reason}"] if runner.stop_reason else [])
        name = "own prompts" if own else "agent replay" if recorded else suite
        found = document(name, runner.requests, facts, not runner.interrupted, notes)
        if not runner.interrupted:
            journal.finish()
        return found


def read_prompts(path: Path) -> dict[str, list[Any]]:
    """Prompts of the user's own: {"name": ["text", ...]} are completed, {"name": [[{"role": ...}], ...]} are chats."""
    from stoker.bench.workloads import Prompt

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--prompts {path} cannot be read: {error.strerror}") from error
    found = {}
    for name, entries in _object(text, f"--prompts {path}").items():
        if not isinstance(entries, list) or not entries:
            raise BenchError(f"--prompts {path}: {name!r} must be a list of texts, or of lists of messages")
        found[name] = [
            Prompt(name, {"prompt" if isinstance(entry, str) else "messages": entry, "max_tokens": 256}, None)
            for entry in entries
        ]
    return found


def read_sessions(path: Path, most: int | None) -> "list[Session]":
    from stoker.bench.replay import read

    return read(path, most)


def _partial(json_file: Path) -> Path:
    return json_file.with_name(f"{json_file.name}.partial")


def _depth(text: str) -> int:
    return 0 if text == "0" else tokens(text, "")


def _numbers(text: str, option: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        found = [kind(part) for part in text.replace(" ", "").split(",") if part]
    except (ValueError, RequestError) as error:
        raise BenchError(f"{option} {text!r} is no list of numbers like 1,2,4") from error
    if any(value < 0 for value in found):
        raise BenchError(f"{option} {text!r} has a negative number in it")
    return found


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BenchError(f"{where} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BenchError(f"{where} must be a JSON object")
    return found
