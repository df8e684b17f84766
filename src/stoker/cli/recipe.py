"""`stoker recipe`: recipes of other tools become ours, and ours theirs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.progress import check_writable, error_console, say_error, write_result
from stoker.errors import RequestError, StokerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.recipes.formats.foreign import Note
    from stoker.recipes.formats.translate import Imported, Wanted
    from stoker.recipes.recipe import Recipe

app = typer.Typer(
    help="Translate recipes from and to sparkrun, spark-vllm-docker and vllm-project/recipes.",
    no_args_is_help=True,
    add_completion=False,
)
FORMATS = "sparkrun, spark-vllm-docker or vllm-recipes"


@app.command("import")
def import_recipe(
    source: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="A YAML recipe, or a folder of them.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Write here instead of to stdout; for a folder, a folder.")
    ] = None,
    of: Annotated[str, typer.Option("--from", help=f"{FORMATS}; found out if not said.")] = "",
    variant: Annotated[str, typer.Option("--variant", help="Of a vllm-recipes file.")] = "default",
    hardware: Annotated[str, typer.Option("--hardware", help="Of a vllm-recipes file: dgx_spark_gb10, ...")] = "",
    feature: Annotated[
        list[str] | None, typer.Option("--feature", help="Turn on a feature of a vllm-recipes file: NAME or NAME=MODE.")
    ] = None,
    without: Annotated[list[str] | None, typer.Option("--without", help="Turn off a feature that is on.")] = None,
    nodes: Annotated[str, typer.Option("--nodes", help="The boxes of a recipe for several: A,B.")] = "",
    solo: Annotated[bool, typer.Option("--solo", help="One box, also where the recipe is for several.")] = False,
    image: Annotated[str, typer.Option("--image", help="NAME@sha256:..., in place of the recipe's image.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Read a recipe of another tool and write it as a recipe of Stoker (TOML).

    What cannot be carried over is listed on stderr and in comments at the head of the file. Nothing in a recipe is run.
    """
    from stoker.recipes.formats.translate import FORMATS as KNOWN
    from stoker.recipes.formats.translate import Wanted
    from stoker.recipes.formats.vllm_recipes import Choice

    if of and of not in KNOWN:
        raise RequestError(f"unknown format {of!r}; known formats: {', '.join(KNOWN)}.")
    hosts = tuple(host.strip() for host in nodes.split(",") if host.strip())
    if len(hosts) == 1 or len(set(hosts)) < len(hosts):
        raise RequestError(f"--nodes {nodes!r} does not name several boxes: A,B.")
    if hosts and solo:
        raise RequestError("--nodes names several boxes and --solo asks for one: leave one of them out.")
    choice = Choice(variant, hardware, tuple(feature or ()), tuple(without or ()))
    wanted = Wanted(of, choice, hosts, solo, image)
    if source.is_dir():
        _import_folder(source, wanted, out, force, as_json)
    else:
        _import_one(source, wanted, out, force, as_json)


def _import_one(source: Path, wanted: "Wanted", out: Path | None, force: bool, as_json: bool) -> None:
    from stoker.recipes.formats.translate import import_file

    _check_free(out, force)
    found = import_file(source, wanted)
    _say_notes(str(source), found.notes)
    _say_steps(found.recipe)
    if out:
        write_result(out, found.text)
    if as_json:
        typer.echo(json.dumps(_imported(source, found, out), indent=2))
    elif not out:
        typer.echo(found.text, nl=False)


def _import_folder(folder: Path, wanted: "Wanted", out: Path | None, force: bool, as_json: bool) -> None:
    """Every recipe it can; exit status 1 if there were others."""
    from stoker.recipes.formats.translate import found_in, import_file

    files = found_in(folder)
    if not files:
        raise RequestError(f"{folder} has no .yaml files.")
    if not out and not as_json:
        raise RequestError(f"{folder} has {len(files)} recipes: say where they go with --out FOLDER, or --json.")
    if out:
        out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for path in files:
        try:
            found = import_file(path, wanted)
            target = out / f"{found.recipe.name}.toml" if out else None
            _check_free(target, force)
        except StokerError as error:
            say_error(error)
            results.append({"file": str(path), "error": str(error)})
            continue
        _say_notes(str(path), found.notes)
        _say_steps(found.recipe)
        if target:
            write_result(target, found.text)
        results.append(_imported(path, found, target))
    failed = sum("error" in result for result in results)
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    else:
        typer.echo(f"{len(files) - failed} of {len(files)} recipes imported into {out}")
    if failed:
        raise typer.Exit(1)


def _check_free(target: Path | None, force: bool) -> None:
    check_writable(target)
    if target and target.exists() and not force:
        raise RequestError(f"{target} exists; --force replaces it.")


def _imported(source: Path, found: "Imported", out: Path | None) -> dict[str, Any]:
    from stoker.recipes.recipe import to_json

    return {
        "file": str(source),
        "format": found.format,
        "out": str(out) if out else None,
        "recipe": to_json(found.recipe),
        "not_carried_over": _notes(found.notes),
    }


def _notes(notes: "Sequence[Note]") -> list[dict[str, str]]:
    return [{"what": one.what, "why": one.why} for one in notes]


def _say_notes(name: str, notes: "Sequence[Note]") -> None:
    from stoker.errors import visible

    console = error_console()
    if notes:
        said = "1 thing was" if len(notes) == 1 else f"{len(notes)} things were"
        line = f"{name}: {said} not carried over, or should be looked at:"
        console.print(visible(line, keep=""), markup=False, soft_wrap=True)
    for one in notes:
        console.print(visible(f"  - {one.what} ({one.why})", keep=""), markup=False, soft_wrap=True)


def _say_steps(recipe: "Recipe") -> None:
    from stoker.recipes.shell import shown

    console = error_console()
    if recipe.shell:
        console.print("Its shell steps, which stoker up runs only after confirmation:", markup=False)
    for line in shown(recipe.shell):
        console.print(f"  {line}", markup=False, soft_wrap=True)


@app.command("export")
def export_recipe(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe of Stoker: NAME, or a file NAME.toml.")],
    to: Annotated[str, typer.Option("--to", help=FORMATS)],
    out: Annotated[Path | None, typer.Option("--out", help="Write here instead of to stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a recipe of Stoker as one of another tool; what that has no place for is listed."""
    from stoker.recipes.formats.translate import FORMATS as KNOWN
    from stoker.recipes.formats.translate import export
    from stoker.recipes.load import load

    if to not in KNOWN:
        raise RequestError(f"unknown format {to!r}; known formats: {', '.join(KNOWN)}.")
    _check_free(out, force)
    loaded = load(recipe)
    found = export(loaded.recipe, to)
    _say_notes(loaded.recipe.name, found.notes)
    if out:
        write_result(out, found.text)
    if as_json:
        document = {
            "recipe": loaded.recipe.name,
            "format": to,
            "out": str(out) if out else None,
            "text": found.text,
            "not_carried_over": _notes(found.notes),
        }
        typer.echo(json.dumps(document, indent=2))
    elif not out:
        typer.echo(found.text, nl=False)
