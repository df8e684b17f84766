"""Every reference operation gives a row the same bits whatever rides along: `torch.equal`, not closeness."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stoker.backends.family import Family
from stoker.backends.network.attention import attention, rope_table, rotate
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.elementwise import sigmoid, silu, softplus, swiglu
from stoker.backends.network.experts import route, routed_experts
from stoker.backends.network.linear import linear
from stoker.backends.network.norm import gated_rms_norm, l2_norm, scaled_rms_norm, twice

ROWS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 100, 127, 128)
DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = (32, 100, 768, 3073)


def assert_rows_independent(op: Callable[[Tensor], Tensor | tuple[Tensor, ...]], x: Tensor) -> None:
    """op on any slice of 128 rows gives the rows of op on all of them."""
    whole = _parts(op(x))
    for rows in ROWS:
        for begin in {0, 1, 7, 128 - rows}:
            if begin + rows > 128:
                continue
            for part, all_rows in zip(_parts(op(x[begin : begin + rows].clone())), whole, strict=True):
                assert torch.equal(part, all_rows[begin : begin + rows]), f"{rows} rows from {begin}"


def _parts(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", [sigmoid, silu, softplus, l2_norm, lambda x: swiglu(x, x)])
def test_elementwise(op: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> None:
    assert_rows_independent(op, (4 * torch.randn(128, width)).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width: int, dtype: torch.dtype) -> None:
    weight = torch.randn(width)
    assert_rows_independent(lambda x: scaled_rms_norm(x, twice(1.0 + weight), 1e-6), torch.randn(128, width).to(dtype))
    gate = torch.randn(3, width).to(dtype)
    assert_rows_independent(
        lambda x: gated_rms_norm(x, gate.expand(len(x), -1, -1), weight, 1e-6), torch.randn(128, 3, width).to(dtype)
    )


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "outer"), [(32, 1), (100, 97), (768, 256), (3073, 40), (128, 1024)])
def test_linear(inner: int, outer: int, dtype: torch.dtype, family: Family) -> None:
    weight = torch.randn(outer, inner).to(dtype)
    assert_rows_independent(lambda x: linear(x, weight, family), torch.randn(128, inner).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate(dtype: torch.dtype) -> None:
    positions = torch.arange(1000, 1128)
    cos, sin = rope_table(positions, 1e7, 24)
    x = torch.randn(128, 3, 40).to(dtype)
    whole = rotate(x, cos, sin)
    for rows in ROWS:
        cos, sin = rope_table(positions[:rows], 1e7, 24)
        assert torch.equal(rotate(x[:rows], cos, sin), whole[:rows])


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype: torch.dtype, family: Family) -> None:
    gate = torch.randn(16, 96).to(dtype)
    gate_up, down = (torch.randn(16, 88, 96) / 10).to(dtype), (torch.randn(16, 96, 44) / 7).to(dtype)

    def mixture(x: Tensor) -> tuple[Tensor, ...]:
        chosen, weights = route(linear(x.float(), gate.float(), family), 3, True)
        return chosen, weights, routed_experts(x, chosen, weights, gate_up, down, family)

    assert_rows_independent(mixture, torch.randn(128, 96).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (8, 1, 64), (3, 3, 40), (32, 2, 256)])
def test_step_attention_over_block_length_neighbours_and_cached_length(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    """Token p of a sequence sees the same bits alone, in a block, and beside longer and shorter sequences."""
    keys, values = (torch.randn(24, 64, kv_heads, dim).to(dtype) for _ in range(2))
    q = torch.randn(700, heads, dim).to(dtype)  # query of every position of one sequence
    table = [5, 1, 17, 9, 3, 20, 11, 2, 8, 14, 6]

    def rows(blocks: list[tuple[int, int]]) -> Tensor:
        """Blocks of (position, length) as sequences of one step that share the table; queries by position."""
        batch = Batch.of(Family.STEP, [Run([0] * n, p, 0, table) for p, n in blocks], 64)
        return attention(q[batch.positions], keys, values, batch.causal_tiles)

    for position in (0, 1, 63, 64, 255, 256, 300, 511, 512, 640):
        alone = rows([(position, 1)])
        assert torch.equal(rows([(position, 13)])[:1], alone)
        assert torch.equal(rows([(position, 40)])[:1], alone)
        assert torch.equal(rows([(690, 5), (position, 3), (0, 2)])[5:6], alone)
        assert torch.equal(rows([(position, 1)] * 128)[77:78], alone)
        if position:
            assert torch.equal(rows([(position - 1, 2)])[1:], alone)
