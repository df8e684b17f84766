"""Attention in bf16 by torch's fused CPU kernel, one split of 256 keys at a time.

Each split has one shape per tile, so a row's bits do not depend on what is cached behind its own keys; splits are
joined in order by their log-sums, as in the reference. Torch may choose its way by the number of tiles and threads:
where a tile has other bits beside others, each is a call of its own.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from stoker.backends.family import SPLIT
from stoker.backends.network.ops.attention import LOWEST, QueryTiles, read_split

COUNTS = (2, 3, 5, 8, 13, 32)  # of tiles, in the trial


def fused_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tiles: QueryTiles,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """As `attention`, for bf16 queries."""
    tokens, heads, dim = q.shape
    kv_heads = k_pages.shape[2]
    group = heads // kv_heads
    count, width = tiles.rows.shape
    rows = tiles.rows.flatten()
    queries = functional.pad(q, (0, 0, 0, 0, 0, 1)).index_select(0, rows).view(count, width, kv_heads, group, dim)
    queries = queries.transpose(1, 2).reshape(count, kv_heads, width * group, dim)

    top: Tensor | None = None
    for split in tiles.splits:
        live = split.tiles
        mask = split.hidden.expand(-1, -1, -1, group, -1).flatten(2, 3)
        part, logs = _tiles(
            queries if live is None else queries[live],
            read_split(k_pages, split.pages, k_scales).to(q.dtype),
            read_split(v_pages, split.pages, v_scales).to(q.dtype),
            mask,
        )
        if len(tiles.splits) == 1 and live is None:
            out = part
            break
        if top is None:
            top = queries.new_full((count, kv_heads, width * group, 1), LOWEST, dtype=torch.float32)
            total, out = torch.zeros_like(top), torch.zeros_like(queries, dtype=torch.float32)
        chosen = slice(None) if live is None else live
        # the kernel gives a row without visible keys the log-sum 0
        logs = (logs.unflatten(2, (width, group)) + split.unseen).flatten(2, 3)[..., None]
        after = torch.maximum(top[chosen], logs)
        weight, decay = torch.exp(logs - after), torch.exp(top[chosen] - after)
        total[chosen] = total[chosen] * decay + weight
        out[chosen] = out[chosen] * decay + part.float() * weight
        top[chosen] = after
    if top is not None:
        out = (out / total.clamp(min=torch.finfo(torch.float32).tiny)).to(q.dtype)
    out = out.view(count, kv_heads, width, group, dim).transpose(1, 2).reshape(count * width, heads, dim)
    return q.new_empty(tokens + 1, heads, dim).index_copy_(0, rows, out)[:tokens]


def _tiles(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """queries [n, kv_heads, Q, D] over one split -> results and log-sums [n, kv_heads, Q], tile by tile the same."""
    count, kv_heads, rows, dim = queries.shape
    if count == 1 or tiles_independent(kv_heads, rows, dim, torch.get_num_threads()):
        return _fused(queries, keys, values, mask)
    found = [_fused(*(x[i : i + 1] for x in (queries, keys, values, mask))) for i in range(count)]
    return torch.cat([part for part, _ in found]), torch.cat([logs for _, logs in found])


@lru_cache
def tiles_independent(kv_heads: int, rows: int, dim: int, threads: int) -> bool:
    """Whether the first and the last of several tiles have the bits they have alone, with as many threads as now."""
    generator = torch.Generator().manual_seed(0)
    most = max(COUNTS)
    queries, keys, values = (
        torch.randn(most, kv_heads, length, dim, generator=generator).bfloat16() for length in (rows, SPLIT, SPLIT)
    )
    inputs = queries, keys, values, torch.zeros(most, 1, rows, SPLIT)

    def same(count: int, place: int) -> bool:
        alone, beside = _fused(*(x[place : place + 1] for x in inputs)), _fused(*(x[:count] for x in inputs))
        return all(torch.equal(one[0], many[place]) for one, many in zip(alone, beside, strict=True))

    return all(same(count, place) for count in COUNTS for place in (0, count - 1))


def _fused(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, attn_mask=mask
    )
    return found
