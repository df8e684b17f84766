"""Checks of answers: blank, looping or malformed output can be fast, and must not count as speed."""

import json
import re

from stoker.bench.answer import Answer

LOOP_REPEATS, LOOP_CHARACTERS = 6, 120  # a text that ends like this goes in circles


def problems(answer: Answer, wants_json: bool) -> list[str]:
    found = []
    if not answer.text.strip():
        found.append("blank")
    if looping(answer.text):
        found.append("looping")
    if "�" in answer.text:
        found.append("broken characters")
    cut = answer.finish_reason == "length"
    if wants_json and not cut and not _is_json(answer.content):
        found.append("not JSON")
    if not cut and any(not _is_json(call["arguments"] or "{}") for call in answer.calls.values()):
        found.append("tool arguments not JSON")
    return found


def looping(text: str) -> bool:
    """Whether the text ends in the same characters over and over."""
    tail = text.rstrip()
    for period in range(1, len(tail) // LOOP_REPEATS + 1):
        length = max(LOOP_REPEATS * period, LOOP_CHARACTERS)
        if length > len(tail):
            break
        if tail[-length:-period] == tail[-length + period :]:
            return True
    return False


def _is_json(text: str) -> bool:
    fenced = re.search(r"```(?:json)?\s*(.*?)```", text, re.DOTALL)
    try:
        json.loads(fenced[1] if fenced else text)
    except ValueError:
        return False
    return True
