"""`stoker up`: a recipe becomes a running, checked service."""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.progress import error_console, output_console
from stoker.errors import visible
from stoker.up.state import DEFAULT

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stoker.bench.run import Watcher
    from stoker.bench.suites import Cell
    from stoker.up.bring_up import Outcome
    from stoker.up.promise import Compared
    from stoker.up.receipt import Receipt

GIB = 1 << 30


def up(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A shipped recipe (stoker list), or a file NAME.toml.")
    ],
    name: Annotated[str, typer.Option("--name", help="The service; several may run at a time.")] = DEFAULT,
    host: Annotated[str, typer.Option("--host", help="Listen here instead of where the recipe says.")] = "",
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Likewise; 0 takes a free one.")] = None,
    box: Annotated[
        str | None, typer.Option("--box", help="What this box is, if it is not recognised: spark, strix-halo, ...")
    ] = None,
    service: Annotated[
        bool, typer.Option("--service", help="Under systemd's user manager: it starts again with the machine.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every command and file, by host, and do nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Run the recipe's shell steps without asking.")] = False,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Leave out the minute of measuring.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt as one JSON document.")] = False,
) -> None:
    """Plan, fetch, build, start, test and measure what a recipe says, and compare it with what the recipe promises.

    The same command goes on where it was interrupted and repeats nothing. Exit status 0: the promise is kept, or none
    was made for this box; 1: it is not kept; 2: it was refused or failed, and what served before serves on.
    """
    from stoker.recipes.load import load
    from stoker.up.bring_up import Options, Up

    options = Options(name, host, port, box, service, yes, not no_measure)
    loaded = load(recipe)
    if dry_run:
        _dry_run(recipe, options, as_json)
        return
    if loaded.recipe.engine == "stoker":
        from stoker.cli.extras import need_server

        need_server()
    console = error_console()
    progress = Progress(console)
    ask = (lambda text: typer.confirm(text, err=True)) if console.is_terminal and not as_json else None
    try:
        outcome = Up(loaded, options, progress, ask).run()
    except KeyboardInterrupt:
        progress.stop()
        console.print("Interrupted. The same command goes on; stoker down ends what was started.", markup=False)
        raise typer.Exit(130) from None
    finally:
        progress.stop()
    if as_json:
        import msgspec

        typer.echo(json.dumps({**msgspec.to_builtins(outcome.receipt), "file": str(outcome.file), "url": outcome.url}))
    else:
        _print(outcome, output_console())
    if outcome.receipt.kept is False:
        raise typer.Exit(1)


def _dry_run(recipe: str, options: Any, as_json: bool) -> None:
    import msgspec

    from stoker.recipes.load import load
    from stoker.up.preview import as_text, preview
    from stoker.up.receipt import without_secrets

    found = preview(load(recipe), options)
    plain = without_secrets(found)
    if as_json:
        typer.echo(json.dumps(plain, indent=2))
    else:
        for line in as_text(msgspec.convert(plain, type(found))):
            typer.echo(visible(line, keep=""))
    if found.problems:
        raise typer.Exit(2)


class Progress:
    """What `stoker up` does, on stderr: a line for every stage that is over, and a moving one on a terminal."""

    def __init__(self, console: "Console") -> None:
        self._console, self._name = console, ""
        self._bar: Any = None
        self._task: Any = None

    def stage(self, name: str) -> None:
        self.stop()
        self._name = name
        if self._console.is_terminal:
            from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn())
            self._bar = Bar(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task(name, total=None)
            self._bar.start()

    def doing(self, text: str, done: float = 0, total: float = 0) -> None:
        if self._bar is not None:
            size = f" {done / 1e9:.1f} of {total / 1e9:.1f} GB" if total > 1e6 else ""
            description = visible(f"{self._name}: {text}{size}", keep="")
            self._bar.update(self._task, description=description, completed=done, total=total or None)

    def say(self, text: str) -> None:
        self._console.print(f"  {visible(text, keep='')}", markup=False, soft_wrap=True)

    def done(self, text: str) -> None:
        self.stop()
        self._console.print(f"[green]✓[/] {self._name:<11} ", end="")
        self._console.print(visible(text, keep=""), markup=False, soft_wrap=True)

    def measuring(self, chosen: "Sequence[Cell]") -> "AbstractContextManager[Watcher]":
        from stoker.bench.progress import Bars

        self.stop()
        return Bars(self._console, chosen, 1)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _print(outcome: "Outcome", console: "Console") -> None:
    from stoker.engines.engine import KEYS
    from stoker.up.clients import settings

    found = outcome.receipt
    console.print()
    again = "" if outcome.new else " (as before: nothing had to be repeated)"
    console.print(f"[bold]{found.model_name}[/] serves at [bold]{outcome.url}[/]{again}", soft_wrap=True)
    console.print(_table(found))
    for line in _verdict(found):
        console.print(visible(line, keep=""), markup=False, soft_wrap=True)
    console.print(f"Receipt: {outcome.file}", markup=False, soft_wrap=True)
    import os

    key = bool(os.environ.get(KEYS[found.recipe.engine]))
    for program, text in settings(outcome.url, found.model_name, outcome.context, key).items():
        console.print(f"\n[bold]{program}[/]")
        console.print(text, markup=False, soft_wrap=True)


def _table(found: "Receipt") -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for column in ("promised", "measured here", "predicted"):
        table.add_column(column, justify="right")
    table.add_column("")
    for line in found.expected:
        kept = {True: "[green]kept[/]", False: "[red]not kept[/]", None: ""}[line.kept]
        what = "general (the median)" if line.what == "general" else line.what
        table.add_row(what, *_numbers(line), kept)
    return table


def _numbers(line: "Compared") -> Iterator[str]:
    yield "–" if line.promised is None else f"{line.promised:g} {line.unit}"
    yield "not measured" if line.measured is None else f"{line.measured:.4g} {line.unit}"
    if line.predicted is None:
        yield ""
    else:
        between = f" ({line.predicted_low:g} to {line.predicted_high:g})" if line.predicted_low is not None else ""
        yield f"≈ {line.predicted:g}{between}"


def _verdict(found: "Receipt") -> Iterator[str]:
    for note in found.notes:
        yield f"Note: {note}."
    sources = dict.fromkeys(line.source for line in found.expected if line.source)
    for source in sources:
        yield f"Promised by: {source}."
    if found.kept is None:
        yield "Nothing was promised for this box that could be checked." if not sources else "Nothing was compared."
    else:
        broken = [line.what for line in found.expected if line.kept is False]
        yield "The promise is kept." if found.kept else f"The promise is not kept: {', '.join(broken)}."
