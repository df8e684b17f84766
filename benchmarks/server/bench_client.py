"""Is `stoker bench` fast enough to measure 8 and 256 streams? A mock in a process of its own sends 20,000 tokens/s;
what one bench process reports is held against what was sent. `python -m benchmarks.server.bench_client --json FILE`

The mock sends to all streams at once, step by step, as a server with continuous batching does; a chunk is a token, the
hardest case: 20,000 chunks/s.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from stoker.bench.journal import Journal
from stoker.bench.record import Request
from stoker.bench.run import Runner
from stoker.bench.suites import Cell, Options, Plan
from stoker.bench.target import Target
from stoker.bench.workloads import Prompt

STREAMS, TOKENS_PER_S, SECONDS = (8, 256), 20_000, 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--tokens-per-s", type=int, default=TOKENS_PER_S)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows: dict[int, list[dict[str, float]]] = {streams: [] for streams in asked.streams}
    for streams in asked.streams * asked.runs:
        row = _against_mock(streams, asked.tokens_per_s, asked.seconds)
        rows[streams].append(row)
        print(
            f"{streams} streams: {row['reported_tokens_per_s']:,.0f} of {row['sent_tokens_per_s']:,.0f} tokens/s sent; "
            f"client overhead {row['overhead']:.2%}; {row['cpu_share']:.0%} of one core; stamped "
            f"{row['late_p50_ms']:.2f} ms after sending (p99 {row['late_p99_ms']:.2f})"
        )
    if asked.json:
        facts = {
            "processor": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
        }
        asked.json.write_text(
            json.dumps({"machine": facts, "asked": vars(asked) | {"json": None}, "rows": rows}, indent=1)
        )


def _against_mock(streams: int, rate: int, seconds: float) -> dict[str, float]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_mock, args=(theirs, streams, rate, seconds))
    process.start()
    port = ours.recv()
    times, cpu_share = asyncio.run(_measure(port, streams))  # a row of arrival times per stream
    sent = np.asarray(ours.recv())  # when each step was begun to be sent
    process.join()
    arrived = np.asarray(times)
    # Per stream: tokens after the first over the time they took, as reported and as sent; steps are the same for all.
    reported = np.median((arrived.shape[1] - 1) / (arrived[:, -1] - arrived[:, 0]))
    truth = (len(sent) - 1) / (sent[-1] - sent[0])
    late = (arrived - sent[None, :]) * 1e3
    return {
        "reported_tokens_per_s": float(reported * streams),
        "sent_tokens_per_s": float(truth * streams),
        "overhead": float(abs(1 - reported / truth)),
        "cpu_share": cpu_share,
        "late_p50_ms": float(np.percentile(late, 50)),
        "late_p99_ms": float(np.percentile(late, 99)),
        "late_p50_of_step": float(np.percentile(late, 50) / 1e3 * truth),
    }


async def _measure(port: int, streams: int) -> tuple[list[list[float]], float]:
    """The way a suite measures, from the runner down."""
    prompt = Prompt("load", {"messages": [{"role": "user", "content": "go"}], "max_tokens": 1}, None)
    found: list[list[float]] = []
    async with Target(f"http://127.0.0.1:{port}", "mock") as target:
        cell = Cell("load", concurrency=streams, rounds=1, seconds=1.0)  # each stream asks once: an answer takes longer
        runner = Runner([target], Plan([cell]), Options(), Journal(None, {}, Request), "salt", own={"load": [prompt]})
        runner.on_answer = lambda request, answer: found.append([chunk.at for chunk in answer.chunks])
        await runner.run()
        assert not any(request.failure for request in runner.requests), runner.requests[0].failure
        return found, runner.overhead.cpu_s / runner.overhead.wall_s


def _mock(pipe: Connection, streams: int, rate: int, seconds: float) -> None:
    asyncio.run(_serve(pipe, streams, rate, seconds))


async def _serve(pipe: Connection, streams: int, rate: int, seconds: float) -> None:
    """Bare sockets: a web framework would be what is measured."""
    writers: list[asyncio.StreamWriter] = []
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    plain = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                asked = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
                return
            if b"chat/completions" not in asked:
                length = asked.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                writer.write(plain)
                continue
            length = asked.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            body = await reader.readexactly(int(length or 0))
            if b'"go"' not in body:  # a question about what the server takes, not one of the streams
                usage = b'{"usage": {"prompt_tokens": 3}}'
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(usage), usage))
                continue
            writers.append(writer)
            return

    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=1024)
    pipe.send(server.sockets[0].getsockname()[1])
    while len(writers) < streams:
        await asyncio.sleep(0.01)
    for writer in writers:
        writer.write(head)
    steps, between = round(seconds * rate / streams), streams / rate
    begin, sent = time.monotonic() + 0.2, []
    event = b'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": " word"}, "token_ids": [7]}]}\n\n'
    chunk = b"%x\r\n%s\r\n" % (len(event), event)
    for step in range(steps):
        await asyncio.sleep(max(begin + step * between - time.monotonic(), 0))
        sent.append(time.monotonic())
        for writer in writers:
            writer.write(chunk)
    last = b"data: [DONE]\n\n"
    for writer in writers:
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last))
    pipe.send(sent)
    await asyncio.sleep(0.5)
    server.close()


if __name__ == "__main__":
    main()
