"""Coined names: made of syllables, so that no model has met them and nothing can be known by heart."""

from random import Random

_BEGIN = (
    "b",
    "br",
    "d",
    "dr",
    "f",
    "g",
    "gl",
    "h",
    "k",
    "kr",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "z",
)
_VOWEL = ("a", "e", "i", "o", "u", "a", "e", "o")
_END = ("", "", "l", "n", "r", "s", "m", "x", "nd", "rt")


def coined(rng: Random, syllables: int = 2) -> str:
    return "".join(rng.choice(_BEGIN) + rng.choice(_VOWEL) for _ in range(syllables)) + rng.choice(_END)


def several(rng: Random, count: int, syllables: int = 2) -> list[str]:
    """Different from each other."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[coined(rng, syllables)] = None
    return list(found)


def name(rng: Random) -> str:
    return coined(rng, rng.choice((2, 2, 3))).title()


def code(rng: Random, form: str = "LL-####") -> str:
    """L is a letter, # a digit; letters that look like digits are left out."""
    return "".join(
        rng.choice("ABCDEFGHKMNPRSTVWX") if sign == "L" else rng.choice("0123456789") if sign == "#" else sign
        for sign in form
    )


def listed(text: str, between: str = " ") -> tuple[str, ...]:
    """Words of a text."""
    return tuple(text.split(between))
