"""The items of a plan's memory in the few parts that people are shown."""

from stoker.plan.answer import Answer

# what an item's name begins with -> (label, colour class)
PARTS = (
    (("weights: MTP", "drafter"), "drafter", "s3"),
    (("weights",), "weights", "s0"),
    (("KV cache",), "KV cache", "s2"),
    (("recurrent",), "recurrent state", "s1"),
    (("prefix",), "prefix cache", "s5"),
    (("graphs", "runtime", "host"), "engine", "s4"),
    (("reserve",), "reserve", "s6"),
)


def segments(answer: Answer) -> list[tuple[str, str, int]]:
    """label, colour, bytes; every item is in exactly one."""
    sizes: dict[tuple[str, str], int] = {}
    for item in answer.budget.items:
        label, colour = next((label, colour) for starts, label, colour in PARTS if item.name.startswith(starts))
        sizes[label, colour] = sizes.get((label, colour), 0) + item.bytes
    return [(label, colour, size) for (label, colour), size in sizes.items() if size]
