"""The network: embedding, hybrid layers, final norm, head, and the MTP head that drafts from its output.

One forward serves prefill chunks and steps alike. Parameter names are those of the published checkpoints.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stoker.backends.family import Family
from stoker.backends.network.attention import Attention, Rope, rope_table
from stoker.backends.network.batch import Batch
from stoker.backends.network.cache import Cache, KVPages
from stoker.backends.network.deltanet import DeltaState, GatedDeltaNet, Plan
from stoker.backends.network.experts import SparseMlp
from stoker.backends.network.linear import DenseMlp, Fused, Linear, parameter
from stoker.backends.network.norm import RMSNorm
from stoker.weights.model_config import FULL, ModelConfig


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids]


class DecoderLayer(nn.Module):
    """Parameter names are those of the published checkpoints: self_attn or linear_attn, mlp, two norms."""

    def __init__(self, config: ModelConfig, kind: str, sparse: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
        if kind == FULL:
            self.self_attn = Attention(
                config.hidden_size,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.rms_norm_eps,
                gate=config.attention_gate,
                norm_offset=config.norm_offset,
            )
        else:
            assert config.delta is not None
            self.linear_attn = GatedDeltaNet(config.hidden_size, config.delta, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
        self.mlp: SparseMlp | DenseMlp
        if sparse:
            assert config.moe is not None
            self.mlp = SparseMlp(config.hidden_size, config.moe)
        else:
            self.mlp = DenseMlp(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, batch: Batch, state: KVPages | DeltaState, rope: Rope, plan: Plan | None) -> Tensor:
        normed = self.input_layernorm(x)
        if isinstance(state, KVPages):
            x = x + self.self_attn(normed, batch, state, rope, batch.causal_tiles)
        else:
            assert plan is not None
            x = x + self.linear_attn(normed, state, plan, batch.family)
        return x + self.mlp(self.post_attention_layernorm(x), batch.family).to(x.dtype)


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


class MtpHead(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(size, eps, config.norm_offset)
        self.pre_fc_norm_hidden = RMSNorm(size, eps, config.norm_offset)
        self.fc = Linear(2 * size, size)
        self.inputs = Fused(self.fc)
        self.layers = nn.ModuleList([DecoderLayer(config, FULL, sparse=config.moe is not None)])
        self.norm = RMSNorm(size, eps, config.norm_offset)

    def forward(self, batch: Batch, embeddings: Tensor, hidden: Tensor, pages: KVPages) -> Tensor:
        """-> [T, H] post-norm hidden; the head turns row t into a guess at token t+2.

        Positions of `batch` are those of h_t; `embeddings` [T, H] are of the tokens that follow, t+1. To draft
        further, feed the result back as `hidden` with the drafted token's embedding, one position on.
        """
        joined = torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1)
        rope = rope_table(batch.positions, self.config.rope_theta, self.config.rotary_dim)
        (x,) = self.inputs(joined, batch.family)
        return self.norm(self.layers[0](x, batch, pages, rope, None))
