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
from stoker.plan.catalog import Box, find_box, find_model, find_scheme, is_gguf, read
from stoker.plan.commands import Command, commands
from stoker.plan.compat import Finding, findings
from stoker.plan.correction import Correction
from stoker.plan.drafters import Choice, choose
from stoker.plan.evidence import Row
from stoker.plan.forecast import Forecaster
from stoker.plan.memory import Ask, Budget, budget, check, find_engine
from stoker.plan.models import GPT_OSS, Model
from stoker.plan.speed import Speed, first_token_s, prefill_tokens_per_s
from stoker.sizes.step import Draft
from stoker.sizes.weights import Scheme, WeightBytes

CHECKPOINT = "checkpoint"
LLAMA = "llama.cpp"
SHORT = 512  # tokens
ENGINE_NAMES = {"stoker": "stoker", "vllm": "vLLM"}  # as recipes call engines, and as rows do
DRAFTERS = ("none", "mtp", "dflash", "lookup")


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
    fresh: int | None = None  # tokens of several users' prompts that are not cached; None: a turn's worth


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
    correction: Correction  # what measured rows made of it
    choice: Choice  # of the drafter, and why
    short: Speed  # the same with next to no context, as most published numbers are
    cold: Speed | None  # of several users, if nothing of their prompts were cached
    compared: tuple[Compared, ...]
    first_token: dict[int, float]  # prompt tokens -> seconds, nothing cached
    prefill: float
    evidence: tuple[Row, ...]
    compat: tuple[Finding, ...]
    advice: tuple[Advice, ...]
    verdicts: tuple[Verdict, ...]
    commands: tuple[Command, ...]

    @property
    def fits(self) -> bool:
        return self.budget.fits

    @property
    def concurrent(self) -> int:
        """Requests of the asked length that the plan holds at a time: vLLM's own count, where it is vLLM."""
        pool = self.budget.pool
        return self.budget.max_users if pool is None else min(int(pool.concurrency), self.budget.max_users)

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
                "concurrent_requests": self.concurrent,
                "vllm_pool": None if pool is None else {
                    "blocks": pool.blocks, "block_tokens": pool.block_tokens, "bytes": pool.bytes,
                    "tokens": pool.tokens, "max_concurrency": round(pool.concurrency, 2),
                    "tokens_by_bytes_alone": pool.tokens_by_bytes,
                    "max_concurrency_by_bytes_alone": round(pool.concurrency_by_bytes, 2),
                },
                "vllm_flags": list(b.flags),
            },
            "speed": {
                "what": "predicted speed of all users together, their prompts included, at the context asked for",
                "workload": self.question.workload,
                **_speed(s),
                "uncorrected_tokens_per_s": round(s.uncorrected, 1),
                "corrected_towards": [row.id for row in self.correction.towards],
                "at_short_context": _speed(self.short),
                "all_prompts_cold": None if self.cold is None else _speed(self.cold),
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
            "drafter": {"draft": str(self.choice.draft), "because": self.choice.because},
            "commands": [{"line": c.line, "what": c.what} for c in self.commands],
            "evidence": [row.to_json() for row in self.evidence],
            "compat": [finding.to_json() for finding in self.compat],
            "advice": [{"text": a.text, "because": a.because} for a in self.advice],
            "verdicts": [{"use": v.use, "grade": v.grade, "because": v.because} for v in self.verdicts],
        }  # fmt: skip


def answer(question: Question, box: Box | None = None) -> Answer:
    """`box` is the one that the question names, where its free memory is known to differ."""
    box, model = box or find_box(question.box), find_model(question.model)
    recipe = find_recipe(question.recipe) if question.recipe else {}
    of_format = LLAMA if question.weights and is_gguf(find_scheme(question.weights)) else None
    engine = find_engine(question.engine or recipe.get("engine") or of_format or default_engine(model, box)).key
    key, weighed = _weights(question, model, box, engine, recipe.get("weights"))
    context = question.context or min(32_768, model.max_positions)
    kv = question.kv or recipe.get("kv") or "bf16"
    kind = workload_kind(question.workload)
    cast = Forecaster(model, weighed, key, box, engine, kv)
    named = question.draft or recipe.get("draft")
    asked = parse_draft(named) if named else None
    check(model, Ask(context, question.users, asked or Draft(), kv, engine))
    choice, compared = choose(cast, asked, kind, context, question.users, question.fresh)
    draft = choice.draft
    ask = Ask(context, question.users, draft, kv, engine, question.prefix_cache_gib)
    planned = budget(model, weighed, box, ask, question.utilization)
    accepted = acceptance(draft, kind, question.accept_length, model.name)

    def told(at: int, fresh: int | None) -> tuple[Speed, Correction]:
        return cast.told(draft, kind, context=at, users=ask.users, accepted=accepted, fresh=fresh)

    speed, correction = told(context, question.fresh)
    return Answer(
        question=question,
        model=model,
        box=box,
        weights_key=key,
        weights=weighed,
        ask=ask,
        budget=planned,
        acceptance=accepted,
        speed=speed,
        correction=correction,
        choice=choice,
        short=told(min(SHORT, context), question.fresh)[0],
        cold=told(context, context)[0] if ask.users > 1 else None,
        compared=tuple(Compared(*each) for each in compared),
        first_token={
            n: first_token_s(model, weighed, box, n, engine=engine) for n in prompt_lengths(context)
        },
        prefill=prefill_tokens_per_s(model, box, engine, context),
        evidence=cast.nearest(draft, kind, context, ask.users),
        compat=findings(box, model, key, draft, engine),
        advice=advise(cast, ask, planned, question.utilization),
        verdicts=verdicts(model, weighed, box, ask) if planned.fits else (),
        commands=commands(model, key, box, ask, planned),
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
    if box.architecture.startswith(("gfx", "metal")):
        return LLAMA
    return "stoker" if box.architecture == "cpu" and model.family != GPT_OSS else "vLLM"


@cache
def recipes() -> dict[str, Any]:
    return read("recipes.toml")


def find_recipe(name: str) -> dict[str, Any]:
    if name not in recipes():
        raise RequestError(f"unknown recipe {name!r}; known recipes: {', '.join(recipes())}.")
    return dict(recipes()[name])


def _weights(question: Question, model: Model, box: Box, engine: str, of_recipe: str | None) -> tuple[str, WeightBytes]:
    asked = question.weights or of_recipe
    if asked is None and model.default_weights == CHECKPOINT:
        return CHECKPOINT, _stored(checkpoint_at(question.model))
    if asked is None and engine == LLAMA:
        asked = "mxfp4-gguf" if model.family == GPT_OSS else "ud-q4_k"
    if asked is None and model.family == GPT_OSS and box.architecture == "sm_121":
        asked = "mxfp4-all"  # what everybody who measures this model on a Spark serves
    scheme: Scheme = find_scheme(asked or model.default_weights)
    if scheme.key == "mxfp4" and engine == LLAMA:  # what llama.cpp's files of that name are
        scheme = find_scheme("mxfp4-gguf")
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


def _speed(s: Speed) -> dict[str, float]:
    return {
        "tokens_per_s": round(s.tokens_per_s, 1),
        "low": round(s.low, 1),
        "high": round(s.high, 1),
        "limit_tokens_per_s": round(s.limit, 1),
        "per_user_tokens_per_s": round(s.per_user, 1),
    }
