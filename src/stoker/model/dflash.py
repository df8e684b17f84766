"""DFlash: a small Qwen3-style network that drafts a whole block in one pass.

It reads the trunk through taps (residual streams after chosen layers): fc + hidden_norm make one context feature per
token, from which every draft layer takes keys and values once. A block of [last token, mask, mask, ...] attends to
that context and to itself; row j guesses the token at its own position. The trunk lends embedding and head.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stoker.errors import ConfigError
from stoker.model.attention import Attention, Rope
from stoker.model.batch import Batch
from stoker.model.cache import KVPages
from stoker.model.layers import DenseMlp, Linear, RMSNorm
from stoker.ops.attention import QueryTiles
from stoker.ops.rope import rope_table
from stoker.weights.json_file import read_json

SLIDING = "sliding_attention"


@dataclass(frozen=True)
class DFlashConfig:
    hidden_size: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    sliding_window: int
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]  # 0-based trunk layers whose output is read
    causal: bool | None  # inside the block; None: sliding layers are causal, full layers are not

    @classmethod
    def load(cls, directory: Path) -> "DFlashConfig":
        path = directory / "config.json"
        return cls.from_dict(read_json(path), where=str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str = "config.json") -> "DFlashConfig":
        own = raw.get("dflash_config", {})
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        kind = rope.get("rope_type", "default")
        if kind != "default":
            raise ConfigError(f"{where}: rope_type is {kind!r}; Stoker computes only 'default' for drafters.")
        values = {**raw, **own, "rope_theta": rope.get("rope_theta", raw.get("rope_theta"))}
        needed = [
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "rope_theta",
            "vocab_size",
            "block_size",
            "mask_token_id",
            "target_layer_ids",
        ]
        for name in needed:
            if values.get(name) is None:
                raise ConfigError(f"{where}: the field {name} is missing; it is needed for a DFlash drafter.")
        layer_types = tuple(raw.get("layer_types") or ["full_attention"] * raw["num_hidden_layers"])
        if SLIDING in layer_types and not raw.get("sliding_window"):
            raise ConfigError(f"{where}: layer_types names {SLIDING} but sliding_window is missing.")
        return cls(
            hidden_size=values["hidden_size"],
            layer_types=layer_types,
            num_heads=values["num_attention_heads"],
            num_kv_heads=values["num_key_value_heads"],
            head_dim=values["head_dim"],
            intermediate_size=values["intermediate_size"],
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=float(values["rope_theta"]),
            vocab_size=values["vocab_size"],
            sliding_window=raw.get("sliding_window") or 0,
            block_size=values["block_size"],
            mask_token_id=values["mask_token_id"],
            taps=tuple(values["target_layer_ids"]),
            causal=raw.get("is_causal", own.get("causal")),
        )


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
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps, offset=False)
        self.mlp = DenseMlp(config.hidden_size, config.intermediate_size)

    def remember(self, context: Tensor, batch: Batch, pages: KVPages, rope: Rope) -> None:
        """Keys and values of the context, which skips input_layernorm and the MLP."""
        self.self_attn.remember(context, batch, pages, rope)

    def forward(self, x: Tensor, batch: Batch, pages: KVPages, rope: Rope, tiles: QueryTiles) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), batch, pages, rope, tiles)
        return x + self.mlp(self.post_attention_layernorm(x), batch.family)


class DFlash(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(len(config.taps) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=False)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=False)

    def observe(self, batch: Batch, features: Tensor, pages: list[KVPages]) -> None:
        """Adds committed tokens to the context: features [T, taps * H] are the trunk's taps at these tokens."""
        context = self.hidden_norm(self.fc(features, batch.family))
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
