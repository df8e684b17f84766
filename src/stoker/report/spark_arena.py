"""The CSV that llama-benchy writes and Spark Arena reads: the same columns, means and standard deviations.

llama-benchy begins prefill time at the first event of any kind and subtracts a round trip; here it is time to first
token with nothing subtracted, so `ttfr`, `est_ppt` and `e2e_ttft` are one figure.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev

from stoker.bench.record import Document, Request
from stoker.bench.summary import Group, by_group, by_round

METRICS = ("t_s", "t_s_req", "peak_ts", "peak_ts_req", "ttfr", "est_ppt", "e2e_ttft")
COLUMNS = ["model", "test_name", *(f"{name}_{kind}" for name in METRICS for kind in ("mean", "std"))]


def spark_arena(found: Document) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS)
    writer.writeheader()
    models = {server.name: server.model for server in found.environment.servers}
    groups = by_group(request for request in found.requests if request.failure is None)
    many = any(request.concurrency > 1 for request in found.requests)
    for group, requests in groups.items():
        prefill, decode = _names(group, requests, many)
        rounds = by_round(requests)
        first = _of([(r.ttft_s or 0.0) * 1e3 for r in requests])
        alone = _of([_fresh(r) / r.ttft_s for r in requests if r.ttft_s])
        together = _of([_prefill(batch) for batch in rounds]) if group[3] > 1 else alone
        row = {"model": models.get(group[1], ""), "test_name": prefill}
        times = {"ttfr": first, "est_ppt": first, "e2e_ttft": first}
        writer.writerow(row | _columns({"t_s": together, "t_s_req": alone, **times}))
        alone = _of([r.decode_tokens_per_s for r in requests if r.decode_tokens_per_s])
        together = _of([_decode(batch) for batch in rounds]) if group[3] > 1 else alone
        peaks = {"peak_ts": _of([_peak(batch) for batch in rounds]), "peak_ts_req": _of([_peak([r]) for r in requests])}
        writer.writerow(row | {"test_name": decode} | _columns({"t_s": together, "t_s_req": alone, **peaks}))
    return out.getvalue()


def _names(group: Group, requests: Sequence[Request], many: bool) -> tuple[str, str]:
    name, _, variant, concurrency, _, depth = group
    streams = f" (c{concurrency})" if many else ""
    if depth is None:
        prompt, answer = requests[0].prompt_tokens or 0, max(r.completion_tokens or 0 for r in requests)
        return f"{name} pp{prompt}{streams}", f"{name} tg{answer}{streams}"
    if variant == "load":
        return f"ctx_pp @ d{depth}{streams}", f"ctx_tg @ d{depth}{streams}"
    at = f" @ d{depth}" if depth else ""
    prefill, _, decode = name.partition("/")
    return f"{prefill}{at}{streams}", f"{decode}{at}{streams}"


def _columns(found: dict[str, tuple[float, float] | None]) -> dict[str, float | str]:
    columns: dict[str, float | str] = {}
    for name in METRICS:
        mean, std = found.get(name) or ("", "")
        columns |= {f"{name}_mean": mean, f"{name}_std": std}
    return columns


def _of(values: Iterable[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (fmean(known), pstdev(known)) if known else None


def _fresh(request: Request) -> int:
    """Prompt tokens that belong to the test: with a loaded context, those after it."""
    total = request.prompt_tokens or 0
    return total - (request.depth or 0) if request.depth and request.variant == "warm" else total


def _prefill(batch: Sequence[Request]) -> float | None:
    seconds = max(r.started_s + (r.ttft_s or 0) for r in batch) - min(r.started_s for r in batch)
    return sum(_fresh(r) for r in batch) / seconds if seconds > 0 else None


def _decode(batch: Sequence[Request]) -> float | None:
    begin = min(r.started_s + (r.ttft_s or 0) for r in batch)
    end = max(r.started_s + (r.total_s or 0) for r in batch)
    return sum(sum(r.chunk_tokens[1:]) for r in batch) / (end - begin) if end > begin else None


def _peak(batch: Sequence[Request], window: float = 1.0) -> float | None:
    """Most tokens in a second."""
    arrivals = sorted((r.started_s + at, n) for r in batch for at, n in zip(r.chunk_s, r.chunk_tokens, strict=True))
    if len(arrivals) < 2:
        return None
    if arrivals[-1][0] - arrivals[0][0] < window:
        return sum(n for _, n in arrivals) / (arrivals[-1][0] - arrivals[0][0] or window)
    best = inside = begin = 0
    for at, tokens in arrivals:
        inside += tokens
        while arrivals[begin][0] <= at - window:
            inside -= arrivals[begin][1]
            begin += 1
        best = max(best, inside)
    return best / window
