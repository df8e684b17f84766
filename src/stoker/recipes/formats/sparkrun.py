"""Recipes of sparkrun, version 2: a command template, defaults, hooks, and how many nodes."""

from typing import Any

from stoker.recipes.formats.command import CommandError, fill
from stoker.recipes.formats.flags import write
from stoker.recipes.formats.foreign import (
    SECRET_SCRIPT,
    Foreign,
    Note,
    environment,
    hides,
    model_name,
    note,
    note_unread,
    parallel,
    slug,
    unshared,
)
from stoker.recipes.formats.templated import KEYS, defaults, read_command, write_command
from stoker.recipes.formats.yaml_file import Table
from stoker.recipes.recipe import Recipe, Step

NAME = "sparkrun"
RUNTIMES = ("", "vllm", "vllm-distributed", "vllm-ray", "eugr-vllm")
# Further options that sparkrun makes of `defaults` where there is no command; True: a switch.
OWN_FLAGS: dict[str, tuple[str, bool]] = {
    "dtype": ("--dtype", False),
    "quantization": ("--quantization", False),
    "enforce_eager": ("--enforce-eager", True),
    "enable_prefix_caching": ("--enable-prefix-caching", True),
    "trust_remote_code": ("--trust-remote-code", True),
    "distributed_executor_backend": ("--distributed-executor-backend", False),
    "data_parallel": ("--data-parallel-size", False),
    "otlp_traces_endpoint": ("--otlp-traces-endpoint", False),
    "api_key": ("--api-key", False),
}
KNOWN = {
    "mods": "patches of the image: build an image that has them and name it by digest",
    "build_args": "options of building the image: build it and name it by digest",
    "builder": "it builds the image: build it and name it by digest",
    "builder_config": "it builds the image: build it and name it by digest",
    "executor_config": "options of docker run: write them as [container] arguments",
    "distribution_config": "stoker up fetches the model on every box",
    "readiness": "stoker up waits for the engine's phases and then asks for an answer",
    "benchmark": "stoker bench measures; what is promised belongs into [expected]",
    "stop_after_post": "a service of stoker up runs until stoker down",
    "runtime_config": "options of sparkrun's runtime",
    "runtime_version": "a label: say engine_version for a version that is needed",
}
BASE_URL = "$STOKER_URL/v1"  # known once the engine answers: stoker up sets STOKER_URL for its shell steps
METADATA = "a description, which nothing reads"


def read(table: Table, stem: str) -> Foreign:
    runtime = table.text("runtime")
    if runtime not in RUNTIMES:
        raise table.error("runtime", f"it is for {runtime}, and only recipes for vLLM can be imported.")
    metadata = table.table("metadata")
    described = table.text("description") or metadata.text("description")
    table.take("name")  # sparkrun goes by the file's name
    foreign = Foreign(NAME, slug(stem), described or stem, table.text("model"), revision=table.text("model_revision"))
    version = table.text("recipe_version", table.text("sparkrun_version", "2"))
    if version != "2":
        note(foreign, "recipe_version", version, "version 2 is the one that is read")
    _topology(foreign, table)
    foreign.ray = runtime in ("vllm-ray", "eugr-vllm")
    foreign.image = table.text("container")
    values: dict[str, Any] = {"model": foreign.model, **defaults(table)}
    if "command" in table:
        read_command(foreign, table, values, fill)
        if "served_model_name" in values and "--served-model-name" not in foreign.arguments:
            foreign.arguments += ["--served-model-name", *str(values["served_model_name"]).split()]
            said = Note(f"defaults.served_model_name: {values['served_model_name']}", "its command does not use it")
            foreign.notes = [kept for kept in foreign.notes if kept != said]
    else:
        table.take("command")
        _generate(foreign, values)
    environment(foreign, table.environment("env"))
    _hooks(foreign, table, values)
    for key in metadata:
        if key != "description":
            note(foreign, f"metadata.{key}", metadata.values[key], METADATA)
    note_unread(foreign, table, KNOWN)
    return foreign


def _topology(foreign: Foreign, table: Table) -> None:
    mode = table.text("mode", "auto")
    least, most = table.integer("min_nodes"), table.integer("max_nodes")
    solo, cluster = table.flag("solo_only"), table.flag("cluster_only")
    if least is not None and not 1 <= least <= 1024:
        raise table.error("min_nodes", f"expected a number of boxes, got {least}.")
    foreign.boxes = max(least or 1, 2 if cluster or mode == "cluster" else 1)
    foreign.one_box = solo or mode == "solo" or most == 1
    if foreign.one_box and foreign.boxes > 1:
        raise table.error("max_nodes", "it is for one box only and for several.")
    if most is not None and most > foreign.boxes:
        note(foreign, "max_nodes", most, "a recipe names the boxes it runs on: --nodes A,B,...")


def _generate(foreign: Foreign, values: dict[str, Any]) -> None:
    """The arguments that sparkrun makes of defaults where a recipe has no command."""
    flags = {key: (flag, False) for flag, key in KEYS.items() if key not in ("tool_call_parser", "reasoning_parser")}
    for key, value in values.items():
        flag, switch = {**flags, **OWN_FLAGS}.get(key, ("", False))
        if key == "model":
            continue
        if not flag:
            note(foreign, f"defaults.{key}", value, "sparkrun makes no option of it where there is no command")
        elif switch:
            foreign.arguments += [flag] if value in (True, "true", "True", 1) else []
        elif key == "served_model_name":
            foreign.arguments += [flag, *str(value).split()]
        else:
            foreign.arguments += [flag, str(value)]


def _hooks(foreign: Foreign, table: Table, values: dict[str, Any]) -> None:
    ours = {**values, "base_url": BASE_URL}
    for key, when, inside in (
        ("pre_exec", "before", True),
        ("post_exec", "after", True),
        ("post_commands", "after", False),
    ):
        for number, value in enumerate(table.items(key)):
            place = f"{key}[{number}]"
            if not isinstance(value, str):
                note(foreign, place, value, "it copies files into the container: build an image that has them")
                continue
            try:
                script, _ = fill(value, ours)
            except CommandError as error:
                raise table.source.error((*table.place, key, number), f"{error}.") from None
            unknown = [
                word
                for word in ("head_ip", "head_host", "cluster_id", "container_name", "cache_dir")
                if f"{{{word}}}" in script
            ]
            if unknown or not script.strip():
                note(foreign, place, script, f"only sparkrun knows {{{unknown[0]}}}" if unknown else "it is empty")
                continue
            if hides(script):
                note(foreign, place, script, SECRET_SCRIPT)
                continue
            moment: Any = when
            foreign.shell.append(Step(script, when=moment, inside=inside))


def write_recipe(recipe: Recipe) -> tuple[dict[str, Any], list[Note]]:
    notes = unshared(recipe)
    spread, arguments = parallel(recipe, write(recipe))
    arguments += spread.options()
    env = {key: value for key, value in recipe.env.items() if "$" not in value}
    notes += [Note(f"env.{key}", "sparkrun fills in what follows a $") for key in recipe.env if key not in env]
    taken = {"model", "base_url", *KEYS.values()}

    def escape(text: str) -> str | None:
        return None if any(f"{{{key}}}" in text for key in taken) else text

    command, values, unwritten = write_command("{model}", arguments, escape, {})
    found: dict[str, Any] = {"recipe_version": "2", "model": model_name(recipe)}
    if recipe.model.revision != "main":
        found["model_revision"] = recipe.model.revision
    found["runtime"] = "vllm-ray" if spread.ray else "vllm-distributed"
    if recipe.container:
        found["container"] = recipe.container.image
    else:
        notes.append(Note("container", "sparkrun serves from an image: name one"))
    found |= {"min_nodes": spread.boxes, "max_nodes": spread.boxes}
    found["metadata"] = {"description": recipe.title}
    found |= {"defaults": values, "env": env, "command": command}
    for key, when, inside in (
        ("pre_exec", "before", True),
        ("post_exec", "after", True),
        ("post_commands", "after", False),
    ):
        steps = [step for step in recipe.shell if step.when == when and step.inside is inside]
        kept = [step.run for step in steps if escape(step.run) is not None]
        notes += [
            Note(f"shell: {step.run}", "it looks like a template of sparkrun") for step in steps if step.run not in kept
        ]
        if kept:
            found[key] = [run.replace(BASE_URL, "{base_url}") if when == "after" else run for run in kept]
    notes += [
        Note(f"shell: {step.run}", "sparkrun runs nothing on its own machine before the start")
        for step in recipe.shell
        if step.when == "before" and not step.inside
    ]
    notes += [Note(f"shell: {step.note}", "sparkrun's hooks have no description") for step in recipe.shell if step.note]
    if recipe.engine_version:
        found["runtime_version"] = recipe.engine_version
        notes.append(Note("engine_version", "sparkrun keeps runtime_version as a label and checks nothing"))
    return {key: value for key, value in found.items() if value not in ({}, [])}, notes + unwritten
