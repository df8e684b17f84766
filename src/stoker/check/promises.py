"""Scores that a recipe promises, held against those of a check. Other items were asked then, so shares are compared."""

from dataclasses import dataclass

from msgspec.structs import replace

from stoker.check import statistics
from stoker.check.record import Document, Promise
from stoker.errors import BenchError
from stoker.recipes.load import load
from stoker.recipes.recipe import Score


@dataclass(frozen=True)
class Promised:
    recipe: str
    scores: list[Score]


def scores_of(name: str) -> Promised:
    """The scores of a recipe, read before anything is asked."""
    found = load(name).recipe
    if not found.expected.score:
        raise BenchError(
            f"the recipe {found.name} expects no scores; add [[expected.score]] with suite, share, items and source, "
            "as docs/recipes.md shows"
        )
    return Promised(found.name, found.expected.score)


def held(found: Document, promised: Promised) -> Document:
    """The document with a row per promise, and a sentence about them."""
    rows = {row.name: row for row in found.suites if row.measure == "passed"}
    asked = [score for score in promised.scores if score.suite in rows]
    level = 1 - (1 - statistics.LEVEL) / max(len(asked), 1)
    promises = []
    for score in promised.scores:
        row = rows.get(score.suite)
        low = high = None
        if row is not None:
            passed = round(row.score * row.items)
            low, high = statistics.unpaired_share(passed, row.items, score.share * score.items, score.items, level)
        promises.append(
            Promise(
                suite=score.suite,
                promised=score.share,
                of=score.items,
                source=score.source,
                score=row.score if row else None,
                low=low,
                high=high,
                verdict="not asked" if high is None else "not kept" if high < 0 else "kept",
            )
        )
    words = "; ".join(map(_words, promises))
    statement = f"{found.statement} Held to the recipe {promised.recipe}: {words}."
    return replace(found, recipe=promised.recipe, promises=promises, statement=statement)


def _words(promise: Promise) -> str:
    told = f"{promise.suite} {promise.verdict}"
    if promise.score is None or promise.low is None:
        return told
    most = max(-promise.low, 0.0) * 100
    told += f", {promise.score:.1%} where {promise.promised:.1%} of {promise.of} is promised"
    return told if promise.verdict == "not kept" else f"{told}, a loss of up to {most:.0f} points would not show"
