"""`stoker plan` as data: a question in, everything the command shows out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from stoker.demo import checkpoint_at
from stoker.errors import RequestError
from stoker.plan.acceptance import Acceptance, acceptance, workload_kind
from stoker.plan.advice import Advice, Verdict, advise, verdicts
from stoker.plan.catalog import Box, find_box, find_model, find_scheme, read
from stoker.plan.compat import Finding, findings
from stoker.plan.evidence import Row, nearest
from stoker.plan.memory import Ask, Budget, budget, find_engine
from stoker.plan.models import GPT_OSS, Model
from stoker.plan.speed import Speed, first_token_s, predict, prefill_tokens_per_s
from stoker.sizes.memory import KV_ITEM
from stoker.sizes.step import Draft
from stoker.sizes.weights import Scheme, WeightBytes

CHECKPOINT = "checkpoint"
SHORT = 512  # tokens
ENGINE_NAMES = {"stoker": "stoker", "vllm": "vLLM"}  # as recipes call engines, and as rows do
DRAFTERS = ("none", "mtp", "dflash", "lookup")
# what the table of drafts compares, where the model has such a drafter
COMPARED = (Draft(), Draft("mtp", 1), Draft("mtp", 2), Draft("mtp", 4), Draft("dflash", 4), Draft("dflash", 12))


@dataclass(frozen=True)
class Question:
    model: str
    box: str
    context: int | None = None  # None: 32,768 or what the model has
    users: int = 1
    weights: str | None = None
    draft: str | None = None
    accept_length: float | None = None
    workload: str = "general"
    engine: str | None = None
    kv: str | None = None
    recipe: str | None = None
    utilization: float | None = None
    prefix_cache_gib: float = 0.0


@dataclass(frozen=True)
class Compared:
    """One line of the table of drafts."""

    draft: Draft
    general: Speed
    agent: Speed


@dataclass(frozen=True)
class Answer:
    question: Question
    model: Model
    box: Box
    weights_key: str
    weights: WeightBytes
    ask: Ask
    budget: Budget
    acceptance: Acceptance
    speed: Speed
    short: Speed  # the same with next to no context, as most published numbers are
    compared: tuple[Compared, ...]
    first_token: dict[int, float]  # prompt tokens -> seconds, nothing cached
    prefill: float
    evidence: tuple[Row, ...]
    compat: tuple[Finding, ...]
    advice: tuple[Advice, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def fits(self) -> bool:
        return self.budget.fits

    def to_json(self) -> dict[str, Any]:
        b, s, pool = self.budget, self.speed, self.budget.pool
        return {
            "model": self.model.name,
            "box": self.box.key,
            "weights": self.weights_key,
            "engine": self.ask.engine,
            "draft": str(self.ask.draft),
            "kv": self.ask.kv,
            "context": self.ask.context,
            "users": self.ask.users,
            "fits": self.fits,
            "memory": {
                "items": [{"name": item.name, "bytes": item.bytes} for item in b.items],
                "capacity_bytes": b.capacity,
                "free_bytes": b.free_bytes,
                "exact_weights": self.weights.exact,
                "max_context": b.max_context,
                "max_users": b.max_users,
                "vllm_pool": None if pool is None else {
                    "blocks": pool.blocks, "block_tokens": pool.block_tokens, "bytes": pool.bytes,
                    "tokens": pool.tokens, "max_concurrency": round(pool.concurrency, 2),
                    "tokens_by_bytes_alone": pool.tokens_by_bytes,
                    "max_concurrency_by_bytes_alone": round(pool.concurrency_by_bytes, 2),
                },
                "vllm_flags": list(b.flags),
            },
            "speed": {
                "what": "predicted decode speed of all users together, at the context asked for",
                "workload": self.question.workload,
                **_speed(s),
                "at_short_context": _speed(self.short),
                "accept_length": round(self.acceptance.tokens_per_step, 3),
                "acceptance": self.acceptance.said_by,
                "acceptance_assumed": self.acceptance.assumed,
                "prefill_tokens_per_s": round(self.prefill, 1),
                "first_token_s": {str(k): round(v, 2) for k, v in self.first_token.items()},
                "drafts": [
                    {"draft": str(c.draft), "general": _speed(c.general), "agent": _speed(c.agent)}
                    for c in self.compared
                ],
            },
            "evidence": [row.to_json() for row in self.evidence],
            "compat": [finding.to_json() for finding in self.compat],
            "advice": [{"text": a.text, "because": a.because} for a in self.advice],
            "verdicts": [{"use": v.use, "grade": v.grade, "because": v.because} for v in self.verdicts],
        }  # fmt: skip


def answer(question: Question, box: Box | None = None) -> Answer:
    """`box` is the one that the question names, where its free memory is known to differ."""
    box, model = box or find_box(question.box), find_model(question.model)
    recipe = find_recipe(question.recipe) if question.recipe else {}
    engine = find_engine(question.engine or recipe.get("engine") or default_engine(model, box)).key
    key, weighed = _weights(question, model, engine, recipe.get("weights"))
    draft = parse_draft(question.draft or recipe.get("draft") or default_draft(model, engine))
    context = question.context or min(32_768, model.max_positions)
    kv = question.kv or recipe.get("kv") or "bf16"
    ask = Ask(context, question.users, draft, kv, engine, question.prefix_cache_gib)
    planned = budget(model, weighed, box, ask, question.utilization)
    kind = workload_kind(question.workload)
    accepted = acceptance(draft, kind, question.accept_length, model.name)

    def speed(of: Draft, text: str, asked: float | None = None, at: int = context) -> Speed:
        tokens = acceptance(of, text, asked, model.name).tokens_per_step
        return predict(model, weighed, box, of, accepted=tokens, kind=text, context=at, users=ask.users,
                       kv_item=KV_ITEM[kv], engine=engine)  # fmt: skip

    compared = tuple(
        Compared(of, speed(of, "mixed"), speed(of, "agent"))
        for of in COMPARED
        if not of.drafting or (of.kind == "mtp" and model.mtp_layers) or (of.kind == "dflash" and model.drafter)
    )
    chosen = speed(draft, kind, question.accept_length)
    rows = nearest(model.name, *device_of(box), key, draft.kind, kind, ask.users)
    return Answer(
        question=question,
        model=model,
        box=box,
        weights_key=key,
        weights=weighed,
        ask=ask,
        budget=planned,
        acceptance=accepted,
        speed=chosen,
        short=speed(draft, kind, question.accept_length, min(SHORT, context)),
        compared=compared,
        first_token={
            n: first_token_s(model, weighed, box, n, engine=engine) for n in prompt_lengths(context)
        },
        prefill=prefill_tokens_per_s(model, box, engine, context),
        evidence=rows,
        compat=findings(box, model, key, draft, engine),
        advice=advise(model, weighed, box, ask, planned, key, question.utilization),
        verdicts=verdicts(model, weighed, box, ask) if planned.fits else (),
    )  # fmt: skip


def prompt_lengths(context: int) -> Sequence[int]:
    return [n for n in (100, 2_000, 8_000, 32_000, 100_000) if n <= context] or [context]


def parse_draft(text: str) -> Draft:
    """none, mtp:K, dflash:K or lookup:K, as --draft of the other commands."""
    kind, _, depth = text.strip().lower().partition(":")
    if kind not in DRAFTERS:
        raise RequestError(f"--draft is {text!r}, expected none, mtp:K, dflash:K or lookup:K.")
    if kind == "none":
        return Draft()
    if not depth.isdecimal() or not 1 <= int(depth) <= 64:
        raise RequestError(f"--draft {text} needs a number of drafts from 1 to 64, as in {kind}:2.")
    return Draft(kind, int(depth))


def default_engine(model: Model, box: Box) -> str:
    if box.architecture.startswith("gfx"):
        return "llama.cpp"
    return "stoker" if box.architecture == "cpu" and model.family != GPT_OSS else "vLLM"


def default_draft(model: Model, engine: str) -> str:
    return "mtp:2" if model.mtp_layers and engine != "llama.cpp" else "none"


@cache
def recipes() -> dict[str, Any]:
    return read("recipes.toml")


def find_recipe(name: str) -> dict[str, Any]:
    if name not in recipes():
        raise RequestError(f"unknown recipe {name!r}; known recipes: {', '.join(recipes())}.")
    return dict(recipes()[name])


def _weights(question: Question, model: Model, engine: str, of_recipe: str | None) -> tuple[str, WeightBytes]:
    asked = question.weights or of_recipe
    if asked is None and model.default_weights == CHECKPOINT:
        return CHECKPOINT, _stored(checkpoint_at(question.model))
    if asked is None and engine == "llama.cpp":
        asked = "mxfp4-gguf" if model.family == GPT_OSS else "ud-q4_k"
    scheme: Scheme = find_scheme(asked or model.default_weights)
    weighed = WeightBytes.of(model, scheme)
    if scheme.parts and not any(weighed.formats.get(g, "bf16") != "bf16" for g in weighed.groups):
        raise RequestError(
            f"{scheme.key} ({scheme.title}) stores nothing of {model.name}: it has no part of that kind, or its shapes "
            f"do not divide into groups. Try --weights {model.default_weights}."
        )
    return scheme.key, weighed


def _stored(directory: Path) -> WeightBytes:
    """From the headers of a checkpoint on this machine, as `stoker inspect` counts them."""
    from stoker.checkpoint.inspect.report import inspect

    report = inspect(directory)
    if not report.groups:
        raise RequestError(f"{directory} holds no safetensors files to weigh; give --weights to plan from its shapes.")
    return replace(report.weights, title=f"the checkpoint in {directory.name}")


def device_of(box: Box) -> tuple[str, int]:
    """Box and number as rows name them."""
    return ("spark", 2) if box.key == "2xspark" else (box.key, 1)


def _speed(s: Speed) -> dict[str, float]:
    return {
        "tokens_per_s": round(s.tokens_per_s, 1),
        "low": round(s.low, 1),
        "high": round(s.high, 1),
        "limit_tokens_per_s": round(s.limit, 1),
        "per_user_tokens_per_s": round(s.per_user, 1),
    }
