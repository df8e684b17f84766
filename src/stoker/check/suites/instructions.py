"""Instructions whose keeping can be verified: lengths, formats, words that must or must not occur."""

from collections.abc import Callable
from random import Random
from typing import Any

from stoker.check.items import Item, user
from stoker.check.words import coined, name

NAME = "instructions"
TOPICS = (
    "why tools should be cleaned after use",
    "how to store apples over the winter",
    "what a night watchman does",
    "why a bridge needs inspection",
    "how to pack glass for the post",
    "what makes a good recipe",
    "how a lock on a canal works",
    "why maps have a scale",
    "how to choose a ladder",
    "what to do when a fuse blows",
)
WORDS = ("careful", "morning", "weight", "paper", "neighbour", "winter", "measure", "simple")
Rule = dict[str, Any]


def items(seed: str, count: int) -> list[Item]:
    found = []
    for place in range(count):
        rng = Random(f"{seed}/{NAME}/{place}")
        first, *others = SETS[place % len(SETS)]
        made = [make(rng) for make in (first, *others)]
        told = " ".join(words for words, _ in made)
        found.append(
            Item(
                id=f"{NAME}-{place}",
                suite=NAME,
                kind=" + ".join(rule["rule"] for _, rule in made),
                messages=user(f"Write to {name(rng)} about this: {rng.choice(TOPICS)}. {told}"),
                checker="rules",
                expect=[rule for _, rule in made],
                max_tokens=260,
                answer_tokens=85,
            )
        )
    return found


def _lines(rng: Random) -> tuple[str, Rule]:
    count = rng.randint(3, 6)
    return f"Write exactly {count} lines, with no empty line between them.", {"rule": "lines", "count": count}


def _bullets(rng: Random) -> tuple[str, Rule]:
    count = rng.randint(3, 6)
    return f"Answer with exactly {count} bullet points, each beginning with '- '.", {"rule": "bullets", "count": count}


def _most_words(rng: Random) -> tuple[str, Rule]:
    most = rng.choice((25, 40, 60))
    return f"Use at most {most} words.", {"rule": "words", "most": most}


def _sentences(rng: Random) -> tuple[str, Rule]:
    count = rng.randint(2, 5)
    return f"Write exactly {count} sentences.", {"rule": "sentences", "count": count}


def _lower(rng: Random) -> tuple[str, Rule]:
    return "Use small letters only, no capitals anywhere.", {"rule": "lower case"}


def _upper(rng: Random) -> tuple[str, Rule]:
    return "USE CAPITAL LETTERS ONLY.", {"rule": "upper case"}


def _no_comma(rng: Random) -> tuple[str, Rule]:
    return "Use no comma.", {"rule": "without", "text": ","}


def _contains(rng: Random) -> tuple[str, Rule]:
    word, times = rng.choice(WORDS), rng.randint(1, 3)
    how = "once" if times == 1 else f"exactly {times} times"
    return f"The word '{word}' must occur {how}.", {"rule": "word", "word": word, "times": times}


def _coined(rng: Random) -> tuple[str, Rule]:
    word = coined(rng, 3)
    return f"The made-up word '{word}' must occur once.", {"rule": "word", "word": word, "times": 1}


def _ends(rng: Random) -> tuple[str, Rule]:
    text = f"End of note {rng.randint(10, 99)}."
    return f"End with exactly this: {text}", {"rule": "ends", "text": text}


def _begins(rng: Random) -> tuple[str, Rule]:
    text = f"Note {rng.randint(10, 99)}:"
    return f"Begin with exactly this: {text}", {"rule": "begins", "text": text}


def _json(rng: Random) -> tuple[str, Rule]:
    keys = rng.sample(("title", "reason", "steps", "risk", "tools", "time"), 3)
    return (
        f"Answer with one JSON object and nothing else. Its keys are {', '.join(keys)}; each value is a string.",
        {"rule": "json keys", "keys": sorted(keys)},
    )


def _quoted(rng: Random) -> tuple[str, Rule]:
    return 'Put the whole answer between double quotation marks (").', {"rule": "quoted"}


SETS: tuple[tuple[Callable[[Random], tuple[str, Rule]], ...], ...] = (
    (_lines, _no_comma),
    (_bullets, _most_words),
    (_most_words, _ends),
    (_json,),
    (_sentences, _contains),
    (_lower, _most_words),
    (_begins, _sentences),
    (_upper, _most_words),
    (_bullets, _coined),
    (_most_words, _quoted),
)
