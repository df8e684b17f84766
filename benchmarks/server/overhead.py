"""Host time of a decode step outside the model: scheduling, batches, acceptance, events, bookkeeping.

The model is a formula (tests/engine/mock.py), so what is left is the engine; time inside the mock and its drafter is
subtracted. Sampling at a temperature and saving snapshots are tensor work of their own, shown in rows of their own.
Run with `python -m benchmarks.server.overhead`.
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass

import torch
from tests.engine.drive import engine_on
from tests.engine.mock import VOCAB, MockDrafter, MockModel

from stoker.engine.engine import EngineConfig
from stoker.sampling.settings import Sampling

WARM_UP = 20


@dataclass(frozen=True)
class Case:
    batch: int
    context: int
    depth: int
    temperature: float = 0.0
    snapshots: int = 0


@dataclass(frozen=True)
class Result:
    case: Case
    median_us: float  # of a step, outside model and drafter
    mean_us: float
    tokens_per_step: float  # of the whole batch


CASES = [
    Case(1, 128, 0),
    Case(8, 128, 0),
    Case(8, 128, 4),
    Case(8, 8192, 4),
    Case(8, 65536, 4),
    Case(8, 128, 4, temperature=0.8),
    Case(8, 65536, 4, temperature=0.8),
    Case(8, 128, 4, snapshots=16),
    Case(8, 65536, 4, snapshots=16),
]


def measure(case: Case, steps: int) -> Result:
    model, drafter = MockModel(), MockDrafter(case.depth, wrong=5)
    tokens = (steps + WARM_UP + 10) * (case.depth + 1)
    pages = case.batch * (-(-(case.context + tokens) // 64) + 1)
    config = EngineConfig(pages, case.batch, case.depth, prefill_budget=1 << 16, snapshots=case.snapshots)
    engine = engine_on(model.decoder, config, drafter if case.depth else None)
    for index in range(case.batch):
        prompt = [(index + place) % VOCAB for place in range(case.context)]
        engine.submit(prompt, Sampling(max_tokens=tokens, temperature=case.temperature, top_k=20), case.depth)
    while any(not sequence.output for sequence in engine.scheduler):
        engine.step()
    made, times = 0, []
    for number in range(WARM_UP + steps):
        inside, started = model.seconds + drafter.seconds, time.perf_counter()
        events = engine.step()
        elapsed = time.perf_counter() - started - (model.seconds + drafter.seconds - inside)
        if number >= WARM_UP:
            times.append(elapsed * 1e6)
            made += sum(len(event.tokens) for event in events)
    return Result(case, statistics.median(times), statistics.mean(times), made / steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(case, arguments.steps) for case in CASES]
    if arguments.json:
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        print(json.dumps({**machine, "steps": arguments.steps, "results": [asdict(result) for result in results]}))
        return
    print("batch  context  depth  temperature  snapshots  tokens/step  median us  mean us")
    for result in results:
        case = result.case
        print(
            f"{case.batch:5d}  {case.context:7,d}  {case.depth:5d}  {case.temperature:11.1f}  {case.snapshots:11d}  "
            f"{result.tokens_per_step:11.1f}  {result.median_us:9.0f}  {result.mean_us:7.0f}"
        )


if __name__ == "__main__":
    main()
