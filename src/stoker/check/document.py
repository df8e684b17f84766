"""The result file: made from answers, written, read back, and compared. `python -m stoker.check.document` prints its
schema."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from stoker.check import sanity, verdict
from stoker.check.record import VERSION, Asked, Closeness, Document, Sanity, Where
from stoker.errors import BenchError


def document(
    suite: str,
    seed: str,
    answers: Sequence[Asked],
    where: Where,
    *,
    thinking: str = "off",
    complete: bool = True,
    closeness: Sequence[Closeness] = (),
    probes: Sequence[Sanity] = (),
    max_kl: float = verdict.MAX_KL,
    notes: Sequence[str] = (),
) -> Document:
    """Everything is computed from the answers, so a later version can judge an old file again."""
    servers = [server.name for server in where.servers]
    rows = verdict.rows(answers, two=len(servers) == 2)
    failures = {server: _failures(answers, server) for server in servers}
    failed = {server: sum(kinds.values()) for server, kinds in failures.items()}
    word, statement = verdict.verdict(rows, closeness, failed, len(answers), len(servers) == 2, max_kl)
    if not complete:
        statement += " The check was interrupted: this is what had been asked."
    return Document(
        kind="check",
        version=VERSION,
        suite=suite,
        seed=seed,
        thinking=thinking,
        complete=complete,
        verdict=word,
        statement=statement,
        suites=rows,
        closeness=list(closeness),
        max_kl=max_kl,
        sanity=[*sanity.summary(answers), *probes],
        failed=sum(failed.values()),
        failures=failures,
        output_tokens={
            server: sum(asked.replies[server].reply.tokens for asked in answers if server in asked.replies)
            for server in servers
        },
        notes=list(notes),
        environment=where,
        answers=list(answers),
    )


def _failures(answers: Sequence[Asked], server: str) -> dict[str, int]:
    kinds = (asked.replies[server].reply.failure for asked in answers if server in asked.replies)
    return dict(Counter(failure.partition(":")[0] for failure in kinds if failure))


def compared(before: Document, after: Document) -> Document:
    """Two checks as one: the later one's server is A, held against the earlier one's, on the items that both asked."""
    earlier = {(asked.suite, asked.id, asked.digest): asked for asked in before.answers}
    joined = [
        replace(asked, replies={"A": asked.replies["A"], "B": earlier[key].replies["A"]})
        for asked in after.answers
        if (key := (asked.suite, asked.id, asked.digest)) in earlier
    ]
    servers = [
        replace(after.environment.servers[0], name="A"),
        replace(before.environment.servers[0], name="B"),
    ]
    where = replace(
        after.environment, servers=servers, command=f"{before.environment.command} | {after.environment.command}"
    )
    alone = len(after.answers) - len(joined)
    notes = [f"{alone} of {len(after.answers)} items are not in the earlier check and were left out."] if alone else []
    if before.thinking != after.thinking:
        notes.append(f"Thinking was {before.thinking} before and is {after.thinking} now.")
    suite = after.suite if after.suite == before.suite else f"{before.suite} | {after.suite}"
    seed = after.seed if after.seed == before.seed else f"{before.seed} | {after.seed}"
    whole = before.complete and after.complete
    return document(suite, seed, joined, where, thinking=after.thinking, complete=whole, notes=notes)


def to_json(found: Document) -> str:
    """Rounded to microunits, which is enough and keeps the file short."""
    data = json.loads(msgspec.json.encode(found), parse_float=lambda text: round(float(text), 6))
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"


def is_check(path: Path) -> bool:
    """Whether a file is a check's result rather than a benchmark's. Unreadable files are for others to refuse."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("kind") == "check"


def load(path: Path) -> Document:
    try:
        data = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # also of text that is no UTF-8
        raise BenchError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != "check":
        raise BenchError(f"{path} was not written by stoker check")
    if data.get("version") != VERSION:
        raise BenchError(f"{path} has version {data.get('version')}; this stoker reads version {VERSION}")
    try:
        return msgspec.convert(data, Document)
    except msgspec.ValidationError as error:
        raise BenchError(f"{path} is not whole: {error}") from error


def schema() -> dict[str, Any]:
    """JSON Schema of the document."""
    _, defined = msgspec.json.schema_components([Document], ref_template="#/$defs/{name}")
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Result of stoker check",
        "description": "Scores are fractions. Formulas: docs/check.md. Generated by python -m stoker.check.document.",
    }
    return {**defined.pop("Document"), **head, "$defs": defined}


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
