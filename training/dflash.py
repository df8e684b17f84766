"""The DFlash drafter as trained: many blocks of one sequence drafted in one pass, each seeing only what it would see
when drafting. Parameter names are those of stoker.backends.network.dflash.DFlash."""

import math

import torch
from torch import Tensor, nn

from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import SLIDING
from training.layers import Attention, Keys, Linear, RMSNorm, Rope, SwiGlu, rope_table


class DrafterLayer(nn.Module):
    def __init__(self, config: DFlashConfig, std: float) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.input_layernorm = RMSNorm(size, eps, offset=False)
        self.self_attn = Attention(size, heads, kv_heads, dim, eps, gated=False, std=std)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=False)
        self.mlp = SwiGlu(size, config.intermediate_size, std)

    def forward(self, x: Tensor, rope: Rope, context: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        seen = Keys([context[0]], [context[1]])
        x = x + self.self_attn(self.input_layernorm(x), rope, seen, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        std = 0.02 / math.sqrt(2 * len(config.layer_types))
        self.fc = Linear(len(config.taps) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=False)
        self.layers = nn.ModuleList(DrafterLayer(config, std) for _ in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=False)

    def forward(self, features: Tensor, embeddings: Tensor, anchors: Tensor) -> Tensor:
        """features [B, T, taps * H] of the trunk, embeddings [B, A, block, H] of [anchor token, mask, ...] -> the same
        shape after the final norm. The block of anchor p [B, A] stands at positions p, p + 1, ... and sees the
        context before p only.
        """
        config = self.config
        batch, length = features.shape[:2]
        blocks, size = embeddings.shape[1:3]
        places = torch.arange(length, device=features.device)
        positions = (anchors[..., None] + torch.arange(size, device=features.device)).flatten(1)  # [B, A * block]
        first = anchors.repeat_interleave(size, dim=1)
        which = torch.arange(blocks, device=features.device).repeat_interleave(size)
        context = self.hidden_norm(self.fc(features))
        before = rope_table(places, config.rope_theta, config.head_dim)
        within = rope_table(positions, config.rope_theta, config.head_dim)
        masks = {kind: self._mask(kind, places, positions, first, which) for kind in set(config.layer_types)}
        x = embeddings.flatten(1, 2)
        for layer, kind in zip(self.layers, config.layer_types, strict=True):
            assert isinstance(layer, DrafterLayer)
            x = layer(x, within, layer.self_attn.project(context, before), masks[kind])
        return self.norm(x).view(batch, blocks, size, -1)

    def _mask(self, kind: str, places: Tensor, positions: Tensor, first: Tensor, which: Tensor) -> Tensor:
        """[B, 1, A * block, T + A * block]: the context before the block's anchor, and the block itself."""
        context = places < first[..., None]
        own = (which[:, None] == which).expand(len(first), -1, -1)
        if self.config.causal if self.config.causal is not None else kind == SLIDING:
            own = own & (positions[:, None, :] <= positions[..., None])
        if kind == SLIDING:
            reach = positions[..., None] - self.config.sliding_window
            context = context & (places > reach)
            own = own & (positions[:, None, :] > reach)
        return torch.cat([context, own], dim=-1)[:, None]


def block_weights(size: int, device: torch.device) -> Tensor:
    """Loss weights of a block's rows: none for the anchor, then falling, since a late guess counts only if all before
    it were right."""
    place = torch.arange(size, dtype=torch.float32, device=device)
    return torch.where(place == 0, 0.0, torch.exp(-(place - 1) * 2 / size))
