"""How fast does this machine train? Measures each way of running the experts, compiled and not, and says how many
steps fit into the time: python -m training.probe --minutes 17
"""

import argparse
import time
from dataclasses import replace

import torch

from training import loop, train_trunk

WARM, TIMED = 5, 15


def tokens_per_s(plan: loop.Plan) -> float:
    """Whole training steps on random tokens, after a few that warm up (and compile)."""
    model = train_trunk.prepare(plan)
    where = loop.device()
    optimizer = loop.adamw([(n, p) for n, p in model.named_parameters() if p.requires_grad], plan, where)
    tokens = torch.randint(0, model.config.vocab_size, (plan.batch, plan.context + 1), device=where)
    weights = torch.ones(plan.batch, plan.context, device=where)
    started = time.perf_counter()
    for step in range(WARM + TIMED):
        if step == WARM:
            _wait(where)
            started = time.perf_counter()
        with loop.precision(where):
            found = train_trunk.loss_of(model, tokens, weights, plan.balance)
        optimizer.zero_grad(set_to_none=True)
        found["loss"].backward()
        optimizer.step()
    _wait(where)
    return TIMED * plan.batch * plan.context / (time.perf_counter() - started)


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="demo")
    parser.add_argument("--batch", type=int, default=loop.Plan.batch)
    parser.add_argument("--context", type=int, default=loop.Plan.context)
    parser.add_argument("--minutes", type=float, default=17.0)
    options = parser.parse_args()
    plan = replace(loop.Plan(), shape=options.shape, batch=options.batch, context=options.context)
    for dispatch in ("dense", "grouped"):
        for compiled in (False, True):
            torch.compiler.reset()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            name = f"--dispatch {dispatch} --{'' if compiled else 'no-'}compile"
            started = time.perf_counter()
            try:
                rate = tokens_per_s(replace(plan, dispatch=dispatch, compile=compiled))
            except (RuntimeError, AttributeError) as error:  # a way this torch or this GPU does not know
                print(f"{name:32} failed: {str(error).splitlines()[0]}", flush=True)
                continue
            steps = int(rate * 60 * options.minutes / (plan.batch * plan.context))
            memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
            took = time.perf_counter() - started
            print(
                f"{name:32} {rate:>12,.0f} tokens/s, {steps:,} steps in {options.minutes:g} minutes, "
                f"{memory:.1f} GiB, measured in {took:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
