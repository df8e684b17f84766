"""Every step kernel on one GPU, at the shapes of Qwen3.5-122B-A10B and 35B-A3B with random weights.

    PYTHONPATH=src:. python benchmarks/gpu_kernels.py --json result.json

First what the memory delivers, then checks, then times. Checks: against fp64 or the reference, and bit for bit each row
alone, in blocks of every size and with other neighbours; PTX against the plain conversion. A time is the median of
graph replays over many different weights, so that nothing comes from the L2 cache, divided by their number. Bytes are
the weights, scales and state, read or written once.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_result import record
from benchmarks.gpu_timing import bandwidth, graph_us, read_us, relative_error
from benchmarks.gpu_weights import SHAPES, random_model, random_weight
from stoker.engine.gpu.state import Bucket, GpuCache, StepBuffers, StepInputs, heads_of
from stoker.engine.gpu.weights import AttentionLayer, DeltaLayer
from stoker.model.cache import PAGE_SIZE, KVPages
from stoker.model.config import FULL, LINEAR, ModelConfig
from stoker.ops.packed import Kind, PackedWeight
from stoker.ops.triton import experts as experts_file
from stoker.ops.triton import launch
from stoker.ops.triton import linear as linear_file
from stoker.ops.triton import route as route_file
from stoker.ops.triton.attention import Pages, attention
from stoker.ops.triton.deltanet import DeltaRing, deltanet
from stoker.ops.triton.experts import ExpertBuffers, experts
from stoker.ops.triton.launch import Workspace
from stoker.ops.triton.linear import Best, Norm, Stream, linear
from stoker.ops.triton.route import Routing, route
from stoker.ops.triton.rows import best_tokens

LIMIT = 5e-3  # relative error: bf16 operands and results
TOKENS = (1, 3, 4, 8, 13, 16, 32, 128)
CUDA = torch.device("cuda")


def workspace(tokens: int) -> Workspace:
    return Workspace.allocate(6 * tokens * 8192, 20000, CUDA)


def plain_path(call: Callable[[], Any]) -> Any:
    """`call` with conversions written in Triton instead of PTX."""
    plain = {**launch.arithmetic(CUDA), "PTX": False}
    files = (linear_file, experts_file, route_file)
    with (
        patch.object(files[0], "arithmetic", return_value=plain),
        patch.object(files[1], "arithmetic", return_value=plain),
        patch.object(files[2], "arithmetic", return_value=plain),
    ):
        return call()


def product(x: Tensor, weight: PackedWeight, space: Workspace) -> Tensor:
    y = torch.full((x.shape[0], weight.out_features), torch.nan, device=CUDA)
    linear(x, weight, y, space)
    return y


def check_linear(kind: Kind, out: int, inputs: int) -> dict[str, Any]:
    """Against fp64, and every row of 1..128 alone, in company and with other neighbours, bit for bit."""
    weight, space = random_weight(kind, (out, inputs), CUDA), workspace(128)
    x = torch.randn(128, inputs, device=CUDA).bfloat16()
    expected = x.double() @ weight.dequantize().double().t()
    y = product(x, weight, space)
    order = torch.randperm(128, device=CUDA)
    return {
        "relative_error": relative_error(y, expected),
        "rows_alone_equal": all(torch.equal(product(x[r : r + 1], weight, space), y[r : r + 1]) for r in range(128)),
        "row_counts_equal": all(torch.equal(product(x[:n], weight, space), y[:n]) for n in range(1, 129)),
        "neighbours_equal": torch.equal(product(x[order], weight, space), y[order]),
        "ptx_equals_plain": kind is Kind.BF16
        or all(torch.equal(plain_path(partial(product, x[:n], weight, space)), y[:n]) for n in (1, 16)),
    }


def check_head(kind: Kind, vocab: int, hidden: int) -> dict[str, Any]:
    weight, space = random_weight(kind, (vocab, hidden), CUDA), workspace(16)
    x = torch.randn(16, hidden, device=CUDA).bfloat16()
    units = weight.rows // 16
    squares = x.float().square().view(16, -1, 16).sum(-1)

    def run(rows: int) -> tuple[Tensor, Tensor]:
        logits = torch.full((rows, vocab), torch.nan, device=CUDA)
        best = Best(
            torch.empty(rows, units, device=CUDA), torch.empty(rows, units, dtype=torch.int32, device=CUDA), logits
        )
        tokens = torch.empty(rows, dtype=torch.int32, device=CUDA)
        linear(x[:rows], weight, best, space, Norm(squares[:rows], 1e-6))
        best_tokens(best, vocab, tokens)
        return logits, tokens

    logits, tokens = run(16)
    normed = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = torch.cat([normed @ weight_part.t() for weight_part in _dense_parts(weight)], dim=1)
    return {
        "relative_error": relative_error(logits, expected),
        "best_is_argmax": torch.equal(tokens.long(), logits.argmax(-1)),
        "row_counts_equal": all(torch.equal(run(n)[0], logits[:n]) for n in (1, 3, 8, 9)),
    }


def _dense_parts(weight: PackedWeight) -> list[Tensor]:
    """fp32 rows in pieces: the whole head at once is 3 GB."""
    pieces = []
    for start in range(0, weight.rows, 32768):
        units = slice(start // 16, min(weight.rows, start + 32768) // 16)
        rows = slice(start, min(weight.rows, start + 32768))
        row_scales = weight.packed[units] if weight.kind is Kind.BF16 else weight.row_scales[rows]
        count = min(weight.out_features, rows.stop) - start
        pieces.append(PackedWeight(weight.kind, weight.packed[units], row_scales, row_scales, count).dequantize())
    return pieces


class MoeCase:
    """Routing and experts of one layer over copies of a stream."""

    def __init__(self, config: ModelConfig, weights: str) -> None:
        one = _only(config, FULL, 1)
        self.config, self.layer = config, random_model(one, weights, CUDA, 64, shift=2.0).layers[0]
        self.space = workspace(128)
        self.scale = torch.rand(config.hidden_size, device=CUDA) + 0.5

    def run(self, x: Tensor) -> tuple[Tensor, Routing]:
        tokens, hidden = x.shape
        config, moe = self.config, self.layer.moe
        assert config.moe is not None
        stream = x.clone()
        scaled = (x.float() * self.scale).bfloat16()
        routing = Routing.allocate(tokens, config.moe.top_k, CUDA)
        buffers = ExpertBuffers.allocate(tokens, config.moe.top_k, config.moe.intermediate_size, hidden, CUDA)
        squares = torch.empty(tokens, hidden // 16, device=CUDA)
        route(stream, scaled, moe.router, routing, self.space, eps=1e-6, renormalize=True, shared=True)
        experts(
            Stream(stream, self.scale, scaled), routing, moe.gate_up, moe.down, moe.shared_gate_up, moe.shared_down,
            buffers, squares, self.space, self.scale,
        )  # fmt: skip
        return stream, routing

    def expected(self, x: Tensor, routing: Routing) -> Tensor:
        """fp32, token by token."""
        moe = self.layer.moe
        assert moe.shared_gate_up is not None
        assert moe.shared_down is not None
        inputs = (x.float() * self.scale).bfloat16().float()
        inputs = inputs * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()

        def mlp(row: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            gate, up = (gate_up @ row).chunk(2)
            return down @ (torch.nn.functional.silu(gate) * up)

        shared = moe.shared_gate_up.dequantize(), moe.shared_down.dequantize()
        rows = []
        for token in range(x.shape[0]):
            total = routing.shared[token] * mlp(inputs[token], *shared)
            for rank in range(routing.top_k):
                expert = int(routing.experts[token, rank])
                both = moe.gate_up[expert].dequantize(), moe.down[expert].dequantize()
                total = total + routing.weights[token, rank] * mlp(inputs[token], *both)
            rows.append(total)
        return torch.stack(rows)


def check_moe(config: ModelConfig, weights: str) -> dict[str, Any]:
    case = MoeCase(config, weights)
    assert config.moe is not None
    x = torch.randn(128, config.hidden_size, device=CUDA).bfloat16()
    y, routing = case.run(x)
    inputs = (x.float() * case.scale).bfloat16().float()
    inputs = inputs * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    logits = inputs.double() @ case.layer.moe.router.dequantize().double().t()
    chosen = logits[:, : config.moe.num_experts].topk(config.moe.top_k).indices
    added = case.expected(x[:4], routing)
    order = torch.randperm(128, device=CUDA)
    return {
        # of the stream, whose rounding hides what the experts add; and of what they add, as far as bf16 shows it
        "relative_error": relative_error(y[:4], x[:4].float() + added),
        "experts_show": relative_error(y[:4], x[:4]) > 2 * LIMIT,
        "chosen_equal": float((routing.experts.long() == chosen).float().mean()) > 0.999,
        "rows_alone_equal": all(torch.equal(case.run(x[r : r + 1])[0], y[r : r + 1]) for r in range(128)),
        "row_counts_equal": all(torch.equal(case.run(x[:n])[0], y[:n]) for n in range(2, 129)),
        "neighbours_equal": torch.equal(case.run(x[order])[0], y[order]),
        "ptx_equals_plain": torch.equal(plain_path(lambda: case.run(x[:16])[0]), y[:16]),
    }


def _only(config: ModelConfig, kind: str, layers: int) -> ModelConfig:
    from dataclasses import replace

    return replace(config, layer_types=(kind,) * layers, sparse_layers=(True,) * layers)


class MixerCase:
    """One DeltaNet or attention layer over blocks of tokens whose projections are given."""

    def __init__(self, config: ModelConfig, kind: str, fp8: bool = False) -> None:
        self.config, self.kind, self.fp8 = config, kind, fp8
        model = random_model(_only(config, kind, 1), "int4", CUDA, 8192)
        self.mixer = model.layers[0].mixer

    def state(self, batch: int, rows: int, splits: int) -> KVPages | DeltaRing:
        torch.manual_seed(1)
        dtype = torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        cache = GpuCache.allocate(
            self.config, pages=batch * splits * 4, slots=batch, window=rows, device=CUDA, kv_dtype=dtype,
            kinds=[self.kind],
        )  # fmt: skip
        return cache.layers[0]

    def run(self, y: Tensor, rows: int, splits: int = 4) -> Tensor:
        """y [B, T, width] from position 0 on, in blocks of `rows` tokens, all accepted -> [B, T, out]"""
        batch, count, width = y.shape
        bucket = Bucket(batch, rows, splits)
        state, inputs = self.state(batch, rows, splits), StepInputs.allocate(bucket, PAGE_SIZE, CUDA)
        inputs.tables.copy_(torch.arange(batch * splits * 4, device=CUDA).view(batch, -1))
        inputs.sequences.slots.copy_(torch.arange(batch, device=CUDA))
        buffers = StepBuffers.allocate(self.config, bucket, 0, CUDA)
        found = []
        for start in range(0, count, rows):
            block = y[:, start : start + rows]
            length = block.shape[1]
            if length < rows:
                block = torch.cat([block, block.new_zeros(batch, rows - length, width)], dim=1)
            inputs.sequences.lengths.fill_(length)
            self.launch(block.reshape(-1, width), inputs, buffers, state)
            found.append(buffers.mixed[self.kind].view(batch, rows, -1)[:, :length].clone())
            inputs.sequences.cached.add_(length)
            inputs.sequences.replay.fill_(length)
        return torch.cat(found, dim=1)

    def launch(self, y: Tensor, inputs: StepInputs, buffers: StepBuffers, state: KVPages | DeltaRing) -> None:
        mixed = buffers.mixed[self.kind]
        if isinstance(state, DeltaRing):
            assert isinstance(self.mixer, DeltaLayer)
            deltanet(y, mixed, state, self.mixer.weights, inputs.sequences)
            return
        assert isinstance(self.mixer, AttentionLayer)
        pages = Pages(state.keys, state.values, inputs.tables, state.key_scales, state.value_scales)
        attention(
            y, mixed, pages, self.mixer.weights, heads_of(self.config), inputs.sequences, buffers.partials,
            buffers.workspace,
        )  # fmt: skip


def check_deltanet(config: ModelConfig) -> dict[str, Any]:
    case, delta = MixerCase(config, LINEAR), config.delta
    assert delta is not None
    assert isinstance(case.mixer, DeltaLayer)
    width = delta.conv_channels + delta.value_heads * (delta.value_dim + 2)
    y = torch.randn(3, 64, width, device=CUDA)
    alone = case.run(y, 1)
    expected = _delta_reference(y[0].double(), case.mixer, config)
    return {
        "relative_error": relative_error(alone[0], expected),
        "blocks_equal": all(torch.equal(case.run(y, rows), alone) for rows in (2, 3, 5, 8, 13, 16)),
        "neighbours_equal": torch.equal(case.run(y[:1], 4), alone[:1]),
    }


def _delta_reference(y: Tensor, layer: DeltaLayer, config: ModelConfig) -> Tensor:
    """fp64, token by token, as facts have it."""
    delta, weights = config.delta, layer.weights
    assert delta is not None
    tokens, keys, heads = y.shape[0], delta.key_heads * delta.key_dim, delta.value_heads
    x = y[:, : delta.conv_channels].bfloat16().double()
    x = torch.cat([x.new_zeros(delta.conv_kernel - 1, x.shape[1]), x])
    taps = [x[tap : tap + tokens] * weights.conv[tap].double() for tap in range(delta.conv_kernel)]
    mixed = torch.nn.functional.silu(torch.stack(taps).sum(0))
    q, k, v = mixed.split([keys, keys, heads * delta.value_dim], dim=1)
    q, k = (
        (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(heads // delta.key_heads, 1)
        for part in (q.view(tokens, -1, delta.key_dim), k.view(tokens, -1, delta.key_dim))
    )
    z, a, b = y[:, delta.conv_channels :].split([heads * delta.value_dim, heads, heads], dim=1)
    g = weights.decay.double() * torch.nn.functional.softplus(a + weights.bias.double())
    beta = torch.sigmoid(b)
    state = y.new_zeros(heads, delta.key_dim, delta.value_dim)
    outputs = []
    for t in range(tokens):
        state = state * g[t].exp()[:, None, None]
        change = beta[t][:, None] * (v[t].view(heads, -1) - (state * k[t][:, :, None]).sum(1))
        state = state + k[t][:, :, None] * change[:, None]
        out = (state * q[t][:, :, None]).sum(1) * delta.key_dim**-0.5
        out = out * (out.square().mean(-1, keepdim=True) + weights.eps).rsqrt() * weights.norm.double()
        outputs.append((out * torch.nn.functional.silu(z[t]).view(heads, -1)).flatten())
    return torch.stack(outputs)


def check_attention(config: ModelConfig, fp8: bool) -> dict[str, Any]:
    """540 tokens: three splits; the last 40 also token by token and in company."""
    case = MixerCase(config, FULL, fp8)
    heads = heads_of(config)
    y = torch.randn(2, 540, heads.width, device=CUDA)
    blocks = case.run(y, 16)
    with patch("stoker.ops.triton.attention.JOINED_AT_ONCE", 0):
        joined_apart = torch.equal(case.run(y, 16), blocks)
    expected = _attention_reference(y[0].double(), case, heads)
    return {
        "relative_error": relative_error(blocks[0], expected),
        "blocks_equal": all(torch.equal(case.run(y, rows), blocks) for rows in (1, 2, 3, 5, 13)),
        "neighbours_equal": torch.equal(case.run(y[:1], 16), blocks[:1]),
        "joins_equal": joined_apart,
        "limit": 5e-2 if fp8 else 1e-2,
    }


def _attention_reference(y: Tensor, case: MixerCase, heads: Any) -> Tensor:
    assert isinstance(case.mixer, AttentionLayer)
    weights, tokens, dim = case.mixer.weights, y.shape[0], heads.dim
    q, k, v = y.split([2 * heads.count * dim, heads.kv_count * dim, heads.kv_count * dim], dim=1)
    q, gate = q.view(tokens, heads.count, 2 * dim).chunk(2, dim=-1)
    half = weights.cos.shape[1]

    def turned(x: Tensor) -> Tensor:
        x = x * (x.square().mean(-1, keepdim=True) + weights.eps).rsqrt()
        first, second, rest = x.split([half, half, dim - 2 * half], dim=-1)
        cos, sin = (table[:tokens, None].double() for table in (weights.cos, weights.sin))
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    q, k, v = turned(q), turned(k.view(tokens, -1, dim)), v.view(tokens, -1, dim)
    k, v = k.repeat_interleave(heads.group, 1), v.repeat_interleave(heads.group, 1)
    hidden = torch.full((tokens, tokens), -torch.inf, device=CUDA).triu(1)
    scores = (torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5 + hidden).softmax(-1)
    return (torch.einsum("hqk,khd->qhd", scores, v) * torch.sigmoid(gate)).flatten(1)


def time_linears(config: ModelConfig, read: float) -> list[dict[str, Any]]:
    delta, heads, hidden = config.delta, heads_of(config), config.hidden_size
    assert delta is not None
    values = delta.value_heads * delta.value_dim
    shapes = {
        "deltanet qkv+z+a+b": (delta.conv_channels + values + 2 * delta.value_heads, hidden),
        "attention q+k+v": (heads.width, hidden),
        "out / o_proj": (hidden, values),
    }
    rows = []
    for name, (out, inputs) in shapes.items():
        for kind in (Kind.INT4, Kind.NVFP4, Kind.FP8, Kind.BF16):
            matrices = [random_weight(kind, (out, inputs), CUDA) for _ in range(24 if kind is Kind.INT4 else 12)]
            plain = read_us(matrices[0].nbytes, 16)
            for tokens in TOKENS if kind is Kind.INT4 else (1, 4, 16):
                x, space = torch.randn(tokens, inputs, device=CUDA).bfloat16(), workspace(tokens)
                y = torch.empty(tokens, out, device=CUDA)
                us = graph_us([partial(linear, x, w, y, space) for w in matrices])
                rows.append(entry(f"{name} {kind.name}", tokens, matrices[0].nbytes, us, plain, read))
    return rows


def time_moe(config: ModelConfig, weights: str, read: float) -> list[dict[str, Any]]:
    """Router alone, then router and experts; even routing by construction of the weights."""
    assert config.moe is not None
    layers = random_model(_only(config, FULL, 4), weights, CUDA, 64).layers
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, config.hidden_size, device=CUDA).bfloat16()
        scaled, scale, space = x.clone(), torch.ones(config.hidden_size, device=CUDA), workspace(tokens)
        routing = Routing.allocate(tokens, config.moe.top_k, CUDA)
        buffers = ExpertBuffers.allocate(
            tokens, config.moe.top_k, config.moe.intermediate_size, config.hidden_size, CUDA
        )
        squares = torch.empty(tokens, config.hidden_size // 16, device=CUDA)
        stream = Stream(x, scale, scaled)
        routes, both = [], []
        for index in range(16):
            moe = layers[index % 4].moe
            first = partial(route, x, scaled, moe.router, routing, space, eps=1e-6, renormalize=True, shared=True)
            routes.append(first)
            second = partial(
                experts, stream, routing, moe.gate_up, moe.down, moe.shared_gate_up, moe.shared_down, buffers, squares,
                space, scale,
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


def time_mixers(config: ModelConfig, read: float) -> list[dict[str, Any]]:
    rows = []
    delta, heads = config.delta, heads_of(config)
    assert delta is not None
    case = MixerCase(config, LINEAR)
    for batch, count in ((1, 1), (1, 3), (1, 13), (4, 1), (4, 3)):
        bucket = Bucket(batch, count, 1)
        states = [case.state(batch, count, 1) for _ in range(24)]
        inputs, buffers = StepInputs.allocate(bucket, PAGE_SIZE, CUDA), StepBuffers.allocate(config, bucket, 0, CUDA)
        inputs.sequences.slots.copy_(torch.arange(batch, device=CUDA))
        inputs.sequences.cached.fill_(64)
        inputs.sequences.replay.fill_(count)
        y = torch.randn(bucket.tokens, buffers.projected[LINEAR].shape[1], device=CUDA)
        us = graph_us([partial(case.launch, y, inputs, buffers, state) for state in states])
        size = batch * 2 * delta.value_heads * delta.key_dim * delta.value_dim * 4
        rows.append(entry(f"deltanet, {count} replayed", bucket.tokens, size, us, None, read))
    for fp8 in (False, True):
        case = MixerCase(config, FULL, fp8)
        for batch, count, context in (
            (1, 1, 640),
            (1, 3, 640),
            (4, 1, 640),
            (1, 1, 32768),
            (1, 3, 32768),
            (1, 1, 131072),
        ):
            splits = -(-(context + count) // 256)
            bucket = Bucket(batch, count, splits)
            states = [case.state(batch, count, splits) for _ in range(4)]
            inputs = StepInputs.allocate(bucket, PAGE_SIZE, CUDA)
            buffers = StepBuffers.allocate(config, bucket, 0, CUDA)
            inputs.tables.copy_(torch.arange(batch * splits * 4, device=CUDA).view(batch, -1))
            inputs.sequences.cached.fill_(context)
            long = random_model(_only(config, FULL, 1), "int4", CUDA, context + 64).layers[0].mixer
            case.mixer = long
            y = torch.randn(bucket.tokens, heads.width, device=CUDA)
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


def run_checks(names: list[str]) -> dict[str, Any]:
    checks: dict[str, Any] = {}
    for name in names:
        config = SHAPES[name]
        delta, heads = config.delta, heads_of(config)
        assert delta is not None
        values = delta.value_heads * delta.value_dim
        rows = delta.conv_channels + values + 2 * delta.value_heads
        jobs: dict[str, Callable[[], dict[str, Any]]] = {
            f"linear {kind.name} in": partial(check_linear, kind, rows, config.hidden_size) for kind in Kind
        }
        jobs |= {
            "linear INT4 out": partial(check_linear, Kind.INT4, config.hidden_size, values),
            "linear INT4 odd": partial(check_linear, Kind.INT4, 1000, 384),
            "linear INT4 qkv": partial(check_linear, Kind.INT4, heads.width, config.hidden_size),
            "head BF16": partial(check_head, Kind.BF16, config.vocab_size, config.hidden_size),
            "head INT8": partial(check_head, Kind.INT8, config.vocab_size, config.hidden_size),
            "experts int4": partial(check_moe, config, "int4"),
            "experts hybrid": partial(check_moe, config, "hybrid"),
            "experts nvfp4": partial(check_moe, config, "nvfp4"),
            "deltanet": partial(check_deltanet, config),
            "attention BF16": partial(check_attention, config, False),
            "attention FP8": partial(check_attention, config, True),
        }
        for job, check in jobs.items():
            try:
                found = check()
            except Exception as failure:  # one kernel's failure must not hide the others' results
                found = {"failed": f"{type(failure).__name__}: {failure}"[:2000]}
            checks[f"{name} {job}"] = found
            print(f"{name} {job}: {'ok' if passed(found) else 'FAILED'} {found}", flush=True)
            torch.cuda.empty_cache()
    return checks


def passed(found: dict[str, Any]) -> bool:
    if "failed" in found:
        return False
    limit = found.get("limit", LIMIT)
    return found["relative_error"] <= limit and all(value for key, value in found.items() if key != "relative_error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", default="qwen3.5-122b-a10b", help="of the checks, or several; times are of the first"
    )
    parser.add_argument("--checks", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--times", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    options = parser.parse_args()
    torch.manual_seed(0)
    names = options.shape.split(",")
    delivered = bandwidth()
    torch.cuda.empty_cache()
    speeds = ", ".join(f"{name} {speed / 1e12:.2f} TB/s" for name, speed in delivered.items())
    print(f"{torch.cuda.get_device_name()}: {speeds}")
    checks = run_checks(names) if options.checks else {}
    rows: list[dict[str, Any]] = []
    if options.times:
        config, read = SHAPES[names[0]], delivered["read"]
        for timing in (
            partial(time_linears, config, read),
            partial(time_moe, config, "int4", read),
            partial(time_moe, config, "hybrid", read),
            partial(time_mixers, config, read),
        ):
            rows += timing()
            torch.cuda.empty_cache()
        heads = f"{'kernel':34}{'tokens':>7}{'distinct':>9}{'us':>9}{'TB/s':>7}{'of read':>9}"
        print(f"{heads}{'of read of its size':>21}")
        for row in rows:
            size = row["fraction_of_plain_read_of_size"]
            print(
                f"{row['kernel']:34}{row['tokens']:7}{row.get('distinct_experts', ''):>9}{row['us']:9.2f}"
                f"{row['tb_s']:7.2f}{row['fraction_of_read']:9.0%}{'' if size is None else format(size, '.0%'):>21}"
            )
    weights = f"random, at the shapes of {options.shape}"
    record("gpu_kernels", options.json, weights=weights, bandwidth=delivered, checks=checks, rows=rows)
    failed = [name for name, found in checks.items() if not passed(found)]
    if failed:
        sys.exit(f"checks failed: {', '.join(failed)}; see the lines above the JSON")


if __name__ == "__main__":
    main()
