"""Is the output the same with everything switched on? `make lossless`, or

    python -m benchmarks.lossless [--prompts 200] [--tokens 256] [--jobs 2] [--device cuda] [--only 1,8] [--out FILE]

Every request is decoded alone, without drafts, prefix cache, chunking or neighbours; then again in each of a set of
configurations that contains every pair of settings. Every token must be the same, greedy and sampled. Blocks of prompts
that are done are kept in --out, so that an interrupted run goes on; `make lossless` takes 40 prompts, which is an hour
at most on two cores, and CI runs the same set with fewer and shorter ones.
A process that dies is said to have been at which configuration; `--only` takes the numbers of the table, and runs these
anew.
"""

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from hashlib import sha256
from itertools import accumulate, combinations, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from stoker.backends.cpu.build import cpu_backend
from stoker.backends.family import CHUNK, PAGE_SIZE
from stoker.backends.network.load import load_model
from stoker.demo import EMBEDDED, prompts
from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.event import AUTO, Stats
from stoker.engine.tokenizer import Tokenizer
from stoker.sampling.settings import Sampling
from stoker.speculate.choice import DraftChoice

BLOCK = 20  # prompts that are done at a time
DEPTHS = {"mtp": 3, "dflash": 12, "lookup": 8}  # of a fixed depth, by the drafter that pays
FACTORS: dict[str, tuple[Any, ...]] = {
    "drafter": ("mtp", "dflash", "lookup", "lookup+mtp", "lookup+dflash"),
    "adaptive": (False, True),
    "batch": (1, 8),
    "warm": (False, True),
    "chunked": (False, True),
    "kv": ("bf16", "fp8"),
    "preempted": (False, True),
}
Answers = list[list[int]]


@dataclass(frozen=True)
class Configuration:
    drafter: str
    adaptive: bool
    batch: int
    warm: bool  # prefix cache on, and every request sent twice
    chunked: bool  # prompts in pieces of 64 tokens beside decoding
    kv: str
    preempted: bool  # at most half the KV pages that the requests need

    @property
    def possible(self) -> bool:
        return self.batch > 1 or not self.preempted  # a request alone has nobody to make room for

    def __str__(self) -> str:
        said = [f"{self.drafter} {'adaptive' if self.adaptive else 'fixed'}", f"batch {self.batch}", f"{self.kv} KV"]
        said += [name for name in ("warm", "chunked", "preempted") if getattr(self, name)]
        return ", ".join(said)


def covering_set() -> list[Configuration]:
    """Everything switched on, with either network; then few more, until every possible pair of settings is there."""
    every = [c for values in product(*FACTORS.values()) if (c := Configuration(*values)).possible]

    def pairs(configuration: Configuration) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
        return set(combinations(asdict(configuration).items(), 2))

    chosen = [Configuration(drafter, True, 8, True, True, "fp8", True) for drafter in ("lookup+mtp", "lookup+dflash")]
    left = set().union(*(pairs(c) for c in every)).difference(*(pairs(c) for c in chosen))
    while left:
        best = max(every, key=lambda c: len(pairs(c) & left))  # the first of equals
        chosen.append(best)
        left -= pairs(best)
    return chosen


def sampling_of(kind: str, index: int, tokens: int) -> Sampling:
    """`index` is the place of the prompt: every request has a seed of its own. Of "mixed" requests every other one is
    greedy, in each kind of text."""
    if kind == "greedy" or (kind == "mixed" and (index + index // len(prompts())) % 2 == 0):
        return Sampling(max_tokens=tokens)
    return Sampling(max_tokens=tokens, temperature=0.7, top_p=0.9, seed=1000 + index)


class Model:
    """The checkpoint and its prompts, loaded once per process."""

    def __init__(self, directory: Path = EMBEDDED, device: str = "cpu") -> None:
        self.directory, self.model = directory, load_model(directory, device=device).model
        self._weights = None
        if device != "cpu":
            from stoker.backends.gpu.weights import pack_decoder

            self._weights = pack_decoder(self.model, self.model.config.max_positions)
        tokenizer = Tokenizer(directory)
        by_kind = [[tokenizer.encode(text) for text in texts] for texts in prompts().values()]
        self.prompts = [prompt for group in zip(*by_kind, strict=True) for prompt in group]  # kinds in turn

    def alone(self, kv: str, sampling: str, first: int, count: int, tokens: int) -> Answers:
        """Plain decoding, one request after the other."""
        answers = []
        for index in range(first, first + count):
            prompt = self.prompts[index]
            engine = self.engine_for(len(prompt) + tokens, kv)
            answers += _run(engine, [prompt], [sampling_of(sampling, index, tokens)], 0)[0]
        return answers

    def engine_for(self, length: int, kv: str = "bf16") -> Engine:
        """For one request of so many tokens at a time, its prompt in one piece, without drafts."""
        pages = _pages(length)
        config = EngineConfig(pages=pages, slots=1, max_depth=0, prefill_budget=pages * CHUNK, kv_dtype=kv)
        return self._engine(config, DraftChoice.parse("none"))

    def configured(
        self, configuration: Configuration, sampling: str, first: int, count: int, tokens: int
    ) -> tuple[list[Answers], list[Stats]]:
        """Answers of one pass, or of two where the second finds the first one's prompts in the prefix cache."""
        chosen = self.prompts[first : first + count]
        needs = sorted((_pages(len(prompt) + tokens) for prompt in chosen), reverse=True)
        room = sum(needs[: configuration.batch])
        tight = max(needs[0], _filled(chosen, room // 2))
        fixed = DEPTHS[configuration.drafter.split("+")[-1]]
        choice = DraftChoice.parse(f"{configuration.drafter}:{'auto' if configuration.adaptive else fixed}")
        config = EngineConfig(
            pages=tight if configuration.preempted else room + sum(needs),  # and all may be cached
            slots=configuration.batch,
            max_depth=choice.depth,
            prefill_budget=CHUNK if configuration.chunked else 64 * CHUNK,
            snapshots=8 * count if configuration.warm else 0,
            snapshot_interval=2 * CHUNK,
            kv_dtype=configuration.kv,
        )
        engine = self._engine(config, choice)
        samplings = [sampling_of(sampling, first + place, tokens) for place in range(len(chosen))]
        passes, stats = [], []
        for _ in range(1 + configuration.warm):
            answers, found = _run(engine, chosen, samplings, AUTO if configuration.adaptive else fixed)
            passes.append(answers)
            stats += found
        return passes, stats

    def _engine(self, config: EngineConfig, choice: DraftChoice) -> Engine:
        if self._weights is None:
            return Engine(config, *cpu_backend(self.model, config, choice, self.directory))
        from stoker.backends.gpu.build import gpu_backend

        return Engine(config, *gpu_backend(self.model, config, choice, self.directory, self._weights))


def _run(
    engine: Engine, chosen: Sequence[Sequence[int]], samplings: Sequence[Sampling], depth: Any
) -> tuple[Answers, list[Stats]]:
    """All requests at once, to the end."""
    ids = [engine.submit(prompt, sampling, depth) for prompt, sampling in zip(chosen, samplings, strict=True)]
    answers: dict[int, list[int]] = {number: [] for number in ids}
    stats = []
    while not engine.idle:
        for event in engine.step():
            answers[event.request_id] += event.tokens
            if event.error:
                raise RuntimeError(event.error)
            if event.stats:
                stats.append(event.stats)
    engine.check_integrity()
    return [answers[number] for number in ids], stats


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def _filled(prompts: Sequence[Sequence[int]], most: int) -> int:
    """Pages, at most so many, that the first prompts fill to the last one: whoever grows first must make room, however
    fast the others are."""
    filled = list(accumulate(_pages(len(prompt) + 1) for prompt in prompts))
    return max((pages for pages in filled if pages <= most), default=0)


def compare(
    model: Model, configuration: Configuration, sampling: str, first: int, tokens: int, plain: Answers
) -> dict[str, Any]:
    """One block of prompts: how many tokens are those of plain decoding, and what the configuration did."""
    started = time.perf_counter()
    passes, stats = model.configured(configuration, sampling, first, len(plain), tokens)
    pairs = [
        (a, b) for answers in passes for mine, his in zip(answers, plain, strict=True) for a, b in _places(mine, his)
    ]
    steps = sum(s.steps for s in stats)
    return {
        "tokens": len(pairs),
        "identical": sum(a == b for a, b in pairs),
        "steps": steps,
        "accepted_per_step": sum(s.output_tokens - 1 for s in stats) / max(1, steps),
        "drafted": sum(s.drafted for s in stats),
        "preemptions": sum(s.preemptions for s in stats),
        "cached_tokens": sum(s.cached_tokens for s in stats),
        "seconds": time.perf_counter() - started,
    }


def _places(mine: list[int], his: list[int]) -> Iterator[tuple[int, int]]:
    """Token beside token; where one answer is longer, its tokens stand beside none."""
    for place in range(max(len(mine), len(his))):
        yield (mine[place] if place < len(mine) else -1, his[place] if place < len(his) else -1)


# -- the long run

Unit = tuple[Configuration | None, str, str, int, int, int]  # None: plain; KV, sampling, first prompt, how many, tokens
_model: Model | None = None  # one per process


def _begin(device: str) -> None:
    global _model
    torch.set_num_threads(1)
    _model = Model(device=device)


def _unit(unit: Unit, folder: Path) -> dict[str, Any]:
    """A block of a configuration, or of plain decoding, whose answers are kept beside the result."""
    try:
        return _computed(unit, folder)
    except Exception:
        traceback.print_exc()  # now: after a fault of the GPU, letting go of its tensors ends the process
        raise


def _computed(unit: Unit, folder: Path) -> dict[str, Any]:
    assert _model is not None
    configuration, kv, sampling, first, count, tokens = unit
    kept = folder / f"plain-{kv}-{sampling}-{first}-{count}-{tokens}.json"
    if configuration is None:
        if not kept.exists():
            kept.write_text(json.dumps(_model.alone(kv, sampling, first, count, tokens)), encoding="utf-8")
        return {}
    return compare(_model, configuration, sampling, first, tokens, json.loads(kept.read_text(encoding="utf-8")))


def each(
    pool: ProcessPoolExecutor, jobs: int, run: Callable[[Unit], dict[str, Any]], units: Sequence[Unit]
) -> Iterator[tuple[Unit, dict[str, Any]]]:
    """Results in the order of `units`. If one fails, or its process dies, the error says which it was."""
    futures = [pool.submit(run, unit) for unit in units]
    for unit, future in zip(units, futures, strict=True):
        try:
            yield unit, future.result()
        except BrokenProcessPool:
            left = [unit for unit, future in zip(units, futures, strict=True) if future.exception()]
            names = " or ".join(_name(unit) for unit in left[:jobs])
            sys.exit(f"A process died, with its last words above, at {names}. What was done before is kept.")
        except Exception as error:
            for waiting in futures:
                waiting.cancel()
            sys.exit(f"{type(error).__name__} at {_name(unit)}: {error}")


def _name(unit: Unit) -> str:
    configuration, kv, kind, first, count, _ = unit
    which = f"plain decoding with {kv} KV"
    if configuration is not None:
        which = f"configuration {covering_set().index(configuration) + 1} ({configuration})"
    return f"{which}, {kind}, prompts {first + 1} to {first + count}"


def numbers(text: str) -> list[int]:
    """Of configurations, as --only has them."""
    last = len(covering_set())
    found = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(1 <= number <= last for number in found):
        raise argparse.ArgumentTypeError(f"configurations have the numbers 1 to {last}, found {text!r}; say --only 1,8")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:0 ...")
    parser.add_argument("--only", type=numbers, default=[], metavar="N[,M]", help="these configurations, once more")
    parser.add_argument("--out", type=Path, default=Path("build/lossless/result.json"))
    options = parser.parse_args()
    console = Console(highlight=False)
    folder = options.out.parent
    folder.mkdir(parents=True, exist_ok=True)
    result = _begun(options.out, options.prompts, options.tokens, options.device)
    blocks = [(first, min(BLOCK, options.prompts - first)) for first in range(0, options.prompts, BLOCK)]
    kinds = ("greedy", "sampled")
    every = covering_set()
    chosen = [every[number - 1] for number in options.only] or every
    plain: list[Unit] = [
        (None, kv, kind, first, count, options.tokens)
        for kv, kind, (first, count) in product(FACTORS["kv"], kinds, blocks)
        if any(c.kv == kv for c in chosen)
    ]
    drafted: list[Unit] = [
        (c, c.kv, kind, first, count, options.tokens)
        for (first, count), c, kind in product(blocks, chosen, kinds)
        if options.only or _key(c, kind, first) not in result["blocks"]
    ]
    run = partial(_unit, folder=folder)
    with (
        Progress(console=console) as bar,
        ProcessPoolExecutor(options.jobs, get_context("spawn"), _begin, (options.device,)) as pool,
    ):
        task = bar.add_task("plain decoding", total=len(plain))
        for _ in each(pool, options.jobs, run, plain):
            bar.advance(task)
        task = bar.add_task("configurations", total=len(drafted))
        for unit, found in each(pool, options.jobs, run, drafted):
            result["blocks"][_key(unit[0], unit[2], unit[3])] = found
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            bar.advance(task)
    sys.exit(_report(result, console))


def _begun(path: Path, count: int, tokens: int, device: str) -> dict[str, Any]:
    """An earlier result to go on with, if it is of the same model, sizes and versions; else a new one."""
    made_of = {
        "command": f"python -m benchmarks.lossless --prompts {count} --tokens {tokens}"
        + ("" if device == "cpu" else f" --device {device}"),
        "model_sha256": sha256((EMBEDDED / "stoker.json").read_bytes()).hexdigest(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "prompts": count,
        "tokens": tokens,
    }
    if path.exists():
        earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if all(earlier.get(key) == value for key, value in made_of.items()):
            return earlier
        for old in path.parent.glob("plain-*.json"):
            old.unlink()
    return {**made_of, "date": date.today().isoformat(), "blocks": {}}


def _key(configuration: Configuration | None, kind: str, first: int) -> str:
    return f"{configuration} | {kind} | {first}"


def _report(result: dict[str, Any], console: Console) -> int:
    """A row per configuration; 1 if a single token differs."""
    names = ("", "configuration", "sampling", "identical", "tokens/step", "preemptions", "cached")
    table = Table(*names, title="lossless")
    different = 0
    for (number, configuration), kind in product(enumerate(covering_set(), 1), ("greedy", "sampled")):
        found = [v for key, v in result["blocks"].items() if key.startswith(f"{configuration} | {kind} | ")]
        if not found:
            continue
        total = {name: sum(block[name] for block in found) for name in ("tokens", "identical", "steps")}
        different += total["tokens"] - total["identical"]
        per_step = sum(b["accepted_per_step"] * b["steps"] for b in found) / max(1, total["steps"])
        table.add_row(
            str(number), str(configuration), kind, f"{total['identical']:,} of {total['tokens']:,}", f"{per_step:.2f}",
            f"{sum(b['preemptions'] for b in found):,}", f"{sum(b['cached_tokens'] for b in found):,}",
        )  # fmt: skip
    console.print(table)
    console.print(f"{different:,} tokens differ from plain decoding of the same request alone.")
    return 1 if different else 0


if __name__ == "__main__":
    main()
