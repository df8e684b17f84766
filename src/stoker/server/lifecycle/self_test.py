"""The self-test of an engine before it serves: finite logits, drafts that are better than chance and do not change the
answer, and caches of the planned size."""

import logging
import math

from stoker.engine.event import Depth, Event, Finish
from stoker.engine.worker.client import EngineClient
from stoker.errors import CheckpointError, StokerError
from stoker.sampling.settings import Sampling
from stoker.server.lifecycle.plan import Plan
from stoker.server.model import ServedModel
from stoker.speculate.choice import DraftChoice

log = logging.getLogger("stoker.server")

# Text with few plausible continuations, so that an intact drafter is often right, and without repetition, so that
# n-gram lookup does not help a broken one.
TEXT = "import argparse\nimport sys\n\n\ndef main() -> int:\n    parser = argparse.ArgumentParser(description="
TOKENS, DEPTH = 40, 2
LEAST_DRAFTS, LEAST_ACCEPTANCE = 8, 0.1  # acceptance of first drafts; wrongly wired weights give 0 to 0.03


async def self_test(engine: EngineClient, model: ServedModel, choice: DraftChoice, plan: Plan) -> None:
    """Raises a StokerError if the engine fails the test."""
    prompt = model.encode(TEXT)
    plain = await _answer(engine, prompt, 0)
    drafted, rate = "", None
    if choice.depth and plan.engine.assumed_tokens is None:  # drafts accepted unseen change the answer
        events = await _answer(engine, prompt, min(DEPTH, choice.depth))
        if _tokens(events) != _tokens(plain):
            raise CheckpointError(
                "self-test: drafting changed the answer, which it never should. Start with --draft none, and report it."
            )
        rate = _first_acceptance(events)
        if rate is not None and rate < LEAST_ACCEPTANCE:
            raise CheckpointError(
                f"self-test: of the first drafts of each step {rate:.0%} were right, no better than chance: weights of "
                "the drafter are missing, damaged or wired wrongly. stoker inspect --verify says which; start with "
                "--draft none to serve without it, or with --no-self-test if the model is meant to be random."
            )
        drafted = "" if rate is None else f", {rate:.0%} of first drafts right"
    _check_memory(engine, plan)
    log.info("self-test passed: %d tokens finite%s", len(_tokens(plain)), drafted)


async def _answer(engine: EngineClient, prompt: list[int], depth: Depth) -> list[Event]:
    events: list[Event] = []
    async for event in engine.submit(prompt, Sampling(max_tokens=TOKENS, logprobs=1), depth):
        for each in event.logprobs:
            if not all(math.isfinite(value) for value in (each.logprob, *(top for _, top in each.top))):
                raise CheckpointError(
                    f"self-test: the model's logits are not finite after {len(events)} steps. The weights are damaged; "
                    "stoker inspect --verify says which."
                )
        events.append(event)
    if events[-1].finish is not Finish.LENGTH:
        raise CheckpointError(f"self-test: {TOKENS} tokens were asked for, and the answer ended before.")
    return events


def _tokens(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def _first_acceptance(events: list[Event]) -> float | None:
    """The acceptance of first drafts, or None if too few steps had drafts."""
    first = [event.drafts[0] == event.tokens[0] for event in events if event.drafts and event.tokens]
    return sum(first) / len(first) if len(first) >= LEAST_DRAFTS else None


def _check_memory(engine: EngineClient, plan: Plan) -> None:
    found = engine.stats().result(60.0).cache_bytes
    if found != plan.cache_bytes:
        raise StokerError(
            f"self-test: the engine's caches take {found:,} bytes, and {plan.cache_bytes:,} were planned."
        )
