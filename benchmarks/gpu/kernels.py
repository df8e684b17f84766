"""Every step kernel on one GPU, at the shapes of Qwen3.5-122B-A10B and 35B-A3B with random weights.

    PYTHONPATH=src:. python benchmarks/gpu/kernels.py --json result.json
    PYTHONPATH=src:. python benchmarks/gpu/kernels.py --only deltanet,"attention FP8"

First what the memory delivers, then checks (checks.py), then times. A time is the median of graph replays over many
different weights, so that nothing comes from the L2 cache, divided by their number. Bytes are the weights, scales and
state, read or written once.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.cases import DEVICE, MixerCase, only, workspace
from benchmarks.gpu.checks import checks, passed, run_check
from benchmarks.gpu.result import device_name, record
from benchmarks.gpu.timing import bandwidth, graph_us, read_us
from benchmarks.gpu.weights import SHAPES, random_model, random_weight
from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.kernels.experts import ExpertBuffers, experts
from stoker.backends.gpu.kernels.linear import Stream, linear
from stoker.backends.gpu.kernels.route import Routing, route
from stoker.backends.gpu.packed import Kind
from stoker.backends.gpu.state import Bucket, StepBuffers, StepInputs, heads_of
from stoker.weights.model_config import FULL, LINEAR, ModelConfig

TOKENS = (1, 3, 4, 8, 13, 16, 32, 128)
Rows = list[dict[str, Any]]


def times(config: ModelConfig) -> dict[str, Callable[[float], Rows]]:
    """By the names that checks have; each takes the bytes per second of a large read."""
    delta, heads, hidden = config.delta, heads_of(config), config.hidden_size
    assert delta is not None
    values = delta.value_heads * delta.value_dim
    projections = {
        "in": ("deltanet qkv+z+a+b", delta.conv_channels + values + 2 * delta.value_heads, hidden),
        "qkv": ("attention q+k+v", heads.width, hidden),
        "out": ("out / o_proj", hidden, values),
    }
    return {
        **{
            f"linear {kind.name} {short}": partial(time_linear, name, kind, out, inputs)
            for short, (name, out, inputs) in projections.items()
            for kind in (Kind.INT4, Kind.NVFP4, Kind.FP8, Kind.BF16)
        },
        "experts int4": partial(time_moe, config, "int4"),
        "experts hybrid": partial(time_moe, config, "hybrid"),
        "deltanet": partial(time_deltanet, config),
        "attention BF16": partial(time_attention, config, False),
        "attention FP8": partial(time_attention, config, True),
    }


def time_linear(name: str, kind: Kind, out: int, inputs: int, read: float) -> Rows:
    matrices = [random_weight(kind, (out, inputs), DEVICE) for _ in range(24 if kind is Kind.INT4 else 12)]
    plain = read_us(matrices[0].nbytes, 16)
    rows = []
    for tokens in TOKENS if kind is Kind.INT4 else (1, 4, 16):
        x, space = torch.randn(tokens, inputs, device=DEVICE).bfloat16(), workspace(tokens)
        y = torch.empty(tokens, out, device=DEVICE)
        us = graph_us([partial(linear, x, w, y, space) for w in matrices])
        rows.append(entry(f"{name} {kind.name}", tokens, matrices[0].nbytes, us, plain, read))
    return rows


def time_moe(config: ModelConfig, weights: str, read: float) -> Rows:
    """Router alone, then router and experts; even routing by construction of the weights."""
    assert config.moe is not None
    layers = random_model(only(config, FULL, 4), weights, DEVICE, 64).layers
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, config.hidden_size, device=DEVICE).bfloat16()
        scaled, scale, space = x.clone(), torch.ones(config.hidden_size, device=DEVICE), workspace(tokens)
        routing = Routing.allocate(tokens, config.moe.top_k, DEVICE)
        buffers = ExpertBuffers.allocate(
            tokens, config.moe.top_k, config.moe.intermediate_size, config.hidden_size, DEVICE
        )
        squares = torch.empty(tokens, config.hidden_size // 16, device=DEVICE)
        stream = Stream(x, scale, scaled)
        routes, both = [], []
        for index in range(16):
            moe = layers[index % 4].moe
            first = partial(route, x, scaled, moe.router, routing, space, eps=1e-6, renormalize=True, shared=True)
            routes.append(first)
            second = partial(
                experts, stream, routing, moe.gate_up, moe.down, moe.shared_gate_up, moe.shared_down, buffers, squares,
                space, scale, eps=1e-6,
            )  # fmt: skip
            both.append(partial(_one_after_the_other, first, second))
        distinct = []
        for first in routes[:4]:
            first()
            distinct.append(len(routing.experts.unique()))
        count = sum(distinct) / len(distinct)
        moe = layers[0].moe
        assert moe.shared_gate_up is not None
        assert moe.shared_down is not None
        share = (moe.gate_up.nbytes + moe.down.nbytes) / config.moe.num_experts
        size = moe.router.nbytes + moe.shared_gate_up.nbytes + moe.shared_down.nbytes + share * count
        rows.append(entry("route", tokens, moe.router.nbytes, graph_us(routes), None, read))
        found = entry(f"route + experts {weights}", tokens, size, graph_us(both), None, read)
        rows.append({**found, "distinct_experts": count})
    return rows


def _one_after_the_other(*calls: Callable[[], None]) -> None:
    for call in calls:
        call()


def time_deltanet(config: ModelConfig, read: float) -> Rows:
    case, delta, rows = MixerCase(config, LINEAR), config.delta, []
    assert delta is not None
    for batch, count in ((1, 1), (1, 3), (1, 13), (4, 1), (4, 3)):
        bucket = Bucket(batch, count, 1)
        states = [case.state(batch, count, 1) for _ in range(24)]
        inputs = StepInputs.allocate(bucket, PAGE_SIZE, DEVICE)
        buffers = StepBuffers.allocate(config, bucket, 0, DEVICE)
        inputs.sequences.slots.copy_(torch.arange(batch, device=DEVICE))
        inputs.sequences.cached.fill_(64)
        inputs.sequences.replay.fill_(count)
        y = torch.randn(bucket.tokens, buffers.projected[LINEAR].shape[1], device=DEVICE)
        us = graph_us([partial(case.launch, y, inputs, buffers, state) for state in states])
        size = batch * 2 * delta.value_heads * delta.key_dim * delta.value_dim * 4
        rows.append(entry(f"deltanet, {count} replayed", bucket.tokens, size, us, None, read))
    return rows


def time_attention(config: ModelConfig, fp8: bool, read: float) -> Rows:
    heads, rows = heads_of(config), []
    for batch, count, context in ((1, 1, 640), (1, 3, 640), (4, 1, 640), (1, 1, 32768), (1, 3, 32768), (1, 1, 131072)):
        case = MixerCase(config, FULL, fp8, positions=context + 64)
        splits = -(-(context + count) // 256)
        bucket = Bucket(batch, count, splits)
        states = [case.state(batch, count, splits) for _ in range(4)]
        inputs = StepInputs.allocate(bucket, PAGE_SIZE, DEVICE)
        buffers = StepBuffers.allocate(config, bucket, 0, DEVICE)
        inputs.tables.copy_(torch.arange(batch * splits * 4, device=DEVICE).view(batch, -1))
        inputs.sequences.cached.fill_(context)
        y = torch.randn(bucket.tokens, heads.width, device=DEVICE)
        us = graph_us([partial(case.launch, y, inputs, buffers, state) for state in states])
        size = batch * context * 2 * heads.kv_count * heads.dim * (1 if fp8 else 2)
        name = f"attention {'FP8' if fp8 else 'BF16'}, {context} keys"
        rows.append(entry(name, bucket.tokens, size, us, None, read))
    return rows


def entry(name: str, tokens: int, size: float, us: float, plain_us: float | None, read: float) -> dict[str, Any]:
    speed = size / us * 1e6
    return {
        "kernel": name,
        "tokens": tokens,
        "us": round(us, 2),
        "bytes": round(size),
        "tb_s": round(speed / 1e12, 3),
        "fraction_of_read": round(speed / read, 3),
        "fraction_of_plain_read_of_size": round(plain_us / us, 3) if plain_us else None,
    }


def print_rows(rows: Rows) -> None:
    heads = f"{'kernel':34}{'tokens':>7}{'distinct':>9}{'us':>9}{'TB/s':>7}{'of read':>9}"
    print(f"{heads}{'of read of its size':>21}")
    for row in rows:
        size = row["fraction_of_plain_read_of_size"]
        print(
            f"{row['kernel']:34}{row['tokens']:7}{row.get('distinct_experts', ''):>9}{row['us']:9.2f}"
            f"{row['tb_s']:7.2f}{row['fraction_of_read']:9.0%}{'' if size is None else format(size, '.0%'):>21}"
        )


def chosen(names: Iterable[str], words: str) -> list[str]:
    """Those with one of the comma-separated words in them; all of them if there are no words."""
    wanted = [word.strip().lower() for word in words.split(",") if word.strip()] or [""]
    return [name for name in names if any(word in name.lower() for word in wanted)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", default="qwen3.5-122b-a10b", help="of the checks, or several; times are of the first"
    )
    parser.add_argument("--only", metavar="WORDS", default="", help="checks and times whose name has one of these")
    parser.add_argument("--checks", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--times", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    options = parser.parse_args(arguments)
    if unknown := set(options.shape.split(",")) - set(SHAPES):
        parser.error(f"--shape is one or several of {', '.join(SHAPES)}, not {', '.join(sorted(unknown))}.")
    if options.times and DEVICE.type != "cuda":
        parser.error("times need a GPU, and torch sees none here; --no-times runs the checks, in Triton's interpreter.")
    config = SHAPES[options.shape.split(",")[0]]
    names = {**(checks(config) if options.checks else {}), **(times(config) if options.times else {})}
    if options.only and not chosen(names, options.only):
        parser.error(f"--only {options.only}: no name has that in it. There are {', '.join(names)}.")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.manual_seed(0)
    shapes = {name: SHAPES[name] for name in options.shape.split(",")}
    delivered = bandwidth() if DEVICE.type == "cuda" else {}
    torch.cuda.empty_cache()
    print(f"{device_name()}: {', '.join(f'{name} {speed / 1e12:.2f} TB/s' for name, speed in delivered.items())}")
    found: dict[str, Any] = {}
    for shape, config in shapes.items() if options.checks else ():
        jobs = checks(config)
        found |= {f"{shape} {name}": run_check(f"{shape} {name}", jobs[name]) for name in chosen(jobs, options.only)}
    rows: Rows = []
    if options.times:
        timings = times(next(iter(shapes.values())))
        for name in chosen(timings, options.only):
            rows += timings[name](delivered["read"])
            torch.cuda.empty_cache()
        print_rows(rows)
    weights = f"random, at the shapes of {options.shape}"
    record("gpu/kernels", options.json, arguments, weights=weights, bandwidth=delivered, checks=found, rows=rows)
    if failed := [name for name, result in found.items() if not passed(result)]:
        sys.exit(f"checks failed: {', '.join(failed)}; see the lines above the JSON")


if __name__ == "__main__":
    main()
