"""What a benchmark writes down: one document, every request in it. `docs/bench-schema.json` is generated from here.

Times are seconds; null means not measured.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

VERSION: Literal[1] = 1


class Record(Struct, forbid_unknown_fields=True):
    """Base of everything in the document. Unknown keys are refused."""


class Failure(Record):
    """Why a request failed."""

    kind: Annotated[
        str, Meta(description="http 400, connection, timeout, closed early, error in stream, empty, malformed")
    ]
    status: Annotated[int, Meta(description="HTTP status, 0 where no response came")]
    message: Annotated[str, Meta(description="the server's own words, or the client's reason")]


class Call(Record):
    """A tool call."""

    name: str
    arguments: Annotated[str, Meta(description="JSON with sorted keys, or the text as it came if it is no JSON")]


class Replayed(Record):
    """A turn of a recorded session."""

    session: str
    turn: Annotated[int, Meta(description="from 1")]
    recorded: Annotated[list[Call], Meta(description="what was called then")]
    called: Annotated[list[Call], Meta(description="what the server called now")]


class Request(Record):
    """One request. Speeds are null for failed requests and for answers too short to have one."""

    server: Annotated[str, Meta(description="A, or B with --against")]
    workload: str
    variant: Annotated[
        str,
        Meta(description="cold: fresh salt in front; warm: prefix asked before; load: loading it; own: user's prompts"),
    ]
    concurrency: int
    round: Annotated[int, Meta(description="measured round, from 1; 0 is the warm-up, which no figure uses")]
    rate: Annotated[float | None, Meta(description="requests per second offered, where arrivals were timed")]
    depth: Annotated[int | None, Meta(description="tokens of context before the prompt, where that is varied")]
    started_s: Annotated[float, Meta(description="since the suite began")]
    prompt_tokens: Annotated[int | None, Meta(description="by the server's usage")]
    prompt_tokens_wanted: Annotated[int | None, Meta(description="what the prompt was fitted to")]
    cached_tokens: Annotated[int | None, Meta(description="by the server's usage")]
    completion_tokens: int | None
    count_source: Annotated[str, Meta(description="token_ids, usage, tokenize, chunks (estimate), none")]
    usage_tokens: Annotated[int | None, Meta(description="what usage claimed, kept for comparison")]
    chunks: Annotated[int, Meta(description="SSE events that carried tokens")]
    ttft_s: Annotated[float | None, Meta(description="request written to first content, reasoning or tool-call token")]
    decode_s: Annotated[float | None, Meta(description="first token to last")]
    total_s: Annotated[float | None, Meta(description="request written to last token")]
    decode_tokens_per_s: float | None
    end_to_end_tokens_per_s: float | None
    steps: Annotated[int | None, Meta(description="forward passes after the first token")]
    steps_source: Annotated[str, Meta(description="response, metrics, chunks (estimate), none; or acceptance assumed")]
    steps_per_s: float | None
    accepted_per_step: Annotated[float | None, Meta(description="tokens emitted per step, drafts and the model's own")]
    finish_reason: str
    failure: Failure | None
    quality: Annotated[list[str], Meta(description="what is wrong with the answer: looping, no JSON, ...")]
    output_sha256: Annotated[str, Meta(description="of the token ids, else of the text")]
    text: Annotated[str, Meta(description="the answer's beginning")]
    watts: Annotated[float | None, Meta(description="mean board power of this machine's GPUs during the round")]
    notes: Annotated[list[str], Meta(description="what was doubtful about the counts")]
    chunk_s: Annotated[
        list[float], Meta(description="arrival of each token-carrying event, since the request was written")
    ]
    chunk_tokens: Annotated[list[int], Meta(description="tokens in each; spread by length where only the sum is known")]
    replayed: Annotated[Replayed | None, Meta(description="of a recorded session (--replay)")] = None


class Percentiles(Record):
    p50: float
    p95: float
    p99: float


class Spread(Record):
    """The range of the values behind a median."""

    low: float
    high: float
    ci_low: Annotated[float, Meta(description="95 % bootstrap confidence interval of the median")]
    ci_high: float


class Workload(Record):
    """All measured requests of one workload, variant, concurrency, rate and depth on one server."""

    name: str
    server: str
    variant: str
    concurrency: int
    rate: float | None
    depth: int | None
    completed: int
    failed: int
    failures: Annotated[dict[str, int], Meta(description="by kind")]
    prompt_tokens: Annotated[float | None, Meta(description="medians")]
    completion_tokens: float | None
    decode_tokens_per_s: Annotated[float | None, Meta(description="median over requests")]
    decode_spread: Spread | None
    end_to_end_tokens_per_s: Annotated[float | None, Meta(description="median over requests")]
    end_to_end_spread: Spread | None
    aggregate_tokens_per_s: Annotated[float | None, Meta(description="all streams together")]
    requests_per_s: float | None
    steps_per_s: float | None
    steps_source: str
    accepted_per_step: float | None
    accepted_spread: Spread | None
    ttft_s: Percentiles | None
    ttft_spread: Spread | None
    itl_s: Annotated[Percentiles | None, Meta(description="per token, not per chunk")]
    turn_s: Annotated[Percentiles | None, Meta(description="request written to last token")]
    prefill_tokens_per_s: Annotated[float | None, Meta(description="uncached prompt tokens over time to first token")]
    prefix_hit_rate: Annotated[float | None, Meta(description="cached prompt tokens over prompt tokens")]
    count_source: str
    quality_ok: bool
    quality: Annotated[dict[str, int], Meta(description="problem: answers that have it")]
    watts: float | None
    joules_per_token: float | None
    notes: list[str]


class Turn(Record):
    """How long an agent's user waits at a given length of history."""

    server: str
    history_tokens: int
    seconds: Annotated[Percentiles, Meta(description="TTFT and decode together")]
    ttft_s: float
    decode_s: float
    turns: int
    load_s: Annotated[float | None, Meta(description="the turn that brought the history to this length")]


class Agreement(Record):
    """How often the calls of replayed turns agree."""

    between: Annotated[str, Meta(description="A and B; A and the recording; A and itself, a round later")]
    turns: int
    sessions: int
    same_decision: Annotated[float, Meta(description="share of turns on which both call a tool, or neither does")]
    same_tools: Annotated[float, Meta(description="share on which both call the same tools, or none")]
    same_calls: Annotated[float, Meta(description="share on which the arguments are the same, too")]
    low: Annotated[float | None, Meta(description="95 % interval of same_calls, sessions resampled")]
    high: float | None


class Headline(Record):
    text: str
    completed: int
    failed: int
    failures: dict[str, int]
    general_decode_tokens_per_s: Annotated[
        float | None, Meta(description="median over single-stream workloads that are no agent turns")
    ]
    agent_decode_tokens_per_s: float | None
    accepted_per_step: float | None
    ttft_s: Annotated[float | None, Meta(description="median over single-stream workloads")]
    noise: Annotated[
        float | None, Meta(description="typical half-width of a confidence interval, as a share of its median")
    ]


class ServerFacts(Record):
    name: Annotated[str, Meta(description="A or B")]
    url: str
    model: str
    engine: Annotated[str, Meta(description="as the server names itself")]
    context: int | None
    tokenizer: Annotated[str, Meta(description="how prompts were fitted")]
    speculation: Annotated[str, Meta(description="where steps and acceptance came from")]


class Client(Record):
    """The cost of measuring itself."""

    cpu_share: Annotated[float | None, Meta(description="of one core, while requests ran")]
    lag_p50_s: Annotated[
        float | None, Meta(description="how late bytes were stamped that a thread of the client sent to it")
    ]
    lag_p99_s: float | None
    overhead: Annotated[float | None, Meta(description="median lag over the median time between a stream's chunks")]


class Environment(Record):
    stoker: str
    python: str
    platform: str
    processor: str
    cpus: int
    memory_bytes: int | None
    gpus: list[str]
    started: Annotated[str, Meta(description="UTC, ISO 8601")]
    duration_s: float
    command: str
    servers: list[ServerFacts]
    client: Client


class Difference(Record):
    """B against A on one workload."""

    name: str
    variant: str
    concurrency: int
    depth: int | None
    rate: float | None
    metric: str
    a: float
    b: float
    change: Annotated[float, Meta(description="b / a - 1")]
    ci_low: Annotated[float, Meta(description="95 % interval of the change")]
    ci_high: float
    runs_a: int
    runs_b: int
    paired: Annotated[bool, Meta(description="rounds were interleaved and compared pairwise")]
    verdict: Annotated[str, Meta(description="better, worse, different (neither), within the noise, too few runs")]


class Document(Record):
    version: Literal[1]
    suite: str
    complete: Annotated[bool, Meta(description="false: interrupted; the same command goes on")]
    headline: Headline
    workloads: list[Workload]
    turns: list[Turn]
    differences: list[Difference]
    environment: Environment
    warnings: list[str]
    requests: list[Request]
    agreement: Annotated[list[Agreement], Meta(description="of replayed sessions")] = []
