"""`stoker check`: whether answers got worse, on one server or against another."""

import asyncio
import hashlib
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.counts import context as count_context
from stoker.cli.progress import check_writable, error_console, output_console, write_result
from stoker.errors import BenchError

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.bench.target import Target
    from stoker.check.items import Item
    from stoker.check.record import Document

SUITE_HELP = (
    "quick: 27,000 output tokens of everything; full: every item; kie: invoices to JSON; agent: tool calls; closeness: "
    "predictions on fixed texts alone, which needs --against; or a file "
    "or folder of your own items (docs/check.md)."
)


def check(
    url: Annotated[str, typer.Argument(help="The server, e.g. http://localhost:8000", show_default=False)],
    against: Annotated[str, typer.Option(help="The server to compare it with, on the same items.")] = "",
    suite: Annotated[str, typer.Option(help=SUITE_HELP)] = "quick",
    items: Annotated[int | None, typer.Option(help="Items of each suite; more find smaller differences.")] = None,
    texts: Annotated[int, typer.Option(min=2, help="Texts of each kind on which predictions are compared.")] = 20,
    max_kl: Annotated[
        float, typer.Option(min=0.0, help="Predictions further apart than this, in nats a token, are worse.")
    ] = 0.1,
    seed: Annotated[str, typer.Option(help="Another seed makes other items of the same difficulty.")] = "1",
    model: Annotated[str, typer.Option(help="Which of its models; the first it lists if not said.")] = "",
    against_model: Annotated[str, typer.Option(help="The other server's model.")] = "",
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write every answer and figure (docs/check-schema.json); - is stdout."),
    ] = None,
    recipe: Annotated[str, typer.Option(help="A recipe whose expected scores the server is held to.")] = "",
    html: Annotated[
        Path | None, typer.Option(help="Write a report with charts and examples: one file, no network needed.")
    ] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the model think before it answers.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Items asked at a time.")] = 1,
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
    body: Annotated[str, typer.Option(help='JSON added to every request, e.g. {"top_k": 1}.')] = "",
    timeout: Annotated[float, typer.Option(help="Give a request up when nothing arrives for so many seconds.")] = 300.0,
    api_key: Annotated[
        str, typer.Option(envvar=["STOKER_API_KEY", "OPENAI_API_KEY"], help="Sent as a bearer token.")
    ] = "",
    against_api_key: Annotated[str, typer.Option(help="For the other server.")] = "",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew instead of going on with an unfinished check.")
    ] = False,
) -> None:
    """Find out whether answers got worse: the same items on one server or two, with error bars and a verdict.

    Ctrl-C keeps what was asked; the same command goes on. Exit code 1: worse, a recipe's promise not kept, stopped
    early, or nothing measured.
    """
    from stoker.bench.target import Target
    from stoker.check.promises import held, scores_of
    from stoker.check.run import STOPPED

    shared: dict[str, Any] = {
        "extra": {"seed": 1, **(_object(body) if body else {})},
        "tokenizer": tokenizer,
        "context": context,
        "timeout": timeout,
    }
    targets = [Target(url, model, api_key, name="A", **shared)]
    if against:
        targets.append(Target(against, against_model, against_api_key, name="B", **shared))
    if suite == "closeness" and not against:
        raise BenchError("--suite closeness compares two servers; say the other one with --against URL2")
    console = error_console()
    check_writable(json_file, html)
    path = _journal_path(json_file, sys.argv)
    promised = scores_of(recipe) if recipe else None
    try:
        found = asyncio.run(
            _check(targets, suite, items, seed, thinking, concurrency, path, fresh, console, texts, max_kl)
        )
    except KeyboardInterrupt:
        console.print("Interrupted. The same command goes on with what is missing.")
        raise typer.Exit(130) from None
    found = held(found, promised) if promised else found
    write(found, json_file, html, console)
    if not found.complete:
        stopped = any(note.startswith(STOPPED) for note in found.notes)
        console.print(
            f"{'Stopped early' if stopped else 'Interrupted'}. The same command goes on with what is missing."
        )
        raise typer.Exit(1 if stopped else 130)
    if found.verdict in ("worse", "nothing measured") or any(each.verdict == "not kept" for each in found.promises):
        raise typer.Exit(1)


def write(found: "Document", json_file: Path | None, html: Path | None, out: "Console") -> None:
    """The table to the terminal, the rest to files; with --json - the document is the last thing on stdout."""
    from stoker.check import document
    from stoker.report.check import html_check
    from stoker.report.check_text import print_check

    to_stdout = str(json_file) == "-"
    screen = output_console()
    if not screen.is_terminal:
        screen.width = 120  # a file or a pipe has no edge
    print_check(found, out if to_stdout else screen)
    files = {html: html_check, **({} if to_stdout else {json_file: document.to_json})}
    for path, render in files.items():
        if path is not None:
            write_result(path, render(found))
            out.print(f"wrote {path}", markup=False)
    if to_stdout:
        sys.stdout.write(document.to_json(found))


async def _check(
    targets: "list[Target]",
    suite: str,
    count: int | None,
    seed: str,
    thinking: bool,
    streams: int,
    path: Path,
    fresh: bool,
    console: "Console",
    texts: int,
    max_kl: float,
) -> "Document":
    from contextlib import AsyncExitStack

    import stoker
    from stoker.bench.environment import command
    from stoker.bench.journal import Journal
    from stoker.check import closeness, probes
    from stoker.check.document import document
    from stoker.check.progress import Bar
    from stoker.check.record import Asked, Where
    from stoker.check.run import Runner
    from stoker.check.suites import CLOSENESS, PROBE_TOKENS, PROBED, QUICK_TOKENS

    started = datetime.now(UTC)
    async with AsyncExitStack() as stack:
        for target in targets:
            await stack.enter_async_context(target)
        items, notes = _items(suite, seed, count, min((t.context for t in targets if t.context), default=None))
        identity = {
            "servers": [[target.url, target.model] for target in targets],
            "suite": suite,
            "thinking": thinking,
            "items": _digest(items),
        }
        journal = Journal(path, identity, Asked, fresh, "check")
        if journal.rounds:
            console.print(f"Going on: items already in {path}: {len(journal.rounds)}.", markup=False)
        budget = QUICK_TOKENS - PROBE_TOKENS if suite == "quick" and count is None and not thinking else None
        with Bar(console) as watcher:
            runner = Runner(targets, items, journal, thinking, streams, budget, watcher)
            await runner.run()
            near, sanity = None, None
            if suite in PROBED:
                sanity = await runner.further(probes.probes(runner, items))
            if suite in CLOSENESS and len(targets) == 2:
                near = await runner.further(closeness.measure(targets, seed, texts, max_kl, streams, watcher))
        near = near or closeness.Near()
        where = Where(
            stoker=stoker.__version__,
            python=platform.python_version(),
            platform=platform.platform(),
            started=started.isoformat(timespec="seconds"),
            duration_s=(datetime.now(UTC) - started).total_seconds(),
            command=command(sys.argv),
            servers=[target.facts() for target in targets],
        )
        if not runner.interrupted:
            journal.finish()
        return document(
            suite,
            seed,
            runner.answers,
            where,
            thinking=runner.thought,
            complete=not runner.interrupted,
            closeness=near.rows,
            probes=sanity or (),
            max_kl=max_kl,
            notes=notes + runner.notes + near.notes,
        )


def _items(suite: str, seed: str, count: int | None, context: int | None) -> "tuple[list[Item], list[str]]":
    from stoker.check import code_sandbox, own
    from stoker.check.suites import SETS, draw

    if suite in SETS:
        items = draw(suite, seed, count, context)
    elif own.is_file(suite):
        items = own.items(Path(suite), count)
    else:
        raise BenchError(
            f"no suite called {suite!r}; there are {', '.join(SETS)}, or name a file or folder of your own"
        )
    notes = []
    if why := code_sandbox.unavailable():
        kept = [item for item in items if item.checker != "python"]
        if len(kept) < len(items):
            notes.append(f"{len(items) - len(kept)} code items were left out: {why}.")
        items = kept
    left = len(draw(suite, seed, count)) - len(draw(suite, seed, count, context)) if suite in SETS else 0
    if left > 0:
        notes.append(f"{left} long prompts were left out: the context is {context:,} tokens.")
    return items, notes


def _digest(items: "list[Item]") -> str:
    import msgspec

    return hashlib.sha256(msgspec.json.encode(items)).hexdigest()[:16]


def _journal_path(json_file: Path | None, arguments: list[str]) -> Path:
    """Beside the result, or in the user's cache under the command's own name."""
    if json_file is not None and str(json_file) != "-":
        return json_file.with_name(f"{json_file.name}.partial")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker" / "check"
    cache.mkdir(parents=True, exist_ok=True)
    plain = [argument for argument in arguments[1:] if argument != "--fresh"]
    return cache / f"{hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]}.partial"


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BenchError(f"--body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BenchError("--body must be a JSON object")
    return found
