"""GatedDeltaNet between its projections: convolution, delta rule and state, with rollback that copies no state.

A step does not touch the committed state. It reads it, runs its tokens, and keeps what each token would have fed in
(`pending`). The next call first commits the tokens that were accepted since, by the same arithmetic, and writes the
state once. Prefill commits at once: prompt tokens are never taken back.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.ops.conv import causal_conv
from stoker.ops.delta_rule import delta_rule_chunks, delta_rule_steps
from stoker.ops.dispatch import operation


@dataclass(frozen=True)
class DeltaState:
    """State of one layer for every slot, and what up to R tokens of the last step fed in."""

    conv: Tensor  # [slots, W - 1, C] last committed conv inputs
    recurrent: Tensor  # [slots, HV, K, V] fp32
    pending_inputs: Tensor  # [slots, R, C] conv inputs
    pending_k: Tensor  # [slots, R, HK, K] after conv, before normalisation
    pending_v: Tensor  # [slots, R, HV, V] after conv
    pending_g: Tensor  # [slots, R, HV] fp32
    pending_beta: Tensor  # [slots, R, HV] fp32

    @property
    def window(self) -> int:
        """Tokens of one sequence that a step may hold."""
        return self.pending_inputs.shape[1]


@operation
def commit(state: DeltaState, slots: Tensor, counts: Tensor) -> None:
    """Moves the first counts [B] pending tokens of each slot [B] into its state."""
    longest = int(counts.max())
    if longest == 0:
        return
    width = state.conv.shape[1]
    inputs = torch.cat([state.conv[slots], state.pending_inputs[slots]], dim=1)  # [B, W - 1 + R, C]
    kept = counts[:, None] + torch.arange(width, device=slots.device)
    state.conv[slots] = inputs.gather(1, kept[:, :, None].expand(-1, -1, inputs.shape[2]))
    place = torch.arange(longest, device=slots.device)
    tokens = len(slots) * longest
    rows = torch.where(place < counts[:, None], torch.arange(tokens, device=slots.device).view(-1, longest), tokens)
    k, v, g, beta = (
        pending[slots, :longest].flatten(0, 1)
        for pending in (state.pending_k, state.pending_v, state.pending_g, state.pending_beta)
    )
    _, state.recurrent[slots] = delta_rule_steps(k, k, v, g, beta, state.recurrent[slots], rows)


@operation
def deltanet_steps(
    qkv: Tensor, g: Tensor, beta: Tensor, weight: Tensor, state: DeltaState, slots: Tensor, taps: Tensor, rows: Tensor
) -> Tensor:
    """qkv [T, C] before the conv, g and beta [T, HV] -> [T, HV, V] fp32; the tokens stay pending.

    `taps` as in causal_conv, `rows` [B, L] as in delta_rule_steps.
    """
    q, k, v = _split(causal_conv(qkv, weight, state.conv[slots], taps), state)
    out, _ = delta_rule_steps(q, k, v, g, beta, state.recurrent[slots], rows)
    sequence, place = (rows < len(qkv)).nonzero(as_tuple=True)
    token = rows[sequence, place]
    for pending, values in (
        (state.pending_inputs, qkv),
        (state.pending_k, k),
        (state.pending_v, v),
        (state.pending_g, g),
        (state.pending_beta, beta),
    ):
        pending[slots[sequence], place] = values[token].to(pending.dtype)
    return out


@operation
def deltanet_chunks(
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    weight: Tensor,
    state: DeltaState,
    slots: Tensor,
    taps: Tensor,
    tail: Tensor,
    rows: Tensor,
) -> Tensor:
    """As deltanet_steps, in chunks (`rows` [B, C, 64]) and committed at once; `tail` [B, W - 1] are the conv inputs
    to carry on, as rows of cat(carried, qkv)."""
    carried = state.conv[slots]
    q, k, v = _split(causal_conv(qkv, weight, carried, taps), state)
    out, state.recurrent[slots] = delta_rule_chunks(q, k, v, g, beta, state.recurrent[slots], rows)
    state.conv[slots] = torch.cat([carried.to(qkv.dtype).flatten(0, 1), qkv])[tail].to(state.conv.dtype)
    return out


def _split(qkv: Tensor, state: DeltaState) -> tuple[Tensor, Tensor, Tensor]:
    """[T, C] -> q and k [T, HK, K], v [T, HV, V]."""
    key_heads, key_dim = state.pending_k.shape[2:]
    value_heads, value_dim = state.pending_v.shape[2:]
    q, k, v = qkv.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], dim=-1)
    return (
        q.unflatten(1, (key_heads, key_dim)),
        k.unflatten(1, (key_heads, key_dim)),
        v.unflatten(1, (value_heads, value_dim)),
    )
