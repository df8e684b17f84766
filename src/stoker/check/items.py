"""An item: what is asked, and by what its answer is judged. Suites make items; files of one's own hold them as JSON."""

from typing import Annotated, Any

from msgspec import Meta, Struct

Message = dict[str, Any]


class Filler(Struct, frozen=True, forbid_unknown_fields=True):
    """Text around sentences that matter, as long as makes the prompt `tokens` long by the server's own tokenizer."""

    tokens: int
    seed: str
    sentences: list[tuple[float, str]]  # how far into the text, from 0 to 1, and the sentence


class Item(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    id: Annotated[str, Meta(description="names the item among all of its suite")]
    messages: Annotated[list[Message], Meta(description="as in a chat request")]
    checker: Annotated[str, Meta(description="one of stoker.check.checkers.CHECKERS")]
    expect: Annotated[Any, Meta(description="what the checker compares with")] = None
    suite: Annotated[str, Meta(description="items of one suite are one row of the result")] = ""
    kind: Annotated[str, Meta(description="a part of the suite: a layout, a language, a length")] = ""
    tools: list[dict[str, Any]] = []
    max_tokens: int = 256
    answer_tokens: Annotated[int, Meta(description="expected length of an answer; 0: half of max_tokens")] = 0
    language: Annotated[str, Meta(description="en, hu, de, fr, es, pl: the answer should be in it")] = ""
    filler: Filler | None = None

    @property
    def cost(self) -> int:
        """Output tokens that are set aside for it."""
        return self.answer_tokens or (self.max_tokens + 1) // 2


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def tokens_of(text: str) -> int:
    """Roughly, and rather too many: what an answer will cost before any server has counted it."""
    return round(len(text.encode()) / 2.8) + 4
