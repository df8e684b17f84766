"""What is wrong with a checkpoint, in the same words for `stoker inspect`, which lists everything, and for loading,
which stops at the first error. No torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stoker.errors import CheckpointError, visible

LONGEST = 1000  # characters of a message; it may quote a file, whose contents may be of any length


@dataclass(frozen=True)
class Problem:
    """An error keeps the checkpoint from being loaded; a note is worth knowing. Both texts are safe to print."""

    severity: Literal["error", "note"]
    message: str  # one sentence
    file: str | None = None
    tensor: str | None = None  # the first, where several are affected
    fix: str = ""

    def __post_init__(self) -> None:
        for name in ("message", "fix"):
            text = visible(getattr(self, name), keep="")
            object.__setattr__(self, name, text if len(text) <= LONGEST else f"{text[:LONGEST]} …")


def refuse_errors(problems: Iterable[Problem], directory: Path) -> None:
    """Raises the first error, with the path of the file it is about."""
    problem = next((problem for problem in problems if problem.severity == "error"), None)
    if problem is None:
        return
    text, file = problem.message, problem.file
    if file and text.startswith(visible(file, keep="")):
        text = f"{directory}/{text}"
    elif not text.startswith(visible(str(directory), keep="")):
        text = f"{directory / file if file else directory}: {text}"
    raise CheckpointError(f"{text} {problem.fix}".rstrip())


def count(names: Sequence[Any], one: str = "", many: str = "") -> str:
    """ "1 tensor is", "3 tensors are": a number, its noun and what follows it."""
    return f"{len(names):,} tensor{one}" if len(names) == 1 else f"{len(names):,} tensors{many}"
