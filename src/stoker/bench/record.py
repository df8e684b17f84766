"""What a benchmark writes down: one document, every request in it. `docs/bench-schema.json` is generated from here.

Field comments are the descriptions in the schema. Times are seconds; null means not measured.
"""

from dataclasses import dataclass, field

VERSION = 1


@dataclass
class Failure:
    """Why a request has no answer that counts."""

    kind: str  # http 400, connection, timeout, closed early, error in stream, empty, malformed
    status: int  # HTTP status, 0 where no response came
    message: str  # the server's own words, or the client's reason


@dataclass
class Request:
    """One request. Speeds are null for failed requests and for answers too short to have one."""

    server: str  # A, or B with --against
    workload: str
    variant: str  # cold: fresh salt in front; warm: prefix asked before; load: loading it; own: the user's prompts
    concurrency: int
    round: int  # measured round, from 1; 0 is the warm-up, which no figure uses
    rate: float | None  # requests per second offered, where arrivals were timed
    depth: int | None  # tokens of context before the prompt, where that is varied
    started_s: float  # since the suite began
    prompt_tokens: int | None  # by the server's usage
    prompt_tokens_wanted: int | None  # what the prompt was fitted to
    cached_tokens: int | None  # by the server's usage
    completion_tokens: int | None
    count_source: str  # token_ids, usage, tokenize, chunks (estimate), none
    usage_tokens: int | None  # what usage claimed, kept for comparison
    chunks: int  # SSE events that carried tokens
    ttft_s: float | None  # request written to first content, reasoning or tool-call token
    decode_s: float | None  # first token to last
    total_s: float | None  # request written to last token
    decode_tokens_per_s: float | None
    end_to_end_tokens_per_s: float | None
    steps: int | None  # forward passes after the first token
    steps_source: str  # response, metrics, chunks (estimate), none
    steps_per_s: float | None
    accepted_per_step: float | None  # tokens emitted per step, drafts and the model's own
    finish_reason: str
    failure: Failure | None
    quality: list[str]  # what is wrong with the answer: looping, no JSON, ...
    output_sha256: str  # of the token ids, else of the text
    text: str  # the answer's beginning
    watts: float | None  # mean board power of this machine's GPUs during the round
    notes: list[str]  # what was doubtful about the counts
    chunk_s: list[float]  # arrival of each token-carrying event, since the request was written
    chunk_tokens: list[int]  # tokens in each; spread by length where only the sum is known


@dataclass
class Percentiles:
    p50: float
    p95: float
    p99: float


@dataclass
class Spread:
    """Of the measured values of a median."""

    low: float
    high: float
    ci_low: float  # 95 % bootstrap confidence interval of the median
    ci_high: float


@dataclass
class Workload:
    """All measured requests of one workload, variant, concurrency, rate and depth on one server."""

    name: str
    server: str
    variant: str
    concurrency: int
    rate: float | None
    depth: int | None
    completed: int
    failed: int
    failures: dict[str, int]  # by kind
    prompt_tokens: float | None  # medians
    completion_tokens: float | None
    decode_tokens_per_s: float | None  # median over requests
    decode_spread: Spread | None
    end_to_end_tokens_per_s: float | None  # median over requests
    end_to_end_spread: Spread | None
    aggregate_tokens_per_s: float | None  # all streams together
    requests_per_s: float | None
    steps_per_s: float | None
    steps_source: str
    accepted_per_step: float | None
    accepted_spread: Spread | None
    ttft_s: Percentiles | None
    ttft_spread: Spread | None
    itl_s: Percentiles | None  # per token, not per chunk
    turn_s: Percentiles | None  # request written to last token
    prefill_tokens_per_s: float | None  # uncached prompt tokens over time to first token
    prefix_hit_rate: float | None  # cached prompt tokens over prompt tokens
    count_source: str
    quality_ok: bool
    quality: dict[str, int]  # problem: answers that have it
    watts: float | None
    joules_per_token: float | None
    notes: list[str]


@dataclass
class Turn:
    """What an agent's user waits for at a given length of history."""

    server: str
    history_tokens: int
    seconds: Percentiles  # TTFT and decode together
    ttft_s: float
    decode_s: float
    turns: int
    load_s: float | None  # the turn that brought the history to this length


@dataclass
class Headline:
    text: str
    completed: int
    failed: int
    failures: dict[str, int]
    general_decode_tokens_per_s: float | None  # median over single-stream workloads that are no agent turns
    agent_decode_tokens_per_s: float | None
    accepted_per_step: float | None
    ttft_s: float | None  # median over single-stream workloads
    noise: float | None  # typical half-width of a confidence interval, as a share of its median


@dataclass
class ServerFacts:
    name: str  # A or B
    url: str
    model: str
    engine: str  # as the server names itself
    context: int | None
    tokenizer: str  # how prompts were fitted
    speculation: str  # where steps and acceptance came from


@dataclass
class Client:
    """What measuring itself cost."""

    cpu_share: float | None  # of one core, while requests ran
    lag_p50_s: float | None  # how late bytes were stamped that a thread of the client sent to it
    lag_p99_s: float | None
    overhead: float | None  # median lag over the median time between a stream's chunks


@dataclass
class Environment:
    stoker: str
    python: str
    platform: str
    processor: str
    cpus: int
    memory_bytes: int | None
    gpus: list[str]
    started: str  # UTC, ISO 8601
    duration_s: float
    command: str
    servers: list[ServerFacts]
    client: Client


@dataclass
class Difference:
    """B against A on one workload."""

    name: str
    variant: str
    concurrency: int
    depth: int | None
    rate: float | None
    metric: str
    a: float
    b: float
    change: float  # b / a - 1
    ci_low: float  # 95 % interval of the change
    ci_high: float
    runs_a: int
    runs_b: int
    paired: bool  # rounds were interleaved and compared pairwise
    verdict: str  # better, worse, different (neither), within the noise, too few runs


@dataclass
class Document:
    version: int
    suite: str
    complete: bool  # false: interrupted; the same command goes on
    headline: Headline
    workloads: list[Workload]
    turns: list[Turn]
    differences: list[Difference]
    environment: Environment
    warnings: list[str]
    requests: list[Request] = field(default_factory=list)
