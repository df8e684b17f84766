"""GatedDeltaNet: causal conv, gated delta rule and gated norm, with rollback that copies no state.

A step does not touch the committed state; it keeps what each token feeds in (`pending`, a ring by position). It
computes the 16-token chunk it stands in, anchored at an absolute multiple of 16, from the state before that chunk.
Once all tokens of a chunk are accepted, the next call commits it by the same arithmetic. So a block of drafts costs
little more than a token.

The state is written once, a token has the same bits alone and in a block, and a rejected draft leaves no trace. Prefill
commits at once: prompt tokens are never taken back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stoker.backends.family import STEP_CHUNK, Family
from stoker.backends.network.delta_rule import delta_rule_chunk, delta_rule_chunks
from stoker.backends.network.elementwise import sigmoid, silu, softplus, whole_vectors
from stoker.backends.network.linear import Fused, FusedGates, Linear, parameter
from stoker.backends.network.norm import gated_rms_norm, l2_norm
from stoker.weights.model_config import DeltaConfig


@dataclass(frozen=True)
class DeltaState:
    """State of one layer for every slot, and what tokens since then fed in: position p lies at place p % R."""

    recurrent: Tensor  # [slots, HV, K, V] fp32
    inputs: Tensor  # [slots, R, C] conv inputs; a prefill leaves its last W - 1 here
    pending: Tensor  # [slots, R, 2 HK * K + HV * V + 2 HV] fp32: q and k after conv and norm, v after conv, g, beta

    @property
    def key_heads(self) -> int:
        heads, key_dim, value_dim = self.recurrent.shape[1:]
        return (self.pending.shape[2] - heads * value_dim - 2 * heads) // (2 * key_dim)


@dataclass(frozen=True)
class ChunkPass:
    """One 16-place chunk of n sequences."""

    slots: Tensor  # [n]
    ring: Tensor  # [n * 16] where the places lie among all slots' pending tokens
    live: Tensor  # [n, 1, 16] 1.0 where a place holds a token that counts, 0.0 elsewhere
    picked: Tensor | None = None  # [n] which sequences of the pass before these are; None: all of them


@dataclass(frozen=True)
class StepPlan:
    """Where the tokens of a step lie; made once and shared by all layers."""

    commits: Sequence[ChunkPass]  # chunks whose tokens are all accepted, oldest first; each writes the state
    passes: Sequence[ChunkPass]  # chunks that hold the step's own tokens, oldest first
    places: Tensor  # [T] where the step's tokens go in the rings
    taps: Tensor  # [T * W] where the conv inputs of each token lie, oldest first
    outputs: Tensor  # [T] which of the passes' places, one pass after the other, are these tokens


@dataclass(frozen=True)
class PrefillPlan:
    commits: Sequence[ChunkPass]  # pending tokens of earlier steps, part of a chunk included
    slots: Tensor  # [B]
    carried: Tensor  # [B * (W - 1)] where the conv inputs before this batch lie
    taps: Tensor  # [T, W] inputs of each token, as rows of cat(carried, batch)
    tail: Tensor  # [B * (W - 1)] inputs to carry on, as rows of cat(carried, batch)
    tail_places: Tensor  # [B * (W - 1)] and where they go
    rows: Tensor  # [B, C, 64] as in delta_rule_chunks


Plan = StepPlan | PrefillPlan


class DeltaConstants(NamedTuple):
    """What a layer's weights come to, in fp32."""

    decay: Tensor  # [HV] -exp(A)
    bias: Tensor  # [2 HV or more] the bias of a, zeros behind
    conv: Tensor  # [W, C]
    norm: Tensor  # [V]
    eps: float


class GatedNorm(nn.Module):
    """Plain weight, kept in fp32 as published."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=torch.float32)
        self.eps = eps


class DepthwiseConv(nn.Module):
    """Weight [C, 1, kernel], the published shape."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = parameter(channels, 1, kernel)


class GatedDeltaNet(nn.Module):
    def __init__(self, hidden_size: int, delta: DeltaConfig, eps: float) -> None:
        super().__init__()
        self.delta = delta
        values = delta.value_heads * delta.value_dim
        self.in_proj_qkv = Linear(hidden_size, delta.conv_channels)  # rows: q, then k, then v
        self.in_proj_z = Linear(hidden_size, values)
        self.in_proj_b = Linear(hidden_size, delta.value_heads)
        self.in_proj_a = Linear(hidden_size, delta.value_heads)
        self.conv1d = DepthwiseConv(delta.conv_channels, delta.conv_kernel)
        self.A_log = parameter(delta.value_heads, dtype=torch.float32)
        self.dt_bias = parameter(delta.value_heads)
        self.norm = GatedNorm(delta.value_dim, eps)
        self.out_proj = Linear(values, hidden_size)
        self.inputs, self.outputs = Fused(self.in_proj_qkv, self.in_proj_z), Fused(self.out_proj)
        self.gates = FusedGates(self.in_proj_a, self.in_proj_b)
        self._kept: tuple[Tensor, DeltaConstants] | None = None

    def forward(self, x: Tensor, state: DeltaState, plan: Plan, family: Family) -> Tensor:
        qkv, z = self.inputs(x, family)
        gates = self.gates.joined(x, family)  # a, then b: [T, 2 HV or more]
        return self.outputs(gated_delta(qkv, z, gates, self._constants(), state, plan), family)[0]

    def _constants(self) -> DeltaConstants:
        """Made once."""
        if self._kept is None or self._kept[0] is not self.conv1d.weight:
            weight = self.conv1d.weight
            bias = whole_vectors(torch.cat([self.dt_bias.float(), torch.zeros_like(self.A_log)]))
            conv = weight[:, 0].t().float().contiguous()
            self._kept = weight, DeltaConstants(-torch.exp(self.A_log), bias, conv, self.norm.weight, self.norm.eps)
        return self._kept[1]


def gated_delta(
    qkv: Tensor,
    z: Tensor,
    gates: Tensor,
    constants: DeltaConstants,
    state: DeltaState,
    plan: Plan,
) -> Tensor:
    """Everything between the projections: qkv [T, C] before the conv, z [T, HV * V], gates [T, 2 HV or more] in fp32
    (a, then b) -> [T, HV * V] in the dtype of z."""
    heads = len(constants.decay)
    g = softplus(gates + constants.bias).narrow(1, 0, heads) * constants.decay  # log decay
    gates = torch.stack([g, sigmoid(gates).narrow(1, heads, heads)], dim=1)
    commit(state, plan.commits)
    if isinstance(plan, StepPlan):
        out = deltanet_steps(qkv, gates, constants.conv, state, plan)
    else:
        out = deltanet_chunks(qkv, gates, constants.conv, state, plan)
    return gated_rms_norm(out, z.view(out.shape), constants.norm, constants.eps).flatten(1)


def commit(state: DeltaState, commits: Sequence[ChunkPass]) -> None:
    """Moves pending tokens into the state."""
    for chunk in commits:
        states = _states(state, chunk.slots)
        _, after = delta_rule_chunk(*_gather(state, chunk), states.flatten(0, 1), advance=True)
        assert after is not None
        state.recurrent.index_copy_(0, chunk.slots, after.view_as(states))


def deltanet_steps(qkv: Tensor, gates: Tensor, weight: Tensor, state: DeltaState, plan: StepPlan) -> Tensor:
    """qkv [T, C] before the conv, gates [T, 2, HV] (g, beta), weight [W, C] -> [T, HV, V] fp32; tokens stay pending."""
    value_heads, key_dim, value_dim = state.recurrent.shape[1:]
    key_heads, tokens = state.key_heads, qkv.shape[0]
    inputs = state.inputs.flatten(0, 1)
    inputs.index_copy_(0, plan.places, qkv.to(inputs.dtype))
    window = inputs.index_select(0, plan.taps).view(tokens, *weight.shape)
    mixed = silu((window * weight).sum(1))  # weight is fp32, and so is the product
    qk, v = mixed.split_with_sizes((2 * key_heads * key_dim, value_heads * value_dim), dim=1)
    qk = l2_norm(qk.view(tokens, 2, key_heads, key_dim)) * _query_scale(key_dim, qk.device)
    fed = torch.cat([qk.flatten(1), v, gates.flatten(1)], dim=1)
    state.pending.flatten(0, 1).index_copy_(0, plan.places, fed)

    found = []
    states: Tensor | None = None
    for index, chunk in enumerate(plan.passes):
        if states is None:
            states = _states(state, chunk.slots)
        elif chunk.picked is not None:
            states = states.index_select(0, chunk.picked)
        last = index + 1 == len(plan.passes)
        out, after = delta_rule_chunk(*_gather(state, chunk), states.flatten(0, 1), advance=not last)
        found.append(out.view(-1, value_heads, STEP_CHUNK, value_dim).transpose(1, 2).flatten(0, 1))
        states = None if after is None else after.view_as(states)
    return (found[0] if len(found) == 1 else torch.cat(found)).index_select(0, plan.outputs)


def deltanet_chunks(qkv: Tensor, gates: Tensor, weight: Tensor, state: DeltaState, plan: PrefillPlan) -> Tensor:
    """As deltanet_steps, in chunks of 64 and committed at once."""
    key_heads, (value_heads, key_dim, value_dim) = state.key_heads, state.recurrent.shape[1:]
    inputs = state.inputs.flatten(0, 1)
    joined = torch.cat([inputs.index_select(0, plan.carried).to(qkv.dtype), qkv])
    mixed = causal_conv(joined, weight, plan.taps)
    keys = key_heads * key_dim
    q, k, v = mixed.split([keys, keys, value_heads * value_dim], dim=-1)
    out, after = delta_rule_chunks(
        q.unflatten(1, (key_heads, key_dim)),
        k.unflatten(1, (key_heads, key_dim)),
        v.unflatten(1, (value_heads, value_dim)),
        gates[:, 0],
        gates[:, 1],
        state.recurrent[plan.slots],
        plan.rows,
    )
    state.recurrent.index_copy_(0, plan.slots, after)
    inputs.index_copy_(0, plan.tail_places, joined.index_select(0, plan.tail).to(inputs.dtype))
    return out


def causal_conv(inputs: Tensor, weight: Tensor, taps: Tensor) -> Tensor:
    """silu(conv) for each row of `taps` [T, W], which names its inputs among the rows of inputs [N, C], oldest first.

    weight is [W, C] fp32; the last tap multiplies the current token.
    """
    out = inputs[taps[:, 0]].float() * weight[0]
    for tap in range(1, weight.shape[0]):
        out = out + inputs[taps[:, tap]].float() * weight[tap]
    return silu(out).to(inputs.dtype)


def _states(state: DeltaState, slots: Tensor) -> Tensor:
    """[n, HV, K, V]; a single slot is read where it lies."""
    if slots.shape[0] == 1:
        return state.recurrent.narrow(0, int(slots), 1)
    return state.recurrent.index_select(0, slots)


def _gather(state: DeltaState, chunk: ChunkPass) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pending tokens of a chunk as delta_rule_chunk takes them, N = n * HV.

    Places that do not count may hold tokens long gone; with g = beta = 0 they change nothing.
    """
    key_heads, (value_heads, key_dim, value_dim) = state.key_heads, state.recurrent.shape[1:]
    count, spread = chunk.slots.shape[0], value_heads // key_heads
    sizes = (2 * key_heads * key_dim, value_heads * value_dim, 2 * value_heads)
    fed = state.pending.flatten(0, 1).index_select(0, chunk.ring).view(count, STEP_CHUNK, sum(sizes))
    qk, v, gates = fed.split_with_sizes(sizes, dim=2)
    qk = qk.unflatten(2, (2, key_heads, 1, key_dim)).permute(0, 3, 4, 2, 1, 5)  # [n, HK, 1, 2, 16, K]
    qk = qk.expand(-1, -1, spread, -1, -1, -1).reshape(count * value_heads, 2 * STEP_CHUNK, key_dim)
    v = v.unflatten(2, (value_heads, value_dim)).transpose(1, 2).flatten(0, 1)
    gates = gates.transpose(1, 2) * chunk.live  # [n, 2 HV, 16]
    g, beta = gates.unflatten(1, (2, value_heads)).transpose(0, 1).flatten(1, 2)
    return qk, v, g, beta


@lru_cache
def _query_scale(key_dim: int, device: torch.device) -> Tensor:
    """[2, 1, 1]: 1 / sqrt(K) for queries, 1 for keys."""
    with torch.inference_mode(False):
        return torch.tensor([key_dim**-0.5, 1.0], device=device).view(2, 1, 1)
