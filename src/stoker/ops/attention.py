"""Attention over paged keys and values, for query tiles that each belong to one sequence.

Keys are visited in splits of a fixed size from position 0 on, and masked keys add exact zeros, so neither the
length of a neighbour nor the number of pages changes a bit of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.ops.dispatch import operation

SPLIT = 256  # keys per partial softmax; a multiple of every page size


@dataclass(frozen=True)
class QueryTiles:
    """Which rows attend to which keys. N tiles of Q rows; a padding row holds an empty range of keys.

    A STEP tile holds one token; a PREFILL tile the tokens of one 64-token chunk, each at its place in it.
    """

    rows: Tensor  # [N, Q] row of the flat batch, or T for padding
    first: Tensor  # [N, Q] first visible key position
    last: Tensor  # [N, Q] last visible key position, inclusive; first - 1 for padding
    tables: Tensor  # [N, P] page of the pool that holds positions p * page_size ...


@operation
def write_pages(pages: Tensor, values: Tensor, where: Tensor) -> None:
    """Stores values [T, heads, D] in pages [pages, page_size, heads, D] at flat places page * page_size + offset."""
    pages.view(-1, *pages.shape[2:])[where] = values.to(pages.dtype)


@operation
def attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, tiles: QueryTiles) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for q [T, heads, D] over the visible keys of each row; fp32 inside."""
    tokens, heads, dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    group = heads // kv_heads  # query heads g * group ... share kv head g
    count, width = tiles.rows.shape
    padded = torch.cat([q.float() * dim**-0.5, q.new_zeros(1, heads, dim, dtype=torch.float32)])
    queries = padded[tiles.rows].view(count, width, kv_heads, group, dim)
    queries = queries.permute(0, 2, 1, 3, 4).reshape(count, kv_heads, width * group, dim)

    top = queries.new_full((count, kv_heads, width * group, 1), -torch.inf)  # running maximum
    total = torch.zeros_like(top)
    out = torch.zeros_like(queries)
    reach = tiles.last.amax(1)  # [N] last key any row of the tile sees
    start_of = torch.where(tiles.last >= tiles.first, tiles.first, reach[:, None] + 1).amin(1)  # [N]
    for start in range(0, int(reach.max()) + 1, SPLIT):
        live = ((reach >= start) & (start_of < start + SPLIT)).nonzero()[:, 0]
        if not len(live):
            continue
        table = tiles.tables[live, start // page_size : (start + SPLIT) // page_size]
        keys = _gather(k_pages, table)  # [n, kv_heads, <= SPLIT, D]
        values = _gather(v_pages, table)
        positions = start + torch.arange(keys.shape[2], device=q.device)
        visible = (positions >= tiles.first[live, :, None]) & (positions <= tiles.last[live, :, None])  # [n, Q, S]
        visible = visible[:, None, :, None].expand(-1, kv_heads, -1, group, -1).flatten(2, 3)
        scores = torch.matmul(queries[live], keys.transpose(2, 3)).masked_fill(~visible, -torch.inf)
        new_top = torch.maximum(top[live], scores.amax(-1, keepdim=True))
        pivot = new_top.masked_fill(new_top == -torch.inf, 0.0)  # a row that has seen no key yet
        weights = torch.exp(scores - pivot)
        decay = torch.exp(top[live] - pivot)
        total[live] = total[live] * decay + weights.sum(-1, keepdim=True)
        out[live] = out[live] * decay + torch.matmul(weights, values)
        top[live] = new_top

    out = out / total.masked_fill(total == 0.0, 1.0)
    out = out.view(count, kv_heads, width, group, dim).permute(0, 2, 1, 3, 4).reshape(count * width, heads, dim)
    result = q.new_empty(tokens + 1, heads, dim)
    result[tiles.rows.flatten()] = out.to(q.dtype)
    return result[:tokens]


def _gather(pages: Tensor, table: Tensor) -> Tensor:
    """Pages [n, P] of the pool as fp32 [n, kv_heads, SPLIT, D]; a short table is filled up: shapes stay fixed."""
    page_size = pages.shape[1]
    missing = SPLIT // page_size - table.shape[1]
    if missing:
        table = torch.cat([table, table.new_zeros(table.shape[0], missing)], dim=1)
    # contiguous: BLAS picks its kernel, and so its rounding, by memory layout, which must not depend on n
    return pages[table].flatten(1, 2).transpose(1, 2).float().contiguous()
