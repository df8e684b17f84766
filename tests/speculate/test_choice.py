"""`--draft` in all its forms."""

import pytest

from stoker.errors import RequestError
from stoker.speculate.choice import DraftChoice


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("none", DraftChoice((), 0)),
        ("mtp:2", DraftChoice(("mtp",), 2)),
        ("lookup+dflash:12", DraftChoice(("lookup", "dflash"), 12)),
        ("mtp:auto", DraftChoice(("mtp",), 8, adaptive=True)),
        ("lookup+dflash:auto", DraftChoice(("lookup", "dflash"), 15, adaptive=True)),
        ("auto", DraftChoice((), 16, adaptive=True, best=True)),
        ("mtp:3,vocab=2048", DraftChoice(("mtp",), 3, vocab=2048)),
        ("dflash:auto,head=int4,weights=int8", DraftChoice(("dflash",), 15, adaptive=True, head=4, weights=8)),
        ("auto,vocab=1000", DraftChoice((), 16, adaptive=True, best=True, vocab=1000)),
    ],
)
def test_forms(text: str, choice: DraftChoice) -> None:
    assert DraftChoice.parse(text) == choice


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mtp", "expected none, auto, or mtp:K"),
        ("mtp:-1", "expected none, auto, or mtp:K"),
        ("mtp+lookup:2", "expected none, auto, or mtp:K"),
        ("mtp:²", "expected none, auto, or mtp:K"),
        ("mtp:2,vocab=²", "vocab is '²', expected a number of tokens"),
        ("mtp:9", "mtp drafts 1 to 8 tokens a step, not 9"),
        ("dflash:0", "dflash drafts 1 to 15 tokens a step, not 0"),
        ("mtp:2,vocab=few", "vocab is 'few', expected a number of tokens"),
        ("mtp:2,head=int3", "head is 'int3', expected int8 or int4"),
        ("mtp:2,speed=9", "'speed' is unknown"),
        ("lookup:4,vocab=9", "vocab is an option of mtp and dflash"),
        ("none,head=int8", "head is an option of mtp and dflash"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_could_be(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        DraftChoice.parse(text)
