"""Full attention over paged keys and values, with per-head q/k norms, partial rope and, in Qwen3.5, an output gate.

Query tiles each belong to one sequence. Keys are visited in splits of a fixed size from position 0 on, and masked keys
add exact zeros, so neither the length of a neighbour nor the number of pages changes a bit of a row. `attention` is the
reference; `fused_attention` takes torch's CPU kernel for bf16, one split at a time. A split has one shape per tile, and
splits are joined in order by their log-sums, as in the reference. Torch may choose its way by the number of tiles and
threads: where a tile has other bits beside others, each is a call of its own.

For text the three position rows of mrope are equal, so plain rope results: the first `rotary_dim` dimensions of each
head, half-split pairing, fp32 angles.
"""

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.backends.family import SPLIT
from stoker.backends.network.batch import Batch, QueryTiles
from stoker.backends.network.cache import KVPages
from stoker.backends.network.elementwise import sigmoid
from stoker.backends.network.linear import Fused, Linear
from stoker.backends.network.norm import RMSNorm, scaled_rms_norm
from stoker.backends.reference import REFERENCES_ONLY

LOWEST = -1e30  # a running maximum that has seen no key
E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-100  # of a head that is all zeros
TILE_COUNTS = (2, 3, 5, 8, 13, 32)  # of tiles, in the trial
Rope = tuple[Tensor, Tensor]  # cosines and sines [T, rotary_dim / 2]


class Attention(nn.Module):
    """The caller says which keys a token sees (`tiles`) and where its own key goes (`batch`, `pages`)."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        gate: bool,
        norm_offset: bool,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.gate = heads, kv_heads, head_dim, gate
        self.q_proj = Linear(hidden_size, heads * head_dim * (2 if gate else 1))
        self.k_proj = Linear(hidden_size, kv_heads * head_dim)
        self.v_proj = Linear(hidden_size, kv_heads * head_dim)
        self.o_proj = Linear(heads * head_dim, hidden_size)
        self.q_norm = RMSNorm(head_dim, eps, norm_offset)
        self.k_norm = RMSNorm(head_dim, eps, norm_offset)
        self.inputs, self.outputs = Fused(self.q_proj, self.k_proj, self.v_proj), Fused(self.o_proj)
        self._scales: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, batch: Batch, pages: KVPages, rope: Rope, tiles: QueryTiles) -> Tensor:
        family, tokens = batch.family, x.shape[0]
        q, k, v = self.inputs(x, family)
        q = q.view(tokens, self.heads, -1)
        gate = q[:, :, self.head_dim :] if self.gate else None  # per head: query, then gate
        k = k.view(tokens, self.kv_heads, self.head_dim)
        q, k = head_norm_rope(q[:, :, : self.head_dim], k, self._head_scales(), self.q_norm.eps, *rope)
        self._write(k, v, batch, pages)
        fused = q.dtype == torch.bfloat16 and q.is_cpu and not REFERENCES_ONLY
        attend = fused_attention if fused else attention
        out = attend(q, pages.keys, pages.values, tiles, pages.key_scales, pages.value_scales)
        if gate is not None:
            out = (out.float() * sigmoid(gate)).to(q.dtype)
        return self.outputs(out.flatten(1), family)[0]

    def remember(self, k: Tensor, v: Tensor, batch: Batch, pages: KVPages, rope: Rope) -> None:
        """Writes projected keys and values of these tokens."""
        k = k.view(-1, self.kv_heads, self.head_dim)
        _, k = head_norm_rope(k[:, :0], k, self._head_scales()[self.heads :], self.k_norm.eps, *rope)
        self._write(k, v, batch, pages)

    def _write(self, k: Tensor, v: Tensor, batch: Batch, pages: KVPages) -> None:
        write_pages(pages.keys, k, batch.places, pages.key_scales)
        write_pages(pages.values, v.view(-1, self.kv_heads, self.head_dim), batch.places, pages.value_scales)

    def _head_scales(self) -> Tensor:
        """[heads + kv_heads, D] fp32: what queries and keys are multiplied with once normalised; made once."""
        weights = self.q_norm.weight, self.k_norm.weight
        if self._scales is None or self._scales[0] is not weights[0]:
            norms = (self.q_norm, self.heads), (self.k_norm, self.kv_heads)
            scales = [norm.scale()[: self.head_dim].expand(count, -1) for norm, count in norms]
            self._scales = weights[0], torch.cat(scales)
        return self._scales[1]


@lru_cache
def _inverse_frequencies(theta: float, rotary_dim: int, device: torch.device) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    return 1.0 / theta**exponents


def rope_table(positions: Tensor, theta: float, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """fp32 cosines and sines [T, rotary_dim / 2] of integer positions [T]."""
    angles = positions.float()[:, None] * _inverse_frequencies(theta, rotary_dim, positions.device)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates dim i with dim i + rotary_dim/2 of x [T, heads, D]; the dims past rotary_dim pass through."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * half :]], dim=-1)


def head_norm_rope(q: Tensor, k: Tensor, scales: Tensor, eps: float, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [T, heads, D] and keys [T, kv_heads, D], each head normalised, times its row of scales [heads +
    kv_heads, D], then rotated."""
    both = torch.cat([q, k], dim=1)
    both = rotate((scaled_rms_norm(both.float(), None, eps) * scales).to(both.dtype), cos, sin)
    queries, keys = both.split_with_sizes((q.shape[1], k.shape[1]), dim=1)
    return queries, keys


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


def read_split(pages: Tensor, table: Tensor, scales: Tensor | None = None) -> Tensor:
    """Pages [n * 256 / page_size] of the pool as [n, kv_heads, 256, D], in their own dtype or, from FP8, in fp32."""
    if scales is None:
        found = pages.index_select(0, table)
    else:
        codes = pages.view(torch.uint8).index_select(0, table).view(pages.dtype)
        found = codes.float() * scales.index_select(0, table).float().unsqueeze(-1)
    return found.view(-1, SPLIT, *pages.shape[2:]).transpose(1, 2)


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
    kv_heads, group = k_pages.shape[2], q.shape[1] // k_pages.shape[2]
    count, width = tiles.rows.shape
    queries = _in_tiles(q.float() * q.shape[2] ** -0.5, tiles, kv_heads)

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
    return _in_rows((out / total.clamp(min=torch.finfo(torch.float32).tiny)).to(q.dtype), tiles, q)


def _in_tiles(q: Tensor, tiles: QueryTiles, kv_heads: int) -> Tensor:
    """Queries [T, heads, D] -> [N, kv_heads, Q * group, D]: heads g * group ... share kv head g. Padding rows are 0."""
    _, heads, dim = q.shape
    count, width = tiles.rows.shape
    rows = functional.pad(q, (0, 0, 0, 0, 0, 1)).index_select(0, tiles.rows.flatten())
    found = rows.view(count, width, kv_heads, heads // kv_heads, dim).transpose(1, 2)
    return found.reshape(count, kv_heads, width * (heads // kv_heads), dim)


def _in_rows(out: Tensor, tiles: QueryTiles, q: Tensor) -> Tensor:
    """What `_in_tiles` made of q, back in the shape and order of q."""
    tokens, heads, dim = q.shape
    count, width = tiles.rows.shape
    kv_heads = out.shape[1]
    out = out.view(count, kv_heads, width, heads // kv_heads, dim).transpose(1, 2).reshape(count * width, heads, dim)
    return q.new_empty(tokens + 1, heads, dim).index_copy_(0, tiles.rows.flatten(), out)[:tokens]


def _laid_out(x: Tensor) -> Tensor:
    """fp32 and contiguous: BLAS picks its kernel, and so its rounding, by memory layout, which must not depend on n."""
    return torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)


def fused_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tiles: QueryTiles,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """As `attention`, for bf16 queries."""
    kv_heads, group = k_pages.shape[2], q.shape[1] // k_pages.shape[2]
    count, width = tiles.rows.shape
    queries = _in_tiles(q, tiles, kv_heads)

    top: Tensor | None = None
    for split in tiles.splits:
        live = split.tiles
        mask = split.hidden.expand(-1, -1, -1, group, -1).flatten(2, 3)
        part, logs = _fused_tiles(
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
    return _in_rows(out, tiles, q)


def _fused_tiles(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """queries [n, kv_heads, Q, D] over one split -> results and log-sums [n, kv_heads, Q], tile by tile the same."""
    count, kv_heads, rows, dim = queries.shape
    if count == 1 or tiles_independent(kv_heads, rows, dim, torch.get_num_threads()):
        return _fused_kernel(queries, keys, values, mask)
    found = [_fused_kernel(*(x[i : i + 1] for x in (queries, keys, values, mask))) for i in range(count)]
    return torch.cat([part for part, _ in found]), torch.cat([logs for _, logs in found])


@lru_cache
def tiles_independent(kv_heads: int, rows: int, dim: int, threads: int) -> bool:
    """Whether the first and the last of several tiles have the bits they have alone, with as many threads as now."""
    generator = torch.Generator().manual_seed(0)
    most = max(TILE_COUNTS)
    queries, keys, values = (
        torch.randn(most, kv_heads, length, dim, generator=generator).bfloat16() for length in (rows, SPLIT, SPLIT)
    )
    inputs = queries, keys, values, torch.zeros(most, 1, rows, SPLIT)

    def same(count: int, place: int) -> bool:
        alone = _fused_kernel(*(x[place : place + 1] for x in inputs))
        beside = _fused_kernel(*(x[:count] for x in inputs))
        return all(torch.equal(one[0], many[place]) for one, many in zip(alone, beside, strict=True))

    return all(same(count, place) for count in TILE_COUNTS for place in (0, count - 1))


def _fused_kernel(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, attn_mask=mask
    )
    return found
