"""`stoker logs`: what a service's engine printed."""

import time
from pathlib import Path
from typing import Annotated

import typer

from stoker.errors import RequestError
from stoker.up.state import DEFAULT

FOLLOW_S = 0.2  # between looks


def logs(
    name: Annotated[str, typer.Argument(help="The service.")] = DEFAULT,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is printed from now on.")] = False,
    count: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 100,
    keeper: Annotated[bool, typer.Option("--keeper", help="The log of the keeper: starts, faults, changes.")] = False,
) -> None:
    """Show the log of a service's engine: of the candidate if there is one, else of what serves."""
    from stoker.up import state
    from stoker.up.control import KEEPER_LOG
    from stoker.up.logs import Follow, last_lines

    def current() -> Path:
        saved = state.read(name)
        if saved is None:
            raise RequestError(f"there is no service {name}, and so no log.")
        if keeper:
            return state.folder(name) / KEEPER_LOG
        instance = saved.status.candidate or saved.status.serving
        if instance is None:
            raise RequestError(f"service {name} has not started an engine yet; --keeper shows the keeper's log.")
        return Path(instance.log)

    path = current()
    following = Follow(path)
    for line in last_lines(path, count):
        typer.echo(line)
    while follow:
        for line in following.lines():
            typer.echo(line)
        if (now := current()) != path:
            path, following = now, Follow(now, from_start=True)
        time.sleep(FOLLOW_S)
