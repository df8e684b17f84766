# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""GatedDeltaNet of a step between its projections: conv, replay, recurrence, one state write, gated norm.

A program has one value head of one sequence. It reads the state, takes the accepted tokens of the step before through
it, writes it, goes on with the step's own tokens, and leaves their conv inputs and gates for the next step to replay.
Replayed and new tokens run through the same code one by one, so that a token has the same bits in any block.

What a token needs besides the state is prepared for eight tokens side by side, a warp each, and handed over through
memory, since registers of the one layout are of no use in the other: a thread has 16 keys of 4 values of the state, so
that a sum over keys is 16 registers and 8 lanes and no warp waits for another while tokens follow each other.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.backends.gpu.kernels.launch import arithmetic, check, dependent, register_limit
from stoker.backends.gpu.kernels.products import wait_for_inputs
from stoker.backends.network.norm import L2_EPS
from stoker.sizes.memory import gpu_ring

KEPT = tl.constexpr(8)  # tokens prepared at a time; always as many, so that every sum has one shape
LANES = tl.constexpr(8)  # of a warp that share the keys of a value
STRIP = tl.constexpr(16)  # values of a warp
NUMBERS = tl.constexpr(4)  # of a token: decay, beta, q * k; and one to align the next row


@dataclass(frozen=True)
class DeltaRing:
    """State of one layer for every slot, and what the last tokens fed in: position p lies at place p % R."""

    recurrent: Tensor  # [slots, HV, K, V] fp32
    inputs: Tensor  # [slots, R, C] bf16: q, k and v before the conv
    gates: Tensor  # [slots, R, 2, HV] fp32: log decay and beta
    scratch: Tensor  # [slots, HV, KEPT, 2 K + 2 V + NUMBERS] fp32: nothing between launches, so layers may share it

    @classmethod
    def allocate(
        cls, slots: int, window: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int,
        device: torch.device | str, layers: int | None = None,
    ) -> "DeltaRing":  # fmt: skip
        """`window` is the longest step of one sequence, drafts included; with `layers` all but the scratch have them
        as their first dimension."""
        ring, channels = gpu_ring(window, kernel), 2 * key_heads * key_dim + value_heads * value_dim
        lead = (slots,) if layers is None else (layers, slots)
        row = 2 * key_dim + 2 * value_dim + NUMBERS.value
        return cls(
            torch.zeros(*lead, value_heads, key_dim, value_dim, dtype=torch.float32, device=device),
            torch.zeros(*lead, ring, channels, dtype=torch.bfloat16, device=device),
            torch.zeros(*lead, ring, 2, value_heads, dtype=torch.float32, device=device),
            torch.empty(slots, value_heads, KEPT.value, row, dtype=torch.float32, device=device),
        )

    def layer(self, index: int) -> "DeltaRing":
        return DeltaRing(self.recurrent[index], self.inputs[index], self.gates[index], self.scratch)

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


@triton.jit
def _conv(y_ptr, inputs_ptr, conv_ptr, channel, position, live, cached, row, ring, WIDTH: tl.constexpr,
          CHANNELS: tl.constexpr, TAPS: tl.constexpr):  # fmt: skip
    """silu(conv) [KEPT, channels] at `position`, and its own input; inputs before `cached` lie in the ring, others in y
    from `row` on."""
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
    return total / (1.0 + tl.exp(-total)), x


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), linear above 20; exact where exp(x) is small."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    near = tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, near))


@triton.jit(do_not_specialize=["block_rows", "ring"])
def deltanet_kernel(
    y_ptr, ab_ptr, out_ptr, state_ptr, inputs_ptr, gates_ptr, scratch_ptr, conv_ptr, decay_ptr, bias_ptr, norm_ptr,
    slots_ptr, cached_ptr, lengths_ptr, replay_ptr, block_rows, ring, WIDTH: tl.constexpr, AB_WIDTH: tl.constexpr,
    AB_AT: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    TAPS: tl.constexpr, EPS: tl.constexpr, L2: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, b): value head h of sequence b."""
    KEYS: tl.constexpr = KEY_HEADS * K
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * V
    SPREAD: tl.constexpr = HEADS // KEY_HEADS
    ROW: tl.constexpr = 2 * K + 2 * V + NUMBERS  # of the scratch: q, k, v, o and numbers of a token
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
    scratch_ptr += (slot * HEADS + head) * (KEPT * ROW)
    # The state is [keys in registers, strips of values, keys in lanes, values in lanes and registers]. It is loaded in
    # two dimensions, whose rows every compiler version deals to lanes first and to warps then.
    STRIPS: tl.constexpr = V // STRIP
    r = tl.arange(0, K * STRIPS)[:, None]
    cell = (r // (STRIPS * LANES) * LANES + r % LANES) * V + r // LANES % STRIPS * STRIP + tl.arange(0, STRIP)[None, :]
    state = tl.reshape(tl.load(state_ptr + cell), (K // LANES, STRIPS, LANES, STRIP))
    key = tl.arange(0, K // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    value = tl.arange(0, STRIPS)[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    q_channel = head // SPREAD * K + tl.arange(0, K)[None, :]
    v_channel = 2 * KEYS + head * V + tl.arange(0, V)[None, :]
    decay = tl.load(decay_ptr + head)
    bias = tl.load(bias_ptr + head)
    norm = tl.load(norm_ptr + tl.arange(0, V))[None, :]
    wait_for_inputs(PDL)  # the state is nobody's but this layer's
    for start in range(0, count, KEPT):
        i = start + tl.arange(0, KEPT)
        position = cached - replay + i
        old = i < replay
        new = (i >= replay) & (i < count)
        live = (i < count)[:, None]
        at = position[:, None]
        q, q_in = _conv(y_ptr, inputs_ptr, conv_ptr, q_channel, at, live, cached, row, ring, WIDTH, CHANNELS, TAPS)
        k, k_in = _conv(y_ptr, inputs_ptr, conv_ptr, KEYS + q_channel, at, live, cached, row, ring, WIDTH, CHANNELS,
                        TAPS)  # fmt: skip
        v, v_in = _conv(y_ptr, inputs_ptr, conv_ptr, v_channel, at, live, cached, row, ring, WIDTH, CHANNELS, TAPS)
        ab = ab_ptr + (row + i - replay) * AB_WIDTH + AB_AT + head
        a = tl.load(ab, mask=new, other=0.0)
        b = tl.load(ab + HEADS, mask=new, other=0.0)
        kept = gates_ptr + (position % ring) * (2 * HEADS) + head
        g = tl.where(new, _softplus(a + bias) * decay, tl.load(kept, mask=old, other=0.0))
        beta = tl.where(new, 1.0 / (1.0 + tl.exp(-b)), tl.load(kept + HEADS, mask=old, other=0.0))
        z_at = (row + i - replay)[:, None] * WIDTH + (CHANNELS + head * V) + tl.arange(0, V)[None, :]
        z = tl.load(y_ptr + z_at, mask=new[:, None], other=0.0)
        q = q * (SCALE / tl.sqrt(tl.sum(q * q, 1) + L2))[:, None]
        k = k * (1.0 / tl.sqrt(tl.sum(k * k, 1) + L2))[:, None]
        prepared = scratch_ptr + tl.arange(0, KEPT)[:, None] * ROW
        tl.store(prepared + tl.arange(0, K)[None, :], q)
        tl.store(prepared + K + tl.arange(0, K)[None, :], k)
        tl.store(prepared + 2 * K + tl.arange(0, V)[None, :], v)
        numbers = scratch_ptr + tl.arange(0, KEPT) * ROW + (2 * K + 2 * V)
        tl.store(numbers, tl.exp(g))
        tl.store(numbers + 1, beta)
        tl.store(numbers + 2, tl.sum(q * k, 1))
        # what the next step replays; no place of these is read by any program of this launch
        tl.store(kept, g, mask=new)
        tl.store(kept + HEADS, beta, mask=new)
        place = inputs_ptr + (at % ring) * CHANNELS
        tl.store(place + v_channel, v_in.to(inputs_ptr.dtype.element_ty), mask=new[:, None])
        if head % SPREAD == 0:
            tl.store(place + q_channel, q_in.to(inputs_ptr.dtype.element_ty), mask=new[:, None])
            tl.store(place + KEYS + q_channel, k_in.to(inputs_ptr.dtype.element_ty), mask=new[:, None])
        tl.debug_barrier()
        for j in range(tl.minimum(KEPT, count - start)):
            token = scratch_ptr + j * ROW
            k_j = tl.load(token + K + key)[:, None, :][:, :, :, None]
            state = state * tl.load(token + (2 * K + 2 * V))
            known = tl.sum(tl.sum(state * k_j, 0), 1)
            change = tl.load(token + (2 * K + 2 * V + 1)) * (tl.load(token + 2 * K + value) - known)
            if start + j >= replay:  # what the updated state holds for q
                q_j = tl.load(token + key)[:, None, :][:, :, :, None]
                seen = tl.sum(tl.sum(state * q_j, 0), 1)
                o = seen + tl.load(token + (2 * K + 2 * V + 2)) * change
                tl.store(token + (2 * K + V) + value, o)
            spread = change[:, None, :][None, :, :, :]  # in the order of the sums, so that it stays in its registers
            state = tl.fma(tl.broadcast_to(k_j, state.shape), tl.broadcast_to(spread, state.shape), state)
            if start + j == replay - 1:
                tl.store(state_ptr + cell, tl.reshape(state, (K * STRIPS, STRIP)))
        tl.debug_barrier()
        o = tl.load(prepared + (2 * K + V) + tl.arange(0, V)[None, :], mask=new[:, None], other=0.0)
        scale = 1.0 / tl.sqrt(tl.sum(o * o, 1) / V + EPS)
        o = o * scale[:, None] * norm * (z / (1.0 + tl.exp(-z)))
        at_out = out_ptr + ((row + i - replay)[:, None] * HEADS + head) * V + tl.arange(0, V)[None, :]
        tl.store(at_out, o.to(out_ptr.dtype.element_ty), mask=new[:, None])


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
    if key_dim & key_dim - 1 or value_dim & value_dim - 1 or key_dim < LANES.value or value_dim < STRIP.value:
        raise ValueError(
            f"head dimensions must be powers of two, at least {LANES.value} and {STRIP.value}, found {key_dim} and "
            f"{value_dim}."
        )
    if ring < gpu_ring(sequences.rows, taps):
        raise ValueError(
            f"the ring has {ring} places: steps of {sequences.rows} tokens need {gpu_ring(sequences.rows, taps)}."
        )
    check("y", y, (tokens, width), torch.float32, y)
    if gates is not None:
        check("gates", gates, (tokens, 2 * heads), torch.float32, y)
    check("out", out, (tokens, heads * value_dim), torch.bfloat16, y)
    check("recurrent", state.recurrent, (slots, heads, key_dim, value_dim), torch.float32, y)
    check("inputs", state.inputs, (slots, ring, channels), torch.bfloat16, y)
    check("gates", state.gates, (slots, ring, 2, heads), torch.float32, y)
    row = 2 * key_dim + 2 * value_dim + NUMBERS.value
    check("scratch", state.scratch, (slots, heads, KEPT.value, row), torch.float32, y)
    check("conv", weights.conv, (taps, channels), torch.float32, y)
    for name in ("decay", "bias"):
        check(name, getattr(weights, name), (heads,), torch.float32, y)
    check("norm", weights.norm, (value_dim,), torch.float32, y)
    check_sequences(sequences, y)
    deltanet_kernel[(heads, sequences.count)](
        y, y if gates is None else gates, out, state.recurrent, state.inputs, state.gates, state.scratch,
        weights.conv, weights.decay, weights.bias, weights.norm, sequences.slots, sequences.cached, sequences.lengths,
        sequences.replay, sequences.rows, ring, WIDTH=width,
        AB_WIDTH=width if gates is None else 2 * heads, AB_AT=values if gates is None else 0,
        KEY_HEADS=state.key_heads, HEADS=heads, K=key_dim, V=value_dim, TAPS=taps,
        EPS=weights.eps, L2=L2_EPS, SCALE=key_dim**-0.5, num_warps=warps(value_dim), **register_limit(168),
        **_fusion(y.device), **dependent(y.device, pdl),
    )  # fmt: skip


def check_sequences(sequences: Sequences, like: Tensor) -> None:
    for name in ("slots", "cached", "lengths", "replay"):
        check(f"sequences.{name}", getattr(sequences, name), (sequences.count,), torch.int32, like)


def warps(value_dim: int) -> int:
    """One for each strip of values; 64 registers a thread for the state of 128 keys."""
    return min(8, value_dim // STRIP.value)


def _fusion(device: torch.device) -> dict[str, bool]:
    return {key: value for key, value in arithmetic(device).items() if key == "enable_fp_fusion"}
