"""The `stoker` command: options common to all commands, and errors shown as sentences."""

import sys
from typing import Annotated

import typer

import stoker
from stoker.cli.bench import bench
from stoker.cli.build import build
from stoker.cli.chat import chat
from stoker.cli.evidence import evidence
from stoker.cli.generate import generate
from stoker.cli.inspect import inspect
from stoker.cli.pick import pick
from stoker.cli.plan import plan
from stoker.cli.progress import error_console
from stoker.cli.report import report
from stoker.cli.serve import serve
from stoker.errors import StokerError

app = typer.Typer(
    name="stoker",
    help="Runs a 120B-class mixture-of-experts model on one desk-side box, as fast as its memory bus allows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(build)
app.command()(inspect)
app.command()(plan)
app.command()(pick)
app.command()(evidence)
app.command()(bench)
app.command()(report)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stoker {stoker.__version__}")
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options common to all commands. `run` acts on --debug, since a command has failed by then."""


def run() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2; with --debug, anywhere, it keeps its traceback."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    try:
        app(arguments)
    except StokerError as error:
        if debug:
            raise
        from rich.markup import escape

        error_console().print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
