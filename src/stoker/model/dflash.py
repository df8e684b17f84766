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
from stoker.model.config import FULL, Fields, ModelConfig, rope_of
from stoker.model.layers import DenseMlp, Fused, Linear, RMSNorm
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
        fields = Fields(raw, where)
        own = fields.object("dflash_config")
        theta, partial = rope_of(fields)
        for name, found, supported in (
            ("partial_rotary_factor", partial, 1.0),
            ("hidden_act", fields.get("hidden_act", "silu"), "silu"),
            ("attention_bias", fields.get("attention_bias", False), False),
        ):
            if found != supported:
                raise ConfigError(f"{where}: {name} is {found!r}; Stoker computes drafters only with {supported!r}.")
        vocab, mask = fields.integer("vocab_size"), own.integer("mask_token_id", minimum=0)
        if mask >= vocab:
            raise ConfigError(f"{where}: mask_token_id {mask} is outside the vocabulary of {vocab}.")
        causal = fields.get("is_causal", own.get("causal"))
        if causal not in (None, True, False):
            raise ConfigError(f"{where}: causal is {causal!r}, expected true or false.")
        return cls(
            hidden_size=fields.integer("hidden_size"),
            layer_types=_layer_types(fields),
            num_heads=fields.integer("num_attention_heads"),
            num_kv_heads=fields.integer("num_key_value_heads"),
            head_dim=fields.integer("head_dim"),
            intermediate_size=fields.integer("intermediate_size"),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            vocab_size=vocab,
            sliding_window=fields.integer("sliding_window", 0, minimum=0),
            block_size=own.integer("block_size"),
            mask_token_id=mask,
            taps=own.integers("target_layer_ids"),
            causal=causal,
        )

    def check_fits(self, trunk: ModelConfig) -> None:
        """A drafter works with the one trunk it was made for."""
        if (self.hidden_size, self.vocab_size) != (trunk.hidden_size, trunk.vocab_size):
            raise ConfigError(
                f"the drafter has hidden_size {self.hidden_size} and vocab_size {self.vocab_size}, the model "
                f"{trunk.hidden_size} and {trunk.vocab_size}: it belongs to another model."
            )
        if max(self.taps) >= trunk.num_layers:
            raise ConfigError(
                f"the drafter reads layer {max(self.taps)} (target_layer_ids), the model has {trunk.num_layers} layers."
            )


def _layer_types(fields: Fields) -> tuple[str, ...]:
    layers = fields.integer("num_hidden_layers")
    kinds = fields.get("layer_types", [FULL] * layers)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise fields.error("layer_types", f"{layers} entries of {FULL} or {SLIDING}")
    if SLIDING in kinds and not fields.get("sliding_window"):
        raise ConfigError(f"{fields.where}: layer_types names {SLIDING} but sliding_window is missing.")
    return tuple(kinds)


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
