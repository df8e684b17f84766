"""The `stoker` command: options common to all commands, and errors shown as sentences."""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import stoker
from stoker.cli.progress import replace_unencodable, say_error
from stoker.errors import StokerError

# Each is the function of that name in stoker.cli.NAME; a module with an `app` has subcommands.
COMMANDS = (
    *("generate", "chat", "serve", "build", "inspect", "plan", "pick", "evidence", "bench", "check", "report"),
    *("recipe", "up", "down", "status", "logs", "list", "probe"),
)


NAME = "stoker"  # in help and in the scripts of shell completion, however the program was started


class Commands(TyperGroup):
    """Imports a command only when it runs, so that `stoker plan` does not wait for the imports of `stoker bench`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # After a typo all commands are imported, so that the nearest one is suggested.
        for name in (cmd_name,) if cmd_name in COMMANDS else COMMANDS:
            if name not in self.commands:
                module = import_module(f"stoker.cli.{name}")
                alone = getattr(module, "app", None)
                if alone is None:
                    alone = typer.Typer(add_completion=False)
                    alone.command(name)(getattr(module, name))
                command = typer.main.get_command(alone)
                command.name = name  # what help lists
                self.add_command(command, name)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name=NAME,
    cls=Commands,
    help="Runs a 120B-class mixture-of-experts model on one desk-side box, as fast as its memory bus allows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


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
    """The entry point. A StokerError is one sentence and exit code 2; --debug, anywhere, shows its traceback."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    replace_unencodable()
    try:
        app(arguments, prog_name=NAME)
    except StokerError as error:
        if debug:
            raise
        say_error(error)
        sys.exit(2)
