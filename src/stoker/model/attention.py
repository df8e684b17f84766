"""Full attention with per-head q/k norms, partial rope and, in Qwen3.5, a sigmoid output gate."""

from torch import Tensor, nn

from stoker.model.batch import Batch
from stoker.model.cache import KVPages
from stoker.model.layers import Linear, RMSNorm
from stoker.ops.attention import QueryTiles, attention, write_pages
from stoker.ops.elementwise import sigmoid
from stoker.ops.rope import rotate

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

    def forward(self, x: Tensor, batch: Batch, pages: KVPages, rope: Rope, tiles: QueryTiles) -> Tensor:
        self.remember(x, batch, pages, rope)
        q = self.q_proj(x, batch.family).view(-1, self.heads, self.head_dim * (2 if self.gate else 1))
        q, gate = q.split(self.head_dim, dim=-1) if self.gate else (q, None)  # per head: query, then gate
        q = rotate(self.q_norm(q), *rope)
        out = attention(q, pages.keys, pages.values, tiles)
        if gate is not None:
            out = (out.float() * sigmoid(gate)).to(x.dtype)
        return self.o_proj(out.flatten(1), batch.family)

    def remember(self, x: Tensor, batch: Batch, pages: KVPages, rope: Rope) -> None:
        """Writes the keys and values of these tokens."""
        k = self.k_proj(x, batch.family).view(-1, self.kv_heads, self.head_dim)
        v = self.v_proj(x, batch.family).view(-1, self.kv_heads, self.head_dim)
        write_pages(pages.keys, rotate(self.k_norm(k), *rope), batch.places)
        write_pages(pages.values, v, batch.places)
