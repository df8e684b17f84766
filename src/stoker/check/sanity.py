"""Signs of a broken model or server that need no right answer: loops, empty answers, raw tags, cut calls."""

import re
from collections import Counter
from collections.abc import Sequence

from stoker.bench.quality import looping
from stoker.check import statistics
from stoker.check.checkers import Reply, arguments_of, parsed
from stoker.check.items import Item
from stoker.check.language import language_of
from stoker.check.record import Asked, Sanity

TAGS = re.compile(r"</?(?:think|tool_call|tool_response|function|parameter)\b|<\|[a-z_]+\|>|\[/?TOOL_CALLS\]|</?s>")
MANY = 0.02  # of the answers of a single server, before it is a concern
NAMES = (
    *("empty", "looping", "broken characters", "raw tags", "broken JSON", "cut off", "broken call", "unknown tool"),
    *("wrong language", "thinking"),
)


def problems(item: Item, reply: Reply, thinking: bool) -> list[str]:
    text, cut = reply.text, reply.finish == "length"
    known = {tool["function"]["name"] for tool in item.tools}
    signs = {
        "empty": not text.strip() and not reply.calls,
        "looping": looping(text) or looping(reply.reasoning),
        "broken characters": "�" in text,
        "raw tags": TAGS.search(text) is not None,
        "broken JSON": item.checker == "json_fields" and not cut and parsed(text) is None,
        "cut off": cut,
        "broken call": any(arguments_of(call) is None for call in reply.calls),
        "unknown tool": any(call["name"] not in known for call in reply.calls),
        "wrong language": bool(item.language) and language_of(text) not in ("", item.language),
        "thinking": bool(reply.reasoning) and not thinking,
    }
    return [name for name in NAMES if signs[name]]


def summary(answers: Sequence[Asked]) -> list[Sanity]:
    """How often each server's answers showed each problem. A concern if A shows it more often than B, and not by
    chance; on a single server, if more than a few answers do."""
    servers = sorted({server for asked in answers for server in asked.replies})
    counts = {server: Counter[str]() for server in servers}
    answered = Counter[str]()
    for asked in answers:
        for server, judged in asked.replies.items():
            if not judged.reply.failure:
                answered[server] += 1
                counts[server].update(judged.problems)
    found = []
    for name in NAMES:
        if not any(counts[server][name] for server in servers):
            continue
        found.append(
            Sanity(
                name=name,
                counts={server: counts[server][name] for server in servers},
                of={server: answered[server] for server in servers},
                concern=_more(answers, name) if len(servers) > 1 else counts["A"][name] > MANY * answered["A"],
                note="",
            )
        )
    return found


def _more(answers: Sequence[Asked], name: str) -> bool:
    """McNemar's test over the questions that both answered, adjusted for the number of problems."""
    pairs = [
        (name in asked.replies["A"].problems, name in asked.replies["B"].problems)
        for asked in answers
        if not any(judged.reply.failure for judged in asked.replies.values())
    ]
    only_a, only_b = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    return only_a > only_b and statistics.mcnemar(only_b, only_a) * len(NAMES) < 1 - statistics.LEVEL
