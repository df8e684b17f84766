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
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from stoker.backends.cpu.kernels.compiled import (
    bf16s,
    compiled,
    dot,
    exp,
    floats,
    fma,
    longs,
    narrow,
    sigmoid,
    silu,
    widen,
)
from stoker.backends.cpu.kernels.team import arguments, call, entry, float_bits, float_of, ticket
from stoker.backends.cpu.ops.deltanet import DeltaConstants, DeltaState, Replay, SerialPlan
from stoker.backends.cpu.ops.norm import L2_EPS

L2 = np.float32(L2_EPS)


@compiled
def _absorb(state, decay, k, d):
    """state <- decay * state + k d^T."""
    for i in range(state.shape[0]):
        ki = k[i]
        for j in range(state.shape[1]):
            state[i, j] = fma(ki, d[j], decay * state[i, j])


def _pass(twice, kept):
    """A compiled pass over a state that adds the changes of one token, or `twice` of one after the other, and then has
    of_k = state^T k and of_q = state^T q. `kept`: whether the state is what it came to, or stays as it was."""

    @compiled
    def absorb_and_recall(state, decays, last_ks, last_ds, q, k, of_k, of_q):
        (before, decay), (before_k, last_k), (before_d, last_d) = decays, last_ks, last_ds
        for j in range(state.shape[1]):
            of_k[j] = np.float32(0)
            of_q[j] = np.float32(0)
        for i in range(0, state.shape[0], 4):
            b0, b1, b2, b3 = before_k[i], before_k[i + 1], before_k[i + 2], before_k[i + 3]
            a0, a1, a2, a3 = last_k[i], last_k[i + 1], last_k[i + 2], last_k[i + 3]
            k0, k1, k2, k3 = k[i], k[i + 1], k[i + 2], k[i + 3]
            q0, q1, q2, q3 = q[i], q[i + 1], q[i + 2], q[i + 3]
            for j in range(state.shape[1]):
                s0, s1, s2, s3 = state[i, j], state[i + 1, j], state[i + 2, j], state[i + 3, j]
                if twice:
                    s0, s1 = fma(b0, before_d[j], before * s0), fma(b1, before_d[j], before * s1)
                    s2, s3 = fma(b2, before_d[j], before * s2), fma(b3, before_d[j], before * s3)
                s0, s1 = fma(a0, last_d[j], decay * s0), fma(a1, last_d[j], decay * s1)
                s2, s3 = fma(a2, last_d[j], decay * s2), fma(a3, last_d[j], decay * s3)
                if kept:
                    state[i, j], state[i + 1, j], state[i + 2, j], state[i + 3, j] = s0, s1, s2, s3
                of_k[j] = fma(k3, s3, fma(k2, s2, fma(k1, s1, fma(k0, s0, of_k[j]))))
                of_q[j] = fma(q3, s3, fma(q2, s2, fma(q1, s1, fma(q0, s0, of_q[j]))))

    return absorb_and_recall


_keep_one, _keep_two, _read_one, _read_two = (_pass(twice, kept) for kept in (True, False) for twice in (False, True))


@compiled
def _copy(source, target):
    for i in range(source.shape[0]):
        for j in range(source.shape[1]):
            target[i, j] = source[i, j]


@compiled
def _change(decay, beta, same, root, v, of_k, of_q, d, result):
    """d = beta (v - decay S^T k), and the output q S / sqrt(K) of the state with it, where `same` is q.k."""
    for j in range(d.shape[0]):
        d[j] = fma(-decay, of_k[j], v[j]) * beta
        result[j] = fma(same, d[j], decay * of_q[j]) * root


@compiled
def _normalise(row):
    """row / sqrt(sum(row^2) + 1e-6), in place."""
    factor = np.float32(1) / np.float32(math.sqrt(dot(row, row) + L2))
    for i in range(row.shape[0]):
        row[i] *= factor


@compiled
def _replay(recurrent, pending, row, head, shape, but):
    """Pending tokens of one run, `but` the last ones, into a head's state. Of a place: [keys of all key heads, changes
    and then decays of all value heads]."""
    value_heads, key_heads, keys, values = shape
    key = head * key_heads // value_heads * keys
    change = key_heads * keys + head * values
    decay = key_heads * keys + value_heads * values + head
    for position in range(row[2], row[3] - but):
        fed = pending[row[1], position % pending.shape[1]]
        _absorb(recurrent[row[0], head], fed[decay], fed[key : key + keys], fed[change : change + values])


@entry
def _commit(data):
    (
        recurrent_in, pending_in, rows_in, slots, all_slots, ring, fed, count, value_heads, key_heads, keys, values,
    ) = to_fixed_tuple(arguments(data, 12), 12)  # fmt: skip
    recurrent = floats(recurrent_in, (slots, value_heads, keys, values))
    pending, rows = floats(pending_in, (all_slots, ring, fed)), longs(rows_in, (count, 4))
    item = ticket(data)
    while item < count * value_heads:
        row, head = rows[item // value_heads], item % value_heads
        _replay(recurrent, pending, row, head, (value_heads, key_heads, keys, values), 0)
        item = ticket(data)


@compiled
def _conv(row, inputs, position, weight, first, mixed):
    """Puts the channels from `first` on of a token into the ring; silu of the causal conv that ends with it, oldest
    input first."""
    ring, taps, channels = inputs.shape[0], weight.shape[0], mixed.shape[0]
    mixed[:] = np.float32(0)
    inputs[position % ring, first : first + channels] = row[first : first + channels]
    for tap in range(taps):
        past, factors = inputs[(position - taps + 1 + tap) % ring, first:], weight[tap, first:]
        for c in range(channels):
            mixed[c] = fma(widen(past[c]), factors[c], mixed[c])
    for c in range(channels):
        mixed[c] = silu(mixed[c])


@compiled
def _gated_norm(x, z, weight, eps, out):
    """out = bf16 of x / rms(x) * weight * silu(z)."""
    size = out.shape[0]
    factor = np.float32(1) / np.float32(math.sqrt(dot(x, x) / np.float32(size) + eps))
    for i in range(size):
        out[i] = narrow(x[i] * factor * weight[i] * silu(widen(z[i])))


@entry
def _steps(data):
    """Every key head of a run, with the value heads it serves, is an item."""
    (
        projected, stride, z_stride, z_in, gates_in, gates_stride, decay_in, bias_in, conv_in, norm_in, eps_bits,
        recurrent_in, inputs_in, pending_in, replays_in, runs_in, runs, slots, ring, fed_size, taps, value_heads,
        key_heads, keys, values, tokens, out_in,
    ) = to_fixed_tuple(arguments(data, 27), 27)  # fmt: skip
    eps, shape, group = float_of(eps_bits), (value_heads, key_heads, keys, values), value_heads // key_heads
    channels = 2 * key_heads * keys + value_heads * values
    recurrent = floats(recurrent_in, (slots, value_heads, keys, values))
    inputs = bf16s(inputs_in, (slots, ring, channels))
    pending = floats(pending_in, (slots, ring, fed_size))
    weight, norm_weight = floats(conv_in, (taps, channels)), floats(norm_in, (values,))
    log_decay, bias = floats(decay_in, (value_heads,)), floats(bias_in, (value_heads,))
    rows, replays = longs(runs_in, (runs, 3)), longs(replays_in, (runs, 4))
    out = bf16s(out_in, (tokens, value_heads, values))
    copy = np.empty((keys, values), np.float32)
    of_k, of_q, result = np.empty(values, np.float32), np.empty(values, np.float32), np.empty(values, np.float32)
    nothing = np.zeros(max(keys, values), np.float32)
    mixed = np.empty((tokens, 2 * keys + group * values), np.float32)
    root = np.float32(1) / np.float32(math.sqrt(keys))

    item = ticket(data)
    while item < runs * key_heads:
        r, key_head = item // key_heads, item % key_heads
        slot, start, count = rows[r, 0], rows[r, 1], rows[r, 2]
        begin, stop = replays[r, 2], replays[r, 3]
        first = 0
        for i in range(r):
            first += rows[i, 2]
        for t in range(count):
            row, position = bf16s(projected + 2 * (first + t) * stride, (channels,)), start + t
            q, k, v = mixed[t, :keys], mixed[t, keys : 2 * keys], mixed[t, 2 * keys :]
            _conv(row, inputs[slot], position, weight, key_head * keys, q)
            _conv(row, inputs[slot], position, weight, (key_heads + key_head) * keys, k)
            _conv(row, inputs[slot], position, weight, 2 * key_heads * keys + key_head * group * values, v)
            _normalise(q)
            _normalise(k)
        for h in range(key_head * group, (key_head + 1) * group):
            key, change = key_head * keys, key_heads * keys + h * values
            place = key_heads * keys + value_heads * values + h  # of the decay
            _replay(recurrent, pending, replays[r], h, shape, 2)
            state, waiting = recurrent[slot, h], min(stop - begin, 2)  # changes that are not in the state yet
            one, two = pending[slot, (stop - 2) % ring], pending[slot, (stop - 1) % ring]
            decays = (one[place], two[place]) if waiting else (np.float32(1), np.float32(1))
            ks = (one[key : key + keys], two[key : key + keys]) if waiting else (nothing, nothing)
            ds = (one[change : change + values], two[change : change + values]) if waiting else (nothing, nothing)
            for t in range(count):
                fed, row = pending[slot, (start + t) % ring], first + t
                q, k, d = mixed[t, :keys], mixed[t, keys : 2 * keys], fed[change : change + values]
                v = mixed[t, 2 * keys + (h - key_head * group) * values :]
                if t > 0 and (waiting < 2 or t == count - 1):  # what a token changes may have to be taken back
                    if waiting < 2:
                        _read_one(state, decays, ks, ds, q, k, of_k, of_q)
                    else:
                        _read_two(state, decays, ks, ds, q, k, of_k, of_q)
                else:
                    if t == 2:
                        _copy(state, copy)
                        state = copy
                    if waiting < 2:
                        _keep_one(state, decays, ks, ds, q, k, of_k, of_q)
                    else:
                        _keep_two(state, decays, ks, ds, q, k, of_k, of_q)
                    waiting = 0
                gates = floats(gates_in + 4 * row * gates_stride, (2 * value_heads,))
                raw = gates[h] + bias[h]
                soft = raw if raw > np.float32(20) else np.float32(math.log1p(exp(raw)))
                decay, waiting = exp(soft * log_decay[h]), waiting + 1
                decays, ks, ds = (decays[1], decay), (ks[1], k), (ds[1], d)
                _change(decay, sigmoid(gates[value_heads + h]), dot(q, k), root, v, of_k, of_q, d, result)
                fed[place] = decay
                z = bf16s(z_in + 2 * (row * z_stride + h * values), (values,))
                _gated_norm(result, z, norm_weight, eps, out[row, h])
        for t in range(count):  # only now: the replay of both heads needed what was there
            pending[slot, (start + t) % ring, key_head * keys : (key_head + 1) * keys] = mixed[t, keys : 2 * keys]
        item = ticket(data)


def gated_delta(
    qkv: Tensor, z: Tensor, gates: Tensor, constants: DeltaConstants, state: DeltaState, plan: object
) -> Tensor | NotImplementedType:
    if not isinstance(plan, SerialPlan) or qkv.dtype != torch.bfloat16:
        return NotImplemented
    tokens = qkv.shape[0]
    slots, heads, keys, values = state.recurrent.shape
    ring, fed = state.pending.shape[1:]
    out = z.new_empty(tokens, heads * values)
    call(
        _steps, qkv.data_ptr(), qkv.stride(0), z.stride(0), z.data_ptr(), gates.data_ptr(), gates.stride(0),
        constants.decay.data_ptr(), constants.bias.data_ptr(), constants.conv.data_ptr(), constants.norm.data_ptr(),
        float_bits(constants.eps), state.recurrent.data_ptr(), state.inputs.data_ptr(), state.pending.data_ptr(),
        plan.commits.rows.data_ptr(), plan.runs.data_ptr(), len(plan.runs), slots, ring, fed, len(constants.conv),
        heads, state.key_heads, keys, values, tokens, out.data_ptr(),
    )  # fmt: skip
    return out


def commit(state: DeltaState, commits: object) -> NotImplementedType | None:
    if not isinstance(commits, Replay) or not state.recurrent.is_cpu:
        return NotImplemented
    slots, heads, keys, values = state.recurrent.shape
    all_slots, ring, fed = state.pending.shape
    call(
        _commit, state.recurrent.data_ptr(), state.pending.data_ptr(), commits.rows.data_ptr(), slots, all_slots, ring,
        fed, len(commits.rows), heads, state.key_heads, keys, values,
    )  # fmt: skip
    return None
