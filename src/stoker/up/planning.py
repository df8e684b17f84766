"""Whether a recipe fits the box, and how fast it should be there: the planner's answer to what the recipe says."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.errors import ConfigError, DependencyError, StokerError
from stoker.plan.acceptance import workload_kind
from stoker.plan.answer import ENGINE_NAMES, Answer, Question, answer
from stoker.plan.catalog import GIB, Box, find_box, find_model, schemes
from stoker.plan.evidence import kind_of
from stoker.plan.memory import find_engine
from stoker.plan.speed import Speed
from stoker.recipes.load import Loaded, is_remote
from stoker.recipes.recipe import Recipe
from stoker.sizes.weights import WeightBytes

VLLM_SHARE = 0.9  # of memory that vLLM takes unless told otherwise
LEAST_RESERVE = 0.05  # of the box's memory
NEAR = 0.15  # files of a format differ from what the planner counts by less than this


@dataclass(frozen=True)
class Planned:
    box: Box
    answer: Answer | None  # None: the planner knows neither the model nor its files
    memory_bytes: int  # that the engine takes; 0: unknown
    note: str = ""  # what the plan assumes, or why there is none

    def predict(self, workload: str, users: int) -> Speed | None:
        """The speed of all users together on such text, with next to no context."""
        if self.answer is None:
            return None
        kind = workload_kind(kind_of(workload)) if kind_of(workload) != "counting" else "mixed"
        return answer(replace(self.answer.question, workload=kind, users=users, fresh=1), self.box).short


class DoesNotFit(StokerError):
    """A recipe that needs more than the box has. The message has the numbers and what would fit."""

    def __init__(self, message: str, planned: Planned) -> None:
        super().__init__(message)
        self.planned = planned


def plan(loaded: Loaded, box_name: str, files: Path | None = None, freed: int = 0) -> Planned:
    """`files` are the model's if they are on disk already; `freed` bytes will be free once an older engine ends.

    Raises DoesNotFit with the numbers.
    """
    recipe, box = loaded.recipe, _with_freed(find_box(box_name), freed)
    try:
        model, weights, note = _model(loaded, files)
        found = answer(_question(recipe, box_name, model, weights), box)
    except (ConfigError, DependencyError) as error:
        return Planned(box, None, 0, f"not planned: {error}")
    planned = Planned(box, found, _memory(recipe, found), note)
    if not found.fits:
        raise DoesNotFit(_refusal(recipe, found), planned)
    return planned


def _question(recipe: Recipe, box: str, model: str, weights: str | None) -> Question:
    serve = recipe.serve
    return Question(
        model=model,
        box=box,
        context=serve.context,
        users=serve.users,
        weights=weights,
        draft=_draft(serve.draft, model),
        engine=ENGINE_NAMES[recipe.engine],
        kv="fp8" if serve.kv_dtype == "fp8" else None,
        utilization=serve.memory_share,
    )


def box_of(recipe: Recipe, asked: str | None) -> str:
    """The planner's name of where the recipe will run: several boxes are the ones it says it is for."""
    return asked or (recipe.box if recipe.nodes and recipe.box else "this")


def _with_freed(box: Box, freed: int) -> Box:
    least = LEAST_RESERVE * box.visible_gib
    return replace(box, reserve_gib=max(least, box.reserve_gib - freed / GIB)) if freed else box


def _model(loaded: Loaded, files: Path | None) -> tuple[str, str | None, str]:
    """How the planner calls the model, and its format: as the recipe names them, or as the files are."""
    recipe, source = loaded.recipe, loaded.recipe.model.source
    if recipe.plan:
        return recipe.plan, recipe.weights or None, ""
    if files:
        return str(files), recipe.weights or None, ""
    if not is_remote(recipe.model):
        return source if source == "demo" else str(loaded.folder / source), recipe.weights or None, ""
    config, size = _of_hub(recipe)
    if recipe.weights:
        return str(config), recipe.weights, ""
    weights, known = nearest_scheme(str(config), size)
    return str(config), weights, "" if known else f"weights taken to be {weights}, the format of the nearest size"


def nearest_scheme(model: str, size: int) -> tuple[str, bool]:
    """The planner's format whose bytes come nearest to those of the files, and whether they come near."""
    known = find_model(model)
    totals = {key: WeightBytes.of(known, scheme).total for key, scheme in schemes().items()}
    best = min(totals, key=lambda key: abs(totals[key] - size))
    return best, abs(totals[best] - size) <= NEAR * size


def _of_hub(recipe: Recipe) -> tuple[Path, int]:
    """The model's config.json, which alone is fetched, and the bytes of all weights."""
    from importlib.util import find_spec

    if find_spec("huggingface_hub") is None:
        raise DependencyError("huggingface_hub, which tells what the files are, is not installed")
    from stoker.up.fetch import select
    from stoker.weights.hub import Hub, parse_repository

    repository, named = parse_repository(recipe.model.source)
    hub = Hub(repository, named if recipe.model.revision == "main" else recipe.model.revision)
    listed = {file.name: file.size for file in hub.files()}
    size = sum(listed[name] for name in select(listed) if name.endswith(".safetensors"))
    return hub.cached_file("config.json"), size


def _draft(draft: str, model: str) -> str | None:
    """As the planner says it; what is chosen while it runs is planned as its likely part."""
    parts: Sequence[str] = draft.removeprefix("lookup+").split(":")
    if parts[0] == "auto":
        return "mtp:2" if find_model(model).mtp_layers else "none"
    return ":".join(parts)


def _memory(recipe: Recipe, found: Answer) -> int:
    """What the engine takes of the box: what it was given, or else what the plan counts."""
    needs = find_engine(found.ask.engine).on(found.box)
    host = int(needs.host_gib * GIB) if found.box.unified else 0
    if recipe.engine == "vllm":
        return int((recipe.serve.memory_share or VLLM_SHARE) * found.box.visible_bytes) + host
    if recipe.serve.memory_gib:
        return int(recipe.serve.memory_gib * GIB) + host
    return sum(item.bytes for item in found.budget.items if item.name != "reserve")


def _refusal(recipe: Recipe, found: Answer) -> str:
    budget, ask, box = found.budget, found.ask, found.box
    needed = sum(item.bytes for item in budget.items if item.name != "reserve")
    largest = sorted(budget.items, key=lambda item: -item.bytes)[:4]
    others = box.key == "this"  # whose reserve is what other programs use, and a part that stays free
    names = {"reserve": "other programs and what stays free"} if others else {}
    items = ", ".join(f"{names.get(item.name, item.name)} {item.bytes / GIB:.1f}" for item in largest)
    said = (
        f"{recipe.name} does not fit {box.name}: {budget.total / GIB:.1f} GiB are needed and "
        f"{budget.capacity / GIB:.1f} are there, {-budget.free_bytes / GIB:.1f} too few. The largest parts in GiB: "
        f"{items}."
    )
    if budget.max_context:
        return f"{said} {budget.max_context:,} tokens of context would fit {ask.users} users: lower serve.context."
    if budget.max_users:
        return f"{said} {budget.max_users} users of {ask.context:,} tokens would fit: lower serve.users."
    if others and needed + LEAST_RESERVE * budget.capacity < budget.capacity:
        return f"{said} It would fit if other programs used less: end some of them."
    return f"{said} `stoker pick --box {box.key}` lists what fits."
