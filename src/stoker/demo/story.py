"""What the demo's report says first: how much faster drafting made each kind of text, and if tokens differ."""

from collections.abc import Mapping, Sequence

from stoker.bench.record import Workload
from stoker.report import figures
from stoker.report.heading import Card, Story

NOTHING = 0.05  # a change within this share is none: runs on one machine differ by as much


def story(rows: Sequence[Workload], kinds: Sequence[str], plain: str, drafted: str, same: int, tokens: int) -> Story:
    """`plain` and `drafted` are the servers that are compared; `same` of `tokens` are identical, over all servers."""
    speeds = {
        server: {row.name: row.decode_tokens_per_s or 0.0 for row in rows if row.server == server and row.name in kinds}
        for server in (plain, drafted)
    }
    compared = [kind for kind in kinds if speeds[plain].get(kind) and speeds[drafted].get(kind)]
    ratios = {kind: speeds[drafted][kind] / speeds[plain][kind] for kind in compared}
    cards = [
        Card(
            kind[0].upper() + kind[1:],
            f"{ratios[kind]:.1f}×",
            f"{figures.number(speeds[plain][kind], 0)} → {figures.number(speeds[drafted][kind], 0)} tokens/s, "
            f"{plain} → {drafted}",
        )
        for kind in compared
    ]
    cards.append(Card("Identical tokens", f"{same:,}", f"of {tokens:,}, every drafting server against the {plain} one"))
    return Story(f"{_speeds(ratios)}; {_identity(same, tokens)}.", tuple(cards))


def _speeds(ratios: Mapping[str, float]) -> str:
    if not ratios:
        return "No speed was measured"
    best, worst = max(ratios, key=lambda kind: ratios[kind]), min(ratios, key=lambda kind: ratios[kind])
    if ratios[best] <= 1 + NOTHING:
        return "Drafting brought nothing here"
    first = f"Drafting made {best} {ratios[best]:.1f} times as fast"
    if worst == best:
        return first
    if ratios[worst] > 1 + NOTHING:
        return f"{first} and {worst} {ratios[worst]:.1f} times"
    if ratios[worst] >= 1 - NOTHING:
        return f"{first} and brought nothing on {worst}"
    return f"{first} and {worst} {1 - ratios[worst]:.0%} slower"


def _identity(same: int, tokens: int) -> str:
    return f"all {tokens:,} tokens identical" if same == tokens else f"{tokens - same:,} of {tokens:,} tokens DIFFER"
