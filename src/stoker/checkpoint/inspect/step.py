"""Bytes a decode step reads, which is what bounds its speed, from the bytes each part has on disk. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.weights.formats.rules import FormatTable
from stoker.weights.groups import DELTANET, EMBEDDING, HEAD, MTP, OTHER, ROUTED, VISION, group_of
from stoker.weights.model_config import ModelConfig
from stoker.weights.resolve import EXPERTS

STATE, CONV_STATE = "DeltaNet state", "DeltaNet conv state"
FP32, BF16 = 4, 2


@dataclass(frozen=True)
class StepReads:
    """One token of one sequence, without drafting and without KV cache, which grows with the context."""

    items: Mapping[str, int]  # a group, or a state that is read and written -> bytes
    kv_bytes_per_token: int  # of context, in BF16
    draft_bytes: int  # for one token drafted by MTP: its layer and the head; 0 without MTP

    @property
    def total(self) -> int:
        return sum(self.items.values())


def step_reads(config: ModelConfig, table: FormatTable) -> StepReads:
    sizes: dict[str, int] = {}
    mtp_experts = 0
    for module, layer in table.layers.items():
        group = group_of(module)
        sizes[group] = sizes.get(group, 0) + layer.nbytes
        if group == MTP and EXPERTS in module:
            mtp_experts += layer.nbytes
    chosen, experts = (config.moe.top_k, config.moe.num_experts) if config.moe else (1, 1)
    items = {group: size for group, size in sizes.items() if group not in (MTP, VISION, OTHER)}
    embedding = items.pop(EMBEDDING, 0)
    if config.tie_word_embeddings:
        items[HEAD] = embedding
    items[EMBEDDING] = embedding // config.vocab_size  # one row
    if ROUTED in items:
        items[ROUTED] = items[ROUTED] * chosen // experts
    if config.delta and DELTANET in items:
        delta, layers = config.delta, len(config.linear_layers)
        items[STATE] = 2 * layers * delta.value_heads * delta.key_dim * delta.value_dim * FP32  # read and written
        items[CONV_STATE] = 2 * layers * (delta.conv_kernel - 1) * delta.conv_channels * BF16
    draft = sizes.get(MTP, 0) - mtp_experts + mtp_experts * chosen // experts
    return StepReads(
        items,
        kv_bytes_per_token=2 * len(config.full_layers) * config.num_kv_heads * config.head_dim * BF16,
        draft_bytes=draft + items.get(HEAD, 0) if draft else 0,
    )
