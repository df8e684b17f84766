"""Launch settings that change no bit of a result, tried on one GPU at the shapes of Qwen3.5-122B-A10B.

    PYTHONPATH=src:. python benchmarks/gpu/tune.py --json result.json

For each projection, format and number of tokens: microseconds of every setting, the best first. What proves better goes
into `launch_shape` of the kernel's file by hand, with this file's output as the record; nothing is tuned while serving.
"""

import argparse
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.cases import DEVICE, MixerCase, only, workspace
from benchmarks.gpu.result import record
from benchmarks.gpu.timing import bandwidth, graph_us
from benchmarks.gpu.weights import QWEN_122B, random_model, random_weight
from stoker.backends.family import PAGE_SIZE, SPLIT
from stoker.backends.gpu.kernels import attention as attention_file
from stoker.backends.gpu.kernels import deltanet as deltanet_file
from stoker.backends.gpu.kernels import experts as experts_file
from stoker.backends.gpu.kernels import linear as linear_file
from stoker.backends.gpu.kernels.experts import ExpertBuffers, experts
from stoker.backends.gpu.kernels.linear import Best, Stream, linear
from stoker.backends.gpu.kernels.route import Routing, route
from stoker.backends.gpu.packed import Kind
from stoker.backends.gpu.state import Bucket, StepBuffers, StepInputs, heads_of
from stoker.weights.model_config import FULL, LINEAR

Setting = dict[str, Any]


def _settings(*numbers: tuple[int, int, int]) -> list[Setting]:
    """Units of rows in a program, groups asked for ahead, register limit."""
    return [{"UNITS": units, "AHEAD": ahead, "maxnreg": registers} for units, ahead, registers in numbers]


FEW = _settings((1, 2, 64), (1, 6, 80), (1, 6, 96), (2, 1, 96), (2, 2, 96), (2, 3, 96), (2, 3, 128), (2, 6, 128))
SHARED_ROWS = _settings((1, 2, 96), (1, 4, 96), (1, 8, 96), (1, 8, 128), (2, 4, 128), (2, 8, 168))
MANY = _settings((1, 1, 96), (1, 2, 128), (2, 1, 128), (2, 2, 128), (2, 3, 168), (4, 1, 168))
WIDE = _settings(
    (1, 1, 64), (1, 3, 64), (1, 3, 80), (1, 3, 96), (1, 2, 96), (1, 3, 128), (2, 1, 128), (2, 3, 128), (4, 1, 128)
)
LINEARS = [  # (format, out, in, tokens, settings)
    (Kind.INT4, 20608, 3072, 1, FEW),
    (Kind.INT4, 17408, 3072, 1, FEW),
    (Kind.INT4, 3072, 8192, 1, SHARED_ROWS),
    (Kind.INT4, 20608, 3072, 12, MANY),
    (Kind.INT4, 3072, 8192, 12, SHARED_ROWS),
    (Kind.BF16, 248320, 3072, 1, WIDE),
    (Kind.INT8, 248320, 3072, 1, WIDE),
]
GATE_UP: list[Setting] = [
    {"AHEAD": ahead, "SHARED_AHEAD": shared, "maxnreg": registers}
    for ahead, shared, registers in (
        (1, 1, 96),
        (2, 1, 96),
        (2, 2, 96),
        (2, 3, 96),
        (3, 1, 96),
        (3, 3, 96),
        (2, 1, 128),
        (2, 6, 128),
        (3, 1, 128),
        (6, 1, 168),
    )
]
LONG: list[Setting] = [
    {},
    {"PROGRAMS": 1},
    {"PROGRAMS": 4},
    *({"JOIN": {**attention_file.JOIN, **change}} for change in (
        {"RUNS": 8}, {"RUNS": 16}, {"num_warps": 8}, {"COLUMNS": 64, "num_warps": 8},
    )),
]  # fmt: skip
SHORT: list[Setting] = [{}, {"FEW_PROGRAMS": 8}, {"FEW_PROGRAMS": 32}, {"FEW_PROGRAMS": 64}, {"JOINED_AT_ONCE": 0}]
DOWN: list[Setting] = [
    {"AHEAD": ahead, "SHARED_AHEAD": shared, "maxnreg": registers}
    for ahead, shared, registers in (
        (2, 1, 96),
        (4, 1, 96),
        (4, 2, 96),
        (4, 8, 96),
        (8, 1, 96),
        (8, 4, 96),
        (8, 8, 128),
        (8, 1, 128),
        (4, 1, 64),
    )
]


def tune_linear(kind: Kind, out: int, inputs: int, tokens: int, settings: list[Setting]) -> list[dict[str, Any]]:
    matrices = [random_weight(kind, (out, inputs), DEVICE) for _ in range(2 if out > 100000 else 24)]
    x, space = torch.randn(tokens, inputs, device=DEVICE).bfloat16(), workspace(tokens)
    units = matrices[0].rows // 16
    target: Any = torch.empty(tokens, out, device=DEVICE)
    if out > 100000:
        target = Best(
            torch.empty(tokens, units, device=DEVICE), torch.empty(tokens, units, device=DEVICE, dtype=torch.int32)
        )
    usual = linear_file.launch_shape

    def changed(setting: Setting, *arguments: Any) -> dict[str, Any]:
        return {**usual(*arguments), **setting}

    found = []
    for setting, pdl in [({}, False), ({}, True), *((setting, True) for setting in settings)]:
        with patch.object(linear_file, "launch_shape", partial(changed, setting)):
            us = _try(partial(graph_us, [partial(linear, x, w, target, space, None, pdl) for w in matrices], 5))
        tb_s = matrices[0].nbytes / us / 1e6 if us else None
        found.append({"setting": setting, "dependent": pdl, "us": us, "tb_s": tb_s})
    return _sorted(f"{kind.name} {out}x{inputs} T={tokens}", found)


def tune_experts(tokens: int, weights: str) -> list[dict[str, Any]]:
    config = QWEN_122B
    assert config.moe is not None
    layers = random_model(only(config, FULL, 4), weights, DEVICE, 64).layers
    x = torch.randn(tokens, config.hidden_size, device=DEVICE).bfloat16()
    scale, space = torch.ones(config.hidden_size, device=DEVICE), workspace(tokens)
    stream, routing = Stream(x, scale, x.clone()), Routing.allocate(tokens, config.moe.top_k, DEVICE)
    buffers = ExpertBuffers.allocate(tokens, config.moe.top_k, 1024, config.hidden_size, DEVICE)
    squares = torch.empty(tokens, config.hidden_size // 16, device=DEVICE)
    route(x, stream.scaled, layers[0].moe.router, routing, space, eps=1e-6, renormalize=True, shared=True)
    usual, found = experts_file.launch_shape, []

    def changed(setting: Setting, gate_up: bool, tokens: int, width: int, gated: bool, kinds: Any) -> dict[str, Any]:
        return {**usual(tokens, width, gated, kinds), **(setting if gated == gate_up else {})}

    tried = [({}, True, False), ({}, True, True), *((setting, True, True) for setting in GATE_UP)]
    for setting, gate_up, pdl in [*tried, *((setting, False, True) for setting in DOWN)]:
        with patch.object(experts_file, "launch_shape", partial(changed, setting, gate_up)):
            calls = [
                partial(experts, stream, routing, layer.moe.gate_up, layer.moe.down, layer.moe.shared_gate_up,
                        layer.moe.shared_down, buffers, squares, space, scale, eps=1e-6, pdl=pdl)
                for layer in [*layers] * 4
            ]  # fmt: skip
            which = {"gate_up" if gate_up else "down": setting} if setting else {}
            found.append({"setting": which, "dependent": pdl, "us": _try(partial(graph_us, calls, 5))})
    return _sorted(f"experts {weights} T={tokens}", found)


def tune_deltanet(batch: int, count: int) -> list[dict[str, Any]]:
    case, bucket = MixerCase(QWEN_122B, LINEAR), Bucket(batch, count, 1)
    states = [case.state(batch, count, 1) for _ in range(24)]
    inputs, buffers = StepInputs.allocate(bucket, PAGE_SIZE, DEVICE), StepBuffers.allocate(QWEN_122B, bucket, 0, DEVICE)
    inputs.sequences.slots.copy_(torch.arange(batch, device=DEVICE))
    inputs.sequences.cached.fill_(64)
    inputs.sequences.replay.fill_(count)
    y = torch.randn(bucket.tokens, buffers.projected[LINEAR].shape[1], device=DEVICE)
    found = []
    for limit in (128, 168, 255):
        with patch.object(deltanet_file, "register_limit", lambda _, limit=limit: {"maxnreg": limit}):
            calls = [partial(case.launch, y, inputs, buffers, state) for state in states]
            found.append({"setting": {"maxnreg": limit}, "us": _try(partial(graph_us, calls, 5))})
    return _sorted(f"deltanet B={batch} T={count}", found)


def tune_attention(batch: int, count: int, context: int) -> list[dict[str, Any]]:
    splits = -(-(context + count) // SPLIT)
    case = MixerCase(QWEN_122B, FULL, positions=context + 64)
    inputs = StepInputs.allocate(Bucket(batch, count, splits), PAGE_SIZE, DEVICE)
    inputs.tables.copy_(torch.arange(inputs.tables.numel(), device=DEVICE).view(batch, -1))
    inputs.sequences.cached.fill_(context)
    states = [case.past(batch, count, splits) for _ in range(4 if context > 10000 else 12)]
    y = torch.randn(batch * count, heads_of(QWEN_122B).width, device=DEVICE)
    found = []
    for setting in LONG if context > 2048 else SHORT:
        with patch.multiple(attention_file, **(setting or {"PROGRAMS": attention_file.PROGRAMS})):
            bucket = Bucket(batch, count, splits)
            buffers = StepBuffers.allocate(QWEN_122B, bucket, 0, DEVICE)
            calls = [partial(case.launch, y, inputs, buffers, state) for state in states]
            found.append({"setting": setting, "us": _try(partial(graph_us, calls, 5))})
    return _sorted(f"attention B={batch} T={count} {context} keys", found)


def _try(call: Any) -> float | None:
    try:
        return float(call())
    except Exception as failure:  # a setting the compiler refuses is no result
        print(f"  {type(failure).__name__}: {str(failure)[:200]}")
        return None


def _sorted(name: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = sorted(({"what": name, **row} for row in found if row["us"]), key=lambda row: row["us"])
    for row in rows:
        launch = ", dependent launch" if row.get("dependent") else ""
        print(f"{name:28} {row['us']:9.2f} us  {row['setting'] or 'as it is'}{launch}", flush=True)
    torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    parser.add_argument(
        "--only", type=int, nargs="*", help="these jobs, counted from 0; several processes compile faster"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    jobs = [partial(tune_linear, *job) for job in LINEARS]
    jobs += [partial(tune_experts, tokens, weights) for weights in ("int4", "hybrid") for tokens in (1, 4, 12)]
    jobs += [partial(tune_deltanet, batch, count) for batch, count in ((1, 1), (1, 13), (4, 3))]
    cases = ((1, 1, 640), (1, 3, 640), (4, 1, 640), (4, 3, 640), (1, 1, 32768), (1, 3, 32768), (1, 1, 131072))
    jobs += [partial(tune_attention, *each) for each in cases]
    rows: list[dict[str, Any]] = []
    for index, job in enumerate(jobs):
        if options.only is None or index in options.only:
            rows += job()
    record("gpu/tune", options.json, bandwidth=bandwidth(), rows=rows)


if __name__ == "__main__":
    main()
