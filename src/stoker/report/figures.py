"""A benchmark's figures as people read them: the cells and sentences that terminal, Markdown and HTML share."""

from stoker.bench.record import Difference, Document, Workload
from stoker.bench.summary import cold_and_warm, named, noise_of, title
from stoker.speculate.assumed import LABEL

HEADS = ("workload", "in", "out", "TTFT s", "p95", "decode tok/s", "±", "e2e tok/s", "steps/s", "tok/step", "ok")
WIDE = ("in", "p95", "e2e tok/s")  # columns a narrow terminal goes without
COMPARED_HEADS = ("workload", "metric", "A", "B", "change", "95 %", "runs", "verdict")
METRICS = {"decode_tokens_per_s": ("decode tok/s", 1), "ttft_s": ("TTFT s", 3), "accepted_per_step": ("tok/step", 2)}


def cells(row: Workload, two_servers: bool) -> tuple[str, ...]:
    done = f"{row.completed}" if not row.failed else f"{row.completed}/{row.completed + row.failed}"
    return (
        named(row, two_servers),
        number(row.prompt_tokens, 0),
        number(row.completion_tokens, 0),
        seconds(row.ttft_s.p50 if row.ttft_s else None),
        seconds(row.ttft_s.p95 if row.ttft_s else None),
        number(row.decode_tokens_per_s, 1),
        plus_minus(row),
        number(row.end_to_end_tokens_per_s, 1),
        number(row.steps_per_s, 1) + ("*" if "estimate" in row.steps_source and row.steps_per_s else ""),
        _accepted(row),
        done + ("" if row.quality_ok else " !"),
    )


def _accepted(row: Workload) -> str:
    if not row.accepted_per_step:
        return number(row.accepted_per_step, 2)
    mark = " assumed" if LABEL in row.steps_source else "*" if "estimate" in row.steps_source else ""
    return number(row.accepted_per_step, 2) + mark


def compared_cells(row: Difference) -> tuple[str, ...]:
    name, digits = METRICS[row.metric]
    return (
        title(row),
        name,
        f"{row.a:.{digits}f}",
        f"{row.b:.{digits}f}",
        f"{row.change:+.1%}",
        f"{row.ci_low:+.1%} … {row.ci_high:+.1%}",
        f"{row.runs_a} + {row.runs_b}" + (" paired" if row.paired else ""),
        row.verdict,
    )


def throughput(found: Document) -> list[str]:
    """What several streams reach together."""
    two = two_servers(found)
    return [
        f"{named(row, two)}: {row.aggregate_tokens_per_s:.1f} tok/s in all, {row.requests_per_s:.2f} requests/s"
        for row in found.workloads
        if (row.concurrency > 1 or row.rate is not None) and row.aggregate_tokens_per_s and row.requests_per_s
    ]


def prefix(found: Document) -> list[str]:
    """Cold beside warm."""
    lines = []
    for cold, warm in cold_and_warm(found.workloads):
        assert cold.ttft_s is not None
        assert warm.ttft_s is not None
        hit = f", {warm.prefix_hit_rate:.0%} of its prompt cached" if warm.prefix_hit_rate is not None else ""
        faster = cold.ttft_s.p50 / warm.ttft_s.p50
        both = f"{seconds(cold.ttft_s.p50)} s cold, {seconds(warm.ttft_s.p50)} s warm"
        where = f"{warm.server}: " if two_servers(found) else ""
        lines.append(f"{where}{warm.name}: first token after {both} ({faster:.1f}×{hit})")
    return lines


def turns(found: Document) -> list[str]:
    return [
        f"{point.server + ': ' if two_servers(found) else ''}{point.history_tokens / 1000:g}K of history: "
        f"{point.seconds.p50:.2f} s per turn (medians; {point.ttft_s:.2f} to the first token, {point.decode_s:.2f} "
        f"decoding; p95 {point.seconds.p95:.2f}, {point.turns} turns)"
        + (f"; loading it took {point.load_s:.2f} s" if point.load_s else "")
        for point in found.turns
    ]


def agreement(found: Document) -> list[str]:
    """Whether the calls of replayed sessions agree."""
    return [
        f"Calls of {row.between}: the same on {row.same_calls:.1%} of {row.turns:,} turns"
        + (f" ({row.low:.1%} to {row.high:.1%})" if row.low is not None and row.high is not None else "")
        + f", the same tools on {row.same_tools:.1%}, a call or none alike on {row.same_decision:.1%}"
        for row in found.agreement
    ]


def client(found: Document) -> str:
    """What measuring cost."""
    cost = found.environment.client
    if cost.cpu_share is None:
        return ""
    text = f"Client: {cost.cpu_share:.0%} of one core"
    if cost.lag_p50_s is not None and cost.lag_p99_s is not None:
        text += f", arrivals stamped late by {cost.lag_p50_s * 1e3:.2f} ms (p99 {cost.lag_p99_s * 1e3:.2f})"
    if cost.overhead is not None:
        text += f": {cost.overhead:.1%} of the time between a stream's chunks"
    return text + "."


def noise(found: Document) -> str:
    share = found.headline.noise
    if share is None:
        return "With one run there is no telling how noisy these figures are; take --runs 3 or more."
    return f"Noise: 95 % intervals are ±{share:.1%} wide (median over workloads); smaller differences mean nothing."


def quality(found: Document) -> str:
    """Comes before any speed."""
    answers = sum(row.completed for row in found.workloads)
    bad = sum(bool(request.quality) for request in found.requests if request.failure is None)
    if not answers:
        return "No answer to look at."
    if bad:
        return f"Answers: {bad} of {answers} are broken (see below)."
    return f"Answers: {answers} looked at, none empty or looping, JSON parses where asked for."


def failures(found: Document) -> list[str]:
    """Each kind once, with the server's own words."""
    seen: dict[str, tuple[int, str]] = {}
    for request in found.requests:
        if request.failure is not None:
            count, message = seen.get(request.failure.kind, (0, request.failure.message))
            seen[request.failure.kind] = (count + 1, message)
    return [f"{count} × {kind}: {message}" for kind, (count, message) in seen.items()]


def two_servers(found: Document) -> bool:
    return len(found.environment.servers) > 1


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def plus_minus(row: Workload) -> str:
    """Half the 95 % interval of the decode speed, as a share."""
    share = noise_of(row)
    return "" if share is None else f"{share:.0%}" if share >= 0.095 else f"{share:.1%}"
