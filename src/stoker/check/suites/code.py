"""Python functions run against tests. Constants, names and inputs are drawn, so that no solution can be known by heart.

Expected results are computed here, by a reference that never enters the sandbox.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from stoker.check.items import Item, user
from stoker.check.words import coined, several

NAME = "code"
TASK = (
    "Write a Python function `{name}({parameters})`. {told}\n\nExample: {example}\n\nAnswer with one Python "
    "code block and no "
    "explanation. Use the standard library only; do not read input and do not print."
)


@dataclass(frozen=True)
class Problem:
    parameters: str
    told: str
    solve: Callable[..., Any]
    inputs: list[list[Any]]


def items(seed: str, count: int) -> list[Item]:
    found = []
    for place in range(count):
        rng = Random(f"{seed}/{NAME}/{place}")
        kind, make = list(PROBLEMS.items())[place % len(PROBLEMS)]
        problem = make(rng)
        function = f"{coined(rng)}_{coined(rng)}"
        cases = [[given, json.loads(json.dumps(problem.solve(*given)))] for given in problem.inputs]
        given, wanted = cases[0]
        shown = f"{function}({', '.join(map(repr, given))}) gives {wanted!r}"
        told = TASK.format(name=function, parameters=problem.parameters, told=problem.told, example=shown)
        found.append(
            Item(
                id=f"{NAME}-{place}",
                suite=NAME,
                kind=kind,
                messages=user(told),
                checker="python",
                expect={"function": function, "cases": cases},
                max_tokens=420,
                answer_tokens=140,
            )
        )
    return found


def _numbers(rng: Random, low: int = -30, high: int = 99, most: int = 12) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(3, most))]


def _filtered_sum(rng: Random) -> Problem:
    by, above = rng.randint(3, 7), rng.randint(5, 20)

    def solve(values: list[int]) -> int:
        return sum(v * v for v in values if v % by == 0 and v > above)

    told = f"It returns the sum of the squares of those values that are divisible by {by} and greater than {above}."
    return Problem("values", told, solve, [*([_numbers(rng)] for _ in range(7)), [[]]])


def _runs(rng: Random) -> Problem:
    least = rng.randint(2, 3)

    def solve(text: str) -> str:
        out, place = "", 0
        while place < len(text):
            end = place
            while end < len(text) and text[end] == text[place]:
                end += 1
            out += f"{text[place]}{end - place}" if end - place >= least else text[place:end]
            place = end
        return out

    told = (
        f"It shortens runs: {least} or more equal characters in a row become the character and the length of the run; "
        "shorter runs stay as they are."
    )
    texts = ["".join(rng.choice("abc") * rng.randint(1, 5) for _ in range(rng.randint(1, 6))) for _ in range(7)]
    return Problem("text", told, solve, [[text] for text in [*texts, ""]])


def _shift(rng: Random) -> Problem:
    by, kept = rng.randint(3, 11), rng.choice(("vowels", "capital letters"))

    def solve(text: str) -> str:
        def moved(sign: str) -> str:
            if not ("a" <= sign.lower() <= "z") or (sign in "aeiouAEIOU" if kept == "vowels" else sign.isupper()):
                return sign
            base = ord("A" if sign.isupper() else "a")
            return chr((ord(sign) - base + by) % 26 + base)

        return "".join(map(moved, text))

    told = (
        f"It moves each letter of the English alphabet {by} places on, z going on with a; {kept} and other signs stay."
    )
    texts = [" ".join(word.title() if rng.random() < 0.5 else word for word in several(rng, 3)) + "!" for _ in range(6)]
    return Problem("text", told, solve, [[text] for text in [*texts, "xyz XYZ", ""]])


def _intervals(rng: Random) -> Problem:
    gap = rng.randint(2, 5)

    def solve(spans: list[list[int]]) -> list[list[int]]:
        out: list[list[int]] = []
        for low, high in sorted(spans):
            if out and low - out[-1][1] <= gap:
                out[-1][1] = max(out[-1][1], high)
            else:
                out.append([low, high])
        return out

    def spans() -> list[list[int]]:
        return [[low, low + rng.randint(0, 9)] for low in (rng.randint(0, 60) for _ in range(rng.randint(1, 7)))]

    told = (
        f"`spans` is a list of [low, high]. It merges spans that overlap or lie at most {gap} apart (next low minus "
        "high) and returns the merged ones sorted, as lists."
    )
    return Problem("spans", told, solve, [*([spans()] for _ in range(7)), [[]]])


def _stack(rng: Random) -> Problem:
    push, add, swap, double = several(rng, 4)

    def solve(program: str) -> list[int]:
        stack: list[int] = []
        for word in program.split():
            if word.startswith(push):
                stack.append(int(word[len(push) :]))
            elif word == add and len(stack) > 1:
                stack.append(stack.pop() + stack.pop())
            elif word == swap and len(stack) > 1:
                stack[-1], stack[-2] = stack[-2], stack[-1]
            elif word == double and stack:
                stack.append(2 * stack.pop())
        return stack

    def program() -> str:
        return " ".join(
            rng.choice((f"{push}{rng.randint(1, 9)}", f"{push}{rng.randint(1, 9)}", add, swap, double))
            for _ in range(rng.randint(3, 10))
        )

    told = (
        "It runs a little program on a stack and returns the stack as a list, top last. Words are separated "
        "by spaces: "
        f"'{push}N' pushes the number N, '{add}' replaces the two topmost by their sum, '{swap}' exchanges the two "
        f"topmost, '{double}' doubles the topmost. A word that finds too few numbers does nothing."
    )
    return Problem("program", told, solve, [[text] for text in [*(program() for _ in range(7)), ""]])


def _totals(rng: Random) -> Problem:
    key, amount, least = coined(rng), coined(rng), rng.randint(20, 60)

    def solve(rows: list[dict[str, Any]]) -> list[list[Any]]:
        sums: dict[str, int] = {}
        for row in rows:
            sums[row[key]] = sums.get(row[key], 0) + row[amount]
        return [[k, v] for k, v in sorted(sums.items(), key=lambda kv: (-kv[1], kv[0])) if v >= least]

    def rows() -> list[dict[str, Any]]:
        return [{key: rng.choice("pqrs"), amount: rng.randint(1, 50)} for _ in range(rng.randint(2, 8))]

    told = (
        f"Each row is a dict with '{key}' (a string) and '{amount}' (a number). It adds up '{amount}' by '{key}' and "
        f"returns [key, sum] lists for sums of at least {least}, the largest sum first, equal sums by key."
    )
    return Problem("rows", told, solve, [*([rows()] for _ in range(7)), [[]]])


def _grid(rng: Random) -> Problem:
    wide, high = rng.randint(3, 6), rng.randint(3, 6)
    north, south, east, west = rng.sample("abcdefgh", 4)

    def solve(moves: str) -> list[int]:
        x = y = 0
        for move in moves:
            x = (x + (move == east) - (move == west)) % wide
            y = min(max(y + (move == north) - (move == south), 0), high - 1)
        return [x, y]

    told = (
        f"It moves a piece on a board of {wide} columns and {high} rows, beginning at column 0, row 0, and returns "
        f"[column, row]. '{north}' adds a row, '{south}' takes one, '{east}' adds a column, '{west}' takes "
        "one. Columns "
        "wrap around; a move off the first or last row does nothing."
    )
    moves = ["".join(rng.choice(north + south + east + west) for _ in range(rng.randint(3, 14))) for _ in range(7)]
    return Problem("moves", told, solve, [[text] for text in [*moves, ""]])


def _base(rng: Random) -> Problem:
    signs = "".join(rng.sample("mnpqrstuvwxz", rng.randint(3, 6)))

    def solve(number: int) -> str:
        out = signs[0] if number == 0 else ""
        while number:
            number, rest = divmod(number, len(signs))
            out = signs[rest] + out
        return out

    told = (
        f"It writes a number of at least 0 in base {len(signs)} with the digits {', '.join(signs)} (the first "
        "is zero), "
        "most significant digit first."
    )
    return Problem("number", told, solve, [[n] for n in [*(rng.randint(1, 5000) for _ in range(7)), 0]])


def _window(rng: Random) -> Problem:
    size, limit = rng.randint(2, 4), rng.randint(60, 140)

    def solve(values: list[int]) -> int:
        sums = [sum(values[p : p + size]) for p in range(len(values) - size + 1)]
        return next((place for place, total in enumerate(sums) if total > limit), -1)

    told = f"It returns the index at which the first {size} neighbouring values begin whose sum exceeds {limit}, or -1."
    return Problem("values", told, solve, [*([_numbers(rng)] for _ in range(7)), [[]]])


def _settings(rng: Random) -> Problem:
    between, equals, mark = rng.choice(";|/"), rng.choice(":=~"), rng.choice("#!%")

    def solve(text: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in text.split(between):
            name, sign, value = part.partition(equals)
            if sign and not name.strip().startswith(mark):
                kept = value.strip()
                found[name.strip()] = int(kept) if kept.isdigit() else kept
        return found

    def text() -> str:
        parts = [
            rng.choice(
                (
                    f"{coined(rng)} {equals} {rng.randint(0, 99)}",
                    f"{coined(rng)}{equals}{coined(rng)}",
                    f"{mark}{coined(rng)}{equals}1",
                    coined(rng),
                )
            )
            for _ in range(rng.randint(2, 6))
        ]
        return between.join(parts)

    told = (
        f"It reads settings from a text into a dict. Parts are separated by '{between}'; each is a name and a "
        "value with "
        f"'{equals}' between them, spaces around both removed. Parts without '{equals}' and those whose name "
        "begins with "
        f"'{mark}' are left out. Values of digits only become int. A later value replaces an earlier one."
    )
    return Problem("text", told, solve, [[given] for given in [*(text() for _ in range(7)), ""]])


PROBLEMS: dict[str, Callable[[Random], Problem]] = {
    "filtered sum": _filtered_sum,
    "runs": _runs,
    "shift": _shift,
    "intervals": _intervals,
    "stack": _stack,
    "totals": _totals,
    "grid": _grid,
    "base": _base,
    "window": _window,
    "settings": _settings,
}
