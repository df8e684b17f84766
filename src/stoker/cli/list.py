"""`stoker list`: the recipes that come with Stoker, and the services on this machine."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.progress import output_console

if TYPE_CHECKING:
    from rich.table import Table


def list(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """List shipped recipes, whether they run, and the services that were started here."""
    from stoker.recipes.load import load, shipped
    from stoker.up import control, state

    recipes = [load(name).recipe for name in shipped()]
    services = [found for name in state.names() if (found := control.status(name))]
    if as_json:
        document = {
            "recipes": [
                {
                    "name": recipe.name,
                    "title": recipe.title,
                    "engine": recipe.engine,
                    "state": recipe.known.state if recipe.known else "",
                    "where": recipe.known.where if recipe.known else "",
                }
                for recipe in recipes
            ],
            "services": [
                {
                    "name": service.name,
                    "state": service.state,
                    "url": service.url,
                    "recipe": service.serving.deployment.recipe if service.serving else "",
                }
                for service in services
            ],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    table = _table("recipe", "engine", "known", "what it is")
    for recipe in recipes:
        table.add_row(recipe.name, recipe.engine, recipe.known.state if recipe.known else "", recipe.title)
    output_console().print(table)
    if services:
        table = _table("service", "state", "recipe", "address")
        for service in services:
            serving = service.serving.deployment.recipe if service.serving else ""
            table.add_row(service.name, service.state, serving, service.url)
        output_console().print(table)


def _table(*columns: str) -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
