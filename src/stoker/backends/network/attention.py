"""Full attention with per-head q/k norms, partial rope and, in Qwen3.5, a sigmoid output gate."""

import torch
from torch import Tensor, nn

from stoker.backends.network.batch import Batch
from stoker.backends.network.cache import KVPages
from stoker.backends.network.linear import Fused, Linear
from stoker.backends.network.norm import RMSNorm
from stoker.backends.network.ops.attention import QueryTiles, attention, write_pages
from stoker.backends.network.ops.elementwise import sigmoid
from stoker.backends.network.ops.fused_attention import fused_attention
from stoker.backends.network.ops.rope import head_norm_rope
from stoker.backends.reference import REFERENCES_ONLY

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
