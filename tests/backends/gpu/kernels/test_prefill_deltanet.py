"""DeltaNet of a prompt in Triton's interpreter: against fp64, the same bits however it is cut, steps that go on."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends.gpu.kernels.test_deltanet import HEADS, KEY_HEADS, TAPS, WIDTH, K, V, expected, random_weights

pytest.importorskip("triton")


def test_a_prompt_matches_fp64(interpreter) -> None:
    interpreter(check_values)


def test_a_prompt_cut_at_multiples_of_64_leaves_the_same_bits(interpreter) -> None:
    interpreter(check_cuts)


def test_steps_go_on_where_a_prompt_ends(interpreter) -> None:
    interpreter(check_steps)


def test_keys_that_repeat_are_solved_for(interpreter) -> None:
    interpreter(check_repetition)


def test_kernel_names_what_is_wrong(interpreter) -> None:
    interpreter(check_messages)


def ring() -> Any:
    from stoker.backends.gpu.kernels.deltanet import DeltaRing

    return DeltaRing.allocate(3, 2, KEY_HEADS, HEADS, K, V, TAPS, "cpu")


def run(y: Tensor, weights: Any, state: Any, cuts: list[int], slot: int = 1) -> Tensor:
    """Outputs of a prompt that comes in chunks of so many tokens."""
    from stoker.backends.gpu.kernels.prefill_deltanet import Prepared, prefill_deltanet

    found, at = [], 0
    for count in cuts:
        out = torch.full((count, HEADS * V), torch.nan).bfloat16()
        prepared = Prepared.allocate(count, KEY_HEADS, HEADS, K, V, "cpu")
        prefill_deltanet(y[at : at + count].contiguous(), out, state, weights, prepared, slot, at)
        found.append(out)
        at += count
    return torch.cat(found)


def check_values() -> None:
    weights, y = random_weights(), torch.randn(150, WIDTH)
    state, wanted = ring(), expected(y, weights)
    found = run(y, weights, state, [150])
    # queries, keys, values, prepared operands and the result are rounded to bf16, the conv's inputs as in a step; a
    # token left out or a decay misplaced is ten times as far off
    assert float((found.double() - wanted).norm() / wanted.norm()) < 2.0**-6
    # cut where no chunk begins, values still hold; bits need not
    apart = run(y, weights, ring(), [30, 100, 20])
    assert float((apart.double() - wanted).norm() / wanted.norm()) < 2.0**-6


def check_cuts() -> None:
    weights, y = random_weights(), torch.randn(140, WIDTH)
    whole, parts = ring(), ring()
    assert torch.equal(run(y, weights, whole, [140]), run(y, weights, parts, [64, 64, 12]))
    assert torch.equal(whole.recurrent, parts.recurrent)
    last = [place % whole.inputs.shape[1] for place in range(140 - TAPS + 1, 140)]
    assert torch.equal(whole.inputs[:, last], parts.inputs[:, last])
    assert float(whole.recurrent[[0, 2]].abs().max()) == 0.0, "other slots are left alone"


def check_steps() -> None:
    """67 tokens at once, then two steps of two; the second replays the first."""
    from stoker.backends.gpu.kernels.deltanet import Sequences, deltanet

    weights, y, state = random_weights(), torch.randn(71, WIDTH), ring()
    wanted = expected(y, weights)
    run(y, weights, state, [67])
    for at, replay in ((67, 0), (69, 2)):
        numbers = torch.tensor([1, at, 2, replay], dtype=torch.int32)
        out = torch.empty(2, HEADS * V).bfloat16()
        deltanet(y[at : at + 2].contiguous(), out, state, weights, Sequences(2, *numbers.split(1)))
        assert float((out.double() - wanted[at : at + 2]).norm() / wanted[at : at + 2].norm()) < 2.0**-6


def check_repetition() -> None:
    """The hardest system: all keys the same, next to nothing forgotten, beta 1. Powers of it grow beyond fp32."""
    weights, y = random_weights(), torch.randn(64, WIDTH)
    y[:, : 2 * KEY_HEADS * K] = y[0, : 2 * KEY_HEADS * K]
    y[:, -2 * HEADS : -HEADS], y[:, -HEADS:] = -20.0, 20.0
    wanted = expected(y, weights)
    # what a head yields is now the newest value alone: everything before it must cancel
    assert float((run(y, weights, ring(), [64]).double() - wanted).norm() / wanted.norm()) < 2.0**-6


def check_messages() -> None:
    from stoker.backends.gpu.kernels.prefill_deltanet import Prepared, prefill_deltanet

    weights, y, out = random_weights(), torch.randn(4, WIDTH), torch.empty(4, HEADS * V).bfloat16()
    prepared = Prepared.allocate(64, KEY_HEADS, HEADS, K, V, "cpu")
    long = torch.randn(200, WIDTH), torch.empty(200, HEADS * V).bfloat16()
    wrong = [
        ((y, out, ring(), weights, prepared, 3, 0), "slot must be 0 to 2, found 3."),
        ((y.half(), out, ring(), weights, prepared, 1, 0), "y must be torch.float32, found torch.float16."),
        ((y, out[:3], ring(), weights, prepared, 1, 0), "out must be [4, 32], found [3, 32]."),
        ((*long, ring(), weights, prepared, 1, 0), "200 tokens from 0 on are 4 chunks, room is for 2."),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            prefill_deltanet(*arguments)
