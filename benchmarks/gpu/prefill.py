"""Prefill speed at real shapes with random weights made on the device; nothing is downloaded.

    PYTHONPATH=src:. python benchmarks/gpu/prefill.py --shape qwen3.5-122b-a10b --weights int4 \\
        --tokens 4096,32768,100000 --json result.json

Prints the floor first (operations over what a large matrix product reaches on this device), then the result, JSON last.
Before anything is timed, the path is checked: a prompt cut at multiples of 64 must leave the bits of the same prompt at
once, though experts then have tiles of another size; logits and recurrent state must agree with the same tokens taken
through steps. With `--context` the prompt comes behind so many tokens of which nobody computed the keys: a turn of a
conversation whose past is cached. Time runs from the first launch to the next token on the host.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.decode import _fill, timed
from benchmarks.gpu.result import device_name, record
from benchmarks.gpu.timing import graph_us, relative_error
from benchmarks.gpu.weights import SHAPES, random_model
from stoker.backends.family import CHUNK, PAGE_SIZE
from stoker.backends.gpu.kernels.deltanet import DeltaRing
from stoker.backends.gpu.kernels.prefill_experts import tile_size
from stoker.backends.gpu.prefill import Part, Prefill
from stoker.backends.gpu.state import Bucket, GpuCache
from stoker.backends.gpu.step import Step
from stoker.backends.gpu.weights import StepWeights
from stoker.backends.memory import tensor_bytes
from stoker.backends.network.cache import KVPages
from stoker.weights.model_config import ModelConfig

BLOCK = 16 if torch.cuda.is_available() else 4  # tokens of a step that the prompt is compared with
LIMIT = 0.05  # of the difference to steps: both round to bf16 at a dozen places of each layer, not at the same ones


def operations(config: ModelConfig, tokens: int, context: int) -> dict[str, float]:
    """Floating-point operations, multiply and add as two, of a prompt behind `context` tokens."""
    moe, delta, hidden = config.moe, config.delta, config.hidden_size
    assert moe is not None
    heads = config.num_heads * config.head_dim
    full, linear = len(config.full_layers), len(config.linear_layers)
    gate = 2 if config.attention_gate else 1
    projections = full * hidden * (gate * heads + 2 * config.num_kv_heads * config.head_dim + heads)
    recurrence = 0.0
    if delta is not None:
        values = delta.value_heads * delta.value_dim
        projections += linear * hidden * (delta.conv_channels + values + 2 * delta.value_heads + values)
        chunk = 4 * CHUNK**2 * (delta.key_dim + delta.value_dim) + 6 * CHUNK * delta.key_dim * delta.value_dim
        recurrence = linear * delta.value_heads * tokens / CHUNK * (chunk + 8 * CHUNK**3)
    layers = len(config.layer_types)
    shared = layers * (3 * moe.shared_intermediate_size + moe.num_experts + 1) * hidden
    seen = tokens * context + tokens * (tokens + 1) / 2
    return {
        "projections": 2.0 * tokens * projections,
        "shared experts, router": 2.0 * tokens * shared,
        "routed experts": 2.0 * tokens * layers * moe.top_k * 3 * moe.intermediate_size * hidden,
        "attention": 4.0 * full * heads * seen,
        "recurrence": recurrence,
        "head": 2.0 * hidden * config.vocab_size,
    }


def matmul_peak(device: torch.device, size: int = 8192) -> float:
    """Operations per second of a large bf16 product of the library: what is within reach on this device."""
    if device.type != "cuda":
        size = 256
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    if device.type == "cuda":
        seconds = graph_us([lambda: torch.mm(a, b, out=out)] * 8) * 1e-6
    else:
        seconds = timed(lambda: torch.mm(a, b, out=out))[1]
    return 2.0 * size**3 / seconds


class Prompt:
    """One sequence with room for a prompt behind its context."""

    def __init__(
        self, config: ModelConfig, weights: StepWeights, tokens: int, context: int, chunk: int, kv_dtype: torch.dtype,
        window: int = 1,
    ) -> None:  # fmt: skip
        device = weights.embedding.device
        self.context, pages = context, -(-(context + tokens) // PAGE_SIZE)
        self.cache = GpuCache.allocate(config, pages=pages, slots=1, window=window, device=device, kv_dtype=kv_dtype)
        if context:
            for state in self.cache.layers:
                if isinstance(state, KVPages):
                    _fill(state)
        self.table = torch.arange(pages, device=device, dtype=torch.int32).flip(0)
        self.ids = torch.randint(0, config.vocab_size, (tokens,), device=device, dtype=torch.int32)
        self.prefill = Prefill(config, weights, self.cache, chunk)

    def run(self, cuts: list[int]) -> int:
        """The prompt in chunks of so many tokens; the token after it."""
        at = 0
        for count in cuts:
            last = at + count == self.ids.shape[0]
            part = Part(0, self.context + at, count, table=self.table, chooses=last)
            self.prefill.forward(self.ids[at : at + count], [part])
            at += count
        return int(self.prefill.tokens[0])

    def cuts(self) -> list[int]:
        size, tokens = self.prefill.chunk, self.ids.shape[0]
        return [min(size, tokens - at) for at in range(0, tokens, size)]

    def states(self) -> list[Tensor]:
        """Keys and recurrent states of all layers."""
        return [state.recurrent if isinstance(state, DeltaRing) else state.keys for state in self.cache.layers]


def check_prefill(config: ModelConfig, weights: StepWeights, tokens: int, kv_dtype: torch.dtype) -> dict[str, Any]:
    """A prompt at once, in chunks, and in steps."""
    chunk = -(-tokens // CHUNK) * CHUNK

    def prompt() -> Prompt:
        torch.manual_seed(1)  # the same tokens each time
        return Prompt(config, weights, tokens, 0, chunk, kv_dtype, window=BLOCK)

    whole = prompt()
    whole.run([tokens])
    logits, kept = whole.prefill.logits[:1].clone(), [state.clone() for state in whole.states()]
    parts = prompt()
    parts.run([CHUNK] * (tokens // CHUNK) + ([tokens % CHUNK] if tokens % CHUNK else []))
    equal = torch.equal(logits, parts.prefill.logits[:1])
    equal &= all(torch.equal(_bits(a), _bits(b)) for a, b in zip(kept, parts.states(), strict=True))
    steps = prompt()
    stepped = _steps(config, weights, steps)
    delta = [layer for layer, state in enumerate(steps.cache.layers) if isinstance(state, DeltaRing)]
    drift = max((relative_error(kept[layer], steps.states()[layer]) for layer in delta), default=0.0)
    difference = relative_error(logits, stepped)
    return {
        "tokens": tokens,
        "cut_equals_whole": equal,
        "logits_differ_from_steps": difference,
        "states_differ_from_steps": drift,
        "agrees_with_steps": difference < LIMIT and drift < LIMIT,
        "finite": bool(logits.isfinite().all()),
    }


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor


def _steps(config: ModelConfig, weights: StepWeights, prompt: Prompt) -> Tensor:
    """Logits [1, vocab] after the prompt, taken through steps; states then hold all of it."""
    tokens, pages = prompt.ids.shape[0], prompt.table.shape[0]
    step = Step(config, weights, prompt.cache, Bucket(1, BLOCK, -(-pages * PAGE_SIZE // 256)), logits=True)
    step.inputs.tables[0, :pages].copy_(prompt.table)
    sequences, found, replay = step.inputs.sequences, None, 0
    for at in range(0, tokens + BLOCK, BLOCK):  # the one past the end brings the last tokens into the state
        count = max(0, min(BLOCK, tokens - at))
        sequences.cached.fill_(min(at, tokens))
        sequences.lengths.fill_(count)
        sequences.replay.fill_(replay)
        step.inputs.token_ids[:count].copy_(prompt.ids[at : at + count])
        step.forward()
        if count:
            assert step.buffers.best.logits is not None
            found = step.buffers.best.logits[count - 1 : count].clone()
        replay = count
    assert found is not None
    return found


def kernel_times(prompt: Prompt) -> list[dict[str, Any]]:
    """Milliseconds per kernel of one prompt, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        prompt.run(prompt.cuts())
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if "cuda" in str(event.device_type).lower():
            found.setdefault(event.name[:40], []).append(event.time_range.elapsed_us())
    rows = [{"kernel": name, "launches": len(times), "ms": sum(times) / 1e3} for name, times in found.items()]
    return sorted(rows, key=lambda row: -row["ms"])


def measure(
    config: ModelConfig, weights: StepWeights, options: argparse.Namespace, tokens: int, context: int, peak: float,
    name: str,
) -> dict[str, Any]:  # fmt: skip
    kv_dtype = torch.float8_e4m3fn if options.kv == "fp8" else torch.bfloat16
    chunk = min(options.chunk, -(-tokens // CHUNK) * CHUNK)
    prompt = Prompt(config, weights, tokens, context, chunk, kv_dtype)
    cuts = prompt.cuts()
    work = operations(config, tokens, context)
    total = sum(work.values())
    print(
        f"{name:7} {tokens:7,} tokens behind {context:7,}: {total / 1e12:8.1f} T operations, "
        f"floor {total / peak:7.3f} s at {peak / 1e12:.0f} T/s",
        flush=True,
    )
    if torch.cuda.is_available():
        prompt.run(cuts)  # compiles
    times = [timed(lambda: prompt.run(cuts))[1] for _ in range(options.runs)]
    seconds = min(times)
    assert config.moe is not None
    pairs = cuts[-1] * config.moe.top_k
    computed = int(prompt.prefill.buffers.tiles.tile_count) * tile_size(pairs, config.moe.num_experts)
    row = {
        "shape": options.shape,
        "weights": name,
        "tokens": tokens,
        "context": context,
        "chunk": chunk,
        "kv": options.kv,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "spread": max(times) / seconds - 1.0,
        "operations": work,
        "operations_per_s": total / seconds,
        "matmul_peak": peak,
        "floor_seconds": total / peak,
        "fraction_of_peak": total / seconds / peak,
        "expert_rows_computed_per_pair": computed / pairs,
        "buffer_bytes": tensor_bytes((prompt.prefill.buffers, prompt.prefill.features)),
        "layers": len(config.layer_types),
    }
    if options.operations and torch.cuda.is_available():
        try:
            row["kernels"] = kernel_times(prompt)
        except Exception as failure:  # the profiler's trouble must not cost the row
            row["kernels_failed"] = f"{type(failure).__name__}: {failure}"
    return row


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['weights']:7} {row['tokens']:7,} tokens behind {row['context']:7,}: measured {row['seconds']:.3f} s, "
        f"{row['tokens_per_s']:9,.0f} tokens/s, {row['operations_per_s'] / 1e12:.0f} T operations/s = "
        f"{row['fraction_of_peak']:.0%} of a large product, {row['expert_rows_computed_per_pair']:.2f} expert rows "
        f"for each needed, {row['buffer_bytes'] / 2**30:.2f} GiB of buffers",
        flush=True,
    )
    for part in row.get("kernels", [])[:24]:
        print(f"  {part['kernel']:34}{part['launches']:6} launches {part['ms']:9.2f} ms")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-122b-a10b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="only so many layers, where memory is short")
    parser.add_argument("--weights", default="int4", help="int4, hybrid or nvfp4, or several of them")
    parser.add_argument("--tokens", default="4096,32768,100000", help="of the prompt, or several numbers of them")
    parser.add_argument("--context", default="0", help="tokens before it, or several numbers of them")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of one forward, a multiple of 64")
    parser.add_argument("--kv", default="bf16", choices=["bf16", "fp8"])
    parser.add_argument("--runs", type=int, default=3, help="the fastest counts; all are in the spread")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="bits and values first")
    parser.add_argument("--check-tokens", type=int, default=1000, help="of the prompt that is checked")
    parser.add_argument("--operations", action="store_true", help="time per kernel, from the profiler")
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    options = parser.parse_args(arguments)
    if options.chunk < CHUNK or options.chunk % CHUNK:
        parser.error(f"--chunk must be a multiple of {CHUNK}, not {options.chunk}.")
    return options


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    config = SHAPES[options.shape]
    if options.layers:
        config = replace(
            config, layer_types=config.layer_types[: options.layers], sparse_layers=(True,) * options.layers
        )
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    torch.manual_seed(0)
    peak = matmul_peak(device)
    print(f"{device_name()}: {peak / 1e12:.2f} T operations/s in a large bf16 product", flush=True)
    prompts, contexts = ([int(number) for number in text.split(",")] for text in (options.tokens, options.context))
    kv_dtype = torch.float8_e4m3fn if options.kv == "fp8" else torch.bfloat16
    rows: list[dict[str, Any]] = []
    checks: dict[str, Any] = {}
    for name in options.weights.split(","):
        positions = max(max(prompts) + max(contexts), options.check_tokens) + 2 * BLOCK
        weights, seconds = timed(partial(random_model, config, name, device, positions))
        print(f"{name}: random weights of {len(config.layer_types)} layers made in {seconds:.1f} s", flush=True)
        if options.check:
            checks[name] = check_prefill(config, weights, options.check_tokens, kv_dtype)
            print(f"{name}: {checks[name]}", flush=True)
        for context in contexts:
            for tokens in prompts:
                rows.append(measure(config, weights, options, tokens, context, peak, name))
                print_row(rows[-1])
        del weights
    result = record("gpu/prefill", options.json, arguments, weights="random", checks=checks, rows=rows)
    if not all(check[key] for check in checks.values() for key in ("cut_equals_whole", "agrees_with_steps", "finite")):
        sys.exit("a check failed: see the lines above")
    return result


if __name__ == "__main__":
    main()
