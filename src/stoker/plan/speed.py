"""Tokens per second from bytes: what a step reads over what the box delivers, plus what is not reading.

    step = verify bytes / (bandwidth * efficiency) + layers * overhead
         + draft bytes / (bandwidth * efficiency) + passes * pass overhead
         + arithmetic of every verified token after the first
    tokens/s = tokens accepted per step * users / step

The numbers in `Fit` are fitted to published measurements (fit.py); everything else is counted. A prediction never
exceeds the physical limit: the same bytes at the bandwidth on paper and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import exp, log, sqrt

from stoker.plan.catalog import Box, read
from stoker.plan.evidence import MIXED, PROSE
from stoker.plan.models import Model
from stoker.sizes.step import DFLASH, Draft, StepReads, step_reads
from stoker.sizes.weights import GGUF, WeightBytes
from stoker.weights.model_config import FULL
from stoker.weights.names import DENSE, HEAD, ROUTED

BEST_EFFICIENCY = 0.97  # of the bandwidth on paper; nothing measured exceeds it
BY_LAYERS = ("llama.cpp", "ollama")  # several cards take turns, each with its layers; others read at the same time
UNSEEN_BOX = 0.3  # added to the log error of boxes without a fitted row
PREFILL_CHUNK = 8192  # tokens of a prompt that engines compute at a time
SERVER_S = 0.1  # of a first token that is neither reading nor arithmetic: tokenizing, scheduling, sampling (assumed)
ENGINES = ("stoker", "vLLM", "SGLang", "llama.cpp", "ollama", "TensorRT-LLM")
# No published run of Stoker's engine exists: its steps are assumed to cost what vLLM's do.
AS = {"stoker": "vLLM", "TensorRT-LLM": "vLLM", "TensorFold": "vLLM", "Atlas": "vLLM", "lucebox": "llama.cpp"}


@dataclass(frozen=True)
class Fit:
    """Logarithms, by what they depend on; a name that was never measured has the value of `prior`."""

    values: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]]  # engine -> log error that 10 % and 90 % of held-out rows stay below
    deviations: Mapping[str, float] = field(default_factory=dict)  # of the values: how well the rows determine them

    def deviation(self, *names: str) -> float:
        """Standard deviation of a sum of logarithms, and so the relative one of their product."""
        return sqrt(sum(self.deviations.get(name, prior(name)[1]) ** 2 for name in names))

    def get(self, name: str) -> float:
        return self.values[name] if name in self.values else prior(name)[0]

    def efficiency(self, box: Box, engine: str, fine: bool) -> float:
        """`fine`: k-quants of fewer than eight bits, whose unpacking llama.cpp pays for."""
        given = log(box.achievable_gb_s / box.bandwidth_gb_s) + self.get(box_name(box))
        return min(exp(given + self.get(f"format:{engine}:{'fine' if fine else 'plain'}")), BEST_EFFICIENCY)

    def layer_seconds(self, box: Box, engine: str, backend: str = "") -> float:
        given = self.get(f"layer:{engine}") + (0.0 if box.unified else self.get("layer:card"))
        return 1e-3 * exp(given + (self.get("layer:rocm") if backend == "rocm" else 0.0))

    def pass_seconds(self, box: Box, engine: str) -> float:
        return 1e-3 * exp(self.get(f"pass:{engine}") + (0.0 if box.unified else self.get("layer:card")))

    def link_seconds(self) -> float:
        return 1e-3 * exp(self.get("link"))

    def arithmetic(self, engine: str) -> float:
        """Share of the box's peak that a few tokens at a time reach."""
        return min(exp(self.get(f"tokens:{engine}")), 1.0)

    def prefill(self, engine: str, sparse: bool) -> float:
        return min(exp(self.get(f"prefill:{engine}:{'sparse' if sparse else 'dense'}")), 1.0)

    def pool(self, model: Model, kind: str, drafter: str = "none") -> float:
        """Experts per layer that tokens of a text choose among; a block of guesses may keep to fewer than the text."""
        given = self.get("pool") + (self.get(f"pool:{kind}") if kind != MIXED else 0.0)
        if drafter == DFLASH:
            given += self.get("pool:dflash") + (self.get("pool:dflash:prose") if kind == PROSE else 0.0)
        return max(exp(min(given, 0.0)) * model.experts, min(2.0 * model.top_k, model.experts))


def box_name(box: Box) -> str:
    """Several boxes read as each of them does."""
    return f"box:{box.of_rows[0]}"


# Mean and standard deviation of a logarithm before any measurement.
PRIORS = {
    "box": (0.0, 0.06),  # achievable bandwidth as stated in boxes.toml
    "format:llama.cpp:fine": (log(0.85), 0.2),
    "format": (0.0, 0.06),
    "layer:card": (log(0.6), 0.3),  # hosts with a card launch faster than unified boxes
    "layer:rocm": (log(1.3), 0.3),
    "layer": (log(0.12), 0.5),  # milliseconds of every layer that are no reading
    "pass": (log(1.0), 1.0),  # milliseconds of a draft pass beside its layer
    "link": (log(0.2), 0.5),  # milliseconds a layer waits for the other box
    "tokens": (log(0.15), 0.8),
    "prefill": (log(0.2), 0.6),
    "pool": (log(0.4), 0.5),
}


def prior(name: str) -> tuple[float, float]:
    """What a logarithm is for comes before the colon."""
    parts = name.split(":")
    for length in (3, 2, 1):
        if (key := ":".join(parts[:length])) in PRIORS:
            return (0.0, 0.4) if key == "pool" and len(parts) > 1 else PRIORS[key]
    raise KeyError(name)


@cache
def fitted() -> Fit:
    raw = read("fit.toml")
    spread = {engine: (low, high) for engine, (low, high) in raw["spread"].items()}
    return Fit(raw["values"], spread, raw["deviations"])


def spread_of(engine: str, fit: Fit | None = None) -> tuple[float, float]:
    """Log errors (predicted over published) that one row in ten is below, and above, without correction."""
    spread = (fit or fitted()).spread
    return spread.get(engine, spread["all"])


def unseen(box: Box, fit: Fit | None = None) -> float:
    """Added on both sides to the log error where nobody's rows of such a box were fitted."""
    return 0.0 if box_name(box) in (fit or fitted()).values else UNSEEN_BOX


@dataclass(frozen=True)
class Speed:
    """One predicted speed and every term it was made of."""

    workload: str
    accepted: float  # tokens emitted per step and sequence
    users: int
    step_s: float
    limit_step_s: float
    reads: StepReads
    efficiency: float
    terms: Mapping[str, float]  # name -> seconds
    low_factor: float
    high_factor: float
    factor: float = 1.0  # correction by measured rows (correction.py)
    prompts_s: float = 0.0  # of all users' prompts, computed between the steps of an answer
    answer: int = 0  # tokens, where prompts count

    @property
    def uncorrected(self) -> float:
        """All users together, as the arithmetic has it."""
        if self.answer:
            return self.users * self.answer / (self.prompts_s + self.answer * self.step_s / self.accepted)
        return self.users * self.accepted / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """All users together."""
        return min(self.uncorrected * self.factor, self.limit)

    @property
    def per_user(self) -> float:
        return self.tokens_per_s / self.users

    @property
    def limit(self) -> float:
        return self.users * self.accepted / self.limit_step_s

    @property
    def low(self) -> float:
        return min(self.uncorrected * self.low_factor, self.tokens_per_s)

    @property
    def high(self) -> float:
        return min(self.uncorrected * self.high_factor, self.limit)


def predict(
    model: Model,
    weights: WeightBytes,
    box: Box,
    draft: Draft,
    *,
    accepted: float = 1.0,
    kind: str = MIXED,
    context: int = 512,
    users: int = 1,
    kv_item: float = 2.0,
    engine: str = "vLLM",
    backend: str = "",
    fit: Fit | None = None,
) -> Speed:
    fit = fit or fitted()
    engine_as = AS.get(engine, engine)
    reads = step_reads(
        model, weights, draft, context=context, users=users, pool=fit.pool(model, kind, draft.kind), kv_item=kv_item
    )
    split_by_layers = engine_as in BY_LAYERS
    bandwidth = box.bandwidth_gb_s * 1e9 * (1 if split_by_layers else box.devices)
    efficiency = fit.efficiency(box, engine_as, _fine(weights))
    layer_s = fit.layer_seconds(box, engine_as, backend)
    tokens = users * draft.verified
    terms = {
        "reading weights, states and KV": reads.verify / (bandwidth * efficiency),
        "launches and host, all layers": model.layers * layer_s,
        "reading for drafts": reads.draft / (bandwidth * efficiency),
        "draft passes": reads.passes * fit.pass_seconds(box, engine_as),
        "arithmetic of more tokens": (tokens - 1) * token_seconds(model, box, fit.arithmetic(engine_as)),
        "waiting for the other device": model.layers * fit.link_seconds()
        if box.devices > 1 and not split_by_layers
        else 0.0,
    }
    low, high = spread_of(engine_as, fit)
    beside = unseen(box, fit)
    low, high = low - beside, high + beside
    return Speed(
        workload=kind,
        accepted=accepted,
        users=users,
        step_s=sum(terms.values()),
        limit_step_s=reads.total / bandwidth,
        reads=reads,
        efficiency=efficiency,
        terms={name: seconds for name, seconds in terms.items() if seconds},
        low_factor=exp(-high),
        high_factor=exp(-low),
    )


def prefill_tokens_per_s(model: Model, box: Box, engine: str, prompt: int = 2048, fit: Fit | None = None) -> float:
    """Arithmetic decides long prompts: the weights of a token, and attention to half the prompt on average."""
    fit = fit or fitted()
    share = fit.prefill(AS.get(engine, engine), bool(model.experts))
    return box.tflops_bf16 * 1e12 * box.devices * share / prompt_flops(model, prompt / 2)


def first_token_s(
    model: Model,
    weights: WeightBytes,
    box: Box,
    prompt: int,
    *,
    cached: int = 0,
    engine: str = "vLLM",
    fit: Fit | None = None,
) -> float:
    """Of a prompt of which `cached` tokens need no computing. Short prompts are bound by reading the experts they
    touch, once per chunk, long ones by arithmetic."""
    new = max(1, prompt - cached)
    return SERVER_S + prompt_seconds(model, weights, box, new, seen=(prompt + cached) / 2, engine=engine, fit=fit)


def prompt_seconds(
    model: Model, weights: WeightBytes, box: Box, new: int, *, seen: float, engine: str = "vLLM", fit: Fit | None = None
) -> float:
    """What the box computes for `new` tokens of one or more prompts that attend to `seen` others on average."""
    fit = fit or fitted()
    chunks = -(-new // PREFILL_CHUNK)
    block = Draft("lookup", min(new, PREFILL_CHUNK) - 1)
    reads = step_reads(model, weights, block, context=int(2 * seen), users=1, pool=float(model.experts), kv_item=2.0)
    bandwidth = box.bandwidth_gb_s * 1e9 * box.devices * fit.efficiency(box, AS.get(engine, engine), _fine(weights))
    reading = reads.verify / bandwidth + model.layers * fit.layer_seconds(box, AS.get(engine, engine))
    share = fit.prefill(AS.get(engine, engine), bool(model.experts))
    arithmetic = new * prompt_flops(model, seen) / (box.tflops_bf16 * 1e12 * box.devices * share)
    return max(chunks * reading, arithmetic)


def with_prompts(decode: Speed, prompts_s: float, answer: int) -> Speed:
    """Where every user gets answers of so many tokens one after the other, and the engine computes the prompts of all
    of them, `prompts_s`, between the steps."""
    return replace(decode, prompts_s=prompts_s, answer=answer)


def prompt_flops(model: Model, seen: float) -> float:
    """Of one prompt token that attends to `seen` others; no head, and the embedding is looked up."""
    head = sum(w.parameters for w in model.weights if w.group == HEAD)
    attention = 4.0 * seen * model.num_heads * model.head_dim * model.layers_of(FULL)
    return 2.0 * (model.active_parameters - model.looked_up_parameters - head) + attention


def token_seconds(model: Model, box: Box, share: float) -> float:
    """Arithmetic of one more token in a step."""
    return 2.0 * (model.active_parameters - model.looked_up_parameters) / (box.tflops_bf16 * 1e12 * box.devices * share)


def _fine(weights: WeightBytes) -> bool:
    name = weights.formats.get(ROUTED) or weights.formats.get(DENSE, "")
    return name.startswith(GGUF) and float(name.removeprefix(GGUF)) < 8.0
