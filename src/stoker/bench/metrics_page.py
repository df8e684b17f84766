"""A server's Prometheus page: counters by name, summed over labels, and what happened between two looks.

Such counters are the whole server's. Somebody else's requests would be counted too, so a difference is believed only
when the tokens it saw are the tokens that came here.
"""

from dataclasses import dataclass

ACCEPTED = "spec_decode_num_accepted_tokens_total"
DRAFTS = "spec_decode_num_drafts_total"
GENERATED = "generation_tokens_total"
AGREE = 0.02


def counters(page: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in page.splitlines():
        if not line or line.startswith("#"):
            continue
        head, _, value = line.rpartition(" ")
        name = head.partition("{")[0].strip().rpartition(":")[2]  # vllm:, sglang:, stoker: alike
        try:
            found[name] = found.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return found


@dataclass(frozen=True)
class Passed:
    """What the counters gained while requests ran."""

    accepted: float
    drafts: float
    generated: float | None

    def ours(self, tokens: int) -> bool:
        """Whether it can only have been our requests."""
        return self.generated is not None and abs(self.generated - tokens) <= max(2.0, AGREE * tokens)


def passed(before: dict[str, float], after: dict[str, float]) -> Passed | None:
    """None where the server has no speculation counters."""
    if ACCEPTED not in after or DRAFTS not in after:
        return None
    gained = {name: after[name] - before.get(name, 0.0) for name in (ACCEPTED, DRAFTS)}
    generated = after[GENERATED] - before.get(GENERATED, 0.0) if GENERATED in after else None
    return Passed(gained[ACCEPTED], gained[DRAFTS], generated)
