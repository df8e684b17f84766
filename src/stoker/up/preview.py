"""What `stoker up` would do, without doing it: every command and every file, by stage and host."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from stoker.engines.engine import find
from stoker.engines.engine import shell as as_shell
from stoker.errors import StokerError
from stoker.recipes import shell
from stoker.recipes.load import Loaded, is_remote
from stoker.recipes.recipe import Files
from stoker.up import build, control, files, state
from stoker.up.bring_up import Options, address
from stoker.up.planning import DoesNotFit, Planned, box_of, plan

HERE = ""  # this machine


class Action(Struct, frozen=True):
    stage: str
    commands: tuple[str, ...]  # for a shell; in an engine's, {port} is the port that its keeper chooses
    files: dict[str, str] = {}  # written, name -> text
    host: str = HERE
    note: str = ""


class Preview(Struct, frozen=True):
    recipe: str
    recipe_hash: str
    engine: str
    version: str  # installed here; empty: none
    plan: dict[str, object] | None
    problems: tuple[str, ...]  # why it would be refused
    actions: tuple[Action, ...]


def preview(loaded: Loaded, options: Options) -> Preview:
    """Reads what is on this machine; starts, fetches and writes nothing."""
    recipe, engine = loaded.recipe, find(loaded.recipe.engine)
    problems: list[str] = []
    version, planned = "", None
    try:
        version = engine.version()
        problems += engine.problems(recipe)
    except StokerError as error:
        problems.append(str(error))
    problems += [*files.missing(loaded), *shell.problems(recipe)]
    try:
        control.Control.check(options.name, *address(recipe, options))
    except StokerError as error:
        problems.append(str(error))
    try:
        planned = plan(loaded, box_of(recipe, options.box), files.on_disk(loaded, recipe.model))
    except DoesNotFit as error:
        problems.append(str(error))
        planned = error.planned
    except StokerError as error:
        problems.append(str(error))
    actions = list(_before(loaded))
    try:
        actions += _start(loaded, options, planned)
    except StokerError as error:
        if str(error) not in problems:
            problems.append(str(error))
    actions += [
        Action("shell step", (step.run,), note="once the engine answers")
        for step in shell.on_this_machine(recipe.shell, "after")
    ]
    return Preview(
        recipe=recipe.name,
        recipe_hash=loaded.hash,
        engine=recipe.engine,
        version=version,
        plan=planned.answer.to_json() if planned and planned.answer else None,
        problems=tuple(problems),
        actions=tuple(actions),
    )


def _before(loaded: Loaded) -> Iterator[Action]:
    recipe = loaded.recipe
    wanted = [("model", recipe.model)] + ([("drafter", recipe.drafter)] if recipe.drafter else [])
    for what, each in wanted:
        here = files.on_disk(loaded, each)
        if here is None and not is_remote(each):
            yield Action("fetch", (), note=f"{what}: there is no folder {files.source(loaded, each)}")
        elif here is None:
            yield Action("fetch", (_download(each),), note=f"{what}; stoker up fetches the same files by itself")
        else:
            yield Action("fetch", (), note=f"{what}: {here} is on the disk")
    if recipe.build:
        base = _model(loaded)
        out = build.folder(loaded, base, _commit(base))
        done = build.is_built(out)
        command = () if done else (shlex.join(build.command(loaded, base, out)),)
        yield Action("build", command, note=f"{out} is built" if done else "")
    for step in shell.on_this_machine(recipe.shell, "before"):
        yield Action("shell step", (step.run,), note="before the engine starts")


def _start(loaded: Loaded, options: Options, planned: Planned | None) -> Iterator[Action]:
    recipe = loaded.recipe
    host, port = address(recipe, options)
    running = control.Control.find(options.name)
    keeper = control.keeper_command(state.folder(options.name), host, port)
    note = "it runs already" if running else f"it listens on {host}, port {port}, and starts the engine"
    yield Action("keeper", () if running else (shlex.join(keeper),), note=note)
    model = _model(loaded)
    if recipe.build:
        model = build.folder(loaded, model, _commit(model))
    drafter = files.will_lie(loaded, recipe.drafter) if recipe.drafter else None
    memory = planned.memory_bytes if planned else 0
    for launch in find(recipe.engine).deployment(loaded, model, drafter, memory).launches:
        yield Action("start", ("\n".join(as_shell(launch)),), launch.files, launch.host)
        if launch.cleanup:
            yield Action("when it has ended", (shlex.join(launch.cleanup),), host=launch.host)


def _model(loaded: Loaded) -> Path:
    return files.on_disk(loaded, loaded.recipe.model) or files.will_lie(loaded, loaded.recipe.model)


def _commit(path: Path) -> str:
    """Of a snapshot in the hub's cache, whose folder is named by it."""
    return path.name if path.parent.name == "snapshots" else ""


def _download(each: Files) -> str:
    from stoker.weights.hub import parse_repository

    repository, named = parse_repository(each.source)
    revision = named if each.revision == "main" else each.revision
    return shlex.join(["hf", "download", repository, *([] if revision == "main" else ["--revision", revision])])


def as_text(found: Preview) -> Iterator[str]:
    said = f"{found.engine} {found.version}" if found.version else f"{found.engine}, which is not here"
    yield f"{found.recipe} on {said}: what stoker up would do"
    for action in found.actions:
        where = f" on {action.host}" if action.host else ""
        yield ""
        yield f"# {action.stage}{where}{f': {action.note}' if action.note else ''}"
        for name, text in action.files.items():
            yield f"# file {name}:"
            yield from (f"#   {line}" for line in text.splitlines())
        yield from (line for command in action.commands for line in command.splitlines())
    if found.problems:
        yield ""
        yield "# It would be refused:"
        yield from (f"#   {problem}" for problem in found.problems)
