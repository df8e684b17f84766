"""`stoker down`: ends a service."""

from typing import Annotated

import typer

from stoker.cli.progress import error_console
from stoker.errors import RequestError
from stoker.up.state import DEFAULT


def down(
    name: Annotated[str, typer.Argument(help="The service.")] = DEFAULT,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for requests that are being answered.")] = False,
) -> None:
    """End a service: let its requests end, stop its engine, and do not start it again with the machine."""
    from stoker.up import control, state, systemd

    if state.read(name) is None and control.Control.find(name) is None:
        known = ", ".join(state.names())
        raise RequestError(f"there is no service {name}. " + (f"Services: {known}." if known else "None was started."))
    console = error_console()
    with state.lock(name, f"stoker down {name}"):
        if found := control.Control.find(name):
            if not now:
                console.print(f"{name}: requests under way may end (--now does not wait) ...", highlight=False)
            found.stop(now)
            console.print(f"{name} is down.")
        else:
            control.clean_up(name)
            console.print(f"{name} was not running.")
        if systemd.remove(name):
            console.print(f"The unit {systemd.unit_name(name)} is removed.")
