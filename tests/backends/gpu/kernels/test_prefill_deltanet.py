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


def test_several_prompts_at_once_leave_what_each_leaves_alone(interpreter) -> None:
    interpreter(check_company)


def test_snapshots_at_the_ends_of_chunks_are_what_a_prompt_cut_there_leaves(interpreter) -> None:
    interpreter(check_snapshots)


def test_keys_that_repeat_are_solved_for(interpreter) -> None:
    interpreter(check_repetition)


def test_kernel_names_what_is_wrong(interpreter) -> None:
    interpreter(check_messages)


def ring() -> Any:
    from stoker.backends.gpu.kernels.deltanet import DeltaRing

    return DeltaRing.allocate(3, 2, KEY_HEADS, HEADS, K, V, TAPS, "cpu")


def places(*found: Any, rows: int | None = None) -> Any:
    """Of sequences that are (slot, cached, count) or (slot, cached, count, keeps); `rows`: as for a recording."""
    from stoker.backends.gpu.kernels.places import Place, PlacesUpload

    sequences = [Place(*each) for each in found]
    upload = PlacesUpload(3, 256, "cpu")
    sent = upload.send(sequences, range(len(sequences)))
    return sent if rows is None else upload.bounded(rows, 3)


def run(y: Tensor, weights: Any, state: Any, cuts: list[int], slot: int = 1) -> Tensor:
    """Outputs of a prompt that comes in chunks of so many tokens."""
    found, at = [], 0
    for count in cuts:
        found.append(forward(y[at : at + count].contiguous(), weights, state, places((slot, at, count))))
        at += count
    return torch.cat(found)


def forward(y: Tensor, weights: Any, state: Any, where: Any, kept: Any = None) -> Tensor:
    from stoker.backends.gpu.kernels.prefill_deltanet import Prepared, prefill_deltanet

    out = torch.full((len(y), HEADS * V), torch.nan).bfloat16()
    prepared = Prepared.allocate(len(y), len(where.kept), KEY_HEADS, HEADS, K, V, "cpu")
    prefill_deltanet(y, out, state, weights, prepared, where, kept=kept)
    return out


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


def check_company() -> None:
    """A prompt that goes on and one that begins; rows behind those in use are left alone, as a recording needs it."""
    weights, y, other = random_weights(), torch.randn(100, WIDTH), torch.randn(30, WIDTH)
    alone, together = ring(), ring()
    first, second = run(y, weights, alone, [64, 36]), run(other, weights, alone, [30], slot=2)
    together.recurrent[2].normal_()  # what another request left there
    run(y[:64].contiguous(), weights, together, [64])
    rows = torch.cat([y[64:], other, torch.randn(20, WIDTH)])
    found = forward(rows, weights, together, places((1, 64, 36), (2, 0, 30), rows=86))
    assert torch.equal(found[:36], first[64:])
    assert torch.equal(found[36:66], second)
    assert bool(found[66:].isnan().all())
    assert torch.equal(alone.recurrent[1:], together.recurrent[1:])


def check_snapshots() -> None:
    """After 64 and 128 of 140 tokens; the first 63 came before, so that the conv reaches back to them."""
    from stoker.backends.gpu.kernels.prefill_deltanet import Kept

    weights, y, cut, whole = random_weights(), torch.randn(140, WIDTH), ring(), ring()
    kept = Kept(torch.full((4, TAPS - 1, cut.inputs.shape[2]), torch.nan).bfloat16(), torch.zeros(4, HEADS, K, V))
    run(y[:63].contiguous(), weights, whole, [63])
    forward(y[63:].contiguous(), weights, whole, places((1, 63, 77, [(64, 2), (128, 0)])), kept)
    at = 0
    for count, snapshot in ((63, None), (1, 2), (64, 0)):
        forward(y[at : at + count].contiguous(), weights, cut, places((1, at, count)))
        at += count
        if snapshot is not None:
            assert torch.equal(kept.recurrent[snapshot], cut.recurrent[1])
            last = [place % cut.inputs.shape[1] for place in range(at - TAPS + 1, at)]
            assert torch.equal(kept.inputs[snapshot], cut.inputs[1, last])
    assert bool(kept.inputs[[1, 3]].isnan().all()), "no others are made"


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
    prepared, where = Prepared.allocate(64, 10, KEY_HEADS, HEADS, K, V, "cpu"), places((1, 0, 4))
    few = Prepared.allocate(64, 2, KEY_HEADS, HEADS, K, V, "cpu")
    long = torch.randn(65, WIDTH), torch.empty(65, HEADS * V).bfloat16()
    wrong = [
        ((y.half(), out, ring(), weights, prepared, where), "y must be torch.float32, found torch.float16."),
        ((y, out[:3], ring(), weights, prepared, where), "out must be [4, 32], found [3, 32]."),
        ((y, out, ring(), weights, few, where), "10 chunks may come, room is for 2."),
        ((*long, ring(), weights, prepared, where), "room is for 64 tokens, found 65."),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            prefill_deltanet(*arguments)
