"""From requests to rows and turns: the per-workload formulas of docs/benchmarks.md."""

from collections import Counter
from collections.abc import Iterable, Sequence

from stoker.bench import agent
from stoker.bench.record import Difference, Request, Turn, Workload
from stoker.bench.stats import median, percentiles, spread

Group = tuple[str, str, str, int, float | None, int | None]


def group_of(request: Request) -> Group:
    return (
        request.workload,
        request.server,
        request.variant,
        request.concurrency,
        request.rate,
        # an agent's lengths of history are one row here; `turns` keeps them apart
        None if request.workload == agent.NAME else request.depth,
    )


def title(row: Workload | Difference) -> str:
    """The name of a row in tables, charts and sentences."""
    extra = [f"@ d{row.depth}"] if row.depth else []
    extra += [row.variant] if row.variant not in ("cold", "own") else []
    extra += [f"{row.rate:g}/s"] if row.rate is not None else []
    extra += [f"c={row.concurrency}"] if row.concurrency > 1 else []
    return " ".join([row.name, *extra])


def named(row: Workload, two_servers: bool) -> str:
    return f"{row.server}: {title(row)}" if two_servers else title(row)


def by_group(requests: Iterable[Request]) -> dict[Group, list[Request]]:
    groups: dict[Group, list[Request]] = {}
    for request in requests:
        groups.setdefault(group_of(request), []).append(request)
    return groups


def by_round(requests: Iterable[Request]) -> list[list[Request]]:
    rounds: dict[int, list[Request]] = {}
    for request in requests:
        rounds.setdefault(request.round, []).append(request)
    return list(rounds.values())


def rows(requests: Sequence[Request]) -> list[Workload]:
    return [row(group, members) for group, members in by_group(requests).items()]


def row(group: Group, requests: Sequence[Request]) -> Workload:
    name, server, variant, concurrency, rate, depth = group
    good = [request for request in requests if request.failure is None]
    decode = known(request.decode_tokens_per_s for request in good)
    end_to_end = known(request.end_to_end_tokens_per_s for request in good)
    accepted = known(request.accepted_per_step for request in good)
    ttft = known(request.ttft_s for request in good)
    bad_answers = Counter(problem for request in good for problem in request.quality)
    spans = [_span(members) for members in by_round(good)]
    aggregate = median([tokens / seconds for tokens, seconds, _ in spans if seconds > 0])
    watts = median(known(request.watts for request in good))
    return Workload(
        name=name,
        server=server,
        variant=variant,
        concurrency=concurrency,
        rate=rate,
        depth=depth,
        completed=len(good),
        failed=len(requests) - len(good),
        failures=dict(Counter(request.failure.kind for request in requests if request.failure is not None)),
        prompt_tokens=median(known(request.prompt_tokens for request in good)),
        completion_tokens=median(known(request.completion_tokens for request in good)),
        decode_tokens_per_s=median(decode),
        decode_spread=spread(decode),
        end_to_end_tokens_per_s=median(end_to_end),
        end_to_end_spread=spread(end_to_end),
        aggregate_tokens_per_s=aggregate,
        requests_per_s=median([count / seconds for _, seconds, count in spans if seconds > 0]),
        steps_per_s=median(known(request.steps_per_s for request in good)),
        steps_source=_sources(request.steps_source for request in good),
        accepted_per_step=median(accepted),
        accepted_spread=spread(accepted),
        ttft_s=percentiles(ttft),
        ttft_spread=spread(ttft),
        itl_s=percentiles(*token_gaps(good)),
        turn_s=percentiles(known(request.total_s for request in good)),
        prefill_tokens_per_s=median(_prefill(good)) if concurrency == 1 and rate is None else None,
        prefix_hit_rate=_hit_rate(good),
        count_source=_sources(request.count_source for request in good),
        quality_ok=not bad_answers,
        quality=dict(bad_answers),
        watts=watts,
        joules_per_token=watts / aggregate if watts and aggregate else None,
        notes=_notes(good),
    )


def token_gaps(requests: Iterable[Request]) -> tuple[list[float], list[int]]:
    """Inter-token times after the first chunk, and their weights: k tokens after g seconds count as k times g/k."""
    gaps, weights = [], []
    for request in requests:
        waited, before = 0.0, request.chunk_s[0] if request.chunk_s else 0.0
        for at, tokens in zip(request.chunk_s[1:], request.chunk_tokens[1:], strict=True):
            waited, before = waited + at - before, at
            if tokens > 0:
                gaps.append(waited / tokens)
                weights.append(tokens)
                waited = 0.0
    return gaps, weights


def turns(requests: Sequence[Request]) -> list[Turn]:
    """Seconds per agent turn at each length of history. Turns with broken answers are left out: one that loops takes
    as long as max_tokens lets it."""
    found = []
    sound = [r for r in requests if r.failure is None and not r.quality]
    talks = [r for r in sound if r.workload == agent.NAME and r.depth is not None]
    for server, history in sorted({(r.server, r.depth or 0) for r in talks}):
        here = [r for r in talks if (r.server, r.depth) == (server, history) and r.total_s is not None]
        ordinary, loads = [r for r in here if r.variant == "warm"], [r for r in here if r.variant == "load"]
        seconds = percentiles(known(r.total_s for r in ordinary))
        if seconds is None:
            continue
        ttft, decode = median(known(r.ttft_s for r in ordinary)), median(known(r.decode_s for r in ordinary))
        load = median(known(r.total_s for r in loads))
        found.append(Turn(server, history, seconds, ttft or 0.0, decode or 0.0, len(ordinary), load))
    return found


def cold_and_warm(found: Sequence[Workload]) -> list[tuple[Workload, Workload]]:
    """Pairs of rows of the same workload: prompts that are new to the server, and prompts that may be cached."""
    timed = [w for w in found if w.ttft_s and w.depth is None]
    return [
        (cold, warm)
        for warm in timed
        for cold in timed
        if (cold.variant, warm.variant) == ("cold", "warm")
        and (cold.name, cold.server, cold.concurrency) == (warm.name, warm.server, warm.concurrency)
    ]


def noise_of(found: Workload) -> float | None:
    """Half the confidence interval of the decode speed, as a share of it."""
    if found.decode_spread is None or not found.decode_tokens_per_s or found.completed < 2:
        return None
    return (found.decode_spread.ci_high - found.decode_spread.ci_low) / 2 / found.decode_tokens_per_s


def _prefill(requests: Iterable[Request]) -> list[float]:
    found = []
    for request in requests:
        fresh = (request.prompt_tokens or 0) - (request.cached_tokens or 0)
        if request.ttft_s and fresh > 0:
            found.append(fresh / request.ttft_s)
    return found


def _hit_rate(requests: Iterable[Request]) -> float | None:
    """None if the server does not report cached tokens."""
    told = [(r.cached_tokens, r.prompt_tokens) for r in requests if r.cached_tokens is not None and r.prompt_tokens]
    return sum(c or 0 for c, _ in told) / sum(p or 0 for _, p in told) if told else None


def _span(requests: Sequence[Request]) -> tuple[int, float, int]:
    """Tokens, seconds from the first request written to the last token, requests."""
    begin = min(request.started_s for request in requests)
    end = max(request.started_s + (request.total_s or 0.0) for request in requests)
    return sum(request.completion_tokens or 0 for request in requests), end - begin, len(requests)


def _notes(requests: Sequence[Request]) -> list[str]:
    """Drift over a long run: the last quarter against the first."""
    decode = [r.decode_tokens_per_s for r in sorted(requests, key=lambda r: r.started_s) if r.decode_tokens_per_s]
    quarter = len(decode) // 4
    if quarter < 8:
        return []
    first, last = median(decode[:quarter]) or 0.0, median(decode[-quarter:]) or 0.0
    return [f"decode went from {first:.1f} to {last:.1f} tok/s ({last / first - 1:+.1%}), first to last quarter"]


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _sources(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values))) or "none"
