# Triton types the read kernel; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""INT4 step kernels on one GPU, at the shapes of Qwen3.5-122B-A10B with random weights.

    PYTHONPATH=src python benchmarks/gpu_kernels.py --json result.json

First what the memory delivers (a large copy, a large read, and reads of one matrix's size, which pay the same
launch and ramp as the kernels), then checks, then times. A time is the median of graph replays over many different
matrices, so that nothing comes from the L2 cache, divided by their number. Bytes are the packed weights and scales,
read once.
"""

import argparse
import datetime
import json
import platform
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.ops.int4_experts import int4_experts as experts_operation
from stoker.ops.int4_linear import PackedInt4
from stoker.ops.triton import int4_experts as experts_kernels
from stoker.ops.triton import int4_linear as linear_kernels
from stoker.ops.triton.int4_experts import int4_experts
from stoker.ops.triton.int4_linear import int4_linear

LINEARS = {"deltanet qkv+z": (20480, 3072), "attention q+k+v": (17408, 3072), "out / o_proj": (3072, 8192)}
EXPERTS, TOP_K, HIDDEN, INTER = 256, 8, 3072, 1024
TOKENS = (1, 3, 4, 8, 13, 16, 32, 64, 128)
ROUTES = [(1, 256), (3, 256), (4, 256), (8, 256), (13, 256), (13, 64), (16, 256), (32, 256), (128, 256)]
LAYERS = 4  # of experts, so that consecutive launches read different weights


@triton.jit
def read_kernel(words_ptr, out_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    words_ptr += tl.program_id(0).to(tl.int64) * COUNT
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, COUNT, BLOCK):
        total ^= tl.load(words_ptr + start + tl.arange(0, BLOCK))
    value = tl.xor_sum(total, 0)
    if value == 123456789:  # keeps the loads alive
        tl.store(out_ptr, value)


def read(words: Tensor, out: Tensor) -> None:
    read_kernel[(words.numel() // 8192,)](words, out, COUNT=8192, BLOCK=2048, num_warps=4, enable_fp_fusion=False)


def graph_us(calls: list[Callable[[], Any]]) -> float:
    """Microseconds per call, the median of seven replays of a graph of all calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for replay in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 2:
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def random_weight(lead: tuple[int, ...], out: int, inputs: int) -> PackedInt4:
    packed = torch.randint(-(2**15), 2**15, (*lead, out // 16, inputs // 128, 16, 32), dtype=torch.int16, device="cuda")
    scales = (torch.randn(*lead, inputs // 128, out, device="cuda") * 0.01).half()
    counters = torch.zeros(out // 2, dtype=torch.int32, device="cuda")
    return PackedInt4(packed, scales, counters, out)


def weight_bytes(weight: PackedInt4) -> int:
    return weight.packed.numel() * 2 + weight.scales.numel() * 2


def routing(tokens: int, pool: int) -> Tensor:
    """Distinct experts per token, drawn evenly from the first `pool` experts."""
    return torch.rand(tokens, pool, device="cuda").topk(TOP_K).indices.int().contiguous()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def ceilings() -> dict[str, Any]:
    source = torch.randint(-(2**31), 2**31 - 1, (2**30,), dtype=torch.int32, device="cuda")  # 4 GiB
    target, out = torch.empty_like(source), torch.zeros(1, dtype=torch.int32, device="cuda")
    found: dict[str, Any] = {
        "copy_tb_s": 2 * source.numel() * 4 / graph_us([lambda: torch.bitwise_not(source, out=target)]) / 1e6,
        "read_tb_s": source.numel() * 4 / graph_us([lambda: read(source, out)]) / 1e6,
        "tiny_read_us": graph_us([lambda: read(source[:8192], out)] * 40),
    }
    sizes = {name: o * i // 8 for name, (o, i) in LINEARS.items()}
    sizes |= {"8 experts gate+up": INTER * HIDDEN * 2, "8 experts down": INTER * HIDDEN}
    found["read_of_size_us"] = {
        name: graph_us([partial(read, part, out) for part in source.split(n)[:-1][:40]]) for name, n in sizes.items()
    }
    return found


def plain_path(call: Callable[[], Tensor]) -> Tensor:
    """`call` with the conversion written in Triton instead of PTX."""
    plain = {**linear_kernels.arithmetic(torch.device("cuda")), "PTX": False}
    with (
        patch.object(linear_kernels, "arithmetic", return_value=plain),
        patch.object(experts_kernels, "arithmetic", return_value=plain),
    ):
        return call()


def check_linear(out: int, inputs: int) -> dict[str, Any]:
    """Against fp64, and every row of 1..128 alone, in company and with other neighbours, bit for bit."""
    weight = random_weight((), out, inputs)
    x = torch.randn(128, inputs, device="cuda").bfloat16()
    expected = x.double() @ weight.dequantize().double().t()
    y = int4_linear(x, weight)
    alone = torch.cat([int4_linear(x[row : row + 1], weight) for row in range(128)])
    counts = all(torch.equal(int4_linear(x[:n], weight), y[:n]) for n in range(1, 129))
    order = torch.randperm(128, device="cuda")
    moved = torch.equal(int4_linear(x[order].contiguous(), weight), y[order])
    plain = all(torch.equal(plain_path(partial(int4_linear, x[:n], weight)), y[:n]) for n in (1, 16))
    return {
        "relative_error": relative_error(y, expected),
        "rows_alone_equal": torch.equal(alone, y),
        "row_counts_equal": counts,
        "neighbours_equal": moved,
        "ptx_equals_plain": plain,
    }


def check_experts(gate_up: PackedInt4, down: PackedInt4) -> dict[str, Any]:
    x = torch.randn(128, HIDDEN, device="cuda").bfloat16()
    chosen, weights = (
        routing(128, 48),
        torch.rand(128, TOP_K, device="cuda"),
    )  # 21 pairs an expert: several tiles

    def run(rows: slice | Tensor) -> Tensor:
        return int4_experts(x[rows].contiguous(), chosen[rows].contiguous(), weights[rows].contiguous(), gate_up, down)

    y = run(slice(None))
    expected = experts_operation.reference(x[:4], chosen[:4], weights[:4], gate_up, down)
    alone = torch.cat([run(slice(row, row + 1)) for row in range(128)])
    order = torch.randperm(128, device="cuda")
    return {
        "relative_error": relative_error(y[:4], expected),
        "rows_alone_equal": torch.equal(alone, y),
        "row_counts_equal": all(torch.equal(run(slice(0, n)), y[:n]) for n in range(2, 129)),
        "neighbours_equal": torch.equal(run(order), y[order]),
        "ptx_equals_plain": torch.equal(plain_path(lambda: run(slice(0, 16))), y[:16]),
    }


def time_linears(ceiling: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, (out, inputs) in LINEARS.items():
        matrices = [random_weight((), out, inputs) for _ in range(40)]
        x = torch.randn(128, inputs, device="cuda").bfloat16()
        for tokens in TOKENS:
            us = graph_us([partial(int4_linear, x[:tokens], w) for w in matrices])
            rows.append(row(name, tokens, weight_bytes(matrices[0]), us, ceiling["read_of_size_us"][name], ceiling))
    return rows


def time_experts(gate_up: PackedInt4, down: PackedInt4, ceiling: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for tokens, pool in ROUTES:
        routes = [routing(tokens, pool) for _ in range(24)]
        distinct = statistics.mean(len(r.unique()) for r in routes)
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        weights = torch.rand(tokens, TOP_K, device="cuda")

        parts: dict[str, float] = {}
        for part, weight in (("gate+up", gate_up), ("down", down)):
            parts[part] = graph_us([product(part, x, r, weight[i % LAYERS]) for i, r in enumerate(routes)])
        parts["all"] = graph_us(
            [partial(int4_experts, x, r, weights, gate_up[i % LAYERS], down[i % LAYERS]) for i, r in enumerate(routes)]
        )
        share = {
            "gate+up": weight_bytes(gate_up) / LAYERS / EXPERTS,
            "down": weight_bytes(down) / LAYERS / EXPERTS,
        }
        share["all"] = share["gate+up"] + share["down"]
        for part, us in parts.items():
            size = ceiling["read_of_size_us"].get(f"8 experts {part}") if tokens == 1 else None
            entry = row(f"experts {part}", tokens, share[part] * distinct, us, size, ceiling)
            rows.append({**entry, "distinct_experts": round(distinct, 1), "routing": f"even over {pool}"})
    return rows


def product(part: str, x: Tensor, chosen: Tensor, weight: PackedInt4) -> Callable[[], Any]:
    """One of the two products, launched as `int4_experts` launches it, with the tiles ready."""
    tokens = x.shape[0]
    pairs = tokens * TOP_K
    tiles = experts_kernels.expert_tiles(chosen) if tokens > 1 else (chosen, chosen)
    gated = part == "gate+up"
    source = x if gated else torch.randn(pairs, INTER, device="cuda").bfloat16()
    target = torch.empty(pairs, INTER if gated else HIDDEN, device="cuda", dtype=x.dtype if gated else torch.float32)
    shape = experts_kernels.launch_shape(weight.in_features, gated)
    math = linear_kernels.arithmetic(x.device)
    grid = ((INTER if gated else HIDDEN) // 16, pairs)
    return lambda: experts_kernels.experts_kernel[grid](
        source, *tiles, weight.packed, weight.scales, target, OUT=weight.out_features, ROWS=weight.rows,
        IN=weight.in_features, GATED=gated, TOP_K=TOP_K, ONE_TOKEN=tokens == 1, **shape, **math,
    )  # fmt: skip


def row(
    name: str, tokens: int, size: float, us: float, read_us: float | None, ceiling: dict[str, Any]
) -> dict[str, Any]:
    speed = size / us / 1e6
    return {
        "kernel": name,
        "tokens": tokens,
        "us": round(us, 2),
        "bytes": round(size),
        "tb_s": round(speed, 3),
        "fraction_of_read": round(speed / ceiling["read_tb_s"], 3),
        "fraction_of_plain_read_of_size": round(read_us / us, 3) if read_us else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    options = parser.parse_args()
    torch.manual_seed(0)
    environment = {
        "command": "PYTHONPATH=src python benchmarks/gpu_kernels.py",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "weights": "random, measured at the shapes of Qwen3.5-122B-A10B",
    }
    ceiling = ceilings()
    torch.cuda.empty_cache()
    print(f"{environment['device']}: reads {ceiling['read_tb_s']:.2f} TB/s, copies {ceiling['copy_tb_s']:.2f} TB/s")
    for name, us in ceiling["read_of_size_us"].items():
        print(f"  a plain read of the size of {name}: {us:.2f} us")
    checks = {name: check_linear(*shape) for name, shape in LINEARS.items()}
    rows = time_linears(ceiling)
    torch.cuda.empty_cache()
    gate_up, down = (
        random_weight((LAYERS, EXPERTS), 2 * INTER, HIDDEN),
        random_weight((LAYERS, EXPERTS), HIDDEN, INTER),
    )
    checks["experts"] = check_experts(gate_up[0], down[0])
    rows += time_experts(gate_up, down, ceiling)
    print(f"{'kernel':18}{'tokens':>7}{'distinct':>9}{'us':>9}{'TB/s':>7}{'of read':>9}{'of read of its size':>21}")
    for r in rows:
        size = r["fraction_of_plain_read_of_size"]
        print(
            f"{r['kernel']:18}{r['tokens']:7}{r.get('distinct_experts', ''):>9}{r['us']:9.2f}{r['tb_s']:7.2f}"
            f"{r['fraction_of_read']:9.0%}{'' if size is None else format(size, '.0%'):>21}"
        )
    for name, found in checks.items():
        print(f"{name}: " + ", ".join(f"{k} {v:.1e}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()))
    result = {**environment, "ceiling": ceiling, "checks": checks, "rows": rows}
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    print(json.dumps(result))
    if any(found["relative_error"] > 5e-3 or not all(found.values()) for found in checks.values()):
        sys.exit("a check failed: see the lines above the JSON")


if __name__ == "__main__":
    main()
