"""What the depth controller chose, predicted and measured, counted for whoever reports it."""

from typing import Any


class Tally:
    def __init__(self) -> None:
        self._steps = self._drafted_for = self._probes = 0
        self._verified = self._accepted = 0
        self._depths: list[int] = []  # how often each depth was chosen, over requests
        self._predicted_s = self._measured_s = self._off_s = self._draft_s = 0.0
        self._predicted_experts = self._measured_experts = 0.0
        self._counted = 0  # steps whose experts were counted

    def add_step(self, predicted_s: float, measured_s: float, draft_s: float, drafted_for: bool, probe: bool) -> None:
        self._steps += 1
        self._drafted_for += drafted_for
        self._probes += probe
        self._draft_s += draft_s
        if self._steps > 1:  # a prediction before anything was measured is none
            self._predicted_s += predicted_s
            self._measured_s += measured_s
            self._off_s += abs(predicted_s - measured_s)

    def add_block(self, depth: int, emitted: int) -> None:
        """One request of a step: drafts verified, tokens that came out."""
        self._depths += [0] * (depth + 1 - len(self._depths))
        self._depths[depth] += 1
        self._verified += depth
        self._accepted += min(depth, max(0, emitted - 1))

    def add_experts(self, predicted: float, measured: float) -> None:
        self._counted += 1
        self._predicted_experts += predicted
        self._measured_experts += measured

    def report(self) -> dict[str, Any]:
        """Seconds and experts are means per step; `mean_error` is relative."""
        steps, timed, counted = max(1, self._steps), max(1, self._steps - 1), max(1, self._counted)
        experts = {"predicted": self._predicted_experts / counted, "measured": self._measured_experts / counted}
        return {
            "steps": self._steps,
            "steps_drafted_for": self._drafted_for,
            "probes": self._probes,
            "depths": list(self._depths),
            "verified_drafts": self._verified,
            "accepted_drafts": self._accepted,
            "step_s": {
                "predicted": self._predicted_s / timed,
                "measured": self._measured_s / timed,
                "mean_error": self._off_s / self._measured_s if self._measured_s else 0.0,
                "drafting": self._draft_s / steps,
            },
            "distinct_experts": experts if self._counted else None,
        }
