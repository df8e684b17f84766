"""Tokens to text as they come, and stop strings.

The engine uses it to see where a stop string is complete, whoever shows text uses it to know what may be shown: both
read the same tokens and come to the same end.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """Text of one answer. Halves of a character, and text that may turn out to begin a stop string, are held back."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        """`tokenizer` is one of the `tokenizers` package."""
        self._tokenizer, self._stops = tokenizer, stops
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held = ""  # a proper beginning of a stop string
        self._undecoded: list[int] = []  # tokens since text last came out
        self.stopped: str | None = None  # the stop string that ended the text

    def push(self, token: int, may_stop: bool = True) -> str:
        """Text that can be shown now. Where stop strings overlap, the one that begins first counts.

        With `may_stop` false, a stop string that ends with this token is ordinary text.
        """
        piece = self._stream.step(self._tokenizer, token)
        if piece is None:
            self._undecoded.append(token)
            return ""
        self._undecoded = []
        if not self._stops:
            return str(piece)
        before, self._held = len(self._held), self._held + piece
        if may_stop:
            for start, stop in sorted(
                (self._held.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stops
            ):
                if start >= 0:
                    self.stopped = stop
                    return self._release(start)
        return self._release(len(self._held) - self._may_begin_a_stop())

    def flush(self) -> str:
        """What was held back, once no more tokens come; nothing of a stop string."""
        if self.stopped is not None:
            return ""
        rest = self._tokenizer.decode(self._undecoded, skip_special_tokens=True) if self._undecoded else ""
        return self._release(len(self._held)) + rest

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _may_begin_a_stop(self) -> int:
        """Length of the longest end of the held text that is a beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
