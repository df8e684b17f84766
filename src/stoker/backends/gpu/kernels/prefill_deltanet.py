# Triton types the kernels; Python's annotations cannot. Its branches on constants must keep their else.
# ruff: noqa: RET505, SIM300
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""GatedDeltaNet of a prompt between its projections, in chunks of 64 anchored at absolute multiples of 64.

Within a chunk the updates solve a triangular system (the algebra is in backends/network/delta_rule.py). Its inverse
depends on no state, so one launch prepares all chunks side by side, after the conv; the next takes the state through
them one after the other; the last norms and gates what they yield. State and conv inputs are left as a step finds them,
and copied where a snapshot is made at the end of a chunk. A place of a chunk without a token has decay 1 and beta 0: it
adds exact zeros, so a token's bits depend on the tokens before it alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.backends.family import CHUNK
from stoker.backends.gpu.kernels.deltanet import DeltaRing, DeltaWeights, _softplus
from stoker.backends.gpu.kernels.launch import INTERPRETED, arithmetic, check, pick
from stoker.backends.gpu.kernels.places import Places, place_of
from stoker.backends.network.norm import L2_EPS


@dataclass(frozen=True)
class Prepared:
    """Of each chunk and value head, before the state is known; bf16 but for the last."""

    mixed: Tensor  # [tokens, 2 HK K + HV V]: q and k after conv and norm, v after conv
    q: Tensor  # [chunks, HV, 64, K]: scaled, times the decay since the chunk began
    k: Tensor  # [chunks, HV, 64, K]: times the decay to its end
    from_state: Tensor  # [chunks, HV, 64, K]: times the state is what updates lose to what is known
    own: Tensor  # [chunks, HV, 64, V]: the updates of a state of zeros
    scores: Tensor  # [chunks, HV, 64, 64]: q k^T with its decay
    decay: Tensor  # [chunks, HV] fp32: of the whole chunk

    @classmethod
    def allocate(
        cls, tokens: int, chunks: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int,
        device: torch.device | str,
    ) -> "Prepared":  # fmt: skip

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(chunks, value_heads, *shape, dtype=dtype, device=device)

        channels = 2 * key_heads * key_dim + value_heads * value_dim
        mixed = torch.empty(tokens, channels, dtype=torch.bfloat16, device=device)
        q, k, from_state = (empty(CHUNK, key_dim) for _ in range(3))
        own, scores = empty(CHUNK, value_dim), empty(CHUNK, CHUNK)
        return cls(mixed, q, k, from_state, own, scores, empty(dtype=torch.float32))


@dataclass(frozen=True)
class Kept:
    """Snapshots of one layer: views of what holds them for all."""

    inputs: Tensor  # [n, W - 1, C] bf16
    recurrent: Tensor  # [n, HV, K, V] fp32


@triton.jit
def _conv(y_ptr, inputs_ptr, conv_ptr, channel, position, live, cached, ring, WIDTH: tl.constexpr,
          CHANNELS: tl.constexpr, TAPS: tl.constexpr):  # fmt: skip
    """silu(conv) [rows, channels] at `position` [rows, 1]; inputs before `cached` lie in the ring, others in y."""
    total = tl.zeros((position.shape[0], channel.shape[1]), tl.float32)
    for tap in tl.static_range(TAPS):
        at = position + (tap + 1 - TAPS)
        old = live & (at >= 0) & (at < cached)
        new = live & (at >= cached)
        x = tl.load(inputs_ptr + (at % ring) * CHANNELS + channel, mask=old, other=0.0).to(tl.float32)
        fresh = tl.load(y_ptr + (at - cached).to(tl.int64) * WIDTH + channel, mask=new, other=0.0)
        x += fresh.to(inputs_ptr.dtype.element_ty).to(tl.float32)
        total = tl.fma(x, tl.broadcast_to(tl.load(conv_ptr + tap * CHANNELS + channel), x.shape), total)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _keep_inputs(y_ptr, inputs_ptr, kept_ptr, snapshots_ptr, apart, channel, start, cached, tokens, ring,
                 WIDTH: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Where one of the BLOCK tokens from row `start` on ends a chunk that a snapshot follows: the conv's inputs before
    there, which lie in the ring if they are older than the prompt's tokens, else in y."""
    stop = ((cached + start) // 64 + 1) * 64
    if (stop <= cached + start + BLOCK) & (stop <= cached + tokens):
        snapshot = tl.load(kept_ptr + (stop // 64 - 1 - cached // 64))
        if snapshot >= 0:
            for tap in tl.static_range(TAPS - 1):
                at = tl.zeros_like(channel) + (stop - TAPS + 1 + tap)
                old = tl.load(inputs_ptr + (at % ring) * CHANNELS + channel, mask=at < cached, other=0.0)
                new = tl.load(y_ptr + (at - cached).to(tl.int64) * WIDTH + channel, mask=at >= cached, other=0.0)
                x = tl.where(at < cached, old, new.to(old.dtype))
                tl.store(snapshots_ptr + snapshot.to(tl.int64) * apart + tap * CHANNELS + channel, x)


@triton.jit(do_not_specialize=["ring", "apart"])
def conv_kernel(
    y_ptr, inputs_ptr, conv_ptr, mixed_ptr, places_ptr, kept_ptr, snapshots_ptr, ring, apart, WIDTH: tl.constexpr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TAPS: tl.constexpr,
    KEEPS: tl.constexpr, L2: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (h, b, s): queries, keys or values of one head for the b-th BLOCK tokens of a sequence; the first two
    normalised."""
    KEYS: tl.constexpr = KEY_HEADS * K
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * V
    head = tl.program_id(0)
    start = tl.program_id(1) * BLOCK
    slot, cached, tokens, first, chunk = place_of(places_ptr, tl.program_id(2))
    if start < tokens:
        inputs_ptr += slot.to(tl.int64) * ring * CHANNELS
        y_ptr += first.to(tl.int64) * WIDTH
        kept_ptr += chunk
        row = start + tl.arange(0, BLOCK)[:, None]
        live = row < tokens
        at = mixed_ptr + (first + row).to(tl.int64) * CHANNELS
        kept = mixed_ptr.dtype.element_ty
        if head < 2 * KEY_HEADS:
            channel = head * K + tl.arange(0, K)[None, :]
            x = _conv(y_ptr, inputs_ptr, conv_ptr, channel, cached + row, live, cached, ring, WIDTH, CHANNELS, TAPS)
            scale = tl.where(head < KEY_HEADS, SCALE, 1.0)
            x = x * (scale / tl.sqrt(tl.sum(x * x, 1) + L2))[:, None]
            tl.store(at + channel, x.to(kept), mask=live)
            if KEEPS:
                _keep_inputs(y_ptr, inputs_ptr, kept_ptr, snapshots_ptr, apart, channel, start, cached, tokens, ring,
                             WIDTH, CHANNELS, TAPS, BLOCK)  # fmt: skip
        else:
            channel = 2 * KEYS + (head - 2 * KEY_HEADS) * V + tl.arange(0, V)[None, :]
            x = _conv(y_ptr, inputs_ptr, conv_ptr, channel, cached + row, live, cached, ring, WIDTH, CHANNELS, TAPS)
            tl.store(at + channel, x.to(kept), mask=live)
            if KEEPS:
                _keep_inputs(y_ptr, inputs_ptr, kept_ptr, snapshots_ptr, apart, channel, start, cached, tokens, ring,
                             WIDTH, CHANNELS, TAPS, BLOCK)  # fmt: skip


@triton.jit
def _product(a, b, DOT: tl.constexpr):
    """fp32 times fp32. With bf16 instructions: high parts, and low parts times high ones; exact to 2^-16."""
    if DOT == tl.float32:
        return tl.dot(a, b, input_precision="ieee")
    else:
        a_high, b_high = a.to(DOT), b.to(DOT)
        a_low, b_low = (a - a_high.to(tl.float32)).to(DOT), (b - b_high.to(tl.float32)).to(DOT)
        return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))


@triton.jit
def _inverse(system, i, j, DOT: tl.constexpr):
    """(1 + system)^-1 of a strictly lower triangular system [64, 64]: 16 by 16 on the diagonal row by row, the rest by
    products. With D the blocks on the diagonal and L those below, (D + L)^-1 = (1 - N)(1 + N^2) D^-1, N = D^-1 L."""
    block = tl.arange(0, 4)[None, :, None]
    mine = (tl.arange(0, 64) // 16)[:, None, None] == block
    cut = tl.sum(tl.where(mine, tl.reshape(-system, (64, 4, 16)), 0.0), 1)  # the block of each row: exact
    rows = tl.reshape(cut, (4, 16, 16))
    place = tl.arange(0, 16)[None, :, None]
    for r in range(1, 16):
        row = tl.sum(tl.where(place == r, rows, 0.0), 1)  # [4, 16]
        row += tl.sum(row[:, :, None] * rows, 1)
        rows = tl.where(place == r, row[:, None, :], rows)
    spread = tl.broadcast_to(tl.reshape(rows, (64, 1, 16)), (64, 4, 16))
    diagonal = tl.reshape(tl.where(mine, spread, 0.0), (64, 64)) + tl.where(i == j, 1.0, 0.0)
    n = _product(diagonal, tl.where(i // 16 > j // 16, system, 0.0), DOT)
    half = diagonal + _product(_product(n, n, DOT), diagonal, DOT)
    return half - _product(n, half, DOT)


@triton.jit
def prepare_kernel(
    ab_ptr, mixed_ptr, decay_ptr, bias_ptr, q_ptr, k_ptr, from_state_ptr, own_ptr, scores_ptr, ends_ptr, places_ptr,
    AB_WIDTH: tl.constexpr, AB_AT: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (h, c, s): value head h of the c-th chunk of a sequence."""
    _, cached, tokens, first, chunk = place_of(places_ptr, tl.program_id(2))
    start = (cached // 64 + tl.program_id(1)) * 64 - cached  # the chunk's first row
    if start < tokens:
        ab_ptr += first.to(tl.int64) * AB_WIDTH
        mixed_ptr += first.to(tl.int64) * (2 * KEY_HEADS * K + HEADS * V)
        _prepare(ab_ptr, mixed_ptr, decay_ptr, bias_ptr, q_ptr, k_ptr, from_state_ptr, own_ptr, scores_ptr, ends_ptr,
                 start, tokens, tl.program_id(0), chunk + tl.program_id(1), AB_WIDTH, AB_AT, KEY_HEADS, HEADS, K, V,
                 DOT)  # fmt: skip


@triton.jit
def _prepare(
    ab_ptr, mixed_ptr, decay_ptr, bias_ptr, q_ptr, k_ptr, from_state_ptr, own_ptr, scores_ptr, ends_ptr, start,
    tokens, head, chunk, AB_WIDTH: tl.constexpr, AB_AT: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    KEYS: tl.constexpr = KEY_HEADS * K
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * V
    place = tl.arange(0, 64)
    row = start + place
    there = (row >= 0) & (row < tokens)
    ab = ab_ptr + row.to(tl.int64) * AB_WIDTH + AB_AT + head
    a = tl.load(ab, mask=there, other=0.0)
    b = tl.load(ab + HEADS, mask=there, other=0.0)
    g = tl.where(there, _softplus(a + tl.load(bias_ptr + head)) * tl.load(decay_ptr + head), 0.0)
    beta = tl.where(there, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    running = tl.cumsum(g, 0)
    whole = tl.sum(tl.where(place == 63, running, 0.0), 0)
    since_start = tl.exp(running)
    i, j = place[:, None], place[None, :]
    decay = tl.exp(tl.where(i >= j, running[:, None] - running[None, :], float("-inf")))
    out = (chunk * HEADS + head).to(tl.int64) * 64
    tl.store(ends_ptr + chunk * HEADS + head, tl.exp(whole))

    kept = q_ptr.dtype.element_ty
    live = there[:, None]
    tokens_at = mixed_ptr + row.to(tl.int64)[:, None] * CHANNELS
    d = tl.arange(0, K)[None, :]
    channel = head // (HEADS // KEY_HEADS) * K + d
    cells = (out + i) * K + d
    k = tl.load(tokens_at + KEYS + channel, mask=live, other=0.0).to(DOT)
    tl.store(k_ptr + cells, (k.to(tl.float32) * tl.exp(whole - running)[:, None]).to(kept))
    q = tl.load(tokens_at + channel, mask=live, other=0.0).to(DOT)
    tl.store(q_ptr + cells, (q.to(tl.float32) * since_start[:, None]).to(kept))
    turned = tl.trans(k)
    scores = tl.dot(q, turned) * decay
    tl.store(scores_ptr + (out + i) * 64 + j, scores.to(kept))
    system = tl.where(i > j, tl.dot(k, turned) * decay * beta[:, None], 0.0)
    inverse = _inverse(system, i, j, DOT) * beta[None, :]
    known = tl.dot((inverse * since_start[None, :]).to(DOT), k)
    tl.store(from_state_ptr + cells, known.to(kept))
    d = tl.arange(0, V)[None, :]
    v = tl.load(tokens_at + 2 * KEYS + head * V + d, mask=live, other=0.0).to(DOT)
    tl.store(own_ptr + (out + i) * V + d, tl.dot(inverse.to(DOT), v).to(kept))


@triton.jit(do_not_specialize=["apart"])
def scan_kernel(
    q_ptr, k_ptr, from_state_ptr, own_ptr, scores_ptr, ends_ptr, state_ptr, out_ptr, places_ptr, kept_ptr,
    snapshots_ptr, apart, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SLAB: tl.constexpr,
    KEEPS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (v, h, s): the v-th SLAB values of value head h through a sequence's chunks, one after the other. Where
    nothing is cached, the state begins with zeros."""
    head = tl.program_id(1)
    slot, cached, tokens, first, first_chunk = place_of(places_ptr, tl.program_id(2))
    if tokens > 0:
        origin = cached // 64 * 64
        state_ptr += (slot.to(tl.int64) * HEADS + head) * (K * V)
        out_ptr += (first.to(tl.int64) * HEADS + head) * V
        place = tl.arange(0, 64)[:, None]
        keys, values = tl.arange(0, K)[None, :], tl.program_id(0) * SLAB + tl.arange(0, SLAB)[None, :]
        cell = tl.arange(0, K)[:, None] * V + values
        state = tl.where(cached > 0, tl.load(state_ptr + cell), 0.0)
        for chunk in range((cached + tokens - origin + 63) // 64):
            at = ((first_chunk + chunk) * HEADS + head).to(tl.int64) * 64 + place
            at_keys = at * K + keys
            held = state.to(DOT)
            known = tl.dot(tl.load(from_state_ptr + at_keys).to(DOT), held)
            updates = (tl.load(own_ptr + at * V + values).to(tl.float32) - known).to(DOT)
            o = tl.dot(tl.load(q_ptr + at_keys).to(DOT), held)
            o = tl.dot(tl.load(scores_ptr + at * 64 + tl.arange(0, 64)[None, :]).to(DOT), updates, o)
            state = state * tl.load(ends_ptr + (first_chunk + chunk) * HEADS + head)
            state = tl.dot(tl.trans(tl.load(k_ptr + at_keys).to(DOT)), updates, state)
            row = origin + chunk * 64 - cached + place
            target = out_ptr + row.to(tl.int64) * (HEADS * V) + values
            tl.store(target, o.to(out_ptr.dtype.element_ty), mask=(row >= 0) & (row < tokens))
            if KEEPS:
                snapshot = tl.load(kept_ptr + first_chunk + chunk)
                if snapshot >= 0:
                    tl.store(snapshots_ptr + snapshot.to(tl.int64) * apart + head * (K * V) + cell, state)
        tl.store(state_ptr + cell, state)


@triton.jit(do_not_specialize=["ring"])
def gate_kernel(
    y_ptr, norm_ptr, out_ptr, inputs_ptr, places_ptr, ring, WIDTH: tl.constexpr, KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TAPS: tl.constexpr, EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (h, b, s): BLOCK rows of head h of a sequence normed and gated, in place; conv inputs of its last rows go
    to the ring."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * K + HEADS * V
    head = tl.program_id(0)
    start = tl.program_id(1) * BLOCK
    slot, cached, tokens, first, _ = place_of(places_ptr, tl.program_id(2))
    if start < tokens:
        row = start + tl.arange(0, BLOCK)[:, None]
        ok = row < tl.where(head < HEADS, tokens, 0)  # there may be more heads of queries and keys
        v = tl.arange(0, V)[None, :]
        at = out_ptr + ((first + row).to(tl.int64) * HEADS + head) * V + v
        y_row = y_ptr + (first + row).to(tl.int64) * WIDTH
        o = tl.load(at, mask=ok, other=0.0).to(tl.float32)
        z = tl.load(y_row + (CHANNELS + head * V) + v, mask=ok, other=0.0)
        o = o * (1.0 / tl.sqrt(tl.sum(o * o, 1) / V + EPS))[:, None] * tl.load(norm_ptr + v) * (z / (1.0 + tl.exp(-z)))
        tl.store(at, o.to(out_ptr.dtype.element_ty), mask=ok)
        # the conv's reach before the next token; what of it is older is in the ring already
        if start + BLOCK > tokens - TAPS + 1:
            last = (row < tokens) & (row > tokens - TAPS)
            place = inputs_ptr + (slot.to(tl.int64) * ring + (cached + row) % ring) * CHANNELS
            channel = 2 * KEY_HEADS * K + head * V + v
            x = tl.load(y_row + channel, mask=last & ok, other=0.0)
            tl.store(place + channel, x.to(inputs_ptr.dtype.element_ty), mask=last & ok)
            if head < 2 * KEY_HEADS:
                channel = head * K + tl.arange(0, K)[None, :]
                x = tl.load(y_row + channel, mask=last, other=0.0)
                tl.store(place + channel, x.to(inputs_ptr.dtype.element_ty), mask=last)


def prefill_deltanet(
    y: Tensor,
    out: Tensor,
    state: DeltaRing,
    weights: DeltaWeights,
    prepared: Prepared,
    places: Places,
    gates: Tensor | None = None,
    kept: Kept | None = None,
) -> None:
    """y [T, 2 HK K + 2 HV V + 2 HV] fp32 as in `deltanet`, of the tokens of all sequences. A sequence's state must hold
    all tokens before them. With `kept`, snapshots are made at the ends of chunks where `places.kept` says so."""
    slots, heads, key_dim, value_dim = state.recurrent.shape
    taps, channels = weights.conv.shape
    ring, tokens = state.inputs.shape[1], y.shape[0]
    values = channels + heads * value_dim
    width = values + (2 * heads if gates is None else 0)
    if key_dim & key_dim - 1 or value_dim & value_dim - 1 or min(key_dim, value_dim) < 16:
        raise ValueError(f"head dimensions must be powers of two from 16 on, found {key_dim} and {value_dim}.")
    if ring < taps - 1:
        raise ValueError(f"the conv reaches {taps - 1} tokens back, the ring has {ring} places.")
    check("y", y, (tokens, width), torch.float32, y)
    if gates is not None:
        check("gates", gates, (tokens, 2 * heads), torch.float32, y)
    check("out", out, (tokens, heads * value_dim), torch.bfloat16, y)
    check("recurrent", state.recurrent, (slots, heads, key_dim, value_dim), torch.float32, y)
    check("inputs", state.inputs, (slots, ring, channels), torch.bfloat16, y)
    check("conv", weights.conv, (taps, channels), torch.float32, y)
    if prepared.decay.shape[0] < len(places.kept):
        raise ValueError(f"{len(places.kept)} chunks may come, room is for {len(prepared.decay)}.")
    check("prepared.mixed", prepared.mixed, (None, channels), torch.bfloat16, y)
    if prepared.mixed.shape[0] < tokens:
        raise ValueError(f"room is for {prepared.mixed.shape[0]} tokens, found {tokens}.")
    heads_of = {"KEY_HEADS": state.key_heads, "HEADS": heads, "K": key_dim, "V": value_dim}
    between = (prepared.q, prepared.k, prepared.from_state, prepared.own, prepared.scores, prepared.decay)
    math = {key: value for key, value in arithmetic(y.device).items() if key != "PTX"}
    plain = {key: value for key, value in math.items() if key != "DOT"}
    inputs, recurrent = (state.inputs, state.recurrent) if kept is None else (kept.inputs, kept.recurrent)
    blocks, keeps = triton.cdiv(places.longest, ROWS["BLOCK"]), kept is not None
    conv_kernel[(2 * state.key_heads + heads, blocks, places.count)](
        y, state.inputs, weights.conv, prepared.mixed, places.numbers, places.kept, inputs, ring, inputs.stride(0),
        WIDTH=width, TAPS=taps, KEEPS=keeps, L2=L2_EPS, SCALE=key_dim**-0.5, **ROWS, **heads_of, **plain,
    )  # fmt: skip
    prepare_kernel[(heads, places.chunks, places.count)](
        y if gates is None else gates, prepared.mixed, weights.decay, weights.bias, *between, places.numbers,
        AB_WIDTH=width if gates is None else 2 * heads, AB_AT=values if gates is None else 0, **PREPARE, **heads_of,
        **math,
    )  # fmt: skip
    scan = pick(y.device, SCAN, SCAN_LITTLE, SCAN_AMD)
    scan = {**scan, "SLAB": min(scan["SLAB"], value_dim)}
    scan_kernel[(value_dim // scan["SLAB"], heads, places.count)](
        *between, state.recurrent, out, places.numbers, places.kept, recurrent, recurrent.stride(0), HEADS=heads,
        K=key_dim, V=value_dim, KEEPS=keeps, **scan, **math,
    )  # fmt: skip
    gate_kernel[(max(heads, 2 * state.key_heads), blocks, places.count)](
        y, weights.norm, out, state.inputs, places.numbers, ring, WIDTH=width, TAPS=taps, EPS=weights.eps,
        **ROWS, **heads_of, **plain,
    )  # fmt: skip


ROWS: dict[str, Any] = {"BLOCK": 64 if INTERPRETED else 32, "num_warps": 4}  # of conv and gate
PREPARE: dict[str, Any] = {"num_warps": 8, "num_stages": 1}
# SLAB: values of a program that takes the state along. Half a head or less, so that there are enough programs.
SCAN: dict[str, Any] = {"SLAB": 64, "num_warps": 8, "num_stages": 2}
SCAN_LITTLE: dict[str, Any] = {**SCAN, "SLAB": 32}
SCAN_AMD: dict[str, Any] = {**SCAN, "num_stages": 1}
