"""What a check writes down: one document, every answer in it. `docs/check-schema.json` is generated from here.

Scores and differences are fractions; A is the server under check, B the other one; a difference is A minus B.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from stoker.bench.record import Record, ServerFacts
from stoker.check.checkers import Reply

VERSION: Literal[1] = 1


class Judged(Record):
    """A reply and what is to be said of it."""

    reply: Reply
    score: Annotated[float | None, Meta(description="1 is wholly right; null where the request failed")]
    why: Annotated[str, Meta(description="what was wrong")]
    problems: Annotated[list[str], Meta(description="looping, empty, raw tags, ...")]


class Asked(Record):
    """One item and what the servers said to it."""

    id: str
    suite: str
    kind: str
    digest: Annotated[str, Meta(description="of everything that was asked; items of two files pair if it is the same")]
    question: Annotated[str, Meta(description="the last message of the request, its beginning")]
    expect: Annotated[Any, Meta(description="what the checker compared with")]
    replies: Annotated[dict[str, Judged], Meta(description="by server: A, B")]


class Row(Record):
    """A suite: scores of A, and A against B where there are two servers."""

    name: str
    measure: Annotated[
        str, Meta(description="passed: share of items wholly right; parts: mean share of each item; pooled: all suites")
    ]
    items: Annotated[int, Meta(description="that every server answered")]
    failed: Annotated[int, Meta(description="items left out because a request failed")]
    score: Annotated[float, Meta(description="of A")]
    low: Annotated[float, Meta(description="95 % interval of the score")]
    high: float
    other: Annotated[float | None, Meta(description="score of B")]
    difference: Annotated[float | None, Meta(description="A minus B: negative is a loss")]
    difference_low: Annotated[float | None, Meta(description="95 % interval of the difference, not adjusted")]
    difference_high: float | None
    gained: Annotated[int | None, Meta(description="items that only A answered rightly, or better")]
    lost: Annotated[int | None, Meta(description="items that only B answered rightly, or better")]
    p: Annotated[float | None, Meta(description="McNemar's exact test, or a permutation test for parts")]
    p_adjusted: Annotated[float | None, Meta(description="Holm: for all rows of the check together")]
    verdict: Annotated[str, Meta(description="worse, better, no difference found; empty with one server")]
    words: Annotated[str, Meta(description="the verdict as a sentence")]
    items_needed: Annotated[dict[str, int], Meta(description="items that would find a difference of N points")]


class Closeness(Record):
    """How near A's predictions are to B's on fixed texts."""

    kind: Annotated[str, Meta(description="of text, or all")]
    texts: int
    tokens: Annotated[int, Meta(description="positions compared")]
    kl: Annotated[float, Meta(description="mean KL(B || A) in nats per token: a lower bound from the likeliest tokens")]
    low: Annotated[float, Meta(description="95 % interval, texts resampled")]
    high: float
    top1: Annotated[float, Meta(description="share of positions where both find the same token likeliest")]
    rest: Annotated[float, Meta(description="mean probability of B's that was not compared token by token")]
    verdict: Annotated[str, Meta(description="worse: above the limit; close: below it; undecided")]


class Sanity(Record):
    """A problem of answers, or a probe, and how often each server showed it."""

    name: str
    counts: dict[str, int]
    of: dict[str, int]
    concern: Annotated[bool, Meta(description="whether it should worry: more often on A than on B, or at all")]
    note: str


class Promise(Record):
    """A score that a recipe promises, beside A's."""

    suite: str
    promised: float
    of: Annotated[int, Meta(description="items that it was measured on")]
    source: str
    score: Annotated[float | None, Meta(description="of A; null if the suite was not asked")]
    low: Annotated[float | None, Meta(description="interval of the difference, 95 % for all promises together")]
    high: float | None
    verdict: Annotated[str, Meta(description="kept: nothing speaks against it; not kept; not asked")]


class Where(Record):
    stoker: str
    python: str
    platform: str
    started: Annotated[str, Meta(description="UTC, ISO 8601")]
    duration_s: float
    command: str
    servers: list[ServerFacts]


class Document(Record):
    kind: Literal["check"]
    version: Literal[1]
    suite: str
    seed: str
    thinking: Annotated[str, Meta(description="off, on, or: could not be switched off")]
    complete: Annotated[bool, Meta(description="false: interrupted; the same command goes on")]
    verdict: Annotated[
        str,
        Meta(description="worse, better, no difference found, undecided; scored (one server); nothing measured"),
    ]
    statement: Annotated[str, Meta(description="the verdict in words")]
    suites: list[Row]
    closeness: list[Closeness]
    max_kl: Annotated[float, Meta(description="the limit that closeness was held to")]
    sanity: list[Sanity]
    failed: Annotated[int, Meta(description="requests that failed, of all servers")]
    failures: Annotated[dict[str, dict[str, int]], Meta(description="by server and kind")]
    output_tokens: Annotated[dict[str, int], Meta(description="counted, by server")]
    notes: list[str]
    environment: Where
    answers: list[Asked]
    recipe: Annotated[str, Meta(description="whose promises these are (--recipe)")] = ""
    promises: Annotated[list[Promise], Meta(description="each score that the recipe expects")] = field(
        default_factory=list
    )
