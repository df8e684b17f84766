"""Whether the calls of replayed turns agree: of two servers, with the recording, and with a server's next round."""

from collections.abc import Iterable, Sequence

import numpy as np

from stoker.bench.record import Agreement, Call, Replayed, Request

RESAMPLES = 2000
FEW = 5  # sessions, below which there is no interval


def agreements(requests: Sequence[Request]) -> list[Agreement]:
    """Nothing if no session was replayed."""
    found = {
        (r.server, r.round, r.replayed.session, r.replayed.turn): r.replayed
        for r in requests
        if r.replayed is not None and r.failure is None
    }
    servers = sorted({server for server, *_ in found})
    rows = []
    for place, server in enumerate(servers):
        for other in servers[place + 1 :]:
            rows.append(_row(f"{server} and {other}", _pairs(found, server, other, later=0)))
    for server in servers:
        mine = [each for (name, *_), each in found.items() if name == server]
        rows.append(_row(f"{server} and the recording", [(each, each.recorded) for each in mine]))
    for server in servers:
        rows.append(_row(f"{server} and itself, a round later", _pairs(found, server, server, later=1)))
    return [row for row in rows if row.turns]


def _pairs(
    found: dict[tuple[str, int, str, int], Replayed], server: str, other: str, later: int
) -> list[tuple[Replayed, list[Call]]]:
    """Each turn of a server beside the same turn of the other, in the same round or a later one."""
    pairs = []
    for (name, number, session, turn), each in found.items():
        partner = found.get((other, number + later, session, turn)) if name == server else None
        if partner is not None:
            pairs.append((each, partner.called))
    return pairs


def _row(between: str, pairs: Sequence[tuple[Replayed, list[Call]]]) -> Agreement:
    same = [(each.session, _exact(each.called, calls)) for each, calls in pairs]
    low, high = _interval(same)
    return Agreement(
        between=between,
        turns=len(pairs),
        sessions=len({session for session, _ in same}),
        same_decision=_share(bool(each.called) == bool(calls) for each, calls in pairs),
        same_tools=_share(_names(each.called) == _names(calls) for each, calls in pairs),
        same_calls=_share(agree for _, agree in same),
        low=low,
        high=high,
    )


def _names(calls: Iterable[Call]) -> list[str]:
    return sorted(call.name for call in calls)


def _exact(mine: Iterable[Call], theirs: Iterable[Call]) -> bool:
    return sorted((c.name, c.arguments) for c in mine) == sorted((c.name, c.arguments) for c in theirs)


def _share(found: Iterable[bool]) -> float:
    values = list(found)
    return sum(values) / len(values) if values else 0.0


def _interval(same: Sequence[tuple[str, bool]]) -> tuple[float | None, float | None]:
    """95 %, sessions resampled, since turns of one session have much in common."""
    sessions = sorted({session for session, _ in same})
    if len(sessions) < FEW:
        return None, None
    place = {session: number for number, session in enumerate(sessions)}
    sums = np.zeros((len(sessions), 2))
    for session, agree in same:
        sums[place[session]] += (agree, 1)
    draws = np.random.default_rng(0).integers(0, len(sessions), (RESAMPLES, len(sessions)))
    drawn = sums[draws].sum(axis=1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], (2.5, 97.5))
    return float(low), float(high)
