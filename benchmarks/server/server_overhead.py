"""What HTTP costs: the same requests to an engine process directly and through `stoker serve`, in turns.

The ceiling is the engine's own throughput, its events read and thrown away; the server parses requests, renders them,
turns tokens into text, looks for tool calls, and sends events. Everything runs on this machine, the client included, so
where other work takes the processors, look at CPU time: it says what the server adds, whoever else runs.
With --load, many clients stream for a while and every streamed answer is compared with the same one asked for whole.
Run with `python -m benchmarks.server.server_overhead`.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from stoker.demo import EMBEDDED, prompts
from stoker.engine.event import AUTO
from stoker.engine.worker.process import EngineProcess
from stoker.engine.worker.spec import EngineSpec
from stoker.sampling.settings import Sampling
from stoker.server.config import ServerConfig
from stoker.server.lifecycle.memory_guard import read_memory
from stoker.server.lifecycle.plan import plan_engine
from stoker.server.model import ServedModel
from stoker.speculate.choice import DraftChoice

TOKENS = 96
QUESTIONS = [text.partition("user\n")[2].partition("<|im_end|>")[0] for text in prompts()["JSON"]]
NO_THINK = {"enable_thinking": False}


@dataclass
class Row:
    draft: str
    clients: int
    engine_tokens_per_s: list[float] = field(default_factory=list)
    server_tokens_per_s: list[float] = field(default_factory=list)
    tokens: int = 0  # made through the server ...
    server_cpu_s: float = 0.0  # ... and what its two processes computed for them
    engine_cpu_s: float = 0.0

    @property
    def overhead(self) -> float:
        """Of the pairs of a round, the middle one: neighbours on the machine come and go between rounds."""
        pairs = zip(self.engine_tokens_per_s, self.server_tokens_per_s, strict=True)
        return statistics.median(1 - server / engine for engine, server in pairs)


@contextmanager
def serving(*options: str) -> Iterator[tuple[str, int]]:
    """A server process: its address and id."""
    with tempfile.NamedTemporaryFile("w+") as log:
        start = "from stoker.cli.main import run; run()"
        command = [sys.executable, "-c", start, "serve", "--model", "demo", "--port", "0", *options]
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            yield _address(process, Path(log.name)), process.pid
        finally:
            process.terminate()
            process.wait(60)


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    while process.poll() is None:
        time.sleep(0.2)
        if found := re.search(r"listening on (http://\S+)", log.read_text()):
            try:
                with urllib.request.urlopen(f"{found.group(1)}/ready", timeout=30):
                    return found.group(1)
            except OSError:
                continue
    raise RuntimeError(f"the server ended with {process.returncode}:\n{log.read_text()}")


# -- overhead


async def through_engine(engine: EngineProcess, model: ServedModel, questions: list[str], draft: str) -> float:
    """What the server would ask of the engine, asked of it directly."""
    choice = DraftChoice.parse(draft)
    depth = AUTO if choice.adaptive else choice.depth
    sampling = Sampling(max_tokens=TOKENS)
    prompts = [model.render([{"role": "user", "content": question}], options=NO_THINK) for question in questions]

    async def read(ids: list[int]) -> int:
        stream = engine.submit(ids, sampling, depth, model.boundaries(ids))
        return sum([len(event.tokens) async for event in stream])

    began = time.perf_counter()
    counts = await asyncio.gather(*map(read, prompts))
    return sum(counts) / (time.perf_counter() - began)


async def through_server(url: str, questions: list[str]) -> tuple[float, int]:
    """Tokens per second, and tokens."""

    async def read(session: aiohttp.ClientSession, question: str) -> int:
        body = chat(question, stream=True, ignore_eos=True, stream_options={"include_usage": True})
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            last = (await response.read()).split(b"\n\n")[-3]
        return int(json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"])

    async with aiohttp.ClientSession() as session:
        began = time.perf_counter()
        counts = await asyncio.gather(*(read(session, question) for question in questions))
        return sum(counts) / (time.perf_counter() - began), sum(counts)


def cpu_s(process: int) -> float:
    """What a process has computed so far, all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine_of(url: str) -> int:
    """The process of a server's engine."""
    with urllib.request.urlopen(f"{url}/state", timeout=60) as response:
        return int(json.load(response)["engine"]["pid"])


def chat(question: str, **more: Any) -> dict[str, Any]:
    given = {"max_completion_tokens": TOKENS, "temperature": 0, "chat_template_kwargs": NO_THINK}
    return {"messages": [{"role": "user", "content": question}], **given, **more}


def measure_overhead(drafts: list[str], clients: list[int], rounds: int, console: Console) -> list[Row]:
    os.environ["OMP_NUM_THREADS"] = "1"
    model, most = ServedModel(EMBEDDED, ("demo",), 0, {}), max(clients)
    rows = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=len(drafts) * len(clients) * (rounds + 1))
        for draft in drafts:
            config = ServerConfig(EMBEDDED, ("demo",), draft=draft, users=most)
            spec = EngineSpec(EMBEDDED, plan_engine(config, read_memory()).engine, DraftChoice.parse(draft))
            with serving("--draft", draft, "--users", str(most)) as (url, server), EngineProcess(spec) as engine:
                engine.ready.result(600)
                served_by = engine_of(url)
                for count in clients:
                    row = Row(draft, count)
                    asked = [QUESTIONS[place % len(QUESTIONS)] for place in range(count)]
                    for turn in range(rounds + 1):
                        direct = asyncio.run(through_engine(engine, model, asked, draft))
                        before = cpu_s(server), cpu_s(served_by)
                        served, tokens = asyncio.run(through_server(url, asked))
                        if turn:  # the first one warms up
                            row.engine_tokens_per_s.append(direct)
                            row.server_tokens_per_s.append(served)
                            row.tokens += tokens
                            row.server_cpu_s += cpu_s(server) - before[0]
                            row.engine_cpu_s += cpu_s(served_by) - before[1]
                        bar.advance(task)
                    rows.append(row)
    return rows


# -- load


@dataclass
class Load:
    clients: int
    seconds: float
    requests: int = 0
    tokens: int = 0
    failed: list[str] = field(default_factory=list)
    different: int = 0  # streamed answers that were not the whole ones
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)  # from one event with tokens to the next


async def load(url: str, clients: int, seconds: float, bar: Progress) -> Load:
    """Every client streams one answer after another; each kind of request was asked for whole before."""
    found = Load(clients, seconds)
    kinds = [(QUESTIONS[place], 0.0 if place % 2 else 0.9, place) for place in range(16)]
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        wholes = []
        for question, temperature, seed in kinds:
            body = chat(question, temperature=temperature, seed=seed, return_token_ids=True)
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                wholes.append((await response.json())["choices"][0]["token_ids"])
        task = bar.add_task(f"{clients} clients", total=seconds)
        began = time.perf_counter()
        end = began + seconds

        async def client(number: int) -> None:
            turn = number
            while time.perf_counter() < end:
                question, temperature, seed = kinds[turn % len(kinds)]
                body = chat(question, temperature=temperature, seed=seed, stream=True, return_token_ids=True)
                tokens: list[int] = []
                try:
                    await _stream(session, url, body, tokens, found)
                    found.different += tokens != wholes[turn % len(kinds)]
                except Exception as error:
                    found.failed.append(f"{type(error).__name__}: {error}"[:200])
                found.requests += 1
                found.tokens += len(tokens)
                turn += 7
                bar.update(task, completed=time.perf_counter() - began)

        await asyncio.gather(*(client(number) for number in range(clients)))
        found.seconds = time.perf_counter() - began
    return found


async def _stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], tokens: list[int], found: Load
) -> None:
    sent = last = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
        ended = False
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                ended = ended or line.startswith(b"data: [DONE]")
                continue
            message = json.loads(line[6:])
            if "error" in message:
                raise RuntimeError(message["error"]["message"])
            now = time.perf_counter()
            made = [token for choice in message["choices"] for token in choice["token_ids"]]
            if made:
                (found.between_s if tokens else found.first_s).append(now - (last if tokens else sent))
                tokens += made
                last = now
        if not ended:
            raise RuntimeError("the stream broke off")


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90, 95, 99)}


# -- telling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", nargs="+", default=["none", "mtp:3"], help="drafting, one row each")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8], help="requests at a time, one row each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", action="store_true", help="stream with 64 clients instead")
    parser.add_argument("--seconds", type=float, default=120.0, help="of --load")
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args()
    console = Console()
    document: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "tokens_per_answer": TOKENS}
    document["load_average_before"] = os.getloadavg()
    document |= _load_document(options, console) if options.load else _overhead_document(options, console)
    document["load_average_after"] = os.getloadavg()
    text = json.dumps(document, indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)


def _overhead_document(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    rows = measure_overhead(options.draft, options.clients, options.rounds, console)
    table = Table(title="the embedded model, measured here", box=SIMPLE, pad_edge=False)
    columns = ("drafting", "at a time", "engine alone, tok/s", "through the server, tok/s", "overhead")
    for name in (*columns, "CPU per token: engine", "server", "share"):
        table.add_column(name, justify="left" if name == "drafting" else "right")
    for row in rows:
        engine, server = map(statistics.median, (row.engine_tokens_per_s, row.server_tokens_per_s))
        costs = [f"{seconds / row.tokens * 1e6:.0f} µs" for seconds in (row.engine_cpu_s, row.server_cpu_s)]
        share = f"{row.server_cpu_s / row.engine_cpu_s:.1%}"
        table.add_row(
            row.draft, str(row.clients), f"{engine:.0f}", f"{server:.0f}", f"{row.overhead:.1%}", *costs, share
        )
    console.print(table)
    return {"rows": [{**asdict(row), "overhead": row.overhead} for row in rows]}


def _load_document(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    clients = 64 if options.clients == [1, 8] else options.clients[0]
    with (
        serving("--users", str(clients), "--queue", "64") as (url, _),
        Progress(console=console, transient=True) as bar,
    ):
        found = asyncio.run(load(url, clients, options.seconds, bar))
    document: dict[str, Any] = {
        "clients": clients,
        "seconds": found.seconds,
        "requests": found.requests,
        "failed": len(found.failed),
        "failures": sorted(set(found.failed)),
        "streamed_differently": found.different,
        "tokens_per_s": found.tokens / found.seconds,
        "ttft_s": percentiles(found.first_s),
        "between_events_s": percentiles(found.between_s),
    }
    table = Table(title=f"{clients} clients for {found.seconds:.0f} s, measured here", box=SIMPLE, show_header=False)
    for name in ("requests", "failed", "streamed_differently", "tokens_per_s"):
        table.add_row(name, f"{document[name]:,.0f}")
    for name in ("ttft_s", "between_events_s"):
        table.add_row(name, ", ".join(f"{share} {value:.3f}" for share, value in document[name].items()))
    console.print(table)
    return document


if __name__ == "__main__":
    main()
