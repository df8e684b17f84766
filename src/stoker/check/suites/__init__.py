"""The suites: which generators exist, how many items each contributes, and items from files of one's own."""

from collections.abc import Callable
from dataclasses import dataclass

from stoker.check.items import Item
from stoker.check.suites import arithmetic, code, instructions, invoices, languages, long_context, tools


@dataclass(frozen=True)
class Suite:
    name: str
    make: Callable[[str, int], list[Item]]
    full: int  # items of the whole pool
    share: float  # of the output tokens of `quick`


SUITES = (
    Suite(invoices.NAME, invoices.items, 240, 0.40),
    Suite(tools.NAME, tools.items, 200, 0.14),
    Suite(arithmetic.NAME, arithmetic.items, 180, 0.15),
    Suite(code.NAME, code.items, 100, 0.12),
    Suite(instructions.NAME, instructions.items, 120, 0.10),
    Suite(languages.NAME, languages.items, 160, 0.08),
    Suite(long_context.NAME, long_context.items, 48, 0.01),
)
SETS = {
    "quick": tuple(suite.name for suite in SUITES),
    "full": tuple(suite.name for suite in SUITES),
    "kie": (invoices.NAME,),
    "agent": (tools.NAME,),
    "closeness": (),
}
PROBED = ("quick", "full")  # sets with which some questions are asked again, in other circumstances
CLOSENESS = ("quick", "full", "closeness")  # sets with which predictions are compared
QUICK_TOKENS = 27_000  # output tokens: a quarter of an hour at 30 tokens/s
PROBE_TOKENS = 2_560  # of these, set aside for questions that are asked again
QUICK_CONTEXT = 16_000  # tokens of a prompt; longer ones take a quarter of an hour to read


def pool(chosen: str, seed: str) -> list[Item]:
    """Every item of a suite or of a set of suites."""
    return [
        item for name in SETS[chosen] for suite in SUITES if suite.name == name for item in suite.make(seed, suite.full)
    ]


def draw(chosen: str, seed: str, items: int | None = None, context: int | None = None) -> list[Item]:
    """The items that are asked: all of the pool, or for `quick` as many as 27,000 output tokens allow.

    `items` is how many of each suite instead. Prompts longer than the server's context are left out.
    """
    found: list[Item] = []
    for suite in SUITES:
        if suite.name not in SETS[chosen]:
            continue
        made = [item for item in suite.make(seed, max(items or 0, suite.full)) if _fits(item, chosen, context)]
        if items is not None:
            made = made[:items]
        elif chosen == "quick":
            made = _within(made, suite.share * (QUICK_TOKENS - PROBE_TOKENS))
        found += made
    return found


def _fits(item: Item, chosen: str, context: int | None) -> bool:
    tokens = item.filler.tokens if item.filler else 0
    return (chosen != "quick" or tokens <= QUICK_CONTEXT) and (context is None or tokens + item.max_tokens <= context)


def _within(items: list[Item], tokens: float) -> list[Item]:
    kept = []
    for item in items:
        tokens -= item.cost
        if tokens < 0:
            break
        kept.append(item)
    return kept
