"""How fast the CPU backend decodes: against transformers on the same weights, in batches, with drafts, per step width.

    python benchmarks/cpu/decode.py --model demo --json benchmarks/results/cpu-decode.json  # a quarter of an hour

Everything runs in one process with the same number of threads, and ways that are compared take turns text by text, so
that what else the machine does falls on all of them alike; a ratio is the median of those of the rounds. Decode only: a
request's clock starts with its first token. transformers gets the same checkpoint dequantised to bf16. The ceiling is
the bytes a step reads over this machine's read bandwidth.
"""

import argparse
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from stoker.backends.cpu.build import cpu_backend
from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.experts import Experts
from stoker.backends.network.linear import Fused
from stoker.backends.network.load import load_model
from stoker.demo import checkpoint_at, prompts
from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.event import AUTO
from stoker.engine.tokenizer import Tokenizer
from stoker.sampling.settings import Sampling
from stoker.speculate.choice import DraftChoice

WIDTHS = (1, 2, 4, 8, 16)  # tokens of one sequence in a step
BATCH = 8
TARGETS = {"transformers": 4.0, "batch": 2.5, "JSON": 2.0, "agent": 2.0}
DRAFTS = ("mtp:auto", "dflash:auto", "lookup:auto", "lookup+mtp:auto")


@dataclass
class Way:
    """Something that decodes; tokens/s of each round."""

    name: str
    run: Callable[[Sequence[list[int]]], tuple[int, float, int]]  # texts -> tokens, seconds, steps
    turns: Sequence[Sequence[list[int]]]  # of a round: the texts of each
    speeds: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)

    def row(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "tokens_per_s": round(self.speed, 1),
            "rounds": [round(speed, 1) for speed in self.speeds],
            "tokens_per_step": round(self.tokens / self.steps, 2),
        }


def warm_up(ways: Sequence[Way]) -> None:
    """One turn of each, which does not count."""
    for way in ways:
        way.run(way.turns[0])


def play_round(ways: Sequence[Way]) -> None:
    """Every way takes all its turns, one after the other."""
    found: dict[str, list[tuple[int, float, int]]] = {way.name: [] for way in ways}
    for turn in range(max(len(way.turns) for way in ways)):
        for way in ways:
            if turn < len(way.turns):
                found[way.name].append(way.run(way.turns[turn]))
    for way in ways:
        tokens, seconds, steps = (sum(numbers) for numbers in zip(*found[way.name], strict=True))
        way.speeds.append(tokens / seconds)
        way.tokens, way.steps = way.tokens + int(tokens), way.steps + int(steps)


def stoker_way(
    name: str, model: Decoder, directory: Path, texts: Sequence[list[int]], tokens: int, draft: str, together: int
) -> Way:
    """Texts one by one, or `together` at a time; drafted as `draft` says."""
    choice = DraftChoice.parse(draft)
    longest = max(map(len, texts)) + tokens
    pages = together * (-(-longest // PAGE_SIZE) + 1)
    config = EngineConfig(pages=pages, slots=together, max_depth=choice.depth)
    backend, drafter = cpu_backend(model, config, choice, directory)
    engine = Engine(config, backend, drafter)
    depth = AUTO if choice.adaptive else choice.depth

    def run(members: Sequence[list[int]]) -> tuple[int, float, int]:
        made, seconds, steps = 0, 0.0, 0
        waiting = {engine.submit(text, Sampling(max_tokens=tokens), depth) for text in members}
        while not engine.idle:
            started = time.perf_counter()
            events = engine.step()
            if not waiting:  # all have their first token: from here on it is decoding alone
                seconds += time.perf_counter() - started
                made += sum(len(event.tokens) for event in events)
                steps += len(events)
            waiting -= {event.request_id for event in events}
        return made, seconds, steps

    return Way(name, run, [texts[start : start + together] for start in range(0, len(texts), together)])


def transformers_way(directory: Path, texts: Sequence[list[int]], tokens: int) -> Way:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()

    def seconds(text: list[int], count: int) -> float:
        started = time.perf_counter()
        model.generate(torch.tensor([text]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return time.perf_counter() - started

    def run(members: Sequence[list[int]]) -> tuple[int, float, int]:
        """generate's own loop; a run of one token beforehand is what the prompt costs."""
        spent = sum(seconds(text, tokens) - seconds(text, 1) for text in members)
        made = len(members) * (tokens - 1)
        return made, spent, made

    return Way("transformers", run, [[text] for text in texts])


def step_times(model: Decoder, widths: Sequence[int], rounds: int) -> dict[int, float]:
    """Milliseconds of a step with that many tokens of one sequence, half of them accepted; the median."""
    times: dict[int, list[float]] = {width: [] for width in widths}
    cache = Cache.allocate(model.config, pages=16, slots=1, window=max(widths))
    prompt = [1 + i % 1000 for i in range(128)]
    with torch.inference_mode():
        for _ in range(rounds):
            for width in widths:
                cache.reset(0)
                model(Batch.of(Family.PREFILL, [Run(prompt, 0, 0, range(16))], PAGE_SIZE), cache)
                position, replay = len(prompt), 0
                for _ in range(10):
                    started = time.perf_counter()
                    batch = Batch.of(Family.STEP, [Run([7] * width, position, 0, range(16), replay)], PAGE_SIZE)
                    hidden, _ = model(batch, cache)
                    model.logits(hidden).argmax(-1).tolist()
                    times[width].append(time.perf_counter() - started)
                    replay = max(1, width // 2)
                    position += replay
    return {width: 1e3 * statistics.median(found) for width, found in times.items()}


def bytes_per_step(model: Decoder) -> int:
    """What a step of one token reads of the trunk: packed weights as they lie in memory, and the recurrent state."""
    seen = 0
    for part in [model, *model.layers.modules()]:
        packed = [value.packed for value in vars(part).values() if isinstance(value, Fused)]
        seen += sum(weight.resident for weight in packed if weight is not None)
        if isinstance(part, Experts) and part.packed is not None:
            seen += part.packed.resident
    cache = Cache.allocate(model.config, pages=1, slots=1)
    return seen + sum(state.recurrent.nbytes for state in cache.delta_states)


def read_bandwidth(size: int) -> float:
    """Bytes/s at which a buffer of that size is read again and again, as a step reads its weights; the best of many."""
    buffer = torch.zeros(size // 4)
    best = 0.0
    for _ in range(30):
        started = time.perf_counter()
        buffer.sum()
        best = max(best, size / (time.perf_counter() - started))
    return best


def export(directory: Path, out: Path) -> None:
    from stoker.checkpoint.build import BuildOptions, build

    build(BuildOptions(str(directory), to="bf16"), out)


def measure(model: str, tokens: int, count: int, rounds: int, drafts: Sequence[str]) -> dict[str, Any]:
    directory = checkpoint_at(model)
    tokenizer = Tokenizer(directory)
    decoder = load_model(directory).model
    limit = decoder.config.max_positions - tokens
    texts = {
        kind: [ids for text in found if len(ids := tokenizer.encode(text)) < min(limit, 512)][:count]
        for kind, found in prompts().items()
    }
    mixed = [text for kind in texts for text in texts[kind][:1]]
    crowd = (mixed * BATCH)[:BATCH]
    with tempfile.TemporaryDirectory() as folder:
        export(directory, Path(folder) / "bf16")
        whole = {
            "transformers": transformers_way(Path(folder) / "bf16", mixed, tokens),
            "plain": stoker_way("plain", decoder, directory, mixed, tokens, "none", 1),
            "batch": stoker_way(f"plain, batch {BATCH}", decoder, directory, crowd, tokens, "none", BATCH),
        }
        by_kind = {
            kind: {
                (name := f"{kind}, {draft}"): stoker_way(name, decoder, directory, texts[kind], tokens, draft, 1)
                for draft in ("none", *drafts)
            }
            for kind in texts
        }
        for number in range(rounds):
            for what, group in {"plain": whole, **by_kind}.items():
                print(f"round {number + 1} of {rounds}: {what}", file=sys.stderr)
                if number == 0:
                    warm_up(list(group.values()))
                play_round(list(group.values()))
    ways = {name: way for group in (whole, *by_kind.values()) for name, way in group.items()}
    curve = step_times(decoder, WIDTHS, rounds)
    size = bytes_per_step(decoder)
    return {
        "rows": [way.row() for way in ways.values()],
        "ratios": _ratios(ways, list(texts), drafts),
        "step_ms": {str(width): round(found, 3) for width, found in curve.items()},
        "limit": _limit(size, read_bandwidth(size), ways["plain"].speed),
    }


def _ratios(ways: dict[str, Way], kinds: Sequence[str], drafts: Sequence[str]) -> list[dict[str, Any]]:
    def ratio(what: str, above: str, below: str) -> dict[str, Any]:
        rounds = zip(ways[above].speeds, ways[below].speeds, strict=True)
        found, target = statistics.median(a / b for a, b in rounds), TARGETS.get(what)
        met = None if target is None else found >= target
        return {"what": what, "of": above, "to": below, "ratio": round(found, 2), "target": target, "met": met}

    rows = [ratio("transformers", "plain", "transformers"), ratio("batch", "batch", "plain")]
    for kind in kinds:
        best = max(drafts, key=lambda draft: ways[f"{kind}, {draft}"].speed)
        rows.append(ratio(kind, f"{kind}, {best}", f"{kind}, none"))
    return rows


def _limit(size: int, bandwidth: float, speed: float) -> dict[str, Any]:
    limit = bandwidth / size
    return {
        "bytes_per_step": size,
        "read_bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "limit_tokens_per_s": round(limit, 1),
        "fraction": round(speed / limit, 3),
    }


def environment(threads: int) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "threads": threads,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    limit = result["limit"]
    console.print(
        f"Ceiling: a step reads {limit['bytes_per_step'] / 1e6:.1f} MB, at {limit['read_bandwidth_gb_s']} GB/s "
        f"{limit['limit_tokens_per_s']:,.0f} tokens/s; plain decoding reaches {limit['fraction']:.1%} of it."
    )
    table = Table("", "tokens/s", "tokens/step", "rounds")
    for row in result["rows"]:
        rounds = " ".join(f"{speed:.0f}" for speed in row["rounds"])
        table.add_row(row["name"], f"{row['tokens_per_s']:.1f}", f"{row['tokens_per_step']:.2f}", rounds)
    console.print(table)
    table = Table("", "ratio", "target", "")
    for row in result["ratios"]:
        target = "" if row["target"] is None else f"{row['target']:.1f}"
        met = {None: "", True: "met", False: "missed"}[row["met"]]
        table.add_row(f"{row['of']} / {row['to']}", f"{row['ratio']:.2f}", target, met)
    console.print(table)
    curve = ", ".join(f"{width}: {found:.2f} ms" for width, found in result["step_ms"].items())
    console.print(f"A step by tokens of one sequence: {curve}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="a checkpoint directory, or demo")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96, help="per answer")
    parser.add_argument("--texts", type=int, default=50, help="of each kind, if there are as many")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--drafts", nargs="*", default=list(DRAFTS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(options.model, options.tokens, options.texts, options.rounds, options.drafts)
    result = {**environment(options.threads), **found}
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
