"""A long text with a few tokens behind it, read as one sequence without copying the long part.

A step looks at the text after each of its drafts; copying a text of 100,000 tokens for each would cost more than the
step.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload


class Extended(Sequence[int]):
    """`text` followed by `more`. Both may grow; the view grows with them."""

    def __init__(self, text: Sequence[int], more: Sequence[int]) -> None:
        self._text, self._more = text, more

    def __len__(self) -> int:
        return len(self._text) + len(self._more)

    def __iter__(self) -> Iterator[int]:
        return chain(self._text, self._more)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        border = len(self._text)
        if isinstance(index, slice):
            start, stop, stride = index.indices(len(self))
            if stride != 1:
                return [self[i] for i in range(start, stop, stride)]
            behind = slice(max(start - border, 0), max(stop - border, 0))
            return [*self._text[start : min(stop, border)], *self._more[behind]]
        if index < 0:
            index += len(self)
        if index < 0:
            raise IndexError("before the beginning")
        return self._text[index] if index < border else self._more[index - border]
