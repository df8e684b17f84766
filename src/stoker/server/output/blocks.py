"""Groups the pieces of an answer into consecutive blocks, as Anthropic's messages and OpenAI's responses have them."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from stoker.server.output.pieces import CallArguments, CallStart, Content, Piece, Reasoning

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    index: int
    kind: Kind
    name: str = ""  # of the called tool
    text: str = ""  # reasoning, text, or a call's arguments as JSON
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])


@dataclass(frozen=True)
class Opened:
    block: Block


@dataclass(frozen=True)
class Added:
    block: Block
    text: str


@dataclass(frozen=True)
class Closed:
    block: Block


Change = Opened | Added | Closed


class Blocks:
    """Turns pieces into changes of blocks. At most one block is open at a time."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.all if block.kind == "call"]

    def push(self, piece: Piece) -> Iterator[Change]:
        match piece:
            case Reasoning():
                yield from self._add("reasoning", piece.text)
            case Content():
                yield from self._add("text", piece.text)
            case CallStart():
                yield from self.finish()
                yield self._begin("call", piece.name)
            case CallArguments():
                yield from self._add("call", piece.text)

    def finish(self) -> Iterator[Change]:
        """Closes the open block, if there is one."""
        if self._open:
            block, self._open = self._open, None
            yield Closed(block)

    def _add(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self.finish()
            yield self._begin(kind)
        assert self._open is not None
        self._open.text += text
        yield Added(self._open, text)

    def _begin(self, kind: Kind, name: str = "") -> Opened:
        self._open = Block(len(self.all), kind, name)
        self.all.append(self._open)
        return Opened(self._open)
