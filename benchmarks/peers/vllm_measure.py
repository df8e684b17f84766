"""Runs and rows: what is asked of vLLM's engine, when the clock runs, and what is kept. Knows no other part of vLLM."""

import argparse
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import torch

from benchmarks.gpu.decode import WARM_UP, expected_distinct, parse_draft
from stoker.weights.model_config import ModelConfig

SLACK = 24  # steps that a sequence could still take when it is stopped
COUNTED = 4  # steps whose experts are counted

Clock = Callable[[], float]
Ready = Callable[[], Any] | None  # called before the first step that is measured


def decode_run(
    engine: Any, params: Any, prompts: list[list[int]], steps: int, clock: Clock, ready: Ready = None
) -> tuple[float, int]:
    """Seconds of so many steps of all sequences, and the tokens they gained."""
    names = [uuid4().hex for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    started: set[str] = set()
    while len(started) < len(prompts):
        started |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    _take(engine, WARM_UP)
    if ready is not None:
        ready()
    start = clock()
    tokens = _take(engine, steps)
    seconds = clock() - start
    engine.abort_request(names)
    return seconds, tokens


def _take(engine: Any, steps: int) -> int:
    """Tokens of so many steps; one that brings none is the echo of an aborted request or of a prefill's part."""
    tokens = 0
    while steps:
        if not engine.has_unfinished_requests():
            raise RuntimeError(f"The sequences ended {steps} steps before the measurement did.")
        gained = sum(len(output.outputs[0].token_ids) for output in engine.step())
        tokens += gained
        steps -= gained > 0
    return tokens


def prefill_run(engine: Any, params: Any, prompt: list[int], clock: Clock) -> float:
    """Seconds from the request to its only token."""
    start = clock()
    engine.add_request(uuid4().hex, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        engine.step()
    return clock() - start


def random_prompts(vocab_size: int, batch: int, tokens: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(0, vocab_size, (batch, tokens), generator=generator).tolist()
    return ids


class Bench:
    """One shape on one engine after the other; `start` and `sampling` are vLLM, or stand in for it in tests."""

    def __init__(
        self, config: ModelConfig, options: argparse.Namespace, start: Callable[[str, bool], Any],
        sampling: Callable[[int], Any], clock: Clock = time.perf_counter,
    ) -> None:  # fmt: skip
        self.config, self.options, self.start, self.sampling, self.clock = config, options, start, sampling, clock
        self.rows: list[dict[str, Any]] = []
        self.prefill: list[dict[str, Any]] = []

    def run(self) -> None:
        for index, draft in enumerate(self.options.draft):
            engine = self.start(draft, False)
            if index == 0:
                self.prefill = [self._prefill(engine, tokens) for tokens in self.options.prefill]
            rows = [self._decode(engine, draft, batch, context) for context in self.options.context
                    for batch in self.options.batch]  # fmt: skip
            engine.engine_core.shutdown()
            if self.options.experts:
                engine = self.start(draft, True)
                assert self.config.moe is not None
                engine.collective_rpc("watch_experts", args=(self.config.moe.top_k,))
                for row in rows:
                    self._count(engine, row)
                engine.engine_core.shutdown()
            for row in rows:
                print_row(row)
            self.rows += rows

    def _decode(self, engine: Any, draft: str, batch: int, context: int) -> dict[str, Any]:
        options = self.options
        runs = [self._once(engine, draft, batch, context, options.steps, seed) for seed in range(options.runs)]
        seconds, tokens = min(runs)
        synthetic = draft != "none" and options.accept_length is not None
        return self._common() | {
            "batch": batch,
            "draft": draft,
            "accept_length": tokens / options.steps / batch,
            "acceptance_source": "assumed" if synthetic else "no drafts" if draft == "none" else "measured",
            "context": context,
            "tokens_per_s": tokens / seconds,
            "steps_per_s": options.steps / seconds,
            "spread": max(run[0] for run in runs) / seconds - 1.0,
            "distinct_experts": None,
            "distinct_expected": expected_distinct(self.config, batch * (parse_draft(draft)[1] + 1)),
            "counts": False,
        }

    def _once(
        self, engine: Any, draft: str, batch: int, context: int, steps: int, seed: int, ready: Ready = None
    ) -> tuple[float, int]:
        most = (WARM_UP + steps + SLACK) * (parse_draft(draft)[1] + 1)
        prompts = random_prompts(self.config.vocab_size, batch, context, seed)
        return decode_run(engine, self.sampling(most), prompts, steps, self.clock, ready)

    def _count(self, engine: Any, row: dict[str, Any]) -> None:
        """Distinct experts of the first run's prompts; steps padded to another number of tokens are not looked at."""
        tokens = row["batch"] * (parse_draft(row["draft"])[1] + 1)
        self._once(engine, row["draft"], row["batch"], row["context"], COUNTED, 0,
                   lambda: engine.collective_rpc("distinct_experts"))  # fmt: skip
        found = dict(engine.collective_rpc("distinct_experts")[0])
        if tokens in found:
            row["distinct_experts"] = found[tokens]
            row["counts"] = abs(found[tokens] / row["distinct_expected"] - 1.0) <= 0.05

    def _prefill(self, engine: Any, tokens: int) -> dict[str, Any]:
        # of the first one kernels may still be compiled
        prompts = random_prompts(self.config.vocab_size, self.options.runs + 1, tokens, 0)
        times = [prefill_run(engine, self.sampling(1), prompt, self.clock) for prompt in prompts][1:]
        row = self._common() | {
            "tokens": tokens,
            "context": 0,
            "seconds": min(times),
            "tokens_per_s": tokens / min(times),
            "spread": max(times) / min(times) - 1.0,
        }
        print(f"prefill of {tokens:,} tokens: {row['seconds']:.3f} s, {row['tokens_per_s']:,.0f} tokens/s", flush=True)
        return row

    def _common(self) -> dict[str, Any]:
        options = self.options
        return {
            "shape": options.shape,
            "weights": options.weights,
            "kv": options.kv,
            "layers": len(self.config.layer_types),
        }


def print_row(row: dict[str, Any]) -> None:
    distinct = row["distinct_experts"]
    experts = "experts not counted" if distinct is None else f"{distinct:.1f} experts a layer"
    note = "" if row["counts"] else f"; DOES NOT COUNT: {row['distinct_expected']:.1f} distinct experts expected"
    print(
        f"{row['weights']:5} batch {row['batch']:3} {row['draft']:6} context {row['context']:7,}: "
        f"{row['steps_per_s']:7.1f} steps/s, {row['tokens_per_s']:8.1f} tokens/s at {row['accept_length']:.2f} per step"
        f", {experts}{note}",
        flush=True,
    )
