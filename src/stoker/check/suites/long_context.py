"""Needles and chains of facts in long texts, fitted to the server's own tokenizer."""

from random import Random

from stoker.check.items import Filler, Item, user
from stoker.check.words import code, name

NAME = "long context"
LENGTHS = (1_000, 4_000, 16_000, 32_000, 64_000, 100_000)
KINDS = ("needle", "two hops", "needle among alike", "three hops")
ASK = "{text}\n\nAnswer from the text above. {question} Answer with the {what} alone."


def items(seed: str, count: int, lengths: tuple[int, ...] = LENGTHS) -> list[Item]:
    found = []
    for place in range(count):
        rng = Random(f"{seed}/{NAME}/{place}")
        tokens, kind = lengths[place % len(lengths)], KINDS[place // len(lengths) % len(KINDS)]
        sentences, question, answer, what = _KINDS[kind](rng)
        depths = sorted(rng.uniform(0.02, 0.98) for _ in sentences)
        rng.shuffle(depths)
        found.append(
            Item(
                id=f"{NAME.replace(' ', '-')}-{tokens}-{place // len(lengths)}",
                suite=NAME,
                kind=f"{kind}, {tokens // 1000}K",
                messages=user(ASK.replace("{question}", question).replace("{what}", what)),
                checker="contains",
                expect=answer,
                max_tokens=64,
                answer_tokens=14,
                filler=Filler(tokens, f"{seed}/{place}", list(zip(depths, sentences, strict=True))),
            )
        )
    return found


_Made = tuple[list[str], str, str, str]


def _needle(rng: Random) -> _Made:
    who, key = name(rng), code(rng, "####-LL")
    return (
        [f"The locker of {who} opens with the code {key}."],
        f"With which code does the locker of {who} open?",
        key,
        "code",
    )


def _alike(rng: Random) -> _Made:
    people, keys = [name(rng) for _ in range(5)], [code(rng, "####-LL") for _ in range(5)]
    told = [f"The locker of {who} opens with the code {key}." for who, key in zip(people, keys, strict=True)]
    return told, f"With which code does the locker of {people[2]} open?", keys[2], "code"


def _two_hops(rng: Random) -> _Made:
    who, other, box, key = name(rng), name(rng), code(rng, "LL-###"), code(rng, "####-LL")
    told = [
        f"{who} keeps the spare keys in cabinet {box}.",
        f"Cabinet {box} opens with the code {key}.",
        f"Cabinet {code(rng, 'LL-###')} of {other} opens with the code {code(rng, '####-LL')}.",
    ]
    return told, f"Which code opens the cabinet in which {who} keeps the spare keys?", key, "code"


def _three_hops(rng: Random) -> _Made:
    who, chief, town, dish = name(rng), name(rng), name(rng), name(rng)
    told = [
        f"{who} reports to {chief}.",
        f"{chief} lives in the village of {town}.",
        f"The festival of {town} is called {dish}.",
        f"The festival of {name(rng)} is called {name(rng)}.",
    ]
    return (
        told,
        f"What is the festival called in the village where the person lives to whom {who} reports?",
        dish,
        "name",
    )


_KINDS = {"needle": _needle, "two hops": _two_hops, "needle among alike": _alike, "three hops": _three_hops}
