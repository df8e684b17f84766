"""Torch's fused attention against the reference, and a row's bits against its neighbours."""

import pytest
import torch
from torch import Tensor

from stoker.backends.family import Family
from stoker.backends.network import attention as module
from stoker.backends.network.attention import attention, fused_attention, tiles_independent
from stoker.backends.network.batch import Batch, Run

TABLE = [5, 1, 17, 9, 3, 20, 11, 2, 8, 14, 6]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (8, 1, 64), (3, 3, 40), (32, 2, 256)])
def test_attention(heads: int, kv_heads: int, dim: int) -> None:
    """Token p of a sequence sees the same bits alone, in a block, and beside longer and shorter sequences."""
    keys, values = (torch.randn(24, 64, kv_heads, dim).bfloat16() for _ in range(2))
    q = torch.randn(700, heads, dim).bfloat16()  # query of every position of one sequence

    def rows(blocks: list[tuple[int, int]]) -> Tensor:
        batch = Batch.of(Family.STEP, [Run([0] * n, p, 0, TABLE) for p, n in blocks], 64)
        out = fused_attention(q[batch.positions], keys, values, batch.causal_tiles)
        want = attention(q[batch.positions].float(), keys.float(), values.float(), batch.causal_tiles)
        assert (out.float() - want).abs().max() <= 0.02 * want.abs().max()
        return out

    for position in (0, 1, 63, 64, 255, 256, 300, 511, 512, 640):
        alone = rows([(position, 1)])
        assert torch.equal(rows([(position, 13)])[:1], alone)
        assert torch.equal(rows([(690, 5), (position, 3), (0, 2)])[5:6], alone)
        assert torch.equal(rows([(position, 1)] * 128)[77:78], alone)
        if position:
            assert torch.equal(rows([(position - 1, 2)])[1:], alone)


def test_tiles_that_change_beside_others_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does where its choice of a kernel depends on how many tiles there are for each thread."""
    sound = module._fused_kernel

    def by_count(queries: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        part, logs = sound(queries, *rest)
        return part, logs + 2**-20 * (len(queries) > 3)

    keys, values = (torch.randn(24, 64, 2, 32).bfloat16() for _ in range(2))
    q = torch.randn(48, 4, 32).bfloat16()
    batch = Batch.of(Family.STEP, [Run([0] * 8, 290 + 40 * place, place, TABLE) for place in range(6)], 64)
    want = fused_attention(q, keys, values, batch.causal_tiles)
    monkeypatch.setattr(module, "_fused_kernel", by_count)
    tiles_independent.cache_clear()
    try:
        found = fused_attention(q, keys, values, batch.causal_tiles)
        assert not tiles_independent(2, 16, 32, torch.get_num_threads())
    finally:
        tiles_independent.cache_clear()
    assert torch.equal(found, want)


def test_attention_that_sees_only_a_window() -> None:
    """Keys before the window are not seen, whole splits of them included."""
    keys, values = (torch.randn(24, 64, 2, 32).bfloat16() for _ in range(2))
    batch = Batch.of(Family.STEP, [Run([0] * 5, 600, 0, TABLE), Run([0] * 2, 30, 1, TABLE)], 64)
    q = torch.randn(7, 4, 32).bfloat16()
    tiles = batch.tiles((batch.positions - 40).clamp(min=0), batch.positions)
    out = fused_attention(q, keys, values, tiles)
    want = attention(q.float(), keys.float(), values.float(), tiles)
    assert (out.float() - want).abs().max() <= 0.02 * want.abs().max()
    assert torch.equal(out[5:], rows_alone(q[5:], keys, values))


def rows_alone(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    batch = Batch.of(Family.STEP, [Run([0] * 2, 30, 1, TABLE)], 64)
    return fused_attention(q, keys, values, batch.tiles((batch.positions - 40).clamp(min=0), batch.positions))
