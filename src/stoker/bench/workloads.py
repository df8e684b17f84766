"""The workloads, under the names that owners of such boxes publish; the prompts are ours.

A prompt is a salt, filler up to an exact number of tokens, and the task. A fresh salt at the very front keeps a cold
request cold; the same salt keeps a prefix warm.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from stoker.bench import texts
from stoker.bench.fit import fit

if TYPE_CHECKING:
    from stoker.bench.target import Target

Body = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    name: str
    prompt_tokens: int
    max_tokens: int
    tasks: tuple[str, ...]  # taken in turn, so that warm requests share a prefix but not a question
    filler: Callable[[Random], str] = texts.prose
    lead: str = "Background, which the task may or may not need:"
    wants_json: bool = False
    document: Callable[[Random], str] | None = None  # put into the task


_RECORDS = (
    "The text above is a log of repairs. Which places does it mention most, and what went wrong there?",
    "From the text above, describe in a few paragraphs which repairs were expensive and which reasons come up again.",
    "Write a summary of the text above for somebody who takes over the work tomorrow.",
)

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "Q&A",
            96,
            256,
            (
                "Why does ice float on water, and what would a lake look like in winter if it did not?",
                "What is the difference between weather and climate? Explain it to a curious ten-year-old.",
                "Why do bridges have gaps between their segments?",
            ),
        ),
        Workload(
            "Code",
            96,
            512,
            (
                "Write a Python function that finds a value in a sorted list by binary search, with type hints, a "
                "docstring and five tests.",
                "Write a Python class for a least-recently-used cache without using functools, with tests.",
                "Write a Python function that merges overlapping intervals, with type hints and five tests.",
            ),
        ),
        Workload(
            "JSON-KIE",
            384,
            320,
            (
                "Read this invoice and answer with one JSON object only, no other text. Keys: invoice_number, "
                "issue_date, seller, tax_number, buyer, items (name, quantity, unit_price, total), net, vat, total."
                "\n\n{document}",
            ),
            wants_json=True,
            document=texts.invoice,
        ),
        Workload(
            "Hungarian",
            160,
            320,
            (
                "Foglald össze kétszáz szóban, magyarul, mire való egy karbantartási napló, és mit érdemes bele írni.",
                "Írj kétszáz szót magyarul arról, hogyan készül fel egy üzem a télre.",
            ),
            filler=texts.hungarian,
            lead="Háttér a feladathoz:",
        ),
        Workload(
            "Math",
            96,
            64,
            (
                "A tank holds 480 litres and drains 35 litres in 4 minutes. After how many minutes are 200 left? "
                "Answer with the calculation in one line.",
                "Three pumps fill a pool in 6, 8 and 12 hours. How long do they take together? One line.",
            ),
        ),
        Workload(
            "JSON-1024",
            128,
            1024,
            (
                "Invent an inventory of a small workshop as JSON: an array of 24 objects with the keys id, name, "
                "category, quantity, unit_price, supplier (name, city) and tags (three strings). JSON only.",
            ),
            wants_json=True,
        ),
        Workload(
            "LongCode",
            160,
            2048,
            (
                "Write a complete Python module for a small library: books, members, loans and fines, kept in SQLite. "
                "With a command line to add, lend, return and search, docstrings, type hints, and unit tests.",
            ),
        ),
        Workload("Long-RAG-8K", 7500, 256, _RECORDS, lead="Documents:"),
        Workload("Long-RAG-32K", 30000, 256, _RECORDS, lead="Documents:"),
        Workload("Long-RAG-128K", 108000, 256, _RECORDS, lead="Documents:"),
    )
}
SHORT = ("Q&A", "Code", "JSON-KIE", "Hungarian")
SINGLE = (*SHORT, "Math", "JSON-1024", "LongCode", "Long-RAG-8K", "Long-RAG-32K")
MIXES = {
    "uniform_short": SHORT,
    "mixed_typical": ("Q&A", "Code", "JSON-KIE", "Long-RAG-8K"),
    "long_only_128k": ("Long-RAG-128K",),
}


@dataclass(frozen=True)
class Prompt:
    """A request ready to be sent."""

    workload: str
    body: Body
    tokens: int | None  # by the counter that fitted it
    wants_json: bool = False
    salt: str = ""

    def resalted(self, rng: Random) -> "Prompt":
        """The same prompt with another salt of the same shape: cold again, of the same length, and not counted anew."""
        fresh = _salt(rng)
        body = json.loads(json.dumps(self.body).replace(self.salt, fresh)) if self.salt else self.body
        return replace(self, body=body, salt=fresh if self.salt else "")


class Prompts:
    """Prompts fitted to one server."""

    def __init__(self, target: "Target", salt: str) -> None:
        self._target, self.rng = target, Random(salt)
        self._stable = _salt(Random(salt))
        self._fitted: dict[tuple[str, int], Prompt] = {}

    async def cold(self, workload: Workload, number: int = 0) -> Prompt:
        """A prompt whose beginning no server has seen."""
        task = number % len(workload.tasks)
        if self._target.counter.cheap:
            return await self._make(workload, _salt(self.rng), task)
        if (workload.name, task) not in self._fitted:  # counting costs a request, so it is done once per prompt
            self._fitted[workload.name, task] = await self._make(workload, _salt(self.rng), task)
        return self._fitted[workload.name, task].resalted(self.rng)

    async def warm(self, workload: Workload, number: int) -> Prompt:
        """The same beginning every time, another question at the end."""
        return await self._make(workload, self._stable, number % len(workload.tasks))

    async def _make(self, workload: Workload, salt: str, number: int) -> Prompt:
        task = workload.tasks[number]
        if workload.document is not None:
            task = task.format(document=workload.document(Random(f"{workload.name}/{number}")))

        def render(filler: str) -> Body:
            lead = f"{workload.lead}\n{filler}\n\n" if filler else ""
            content = f"Reference {salt}.\n\n{lead}{task}"
            return {"messages": [{"role": "user", "content": content}], "max_tokens": workload.max_tokens}

        # the same words behind every salt, so that runs differ by noise alone
        material = texts.Material(workload.filler, workload.name)
        body, tokens = await fit(render, material, workload.prompt_tokens, self._target.counter)
        return Prompt(workload.name, body, tokens, workload.wants_json, salt)


async def depth_prompts(
    target: "Target", name: str, salt: str, depth: int, pp: int, tg: int
) -> tuple[Prompt | None, Prompt]:
    """A context to be loaded, if `depth` is not 0, and a prompt of `pp` tokens more; answers have at most `tg`."""
    material = texts.Material(texts.prose, salt)
    context = ""

    def loading(filler: str) -> Body:
        return {"messages": [{"role": "system", "content": f"{salt} {filler}"}, {"role": "user", "content": "."}]}

    load: Prompt | None = None
    if depth:
        body, tokens = await fit(loading, material, depth, target.counter)
        context = body["messages"][0]["content"]
        load = Prompt(name, json.loads(json.dumps({**body, "max_tokens": tg})), tokens)

    def asking(filler: str) -> Body:
        before = [{"role": "system", "content": context}] if depth else []
        task = f"{'' if depth else salt} {filler}\n\nContinue this text in the same manner, at length."
        return {"messages": [*before, {"role": "user", "content": task}], "max_tokens": tg}

    more = texts.Material(texts.prose, f"{salt}+")
    body, tokens = await fit(asking, more, depth + pp, target.counter)
    return load, Prompt(name, body, tokens)


def fits(workload: Workload, context: int | None, max_tokens: int | None = None) -> bool:
    longest = min(workload.max_tokens, max_tokens or workload.max_tokens)
    return context is None or workload.prompt_tokens + longest <= context


def _salt(rng: Random) -> str:
    """Digits, which most tokenizers split into the same number of tokens whatever they are."""
    return " ".join(f"{rng.randint(0, 9999):04}" for _ in range(4))
