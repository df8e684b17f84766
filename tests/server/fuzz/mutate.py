"""Breaks a JSON value at any depth, and writes it, repeated keys and impossible numbers included."""

import copy
import json
from typing import Any

from tests.server.fuzz.draw import Draw, Raw

Path = tuple[str | int, ...]


class Repeated(dict):
    """An object whose keys all come twice, the second time with the values of `again`."""

    def __init__(self, first: dict[str, Any], again: Any) -> None:
        super().__init__(first)
        self.again = again


def encode(value: Any, ascii_only: bool = True) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        members = [
            f"{json.dumps(key, ensure_ascii=ascii_only)}:{encode(inner, ascii_only)}" for key, inner in value.items()
        ]
        if isinstance(value, Repeated):
            members += [f"{json.dumps(key)}:{encode(value.again, ascii_only)}" for key in value]
        return "{" + ",".join(members) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(encode(inner, ascii_only) for inner in value) + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


def odd_value(draw: Draw) -> Any:
    """What nobody expects where it is put."""
    kind = draw.weighted((4, "number"), (4, "text"), (3, "plain"), (1, "nested"))
    if kind == "number":
        return draw.choice(
            (
                Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("-1e999"), Raw("1e-999"),
                Raw("-0.0"), Raw("9" * 5000), Raw("1" + "0" * 400), Raw("01"), Raw("1."), Raw("+1"), Raw("0x10"),
                2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 2**1000, -1, 0, 1, 10**9, 1e39, 1e-45, 0.1,
            )
        )  # fmt: skip
    if kind == "text":
        return draw.choice(
            (
                "", " ", "\x00", "\x1b[2J\x07", "\ud800", "a\udc00b", "\ud83d", "\ufffe", "🙂" * 50, "ÿ", "'; --",
                "x" * 100_000, "é" * 30_000, "\n" * 5000, "\\" * 999, '"', "true", "null", "-1", "1e5", "NaN", "{}",
                "[]", "../../etc/passwd", "data:,", "http://127.0.0.1:1/", "a" * 65, "<tool_call>", draw.text(),
            )
        )  # fmt: skip
    if kind == "plain":
        return draw.choice((None, True, False, [], {}, [None], [[]], {"": None}, [1, "a", None], {"type": "text"}))
    depth = draw.choice((30, 200, 1500, 100_000))
    return Raw(draw.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth)))


def broken(draw: Draw, body: Any) -> Any:
    """A copy with one to four changes; most requests have one, so that the rest of them is still read."""
    body = copy.deepcopy(body)
    for number in range(draw.weighted((6, 1), (3, 2), (1, 4))):
        body = _changed(draw, body, grows=number == 0)  # twice would be millions of values
    return body


def _changed(draw: Draw, body: Any, grows: bool) -> Any:
    path = draw.choice(_paths(body))
    if not path:  # the body itself: seldom, for it hides everything else
        return odd_value(draw) if draw.chance(0.2) else body
    *outer, last = path
    parent = body
    for step in outer:
        parent = parent[step]
    kind = draw.weighted(
        (8, "odd"), (3, "remove"), (2, "wrap"), (2, "swap"), (2, "repeat"), (2, "rename"), (1, "many"), (2, "twice")
    )
    if kind == "remove":
        del parent[last]
    elif kind == "wrap":
        parent[last] = draw.choice(([parent[last]], {"value": parent[last]}, [[parent[last]]], encode(parent[last])))
    elif kind == "swap":
        parent[last] = copy.deepcopy(_at(body, draw.choice(_paths(body))))
    elif kind == "repeat" and grows and isinstance(parent[last], list):
        parent[last] = parent[last] * draw.choice((2, 10, 70, 2000))
    elif kind == "rename" and isinstance(parent, dict):
        value = parent.pop(str(last))
        parent[draw.choice((f"{last}s", str(last).upper(), f"{last}\x00", "", draw.text()))] = value
    elif kind == "many" and grows:
        parent[last] = draw.choice(([parent[last]] * 500, {str(i): parent[last] for i in range(500)}))
    elif kind == "twice" and isinstance(parent[last], dict):
        parent[last] = Repeated(parent[last], odd_value(draw))
    else:
        parent[last] = odd_value(draw)
    return body


def _paths(value: Any, at: Path = ()) -> list[Path]:
    """To every value within; of long lists only the first entries, so that none crowds out the others."""
    found: list[Path] = [at]
    if isinstance(value, dict):
        for key, inner in list(value.items())[:40]:
            found += _paths(inner, (*at, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value[:20]):
            found += _paths(inner, (*at, place))
    return found


def _at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value
