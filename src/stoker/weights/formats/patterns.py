"""Matches the regular expressions of a quantization_config against the names of all layers. No torch.

Both come from files, and some patterns take years on some names. They are matched in a child process that may use
`SECONDS` of processor time, all in one call.
"""

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from stoker.errors import CheckpointError, brief
from stoker.sandbox import Sandbox, SandboxError

SECONDS = 5.0  # of processor time; fifty patterns on the 92,000 layers of a large model take two
LONGEST = 1000  # characters of a pattern
MOST = 10_000  # patterns
How = Literal["search", "match", "fullmatch"]


@dataclass(frozen=True)
class Pattern:
    text: str  # the regular expression
    entry: str  # the entry of the config it came from


class Patterns:
    """Collects lists of patterns, and matches them all when the first name is asked about."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._lists: list[tuple[str, How, list[Pattern]]] = []
        self._found: list[dict[str, str]] | None = None

    def first(self, field: str, how: How, patterns: Sequence[Pattern]) -> Callable[[str], str | None]:
        """A function from a name to the entry of the first pattern that matches it, or None."""
        place = len(self._lists)
        self._lists.append((field, how, list(patterns)))
        return lambda name: self._matched()[place].get(name)

    def _matched(self) -> list[dict[str, str]]:
        if self._found is None:
            self._found = self._match()
        return self._found

    def _match(self) -> list[dict[str, str]]:
        if not any(patterns for _, _, patterns in self._lists):
            return [{} for _ in self._lists]
        if (total := sum(len(patterns) for _, _, patterns in self._lists)) > MOST:
            raise CheckpointError(f"quantization_config holds {total:,} patterns, expected at most {MOST:,}.")
        for field, _, patterns in self._lists:
            for pattern in patterns:
                if len(pattern.text) > LONGEST:
                    raise CheckpointError(
                        f"quantization_config {field} has a pattern of {len(pattern.text):,} characters, "
                        f"{brief(pattern.entry)}; expected at most {LONGEST:,}."
                    )
        work = [(how, [pattern.text for pattern in patterns]) for _, how, patterns in self._lists]
        sandbox = Sandbox()
        try:
            answer = sandbox.call(first_matches, work, list(self._names), SECONDS, timeout=20 * SECONDS)
        except SandboxError as error:
            fields = ", ".join(dict.fromkeys(field for field, _, patterns in self._lists if patterns))
            raise CheckpointError(
                f"the patterns of quantization_config ({fields}) cannot be matched: {error}"
            ) from None
        finally:
            sandbox.close()
        if "at" in answer:
            field, _, patterns = self._lists[answer["at"][0]]
            entry = brief(patterns[answer["at"][1]].entry)
            raise CheckpointError(f"quantization_config {field} has {entry}, {answer['reason']}.")
        return [
            {self._names[index]: patterns[at].entry for index, at in found}
            for found, (_, _, patterns) in zip(answer["found"], self._lists, strict=True)
        ]


class _TooLong(Exception):
    pass


def first_matches(work: Sequence[tuple[How, Sequence[str]]], names: Sequence[str], seconds: float) -> dict[str, Any]:
    """In the child. {"found": per list of patterns, pairs of a name's index and that of the first pattern that fits},
    or {"at": (list, pattern), "reason": ...} for a pattern that is invalid, or at work when time was up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    signal.signal(signal.SIGVTALRM, stop)  # the regex engine checks for signals now and then
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    at = (0, 0)
    found: list[list[tuple[int, int]]] = []
    try:
        for which, (how, patterns) in enumerate(work):
            matched, remaining = [], list(range(len(names)))
            for place, text in enumerate(patterns):
                at = (which, place)
                fits = getattr(re.compile(text), how)
                kept = []
                for index in remaining:
                    if fits(names[index]):
                        matched.append((index, place))
                    else:
                        kept.append(index)
                remaining = kept
            found.append(matched)
    except _TooLong:
        return {"at": at, "reason": f"which took more than {seconds:g} s to match against the names of the layers"}
    except (re.error, RecursionError, OverflowError) as error:
        return {"at": at, "reason": f"which is no valid pattern: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return {"found": found}
