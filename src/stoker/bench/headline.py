"""What a result says first: the headline, and the warnings that a reader must know before believing the figures."""

from collections import Counter
from collections.abc import Sequence

from stoker.bench import agent
from stoker.bench.record import Client, Headline, Request, ServerFacts, Turn, Workload
from stoker.bench.stats import median
from stoker.bench.summary import cold_and_warm, known, named, noise_of
from stoker.speculate.assumed import LABEL

SHORT_ANSWER = 32  # tokens; below, a decode speed says little
OVERHEAD_LIMIT = 0.05


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
    general, agents = general_rows(found, servers[0]), agent_rows(found, servers[0])
    return Headline(
        text=text,
        completed=done,
        failed=failed,
        failures=dict(failures),
        general_decode_tokens_per_s=median(known(w.decode_tokens_per_s for w in general)),
        agent_decode_tokens_per_s=median(known(w.decode_tokens_per_s for w in agents)),
        accepted_per_step=median(known(w.accepted_per_step for w in general + agents)),
        ttft_s=median([w.ttft_s.p50 for w in general if w.ttft_s]),
        noise=noise,
    )


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
        lines.append(f"Answers are broken on {', '.join(broken)}: speeds of those rows say nothing.")
    if any("estimate" in w.count_source for w in found):
        lines.append(
            "Tokens are estimated from chunks: the server sent no usage and no token ids and has no /tokenize. Such "
            "figures are wrong as soon as a chunk carries several tokens."
        )
    elif any("estimate" in w.steps_source for w in found):
        lines.append("Steps are estimated as one per chunk: the server reports no speculation statistics.")
    assumed = [named(w, many) for w in found if LABEL in w.steps_source]
    if assumed:
        lines.append(
            f"Acceptance assumed on {', '.join(assumed)}: the server accepts drafts unseen (--assume-acceptance), so "
            "the text is not the model's, and the speeds hold for that acceptance alone."
        )
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


def _sentence(server: str, found: Sequence[Workload], points: Sequence[Turn], named: bool) -> str:
    general, agents = general_rows(found, server), agent_rows(found, server)
    parts = []
    speed = median(known(w.decode_tokens_per_s for w in general))
    if speed is not None:
        share = f"median of {len(general)} workloads" if len(general) > 1 else general[0].name
        parts.append(f"general {speed:.1f} tok/s decode ({share})")
    speed = median(known(w.decode_tokens_per_s for w in agents))
    if speed is not None:
        parts.append(f"agent turns {speed:.1f} tok/s decode")
        here = [point for point in points if point.server == server]
        parts += [f"{point.seconds.p50:.2f} s per agent turn at {_thousands(point.history_tokens)}" for point in here]
    accepted = median(known(w.accepted_per_step for w in general + agents))
    if accepted is not None and accepted > 1.005:
        assumed = any(LABEL in w.steps_source for w in general + agents)
        parts.append(f"{accepted:.2f} tokens per step" + (f" ({LABEL})" if assumed else ""))
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


def general_rows(found: Sequence[Workload], server: str) -> list[Workload]:
    """One stream, cold or the user's own prompts, sound answers, no agent."""
    single = [w for w in found if w.server == server and w.concurrency == 1 and w.rate is None and w.quality_ok]
    return [w for w in single if w.name != agent.NAME and w.variant in ("cold", "own") and not w.depth and w.completed]


def agent_rows(found: Sequence[Workload], server: str) -> list[Workload]:
    sound = [w for w in found if w.server == server and w.quality_ok and w.completed]
    return [w for w in sound if w.name == agent.NAME and w.variant == "warm"]


def _listed(failures: Counter[str]) -> str:
    return ", ".join(f"{kind}: {count}" for kind, count in failures.most_common())


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:g}K"
