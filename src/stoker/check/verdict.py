"""From scores to a verdict in words. A difference counts if chance would do as much in fewer than 5 % of checks."""

import math
from collections.abc import Sequence

from msgspec.structs import replace

from stoker.check import statistics
from stoker.check.record import Asked, Closeness, Row
from stoker.check.suites import SUITES

ALPHA = 1 - statistics.LEVEL
TOO_MANY_FAILED = 0.05  # of the items: beyond that a verdict of no difference is not given
POINTS = (1, 2, 3, 5, 10)  # differences for which the items needed are told
PARTS = ("invoices",)  # suites whose items are right in part, too; suites of one's own show it themselves
BUILT_IN = frozenset(suite.name for suite in SUITES)
ALL = "all questions"
MAX_KL = 0.1  # nats per token, of predictions on fixed texts; docs/check.md says why


def rows(answers: Sequence[Asked], two: bool) -> list[Row]:
    """A row per suite, in the order in which they were asked, and one more where items can be right in part."""
    found = []
    for name in dict.fromkeys(asked.suite for asked in answers):
        here = [asked for asked in answers if asked.suite == name]
        sound = [asked for asked in here if all(judged.score is not None for judged in asked.replies.values())]
        if not sound:
            continue
        scores = [[asked.replies[server].score or 0.0 for asked in sound] for server in (("A", "B") if two else ("A",))]
        found.append(_passed(name, scores, len(here) - len(sound)))
        if name in PARTS or (name not in BUILT_IN and any(0 < score < 1 for side in scores for score in side)):
            found.append(_parts(name, scores, len(here) - len(sound)))
    if two and sum(row.measure == "passed" for row in found) > 1:
        found.append(_pooled(answers))
    adjusted = statistics.holm([row.p for row in found if row.p is not None])
    return [_judged(row, p) for row, p in zip(found, adjusted, strict=True)] if two else found


def _passed(name: str, scores: list[list[float]], failed: int) -> Row:
    sides = [[score >= 1.0 for score in side] for side in scores]
    count, right = len(sides[0]), sum(sides[0])
    low, high = statistics.wilson(right, count)
    row = _row(name, "passed", count, failed, right / count, low, high)
    if len(sides) == 1:
        return replace(row, items_needed=_needed(statistics.UNLIKE))
    gained = sum(a and not b for a, b in zip(*sides, strict=True))
    lost = sum(b and not a for a, b in zip(*sides, strict=True))
    low, high = statistics.paired_share(gained, lost, count)
    return replace(
        row,
        other=sum(sides[1]) / count,
        difference=(gained - lost) / count,
        difference_low=low,
        difference_high=high,
        gained=gained,
        lost=lost,
        p=statistics.mcnemar(gained, lost),
        items_needed=_needed(max((gained + lost) / count, 2 / (count + 4))),
    )


def _pooled(answers: Sequence[Asked]) -> Row:
    """All items together: a loss that is spread over the suites shows here before it does in any of them."""
    sound = [asked for asked in answers if all(judged.score is not None for judged in asked.replies.values())]
    scores = [[asked.replies[server].score or 0.0 for asked in sound] for server in ("A", "B")]
    return replace(_passed(ALL, scores, len(answers) - len(sound)), measure="pooled")


def _parts(name: str, scores: list[list[float]], failed: int) -> Row:
    count = len(scores[0])
    low, high = statistics.mean_interval(scores[0])
    row = _row(name, "parts", count, failed, sum(scores[0]) / count, low, high)
    if len(scores) == 1:
        return row
    differences = [a - b for a, b in zip(*scores, strict=True)]
    low, high = statistics.paired_mean(differences)
    return replace(
        row,
        other=sum(scores[1]) / count,
        difference=sum(differences) / count,
        difference_low=low,
        difference_high=high,
        gained=sum(difference > 0 for difference in differences),
        lost=sum(difference < 0 for difference in differences),
        p=statistics.permutation(differences),
    )


def _row(name: str, measure: str, items: int, failed: int, score: float, low: float, high: float) -> Row:
    none = dict.fromkeys(("other", "difference", "difference_low", "difference_high", "gained", "lost", "p"))
    return Row(
        name=name, measure=measure, items=items, failed=failed, score=score, low=low, high=high,
        p_adjusted=None, verdict="", words="", items_needed={}, **none,
    )  # fmt: skip


def _needed(unlike: float) -> dict[str, int]:
    return {str(points): statistics.items_needed(points / 100, unlike) for points in POINTS}


def _judged(row: Row, adjusted: float) -> Row:
    assert row.difference is not None
    assert row.difference_low is not None
    assert row.difference_high is not None
    what = f"parts of {row.name}" if row.measure == "parts" else row.name
    if adjusted < ALPHA:
        verdict = "worse" if row.difference < 0 else "better"
        half = (row.difference_high - row.difference_low) / 2
        words = f"{what}: {verdict} by {abs(row.difference) * 100:.1f} ± {half * 100:.1f} points on {row.items} items"
    else:
        verdict = "no difference found"
        most = max(-row.difference_low, row.difference_high)
        words = f"{what}: no difference larger than {_points(most)} points found on {row.items} items (95 %)"
    return replace(row, p_adjusted=adjusted, verdict=verdict, words=words)


def _points(share: float) -> str:
    """Rounded up, so that what is said holds."""
    points = share * 100
    return f"{math.ceil(points * 10 - 1e-9) / 10:.1f}" if points < 10 else f"{math.ceil(points - 1e-9)}"


def verdict(
    found: Sequence[Row], closeness: Sequence[Closeness], failed: dict[str, int], asked: int, two: bool, max_kl: float
) -> tuple[str, str]:
    """One word (or three), and sentences. `failed`: items by server."""
    told = _failures(failed, asked)
    if not found and not closeness:
        return "nothing measured", " ".join(["NOTHING MEASURED: no item was answered.", *told])
    if not two:
        scores = ", ".join(
            f"{row.name} {row.score:.0%} ({row.low:.0%} to {row.high:.0%} of {row.items})"
            for row in found
            if row.measure == "passed"
        )
        return "scored", " ".join([f"{scores}. Without --against there is nothing to compare with.", *told])
    parts = [row.words for row in found if row.verdict in ("worse", "better")]
    near = next((row for row in closeness if row.kind == "all"), None)
    worse = any(row.verdict == "worse" for row in found) or (near is not None and near.verdict == "worse")
    too_many = any(count > TOO_MANY_FAILED * asked for count in failed.values()) if asked else False
    if worse:
        word = "worse"
    elif too_many or (near is not None and near.verdict == "undecided"):
        word = "undecided"
    else:
        word = "better" if any(row.verdict == "better" for row in found) else "no difference found"
    primary = [row for row in found if row.measure == "passed"]
    if not parts and primary:
        parts = [_all_alike([row for row in found if row.measure != "parts"])]
    if near is not None:
        parts.append(_nearness(near, closeness, max_kl))
    return word, " ".join([f"{word.capitalize()}: {'; '.join(parts)}.", *told])


def _all_alike(found: Sequence[Row]) -> str:
    """The widest and the narrowest that can be said."""
    best = min(found, key=lambda row: max(-(row.difference_low or 0), row.difference_high or 0))
    rest = [row for row in found if row is not best]
    worst = max(rest, key=lambda row: max(-(row.difference_low or 0), row.difference_high or 0), default=None)
    return best.words + (f"; least is known of {worst.words}" if worst else "")


def _nearness(row: Closeness, found: Sequence[Closeness], max_kl: float) -> str:
    how = {"worse": "above", "close": "below"}.get(row.verdict, "not clearly on one side of")
    told = (
        f"predictions differ by {row.kl:.4f} nats a token ({row.low:.4f} to {row.high:.4f}), {how} the limit of "
        f"{max_kl:g}, and agree on the likeliest token at {row.top1:.1%} of {row.tokens:,} positions"
    )
    alone = [each.kind for each in found if each.verdict == "worse" and row.verdict != "worse"]
    return told + (f"; above it for {', '.join(alone)}" if alone else "")


def _failures(failed: dict[str, int], asked: int) -> list[str]:
    return [
        f"{count} of {asked} requests to {server} failed and are in no score."
        + (" That is too many to trust the rest." if count > TOO_MANY_FAILED * asked else "")
        for server, count in failed.items()
        if count
    ]
