"""The pieces of a parsed answer, in the order in which they were written."""

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
