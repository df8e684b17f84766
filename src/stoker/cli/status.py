"""`stoker status`: what a service does, since when, and what went wrong."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.progress import output_console
from stoker.errors import RequestError, visible
from stoker.up.state import DEFAULT

if TYPE_CHECKING:
    from stoker.up.state import Instance, Status


def status(
    name: Annotated[str, typer.Argument(help="The service.")] = DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show a service: address, engine, restarts, warnings. Exit status 0 if it answers requests, 1 if not."""
    import msgspec

    from stoker.up import control, state

    found = control.status(name)
    if found is None:
        known = ", ".join(state.names())
        raise RequestError(f"there is no service {name}. " + (f"Services: {known}." if known else "None was started."))
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(found), indent=2))
    else:
        console = output_console()
        for line in lines(found, time.time()):
            console.print(visible(line, keep=""), markup=False, soft_wrap=True)
    if found.serving is None or found.serving.state not in ("ready", "draining"):
        raise typer.Exit(1)


def lines(found: "Status", now: float) -> Iterator[str]:
    yield f"{found.name}: {found.state}, {found.url}" + (f", keeper {found.keeper_pid}" if found.keeper_pid else "")
    parts = [
        ("serving", found.serving),
        ("candidate", found.candidate),
        *(("draining", each) for each in found.draining),
    ]
    for role, instance in parts:
        if instance:
            yield from _instance(role, instance, now)
    for warning in found.warnings:
        yield f"  warning: {warning}"


def _instance(role: str, instance: "Instance", now: float) -> Iterator[str]:
    deployment = instance.deployment
    engine = f"recipe {deployment.recipe} on {deployment.engine}"
    pid = f", pid {instance.pid}" if instance.pid else ""
    yield f"  {role}: {deployment.model_name} ({engine}), {instance.state}{pid}"
    if phase := instance.phase:
        share = "" if phase.percent is None else f", {phase.percent:.0f} %"
        detail = f": {phase.detail}" if phase.detail else ""
        yield f"    {phase.name}{detail}{share}, started {_age(now - instance.started_at)} ago"
    elif instance.state == "ready":
        phases = " · ".join(f"{each.name} {each.seconds:.1f}" for each in instance.phases)
        up = _age(now - instance.started_at - instance.ready_s)
        yield f"    up for {up}, ready after {instance.ready_s:.1f} s" + (f" ({phases})" if phases else "")
    if instance.restarts or instance.fault:
        yield f"    restarts {instance.restarts}" + (f"; latest fault: {instance.fault}" if instance.fault else "")
    yield f"    log {_short(instance.log)}"


def _age(seconds: float) -> str:
    minutes = int(max(0.0, seconds)) // 60
    if minutes < 1:
        return f"{max(0.0, seconds):.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes // 1440} days"


def _short(path: str) -> str:
    home = str(Path.home())
    return f"~{path[len(home) :]}" if path.startswith(f"{home}/") else path
