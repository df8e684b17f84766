# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""GatedDeltaNet of a step between its projections: conv, replay, recurrence, one state write, gated norm.

A program has one value head of one sequence. It reads the state, takes the accepted tokens of the step before through
it, writes it, goes on with the step's own tokens, and leaves their conv inputs and gates for the next step to replay.
Replayed and new tokens run through the same code one by one, so that a token has the same bits in any block.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.ops.norm import L2_EPS
from stoker.ops.triton.launch import arithmetic, check, dependent
from stoker.ops.triton.products import wait_for_inputs

KEPT = tl.constexpr(8)  # tokens prepared at a time; always as many, so that every sum has one shape


@dataclass(frozen=True)
class DeltaRing:
    """State of one layer for every slot, and what the last tokens fed in: position p lies at place p % R."""

    recurrent: Tensor  # [slots, HV, K, V] fp32
    inputs: Tensor  # [slots, R, C] bf16: q, k and v before the conv
    gates: Tensor  # [slots, R, 2, HV] fp32: log decay and beta

    @classmethod
    def allocate(
        cls, slots: int, window: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int,
        device: torch.device | str,
    ) -> "DeltaRing":  # fmt: skip
        """`window` is the longest step of one sequence, drafts included."""
        ring, channels = ring_size(window, kernel), 2 * key_heads * key_dim + value_heads * value_dim
        return cls(
            torch.zeros(slots, value_heads, key_dim, value_dim, dtype=torch.float32, device=device),
            torch.zeros(slots, ring, channels, dtype=torch.bfloat16, device=device),
            torch.zeros(slots, ring, 2, value_heads, dtype=torch.float32, device=device),
        )

    @property
    def key_heads(self) -> int:
        heads, key_dim, value_dim = self.recurrent.shape[1:]
        return (self.inputs.shape[2] - heads * value_dim) // (2 * key_dim)


@dataclass(frozen=True)
class DeltaWeights:
    conv: Tensor  # [W, C] fp32
    decay: Tensor  # [HV] fp32: -exp(A_log)
    bias: Tensor  # [HV] fp32: dt_bias
    norm: Tensor  # [V] fp32
    eps: float


@dataclass(frozen=True)
class Sequences:
    """B sequences with `rows` rows each in the flat batch, of which the first `lengths` are tokens. int32 [B] each."""

    rows: int
    slots: Tensor
    cached: Tensor  # tokens before this step
    lengths: Tensor  # tokens of this step
    replay: Tensor  # how many of `cached` are not in the recurrent state yet

    @property
    def count(self) -> int:
        return self.slots.shape[0]


def ring_size(window: int, kernel: int) -> int:
    """Places for the replayed tokens, the conv's reach before them and the new tokens, none of which may meet."""
    return -(-(2 * window + kernel - 1) // 8) * 8


@triton.jit
def _conv(y_ptr, inputs_ptr, conv_ptr, channel, position, live, cached, row, ring, WIDTH: tl.constexpr,
          CHANNELS: tl.constexpr, TAPS: tl.constexpr):  # fmt: skip
    """silu(conv) [KEPT, channels] at `position`; inputs before `cached` lie in the ring, others in y from `row` on."""
    total = tl.zeros((KEPT, channel.shape[1]), tl.float32)
    for tap in tl.static_range(TAPS):
        at = position + (tap + 1 - TAPS)
        old = live & (at >= 0) & (at < cached)
        new = live & (at >= cached)
        x = tl.load(inputs_ptr + (at % ring) * CHANNELS + channel, mask=old, other=0.0).to(tl.float32)
        fresh = tl.load(y_ptr + (row + at - cached) * WIDTH + channel, mask=new, other=0.0)
        x += fresh.to(inputs_ptr.dtype.element_ty).to(tl.float32)
        weight = tl.load(conv_ptr + tap * CHANNELS + channel)
        total = tl.fma(x, tl.broadcast_to(weight, x.shape), total)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), linear above 20; exact where exp(x) is small."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    near = tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, near))


@triton.jit
def _row(tile, j):
    """Row j of [KEPT, n]: a sum with zeros, exact."""
    return tl.sum(tl.where(tl.arange(0, KEPT)[:, None] == j, tile, 0.0), 0)


@triton.jit
def _number(vector, j):
    return tl.sum(tl.where(tl.arange(0, KEPT) == j, vector, 0.0), 0)


@triton.jit(do_not_specialize=["block_rows", "ring"])
def deltanet_kernel(
    y_ptr, ab_ptr, out_ptr, state_ptr, inputs_ptr, gates_ptr, conv_ptr, decay_ptr, bias_ptr, norm_ptr, slots_ptr,
    cached_ptr, lengths_ptr, replay_ptr, block_rows, ring, WIDTH: tl.constexpr, AB_WIDTH: tl.constexpr,
    AB_AT: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    TAPS: tl.constexpr, EPS: tl.constexpr, L2: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, b): value head h of sequence b."""
    KEYS: tl.constexpr = KEY_HEADS * K
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * V
    SPREAD: tl.constexpr = HEADS // KEY_HEADS
    wait_for_inputs(PDL)
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    cached = tl.load(cached_ptr + sequence)
    replay = tl.load(replay_ptr + sequence)
    count = replay + tl.load(lengths_ptr + sequence)
    row = sequence * block_rows
    state_ptr += (slot * HEADS + head) * (K * V)
    inputs_ptr += slot * (ring * CHANNELS)
    gates_ptr += slot * (ring * 2 * HEADS)
    cell = tl.arange(0, K)[:, None] * V + tl.arange(0, V)[None, :]
    state = tl.load(state_ptr + cell)
    q_channel = head // SPREAD * K + tl.arange(0, K)[None, :]
    v_channel = 2 * KEYS + head * V + tl.arange(0, V)[None, :]
    decay = tl.load(decay_ptr + head)
    bias = tl.load(bias_ptr + head)
    norm = tl.load(norm_ptr + tl.arange(0, V))
    for start in range(0, count, KEPT):
        i = start + tl.arange(0, KEPT)
        position = cached - replay + i
        old = i < replay
        new = (i >= replay) & (i < count)
        live = (i < count)[:, None]
        at = position[:, None]
        q = _conv(y_ptr, inputs_ptr, conv_ptr, q_channel, at, live, cached, row, ring, WIDTH, CHANNELS, TAPS)
        k = _conv(y_ptr, inputs_ptr, conv_ptr, KEYS + q_channel, at, live, cached, row, ring, WIDTH, CHANNELS, TAPS)
        v = _conv(y_ptr, inputs_ptr, conv_ptr, v_channel, at, live, cached, row, ring, WIDTH, CHANNELS, TAPS)
        q = q * (SCALE / tl.sqrt(tl.sum(q * q, 1) + L2))[:, None]
        k = k * (1.0 / tl.sqrt(tl.sum(k * k, 1) + L2))[:, None]
        qk = tl.sum(q * k, 1)
        mine = (row + i - replay) * WIDTH
        ab = ab_ptr + (row + i - replay) * AB_WIDTH + AB_AT + head
        a = tl.load(ab, mask=new, other=0.0)
        b = tl.load(ab + HEADS, mask=new, other=0.0)
        kept = gates_ptr + (position % ring) * (2 * HEADS) + head
        g = tl.where(new, _softplus(a + bias) * decay, tl.load(kept, mask=old, other=0.0))
        beta = tl.where(new, 1.0 / (1.0 + tl.exp(-b)), tl.load(kept + HEADS, mask=old, other=0.0))
        z = tl.load(y_ptr + mine[:, None] + (CHANNELS + head * V) + tl.arange(0, V)[None, :], mask=new[:, None],
                    other=0.0)  # fmt: skip
        z = z / (1.0 + tl.exp(-z))
        # what the next step replays; no place of these is read by any program of this launch
        tl.store(kept, g, mask=new)
        tl.store(kept + HEADS, beta, mask=new)
        place = inputs_ptr + (at % ring) * CHANNELS
        fresh = tl.load(y_ptr + mine[:, None] + v_channel, mask=new[:, None], other=0.0)
        tl.store(place + v_channel, fresh.to(inputs_ptr.dtype.element_ty), mask=new[:, None])
        if head % SPREAD == 0:
            for part in tl.static_range(2):
                channel = part * KEYS + q_channel
                fresh = tl.load(y_ptr + mine[:, None] + channel, mask=new[:, None], other=0.0)
                tl.store(place + channel, fresh.to(inputs_ptr.dtype.element_ty), mask=new[:, None])
        forget = tl.exp(g)
        for j in range(tl.minimum(KEPT, count - start)):
            k_j = _row(k, j)[:, None]
            q_j = _row(q, j)[:, None]
            state = state * _number(forget, j)
            known = tl.sum(state * k_j, 0)
            seen = tl.sum(state * q_j, 0)
            change = _number(beta, j) * (_row(v, j) - known)
            state = tl.fma(tl.broadcast_to(k_j, (K, V)), tl.broadcast_to(change[None, :], (K, V)), state)
            if start + j == replay - 1:
                tl.store(state_ptr + cell, state)
            if start + j >= replay:
                o = seen + _number(qk, j) * change  # what the updated state holds for q
                scale = 1.0 / tl.sqrt(tl.sum(o * o, 0) / V + EPS)
                o = o * scale * norm * _row(z, j)
                at_out = out_ptr + ((row + start + j - replay) * HEADS + head) * V + tl.arange(0, V)
                tl.store(at_out, o.to(out_ptr.dtype.element_ty))


def deltanet(
    y: Tensor,
    out: Tensor,
    state: DeltaRing,
    weights: DeltaWeights,
    sequences: Sequences,
    pdl: bool = False,
    gates: Tensor | None = None,
) -> None:
    """y [T, 2 HK K + 2 HV V + 2 HV] fp32: q, k, v before the conv, z, a, b -> out [T, HV * V] bf16, gated.

    a and b may come apart, as `gates` [T, 2 HV], where their weights are of another format; y then ends with z.
    """
    slots, heads, key_dim, value_dim = state.recurrent.shape
    taps, channels = weights.conv.shape
    ring, tokens = state.inputs.shape[1], sequences.count * sequences.rows
    values = channels + heads * value_dim
    width = values + (2 * heads if gates is None else 0)
    if key_dim & key_dim - 1 or value_dim & value_dim - 1:
        raise ValueError(f"head dimensions must be powers of two, found {key_dim} and {value_dim}.")
    if ring < ring_size(sequences.rows, taps):
        raise ValueError(
            f"the ring has {ring} places: steps of {sequences.rows} tokens need {ring_size(sequences.rows, taps)}."
        )
    check("y", y, (tokens, width), torch.float32, y)
    if gates is not None:
        check("gates", gates, (tokens, 2 * heads), torch.float32, y)
    check("out", out, (tokens, heads * value_dim), torch.bfloat16, y)
    check("recurrent", state.recurrent, (slots, heads, key_dim, value_dim), torch.float32, y)
    check("inputs", state.inputs, (slots, ring, channels), torch.bfloat16, y)
    check("gates", state.gates, (slots, ring, 2, heads), torch.float32, y)
    check("conv", weights.conv, (taps, channels), torch.float32, y)
    for name in ("decay", "bias"):
        check(name, getattr(weights, name), (heads,), torch.float32, y)
    check("norm", weights.norm, (value_dim,), torch.float32, y)
    check_sequences(sequences, y)
    deltanet_kernel[(heads, sequences.count)](
        y, y if gates is None else gates, out, state.recurrent, state.inputs, state.gates, weights.conv,
        weights.decay, weights.bias, weights.norm, sequences.slots, sequences.cached, sequences.lengths,
        sequences.replay, sequences.rows, ring, WIDTH=width,
        AB_WIDTH=width if gates is None else 2 * heads, AB_AT=values if gates is None else 0,
        KEY_HEADS=state.key_heads, HEADS=heads, K=key_dim, V=value_dim, TAPS=taps,
        EPS=weights.eps, L2=L2_EPS, SCALE=key_dim**-0.5, num_warps=warps(key_dim, value_dim),
        **_fusion(y.device), **dependent(y.device, pdl),
    )  # fmt: skip


def check_sequences(sequences: Sequences, like: Tensor) -> None:
    for name in ("slots", "cached", "lengths", "replay"):
        check(f"sequences.{name}", getattr(sequences, name), (sequences.count,), torch.int32, like)


def warps(key_dim: int, value_dim: int) -> int:
    """64 registers a thread for the state."""
    return min(8, max(1, key_dim * value_dim // 2048))


def _fusion(device: torch.device) -> dict[str, bool]:
    return {key: value for key, value in arithmetic(device).items() if key == "enable_fp_fusion"}
