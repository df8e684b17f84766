"""How many tokens a step brings, where the user does not say: published numbers, carried to other depths by the
chance of one draft."""

from dataclasses import dataclass
from functools import cache

from stoker.errors import RequestError
from stoker.plan.catalog import read
from stoker.sizes.step import Draft

MEASURED_WITH = "Qwen3.5-122B-A10B"
KINDS = ("prose", "code", "agent", "mixed")
CALLED = {"general": "mixed", "chat": "prose", "q&a": "prose", "qa": "prose", "rag": "prose", "hungarian": "prose",
          "json": "agent", "tools": "agent", "tool-calls": "agent", "batch": "agent", "math": "code"}  # fmt: skip


@dataclass(frozen=True)
class Acceptance:
    tokens_per_step: float
    said_by: str  # "asked for", "row m058", "by definition"
    assumed: bool
    asked: bool = False  # what the user says, who may have measured it


def workload_kind(name: str) -> str:
    kind = CALLED.get(name.lower(), name.lower())
    if kind not in KINDS:
        raise RequestError(f"unknown workload {name!r}; known workloads: {', '.join((*KINDS, *CALLED))}.")
    return kind


def acceptance(draft: Draft, kind: str, asked: float | None = None, model: str = "") -> Acceptance:
    if asked is not None:
        if not 1.0 <= asked <= draft.verified:
            raise RequestError(
                f"{asked:g} tokens per step were asked for, but a step of {draft} emits from 1 to {draft.verified}: "
                "the accepted drafts and one of the model's own."
            )
        return Acceptance(asked, "asked for", draft.drafting, True)
    if not draft.drafting:
        return Acceptance(1.0, "by definition", False)
    known = read("acceptance.toml").get(draft.kind)
    if known is None:
        return Acceptance(1.0, "nobody published one for this drafter; give --accept-length", True)
    entry = known[kind]
    chance = chance_of(entry["tokens_per_step"], entry["depth"])
    said = f"row {entry['row']}"
    if draft.depth != entry["depth"]:
        said += f", from depth {entry['depth']}"
    if model and model != MEASURED_WITH:
        said += f", measured on {MEASURED_WITH}"
    return Acceptance(emitted(chance, draft.depth), said, True)


def emitted(chance: float, depth: int) -> float:
    """1 + c + c^2 + ...: a draft counts if it and all before it are right."""
    return sum(chance**i for i in range(depth + 1))


@cache
def chance_of(tokens_per_step: float, depth: int) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if emitted(middle, depth) < tokens_per_step else (low, middle)
    return low
