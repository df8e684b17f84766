"""Which box for a model: the same question asked of every box of the table, with evidence and prices."""

from dataclasses import dataclass, replace
from typing import Any

from stoker.errors import RequestError
from stoker.plan.answer import Answer, Question, answer
from stoker.plan.catalog import boxes
from stoker.plan.evidence import Row


@dataclass(frozen=True)
class Line:
    answer: Answer
    evidence: tuple[Row, ...]  # measured on that box

    def to_json(self) -> dict[str, Any]:
        a, box = self.answer, self.answer.box
        s = a.speed
        return {
            "box": box.key,
            "fits": a.fits,
            "weights": a.weights_key,
            "engine": a.ask.engine,
            "draft": str(a.ask.draft),
            "tokens_per_s": round(s.tokens_per_s, 1) if a.fits else None,
            "low": round(s.low, 1) if a.fits else None,
            "high": round(s.high, 1) if a.fits else None,
            "limit_tokens_per_s": round(s.limit, 1) if a.fits else None,
            "first_token_s": {str(k): round(v, 2) for k, v in a.first_token.items()} if a.fits else None,
            "free_bytes": a.budget.free_bytes,
            "price_usd": box.price_usd,
            "price_source": box.price_source or None,
            "power_w": box.power_w or None,
            "evidence": [row.to_json() for row in self.evidence],
        }


def which_box(question: Question) -> tuple[Line, ...]:
    """Those that fit, fastest first, then those that do not; of each box the format and drafter that `plan` takes."""
    found = []
    for box in boxes():
        try:
            planned = answer(replace(question, box=box.key))
        except RequestError:
            if question.weights or question.draft or question.engine:
                raise
            continue
        here = tuple(row for row in planned.evidence if (row.box, row.boxes) == box.of_rows)
        found.append(Line(planned, here))
    return tuple(sorted(found, key=lambda line: (not line.answer.fits, -line.answer.speed.tokens_per_s)))
