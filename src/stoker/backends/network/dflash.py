"""DFlash: a small Qwen3-style network that drafts a whole block in one pass.

It reads the trunk through taps (residual streams after chosen layers): fc + hidden_norm make one context feature per
token, from which every draft layer takes keys and values once. A block of [last token, mask, mask, ...] attends to
that context and to itself; row j guesses the token at its own position. The trunk lends embedding and head.
"""

import torch
from torch import Tensor, nn

from stoker.backends.network.attention import Attention, Rope, rope_table
from stoker.backends.network.batch import Batch, QueryTiles
from stoker.backends.network.cache import KVPages
from stoker.backends.network.linear import DenseMlp, Fused, Linear
from stoker.backends.network.norm import RMSNorm
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import SLIDING


class DFlashLayer(nn.Module):
    """A pre-norm Qwen3 layer; all drafter norms use plain weights."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps, offset=False)
        self.self_attn = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            eps,
            gate=False,
            norm_offset=False,
        )
        self.memories = Fused(self.self_attn.k_proj, self.self_attn.v_proj)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps, offset=False)
        self.mlp = DenseMlp(config.hidden_size, config.intermediate_size)

    def remember(self, context: Tensor, batch: Batch, pages: KVPages, rope: Rope) -> None:
        """Keys and values of the context, which skips input_layernorm and the MLP."""
        k, v = self.memories(context, batch.family)
        self.self_attn.remember(k, v, batch, pages, rope)

    def forward(self, x: Tensor, batch: Batch, pages: KVPages, rope: Rope, tiles: QueryTiles) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), batch, pages, rope, tiles)
        return x + self.mlp(self.post_attention_layernorm(x), batch.family).to(x.dtype)


class DFlash(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(len(config.taps) * config.hidden_size, config.hidden_size)
        self.inputs = Fused(self.fc)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=False)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=False)

    def observe(self, batch: Batch, features: Tensor, pages: list[KVPages]) -> None:
        """Adds committed tokens to the context: features [T, taps * H] are the trunk's taps at these tokens."""
        context = self.hidden_norm(self.inputs(features, batch.family)[0])
        rope = rope_table(batch.positions, self.config.rope_theta, self.config.head_dim)
        for layer, own in zip(self.layers, pages, strict=True):
            assert isinstance(layer, DFlashLayer)
            layer.remember(context, batch, own, rope)

    def forward(self, batch: Batch, embeddings: Tensor, pages: list[KVPages]) -> Tensor:
        """Drafts blocks: each run of `batch` is [last token, mask, ...] placed right after its context.

        -> [T, H] after the final norm; row j guesses the token at its own position. The block's own keys land in
        the pages behind the context and are overwritten when those positions are observed.
        """
        rope = rope_table(batch.positions, self.config.rope_theta, self.config.head_dim)
        tiles = {kind: self._tiles(batch, kind) for kind in set(self.config.layer_types)}
        x = embeddings
        for layer, kind, own in zip(self.layers, self.config.layer_types, pages, strict=True):
            x = layer(x, batch, own, rope, tiles[kind])
        return self.norm(x)

    def _tiles(self, batch: Batch, kind: str) -> QueryTiles:
        causal = self.config.causal if self.config.causal is not None else kind == SLIDING
        lengths = batch.starts[1:] - batch.starts[:-1]
        block_end = (batch.cached + lengths - 1)[batch.sequence]
        first = torch.zeros_like(batch.positions)
        if kind == SLIDING:
            first = (batch.positions - self.config.sliding_window + 1).clamp(min=0)
        return batch.tiles(first, batch.positions if causal else block_end)
