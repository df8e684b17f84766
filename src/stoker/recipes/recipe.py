"""What a recipe says. `docs/recipes.md` documents it; `python -m stoker.recipes.recipe` prints its JSON Schema.

A recipe holds no secret: API keys and tokens of hubs come from the environment of the command that uses it.
"""

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]
Source = Annotated[
    str, Meta(min_length=1, description="demo, hf:OWNER/NAME, or a path, relative to the recipe's own folder")
]
Positive = Annotated[int, Meta(ge=1)]
Gib = Annotated[float, Meta(gt=0)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Part(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of everything in a recipe. A key it does not know is an error, since a typo must not pass unnoticed."""


class Files(Part, frozen=True):
    """A checkpoint: the model itself, a drafter, or what a build takes parts from."""

    source: Source
    revision: Annotated[str, Meta(description="of a hub: a commit, tag or branch")] = "main"
    sha256: Annotated[dict[str, Sha256], Meta(description="file name -> hash that the file must have")] = {}


class Build(Part, frozen=True):
    """Options of `stoker build`, which makes the checkpoint that is served. Sources as in [model]."""

    shared_experts: str = ""
    lm_head: str = ""
    mtp: str = ""
    drafter: str = ""
    quantize: str = ""
    draft_weights: str = ""
    to: str = ""


class Serve(Part, frozen=True):
    """How the model is served, in the same words for every engine."""

    draft: Annotated[str, Meta(description="none, mtp:K, dflash:K, lookup:K, lookup+mtp:K, auto")] = "none"
    context: Annotated[Positive | None, Meta(description="most tokens of a request; none: the model's")] = None
    users: Annotated[Positive, Meta(description="requests computed at the same time")] = 4
    kv_dtype: Literal["", "bf16", "fp8", "fp32"] = ""
    device: Annotated[str, Meta(description="auto, cpu or cuda")] = "auto"
    memory_gib: Annotated[Gib | None, Meta(description="for weights and caches")] = None
    memory_share: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None, Meta(description="of the card's memory, as vLLM counts it")
    ] = None
    reserve_gib: Annotated[Gib | None, Meta(description="left free for the system")] = None
    prefill_tokens: Annotated[Positive | None, Meta(description="most prompt tokens of one step")] = None
    prefix_cache: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    name: Annotated[str, Meta(description="the model's name in the API; the recipe's if empty")] = ""
    tool_parser: Annotated[str, Meta(description="by vLLM's name; Stoker's engine takes the model's own")] = ""
    reasoning_parser: str = ""
    template: Annotated[dict[str, Any], Meta(description="options of the chat template")] = {}
    sampling: Annotated[dict[str, float], Meta(description="defaults of requests: temperature, top_p, ...")] = {}
    arguments: Annotated[list[str], Meta(description="further arguments of the engine's command, as they are")] = []


class Container(Part, frozen=True):
    """The engine runs in this image."""

    image: Annotated[str, Meta(description="by digest: NAME@sha256:...", min_length=1)]
    arguments: Annotated[list[str], Meta(description="further arguments of docker run or podman run")] = []


class Step(Part, frozen=True):
    """A command of a shell that somebody wants run around the start. It runs only once the user has agreed to it."""

    run: Annotated[str, Meta(min_length=1, description="for bash; several lines are one script")]
    when: Annotated[Literal["before", "after"], Meta(description="the engine starts; after: once it answers")] = (
        "before"
    )
    inside: Annotated[bool, Meta(description="in the engine's container; else on this machine")] = False
    note: Annotated[str, Meta(description="what it is for")] = ""


class Nodes(Part, frozen=True):
    """Boxes that serve one model together, reached by ssh; the first one answers requests."""

    hosts: Annotated[list[str], Meta(min_length=2)]
    launcher: Annotated[Literal["vllm", "ray"], Meta(description="vLLM's own multi-node flags, or a Ray cluster")] = (
        "vllm"
    )
    interface: Annotated[str, Meta(description="the network device between the boxes")] = ""
    tensor_parallel: Positive = 2
    pipeline_parallel: Positive = 1
    expert_parallel: bool = False
    port: Annotated[int, Meta(ge=1, le=65535, description="where the first box coordinates the others")] = 25000


class Speed(Part, frozen=True):
    """A speed the recipe promises, with who measured it."""

    workload: Annotated[str, Meta(description="as `stoker bench` names it")]
    tokens_per_s: Annotated[float, Meta(gt=0)]
    source: Annotated[str, Meta(min_length=1, description="who published it, or where it was measured")]
    users: Annotated[Positive, Meta(description="at the same time; tokens_per_s is of each")] = 1
    timing: Annotated[
        Literal["decode-only", "end-to-end"], Meta(description="after the first token, or with the wait for it")
    ] = "decode-only"
    tokens_per_step: Annotated[float, Meta(ge=1)] | None = None
    evidence: Annotated[str, Meta(description="id of the planner's row, as m010")] = ""


class Score(Part, frozen=True):
    """A score of `stoker check` that the recipe promises, with who measured it."""

    suite: Annotated[str, Meta(min_length=1, description="as `stoker check` names it, or a file of one's own")]
    share: Annotated[float, Meta(ge=0, le=1, description="of the items wholly right")]
    items: Annotated[Positive, Meta(description="that it was measured on")]
    source: Annotated[str, Meta(min_length=1, description="who measured it, where and when")]


class Amount(Part, frozen=True):
    """Memory or start time that the recipe promises."""

    value: Annotated[float, Meta(gt=0)]
    source: Annotated[str, Meta(min_length=1)]


class Expected(Part, frozen=True):
    speed: list[Speed] = []
    score: list[Score] = []
    memory_gib: Annotated[Amount | None, Meta(description="weights, caches and runtime")] = None
    start_s: Annotated[Amount | None, Meta(description="from the start of the engine until it answers")] = None


class Known(Part, frozen=True):
    """Whether somebody has run the recipe, and where."""

    state: Annotated[
        Literal["runs", "parses", "broken"],
        Meta(description="runs: it was served; parses: the engine accepts the command; broken: known not to work"),
    ]
    where: Annotated[str, Meta(min_length=1, description="box, engine version and date, or why it cannot run")]


class Recipe(Part, frozen=True):
    name: Name
    title: Annotated[str, Meta(min_length=1, max_length=120)]
    model: Files
    engine: Literal["stoker", "vllm"] = "stoker"
    engine_version: Annotated[str, Meta(description="a version specifier, as >=0.23; empty: any")] = ""
    box: Annotated[str, Meta(description="the planner's name of the box that `expected` is about")] = ""
    plan: Annotated[str, Meta(description="the planner's name of the model; else its config.json is read")] = ""
    weights: Annotated[str, Meta(description="the planner's name of the format; else the files' headers count")] = ""
    drafter: Annotated[Files | None, Meta(description="a DFlash drafter in files of its own")] = None
    build: Annotated[Build | None, Meta(description="none: the model is served as it is")] = None
    serve: Serve = Serve()
    env: Annotated[dict[str, str], Meta(description="environment of the engine; no secrets")] = {}
    container: Container | None = None
    nodes: Nodes | None = None
    shell: Annotated[list[Step], Meta(description="run only after confirmation")] = []
    expected: Expected = Expected()
    known: Known | None = None


def to_json(recipe: Recipe) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(recipe)
    return found


def schema() -> dict[str, Any]:
    """JSON Schema of a recipe."""
    _, defined = msgspec.json.schema_components([Recipe], ref_template="#/$defs/{name}")
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Recipe of stoker up",
        "description": "Written in TOML. Explained in docs/recipes.md. Generated by python -m stoker.recipes.recipe.",
    }
    return {**defined.pop("Recipe"), **head, "$defs": defined}


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
