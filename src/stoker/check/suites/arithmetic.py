"""Arithmetic and word problems whose answers are computed, not collected."""

from collections.abc import Callable
from fractions import Fraction
from random import Random

from stoker.check.items import Item, user
from stoker.check.words import coined, name

NAME = "arithmetic"
BARE = "\n\nAnswer with the number alone."
REASONED = "\n\nThink in a few short lines. Write the last line as: Answer: <number>"


def items(seed: str, count: int) -> list[Item]:
    found = []
    for place in range(count):
        rng = Random(f"{seed}/{NAME}/{place}")
        kind, make = list(KINDS.items())[place % len(KINDS)]
        question, answer = make(rng)
        bare = kind in ("sum", "product", "division")
        found.append(
            Item(
                id=f"{NAME}-{place}",
                suite=NAME,
                kind=kind,
                messages=user(question + (BARE if bare else REASONED)),
                checker="number",
                expect=float(answer) if answer != int(answer) else int(answer),
                max_tokens=32 if bare else 360,
                answer_tokens=8 if bare else 120,
            )
        )
    return found


def _sum(rng: Random) -> tuple[str, Fraction]:
    numbers = [rng.randint(100, 99_999) for _ in range(rng.choice((3, 4)))]
    signs = [1, *(rng.choice((1, -1)) for _ in numbers[1:])]
    shown = str(numbers[0]) + "".join(
        f" {'+' if s > 0 else '-'} {n}" for s, n in zip(signs[1:], numbers[1:], strict=True)
    )
    return f"What is {shown}?", Fraction(sum(s * n for s, n in zip(signs, numbers, strict=True)))


def _product(rng: Random) -> tuple[str, Fraction]:
    a, b = rng.randint(12, 99), rng.randint(103, 989)
    return f"What is {a} times {b}?", Fraction(a * b)


def _division(rng: Random) -> tuple[str, Fraction]:
    b, q, r = rng.randint(7, 49), rng.randint(20, 400), rng.randint(1, 6)
    return f"What is the remainder when {b * q + r} is divided by {b}?", Fraction(r)


def _expression(rng: Random) -> tuple[str, Fraction]:
    a, b, c, d, e = (rng.randint(2, 30) for _ in range(5))
    return f"What is ({a} + {b}) * {c} - {d} * ({e} - {a})?", Fraction((a + b) * c - d * (e - a))


def _shopping(rng: Random) -> tuple[str, Fraction]:
    who, one, two = name(rng), coined(rng), coined(rng)
    n, p, m, q = rng.randint(3, 14), rng.randint(2, 19), rng.randint(2, 9), rng.randint(21, 60)
    paid = (n * p + m * q) // 50 * 50 + 100
    return (
        f"{who} buys {n} {one}s at {p} euros each and {m} {two}s at {q} euros each and pays with {paid} euros. "
        "How many euros of change come back?",
        Fraction(paid - n * p - m * q),
    )


def _discount(rng: Random) -> tuple[str, Fraction]:
    price, off, more, pieces = rng.randint(4, 60) * 50, rng.choice((10, 20, 30)), rng.choice((5, 10)), rng.randint(2, 9)
    return (
        f"A {coined(rng)} costs {price} euros. Its price is lowered by {off} per cent, and of the lower price another "
        f"{more} per cent is taken off for members. What do {pieces} of them cost a member, in euros?",
        Fraction(price * (100 - off) * (100 - more) * pieces, 10_000),
    )


def _tank(rng: Random) -> tuple[str, Fraction]:
    into, out, hours = rng.randint(30, 90), rng.randint(5, 25), rng.randint(3, 9)
    extra, begun = rng.randint(2, 5), rng.randint(10, 99)
    return (
        f"A tank holds {begun} litres. Water flows in at {into} litres an hour and out at {out} litres an hour. After "
        f"{hours} hours the inflow is shut, the outflow goes on for {extra} hours more. How many litres are left?",
        Fraction(begun + (into - out) * hours - out * extra),
    )


def _ages(rng: Random) -> tuple[str, Fraction]:
    young, gap, times, years = rng.randint(4, 15), rng.randint(2, 9), rng.randint(2, 4), rng.randint(3, 12)
    a, b, c = name(rng), name(rng), name(rng)
    return (
        f"{a} is {young} years old. {b} is {gap} years older than {a}. {c} is {times} times as old as {b}. "
        f"How old will {c} be in {years} years?",
        Fraction((young + gap) * times + years),
    )


def _train(rng: Random) -> tuple[str, Fraction]:
    begin, minutes, stop = rng.randint(6, 12) * 60 + rng.randint(0, 59), rng.randint(45, 220), rng.randint(4, 25)
    late = rng.randint(3, 29)
    end = begin + minutes + stop + late
    return (
        f"A train leaves at {begin // 60}:{begin % 60:02}. It drives for {minutes} minutes, stands {stop} minutes at a "
        f"station on the way, and arrives {late} minutes late because of a signal. How many minutes after midnight "
        "does it arrive?",
        Fraction(end),
    )


def _shares(rng: Random) -> tuple[str, Fraction]:
    a, b, c, unit = rng.randint(1, 5), rng.randint(2, 7), rng.randint(1, 4), rng.randint(11, 90)
    one, two, three = name(rng), name(rng), name(rng)
    return (
        f"{one}, {two} and {three} share {(a + b + c) * unit} euros in the ratio {a} : {b} : {c}. {two} gives half of "
        f"that share to {three}. How many euros does {three} have then?",
        Fraction(c * unit) + Fraction(b * unit, 2),
    )


def _rows(rng: Random) -> tuple[str, Fraction]:
    rows, seats, more, empty = rng.randint(8, 20), rng.randint(9, 24), rng.randint(1, 3), rng.randint(5, 40)
    total = sum(seats + more * row for row in range(rows))
    return (
        f"A hall has {rows} rows. The first has {seats} seats, each further row has {more} more than the one before. "
        f"{empty} seats are empty. How many are taken?",
        Fraction(total - empty),
    )


def _average(rng: Random) -> tuple[str, Fraction]:
    count, mean = rng.randint(4, 9), rng.randint(20, 80)
    new = mean + (count + 1) * rng.randint(1, 6)
    return (
        f"The mean of {count} measurements is {mean}. One more measurement is {new}. What is the mean of all?",
        Fraction(count * mean + new, count + 1),
    )


KINDS: dict[str, Callable[[Random], tuple[str, Fraction]]] = {
    "sum": _sum,
    "shopping": _shopping,
    "product": _product,
    "discount": _discount,
    "division": _division,
    "tank": _tank,
    "expression": _expression,
    "ages": _ages,
    "train": _train,
    "shares": _shares,
    "rows": _rows,
    "average": _average,
}
