"""Which models suit a box and a need: the best recipe of each, those that meet the need first, and by how much the rest
does not fit."""

from dataclasses import dataclass
from typing import Any

from stoker.errors import RequestError
from stoker.plan.acceptance import acceptance
from stoker.plan.answer import default_engine, parse_draft, recipes
from stoker.plan.catalog import Box, find_box, find_scheme, models
from stoker.plan.drafters import sure
from stoker.plan.evidence import Row
from stoker.plan.forecast import Forecaster
from stoker.plan.memory import Ask, Budget, budget
from stoker.plan.models import Model
from stoker.plan.speed import Speed
from stoker.sizes.step import Draft
from stoker.sizes.weights import WeightBytes


@dataclass(frozen=True)
class Need:
    name: str
    title: str
    kind: str  # of text
    context: int
    users: int
    least: float  # tokens/s, all users together, below which people give up on it


NEEDS = {
    "agent": Need("agent", "coding agent or tools, one at a time, 100K of context", "agent", 100_000, 1, 25.0),
    "chat": Need("chat", "chat and questions, one at a time", "prose", 8_192, 1, 15.0),
    "batch": Need("batch", "structured extraction, eight at a time", "agent", 8_192, 8, 60.0),
    "long-context": Need("long-context", "one document of 128K", "prose", 131_072, 1, 10.0),
}


@dataclass(frozen=True)
class Choice:
    model: Model
    recipe: str
    weights: str
    draft: Draft
    engine: str
    context: int
    budget: Budget
    speed: Speed
    sure: float  # tokens/s that recipes of a model are compared by
    assumed: bool  # the acceptance, where drafting
    meets: bool
    evidence: tuple[Row, ...]

    @property
    def fits(self) -> bool:
        return self.budget.fits

    def to_json(self) -> dict[str, Any]:
        s = self.speed
        return {
            "model": self.model.name,
            "weights": self.weights,
            "fits": self.fits,
            "tokens_per_s": round(s.tokens_per_s, 1) if self.fits else None,
            "evidence": [row.to_json() for row in self.evidence],
            "meets_need": self.meets,
            "recipe": self.recipe,
            "draft": str(self.draft),
            "engine": self.engine,
            "context": self.context,
            "low": round(s.low, 1) if self.fits else None,
            "high": round(s.high, 1) if self.fits else None,
            "limit_tokens_per_s": round(s.limit, 1) if self.fits else None,
            "acceptance_assumed": self.assumed,
            "free_bytes": self.budget.free_bytes,
            "missing_bytes": max(0, -self.budget.free_bytes),
        }


def pick(box_name: str, need_name: str = "agent") -> tuple[Box, Need, tuple[Choice, ...]]:
    box = find_box(box_name)
    if need_name not in NEEDS:
        raise RequestError(f"unknown need {need_name!r}; known needs: {', '.join(NEEDS)}.")
    need = NEEDS[need_name]
    chosen = []
    for model in models():
        choices = [
            _choice(model, key, entry, box, need) for key, entry in recipes().items() if _runs(model, entry, box)
        ]
        if choices:
            chosen.append(max(choices, key=lambda c: (c.fits, c.sure if c.fits else c.budget.free_bytes)))
    # Speed is no measure of quality: among those that meet the need the larger model comes first.
    order = sorted(
        chosen, key=lambda c: (not c.fits, not c.meets, -c.model.parameters if c.fits else -c.budget.free_bytes)
    )
    return box, need, tuple(order)


def _runs(model: Model, recipe: dict[str, Any], box: Box) -> bool:
    """AMD and Apple boxes are planned with llama.cpp, others with vLLM; a GGUF recipe is no use beside a better one
    there. Some recipes are for one architecture."""
    engine = default_engine(model, box)
    here = box.architecture in recipe.get("architectures", [box.architecture])
    return here and model.name in recipe["models"] and recipe["engine"] == ("vLLM" if engine == "stoker" else engine)


def _choice(model: Model, key: str, recipe: dict[str, Any], box: Box, need: Need) -> Choice:
    weighed: WeightBytes = WeightBytes.of(model, find_scheme(recipe["weights"]))
    draft = parse_draft(recipe["draft"])
    context = min(need.context, model.max_positions)
    ask = Ask(context, need.users, draft, recipe.get("kv", "bf16"), recipe["engine"])
    planned = budget(model, weighed, box, ask)
    accepted = acceptance(draft, need.kind, model=model.name)
    cast = Forecaster(model, weighed, recipe["weights"], box, recipe["engine"], ask.kv)
    speed = cast.speed(draft, need.kind, context=context, users=need.users, accepted=accepted)
    near = cast.nearest(draft, need.kind, context, need.users, 3)
    return Choice(
        model=model,
        recipe=key,
        weights=recipe["weights"],
        draft=draft,
        engine=recipe["engine"],
        context=context,
        budget=planned,
        speed=speed,
        sure=sure(draft, speed, need.kind, model),
        assumed=accepted.assumed,
        meets=planned.fits and speed.tokens_per_s >= need.least and context == need.context,
        evidence=tuple(row for row in near if (row.box, row.boxes) == box.of_rows),
    )
