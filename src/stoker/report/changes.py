"""What a check changed, as examples: items whose score differs between two servers, and the two answers as one text."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from stoker.check.checkers import Reply, parsed
from stoker.check.record import Asked

MOST_LOST, MOST_GAINED, MOST_ALIKE = 12, 6, 3
QUESTION, ANSWER, EXPECTED = 1500, 3000, 800  # characters shown
ALIKE = 0.25  # texts with less in common are shown one after the other


@dataclass(frozen=True)
class Side:
    """What a server said, or a piece of it: only A ("ins"), only B ("del"), or both ("")."""

    mark: str
    text: str


@dataclass(frozen=True)
class Example:
    name: str
    kind: str
    question: str
    expected: str
    notes: list[tuple[str, str]]  # the server, and what was wrong with its answer
    pieces: list[Side]


def said(reply: Reply) -> str:
    """An answer as text, its calls included; JSON in one form, so that white space is no difference."""
    calls = "\n".join(f"{call.get('name')}({_pretty(call.get('arguments') or '{}')})" for call in reply.calls)
    found = parsed(reply.text)
    text = json.dumps(found, ensure_ascii=False, indent=1) if isinstance(found, dict | list) else reply.text.strip()
    return "\n".join(part for part in (text, calls) if part)


def same_words(answers: Sequence[Asked]) -> tuple[int, int]:
    """Answers that are the same but for white space, of how many."""
    both = [asked for asked in answers if len(asked.replies) == 2 and _sound(asked)]
    return sum(map(_alike, both)), len(both)


def groups(answers: Sequence[Asked], two: bool) -> list[tuple[str, int, list[Example]]]:
    """Titles, how many there are, and the examples that are shown of them."""
    sound = [asked for asked in answers if _sound(asked)]
    if not two:
        wrong = [asked for asked in sound if (asked.replies["A"].score or 0) < 1]
        return [("Answers that were not wholly right", len(wrong), [example(each) for each in _some(wrong, MOST_LOST)])]
    lost = sorted((asked for asked in sound if _gain(asked) < 0), key=_gain)
    gained = sorted((asked for asked in sound if _gain(asked) > 0), key=lambda asked: -_gain(asked))
    other = [asked for asked in sound if _gain(asked) == 0 and not _alike(asked)]
    found = [
        ("Where A did worse", len(lost), _some(lost, MOST_LOST)),
        ("Where A did better", len(gained), _some(gained, MOST_GAINED)),
        ("Same score in other words", len(other), _some(other, MOST_ALIKE)),
    ]
    return [(title, count, [example(each) for each in shown]) for title, count, shown in found if count]


def example(asked: Asked) -> Example:
    texts = {server: clipped(said(judged.reply), ANSWER) or "(nothing)" for server, judged in asked.replies.items()}
    return Example(
        name=asked.id if asked.id.startswith(asked.suite) else f"{asked.suite} {asked.id}",
        kind=asked.kind,
        question=clipped(asked.question, QUESTION),
        expected="" if asked.expect is None else clipped(_pretty(asked.expect), EXPECTED),
        notes=[
            (server, "; ".join(part for part in (judged.why, ", ".join(judged.problems)) if part) or "right")
            for server, judged in sorted(asked.replies.items())
        ],
        pieces=merged(texts["B"], texts["A"]) if len(texts) == 2 else [Side("", texts["A"])],
    )


def merged(other: str, mine: str) -> list[Side]:
    """B's text as it becomes A's, word by word; texts that have little in common stay whole. White space counts as
    equal."""
    before, after = (re.findall(r"\w+|\s+|[^\w\s]", text) for text in (other, mine))
    keys = [[" " if word.isspace() else word for word in words] for words in (before, after)]
    found = SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    common = sum(word != " " for a, _, size in found.get_matching_blocks() for word in keys[0][a : a + size])
    if 2 * common < ALIKE * sum(word != " " for words in keys for word in words):
        return [Side("del", other), Side("", "\n"), Side("ins", mine)]
    pieces: list[Side] = []
    for kind, a, b, c, d in found.get_opcodes():
        if kind == "equal":
            pieces.append(Side("", "".join(after[c:d])))
            continue
        pieces += [Side("del", "".join(before[a:b]))] if b > a else []
        pieces += [Side("ins", "".join(after[c:d]))] if d > c else []
    return pieces


def clipped(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - most // 3]}\n…\n{text[-(most // 3) :]}"


def _some(found: Sequence[Asked], most: int) -> list[Asked]:
    """Suites take turns, so that no suite is without an example."""
    waiting: dict[str, list[Asked]] = {}
    for asked in found:
        waiting.setdefault(asked.suite, []).append(asked)
    taken: list[Asked] = []
    while len(taken) < most and any(waiting.values()):
        taken += [queue.pop(0) for queue in waiting.values() if queue]
    return taken[:most]


def _gain(asked: Asked) -> float:
    return (asked.replies["A"].score or 0.0) - (asked.replies["B"].score or 0.0)


def _alike(asked: Asked) -> bool:
    texts = [" ".join(said(judged.reply).split()) for judged in asked.replies.values()]
    return texts[0] == texts[-1]


def _sound(asked: Asked) -> bool:
    return all(judged.score is not None for judged in asked.replies.values())


def _pretty(value: Any) -> str:
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError:
            return value
        return json.dumps(found, ensure_ascii=False) if isinstance(found, dict) else value
    return json.dumps(value, ensure_ascii=False, indent=1 if len(str(value)) > 80 else None)
