"""The trunk and its MTP head as trained: Qwen3.5-MoE text, batched, with gradients.

Parameters carry the names of stoker.backends.network.decoder.Decoder, so that export is a matter of prefixes.
Inference lives in stoker.backends.network; tests hold the two against each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stoker.weights.model_config import FULL, ModelConfig
from training.delta import GatedDeltaNet
from training.layers import Attention, Keys, Linear, RMSNorm, Rope, rope_table
from training.moe import Dispatch, SparseMlp


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, kind: str, std: float, dispatch: Dispatch) -> None:
        super().__init__()
        assert config.moe is not None
        assert config.delta is not None
        size, eps = config.hidden_size, config.rms_norm_eps
        self.full = kind == FULL
        self.input_layernorm = RMSNorm(size, eps)
        if self.full:
            heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
            self.self_attn = Attention(size, heads, kv_heads, dim, eps, gated=True, std=std)
        else:
            self.linear_attn = GatedDeltaNet(size, config.delta, eps, std)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = SparseMlp(size, config.moe, std, dispatch)

    def forward(
        self, x: Tensor, rope: Rope, seen: Keys | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        normed = self.input_layernorm(x)
        x = x + (self.self_attn(normed, rope, seen, mask) if self.full else self.linear_attn(normed))
        out, balance = self.mlp(self.post_attention_layernorm(x))
        return x + out, balance


class MtpHead(nn.Module):
    def __init__(self, config: ModelConfig, std: float, dispatch: Dispatch) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps)
        self.fc = Linear(2 * size, size)
        self.layers = nn.ModuleList([DecoderLayer(config, FULL, std, dispatch)])
        self.norm = RMSNorm(size, eps)

    def forward(self, embeddings: Sequence[Tensor], hidden: Tensor) -> tuple[list[Tensor], Tensor]:
        """One pass per entry of `embeddings`: entry j [B, T, H] holds, at row t, the embedding of token t + 1 + j.

        Pass 0 reads the trunk's hidden states; each later pass reads the pass before, as drafting does, and sees the
        true keys up to t and the drafted ones of its own row. -> post-norm outputs (pass j guesses token t + 2 + j)
        and the balancing loss.
        """
        length = hidden.shape[1]
        places = torch.arange(length, device=hidden.device)
        causal = places[:, None] >= places
        own = torch.eye(length, dtype=torch.bool, device=hidden.device)
        seen, outputs, balance = Keys(), [], hidden.new_zeros(())
        for ahead, embedding in enumerate(embeddings):
            joined = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], dim=-1)
            rope = rope_table(places + ahead, self.config.rope_theta, self.config.rotary_dim)
            mask = torch.cat([causal] + [own] * ahead, dim=1)
            out, extra = self.layers[0](self.fc(joined), rope, seen, mask)
            hidden = self.norm(out)
            outputs.append(hidden)
            balance = balance + extra
        return outputs, balance / len(outputs)


@dataclass(frozen=True)
class Output:
    hidden: Tensor  # [B, T, H] after the final norm
    features: Tensor  # [B, T, taps * H] residual stream after the tapped layers
    balance: Tensor  # mean balancing loss of the layers


class Model(nn.Module):
    def __init__(self, config: ModelConfig, dispatch: Dispatch = "dense") -> None:
        super().__init__()
        self.config = config
        std = 0.02 / math.sqrt(2 * config.num_layers)  # of what is added to the residual stream
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(DecoderLayer(config, kind, std, dispatch) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.mtp = MtpHead(config, std, dispatch)

    def forward(self, tokens: Tensor, taps: Sequence[int] = ()) -> Output:
        """tokens [B, T], every row a sequence from position 0."""
        config = self.config
        places = torch.arange(tokens.shape[1], device=tokens.device)
        rope = rope_table(places, config.rope_theta, config.rotary_dim)
        x = self.embed_tokens(tokens)
        balances, tapped = [], {}
        for index, layer in enumerate(self.layers):
            x, balance = layer(x, rope)
            balances.append(balance)
            if index in taps:
                tapped[index] = x
        features = torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else x.new_empty(*x.shape[:2], 0)
        return Output(self.norm(x), features, torch.stack(balances).mean())

    def trunk_parameters(self) -> list[nn.Parameter]:
        return [p for name, p in self.named_parameters() if not name.startswith("mtp.")]
