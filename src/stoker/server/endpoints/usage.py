"""Token counts and metrics of an answer, in the formats that clients read."""

from collections.abc import Iterable, Sequence
from typing import Any

from stoker.engine.event import Stats


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        found["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return found


def final_usage(stats: Sequence[Stats], reasoning_tokens: int | None = None) -> dict[str, Any]:
    """The usage of a response with one or more choices; the prompt counts once."""
    found = usage(
        stats[0].prompt_tokens if stats else 0,
        sum(each.output_tokens for each in stats),
        stats[0].cached_tokens if stats else 0,
    )
    if reasoning_tokens is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return found


def response_metrics(stats: Sequence[Stats], max_drafts: int) -> dict[str, Any]:
    """Times, and vLLM's `metrics.speculative_decoding`. `max_drafts` is the most that one step may verify."""
    found: dict[str, Any] = {
        "steps": sum(each.steps for each in stats),
        "accepted_per_step": _ratio(
            sum(max(0, each.output_tokens - 1) for each in stats), sum(each.steps for each in stats)
        ),
        "forced_tokens": sum(each.forced for each in stats),
        "queue_s": max((each.queue_s for each in stats), default=0.0),
        "prefill_s": max((each.prefill_s for each in stats), default=0.0),
        "decode_s": max((each.decode_s for each in stats), default=0.0),
    }
    if max_drafts:
        found["speculative_decoding"] = _speculative(stats, max_drafts)
    return found


def _speculative(stats: Iterable[Stats], max_drafts: int) -> dict[str, Any]:
    steps = drafted = accepted = 0
    assumed = None
    histogram: dict[str, int] = {}
    for each in stats:
        drafting = sum(count for depth, count in each.depths.items() if depth)
        assumed = each.assumed_tokens
        reached = [drafting, *each.accepted_at, 0]  # steps that accepted at least 0, 1, 2 ... drafts
        steps, drafted, accepted = steps + drafting, drafted + each.drafted, accepted + each.accepted
        for right in range(len(reached) - 1):
            count = reached[right] - reached[right + 1]
            if count:
                histogram[str(right)] = histogram.get(str(right), 0) + count
    return {
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "num_spec_tokens": max_drafts,
        "acceptance_histogram": histogram,
        "mean_acceptance_length": 1.0 + _ratio(accepted, steps),
        "draft_acceptance_rate": _ratio(accepted, drafted),
        **({} if assumed is None else {"acceptance_assumed": assumed}),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
