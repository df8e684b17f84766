"""Two runs, or two servers of one run, compared by workload: how much they differ, and whether noise explains it."""

from collections.abc import Iterable, Sequence

from stoker.bench.record import Difference, Request
from stoker.bench.stats import change, median, verdict
from stoker.bench.summary import Group, group_of, title

METRICS: dict[str, bool | None] = {  # whether higher is better; None: neither, it explains the others
    "decode_tokens_per_s": True,
    "end_to_end_tokens_per_s": True,
    "ttft_s": False,
    "total_s": False,
    "accepted_per_step": None,
}


def differences(a: Iterable[Request], b: Iterable[Request], paired: bool) -> list[Difference]:
    """For every workload that both measured. Rounds are compared, since requests of one round are not independent."""
    first, second = _groups(a), _groups(b)
    found = []
    for group in first:
        if group not in second:
            continue
        for metric, higher_is_better in METRICS.items():
            before, after = _by_round(first[group], metric), _by_round(second[group], metric)
            both = sorted(before.keys() & after.keys())
            pairs = paired and len(both) == len(before) == len(after)
            mine, theirs = [before[r] for r in sorted(before)], [after[r] for r in sorted(after)]
            if not mine or not theirs or min(mine) <= 0:
                continue
            middle, low, high = change(mine, theirs, pairs)
            runs = min(len(mine), len(theirs))
            name, _, variant, concurrency, rate, depth = group
            found.append(
                Difference(
                    name=name,
                    variant=variant,
                    concurrency=concurrency,
                    depth=depth,
                    rate=rate,
                    metric=metric,
                    a=median(mine) or 0.0,
                    b=median(theirs) or 0.0,
                    change=middle,
                    ci_low=low,
                    ci_high=high,
                    runs_a=len(mine),
                    runs_b=len(theirs),
                    paired=pairs,
                    verdict=verdict(low, high, middle, runs, higher_is_better),
                )
            )
    return found


def statement(found: Sequence[Difference], metric: str = "decode_tokens_per_s") -> str:
    """One sentence: what differs by more than the noise, and what does not."""
    rows = [difference for difference in found if difference.metric == metric]
    if not rows:
        return "The two have no workload in common."
    said = []
    for word, text in (("better", "B is faster on"), ("worse", "B is slower on")):
        names = [f"{title(d)} ({d.change:+.1%})" for d in rows if d.verdict == word]
        if names:
            said.append(f"{text} {', '.join(names)}")
    noise = [d for d in rows if d.verdict == "within the noise"]
    if noise:
        widest = max((d.ci_high - d.ci_low) / 2 for d in noise)
        alike = ", ".join(title(d) for d in noise)
        said.append(f"differences on {alike} are smaller than the noise (up to ±{widest:.1%}) and mean nothing")
    few = [
        f"{title(d)} ({d.change:+.1%} of {min(d.runs_a, d.runs_b)} runs)" for d in rows if d.verdict == "too few runs"
    ]
    if few:
        said.append(f"too few runs to tell on {', '.join(few)}: below 10 % take --runs 5 or more")
    text = "; ".join(said) + "."
    return text[0].upper() + text[1:]


def _groups(requests: Iterable[Request]) -> dict[Group, list[Request]]:
    """By workload, for any server."""
    groups: dict[Group, list[Request]] = {}
    for request in requests:
        name, _, *rest = group_of(request)
        groups.setdefault((name, "", *rest), []).append(request)  # type: ignore[arg-type]
    return groups


def _by_round(requests: Iterable[Request], metric: str) -> dict[int, float]:
    rounds: dict[int, list[float]] = {}
    for request in requests:
        value = getattr(request, metric)
        if request.failure is None and value is not None:
            rounds.setdefault(request.round, []).append(value)
    return {number: median(values) or 0.0 for number, values in rounds.items()}
