"""The multi-token-prediction head: one full-attention layer that guesses the token after next.

u = fc(concat[norm(embedding of token t+1), norm(h_t)]), h_t being the trunk's output *after* its final norm; then a
decoder layer with KV of its own, and `norm`. The trunk's embedding and head are used on both ends.
"""

import torch
from torch import Tensor, nn

from stoker.backends.network.batch import Batch
from stoker.backends.network.cache import KVPages
from stoker.backends.network.layer import DecoderLayer
from stoker.backends.network.linear import Fused, Linear
from stoker.backends.network.norm import RMSNorm
from stoker.backends.network.ops.rope import rope_table
from stoker.weights.model_config import FULL, ModelConfig


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
