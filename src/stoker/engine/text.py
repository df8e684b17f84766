"""Tokens to text as they come, and stop strings.

The engine uses it to see where a stop string is complete, whoever shows text uses it to know what may be shown: both
read the same tokens and come to the same end.
"""

from collections.abc import Sequence
from typing import Any

HALF = "\ufffd"  # what bytes that are no character, or not yet one, are decoded to
KEPT = 4  # tokens that decoding goes on from: a character has at most 4 bytes, so none of them began before these


class TextDecoder:
    """Decodes a growing text token by token, looking back at no more than 2 * KEPT tokens. What comes out makes up the
    decoding of all tokens at once; only the last character is held back while it may be half of one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # the last ones
        self._text = ""  # of them ...
        self._shown = 0  # ... and how much of it is out

    def push(self, token: int) -> str:
        text = self._decode([*self._tokens, token])
        if text == self._text and not self._decode([token]):
            return ""  # a special token: it has no text, and looking back must not stop at it
        self._tokens.append(token)
        self._text = text
        sure = len(text) - text.endswith(HALF)
        piece, self._shown = text[self._shown : sure], max(self._shown, sure)
        if len(self._tokens) >= 2 * KEPT:
            held = len(text) - self._shown
            self._tokens = self._tokens[-KEPT:]
            self._text = self._decode(self._tokens)  # its beginning may differ, and is out
            self._shown = len(self._text) - held
        return piece

    def flush(self) -> str:
        """The half character at the end, if there is one."""
        rest, self._shown = self._text[self._shown :], len(self._text)
        return rest

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


class TextStream:
    """Text of one answer. Halves of a character, and text that may turn out to begin a stop string, are held back."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        """`tokenizer` is one of the `tokenizers` package."""
        self._decoder, self._stops = TextDecoder(tokenizer), stops
        self._held = ""  # a proper beginning of a stop string
        self.stopped: str | None = None  # the stop string that ended the text

    def push(self, token: int, may_stop: bool = True) -> str:
        """Text that can be shown now. Where stop strings overlap, the one that begins first counts.

        With `may_stop` false, a stop string that ends with this token is ordinary text.
        """
        piece = self._decoder.push(token)
        if not self._stops or not piece:
            return piece
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
        return self._release(len(self._held)) + self._decoder.flush()

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
