"""How fast memory is copied, and read by a product of a matrix with a vector (GEMV), which decoding mostly is.

`probe.py` runs the text of this file with the engine's Python, so it imports nothing of Stoker: torch measures every
GPU, or the CPU where there is none; without torch NumPy measures the CPU. It prints a JSON object per line: `phase` as
one begins, then `result`.
"""

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

SECONDS, ROUNDS = 0.6, 5  # per device and kind; medians of so many rounds
MOST, LEAST = 512 << 20, 32 << 20  # bytes of a matrix: beyond every cache of a GPU, and a fraction of a small memory
COLUMNS = 4096  # as long as the rows of large models
CALLS = 32  # most calls that wait on a device


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def measure(
    device: str, copy: Callable[[], object], product: Callable[[], object], wait: Callable[[], object], size: int
) -> dict[str, Any]:
    """`size`: bytes of the matrix. A copy reads and writes them; both count."""
    say(phase="copy", device=device)
    copied = rate(copy, wait, 2 * size)
    say(phase="gemv", device=device)
    read = rate(product, wait, size)
    say(phase="done", device=device)
    return {"device": device, "copy_gb_s": copied, "gemv_gb_s": read, "matrix_bytes": size}


def rate(call: Callable[[], object], wait: Callable[[], object], count: int) -> float:
    """GB/s, of calls that move `count` bytes each. `wait` waits for the device."""
    call()
    wait()
    rates, calls = [], 1
    for _ in range(ROUNDS):
        started, done = time.perf_counter(), 0
        while time.perf_counter() - started < SECONDS / ROUNDS:
            for _ in range(calls):
                call()
            wait()
            done += calls
            calls = min(2 * calls, CALLS) if time.perf_counter() - started < SECONDS / ROUNDS / 4 else calls
        rates.append(done * count / (time.perf_counter() - started) / 1e9)
    return statistics.median(rates)


def with_torch(most: int) -> list[dict[str, Any]]:
    import torch

    if torch.cuda.is_available():
        return [on_gpu(torch, index, most) for index in range(torch.cuda.device_count())]
    matrix = torch.ones(rows(most // 2, 4), COLUMNS)
    target, vector, out = torch.empty_like(matrix), torch.ones(COLUMNS), torch.empty(len(matrix))
    found = measure(
        "cpu",
        lambda: target.copy_(matrix),
        lambda: torch.mv(matrix, vector, out=out),
        lambda: None,
        matrix.nbytes,
    )
    return [found]


def on_gpu(torch: Any, index: int, most: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    kind = {"dtype": torch.bfloat16, "device": torch.device("cuda", index)}
    matrix = torch.ones(rows(min(most, free // 4), 2), COLUMNS, **kind)
    target, vector, out = torch.empty_like(matrix), torch.ones(COLUMNS, **kind), torch.empty(len(matrix), **kind)
    found = measure(
        f"cuda:{index}",
        lambda: target.copy_(matrix),
        lambda: torch.mv(matrix, vector, out=out),
        lambda: torch.cuda.synchronize(index),
        matrix.nbytes,
    )
    amd = getattr(torch.version, "hip", None)
    architecture = properties.gcnArchName.split(":")[0] if amd else f"sm_{properties.major}{properties.minor}"
    unified = bool(getattr(properties, "is_integrated", False))
    return found | {"name": properties.name, "architecture": architecture, "unified": unified, "total_bytes": total}


def with_numpy(most: int) -> list[dict[str, Any]]:
    import numpy as np

    matrix = np.ones((rows(most // 2, 4), COLUMNS), np.float32)
    target, vector, out = np.empty_like(matrix), np.ones(COLUMNS, np.float32), np.empty(len(matrix), np.float32)
    found = measure(
        "cpu",
        lambda: np.copyto(target, matrix),
        lambda: np.dot(matrix, vector, out=out),
        lambda: None,
        matrix.nbytes,
    )
    return [found]


def rows(most: int, itemsize: int) -> int:
    return max(LEAST, min(MOST, most)) // (COLUMNS * itemsize)


def main() -> None:
    """The argument is the most bytes that a matrix may take; a copy of it takes as many. CPUs get half."""
    most = int(sys.argv[1])
    torch = importlib.util.find_spec("torch") is not None
    devices = with_torch(most) if torch else with_numpy(most)
    say(result={"library": "torch" if torch else "numpy", "devices": devices})


if __name__ == "__main__":
    main()
