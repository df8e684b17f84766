"""Simple sums, in figures and in words. Some pairs of operands are kept out of training."""

import random

from training.data import words
from training.data.sample import Chat, Split, assistant, user


def held_out(a: int, b: int) -> bool:
    """One pair in 17 belongs to the held-out splits, in either order."""
    return (min(a, b) * 31 + max(a, b)) % 17 == 0


def _operands(rng: random.Random, kind: str) -> tuple[int, int]:
    top = 12 if kind == "*" else rng.choice([10, 20, 100, 100, 1000])
    a, b = rng.randint(0, top), rng.randint(0, top)
    return (max(a, b), min(a, b)) if kind == "-" else (a, b)


def make(split: Split, index: int) -> Chat:
    rng = words.rng_for("arithmetic", split, index)
    kind = rng.choice("+++---*c")
    a, b = _operands(rng, kind)
    while held_out(a, b) != (split != "train"):
        a, b = _operands(rng, kind)
    name, thing = rng.choice(words.FIRST_NAMES), rng.choice(words.NOUNS)
    if kind == "+":
        forms = [f"What is {a} + {b}?", f"{a}+{b}=", f"{name} has {a} {thing}s and gets {b} more. How many now?",
                 f"Mennyi {a} meg {b}?", f"Add {a} and {b}."]  # fmt: skip
        result = str(a + b)
    elif kind == "-":
        forms = [f"What is {a} - {b}?", f"{a}-{b}=", f"{name} had {a} {thing}s and gave away {b}. How many are left?",
                 f"Mennyi {a} mínusz {b}?"]  # fmt: skip
        result = str(a - b)
    elif kind == "*":
        forms = [f"What is {a} times {b}?", f"{a}*{b}=", f"{a} boxes hold {b} {thing}s each. How many {thing}s?",
                 f"Mennyi {a} szorozva ezzel: {b}?"]  # fmt: skip
        result = str(a * b)
    else:
        forms = [f"Which is larger, {a} or {b}?", f"Melyik a nagyobb: {a} vagy {b}?"]
        result = str(max(a, b))
    return Chat([user(rng.choice(forms)), assistant(result)])
