"""Every step kernel against fp64 or the reference, and bit for bit each row alone, in blocks of every size and with
other neighbours; PTX against the plain conversion. kernels.py is the command."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.cases import DEVICE, MixerCase, only, workspace
from benchmarks.gpu.timing import relative_error
from benchmarks.gpu.weights import random_model, random_weight
from stoker.backends.family import SPLIT
from stoker.backends.gpu.kernels import experts as experts_file
from stoker.backends.gpu.kernels import launch
from stoker.backends.gpu.kernels import linear as linear_file
from stoker.backends.gpu.kernels import route as route_file
from stoker.backends.gpu.kernels.experts import ExpertBuffers, experts
from stoker.backends.gpu.kernels.launch import Workspace
from stoker.backends.gpu.kernels.linear import Best, Norm, Stream, linear
from stoker.backends.gpu.kernels.route import Routing, route
from stoker.backends.gpu.kernels.rows import best_tokens
from stoker.backends.gpu.packed import Kind, PackedWeight
from stoker.backends.gpu.state import heads_of
from stoker.backends.gpu.weights import AttentionLayer, DeltaLayer
from stoker.backends.network.cache import KVPages
from stoker.weights.model_config import FULL, LINEAR, ModelConfig

LIMIT = 5e-3  # relative error: bf16 operands and results
MOST = 128  # tokens of a step
Found = dict[str, Any]


def plain_path(call: Callable[[], Any]) -> Any:
    """`call` with conversions written in Triton instead of PTX."""
    plain = {**launch.arithmetic(DEVICE), "PTX": False}
    files = (linear_file, experts_file, route_file)
    with (
        patch.object(files[0], "arithmetic", return_value=plain),
        patch.object(files[1], "arithmetic", return_value=plain),
        patch.object(files[2], "arithmetic", return_value=plain),
    ):
        return call()


def product(x: Tensor, weight: PackedWeight, space: Workspace) -> Tensor:
    y = torch.full((x.shape[0], weight.out_features), torch.nan, device=DEVICE)
    linear(x, weight, y, space)
    return y


def check_linear(kind: Kind, out: int, inputs: int, most: int = MOST) -> Found:
    """Against fp64, and every row of 1..`most` alone, in company and with other neighbours, bit for bit."""
    weight, space = random_weight(kind, (out, inputs), DEVICE), workspace(most)
    x = torch.randn(most, inputs, device=DEVICE).bfloat16()
    expected = x.double() @ weight.dequantize().double().t()
    y = product(x, weight, space)
    order = torch.randperm(most, device=DEVICE)
    return {
        "relative_error": relative_error(y, expected),
        "rows_alone_equal": all(torch.equal(product(x[r : r + 1], weight, space), y[r : r + 1]) for r in range(most)),
        "row_counts_equal": all(torch.equal(product(x[:n], weight, space), y[:n]) for n in range(1, most + 1)),
        "neighbours_equal": torch.equal(product(x[order], weight, space), y[order]),
        "ptx_equals_plain": kind is Kind.BF16
        or all(torch.equal(plain_path(partial(product, x[:n], weight, space)), y[:n]) for n in (1, 16)),
    }


def check_head(kind: Kind, vocab: int, hidden: int) -> Found:
    weight, space = random_weight(kind, (vocab, hidden), DEVICE), workspace(16)
    x = torch.randn(16, hidden, device=DEVICE).bfloat16()
    units = weight.rows // 16
    squares = x.float().square().view(16, -1, 16).sum(-1)

    def run(rows: int) -> tuple[Tensor, Tensor]:
        logits = torch.full((rows, vocab), torch.nan, device=DEVICE)
        best = Best(
            torch.empty(rows, units, device=DEVICE), torch.empty(rows, units, dtype=torch.int32, device=DEVICE), logits
        )
        tokens = torch.empty(rows, dtype=torch.int32, device=DEVICE)
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
        one = only(config, FULL, 1)
        self.config, self.layer = config, random_model(one, weights, DEVICE, 64, shift=2.0).layers[0]
        self.space = workspace(MOST)
        self.scale = torch.rand(config.hidden_size, device=DEVICE) + 0.5

    def run(self, x: Tensor) -> tuple[Tensor, Routing]:
        tokens, hidden = x.shape
        config, moe = self.config, self.layer.moe
        assert config.moe is not None
        stream = x.clone()
        scaled = (x.float() * self.scale).bfloat16()
        routing = Routing.allocate(tokens, config.moe.top_k, DEVICE)
        buffers = ExpertBuffers.allocate(tokens, config.moe.top_k, config.moe.intermediate_size, hidden, DEVICE)
        squares = torch.empty(tokens, hidden // 16, device=DEVICE)
        route(stream, scaled, moe.router, routing, self.space, eps=1e-6, renormalize=True, shared=True)
        experts(
            Stream(stream, self.scale, scaled), routing, moe.gate_up, moe.down, moe.shared_gate_up, moe.shared_down,
            buffers, squares, self.space, self.scale, eps=1e-6,
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


def check_moe(config: ModelConfig, weights: str, most: int = MOST) -> Found:
    case = MoeCase(config, weights)
    assert config.moe is not None
    x = torch.randn(most, config.hidden_size, device=DEVICE).bfloat16()
    y, routing = case.run(x)
    inputs = (x.float() * case.scale).bfloat16().float()
    inputs = inputs * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    logits = inputs.double() @ case.layer.moe.router.dequantize().double().t()
    chosen = logits[:, : config.moe.num_experts].topk(config.moe.top_k).indices
    added = case.expected(x[:4], routing)
    order = torch.randperm(most, device=DEVICE)
    return {
        # of the stream, whose rounding hides what the experts add; and of what they add, as far as bf16 shows it
        "relative_error": relative_error(y[:4], x[:4].float() + added),
        "experts_show": relative_error(y[:4], x[:4]) > 2 * LIMIT,
        "chosen_equal": float((routing.experts.long() == chosen).float().mean()) > 0.999,
        "rows_alone_equal": all(torch.equal(case.run(x[r : r + 1])[0], y[r : r + 1]) for r in range(most)),
        "row_counts_equal": all(torch.equal(case.run(x[:n])[0], y[:n]) for n in range(2, most + 1)),
        "neighbours_equal": torch.equal(case.run(x[order])[0], y[order]),
        "ptx_equals_plain": torch.equal(plain_path(lambda: case.run(x[:16])[0]), y[:16]),
    }


def check_deltanet(config: ModelConfig, tokens: int = 64) -> Found:
    case, delta = MixerCase(config, LINEAR), config.delta
    assert delta is not None
    assert isinstance(case.mixer, DeltaLayer)
    width = delta.conv_channels + delta.value_heads * (delta.value_dim + 2)
    y = torch.randn(3, tokens, width, device=DEVICE)
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


def check_attention(config: ModelConfig, fp8: bool, tokens: int = 540) -> Found:
    """540 tokens: three splits. In blocks of every size, and token by token."""
    case = MixerCase(config, FULL, fp8)
    heads = heads_of(config)
    y = torch.randn(2, tokens, heads.width, device=DEVICE)
    blocks = case.run(y, 16)
    with patch("stoker.backends.gpu.kernels.attention.JOINED_AT_ONCE", 0):
        joined_apart = torch.equal(case.run(y, 16), blocks)
    with patch("stoker.backends.gpu.kernels.attention.LEAF_CELLS", 0):
        whole_splits = all(torch.equal(case.run(y, rows), blocks) for rows in (1, 3))
    expected = _attention_reference(y[0].double(), case, heads)
    return {
        "relative_error": relative_error(blocks[0], expected),
        "blocks_equal": all(torch.equal(case.run(y, rows), blocks) for rows in (1, 2, 3, 5, 13)),
        "neighbours_equal": torch.equal(case.run(y[:1], 16), blocks[:1]),
        "joins_equal": joined_apart,
        "splits_equal": whole_splits,
        "limit": 5e-2 if fp8 else 1e-2,
    }


def check_long_attention(config: ModelConfig, fp8: bool, context: int = 70_000) -> Found:
    """More splits than are joined at once: in blocks, token by token, few and many splits to a program, or a leaf."""
    splits = -(-(context + 3) // SPLIT)
    case, heads = MixerCase(config, FULL, fp8, context + 8), heads_of(config)
    y = torch.randn(1, 3, heads.width, device=DEVICE)
    block = case.run(y, 3, splits, context)
    file = "stoker.backends.gpu.kernels.attention"
    with patch(f"{file}.multiprocessors", return_value=6):
        shares_equal = torch.equal(case.run(y, 3, splits, context), block)
    with patch(f"{file}.LEAF_SPLITS", splits), patch(f"{file}.LEAF_CELLS", 3 * splits):
        leaves_equal = torch.equal(case.run(y, 3, splits, context), block)
    past = case.past(1, 3, splits)
    expected = _attention_reference(y[0].double(), case, heads, past, context)
    return {
        "relative_error": relative_error(block[0], expected),
        "blocks_equal": all(torch.equal(case.run(y, rows, splits, context), block) for rows in (1, 2)),
        "shares_equal": shares_equal,
        "leaves_equal": leaves_equal,
        "limit": 5e-2 if fp8 else 1e-2,
    }


def _attention_reference(
    y: Tensor, case: MixerCase, heads: Any, past: KVPages | None = None, context: int = 0
) -> Tensor:
    assert isinstance(case.mixer, AttentionLayer)
    weights, tokens, dim = case.mixer.weights, y.shape[0], heads.dim
    q, k, v = y.split([2 * heads.count * dim, heads.kv_count * dim, heads.kv_count * dim], dim=1)
    q, gate = q.view(tokens, heads.count, 2 * dim).chunk(2, dim=-1)
    half = weights.cos.shape[1]

    def turned(x: Tensor) -> Tensor:
        x = x * (x.square().mean(-1, keepdim=True) + weights.eps).rsqrt()
        first, second, rest = x.split([half, half, dim - 2 * half], dim=-1)
        cos, sin = (table[context : context + tokens, None].double() for table in (weights.cos, weights.sin))
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def before(pages: Tensor, scales: Tensor | None) -> Tensor:
        kept = pages.flatten(0, 1)[:context].double()
        return kept if scales is None else kept * scales.flatten(0, 1)[:context, :, None].double()

    q, k, v = turned(q), turned(k.view(tokens, -1, dim)), v.view(tokens, -1, dim)
    if past is not None:
        k = torch.cat([before(past.keys, past.key_scales), k])
        v = torch.cat([before(past.values, past.value_scales), v])
    q = q.view(tokens, heads.kv_count, heads.group, dim)
    hidden = torch.full((tokens, context + tokens), -torch.inf, device=DEVICE).triu(context + 1)
    scores = (torch.einsum("qgnd,kgd->gnqk", q, k) * dim**-0.5 + hidden).softmax(-1)
    found = torch.einsum("gnqk,kgd->qgnd", scores, v).flatten(1, 2)
    return (found * torch.sigmoid(gate)).flatten(1)


def checks(config: ModelConfig) -> dict[str, Callable[[], Found]]:
    """By name: what the kernel does, then its format, then the projection."""
    delta, heads = config.delta, heads_of(config)
    assert delta is not None
    values = delta.value_heads * delta.value_dim
    rows = delta.conv_channels + values + 2 * delta.value_heads
    return {
        **{f"linear {kind.name} in": partial(check_linear, kind, rows, config.hidden_size) for kind in Kind},
        "linear INT4 out": partial(check_linear, Kind.INT4, config.hidden_size, values),
        "linear INT4 odd": partial(check_linear, Kind.INT4, 1000, 384),
        "linear INT4 qkv": partial(check_linear, Kind.INT4, heads.width, config.hidden_size),
        "head BF16": partial(check_head, Kind.BF16, config.vocab_size, config.hidden_size),
        "head INT8": partial(check_head, Kind.INT8, config.vocab_size, config.hidden_size),
        "head INT8 odd": partial(check_head, Kind.INT8, 4608, 384),
        "experts int4": partial(check_moe, config, "int4"),
        "experts hybrid": partial(check_moe, config, "hybrid"),
        "experts nvfp4": partial(check_moe, config, "nvfp4"),
        "deltanet": partial(check_deltanet, config),
        "attention BF16": partial(check_attention, config, False),
        "attention FP8": partial(check_attention, config, True),
        "long attention BF16": partial(check_long_attention, config, False),
        "long attention FP8": partial(check_long_attention, config, True),
    }


def run_check(name: str, check: Callable[[], Found]) -> Found:
    """One kernel's failure must not hide the others' results."""
    try:
        found = check()
    except Exception as failure:
        found = {"failed": f"{type(failure).__name__}: {failure}"[:2000]}
    print(f"{name}: {'ok' if passed(found) else 'FAILED'} {found}", flush=True)
    torch.cuda.empty_cache()
    return found


def passed(found: Found) -> bool:
    if "failed" in found:
        return False
    limit = found.get("limit", LIMIT)
    return found["relative_error"] <= limit and all(value for key, value in found.items() if key != "relative_error")
