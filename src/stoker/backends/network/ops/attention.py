"""Attention over paged keys and values, for query tiles that each belong to one sequence.

Keys are visited in splits of a fixed size from position 0 on, and masked keys add exact zeros, so neither the
length of a neighbour nor the number of pages changes a bit of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from stoker.backends.family import SPLIT

LOWEST = -1e30  # a running maximum that has seen no key
E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-100  # of a head that is all zeros


@dataclass(frozen=True)
class Split:
    """What some tiles see of one stretch of 256 keys."""

    tiles: Tensor | None  # [n] which tiles see any of it; None: all
    pages: Tensor  # [n * 256 / page_size]
    hidden: Tensor  # [n, 1, Q, 1, 256] 0 where a key is visible, -inf where it is not
    unseen: Tensor  # [n, 1, Q, 1] -inf for a row that sees no key of it, else 0


@dataclass(frozen=True)
class QueryTiles:
    """Which rows attend to which keys. N tiles of Q rows; a padding row holds an empty range of keys.

    A tile holds the tokens of one sequence's chunk (8 in a step, 64 in prefill), each at its place in it.
    """

    rows: Tensor  # [N, Q] row of the flat batch, or T for padding
    first: Tensor  # [N, Q] first visible key position
    last: Tensor  # [N, Q] last visible key position, inclusive; first - 1 for padding
    tables: Tensor  # [N, P] page of the pool that holds positions p * page_size ...
    page_size: int

    @cached_property
    def splits(self) -> Sequence[Split]:
        """Made once and shared by all layers."""
        reach = self.last.amax(1)  # [N] last key any row of the tile sees
        begin = torch.where(self.last >= self.first, self.first, reach[:, None] + 1).amin(1)  # [N]
        pages = SPLIT // self.page_size
        found = []
        for start in range(0, int(reach.max()) + 1, SPLIT):
            live = ((reach >= start) & (begin < start + SPLIT)).nonzero()[:, 0]
            if not len(live):
                continue
            table = self.tables[live, start // self.page_size : start // self.page_size + pages]
            table = functional.pad(table, (0, pages - table.shape[1]))  # a short one is filled up: shapes stay fixed
            positions = start + torch.arange(SPLIT, device=live.device)
            visible = (positions >= self.first[live, :, None]) & (positions <= self.last[live, :, None])  # [n, Q, S]
            hidden = torch.zeros(visible.shape, device=live.device).masked_fill_(~visible, -torch.inf)
            everyone = len(live) == len(self.rows)
            unseen = hidden.amax(-1)[:, None, :, None]
            found.append(Split(None if everyone else live, table.flatten(), hidden[:, None, :, None], unseen))
        return found


def write_pages(pages: Tensor, values: Tensor, where: Tensor, scales: Tensor | None = None) -> None:
    """Stores values [T, heads, D] in pages [pages, page_size, heads, D] at flat places page * page_size + offset.

    FP8 pages have scales [pages, page_size, heads], chosen so that a head's largest value is the largest FP8 number.
    """
    if scales is not None:
        wide = values.float()
        steps = (wide.abs().amax(-1) / E4M3_MAX).clamp(min=SMALLEST_SCALE).to(scales.dtype)
        scales.flatten(0, 1).index_copy_(0, where, steps)
        # divided by the scale as stored; clamped, since that may have been rounded down
        values = (wide / steps.float().unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(pages.dtype).view(torch.uint8)
        pages = pages.view(torch.uint8)  # torch copies bytes where it does not copy FP8
    pages.flatten(0, 1).index_copy_(0, where, values.to(pages.dtype))


def attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tiles: QueryTiles,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for q [T, heads, D] over the visible keys of each row; fp32 inside.

    Keys and values are read as stored, those of this very batch included; FP8 pages come with their scales.
    """
    tokens, heads, dim = q.shape
    kv_heads = k_pages.shape[2]
    group = heads // kv_heads  # query heads g * group ... share kv head g
    count, width = tiles.rows.shape
    rows = tiles.rows.flatten()
    padded = functional.pad(q.float() * dim**-0.5, (0, 0, 0, 0, 0, 1))
    queries = padded.index_select(0, rows).view(count, width, kv_heads, group, dim)
    queries = queries.transpose(1, 2).reshape(count, kv_heads, width * group, dim)

    top = total = out = None
    for split in tiles.splits:
        live = split.tiles
        keys, values = (  # [n, kv_heads, 256, D]
            _laid_out(read_split(pages, split.pages, scales))
            for pages, scales in ((k_pages, k_scales), (v_pages, v_scales))
        )
        scores = torch.matmul(queries if live is None else queries[live], keys.transpose(2, 3))
        scores = (scores.unflatten(2, (width, group)) + split.hidden).flatten(2, 3)
        highest = scores.amax(-1, keepdim=True)
        if top is None and live is None:  # the first split of all tiles: as below, with nothing seen before
            top = highest.clamp(min=LOWEST)
            weights = torch.exp(scores - top)
            total, out = weights.sum(-1, keepdim=True), torch.matmul(weights, values)
            continue
        if top is None or total is None or out is None:
            top = queries.new_full((count, kv_heads, width * group, 1), LOWEST)  # running maximum
            total, out = torch.zeros_like(top), torch.zeros_like(queries)
        chosen = slice(None) if live is None else live
        after = torch.maximum(top[chosen], highest)
        weights = torch.exp(scores - after)
        decay = torch.exp(top[chosen] - after)
        total[chosen] = total[chosen] * decay + weights.sum(-1, keepdim=True)
        out[chosen] = out[chosen] * decay + torch.matmul(weights, values)
        top[chosen] = after

    assert total is not None
    assert out is not None
    out = out / total.clamp(min=torch.finfo(torch.float32).tiny)
    out = out.view(count, kv_heads, width, group, dim).transpose(1, 2).reshape(count * width, heads, dim)
    return q.new_empty(tokens + 1, heads, dim).index_copy_(0, rows, out.to(q.dtype))[:tokens]


def read_split(pages: Tensor, table: Tensor, scales: Tensor | None = None) -> Tensor:
    """Pages [n * 256 / page_size] of the pool as [n, kv_heads, 256, D], in their own dtype or, from FP8, in fp32."""
    if scales is None:
        found = pages.index_select(0, table)
    else:
        codes = pages.view(torch.uint8).index_select(0, table).view(pages.dtype)
        found = codes.float() * scales.index_select(0, table).float().unsqueeze(-1)
    return found.view(-1, SPLIT, *pages.shape[2:]).transpose(1, 2)


def _laid_out(x: Tensor) -> Tensor:
    """fp32 and contiguous: BLAS picks its kernel, and so its rounding, by memory layout, which must not depend on n."""
    return torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)
