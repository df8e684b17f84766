"""Token ids of long texts, piece by piece: what was encoded before is not encoded again, the rest in parallel.

An agent sends its whole conversation with every turn. A text may be cut where the tokenizer would cut it anyway,
whatever stands around: byte-level BPE joins nothing across the words its pattern finds, and before a space between two
ASCII letters every pattern in `PATTERNS` begins a word. Tokenizers of any other kind encode texts as a whole.
"""

import json
import re
import threading
from array import array
from collections import OrderedDict
from typing import Any

PATTERNS = (
    # GPT-4's, and those of the Qwen family, the newer with combining marks as parts of words
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
    r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n+|\s+(?!\S)|\s+",  # the embedded model's
)
BETWEEN_WORDS = re.compile("(?<=[A-Za-z])(?= [A-Za-z])")
LEAST = 4096  # characters of a piece
KEPT = 16 << 20  # characters of pieces that are remembered, a few million tokens


class TextPieces:
    """Of one tokenizer of the `tokenizers` package. Threads may share it."""

    def __init__(self, tokenizer: Any, kept: int = KEPT) -> None:
        self._tokenizer, self._room = tokenizer, kept
        self._cuts = can_be_cut(json.loads(tokenizer.to_str()))
        self._known: OrderedDict[str, array[int]] = OrderedDict()  # the latest last
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """As the tokenizer would, without special tokens around."""
        pieces = cut(text) if self._cuts else [text]
        if len(pieces) == 1:
            return self._encode(pieces)[0].tolist()
        with self._lock:
            found = {piece: self._known[piece] for piece in pieces if piece in self._known}
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in found]
        found |= zip(missing, self._encode(missing), strict=True)
        self._remember({piece: found[piece] for piece in pieces[:-1]})  # the last grows with the text
        ids: array[int] = array("I")
        for piece in pieces:
            ids += found[piece]
        return ids.tolist()

    def _encode(self, texts: list[str]) -> "list[array[int]]":
        # of the ways to encode, the one that lets other threads go on meanwhile
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [array("I", each.ids) for each in encodings]

    def _remember(self, pieces: "dict[str, array[int]]") -> None:
        with self._lock:
            for piece, ids in pieces.items():
                if self._known.pop(piece, None) is None:
                    self._room -= len(piece)
                self._known[piece] = ids
            while self._room < 0:
                oldest, _ = self._known.popitem(last=False)
                self._room += len(oldest)


def cut(text: str) -> list[str]:
    """Places depend on what stands before them alone, so that a text that grows keeps its pieces."""
    pieces, start = [], 0
    while found := BETWEEN_WORDS.search(text, start + LEAST):
        pieces.append(text[start : found.start()])
        start = found.start()
    return [*pieces, text[start:]]


def can_be_cut(tokenizer: dict[str, Any]) -> bool:
    """What its tokenizer.json says. An added token that begins or ends with a letter, has a space or takes those around
    it could lie across a cut."""
    normalizer, model = tokenizer["normalizer"] or {"type": "NFC"}, tokenizer["model"]
    match tokenizer["pre_tokenizer"]:
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if pattern in PATTERNS:
            pass
        case _:
            return False
    added = [each["content"] for each in tokenizer["added_tokens"]]
    return (
        normalizer["type"] == "NFC"
        and (model["type"], model["dropout"]) == ("BPE", None)
        and not (tokenizer["truncation"] or tokenizer["padding"])
        and not any(" " in text or text[:1].isalpha() or text[-1:].isalpha() for text in added)
        and not any(each["lstrip"] or each["rstrip"] or each["single_word"] for each in tokenizer["added_tokens"])
    )
