"""The schema of a string that a call contains as plain text, as a terminal of the call's grammar.

Under every keyword of JSON schema, the allowed strings are a regular language, so `allOf`, `anyOf`, `oneOf` and `not`
are enforced exactly. A schema that cannot be enforced raises `Unenforceable`.
"""

import re
from collections.abc import Mapping
from typing import Any

from stoker.server.output.tool_schemas import target

ANY = "ANY_TEXT"
ANY_RULE = f"{ANY}: /(?s:.*)/"
_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_WORD = r"[0-9A-Fa-f]{1,4}"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": r"P(?:[0-9]+W|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D"
    r"|(?:[0-9]+D)?T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))",
    "email": rf"[A-Za-z0-9!#$%&'*+=?^_`{{|}}~-]+(?:\.[A-Za-z0-9!#$%&'*+=?^_`{{|}}~-]+)*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": "|".join(
        [rf"(?:{_WORD}:){{7}}{_WORD}", rf"::(?:{_WORD}(?::{_WORD}){{0,6}})?"]
        + [rf"{_WORD}(?::{_WORD}){{{n}}}::(?:{_WORD}(?::{_WORD}){{0,{5 - n}}})?" for n in range(6)]
    ),
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    # URIs without fragment, user and port, so that everything that matches is a valid URI
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:(?:\/\/[A-Za-z0-9.-]+)?(?:\/(?:[A-Za-z0-9._~:@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+)+",
}
UNENFORCEABLE = ("if", "$dynamicRef", "$recursiveRef")


class Unenforceable(Exception):
    """A schema that cannot be enforced by a grammar; the message names the keyword."""


class TextRules:
    """Grammar expressions for the string schemas of one tool. References become terminals, defined in `lines`."""

    def __init__(self, root: Any, prefix: str) -> None:
        """`prefix`, in capitals, begins the names of the terminals."""
        self.lines: list[str] = []
        self._root, self._prefix = root, prefix
        self._references: dict[str, str | None] = {}
        self._open: set[str] = set()

    def expression(self, schema: Any) -> str | None:
        """The expression for strings that this schema allows; None if it allows none."""
        if not isinstance(schema, Mapping):
            return ANY if schema is not False else None
        for keyword in UNENFORCEABLE:
            if keyword in schema:
                raise Unenforceable(f"{keyword} cannot be enforced")
        parts = [self._own(schema)]
        if "$ref" in schema:
            parts.append(self._reference(schema["$ref"]))
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword in schema:
                if not isinstance(schema[keyword], list):
                    raise Unenforceable(f"{keyword} is not a list")
                choices = [self.expression(entry) for entry in schema[keyword]]
                parts.append({"allOf": _all, "anyOf": _any, "oneOf": _one}[keyword](choices))
        if "not" in schema:
            parts.append(_not(self.expression(schema["not"])))
        return _all(parts)

    def _own(self, schema: Mapping[str, Any]) -> str | None:
        named = schema.get("type", "string")
        if named != "string" and not (isinstance(named, list) and "string" in named):
            return None
        parts: list[str | None] = []
        if "enum" in schema:
            choices = schema["enum"] if isinstance(schema["enum"], list) else []
            parts.append(_any([literal(entry) for entry in choices if isinstance(entry, str)]))
        if "const" in schema:
            parts.append(literal(schema["const"]) if isinstance(schema["const"], str) else None)
        if "pattern" in schema:
            parts.append(regex(whole_pattern(schema["pattern"])))
        if "format" in schema:
            if schema["format"] not in FORMATS:
                raise Unenforceable(f"format {str(schema['format'])[:50]!r} cannot be enforced")
            parts.append(regex(FORMATS[schema["format"]]))
        if "minLength" in schema or "maxLength" in schema:
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            if not all(entry == "" or (isinstance(entry, int) and entry >= 0) for entry in (least, most)):
                raise Unenforceable("minLength and maxLength are numbers of characters")
            if most != "" and most < least:
                return None
            parts.append(regex(f"(?s:.{{{least},{most}}})"))
        return _all(parts)

    def _reference(self, reference: Any) -> str | None:
        found = target(self._root, reference)
        if found is None:
            raise Unenforceable(f"$ref {str(reference)[:100]!r} points to nothing within the schema")
        if reference in self._open:
            raise Unenforceable(f"$ref {reference[:100]!r} leads back to itself")
        if reference not in self._references:
            self._open.add(reference)
            expression = self.expression(found)
            self._open.remove(reference)
            if expression not in (None, ANY):
                name = f"{self._prefix}_R{len(self._references)}"
                self.lines.append(f"{name}: {expression}")
                expression = name
            self._references[reference] = expression
        return self._references[reference]


def literal(text: str) -> str:
    """A string literal in the grammar's syntax, or a regex where a literal cannot have a control character."""
    if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text) or not text:
        return regex("".join(f"\\x{{{ord(letter):x}}}" for letter in text) or "()")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'


def regex(pattern: str) -> str:
    escaped = re.sub(r"\\.|/", lambda found: "\\/" if found.group() == "/" else found.group(), pattern, flags=re.DOTALL)
    return "/" + escaped.replace("\n", "\\n") + "/"


def whole_pattern(pattern: Any) -> str:
    """A JSON schema pattern, which may match anywhere in a string, as a pattern for the whole string."""
    if not isinstance(pattern, str):
        raise Unenforceable("pattern is not a string")
    parts, depth, inside, position = [""], 0, False, 0
    while position < len(pattern):
        letter = pattern[position]
        if letter == "\\":
            taken = pattern[position : position + 2]
            if taken[1:] in ("b", "B", *"123456789k") and not inside:
                raise Unenforceable(f"pattern {pattern[:100]!r} has {taken}, which cannot be enforced")
            ascii_only = {"\\d": "0-9", "\\w": "A-Za-z0-9_"}.get(taken)
            parts[-1] += taken if ascii_only is None else ascii_only if inside else f"[{ascii_only}]"
            position += 2
            continue
        if inside:
            inside = letter != "]"
            parts[-1] += "\\[" if letter == "[" else letter
        elif letter == "|" and not depth:
            parts.append("")
        elif letter == "^" and not depth and not parts[-1]:
            parts[-1] = "^"
        elif letter == "$" and not depth and pattern[position + 1 : position + 2] in ("", "|"):
            parts[-1] += "$"
        elif letter in "^$":
            raise Unenforceable(f"pattern {pattern[:100]!r} has {letter} in its middle, which cannot be enforced")
        else:
            inside = letter == "["
            depth += {"(": 1, ")": -1}.get(letter, 0)
            parts[-1] += letter
            if inside and pattern[position + 1 : position + 2] == "^":
                parts[-1] += "^"
                position += 1
        position += 1
    return "|".join(_anchored(part) for part in parts)


def _anchored(part: str) -> str:
    start, end = part.startswith("^"), part.endswith("$") and not part.endswith("\\$")
    inner = part[start : len(part) - end]
    return f"{'' if start else '(?s:.*)'}(?:{inner}){'' if end else '(?s:.*)'}"


def _all(parts: list[str | None]) -> str | None:
    if None in parts:
        return None
    found = list(dict.fromkeys(part for part in parts if part and part != ANY))
    return ANY if not found else found[0] if len(found) == 1 else f"({' & '.join(found)})"


def _any(parts: list[str | None]) -> str | None:
    found = list(dict.fromkeys(part for part in parts if part))
    return None if not found else ANY if ANY in found else found[0] if len(found) == 1 else f"({' | '.join(found)})"


def _one(parts: list[str | None]) -> str | None:
    others = [_not(_any(parts[:position] + parts[position + 1 :])) for position in range(len(parts))]
    return _any([_all([part, other]) for part, other in zip(parts, others, strict=True)])


def _not(part: str | None) -> str | None:
    return ANY if part is None else None if part == ANY else f"~{part}"  # within any text: see IN_VALUE
