# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment,var-annotated"
"""From unfinished sums over leaves or splits of keys to attention's result: by the last program of a head where they
are few, else by a launch of its own."""

import triton
import triton.language as tl

from stoker.backends.gpu.kernels.products import wait_for_inputs


@triton.jit
def folded(top, total, out, next_top, next_total, next_out):
    """Two leaves of keys, or what was folded before and a leaf: highest score, sum of weights, weighted values."""
    after = tl.maximum(top, next_top)
    fade = tl.exp2(top - after)
    gain = tl.exp2(next_top - after)
    out = tl.fma(next_out, tl.broadcast_to(gain[:, None], next_out.shape), out * fade[:, None])
    return after, tl.fma(next_total, gain, total * fade), out


@triton.jit
def _added(top, total, out, next_top, next_total, next_out):
    """The same of three tensors of one shape."""
    after = tl.maximum(top, next_top)
    fade = tl.exp2(top - after)
    gain = tl.exp2(next_top - after)
    return after, tl.fma(next_total, gain, total * fade), tl.fma(next_out, gain, out * fade)


@triton.jit
def fold(sums_ptr, highest_ptr, totals_ptr, at, c, ok, from_slot, count, lowest, stop, D: tl.constexpr,
          FOLD: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """Columns c of `count` slots behind slot from_slot [n] of rows `at` [n], those from lowest to stop - 1: FOLD slots
    are folded to a split, then split by split."""
    top = tl.full((at.shape[0],), -1e30, tl.float32)
    total = tl.zeros((at.shape[0],), tl.float32)
    out = tl.zeros((at.shape[0], c.shape[0]), tl.float32)
    for start in range(0, count, AHEAD):
        parts = ()
        for ahead in tl.static_range(AHEAD):
            s = from_slot + start + ahead
            there = ok & (s >= lowest) & (s < stop)
            cells = (at + s).to(tl.int64)[:, None] * D + c[None, :]
            parts += ((
                tl.load(highest_ptr + at + s, mask=there, other=-1e30, cache_modifier=".cg"),
                tl.load(totals_ptr + at + s, mask=there, other=0.0, cache_modifier=".cg"),
                tl.load(sums_ptr + cells, mask=there[:, None], other=0.0, cache_modifier=".cg"),
            ),)  # fmt: skip
        for split in tl.static_range(AHEAD // FOLD):
            split_top, split_total, split_out = parts[split * FOLD]
            for leaf in tl.static_range(1, FOLD):
                leaf_top, leaf_total, leaf_out = parts[split * FOLD + leaf]
                split_top, split_total, split_out = folded(
                    split_top, split_total, split_out, leaf_top, leaf_total, leaf_out
                )  # fmt: skip
            top, total, out = folded(top, total, out, split_top, split_total, split_out)
    return top, total, out


@triton.jit
def gate_of(y_ptr, row, head, c, ok, WIDTH: tl.constexpr, D: tl.constexpr, Q_WIDTH: tl.constexpr):
    """What columns c of heads `head` [n] of rows `row` [n] are multiplied with."""
    if Q_WIDTH > D:
        at = (row * WIDTH + head * Q_WIDTH + D)[:, None] + c[None, :]
        gate = 1.0 / (1.0 + tl.exp(-tl.load(y_ptr + at, mask=ok[:, None], other=0.0)))
    else:
        gate = 1.0
    return gate


@triton.jit
def keys_seen(cached, token, length, WHOLE: tl.constexpr, WINDOW: tl.constexpr):
    """First key that a token sees, and the one after the last."""
    stop = cached + (length if WHOLE else token + 1)
    return tl.maximum(cached + token + 1 - WINDOW, 0) if WINDOW else stop * 0, stop


@triton.jit(do_not_specialize=["block_rows", "slots"])
def join_kernel(
    y_ptr, sums_ptr, highest_ptr, totals_ptr, out_ptr, cached_ptr, lengths_ptr, block_rows, slots,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, Q_WIDTH: tl.constexpr,
    KEYS: tl.constexpr, FOLD: tl.constexpr, WHOLE: tl.constexpr, WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (r * heads + h, c): the c-th COLUMNS columns of one head of one row; KEYS of a slot. RUNS runs of RUN
    splits each are folded side by side, then joined as a tree: one order, since runs are counted from position 0."""
    SLOTS: tl.constexpr = RUN * FOLD
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    sequence = row // block_rows
    token = row % block_rows
    length = tl.load(lengths_ptr + sequence)
    cached = tl.load(cached_ptr + sequence)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    one = tl.arange(0, 1)
    gate = gate_of(y_ptr, row + one, head + one, c, one == 0, WIDTH, D, Q_WIDTH)  # of the launch before the last
    wait_for_inputs(PDL)
    if token < length:
        low, stop = keys_seen(cached, token, length, WHOLE, WINDOW)
        lowest = low // KEYS
        last = (stop + KEYS - 1) // KEYS
        run = tl.arange(0, RUNS)
        at = run * 0 + (row * HEADS + head) * slots
        top = tl.full((1, COLUMNS), -1e30, tl.float32)
        total = tl.zeros((1, COLUMNS), tl.float32)
        out = tl.zeros((1, COLUMNS), tl.float32)
        for start in range(lowest // (RUNS * SLOTS) * (RUNS * SLOTS), last, RUNS * SLOTS):
            run_top, run_total, run_out = fold(
                sums_ptr, highest_ptr, totals_ptr, at, c, run >= 0, start + run * SLOTS, SLOTS, lowest, last, D, FOLD,
                AHEAD,
            )  # fmt: skip
            tops = tl.broadcast_to(run_top[:, None], run_out.shape)
            totals = tl.broadcast_to(run_total[:, None], run_out.shape)
            all_top, all_total, all_out = tl.reduce((tops, totals, run_out), 0, _added)
            top, total, out = _added(top, total, out, all_top[None, :], all_total[None, :], all_out[None, :])
        to = out_ptr + (row * HEADS + head) * D + c[None, :]
        tl.store(to, (out / total * gate).to(out_ptr.dtype.element_ty))
