"""One decoder layer: x += mixer(norm(x)); x += mlp(norm(x)). The trunk and the MTP head are made of these."""

from torch import Tensor, nn

from stoker.backends.network.attention import Attention, Rope
from stoker.backends.network.batch import Batch
from stoker.backends.network.cache import KVPages
from stoker.backends.network.deltanet import GatedDeltaNet
from stoker.backends.network.experts import SparseMlp
from stoker.backends.network.linear import DenseMlp
from stoker.backends.network.norm import RMSNorm
from stoker.backends.network.ops.deltanet import DeltaState
from stoker.backends.network.recurrence import Plan
from stoker.weights.model_config import FULL, ModelConfig


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
