"""What `stoker serve` gives on this GPU: a checkpoint on disk, the real server, a client over HTTP.

    PYTHONPATH=src:. python -m benchmarks.gpu.served --folder /mnt/t --weights int4 --draft none --json served.json
    PYTHONPATH=src:. python -m benchmarks.gpu.served --url http://127.0.0.1:8000 --json peer.json

The first form writes a random checkpoint at the shapes of Qwen3.5-122B-A10B into the folder if it has none (66.6 GiB: a
large tmpfs), starts the server and asks it for the rows of `benchmarks/server/rows.py`. The second asks a server that
runs. Random weights accept no drafts, so drafting is timed with an assumed number of tokens a step (`--accept-length`),
as the server and the result say. The physical limit stands beside each row (limits.py).
"""

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.checkpoint import write
from benchmarks.gpu.decode import shortened
from benchmarks.gpu.limits import Limits, beside, measure_card
from benchmarks.gpu.result import record
from benchmarks.gpu.weights import QWEN_122B
from benchmarks.server.rows import PASTS, PROMPTS, measure
from stoker.sizes.step import Draft
from stoker.speculate.choice import DraftChoice

START_S = 600.0


def checkpoint(options: argparse.Namespace) -> Path:
    folder: Path = options.folder / f"{options.weights}-{options.layers or len(QWEN_122B.layer_types)}"
    if not (folder / "tokenizer.json").exists():
        started = time.perf_counter()
        torch.manual_seed(0)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        total = write(folder, shortened(QWEN_122B, options.layers), device, options.weights == "hybrid")
        print(f"a checkpoint of {total / 2**30:.1f} GiB in {time.perf_counter() - started:.0f} s", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return folder


@contextlib.contextmanager
def server(options: argparse.Namespace, folder: Path, log: Path) -> Iterator[tuple[str, float]]:
    """Its address, and the seconds until it was ready."""
    command = [
        sys.executable, "-m", "stoker", "serve", "--model", str(folder), "--port", str(options.port),
        "--draft", options.draft, "--device", options.device, "--context", str(options.context),
        "--users", str(options.users), *options.serve.split(),
    ]  # fmt: skip
    if options.accept_length:
        command += ["--assume-acceptance", str(options.accept_length)]
    url, started = f"http://127.0.0.1:{options.port}", time.perf_counter()
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        while not _ready(url):
            if process.poll() is not None or time.perf_counter() - started > START_S:
                raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.05)
        yield url, time.perf_counter() - started
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="ask this server instead of starting one")
    parser.add_argument("--folder", type=Path, default=Path("build"), help="where checkpoints are kept")
    parser.add_argument("--weights", default="int4", choices=["int4", "hybrid"])
    parser.add_argument("--layers", type=int, help="fewer, for a trial")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--accept-length", type=float, help="tokens a step that drafting is assumed to make")
    parser.add_argument("--serve", default="", help="further options of stoker serve, as one word")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=int, default=131_072)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--port", type=int, default=8471)
    parser.add_argument("--starts", type=int, default=1, help="the server is started so often; the last one is asked")
    parser.add_argument("--streams", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=numbers, default=list(PROMPTS))
    parser.add_argument("--pasts", type=numbers, default=list(PASTS))
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--log", type=Path, default=Path("build/served.log"), help="what the server says")
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    return parser.parse_args(arguments)


def ask(url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    return asyncio.run(measure(url, options.streams, options.prompts, options.pasts, options.agents))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    if options.url:
        return record("gpu/served", options.json, arguments, rows=ask(options.url, options))
    folder, starts = checkpoint(options), []
    card = measure_card() if torch.cuda.is_available() else None
    torch.cuda.empty_cache()
    options.log.parent.mkdir(parents=True, exist_ok=True)
    for left in reversed(range(options.starts)):
        with server(options, folder, options.log) as (url, seconds):
            starts.append(round(seconds, 1))
            print(f"ready after {seconds:.1f} s", flush=True)
            rows = [] if left else ask(url, options)
    if card:
        choice = DraftChoice.parse(options.draft)
        draft = Draft(choice.kinds[0], choice.depth) if choice.depth else Draft()
        beside(rows, Limits.of(folder, card, draft, options.accept_length or 1.0))
    return record("gpu/served", options.json, arguments, start_s=starts, card=card and asdict(card), rows=rows)


if __name__ == "__main__":
    main()
