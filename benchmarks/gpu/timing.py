# Triton types the read kernel; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What a GPU's memory delivers, and the time of calls inside a CUDA graph."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


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


def graph_us(calls: Sequence[Callable[[], Any]], repeat: int = 7) -> float:
    """Microseconds per call, the median of replays of a graph of all calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # for what the calls read
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for replay in range(repeat + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 2:
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def bandwidth(gib: int = 4) -> dict[str, float]:
    """Bytes per second of a large copy, read and written bytes counted, and of a large read."""
    source = torch.randint(-(2**31), 2**31 - 1, (gib * 2**28,), dtype=torch.int32, device="cuda")
    target, out = torch.empty_like(source), torch.zeros(1, dtype=torch.int32, device="cuda")
    size = source.numel() * 4
    # a device copy inside a graph runs as a slower memcpy node; the same copy as a kernel does not
    copied = 2 * size / graph_us([lambda: torch.bitwise_not(source, out=target)]) * 1e6
    return {"copy": copied, "read": size / graph_us([lambda: read(source, out)]) * 1e6}


def read_us(size: int, count: int = 40) -> float:
    """Microseconds of a plain read of so many bytes, which pays the same launch and ramp as a kernel of that size."""
    words = max(8192, size // 4 // 8192 * 8192)
    source = torch.randint(-(2**31), 2**31 - 1, (words * count,), dtype=torch.int32, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    return graph_us([partial(read, part, out) for part in source.split(words)])


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())
