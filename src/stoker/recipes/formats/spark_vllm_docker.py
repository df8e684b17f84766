"""Recipes of spark-vllm-docker, version 1: the script of a container, with defaults filled in."""

import re
from typing import Any

from stoker.recipes.formats.command import fill_format
from stoker.recipes.formats.flags import option, write
from stoker.recipes.formats.foreign import (
    Foreign,
    Note,
    environment,
    model_name,
    note,
    note_unread,
    parallel,
    slug,
    unshared,
)
from stoker.recipes.formats.templated import defaults, read_command, write_command
from stoker.recipes.formats.yaml_file import Table
from stoker.recipes.recipe import Recipe

NAME = "spark-vllm-docker"
REQUIRED = ("name", "container", "command")
KNOWN = {
    "mods": "patches of the image: build an image that has them and name it by digest",
    "build_args": "options of building the image: build it and name it by digest",
}


def read(table: Table, stem: str) -> Foreign:
    for key in REQUIRED:
        if key not in table:
            raise table.error(key, "a recipe of spark-vllm-docker needs it, and it is missing.")
    name = table.text("name")
    foreign = Foreign(NAME, slug(name), table.text("description") or name, table.text("model"))
    version = table.text("recipe_version", "1")
    if version != "1":
        note(foreign, "recipe_version", version, "version 1 is the one that is read")
    foreign.image = table.text("container")
    cluster, foreign.one_box = table.flag("cluster_only"), table.flag("solo_only")
    if cluster and foreign.one_box:
        raise table.error("solo_only", "it is for one box only and for several.")
    foreign.boxes = 2 if cluster else 1
    read_command(foreign, table, defaults(table), fill_format)
    environment(foreign, table.environment("env"))
    note_unread(foreign, table, KNOWN)
    return foreign


def write_recipe(recipe: Recipe) -> tuple[dict[str, Any], list[Note]]:
    notes = unshared(recipe)
    spread, arguments = parallel(recipe, write(recipe))
    arguments += spread.options()
    if spread.ray:
        arguments.append(option("--distributed-executor-backend", "ray"))
    if recipe.model.revision != "main":
        arguments.insert(0, option("--revision", recipe.model.revision))
    if spread.boxes > 1 and spread.boxes != spread.tensor * spread.pipeline:
        notes.append(Note("nodes.hosts", "its launcher takes one box for each card: tensor times pipeline parallel"))
    # The launcher exports values between double quotes of bash: what these would change goes before the command.
    plain = {key: value for key, value in recipe.env.items() if not re.search(r'["$`\\]', value)}
    first = [step for step in recipe.shell if step.when == "before" and step.inside]
    command, values, unwritten = write_command(
        model_name(recipe),
        arguments,
        lambda text: text.replace("{", "{{").replace("}", "}}"),
        {key: value for key, value in recipe.env.items() if key not in plain},
        [step.run for step in first],
    )
    found: dict[str, Any] = {
        "recipe_version": "1",
        "name": recipe.name,
        "description": recipe.title,
        "model": model_name(recipe),
    }
    if recipe.container:
        found["container"] = recipe.container.image
    else:
        found["container"] = "vllm-node"
        notes.append(
            Note("container", "a recipe of spark-vllm-docker needs one: vllm-node, which its build makes, is written")
        )
    found["solo_only" if spread.boxes == 1 else "cluster_only"] = True
    found |= {"defaults": values, "env": plain, "command": command}
    notes += [Note(f"shell: {step.run}", "its scripts run nothing there") for step in recipe.shell if step not in first]
    notes += [Note(f"shell: {step.note}", "its commands have no description") for step in first if step.note]
    if len(first) > 1:
        notes.append(Note("shell", "steps inside the container become one script"))
    if recipe.engine_version:
        notes.append(Note("engine_version", "the image decides it"))
    return {key: value for key, value in found.items() if value not in ({}, [])}, notes + unwritten
