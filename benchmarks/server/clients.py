"""The same server, the same prompts, three clients in turns: `stoker bench`, llama-benchy, and vLLM's bench client.

`python -m benchmarks.server.clients URL --vllm DIR --json FILE`. DIR is an unpacked vLLM wheel: its request
function needs nothing else of it. What they differ in and why is in docs/benchmarks.md.
The first round warms every prompt for all.

A figure of a client is the geometric mean over the prompts of its median over the rounds. A median over all requests
would say little: answers run at 200 to 670 tokens/s, and it falls into whatever gap lies in the middle of them.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import sys
from functools import partial
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

import aiohttp
from llama_benchy.client import LLMClient  # type: ignore[import-untyped]
from llama_benchy.results import BenchmarkResults  # type: ignore[import-untyped]

from stoker.bench.answer import count, read
from stoker.bench.measure import to_request
from stoker.bench.target import Target
from stoker.demo import prompts

KINDS, TOKENS = ("JSON", "agent", "code", "prose"), 128
Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--per-kind", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = asyncio.run(_measure(asked.url, asked.vllm, asked.rounds, asked.per_kind))
    shown = {client: _figures(found) for client, found in rows.items()}
    for client, figures in shown.items():
        print(f"{client}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    if asked.json:
        facts = {"cpus": os.cpu_count(), "load": os.getloadavg(), "rounds": asked.rounds, "tokens": TOKENS}
        asked.json.write_text(json.dumps({"machine": facts, "figures": shown, "requests": rows}, indent=1) + "\n")


def _figures(rows: list[Row]) -> Row:
    prompts = sorted({row["prompt"] for row in rows})
    return {
        name: geometric_mean([median(row[name] for row in rows if row["prompt"] == prompt) for prompt in prompts])
        for name in rows[0]
        if name != "prompt"
    }


async def _measure(url: str, vllm: Path | None, rounds: int, per_kind: int) -> dict[str, list[Row]]:
    texts = [_question(text) for kind in KINDS for text in prompts()[kind][:per_kind]]
    rows: dict[str, list[Row]] = {}
    function = _vllm_function(vllm) if vllm else None
    async with Target(url) as target, aiohttp.ClientSession() as session:
        # left to itself it sends no temperature, so the server samples
        benchy = LLMClient(f"{target.url}/v1", "none", target.model, {"temperature": 0})
        clients = {"stoker bench": partial(_stoker, target), "llama-benchy": partial(_benchy, benchy, session)}
        if function is not None:
            clients["vLLM's client"] = partial(_vllm, function, session, target)
        names = list(clients)
        for number in range(rounds + 1):
            for place, text in enumerate(texts):
                first = (number + place) % len(names)  # whoever asks first finds a server that rested
                for name in names[first:] + names[:first]:
                    row = await clients[name](text)
                    if number and row:
                        rows.setdefault(name, []).append({"prompt": place} | row)
    return rows


async def _stoker(target: Target, text: str) -> Row:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}
    await target.open(1)
    exchange = await target.ask(body)
    answer = read(exchange)
    count(answer)
    facts: dict[str, Any] = {"server": "A", "workload": "", "variant": "", "concurrency": 1, "round": 1, "rate": None}
    request = to_request(answer, exchange, **facts, depth=None, began=0.0, wanted=None, wants_json=False)
    if request.failure or not request.decode_tokens_per_s or not request.ttft_s or not request.total_s:
        return {}
    gaps = [b - a for a, b in zip(request.chunk_s, request.chunk_s[1:], strict=False)]
    return {
        "tokens": request.completion_tokens or 0,
        "chunks": request.chunks,
        "ttft_s": request.ttft_s,
        "decode_tokens_per_s": request.decode_tokens_per_s,
        "end_to_end_tokens_per_s": request.end_to_end_tokens_per_s or 0.0,
        "itl_per_token_ms": 1e3 * (request.decode_s or 0.0) / max(sum(request.chunk_tokens[1:]), 1),
        "itl_per_chunk_ms": 1e3 * fmean(gaps),
    }


async def _benchy(client: LLMClient, session: aiohttp.ClientSession, text: str) -> Row:
    result = await client.run_generation(session, "", text, TOKENS, False)
    if result.error:
        return {}
    results = BenchmarkResults()
    results.add("demo", 0, TOKENS, 0, 1, [[result]], 0.0, result.prompt_tokens)
    [run] = results.runs
    if run.tg_throughput is None or run.e2e_ttft is None:
        return {}
    seconds = result.end_ts - result.start_ts
    return {
        "tokens": result.total_tokens,
        "ttft_s": run.e2e_ttft.mean / 1e3,
        "decode_tokens_per_s": run.tg_throughput.mean,
        "end_to_end_tokens_per_s": result.total_tokens / seconds,
    }


async def _vllm(function: Any, session: aiohttp.ClientSession, target: Target, text: str) -> Row:
    asked = function.RequestFuncInput(
        prompt=text,
        api_url=f"{target.url}/v1/chat/completions",
        prompt_len=0,
        output_len=TOKENS,
        model=target.model,
        extra_body={"temperature": 0},
    )
    found = await function.async_request_openai_chat_completions(asked, session)
    if not found.success or not found.output_tokens or found.output_tokens < 2 or not found.itl:
        return {}
    per_token = (found.latency - found.ttft) / (found.output_tokens - 1)  # serve.py's TPOT
    return {
        "tokens": found.output_tokens,
        "ttft_s": found.ttft,
        "decode_tokens_per_s": 1 / per_token,
        "end_to_end_tokens_per_s": found.output_tokens / found.latency,
        "itl_per_token_ms": 1e3 * per_token,
        "itl_per_chunk_ms": 1e3 * fmean(found.itl),
    }


def _vllm_function(wheel: Path) -> Any:
    path = wheel / "vllm" / "benchmarks" / "lib" / "endpoint_request_func.py"
    spec = importlib.util.spec_from_file_location("vllm_request_function", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _question(text: str) -> str:
    """The last thing a user said in a prompt that is rendered already."""
    return text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0][:1500]


if __name__ == "__main__":
    main()
