"""Judges of answers, by name. Each looks at one answer and what was expected, and says how much of it was right."""

import json
import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from stoker.check.code_sandbox import run_cases
from stoker.check.language import language_of

TOLERANCE = 0.005  # of amounts of money, and of numbers computed with rounding
Call = dict[str, Any]


class Reply(Struct):
    """What a server said to an item. Kept in journals and results."""

    text: str = ""
    calls: list[Call] = []  # name, arguments as the server sent them
    reasoning: str = ""
    finish: str = ""
    tokens: int = 0
    seconds: float = 0.0
    failure: str = ""


class Mark(Struct, frozen=True):
    """1.0 is wholly right; `why` says what was not, for people."""

    score: float
    why: str = ""

    @property
    def passed(self) -> bool:
        return self.score >= 1.0


def judge(checker: str, expect: Any, reply: Reply) -> Mark:
    return CHECKERS[checker](expect, reply)


# -- texts


def _exact(expect: Any, reply: Reply) -> Mark:
    """The answer is this text, white space at its ends aside."""
    return _mark(reply.text.strip() == str(expect).strip(), f"not {expect!r}")


def _contains(expect: Any, reply: Reply) -> Mark:
    """The text, or all of a list of texts, stands in the answer as words of its own; capitals do not matter."""
    wanted = expect if isinstance(expect, list) else [expect]
    missing = [text for text in wanted if not _word(str(text), reply.text)]
    return Mark(1 - len(missing) / max(len(wanted), 1), f"without {', '.join(map(str, missing))}" if missing else "")


def _regex(expect: Any, reply: Reply) -> Mark:
    """The expression matches the whole answer, white space at its ends aside."""
    return _mark(re.fullmatch(str(expect), reply.text.strip(), re.DOTALL) is not None, "no match")


def _choice(expect: Any, reply: Reply) -> Mark:
    """A letter: the last capital from A to J that stands alone."""
    found = re.findall(r"\b([A-J])\b", reply.text)
    return _mark(found[-1:] == [expect], f"chose {found[-1] if found else 'nothing'}, not {expect}")


def _number(expect: Any, reply: Reply) -> Mark:
    """The number behind the last "Answer:", else the last number of the answer."""
    text = reply.text
    at = text.lower().rfind("answer:")
    found = _numbers(text[at + 7 :])[:1] if at >= 0 else []
    found = found or _numbers(text)[-1:]
    right = bool(found) and abs(found[0] - float(expect)) <= TOLERANCE
    return _mark(right, f"{found[0]:g} instead of {expect}" if found else "no number")


def _numbers(text: str) -> list[float]:
    """Numbers of a text; 1,234.5 and 1 234,5 and 1.234,5 are the same."""
    found = re.findall(r"(?<![\w.,])[-−]?\d+(?:[.,   ]\d{3})*(?:[.,]\d+)?(?![\w])", text)
    return [_value(number) for number in found]


def _value(written: str) -> float:
    digits = re.sub(r"[   ]", "", written.replace("−", "-"))
    if "," in digits and "." in digits:  # the last sign is the decimal one
        thousands = "," if digits.rfind(".") > digits.rfind(",") else "."
        digits = digits.replace(thousands, "")
    elif re.fullmatch(r"-?\d{1,3}(,\d{3})+", digits):
        digits = digits.replace(",", "")
    return float(digits.replace(",", "."))


def _language(expect: Any, reply: Reply) -> Mark:
    """The answer is in this language (en, hu, de, fr, es, pl)."""
    found = language_of(reply.text)
    return _mark(found == expect, f"is {found or 'no language that is known'}, not {expect}")


# -- structures


def _json_fields(expect: Any, reply: Reply) -> Mark:
    """A JSON object with these fields: the share of fields that are right, entries of lists counted each."""
    found = parsed(reply.text)
    if found is None:
        return Mark(0.0, "no JSON")
    right, wrong = _compare(expect, found, "")
    more = [key for key in found if key not in expect] if isinstance(found, dict) and isinstance(expect, dict) else []
    if more:
        wrong.append(f"{more[0]} is too much")
    return Mark(right / (right + len(wrong)) if right + len(wrong) else 1.0, "; ".join(wrong[:3]))


def parsed(text: str) -> Any:
    """The JSON value of an answer, in a block of code or bare; None if there is none."""
    fenced = re.search(r"```(?:json)?\s*(.*?)```", text, re.DOTALL)
    try:
        return json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return None


def _compare(expect: Any, found: Any, where: str) -> tuple[int, list[str]]:
    if isinstance(expect, dict):
        if not isinstance(found, dict):
            return 0, [f"{_at(where)} is no object"] * max(_leaves(expect), 1)
        parts = [_compare(value, found.get(key), f"{where}.{key}") for key, value in expect.items()]
    elif isinstance(expect, list):
        if not isinstance(found, list):
            return 0, [f"{_at(where)} is no list"] * max(_leaves(expect), 1)
        padded = found + [None] * (len(expect) - len(found))
        parts = [_compare(value, padded[place], f"{where}[{place}]") for place, value in enumerate(expect)]
        if len(found) > len(expect):
            parts.append((0, [f"{_at(where)} has {len(found)} entries, not {len(expect)}"]))
    else:
        same = _same(expect, found)
        return int(same), [] if same else [f"{_at(where)} is {json.dumps(found, ensure_ascii=False)[:60]}"]
    return sum(right for right, _ in parts), [each for _, wrong in parts for each in wrong]


def _at(where: str) -> str:
    return where.lstrip(".") or "the answer"


def _leaves(value: Any) -> int:
    if isinstance(value, dict | list):
        return sum(_leaves(each) for each in (value.values() if isinstance(value, dict) else value))
    return 1


def _same(expect: Any, found: Any) -> bool:
    if isinstance(expect, bool) or expect is None or isinstance(found, bool):
        return expect is found
    if isinstance(expect, int | float):
        return isinstance(found, int | float) and abs(expect - found) <= TOLERANCE
    return isinstance(found, str) and " ".join(expect.split()).casefold() == " ".join(found.split()).casefold()


def _tool_calls(expect: Any, reply: Reply) -> Mark:
    """Exactly these calls, in any order, with exactly these arguments; none if the list is empty."""
    if not expect:
        if reply.calls:
            return Mark(0.0, f"called {reply.calls[0]['name']}, and no tool fits")
        return _mark(bool(reply.text.strip()), "said nothing")
    left = [{"name": call["name"], "arguments": arguments_of(call)} for call in reply.calls]
    score, why = 0.0, []
    for wanted in expect:
        hit = next(
            (call for call in left if call["name"] == wanted["name"] and call["arguments"] == wanted["arguments"]), None
        )
        hit = hit or next((call for call in left if call["name"] == wanted["name"]), None)
        if hit is None:
            why.append(f"{wanted['name']} was not called")
            continue
        left.remove(hit)
        if hit["arguments"] is None:
            why.append(f"arguments of {wanted['name']} are no JSON")
            continue
        right, wrong = _compare(wanted["arguments"], hit["arguments"], "")
        wrong += [f"{key} is too much" for key in hit["arguments"] if key not in wanted["arguments"]]
        score += (1 + right) / (1 + right + len(wrong))
        why += wrong
    why += [f"{call['name']} was called too" for call in left]
    return Mark(score / (len(expect) + len(left)), "; ".join(why[:3]))


def arguments_of(call: Call) -> dict[str, Any] | None:
    try:
        found = json.loads(call["arguments"] or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# -- instructions that can be verified


def _rules(expect: Any, reply: Reply) -> Mark:
    """The share of rules that are kept; docs/check.md lists them."""
    text = reply.text.strip()
    broken = [rule["rule"] for rule in expect if not (text and RULES[rule["rule"]](rule, text))]
    return Mark(1 - len(broken) / max(len(expect), 1), f"broken: {', '.join(broken)}" if broken else "")


def _sentences(text: str) -> int:
    return len(re.findall(r"[.!?…]+(?=[\s\"'”)]|$)", text))


def _bullets(rule: dict[str, Any], text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) == rule["count"] and all(line.startswith("- ") for line in lines)


def _json_keys(rule: dict[str, Any], text: str) -> bool:
    found = parsed(text)
    return (
        isinstance(found, dict)
        and sorted(found) == sorted(rule["keys"])
        and all(isinstance(value, str) for value in found.values())
    )


def _words(rule: dict[str, Any], text: str) -> bool:
    return int(rule.get("least", 0)) <= len(text.split()) <= rule["most"]


RULES: dict[str, Callable[[dict[str, Any], str], bool]] = {
    "lines": lambda rule, text: len(text.splitlines()) == rule["count"] and all(map(str.strip, text.splitlines())),
    "bullets": _bullets,
    "words": _words,
    "sentences": lambda rule, text: _sentences(text) == rule["count"],
    "lower case": lambda rule, text: text == text.lower(),
    "upper case": lambda rule, text: text == text.upper(),
    "without": lambda rule, text: rule["text"] not in text,
    "word": lambda rule, text: len(re.findall(rf"(?i)\b{re.escape(rule['word'])}\b", text)) == rule["times"],
    "begins": lambda rule, text: text.startswith(rule["text"]),
    "ends": lambda rule, text: text.endswith(rule["text"]),
    "json keys": _json_keys,
    "quoted": lambda rule, text: len(text) > 2 and text[0] == text[-1] == '"',
    "language": lambda rule, text: language_of(text) == rule["language"],
}


# -- code


def _python(expect: Any, reply: Reply) -> Mark:
    """The function gives these results in the sandbox: the share of cases that it gets right."""
    blocks = re.findall(r"```(?:python|py)?\s*\n(.*?)```", reply.text, re.DOTALL)
    program = max(blocks, key=len) if blocks else reply.text
    cases = expect["cases"]
    ran = run_cases(program, expect["function"], [given for given, _ in cases])
    if ran.failure:
        return Mark(0.0, ran.failure)
    wrong = [
        f"{expect['function']}({', '.join(map(repr, given))[:60]}): "
        f"{result.get('error') or repr(result.get('value'))[:60]}"
        for (given, wanted), result in zip(cases, ran.results, strict=True)
        if "value" not in result or not _equal(wanted, result["value"])
    ]
    return Mark(1 - len(wrong) / len(cases), "; ".join(wrong[:2]))


def _equal(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, float) and isinstance(found, int | float) and not isinstance(found, bool):
        return abs(wanted - found) <= 1e-6 * max(1.0, abs(wanted))
    return bool(type(wanted) is type(found) and wanted == found)


def _word(text: str, within: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(text.casefold())}(?!\w)", within.casefold()) is not None


def _mark(right: bool, why: str) -> Mark:
    return Mark(1.0) if right else Mark(0.0, why)


CHECKERS: dict[str, Callable[[Any, Reply], Mark]] = {
    "exact": _exact,
    "contains": _contains,
    "regex": _regex,
    "choice": _choice,
    "number": _number,
    "language": _language,
    "json_fields": _json_fields,
    "tool_calls": _tool_calls,
    "rules": _rules,
    "python": _python,
}
