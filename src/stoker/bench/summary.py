"""From requests to rows, headline and warnings: the per-workload formulas of docs/benchmarks.md."""

from collections import Counter
from collections.abc import Iterable, Sequence

from stoker.bench import agent
from stoker.bench.record import Client, Difference, Headline, Request, ServerFacts, Turn, Workload
from stoker.bench.stats import median, percentiles, spread

SHORT_ANSWER = 32  # tokens; below, a decode speed says little
OVERHEAD_LIMIT = 0.05
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
    decode = _known(request.decode_tokens_per_s for request in good)
    end_to_end = _known(request.end_to_end_tokens_per_s for request in good)
    accepted = _known(request.accepted_per_step for request in good)
    ttft = _known(request.ttft_s for request in good)
    bad_answers = Counter(problem for request in good for problem in request.quality)
    spans = [_span(members) for members in by_round(good)]
    aggregate = median([tokens / seconds for tokens, seconds, _ in spans if seconds > 0])
    watts = median(_known(request.watts for request in good))
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
        prompt_tokens=median(_known(request.prompt_tokens for request in good)),
        completion_tokens=median(_known(request.completion_tokens for request in good)),
        decode_tokens_per_s=median(decode),
        decode_spread=spread(decode),
        end_to_end_tokens_per_s=median(end_to_end),
        end_to_end_spread=spread(end_to_end),
        aggregate_tokens_per_s=aggregate,
        requests_per_s=median([count / seconds for _, seconds, count in spans if seconds > 0]),
        steps_per_s=median(_known(request.steps_per_s for request in good)),
        steps_source=_sources(request.steps_source for request in good),
        accepted_per_step=median(accepted),
        accepted_spread=spread(accepted),
        ttft_s=percentiles(ttft),
        ttft_spread=spread(ttft),
        itl_s=percentiles(*token_gaps(good)),
        turn_s=percentiles(_known(request.total_s for request in good)),
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
        seconds = percentiles(_known(r.total_s for r in ordinary))
        if seconds is None:
            continue
        ttft, decode = median(_known(r.ttft_s for r in ordinary)), median(_known(r.decode_s for r in ordinary))
        load = median(_known(r.total_s for r in loads))
        found.append(Turn(server, history, seconds, ttft or 0.0, decode or 0.0, len(ordinary), load))
    return found


def headline(
    requests: Sequence[Request],
    found: Sequence[Workload],
    points: Sequence[Turn],
    servers: Sequence[str],
    complete: bool,
) -> Headline:
    """The figures are the first server's; the sentence covers all servers."""
    failures = Counter(request.failure.kind for request in requests if request.failure is not None)
    failed = sum(failures.values())
    done = len(requests) - failed
    said = [text for server in servers if (text := _sentence(server, found, points, len(servers) > 1))]
    if not done:
        text = f"NOTHING MEASURED: {failed} of {failed} requests failed ({_listed(failures)})."
    else:
        text = " ".join(said) or f"{done} requests completed."
        if failed:
            text += f" {failed} of {len(requests)} requests FAILED ({_listed(failures)})."
        broken = [named(w, len(servers) > 1) for w in found if not w.quality_ok]
        if broken:
            names = ", ".join(broken) if len(broken) <= 3 else f"{len(broken)} of {len(found)} rows"
            text += f" Not in these figures, for broken answers: {names}."
    if not complete:
        text = f"Interrupted. {text}"
    noise = median([n for w in found if (n := noise_of(w)) is not None])
    general, agents = _general(found, servers[0]), _agents(found, servers[0])
    return Headline(
        text=text,
        completed=done,
        failed=failed,
        failures=dict(failures),
        general_decode_tokens_per_s=median(_known(w.decode_tokens_per_s for w in general)),
        agent_decode_tokens_per_s=median(_known(w.decode_tokens_per_s for w in agents)),
        accepted_per_step=median(_known(w.accepted_per_step for w in general + agents)),
        ttft_s=median([w.ttft_s.p50 for w in general if w.ttft_s]),
        noise=noise,
    )


def _sentence(server: str, found: Sequence[Workload], points: Sequence[Turn], named: bool) -> str:
    general, agents = _general(found, server), _agents(found, server)
    parts = []
    speed = median(_known(w.decode_tokens_per_s for w in general))
    if speed is not None:
        share = f"median of {len(general)} workloads" if len(general) > 1 else general[0].name
        parts.append(f"general {speed:.1f} tok/s decode ({share})")
    speed = median(_known(w.decode_tokens_per_s for w in agents))
    if speed is not None:
        parts.append(f"agent turns {speed:.1f} tok/s decode")
        here = [point for point in points if point.server == server]
        parts += [f"{point.seconds.p50:.2f} s per agent turn at {_thousands(point.history_tokens)}" for point in here]
    accepted = median(_known(w.accepted_per_step for w in general + agents))
    if accepted is not None and accepted > 1.005:
        parts.append(f"{accepted:.2f} tokens per step")
    many = [w for w in found if w.server == server and w.concurrency > 1 and w.quality_ok and w.aggregate_tokens_per_s]
    if many:
        busiest = max(many, key=lambda w: w.aggregate_tokens_per_s or 0.0)
        parts.append(f"{busiest.aggregate_tokens_per_s:.1f} tok/s over {busiest.concurrency} streams")
    offered = [w for w in found if w.server == server and w.rate is not None and w.quality_ok and w.ttft_s]
    if offered:
        busiest = max(offered, key=lambda w: w.rate or 0.0)
        waited = busiest.ttft_s.p95 if busiest.ttft_s else 0.0
        parts.append(f"at {busiest.rate:g} requests/s, 95 % have their first token within {waited:.2f} s")
    for cold, warm in cold_and_warm([w for w in found if w.server == server and w.quality_ok]):
        times = [w.ttft_s.p50 if w.ttft_s else 0.0 for w in (cold, warm)]
        parts.append(f"{warm.name}: first token after {times[0]:.2f} s cold, {times[1]:.2f} s warm")
    if not parts:
        return ""
    text = "; ".join(parts) + "."
    return f"{server}: {text}" if named else text[0].upper() + text[1:]


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


def _general(found: Sequence[Workload], server: str) -> list[Workload]:
    """One stream, cold or the user's own prompts, sound answers, no agent."""
    single = [w for w in found if w.server == server and w.concurrency == 1 and w.rate is None and w.quality_ok]
    return [w for w in single if w.name != agent.NAME and w.variant in ("cold", "own") and not w.depth and w.completed]


def _agents(found: Sequence[Workload], server: str) -> list[Workload]:
    sound = [w for w in found if w.server == server and w.quality_ok and w.completed]
    return [w for w in sound if w.name == agent.NAME and w.variant == "warm"]


def noise_of(found: Workload) -> float | None:
    """Half the confidence interval of the decode speed, as a share of it."""
    if found.decode_spread is None or not found.decode_tokens_per_s or found.completed < 2:
        return None
    return (found.decode_spread.ci_high - found.decode_spread.ci_low) / 2 / found.decode_tokens_per_s


def warnings(
    requests: Sequence[Request], found: Sequence[Workload], client: Client, servers: Sequence[ServerFacts]
) -> list[str]:
    """What a reader must know before believing the figures."""
    lines = []
    many = len(servers) > 1
    broken = [
        f"{named(w, many)} ({', '.join(f'{what} in {count}' for what, count in w.quality.items())} of {w.completed})"
        for w in found
        if w.quality
    ]
    if broken:
        lines.append(f"Do not trust the speeds of {', '.join(broken)}: answers are broken.")
    if any("estimate" in w.count_source for w in found):
        lines.append(
            "Tokens are estimated from chunks: the server sent no usage and no token ids and has no /tokenize. Such "
            "figures are wrong as soon as a chunk carries several tokens."
        )
    elif any("estimate" in w.steps_source for w in found):
        lines.append("Steps are estimated as one per chunk: the server reports no speculation statistics.")
    doubts = Counter(note.split(":")[1].strip() for r in requests for note in r.notes if ":" in note)
    example = next((note for r in requests for note in r.notes), "")
    for what, count in doubts.items():
        lines.append(f"The server's usage is wrong in {count} of {len(requests)} answers: {what} (first: {example}).")
    off = [
        r for r in requests if r.prompt_tokens and r.prompt_tokens_wanted and r.prompt_tokens != r.prompt_tokens_wanted
    ]
    if off:
        worst = max(off, key=lambda r: abs((r.prompt_tokens or 0) - (r.prompt_tokens_wanted or 0)))
        lines.append(
            f"{len(off)} of {len(requests)} prompts are not of the length they were fitted to; the worst has "
            f"{worst.prompt_tokens:,} tokens by the server's usage instead of {worst.prompt_tokens_wanted:,}."
        )
    short = [w for w in found if w.completion_tokens is not None and w.completion_tokens < SHORT_ANSWER]
    if short:
        names = ", ".join(named(w, many) for w in short)
        lines.append(
            f"Answers are shorter than {SHORT_ANSWER} tokens on {names}: too short for a decode speed to mean much."
        )
    warm_but_cold = [w for w in found if w.variant == "cold" and (w.prefix_hit_rate or 0) > 0.25]
    if warm_but_cold:
        names = ", ".join(named(w, many) for w in warm_but_cold)
        lines.append(f"Prompts that should be cold were cached on {names}: TTFT is too good there.")
    if client.overhead is not None and client.overhead > OVERHEAD_LIMIT:
        lines.append(
            f"This client is late by {client.overhead:.1%} of the time between chunks: run it on an idle machine, or "
            "with fewer streams."
        )
    for server in servers:
        if "usage of one-token" in server.tokenizer:
            lines.append(
                f"{server.name} has no /tokenize: prompt lengths beyond 2,048 tokens are scaled from a sample."
            )
    return lines


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


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _sources(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values))) or "none"


def _listed(failures: Counter[str]) -> str:
    return ", ".join(f"{kind}: {count}" for kind, count in failures.most_common())


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:g}K"
