"""The trunk: embedding, hybrid layers, final norm, head. One forward serves prefill chunks and steps alike."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stoker.backends.family import Family
from stoker.backends.network.batch import Batch
from stoker.backends.network.cache import Cache
from stoker.backends.network.layer import DecoderLayer
from stoker.backends.network.linear import Fused, Linear, parameter
from stoker.backends.network.mtp import MtpHead
from stoker.backends.network.norm import RMSNorm
from stoker.backends.network.ops.rope import rope_table
from stoker.weights.model_config import ModelConfig


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids]


class Decoder(nn.Module):
    """`mtp` is part of the module when the config asks for it; a checkpoint without one leaves it None."""

    def __init__(self, config: ModelConfig, mtp: bool = True) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, kind, sparse)
            for kind, sparse in zip(config.layer_types, config.sparse_layers, strict=True)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.outputs = Fused(self.lm_head)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.mtp = MtpHead(config) if mtp and config.mtp_layers else None

    def forward(self, batch: Batch, cache: Cache, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """-> hidden [T, H] after the final norm, and the residual stream after each layer of `taps` [T, n * H]."""
        config = self.config
        rope = rope_table(batch.positions, config.rope_theta, config.rotary_dim)
        plan = cache.recurrence.begin(batch) if config.delta else None
        x = self.embed_tokens(batch.token_ids)
        tapped = {}
        for index, (layer, state) in enumerate(zip(self.layers, cache.layers, strict=True)):
            x = layer(x, batch, state, rope, plan)
            if index in taps:
                tapped[index] = x
        features = torch.cat([tapped[i] for i in taps], dim=-1) if taps else x.new_empty(x.shape[0], 0)
        return self.norm(x), features

    def logits(self, hidden: Tensor, family: Family = Family.STEP) -> Tensor:
        """fp32 logits [T, vocab] of post-norm hidden states."""
        return self.outputs(hidden, family, torch.float32)[0]
