"""Which kernels and backends are known to work on a device, who says so, and where they contradict each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from stoker.plan.catalog import Box, read
from stoker.plan.models import Model
from stoker.sizes.step import Draft


@dataclass(frozen=True)
class Rule:
    id: str
    topic: str
    architecture: str
    applies_to: tuple[str, ...]
    works: bool
    statement: str
    engine: str
    date: str
    source: str
    superseded_by: str = ""


@dataclass(frozen=True)
class Finding:
    topic: str
    rules: tuple[Rule, ...]

    @property
    def standing(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if not rule.superseded_by)

    @property
    def conflicting(self) -> bool:
        return len({rule.works for rule in self.standing}) > 1

    @property
    def verdict(self) -> str:
        if self.conflicting:
            return "conflicting"
        return "works" if self.standing and self.standing[0].works else "does not work"

    def to_json(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "verdict": self.verdict,
            "evidence": [
                {"works": r.works, "statement": r.statement, "engine": r.engine, "date": r.date, "source": r.source,
                 "superseded_by": r.superseded_by or None}
                for r in self.rules
            ],
        }  # fmt: skip


@cache
def rules() -> tuple[Rule, ...]:
    return tuple(Rule(**{**entry, "applies_to": tuple(entry["applies_to"])}) for entry in read("compat.toml")["rule"])


def findings(box: Box, model: Model, weights: str, draft: Draft, engine: str) -> tuple[Finding, ...]:
    """What is known of this plan's device, format, layers and drafter, by topic."""
    tags = {"*", weights, f"*{engine}", f"*{draft.kind}"} | ({"*hybrid"} if model.delta else set())
    found: dict[str, list[Rule]] = {}
    for rule in rules():
        here = rule.architecture in ("any", box.architecture)
        llama = engine == "llama.cpp" and not any(tag == "*llama.cpp" for tag in rule.applies_to)
        if here and tags & set(rule.applies_to) and not llama:
            found.setdefault(rule.topic, []).append(rule)
    return tuple(Finding(topic, tuple(_by_date(of_topic))) for topic, of_topic in found.items())


def _by_date(of_topic: Sequence[Rule]) -> list[Rule]:
    return sorted(of_topic, key=lambda rule: rule.date, reverse=True)
