"""The pieces of a parsed answer, in the order in which they were written."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a tool call. Its arguments follow as pieces of one JSON object."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


Piece = Reasoning | Content | CallStart | CallArguments


@dataclass
class Call:
    name: str
    arguments: str = ""


@dataclass
class Message:
    """A complete answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        match piece:
            case Reasoning():
                self.reasoning += piece.text
            case Content():
                self.content += piece.text
            case CallStart():
                self.calls.append(Call(piece.name))
            case CallArguments():
                self.calls[piece.index].arguments += piece.text


def partial_tag(tags: Iterable[str], text: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of a tag, and so must be held back."""
    found = 0
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), found, -1):
            if text.endswith(tag[:size]):
                found = size
                break
    return found
