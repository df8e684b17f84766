"""What lies between the products of a prompt, in Triton's interpreter: against torch, the same bits in any company."""

import pytest
import torch

from tests.backends.gpu.kernels.test_prefill_products import error, in_operand_order

pytest.importorskip("triton")

H, EPS = 96, 1e-6  # not a power of two


def test_embedding_and_norm(interpreter) -> None:
    interpreter(check_norm)


@pytest.mark.parametrize(("renormalize", "shared"), [(True, True), (False, False)])
def test_experts_are_chosen_by_probability(interpreter, renormalize: bool, shared: bool) -> None:
    interpreter(check_choice, renormalize, shared)


def test_experts_are_added_by_rank(interpreter) -> None:
    interpreter(check_combine)


def check_norm() -> None:
    from stoker.backends.gpu.kernels.prefill_rows import embed, norm

    table, scale = torch.randn(7, H).bfloat16(), torch.rand(H) + 0.5
    ids = torch.randint(0, 7, (40,), dtype=torch.int32)
    x, normed, ordered = (torch.full((40, H), torch.nan).bfloat16() for _ in range(3))
    embed(ids, table, x, scale, normed, EPS)
    assert torch.equal(x, table[ids.long()])
    wide = x.double()
    wanted = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * scale
    assert error(normed, wanted) < 2.0**-7
    again = torch.empty_like(normed)
    norm(x, scale, again, EPS, ordered)
    assert torch.equal(again, normed)
    assert torch.equal(ordered, in_operand_order(normed))
    alone = torch.empty(1, H).bfloat16()
    norm(x[33:34].contiguous(), scale, alone, EPS)
    assert torch.equal(alone[0], normed[33])


def check_choice(renormalize: bool, shared: bool) -> None:
    from stoker.backends.gpu.kernels.prefill_rows import Choice, choose
    from stoker.backends.network.experts import route

    logits = torch.randn(40, 11 + shared)
    choice = Choice(torch.full((40, 3), -1, dtype=torch.int32), torch.zeros(40, 3), torch.zeros(40))
    total = torch.tensor([40], dtype=torch.int32)
    choose(logits, choice, renormalize, shared, total)
    experts, weights = route(logits[:, :11], 3, renormalize)
    assert torch.equal(choice.experts.long(), experts)
    torch.testing.assert_close(choice.weights, weights)
    if shared:
        torch.testing.assert_close(choice.shared, logits[:, 11].sigmoid())
    logits[0] = 1.0
    choose(logits, choice, renormalize, shared, total - 7)
    assert choice.experts[0].tolist() == [0, 1, 2], "the lowest of equal ones"
    assert torch.equal(choice.experts[1:33].long(), experts[1:33])
    assert bool((choice.experts[33:] == -1).all()), "rows that are not in use choose nothing"
    with pytest.raises(ValueError, match="top_k must be 1 to 2, found 3"):
        choose(torch.randn(40, 2), choice, renormalize, False, total)


def check_combine() -> None:
    from stoker.backends.gpu.kernels.prefill_rows import Choice, combine

    tokens, top_k = 40, 3
    outputs, shared, x = (torch.randn(rows, H).bfloat16() for rows in (tokens * top_k, tokens, tokens))
    weights, gate, scale = torch.rand(tokens, top_k), torch.rand(tokens), torch.rand(H) + 0.5
    choice = Choice(torch.zeros(tokens, top_k, dtype=torch.int32), weights, gate)
    wanted = (outputs.double().view(tokens, top_k, H) * weights[..., None]).sum(1) + x.double()
    wanted += shared.double() * gate[:, None]
    normed = torch.empty_like(x)
    combine(outputs, choice, shared, x, scale, normed, EPS)
    assert error(x, wanted) < 2.0**-7
    assert error(normed, wanted * (wanted.square().mean(-1, keepdim=True) + EPS).rsqrt() * scale) < 2.0**-6
