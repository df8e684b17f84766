"""Does `stoker check` put copies of a model in the order of what they really lost? On the embedded model, served:

    python -m benchmarks.server.check_formats --out DIR [--texts 20] [--only truth,copies,self] [--json FILE]

The true divergence is computed with torch in fp32, over the whole vocabulary, on the same texts and on as many others.
`stoker check --suite closeness` then compares each copy, served, with the reference, served. The verdict should be
"worse" exactly where the true divergence is above the limit of docs/check.md, which was written down before the first
run. At last the reference is compared with itself 20 times, each time on other items and texts, at temperature 0.8 and
without a seed, so that its two sets of answers differ by chance alone: at most one false alarm.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import torch
from msgspec import to_builtins

from benchmarks.server.format_copies import make
from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache
from stoker.backends.network.load import Loaded, load_model
from stoker.check.closeness import Gap, gap
from stoker.check.passages import passages
from stoker.check.predictions import TOP
from stoker.check.suites import draw
from stoker.check.verdict import MAX_KL
from stoker.engine.tokenizer import Tokenizer

STOKER = (sys.executable, "-c", "from stoker.cli.main import run; run()")
SEED, OTHER_SEED = "1", "2"  # of the texts that are compared, and of others
PATIENCE_S = 900.0
COMPARISONS = 20  # of a server with itself
LOADING = threading.Lock()  # a model is made under a default dtype, which all threads share
SHORT, SHORT_TOKENS, SHORT_SUITES = "short", 160, ("tools", "languages")
COINS = 8  # for each item of another suite
SUBSTANCE = ("truth", "copies", "self")


# -- the truth


def log_probabilities(loaded: Loaded, texts: list[list[int]]) -> torch.Tensor:
    """[T, vocabulary] of several texts one after another, by the fp32 reference; without the last row of each, since no
    token stands behind it."""
    runs, first = [], 0
    for slot, tokens in enumerate(texts):
        pages = -(-len(tokens) // PAGE_SIZE)
        runs.append(Run(tokens, 0, slot, list(range(first, first + pages))))
        first += pages
    cache = Cache.allocate(loaded.config, pages=first, slots=len(texts), dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        hidden, _ = loaded.model(Batch.of(Family.PREFILL, runs, PAGE_SIZE, "cpu"), cache, ())
        ends = torch.cumsum(torch.tensor([len(tokens) for tokens in texts]), 0) - 1
        kept = torch.ones(len(hidden), dtype=torch.bool)
        kept[ends] = False
        return loaded.model.logits(hidden[kept], Family.PREFILL).log_softmax(-1)


def truth(made: dict[str, Path], per_kind: int, seed: str, jobs: int) -> dict[str, dict[str, Any]]:
    """KL(reference || copy) and agreement of the likeliest token, by copy: over all texts, and by kind. Beside it what
    closeness makes of the 20 likeliest tokens of the same network, which is all that servers list."""
    copies = {name: directory for name, directory in made.items() if name != "reference"}
    tokenizer = Tokenizer(made["reference"])
    kinds = {kind: [tokenizer.encode(text) for text in found] for kind, found in passages(seed, per_kind).items()}
    reference = load_model(made["reference"], torch.float32)
    wanted = {kind: log_probabilities(reference, texts) for kind, texts in kinds.items()}

    def one(name: str) -> dict[str, Any]:
        with LOADING:
            copy = load_model(copies[name], torch.float32)
        kl: dict[str, float] = {}
        same = count = 0
        bound = rest = 0.0
        for kind, texts in kinds.items():
            p, q = wanted[kind], log_probabilities(copy, texts)
            kl[kind] = float((p.exp() * (p - q)).sum(-1).mean())
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
            count += len(p)
            for each in gaps(p, q):
                bound, rest = bound + each.kl, rest + each.rest
        total = sum(kl[kind] * len(wanted[kind]) for kind in kl) / count
        told = f"{total:.5f}, from lists {bound / count:.5f}, same top token {same / count:.1%}"
        print(f"true KL, seed {seed}: {name} {told}", flush=True)
        top1 = same / count
        return {
            "kl": total,
            "from_lists": bound / count,
            "rest": rest / count,
            "top1": top1,
            "tokens": count,
            "kinds": kl,
        }

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(copies, pool.map(one, copies), strict=True))


def gaps(reference: torch.Tensor, other: torch.Tensor) -> list[Gap]:
    """What closeness makes of two tables of log-probabilities, row by row, from the tokens that servers list."""
    both = zip(listed(reference), listed(other), strict=True)
    return [gap(ours, theirs, min(theirs.values())) for ours, theirs in both]


def listed(table: torch.Tensor) -> list[dict[int, float]]:
    """The likeliest tokens of each row, as many as servers list."""
    values, tokens = table.topk(TOP[0])
    return [dict(zip(*each, strict=True)) for each in zip(tokens.tolist(), values.tolist(), strict=True)]


# -- servers and checks


@contextmanager
def serving(model: Path, *options: str) -> Iterator[str]:
    """The address of `stoker serve`, once it answers."""
    command = [*STOKER, "serve", "--model", str(model), "--port", "0", "--device", "cpu", "--users", "8", *options]
    environment = {**os.environ, "NO_COLOR": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    said: list[str] = []
    threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True).start()
    try:
        yield _address(process, said)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


def _address(process: "subprocess.Popen[str]", said: list[str]) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"listening on (http://\S+)", "".join(said)):
            try:
                with urllib.request.urlopen(f"{found[1]}/ready", timeout=10) as response:
                    if response.status == 200:
                        return found[1]
            except OSError:
                pass
        time.sleep(0.5)
    raise SystemExit("the server did not get ready; it said:\n" + "".join(said[-20:]))


def check(first: str, second: str, file: Path, *options: str) -> dict[str, Any]:
    """The result of `stoker check`, run as people run it."""
    command = [*STOKER, "check", first, "--against", second, "--json", str(file), "--fresh", *options]
    return run_check(command, file)


def run_check(command: list[str], file: Path) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not file.exists():
        raise SystemExit(f"stoker check ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def compare_copies(made: dict[str, Path], per_kind: int, out: Path, jobs: int) -> dict[str, dict[str, Any]]:
    copies = {name: directory for name, directory in made.items() if name != "reference"}
    options = ("--suite", "closeness", "--texts", str(per_kind), "--seed", SEED, "--concurrency", "4")

    with serving(made["reference"], "--draft", "none") as reference, ThreadPoolExecutor(jobs) as pool:

        def one(name: str) -> dict[str, Any]:
            with serving(copies[name], "--draft", "none") as copy:
                result = check(copy, reference, out / f"check-{copies[name].name}.json", *options)
            print(f"{name}: {result['statement']}", flush=True)
            return {key: result[key] for key in ("verdict", "statement", "notes", "closeness")}

        return dict(zip(copies, pool.map(one, copies), strict=True))


def _asked(suite: str, seed: str, items: int, out: Path) -> tuple[str, ...]:
    """The items of one comparison. Those of `short` are written down as suites of one's own, for a machine without a
    GPU: items that end early, and coins, since the embedded model gets few of the former right and a test of pairs
    cannot err where no pair differs. A coin is right if the answer ends on an odd digit or a letter up to m.
    """
    if suite != SHORT:
        return ("--suite", suite, "--items", str(items), "--texts", "2", "--seed", seed)
    folder, drawn = out / SHORT, Random(seed)
    folder.mkdir(exist_ok=True)
    lines: dict[str, list[dict[str, Any]]] = {}
    for item in draw("full", seed):
        if item.suite in SHORT_SUITES and item.max_tokens <= SHORT_TOKENS:
            lines.setdefault(item.suite, []).append(to_builtins(item))
    for name in ("coins", "more coins"):
        lines[name] = [
            {
                "id": str(number),
                "prompt": f"Tell me about number {drawn.randrange(10_000)}.",
                "checker": "regex",
                "expect": r"(?s).*[13579a-m]\W*",
                "max_tokens": 12,
            }
            for number in range(COINS * items)
        ]
    for name, found in lines.items():
        wanted = [json.dumps({k: v for k, v in each.items() if k != "answer_tokens"}) for each in found]
        kept = wanted if "coins" in name else wanted[:items]
        (folder / f"{name}.jsonl").write_text("\n".join(kept), encoding="utf-8")
    return ("--suite", f"{folder}/")


def compare_with_itself(model: Path, suite: str, items: int, temperature: float, out: Path) -> list[dict[str, Any]]:
    """At a temperature and without a seed, each comparison on other items."""
    found: list[dict[str, Any]] = []
    with serving(model, "--draft", "none") as server:
        for number in range(COMPARISONS):
            result = check(
                server,
                server,
                out / "self.json",
                *_asked(suite, f"self-{number}", items, out),
                *("--concurrency", "8", "--body", json.dumps({"temperature": temperature, "seed": None})),
            )
            differing = sum(
                asked["replies"]["A"]["reply"]["text"] != asked["replies"]["B"]["reply"]["text"]
                for asked in result["answers"]
            )
            found.append(
                {
                    "verdict": result["verdict"],
                    "items": len(result["answers"]),
                    "answers_that_differ": differing,
                    "only_one_right": sum(
                        (asked["replies"]["A"]["score"] == 1) != (asked["replies"]["B"]["score"] == 1)
                        for asked in result["answers"]
                    ),
                    "failed": result["failed"],
                    "rows": [row["name"] for row in result["suites"]],
                    "lowest_p": min(row["p"] for row in result["suites"]),
                    "kl": result["closeness"][-1]["kl"] if result["closeness"] else None,
                }
            )
            print(f"with itself, {number + 1}: {found[-1]}", flush=True)
    return found


# -- what it means


def judged(truths: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    def order(values: dict[str, float]) -> list[str]:
        return sorted(values, key=lambda name: values[name])

    bounds = {name: each["closeness"][-1] for name, each in seen.items()}
    same = {name: each["kl"] for name, each in truths["same texts"].items()}
    others = {name: each["kl"] for name, each in truths["other texts"].items()}
    worse = {name for name, each in seen.items() if each["verdict"] == "worse"}
    return {
        "limit": MAX_KL,
        "order_by_closeness": order({name: row["kl"] for name, row in bounds.items()}),
        "order_by_true_kl": order(same),
        "order_by_lists_of_the_fp32_network": order(
            {n: each["from_lists"] for n, each in truths["same texts"].items()}
        ),
        "order_by_true_kl_of_other_texts": order(others),
        "worse": sorted(worse),
        "truly_above": sorted(name for name, kl in same.items() if kl > MAX_KL),
        "truly_above_on_other_texts": sorted(name for name, kl in others.items() if kl > MAX_KL),
        "bound_to_truth": {name: bounds[name]["kl"] / same[name] for name in bounds},
        "truth_of_other_texts_within_interval": {
            name: bounds[name]["low"] <= others[name] <= bounds[name]["high"] for name in bounds
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where copies are made, and kept for the next run")
    parser.add_argument("--texts", type=int, default=20, help="of each kind")
    parser.add_argument("--serve", action="append", help="only this copy, by its name; may be given several times")
    parser.add_argument("--items", type=int, default=6, help="of each suite, where the reference meets itself")
    parser.add_argument("--self-suite", default="full", help=f"what is asked where it meets itself, or {SHORT}")
    parser.add_argument("--self-model", type=Path, help="what meets itself, instead of the reference")
    parser.add_argument("--temperature", type=float, default=0.8, help="where it meets itself")
    parser.add_argument("--jobs", type=int, default=1, help="copies worked on at a time")
    parser.add_argument("--only", default=",".join(SUBSTANCE))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = options.only.split(",")
    made = make(options.out)
    if unknown := set(options.serve or ()) - set(made):
        parser.error(f"no copy is called {', '.join(sorted(unknown))}; there are {', '.join(made)}")
    kept = options.json and options.json.exists() and wanted != list(SUBSTANCE)
    result: dict[str, Any] = json.loads(options.json.read_text(encoding="utf-8")) if kept else {}
    result |= {
        "self_suite": options.self_suite,
        "benchmark": "check_formats",
        "date": datetime.now(UTC).date().isoformat(),
        "texts_per_kind": options.texts,
        "environment": {"platform": platform.platform(), "torch": torch.__version__, "cores": os.cpu_count()},
    }
    with ExitStack() as stack:
        stack.callback(lambda: _write(result, options.json))
        if "truth" in wanted:
            for texts, seed in (("same texts", SEED), ("other texts", OTHER_SEED)):
                found = truth(made, options.texts, seed, options.jobs)
                result["truth"] = {**result.get("truth", {}), texts: found}
                _write(result, options.json)
        if "copies" in wanted:
            served = {name: made[name] for name in ("reference", *(options.serve or made))}
            found = compare_copies(served, options.texts, options.out, options.jobs)
            result["copies"] = {**result.get("copies", {}), **found}
        if len(result.get("truth", {})) == 2 and "copies" in result:
            result["judged"] = judged(result["truth"], result["copies"])
            print(json.dumps(result["judged"], indent=1))
        if "self" in wanted:
            result["self"] = compare_with_itself(
                options.self_model or made["reference"],
                options.self_suite,
                options.items,
                options.temperature,
                options.out,
            )
            result["false_alarms"] = sum(each["verdict"] in ("worse", "better") for each in result["self"])
            print(f"false alarms: {result['false_alarms']} of {len(result['self'])}")


def _write(result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
