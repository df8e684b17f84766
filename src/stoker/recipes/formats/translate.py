"""Recipes of other tools become ours, and ours theirs. What cannot be carried over is listed, never dropped."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
import yaml

from stoker.errors import RequestError, visible
from stoker.recipes.formats import flags, spark_vllm_docker, sparkrun, vllm_recipes, yaml_file
from stoker.recipes.formats.foreign import Foreign, Note, note
from stoker.recipes.formats.vllm_recipes import Choice
from stoker.recipes.formats.yaml_file import Table
from stoker.recipes.load import RecipeError, contradictions
from stoker.recipes.recipe import Recipe, to_json

FORMATS = (sparkrun.NAME, spark_vllm_docker.NAME, vllm_recipes.NAME)
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}\Z")
MOST_BOXES = 64
_VARIABLE = re.compile(r"[A-Za-z_]\w*\Z")


@dataclass(frozen=True)
class Wanted:
    """What the user says about an import beside the file."""

    format: str = ""  # empty: as the file looks
    choice: Choice = field(default_factory=Choice)
    nodes: tuple[str, ...] = ()
    solo: bool = False  # one box, whatever the recipe says
    image: str = ""  # by digest, in place of the recipe's


@dataclass(frozen=True)
class Imported:
    format: str
    recipe: Recipe
    notes: list[Note]  # what was not carried over

    @property
    def text(self) -> str:
        """As TOML, with the notes as comments."""
        lines = [f"# Imported from a recipe of {self.format}."]
        if self.notes:
            lines.append("# Not carried over, or to look at:")
            lines += [f"# - {visible(f'{one.what} ({one.why})', keep='')}" for one in self.notes]
        return "\n".join(lines) + "\n\n" + tomli_w.dumps(to_json(self.recipe), multiline_strings=True)


@dataclass(frozen=True)
class Exported:
    format: str
    text: str
    notes: list[Note]


def import_file(path: Path, wanted: Wanted | None = None) -> Imported:
    return import_table(yaml_file.read(path), path.stem, wanted)


def import_table(table: Table, stem: str, wanted: Wanted | None = None) -> Imported:
    wanted = wanted or Wanted()
    name = wanted.format or looks_like(table)
    if name == sparkrun.NAME:
        foreign = sparkrun.read(table, stem)
    elif name == spark_vllm_docker.NAME:
        foreign = spark_vllm_docker.read(table, stem)
    else:
        foreign = vllm_recipes.read(table, stem, wanted.choice, len(wanted.nodes))
    if name != vllm_recipes.NAME and wanted.choice != Choice():
        raise RequestError(f"variants, hardware and features are chosen only in recipes of {vllm_recipes.NAME}.")
    return _recipe(foreign, table, wanted)


def looks_like(table: Table) -> str:
    """The format of a file by its keys."""
    values = table.values
    if isinstance(values.get("model"), dict):
        return vllm_recipes.NAME
    version = str(values.get("recipe_version", values.get("sparkrun_version", "")))
    ours = {
        "runtime",
        "metadata",
        "min_nodes",
        "max_nodes",
        "model_revision",
        "pre_exec",
        "post_exec",
        "executor_config",
    }
    if version.startswith("2") or (ours & values.keys() and not ("name" in values and version == "1")):
        return sparkrun.NAME
    if "command" in values and ("name" in values or "container" in values):
        return spark_vllm_docker.NAME
    if "model" in values:
        return sparkrun.NAME
    raise RecipeError(
        f"{table.source.name}, line 1: it looks like no recipe of {', '.join(FORMATS)}: keys such as model, "
        "container and command are missing."
    )


def _recipe(foreign: Foreign, table: Table, wanted: Wanted) -> Imported:
    settings = flags.read(foreign.arguments, foreign.model)
    for what, why in settings.problems:
        foreign.notes.append(Note(what, why))
    if not foreign.model:
        raise table.error("model", "it names no model.")
    revision = foreign.revision or settings.revision
    try:
        model = flags.files(foreign.model, revision)
    except ValueError as error:
        raise table.source.error(tuple(foreign.model_place.split(".")), f"{error}.") from None
    if revision and "revision" not in model and revision != "main":
        note(foreign, "revision", revision, "a path has none")
    data: dict[str, Any] = {
        "name": foreign.name,
        "title": _title(foreign),
        "engine": "vllm",
        "engine_version": foreign.engine_version,
        "model": model,
        "serve": settings.serve,
        "env": _env(foreign),
        "shell": foreign.shell,
    }
    # vLLM calls a model as it was named to it, unless told otherwise.
    name = settings.serve.setdefault("name", foreign.model)
    if name == foreign.name:
        settings.serve["name"] = ""
    if settings.drafter:
        data["drafter"] = settings.drafter
    _place(foreign, settings, wanted, table, data)
    _container(foreign, wanted, data)
    try:
        recipe = msgspec.convert(data, Recipe)
    except msgspec.ValidationError as error:
        raise RecipeError(f"{table.source.name}: it makes no recipe of ours: {error}.") from None
    for path, said in contradictions(recipe):
        raise RecipeError(f"{table.source.name}: it makes no recipe of ours: {'.'.join(map(str, path))}: {said}")
    return Imported(foreign.format, recipe, foreign.notes)


def _title(foreign: Foreign) -> str:
    title = " ".join(foreign.title.split()) or foreign.name
    if len(title) > 120:
        note(foreign, "description", title, "a title has at most 120 characters")
    return title[:120].rstrip()


def _env(foreign: Foreign) -> dict[str, str]:
    for key in foreign.env:
        if not _VARIABLE.match(key):
            note(foreign, f"env.{key}", foreign.env[key], "it is not a name of a variable")
    return {key: value for key, value in foreign.env.items() if _VARIABLE.match(key)}


def _place(foreign: Foreign, settings: flags.Settings, wanted: Wanted, table: Table, data: dict[str, Any]) -> None:
    """Decides over boxes: [nodes], or arguments for the cards of one box."""
    said = settings.parallel
    for key in ("rank", "address", "port", "headless"):
        if key in said:
            note(foreign, f"--{key}", said[key], "stoker up says it to every box")
    backend = said.get("backend", "")
    tensor, pipeline, boxes = (_size(said, key, table) for key in ("tensor", "pipeline", "nodes"))
    boxes = max(boxes, foreign.boxes, tensor * pipeline if foreign.card_per_box else 1)
    if boxes > MOST_BOXES:
        raise RecipeError(f"{table.source.name}: it is for {boxes:,} boxes; {MOST_BOXES} are the most that are read.")
    if wanted.nodes and foreign.one_box:
        raise RecipeError(f"{table.source.name}: it is for one box only, and --nodes names {len(wanted.nodes)}.")
    if wanted.nodes and tensor * pipeline == 1:
        raise RecipeError(
            f"{table.source.name}: it spreads the model over no second box (tensor and pipeline parallel are 1); "
            "leave --nodes out."
        )
    if wanted.nodes or (boxes > 1 and not foreign.one_box and not wanted.solo):
        hosts = list(wanted.nodes) or [f"box-{number}" for number in range(1, boxes + 1)]
        if not wanted.nodes:
            why = "they stand for your boxes: write their names in [nodes], or import again with --nodes A,B or --solo"
            note(foreign, "nodes.hosts", ", ".join(hosts), why)
        data["nodes"] = {
            "hosts": hosts,
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "expert_parallel": "expert" in said,
            "launcher": "ray" if foreign.ray or backend == "ray" else "vllm",
        }
        if backend not in ("", "ray", "mp"):
            note(foreign, "--distributed-executor-backend", backend, "stoker up starts vLLM's own or Ray")
        return
    arguments = settings.serve.setdefault("arguments", [])
    keep = not wanted.solo or foreign.one_box or not foreign.card_per_box
    for flag, size in (("--tensor-parallel-size", tensor), ("--pipeline-parallel-size", pipeline)):
        if size > 1 and keep:
            arguments += [flag, str(size)]
        elif size > 1:
            note(foreign, flag, str(size), "it counted boxes; a box with several cards takes it in serve.arguments")
    if "expert" in said:
        arguments.append("--enable-expert-parallel")
    if backend == "ray" or foreign.ray:
        note(foreign, "ray", "", "one box needs none")
    elif backend:
        arguments += ["--distributed-executor-backend", backend]
    if not arguments:
        del settings.serve["arguments"]


def _size(said: dict[str, str], key: str, table: Table) -> int:
    text = said.get(key, "1")
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 4 and int(text) > 0):
        raise RecipeError(f"{table.source.name}: {text!r} is not a number of {'boxes' if key == 'nodes' else 'cards'}.")
    return int(text)


def _container(foreign: Foreign, wanted: Wanted, data: dict[str, Any]) -> None:
    if wanted.image and not DIGEST.search(wanted.image):
        raise RequestError(f"--image {wanted.image} is not by digest: NAME@sha256:64 hexadecimal digits.")
    image = wanted.image or foreign.image
    if DIGEST.search(image):
        data["container"] = {"image": image}
    elif image:
        why = (
            "a tag may change under the recipe; `docker image inspect --format '{{index .RepoDigests 0}}' IMAGE` "
            "prints the digest of a pulled image: import again with --image NAME@sha256:..., or write it in [container]"
        )
        note(foreign, "container", image, why)


def export(recipe: Recipe, to: str) -> Exported:
    """A recipe of ours as YAML of another tool; what that has no place for stands in comments at its head."""
    writers = {
        sparkrun.NAME: sparkrun.write_recipe,
        spark_vllm_docker.NAME: spark_vllm_docker.write_recipe,
        vllm_recipes.NAME: vllm_recipes.write_recipe,
    }
    data, notes = writers[to](recipe)
    lines = [f"# Written by Stoker from its recipe {recipe.name}."]
    if notes:
        lines.append("# Not carried over, or to look at:")
        lines += [f"# - {visible(f'{one.what} ({one.why})', keep='')}" for one in notes]
    return Exported(to, "\n".join(lines) + "\n\n" + _yaml(data), notes)


class _Dumper(yaml.SafeDumper):
    """Keeps the order of keys; texts of several lines stand as they are. No aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def _yaml(data: dict[str, Any]) -> str:
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000))


def found_in(folder: Path) -> list[Path]:
    """The YAML files of a folder and its subfolders, without hidden ones."""
    files: Sequence[Path] = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in (".yaml", ".yml") and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )  # fmt: skip
    return list(files)
