"""Attention of a prompt in Triton's interpreter: against fp64, and the same bits however the prompt is cut."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends.gpu.kernels.test_attention import FP8, HEADS, KV_HEADS, Case, D
from tests.backends.gpu.kernels.test_prefill_deltanet import places

pytest.importorskip("triton")

TOKENS = 150


@pytest.mark.parametrize(("stored", "limit"), [(torch.float32, 2.0**-7), (torch.bfloat16, 2.0**-5), (FP8, 0.1)])
def test_a_prompt_matches_fp64(interpreter, stored: torch.dtype, limit: float) -> None:
    interpreter(check_values, stored, limit)


@pytest.mark.parametrize("stored", [torch.bfloat16, FP8])
def test_a_token_has_the_same_bits_however_the_prompt_is_cut(interpreter, stored: torch.dtype) -> None:
    interpreter(check_cuts, stored)


def test_several_prompts_at_once_leave_what_each_leaves_alone(interpreter) -> None:
    interpreter(check_company)


def test_keys_are_those_a_step_writes(interpreter) -> None:
    interpreter(check_keys)


def test_kernel_names_what_is_wrong(interpreter) -> None:
    interpreter(check_messages)


def run(case: Any, cuts: list[int]) -> Tensor:
    """Outputs of the first sequence's tokens, in chunks of so many; its pages are emptied before."""
    empty(case.pages)
    found, at = [], 0
    for count in cuts:
        found.append(forward(case, case.y[0, at : at + count], case.pages.tables[:1], places((0, at, count))))
        at += count
    return torch.cat(found)


def empty(pages: Any) -> None:
    for tensor in (pages.keys, pages.values, pages.key_scales, pages.value_scales):
        if tensor is not None:
            tensor.zero_()


def forward(case: Any, y: Tensor, tables: Tensor, where: Any) -> Tensor:
    from stoker.backends.gpu.kernels.attention import Pages
    from stoker.backends.gpu.kernels.prefill_attention import prefill_attention

    pages = Pages(case.pages.keys, case.pages.values, tables, case.pages.key_scales, case.pages.value_scales)
    out = torch.full((len(y), HEADS * D), torch.nan).bfloat16()
    queries = torch.empty(
        len(y), HEADS, D, dtype=torch.float32 if pages.keys.dtype is torch.float32 else torch.bfloat16
    )
    prefill_attention(y, out, queries, pages, case.weights, case.heads, where)
    return out


def check_values(stored: torch.dtype, limit: float) -> None:
    case = Case(stored)
    q, k, v, gate = case.parts(0, TOKENS)
    group = HEADS // KV_HEADS
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) * D**-0.5
    scores = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf)
    wanted = torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(group, 1)) * gate.sigmoid()
    found = run(case, [TOKENS]).double().view_as(wanted)
    # the limits of the step's kernel: what keys are stored as, rounded towards zero by the interpreter
    assert float((found - wanted).norm() / wanted.norm()) < limit


def check_cuts(stored: torch.dtype) -> None:
    case = Case(stored)
    whole = run(case, [TOKENS])
    assert torch.equal(whole, run(case, [64, 86]))
    assert torch.equal(whole, run(case, [5, 123, 1, 21])), "anywhere: only position counts"


def check_company() -> None:
    """One goes on behind 20 tokens, one begins; rows behind those in use are left alone."""
    case = Case(torch.bfloat16)
    first = run(case, [20, 30])
    empty(case.pages)
    second = forward(case, case.y[1, :40], case.pages.tables[1:], places((0, 0, 40)))
    run(case, [20])
    rows = torch.cat([case.y[0, 20:50], case.y[1, :40], case.y[1, :10]])
    found = forward(case, rows, case.pages.tables[[0, 1, 0]], places((0, 20, 30), (0, 0, 40), rows=80))
    assert torch.equal(found[:30], first[20:])
    assert torch.equal(found[30:70], second)
    assert bool(found[70:].isnan().all())


def check_keys() -> None:
    """Bit for bit what the step's kernel leaves in the pages, so that either reads what the other wrote."""
    from stoker.backends.gpu.kernels.attention import Partials, attention
    from stoker.backends.gpu.kernels.deltanet import Sequences
    from stoker.backends.gpu.kernels.launch import Workspace

    case = Case(torch.bfloat16)
    run(case, [10])
    written = case.pages.keys.clone(), case.pages.values.clone()
    case.pages.keys.zero_()
    case.pages.values.zero_()
    numbers = torch.tensor([[0, 0], [0, 0], [10, 0], [0, 0]], dtype=torch.int32)
    y = torch.cat([case.y[0, :10], torch.zeros(10, case.heads.width)])
    partials = Partials.allocate(20, case.heads, 1, "cpu")
    out = torch.empty(20, HEADS * D).bfloat16()
    sequences = Sequences(10, *numbers)
    attention(y, out, case.pages, case.weights, case.heads, sequences, partials, Workspace.allocate(1, 64, "cpu"))
    assert torch.equal(case.pages.keys, written[0])
    assert torch.equal(case.pages.values, written[1])


def check_messages() -> None:
    from stoker.backends.gpu.kernels.prefill_attention import prefill_attention

    case = Case(torch.bfloat16)
    y, out, queries = case.y[0, :4], torch.empty(4, HEADS * D).bfloat16(), torch.empty(4, HEADS, D).bfloat16()
    rest = (case.pages, case.weights, case.heads, places((0, 0, 4)))
    three = (*rest[:3], places((0, 0, 1), (0, 0, 1), (0, 0, 2)))
    wrong = [
        ((y, out, queries, *three), "3 sequences need a row of tables each, found 2."),
        ((y, out[:3], queries, *rest), "out must be [4, 64], found [3, 64]."),
        ((y, out, queries.float(), *rest), "q must be torch.bfloat16, found torch.float32."),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            prefill_attention(*arguments)
