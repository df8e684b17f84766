"""A service measured for a minute: the workloads that its recipe promises, as far as they are short, and three more."""

import secrets
import time
from collections.abc import Sequence

from msgspec import Struct

from stoker.bench import agent, summary
from stoker.bench.journal import Journal
from stoker.bench.record import Request
from stoker.bench.run import Runner, Watcher
from stoker.bench.stats import median
from stoker.bench.suites import Cell, Options, Plan
from stoker.bench.target import Target
from stoker.bench.workloads import MIXES, WORKLOADS, fits
from stoker.recipes.recipe import Speed

GENERAL = "general"  # the median of the workloads of one user that are no agent turns
ALWAYS = ("Q&A", "Code", "JSON-KIE")
ROUNDS = 2  # after a warm-up
ANSWER = 256  # tokens, at most
PROMPT = 8000  # longer prompts are left to stoker bench
HISTORY = 2000  # tokens behind which agent turns are measured
ENOUGH_S = 120.0  # after which no further workload is begun


class Measured(Struct, frozen=True):
    """One workload, as `stoker bench` counts it; speeds are of each user."""

    workload: str
    users: int
    requests: int
    failed: int
    decode_tokens_per_s: float | None
    end_to_end_tokens_per_s: float | None
    tokens_per_step: float | None
    first_token_s: float | None
    steps_source: str = ""


def cells(promised: Sequence[Speed], context: int | None) -> list[Cell]:
    """What is measured: short workloads that fit the context, each with as many users as are promised."""
    wanted = dict.fromkeys([(name, 1) for name in ALWAYS] + [(each.workload, each.users) for each in promised])
    found = []
    for name, users in wanted:
        if name == agent.NAME:
            if users == 1 and (context is None or context >= HISTORY + agent.MAX_TOKENS):
                found.append(Cell(name, "warm", histories=(HISTORY,), rounds=1))
            continue
        parts = MIXES.get(name, (name,))
        if all(part in WORKLOADS and _short(part, context) for part in parts):
            found.append(Cell(name, concurrency=users, rounds=ROUNDS, workloads=MIXES.get(name, ())))
    return found


def _short(name: str, context: int | None) -> bool:
    return WORKLOADS[name].prompt_tokens <= PROMPT and fits(WORKLOADS[name], context, ANSWER)


async def measure(target: Target, chosen: Sequence[Cell], watcher: Watcher) -> list[Measured]:
    """A row for each cell, and the general one; a service that is slow is measured with fewer. `target` is open."""
    requests, until = list[Request](), time.monotonic() + ENOUGH_S
    for cell in chosen:
        if requests and time.monotonic() > until:
            break
        runner = Runner(
            [target],
            Plan([cell]),
            Options(max_tokens=ANSWER),
            Journal(None, {}, Request),
            secrets.token_hex(8),
            watcher,
        )
        await runner.run()
        if runner.interrupted and not runner.stop_reason:
            raise KeyboardInterrupt
        requests += [request for request in runner.requests if request.variant != "load"]
    found = [
        Measured(
            workload=row.name,
            users=row.concurrency,
            requests=row.completed + row.failed,
            failed=row.failed,
            decode_tokens_per_s=_rounded(row.decode_tokens_per_s),
            end_to_end_tokens_per_s=_rounded(row.end_to_end_tokens_per_s),
            tokens_per_step=_rounded(row.accepted_per_step),
            first_token_s=_rounded(row.ttft_s.p50 if row.ttft_s else None),
            steps_source=row.steps_source,
        )
        for row in summary.rows(requests)
    ]
    return [*found, _general(found)]


def left_out(chosen: Sequence[Cell], rows: Sequence[Measured]) -> str:
    """What was not measured any more, since a slow service took all the time for the others; empty if nothing."""
    done = {(row.workload, row.users) for row in rows}
    left = [cell for cell in chosen if (cell.name, cell.concurrency) not in done]
    names = [each.name + (f", {each.concurrency} users" if each.concurrency > 1 else "") for each in left]
    return f"{' and '.join(names)} not measured: the others took more than {ENOUGH_S:.0f} s" if names else ""


def _general(rows: Sequence[Measured]) -> Measured:
    alone = [row for row in rows if row.users == 1 and row.workload != agent.NAME]

    def of(field: str) -> float | None:
        return _rounded(median([value for row in alone if (value := getattr(row, field)) is not None]))

    return Measured(
        workload=GENERAL,
        users=1,
        requests=sum(row.requests for row in alone),
        failed=sum(row.failed for row in alone),
        decode_tokens_per_s=of("decode_tokens_per_s"),
        end_to_end_tokens_per_s=of("end_to_end_tokens_per_s"),
        tokens_per_step=of("tokens_per_step"),
        first_token_s=of("first_token_s"),
        steps_source=alone[0].steps_source if alone else "",
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
