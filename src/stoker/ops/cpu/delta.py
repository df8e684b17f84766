# Numba types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""GatedDeltaNet between its projections as one compiled kernel, token by token.

A step begins with what the last one left pending: each accepted token's key k, change d and decay a go into the state,
S <- a S + k d^T, which is then written, once. The step's own tokens go on from there on a copy. Since d was computed
from the very state it is now added to, nothing is computed twice, and a token's bits depend on the tokens before it
alone.
"""

import math
from types import NotImplementedType

import numpy as np
import torch
from torch import Tensor

from stoker.ops.cpu.compiled import bf16s, compiled, dot, exp, floats, longs, narrow, sigmoid, silu, widen
from stoker.ops.deltanet import DeltaConstants, DeltaState, Replay, SerialPlan
from stoker.ops.norm import L2_EPS

L2 = np.float32(L2_EPS)


@compiled
def _absorb(state, decay, k, d):
    """state <- decay * state + k d^T."""
    for i in range(state.shape[0]):
        ki = k[i]
        for j in range(state.shape[1]):
            state[i, j] = decay * state[i, j] + ki * d[j]


@compiled
def _absorb_and_recall(state, decay, last_k, last_d, q, k, of_k, of_q):
    """The same, then of_k = state^T k and of_q = state^T q, in one pass."""
    for j in range(state.shape[1]):
        of_k[j] = np.float32(0)
        of_q[j] = np.float32(0)
    for i in range(0, state.shape[0], 4):
        a0, a1, a2, a3 = last_k[i], last_k[i + 1], last_k[i + 2], last_k[i + 3]
        k0, k1, k2, k3 = k[i], k[i + 1], k[i + 2], k[i + 3]
        q0, q1, q2, q3 = q[i], q[i + 1], q[i + 2], q[i + 3]
        for j in range(state.shape[1]):
            s0 = decay * state[i, j] + a0 * last_d[j]
            s1 = decay * state[i + 1, j] + a1 * last_d[j]
            s2 = decay * state[i + 2, j] + a2 * last_d[j]
            s3 = decay * state[i + 3, j] + a3 * last_d[j]
            state[i, j], state[i + 1, j], state[i + 2, j], state[i + 3, j] = s0, s1, s2, s3
            of_k[j] += (k0 * s0 + k1 * s1) + (k2 * s2 + k3 * s3)
            of_q[j] += (q0 * s0 + q1 * s1) + (q2 * s2 + q3 * s3)


@compiled
def _change(decay, beta, same, root, v, of_k, of_q, d, result):
    """d = beta (v - decay S^T k), and the output q S / sqrt(K) of the state with it, where `same` is q.k."""
    for j in range(d.shape[0]):
        d[j] = (v[j] - decay * of_k[j]) * beta
        result[j] = (decay * of_q[j] + same * d[j]) * root


@compiled
def _normalise(row):
    """row / sqrt(sum(row^2) + 1e-6), in place."""
    factor = np.float32(1) / np.float32(math.sqrt(dot(row, row) + L2))
    for i in range(row.shape[0]):
        row[i] *= factor


@compiled
def _replay(recurrent, pending, rows, value_heads, key_heads, keys, values, but):
    """Pending tokens, `but` the last ones, into the state. Of a place: [keys of all key heads, changes and then decays
    of all value heads]."""
    ring = pending.shape[1]
    for r in range(rows.shape[0]):
        target, slot = rows[r, 0], rows[r, 1]
        for h in range(value_heads):
            key = h * key_heads // value_heads * keys
            change = key_heads * keys + h * values
            decay = key_heads * keys + value_heads * values + h
            for position in range(rows[r, 2], rows[r, 3] - but):
                fed = pending[slot, position % ring]
                _absorb(recurrent[target, h], fed[decay], fed[key : key + keys], fed[change : change + values])


@compiled
def _commit(recurrent, pending, rows, slots, all_slots, ring, fed, count, value_heads, key_heads, keys, values):
    _replay(
        floats(recurrent, (slots, value_heads, keys, values)),
        floats(pending, (all_slots, ring, fed)),
        longs(rows, (count, 4)),
        value_heads,
        key_heads,
        keys,
        values,
        0,
    )


@compiled
def _conv(inputs, position, ring, weight, mixed):
    """silu of the causal conv that ends at `position`, oldest input first."""
    taps, channels = weight.shape
    for c in range(channels):
        mixed[c] = np.float32(0)
    for tap in range(taps):
        place = (position - taps + 1 + tap) % ring
        for c in range(channels):
            mixed[c] += widen(inputs[place, c]) * weight[tap, c]
    for c in range(channels):
        mixed[c] = silu(mixed[c])


@compiled
def _gated_norm(x, z, weight, eps, out):
    """out = bf16 of x / rms(x) * weight * silu(z)."""
    size = out.shape[0]
    factor = np.float32(1) / np.float32(math.sqrt(dot(x[:size], x[:size]) / np.float32(size) + eps))
    for i in range(size):
        out[i] = narrow(x[i] * factor * weight[i] * silu(widen(z[i])))


@compiled
def _steps(
    projected, stride, z_stride, z_address, gates_address, gates_stride, decay_address, bias_address, conv_address,
    norm_address, eps, recurrent_address, inputs_address, pending_address, replay_address, runs_address, runs,
    slots, ring, fed_size, taps, value_heads, key_heads, keys, values, tokens, scratch_address, out_address,
):  # fmt: skip
    channels = 2 * key_heads * keys + value_heads * values
    eps = np.float32(eps)
    recurrent = floats(recurrent_address, (slots, value_heads, keys, values))
    inputs = bf16s(inputs_address, (slots, ring, channels))
    pending = floats(pending_address, (slots, ring, fed_size))
    weight = floats(conv_address, (taps, channels))
    norm_weight = floats(norm_address, (values,))
    log_decay = floats(decay_address, (value_heads,))
    bias = floats(bias_address, (value_heads,))
    rows = longs(runs_address, (runs, 3))
    out = bf16s(out_address, (tokens, value_heads, values))
    scratch = floats(scratch_address, (keys * values + tokens * channels + 4 * max(keys, values),))
    copy = scratch[: keys * values].reshape(keys, values)
    mixed = scratch[keys * values : keys * values + tokens * channels].reshape(tokens, channels)
    of_k = scratch[keys * values + tokens * channels :]
    of_q, result, nothing = of_k[values:], of_k[2 * values :], of_k[3 * values :]
    for i in range(max(keys, values)):
        nothing[i] = np.float32(0)
    replays = longs(replay_address, (runs, 4))
    root = np.float32(1) / np.float32(math.sqrt(keys))

    first = 0
    for r in range(runs):
        slot, start, count = rows[r, 0], rows[r, 1], rows[r, 2]
        begin, stop = replays[r, 2], replays[r, 3]
        _replay(recurrent, pending, replays[r : r + 1], value_heads, key_heads, keys, values, 1)
        last = pending[slot, (stop - 1) % ring].copy()  # its place may be needed for a token of this step
        for t in range(first, first + count):
            position = start + t - first
            row = bf16s(projected + 2 * t * stride, (channels,))
            for c in range(channels):
                inputs[slot, position % ring, c] = row[c]
            _conv(inputs[slot], position, ring, weight, mixed[t])
            for h in range(2 * key_heads):
                _normalise(mixed[t, h * keys : (h + 1) * keys])
            fed = pending[slot, position % ring]
            for i in range(key_heads * keys):
                fed[i] = mixed[t, key_heads * keys + i]
        for h in range(value_heads):
            key = h * key_heads // value_heads * keys
            change = key_heads * keys + h * values
            place = key_heads * keys + value_heads * values + h  # of the decay
            state = recurrent[slot, h]
            decay, last_k, last_d = np.float32(1), nothing, nothing
            if stop > begin:
                decay, last_k, last_d = last[place], last[key:], last[change:]
            for t in range(first, first + count):
                fed = pending[slot, (start + t - first) % ring]
                q, k, d = mixed[t, key : key + keys], fed[key : key + keys], fed[change : change + values]
                v = mixed[t, 2 * key_heads * keys + h * values :]
                if t == first + 1:  # what the first token changes may have to be taken back
                    copy[:] = state
                    state = copy
                _absorb_and_recall(state, decay, last_k, last_d, q, k, of_k, of_q)
                gates = floats(gates_address + 4 * t * gates_stride, (2 * value_heads,))
                raw = gates[h] + bias[h]
                soft = raw if raw > np.float32(20) else np.float32(math.log1p(exp(raw)))
                decay, last_k, last_d = exp(soft * log_decay[h]), k, d
                _change(decay, sigmoid(gates[value_heads + h]), dot(q, k), root, v, of_k, of_q, d, result)
                fed[place] = decay
                z = bf16s(z_address + 2 * (t * z_stride + h * values), (values,))
                _gated_norm(result, z, norm_weight, eps, out[t, h])
        first += count


def gated_delta(
    qkv: Tensor, z: Tensor, gates: Tensor, constants: DeltaConstants, state: DeltaState, plan: object
) -> Tensor | NotImplementedType:
    if not isinstance(plan, SerialPlan) or qkv.dtype != torch.bfloat16:
        return NotImplemented
    tokens, channels = qkv.shape
    slots, heads, keys, values = state.recurrent.shape
    ring, fed = state.pending.shape[1:]
    out = z.new_empty(tokens, heads * values)
    scratch = gates.new_empty(keys * values + tokens * channels + 4 * max(keys, values))
    _steps(
        qkv.data_ptr(), qkv.stride(0), z.stride(0), z.data_ptr(), gates.data_ptr(), gates.stride(0),
        constants.decay.data_ptr(), constants.bias.data_ptr(), constants.conv.data_ptr(), constants.norm.data_ptr(),
        constants.eps, state.recurrent.data_ptr(), state.inputs.data_ptr(), state.pending.data_ptr(),
        plan.commits.rows.data_ptr(), plan.runs.data_ptr(), len(plan.runs),
        slots, ring, fed, len(constants.conv), heads, state.key_heads, keys, values, tokens, scratch.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    return out


def commit(state: DeltaState, commits: object) -> NotImplementedType | None:
    if not isinstance(commits, Replay) or not state.recurrent.is_cpu:
        return NotImplemented
    slots, heads, keys, values = state.recurrent.shape
    all_slots, ring, fed = state.pending.shape
    _commit(
        state.recurrent.data_ptr(), state.pending.data_ptr(), commits.rows.data_ptr(), slots, all_slots, ring, fed,
        len(commits.rows), heads, state.key_heads, keys, values,
    )  # fmt: skip
    return None
