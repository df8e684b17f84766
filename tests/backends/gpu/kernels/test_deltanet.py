"""The DeltaNet step in Triton's interpreter: against fp64, and the same bits in any block with any drafts rejected."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

pytest.importorskip("triton")

KEY_HEADS, HEADS, K, V, TAPS, EPS = 1, 2, 16, 16, 4, 1e-6
KEYS = KEY_HEADS * K
CHANNELS = 2 * KEYS + HEADS * V
WIDTH = CHANNELS + HEADS * V + 2 * HEADS
TOKENS = 6


def test_tokens_one_by_one_match_fp64(interpreter) -> None:
    interpreter(check_values)


def test_blocks_with_rejected_drafts_give_the_same_bits(interpreter) -> None:
    interpreter(check_blocks)


def test_a_long_block_gives_the_same_bits(interpreter) -> None:
    interpreter(check_long_block)


def test_gates_may_come_apart(interpreter) -> None:
    interpreter(check_gates)


def test_kernel_names_what_is_wrong(interpreter) -> None:
    interpreter(check_messages)


def random_weights() -> Any:
    from stoker.backends.gpu.kernels.deltanet import DeltaWeights

    return DeltaWeights(
        conv=torch.randn(TAPS, CHANNELS) * 0.5,
        decay=-torch.exp(torch.randn(HEADS)),
        bias=torch.randn(HEADS),
        norm=torch.rand(V) + 0.5,
        eps=EPS,
    )


def cut(x: Tensor) -> Tensor:
    """To bf16 as the interpreter rounds: towards zero, where a GPU takes the nearest."""
    return (x.float().contiguous().view(torch.int32) & -0x10000).view(torch.float32)


def expected(y: Tensor, weights: Any) -> Tensor:
    """fp64 [T, HV * V] of tokens from position 0 on, one after the other."""
    tokens = y.shape[0]
    x = torch.cat([torch.zeros(TAPS - 1, CHANNELS), cut(y[:, :CHANNELS])]).double()
    mixed = silu(torch.stack([x[tap : tap + tokens] * weights.conv[tap] for tap in range(TAPS)]).sum(0))
    q, k, v = mixed.split([KEYS, KEYS, HEADS * V], dim=1)
    q, k = (
        (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(HEADS // KEY_HEADS, 1)
        for part in (q.view(tokens, KEY_HEADS, K), k.view(tokens, KEY_HEADS, K))
    )
    z, a, b = y[:, CHANNELS:].double().split([HEADS * V, HEADS, HEADS], dim=1)
    g, beta = weights.decay * softplus(a + weights.bias), torch.sigmoid(b)
    state, outputs = torch.zeros(HEADS, K, V, dtype=torch.float64), []
    for t in range(tokens):
        state = state * g[t].exp()[:, None, None]
        change = beta[t][:, None] * (v[t].view(HEADS, V) - (state * k[t][:, :, None]).sum(1))
        state = state + k[t][:, :, None] * change[:, None]
        out = (state * q[t][:, :, None]).sum(1) * K**-0.5
        out = out * (out.square().mean(-1, keepdim=True) + EPS).rsqrt() * weights.norm
        outputs.append((out * silu(z[t]).view(HEADS, V)).flatten())
    return torch.stack(outputs)


def run(y: Tensor, weights: Any, window: int, accepted: list[tuple[int, int]]) -> list[Tensor]:
    """Outputs of the accepted tokens of two sequences. Each step brings `window` tokens of each, accepts so many and
    rejects the rest, which are noise."""
    from stoker.backends.gpu.kernels.deltanet import DeltaRing, Sequences, deltanet

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    state = DeltaRing.allocate(3, window, KEY_HEADS, HEADS, K, V, TAPS, "cpu")
    found: list[list[Tensor]] = [[], []]
    cached, replay = [0, 0], [0, 0]
    for kept in accepted:
        rows = torch.randn(2, window, WIDTH)
        for b in range(2):
            rows[b, : kept[b]] = y[b, cached[b] : cached[b] + kept[b]]
        out = torch.full((2 * window, HEADS * V), torch.nan).bfloat16()
        sequences = Sequences(window, numbers([2, 0]), numbers(cached), numbers([window, window]), numbers(replay))
        deltanet(rows.view(-1, WIDTH), out, state, weights, sequences)
        for b in range(2):
            found[b].append(out.view(2, window, -1)[b, : kept[b]])
            cached[b] += kept[b]
            replay[b] = kept[b]
    return [torch.cat(rows) for rows in found]


def check_values() -> None:
    weights, y = random_weights(), torch.randn(2, TOKENS, WIDTH)
    for found, rows in zip(run(y, weights, 1, [(1, 1)] * TOKENS), y, strict=True):
        wanted = cut(expected(rows, weights)).double()
        # Rounded alike, all that is left is fp32: 1.2e-4 at most over 80 cases, one element rounded the other way. With
        # inputs rounded to the nearest instead it was 3.5e-2: the norm of a small output magnifies what went in.
        assert float((found.double() - wanted).norm() / wanted.norm()) < 2.0**-9


def check_blocks() -> None:
    weights, y = random_weights(), torch.randn(2, TOKENS, WIDTH)
    alone = run(y, weights, 1, [(1, 1)] * 6)
    blocks = run(y, weights, 3, [(3, 1), (1, 2), (2, 3)])
    for found, wanted in zip(blocks, alone, strict=True):
        assert torch.equal(found, wanted)


def check_long_block() -> None:
    weights, y = random_weights(), torch.randn(2, 12, WIDTH)
    blocks = run(y, weights, 10, [(10, 9), (1, 2)])  # more than eight at a time, in replay too
    halves = run(y, weights, 6, [(6, 6), (5, 5)])
    assert torch.equal(blocks[0], halves[0])
    assert torch.equal(blocks[1], halves[1])


def check_gates() -> None:
    from stoker.backends.gpu.kernels.deltanet import DeltaRing, Sequences, deltanet

    weights, y, one = random_weights(), torch.randn(2, WIDTH), torch.ones(1, dtype=torch.int32)
    found = []
    for apart in (False, True):
        state, out = DeltaRing.allocate(2, 2, KEY_HEADS, HEADS, K, V, TAPS, "cpu"), torch.empty(2, HEADS * V).bfloat16()
        rows, gates = y.split([WIDTH - 2 * HEADS, 2 * HEADS], dim=1)
        sequences = Sequences(2, one, 0 * one, 2 * one, 0 * one)
        inputs = (rows.contiguous(), gates.contiguous()) if apart else (y, None)
        deltanet(inputs[0], out, state, weights, sequences, gates=inputs[1])
        found.append(out)
    assert torch.equal(*found)


def check_messages() -> None:
    from stoker.backends.gpu.kernels.deltanet import DeltaRing, Sequences, deltanet

    weights = random_weights()
    one = torch.ones(1, dtype=torch.int32)
    y, out = torch.randn(4, WIDTH), torch.empty(4, HEADS * V).bfloat16()
    short = DeltaRing.allocate(2, 2, KEY_HEADS, HEADS, K, V, TAPS, "cpu")
    state = DeltaRing.allocate(2, 4, KEY_HEADS, HEADS, K, V, TAPS, "cpu")
    narrow = DeltaRing.allocate(2, 4, KEY_HEADS, HEADS, 4, V, TAPS, "cpu")
    wrong = [
        (
            (y, out, narrow, weights, Sequences(4, one, one, one, one)),
            "head dimensions must be powers of two, at least 8 and 16, found 4 and 16.",
        ),
        (
            (y, out, short, weights, Sequences(4, one, one, one, one)),
            "the ring has 8 places: steps of 4 tokens need 16.",
        ),
        ((y.half(), out, state, weights, Sequences(4, one, one, one, one)), "y must be torch.float32, found"),
        ((y, out[:3], state, weights, Sequences(4, one, one, one, one)), "out must be [4, 32], found [3, 32]."),
        (
            (y, out, state, weights, Sequences(4, one, one.long(), one, one)),
            "sequences.cached must be torch.int32, found torch.int64.",
        ),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            deltanet(*arguments)
