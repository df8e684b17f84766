"""How alike two runs are: a measured row and a plan, or two rows. All of the case counts: model, weights, box, engine,
drafter, text, context and users.

Likeness decides twice: which rows are shown as nearest, and how far their misses are believed to be the plan's as well
(correction.py).
"""

from dataclasses import dataclass
from math import exp, log, log2

from stoker.plan.evidence import MIXED
from stoker.plan.models import Model
from stoker.sizes.step import Draft

USERS_SCALE = 1.0  # natural logarithm of users over which likeness falls to a third
CONTEXT_SCALE = 3.0  # doublings of the context, beyond SHORT, over which it does
UNSTATED = 32_768  # tokens that a context may have of which a row says nothing
SHORT = 2048  # tokens; below them a context hardly matters
DEPTH_SCALE = 1.5  # natural logarithm of verified tokens
OTHER_TEXT, HALF_KNOWN_TEXT = 0.6, 0.8  # likeness of prose and code; of prose and text that is not told
OTHER_FORMAT = 0.5  # of two formats of a family: int4 and int4+fp8
OTHER_KV = 0.5
BACKEND_NOT_TOLD = 0.7
LIKE = {"stoker": "vLLM"}  # assumed alike, until Stoker's own runs on these boxes are published


@dataclass(frozen=True)
class Setting:
    """What was run, or is planned."""

    model: str  # its shape: siblings of one shape are one model here
    weights: str
    box: str
    devices: int
    engine: str
    backend: str  # empty: not stated
    drafter: str
    depth: int
    kind: str  # of text
    context: int | None  # None: not stated
    users: int
    kv: str = ""  # empty: not stated
    guess: float = 0.0  # variance of the logarithm of its tokens per step, where they are assumed


def setting(
    model: Model, weights: str, box: tuple[str, int], engine: str, backend: str, draft: Draft, kind: str,
    context: int | None, users: int, kv: str = "", guess: float = 0.0,
) -> Setting:  # fmt: skip
    """`box`: its key, and how many of them."""
    return Setting(
        shape_of(model), weights, *box, LIKE.get(engine, engine), backend, draft.kind, draft.depth, kind, context,
        users, kv, guess,
    )  # fmt: skip


def shape_of(model: Model) -> str:
    return f"{model.hidden_size} x {model.layers}, {model.experts} experts, {model.active_parameters}"


@dataclass(frozen=True)
class Likeness:
    """Each from 0 to 1: 1 where two runs agree in everything that the name means."""

    model: float
    weights: float  # of that model
    box: float  # model, box, engine, users and context
    recipe: float  # and weights, drafter, text
    drafter: float  # whatever the model
    company: float  # several users at a time on that engine, whatever the model
    guess: float  # model, drafter and text: what decides how many tokens a step brings


def likeness(a: Setting, b: Setting) -> Likeness:
    model = float(a.model == b.model)
    engine = a.engine == b.engine
    users = exp(-abs(log(a.users) - log(b.users)) / USERS_SCALE)
    context = exp(-_apart(a.context or 0, b.context or 0) / CONTEXT_SCALE)  # where none is stated, it was short
    box = float(engine and (a.box, a.devices) == (b.box, b.devices)) * _backend(a.backend, b.backend)
    weights = 1.0 if a.weights == b.weights else OTHER_FORMAT if _family(a.weights) == _family(b.weights) else 0.0
    drafting = float(a.drafter == b.drafter) * exp(-abs(log(1 + a.depth) - log(1 + b.depth)) / DEPTH_SCALE)
    here = model * box * users * context
    return Likeness(
        model=model,
        weights=model * weights,
        box=here,
        recipe=here * weights * drafting * _text(a.kind, b.kind) * (1.0 if _kv(a.kv, b.kv) else OTHER_KV),
        drafter=box * drafting * (a.drafter != "none"),
        company=engine * users * context * (a.users > 1 and b.users > 1),
        guess=model * (a.drafter == b.drafter) * _text(a.kind, b.kind),
    )


def same_recipe(a: Setting, b: Setting) -> bool:
    """One recipe, run in the same way: what is measured with one may be expected of the other."""
    same = (a.model, a.weights, a.box, a.devices, a.engine, a.drafter, a.depth, a.users)
    return (
        same == (b.model, b.weights, b.box, b.devices, b.engine, b.drafter, b.depth, b.users)
        and _agree(a.backend, b.backend)
        and _kv(a.kv, b.kv)
        and (a.kind == b.kind or a.drafter == "none")
        and _contexts_agree(a, b)
    )


def _apart(a: int, b: int) -> float:
    """Doublings between two contexts."""
    return abs(log2(max(a, SHORT)) - log2(max(b, SHORT)))


def _contexts_agree(a: Setting, b: Setting) -> bool:
    """Within a doubling. One that is not stated may be any that a single user's plan has by default; of several users
    it was short."""
    if a.users == 1 and (a.context is None or b.context is None):
        return max(a.context or 0, b.context or 0) <= UNSTATED
    return _apart(a.context or 0, b.context or 0) <= 1.0


def _agree(a: str, b: str) -> bool:
    return a == b or not a or not b


def _backend(a: str, b: str) -> float:
    return 1.0 if a == b else 0.0 if a and b else BACKEND_NOT_TOLD


def _kv(a: str, b: str) -> bool:
    """BF16 and FP8 keys decode alike at short contexts, and their bytes are counted at long ones; others do not."""
    return a == b or {a, b} <= {"", "bf16", "fp8"}


def _family(weights: str) -> str:
    return weights.replace("-", "+").split("+")[0]


def _text(a: str, b: str) -> float:
    return 1.0 if a == b else HALF_KNOWN_TEXT if MIXED in (a, b) else OTHER_TEXT
