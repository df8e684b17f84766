"""From an answer and its times to a record: the per-request formulas of docs/benchmarks.md."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from stoker.bench.answer import Answer, steps
from stoker.bench.quality import problems
from stoker.bench.record import Replayed, Request
from stoker.bench.wire import Exchange

TEXT_KEPT = 400
ACCEPTED = "spec_decode_num_accepted_tokens_total"
DRAFTS = "spec_decode_num_drafts_total"
GENERATED = "generation_tokens_total"
AGREE = 0.02


def to_request(
    answer: Answer,
    exchange: Exchange,
    *,
    server: str,
    workload: str,
    variant: str,
    concurrency: int,
    round: int,
    rate: float | None,
    depth: int | None,
    began: float,
    wanted: int | None,
    wants_json: bool,
    watts: float | None = None,
    replayed: Replayed | None = None,
) -> Request:
    request = Request(
        server=server,
        workload=workload,
        variant=variant,
        concurrency=concurrency,
        round=round,
        rate=rate,
        depth=depth,
        started_s=exchange.sent - began,
        prompt_tokens=answer.usage_number("prompt_tokens"),
        prompt_tokens_wanted=wanted,
        cached_tokens=answer.usage_number("prompt_tokens_details", "cached_tokens"),
        completion_tokens=answer.tokens,
        count_source=answer.source,
        usage_tokens=answer.usage_number("completion_tokens"),
        chunks=len(answer.chunks),
        ttft_s=None,
        decode_s=None,
        total_s=None,
        decode_tokens_per_s=None,
        end_to_end_tokens_per_s=None,
        steps=None,
        steps_source="none",
        steps_per_s=None,
        accepted_per_step=None,
        finish_reason=answer.finish_reason,
        failure=answer.failure,
        quality=[] if answer.failure else problems(answer, wants_json),
        output_sha256=answer.digest if answer.chunks else "",
        text=answer.text[:TEXT_KEPT],
        watts=watts,
        notes=list(answer.notes),
        chunk_s=[chunk.at - exchange.sent for chunk in answer.chunks],
        chunk_tokens=[chunk.tokens for chunk in answer.chunks],
        replayed=replayed,
    )
    return timed(request, answer) if answer.failure is None and answer.chunks else request


def timed(request: Request, answer: Answer) -> Request:
    """Adds times and speeds to the record of a successful request."""
    first, last = request.chunk_s[0], request.chunk_s[-1]
    decode_s = last - first
    # The first chunk may carry several tokens; they all came at `first`, so none of them was decoded after it.
    after_first = sum(request.chunk_tokens[1:])
    made, source = steps(answer)
    generated = sum(request.chunk_tokens)
    return replace(
        request,
        ttft_s=first,
        decode_s=decode_s,
        total_s=last,
        decode_tokens_per_s=after_first / decode_s if decode_s > 0 and after_first > 0 else None,
        end_to_end_tokens_per_s=(request.completion_tokens or 0) / last if last > 0 else None,
        steps=made,
        steps_source=source,
        steps_per_s=_steps_per_s(request, made),
        accepted_per_step=(generated - 1) / made if made else None,
    )


def _steps_per_s(request: Request, made: int | None) -> float | None:
    """A first chunk of several tokens contains a whole step beside prefill's token; that step was over at t_1."""
    seconds = request.chunk_s[-1] - request.chunk_s[0]
    before = 1 if request.chunk_tokens[0] > 1 else 0
    return (made - before) / seconds if made is not None and made > before and seconds > 0 else None


@dataclass(frozen=True)
class CounterGain:
    """What a server's counters gained while requests ran.

    They count everybody's requests, so a difference is believed only if it has as many tokens as came here.
    """

    accepted: float
    drafts: float
    generated: float | None

    def ours(self, tokens: int) -> bool:
        """Whether all of it came from our requests."""
        return self.generated is not None and abs(self.generated - tokens) <= max(2.0, AGREE * tokens)


def counter_gain(before: dict[str, float], after: dict[str, float]) -> CounterGain | None:
    """None if the server has no speculation counters."""
    if ACCEPTED not in after or DRAFTS not in after:
        return None
    gained = {name: after[name] - before.get(name, 0.0) for name in (ACCEPTED, DRAFTS)}
    generated = after[GENERATED] - before.get(GENERATED, 0.0) if GENERATED in after else None
    return CounterGain(gained[ACCEPTED], gained[DRAFTS], generated)


def spread_metric_steps(requests: Sequence[Request], gained: CounterGain | None) -> None:
    """If only the server's counters know of speculation, share the round's steps among its requests by tokens."""
    answered = [r for r in requests if r.failure is None and r.steps is not None]
    if gained is None or not answered or any(r.steps_source.startswith("response") for r in requests):
        return
    tokens = sum(r.completion_tokens or 0 for r in requests)
    after_first = {id(r): sum(r.chunk_tokens) - 1 for r in answered}
    total = sum(after_first.values())
    if total <= 0 or any(r.failure for r in requests) or not gained.ours(tokens):
        return
    per_token = (total - gained.accepted) / total
    for request in answered:
        if after_first[id(request)] > 0 and per_token > 0:
            request.steps = round(after_first[id(request)] * per_token)
            request.steps_source = "metrics"
            request.steps_per_s = _steps_per_s(request, request.steps)
            request.accepted_per_step = 1 / per_token
