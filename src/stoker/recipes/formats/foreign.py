"""What the three formats have in common: a served model, its arguments, and what surrounds them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from stoker.errors import brief
from stoker.recipes.formats.flags import PARALLEL, Option, hub_name, option, secret, secret_value
from stoker.recipes.formats.yaml_file import Table
from stoker.recipes.load import RecipeError
from stoker.recipes.recipe import Recipe, Step

SECRET_SCRIPT = "recipes hold no secrets: take it from the environment of stoker up and add the step as [[shell]]"
LONGEST_VALUE = 160  # characters of a value in a note


class Note(Struct, frozen=True):
    """Something that the other format has no place for."""

    what: str
    why: str  # and what to do about it


@dataclass
class Foreign:
    """A recipe of another tool, read but not yet translated."""

    format: str
    name: str
    title: str
    model: str
    model_place: str = "model"
    revision: str = ""
    arguments: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    image: str = ""
    shell: list[Step] = field(default_factory=list)
    engine_version: str = ""
    boxes: int = 1  # that it needs at least
    cards: int = 1  # of each box
    one_box: bool = False  # it never uses several
    card_per_box: bool = True  # tensor and pipeline parallel count boxes, since each has one card
    ray: bool = False
    notes: list[Note] = field(default_factory=list)


def note(foreign: Foreign, what: str, value: Any, why: str) -> None:
    """`what` with its value, shortened, and hidden where its name says that it is a secret."""
    if secret(what) or (isinstance(value, str) and hides(value)):
        shown = "(hidden)"
    elif isinstance(value, str):
        shown = value if len(value) <= LONGEST_VALUE else f"{value[: LONGEST_VALUE - 1]}…"
    else:
        shown = brief(value)
    foreign.notes.append(Note(f"{what}: {shown}", why))


def hides(script: str) -> bool:
    """Whether a shell script has a secret in it: a variable that is set, an option's value, or an address."""
    named = re.findall(r"(?:--([\w-]+)[ =]|(\w+)=)(?=[^\s$])", script)
    return secret_value(script) or any(secret(option or variable) for option, variable in named)


def note_unread(foreign: Foreign, table: Table, known: dict[str, str], prefix: str = "") -> None:
    """Lists every key that nobody read, with what is known about it."""
    for key in table.unread():
        why = known.get(key, "Stoker's recipes have nothing like it")
        note(foreign, f"{prefix}{key}", table.values[key], why)


def environment(foreign: Foreign, env: dict[str, str], prefix: str = "env.") -> None:
    """Takes over an environment, except for secrets and what a shell would fill in."""
    for key, value in env.items():
        if secret(key) or secret_value(value):
            note(foreign, f"{prefix}{key}", "", f"recipes hold no secrets: set {key} in the environment of stoker up")
        elif re.search(r"\$[A-Za-z_{(]|`", value):
            note(foreign, f"{prefix}{key}", value, f"a shell fills it in: set {key} in the environment of stoker up")
        else:
            foreign.env[key] = value


def slug(text: str) -> str:
    """As the name of a recipe."""
    found = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:64].rstrip("-._")
    return found or "imported"


@dataclass
class Parallel:
    """Over how many boxes and cards a recipe of ours is spread."""

    boxes: int
    tensor: int
    pipeline: int
    expert: bool
    ray: bool

    def options(self) -> list[Option]:
        found = [option("--tensor-parallel-size", str(self.tensor))]
        if self.pipeline > 1:
            found.append(option("--pipeline-parallel-size", str(self.pipeline)))
        if self.expert:
            found.append(option("--enable-expert-parallel"))
        return found


def parallel(recipe: Recipe, arguments: Sequence[Option]) -> tuple[Parallel, list[Option]]:
    """How a recipe is spread, and its arguments without what says so."""
    if recipe.nodes:
        nodes = recipe.nodes
        found = Parallel(
            len(nodes.hosts),
            nodes.tensor_parallel,
            nodes.pipeline_parallel,
            nodes.expert_parallel,
            nodes.launcher == "ray",
        )
        return found, list(arguments)
    said = {PARALLEL[one.flag]: one for one in arguments if one.flag in PARALLEL}
    kept = [one for one in arguments if PARALLEL.get(one.flag) not in ("tensor", "pipeline", "expert")]
    size = {}
    for key in ("tensor", "pipeline"):
        value = said[key].values[0] if key in said and said[key].values else "1"
        size[key] = int(value) if value.isascii() and value.isdigit() and value != "0" else 1
    return Parallel(1, size["tensor"], size["pipeline"], "expert" in said, False), kept


def unshared(recipe: Recipe) -> list[Note]:
    """What of a recipe of ours none of the three formats has a place for."""
    if recipe.engine != "vllm":
        raise RecipeError(
            f"the recipe {recipe.name} runs on Stoker's engine, and those formats start vLLM: only recipes with "
            'engine = "vllm" can be exported.'
        )
    if recipe.model.source == "demo":
        raise RecipeError("the model of the recipe is the embedded demo, which no other tool has.")
    found = []

    def lost(what: str, value: object, why: str = "that format has nothing like it") -> None:
        if value:
            found.append(Note(what, why))

    where = "the path is of this machine"
    lost("model.source", "" if recipe.model.source.startswith(("hf:", "/")) else recipe.model.source, where)
    lost("model.sha256", recipe.model.sha256)
    lost("drafter.sha256", recipe.drafter and recipe.drafter.sha256)
    lost("box", recipe.box)
    lost("plan", recipe.plan)
    lost("weights", recipe.weights)
    lost("build", recipe.build, "the checkpoint has to be built before: stoker build")
    lost("serve.device", recipe.serve.device != "auto")
    lost("serve.memory_gib", recipe.serve.memory_gib, "vLLM takes a share of the memory: serve.memory_share")
    lost("serve.reserve_gib", recipe.serve.reserve_gib)
    lost("serve.kv_dtype", recipe.serve.kv_dtype == "fp32", "vLLM has no such cache")
    lost("container.arguments", recipe.container and recipe.container.arguments)
    if recipe.nodes:
        lost("nodes.hosts", recipe.nodes.hosts, "hosts are named when the recipe is run")
        lost("nodes.interface", recipe.nodes.interface, "the launcher finds it out")
        lost("nodes.port", recipe.nodes.port != 25000, "the launcher chooses it")
    lost("expected", recipe.expected != type(recipe.expected)(), "nothing there is checked after the start")
    lost("known", recipe.known)
    return found


def model_name(recipe: Recipe) -> str:
    return hub_name(recipe.model)
