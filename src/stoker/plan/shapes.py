"""What a planner knows of a network: its weights by group and shape, what it keeps per token and per sequence.

Qwen families are read by the engine's own `ModelConfig`; gpt-oss, which the engine does not run, is counted here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError
from stoker.weights.config_fields import Fields
from stoker.weights.expected import expected_parameters
from stoker.weights.groups import (
    ATTENTION,
    DELTANET,
    DENSE,
    EMBEDDING,
    HEAD,
    MTP,
    OTHER,
    ROUTED,
    ROUTER,
    SHARED,
    group_of,
)
from stoker.weights.model_config import FAMILIES, FULL, LINEAR, DeltaConfig, ModelConfig

SLIDING = "sliding_attention"
GPT_OSS = "gpt_oss"
FEEDING = "recurrent layers before attention"  # a part of their own: some files keep them in 16 bit
Shape = tuple[int, ...]

# names used in weights.toml -> groups of `stoker inspect`
GROUP_KEYS = {"routed": ROUTED, "shared": SHARED, "dense": DENSE, "deltanet": DELTANET, "attention": ATTENTION,
              "head": HEAD, "embedding": EMBEDDING, "router": ROUTER, "feeding": FEEDING}  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """`count` tensors of one shape. `group` is where `stoker inspect` shows it, `part` the trunk group it resembles."""

    name: str
    group: str
    part: str
    shape: Shape
    count: int = 1

    @property
    def parameters(self) -> int:
        return self.count * prod(self.shape)


@dataclass(frozen=True)
class Drafter:
    """A DFlash network: reads taps of the trunk, drafts a block in one pass, shares embedding and head."""

    repository: str
    hidden_size: int
    layers: int
    sliding_layers: int
    sliding_window: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    taps: int
    block_size: int

    @property
    def parameters(self) -> int:
        hidden, queries = self.hidden_size, self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * self.intermediate_size
        norms = 2 * hidden + 2 * self.head_dim
        return self.taps * hidden * hidden + 2 * hidden + self.layers * (layer + norms)

    def kv_bytes(self, context: int, item: float) -> int:
        full = self.layers - self.sliding_layers
        rows = full * context + self.sliding_layers * min(context, self.sliding_window)
        return int(rows * 2 * self.num_key_value_heads * self.head_dim * item)


@dataclass(frozen=True)
class Model:
    name: str
    family: str
    hidden_size: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    experts: int  # 0: dense
    top_k: int
    sliding_window: int
    mtp_layers: int
    delta: DeltaConfig | None
    weights: tuple[Weight, ...]
    vision_parameters: int = 0
    drafter: Drafter | None = None
    default_weights: str = "bf16"
    source: str = ""
    config: ModelConfig | None = field(default=None, repr=False)
    full_kv: int = 0  # values a token adds to a full layer's cache; 0: keys and values of num_kv_heads
    mamba_bytes: int = 0  # fp32 state of one sequence, of Mamba instead of DeltaNet layers

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    def layers_of(self, kind: str) -> int:
        return self.layer_types.count(kind)

    @cached_property
    def parameters(self) -> int:
        """Of the trunk, text only: as in the names models are sold under."""
        return sum(weight.parameters for weight in self.weights if weight.group != MTP)

    @cached_property
    def active_parameters(self) -> int:
        chosen = self.top_k / self.experts if self.experts else 1
        trunk = [weight for weight in self.weights if weight.group != MTP]
        return int(sum(w.parameters * (chosen if w.group == ROUTED else 1) for w in trunk))

    @cached_property
    def looked_up_parameters(self) -> int:
        """Of the embeddings: a token takes a row of them and multiplies nothing."""
        return sum(weight.parameters for weight in self.weights if weight.group in (EMBEDDING, OTHER))

    def kv_bytes_per_token(self, item: float, kind: str = FULL) -> float:
        """Of all layers of that kind; `item` is 2 for BF16 and 1 for FP8."""
        each = self.full_kv if kind == FULL and self.full_kv else 2 * self.num_kv_heads * self.head_dim
        return self.layers_of(kind) * each * item

    def kv_bytes(self, context: int, item: float) -> int:
        """One sequence of `context` tokens; sliding layers keep their window."""
        full = context * self.kv_bytes_per_token(item)
        return int(full + min(context, self.sliding_window or context) * self.kv_bytes_per_token(item, SLIDING))

    def mtp_kv_bytes(self, context: int, item: float) -> int:
        return int(self.mtp_layers * context * 2 * self.num_kv_heads * self.head_dim * item)

    @property
    def recurrent_bytes(self) -> int:
        """fp32 state of one sequence, all recurrent layers."""
        if not self.delta:
            return self.mamba_bytes
        d = self.delta
        return self.layers_of(LINEAR) * d.value_heads * d.key_dim * d.value_dim * 4

    def conv_bytes(self, taps: int | None = None) -> int:
        """BF16 inputs the causal convolutions look back on; `taps` other than kernel - 1 where an engine keeps more."""
        if not self.delta:
            return 0
        rows = self.delta.conv_kernel - 1 if taps is None else taps
        return self.layers_of(LINEAR) * self.delta.conv_channels * rows * 2


def from_config(raw: Mapping[str, Any], where: str, name: str = "", **extra: Any) -> Model:
    """A model from the fields of a config.json; raises ConfigError with what the planner lacks."""
    text = {**raw, **raw["text_config"]} if isinstance(raw.get("text_config"), dict) else dict(raw)
    kind = str(raw.get("model_type", text.get("model_type")))
    if kind == GPT_OSS:
        return _gpt_oss(Fields(text, where), name or GPT_OSS, extra)
    if kind not in FAMILIES:
        missing = [
            k for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size") if k not in text
        ]
        lacks = f"; it also lacks {', '.join(missing)}" if missing else ""
        raise ConfigError(
            f"{where}: model_type is {kind!r}, whose layers the planner cannot count{lacks}. "
            f"It counts {', '.join(sorted(FAMILIES))} and {GPT_OSS}."
        )
    config = ModelConfig.from_dict(dict(raw), where)
    moe = config.moe
    return Model(
        name=name or config.family,
        family=config.family,
        hidden_size=config.hidden_size,
        layer_types=config.layer_types,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        experts=moe.num_experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        sliding_window=0,
        mtp_layers=config.mtp_layers,
        delta=config.delta,
        weights=tuple(_weights(expected_parameters(config))),
        config=config,
        **extra,
    )


def from_file(path: Path) -> Model:
    from stoker.weights.json_file import read_json

    return from_config(read_json(path), str(path), name=path.parent.name)


def _weights(expected: Mapping[str, Shape]) -> Iterator[Weight]:
    for name, shape in expected.items():
        group = group_of(name)
        part = group_of(name.removeprefix("mtp.")) if group == MTP else group
        if part == ROUTED and name.endswith("gate_up_proj"):  # stored as two matrices per expert
            experts, rows, columns = shape
            yield Weight(name, group, part, (experts, rows // 2, columns), 2)
        else:
            yield Weight(name, group, part, shape)


def _gpt_oss(fields: Fields, name: str, extra: Mapping[str, Any]) -> Model:
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    dim, vocab = fields.integer("head_dim"), fields.integer("vocab_size")
    experts, width = fields.integer("num_local_experts"), fields.integer("intermediate_size")
    queries, keys = heads * dim, kv_heads * dim
    norms = group_of("norm.weight")
    weights = (
        Weight("embed_tokens.weight", EMBEDDING, EMBEDDING, (vocab, hidden)),
        Weight("lm_head.weight", HEAD, HEAD, (vocab, hidden)),
        Weight("norm.weight", norms, norms, (hidden,)),
        Weight("layers.*.layernorms", norms, norms, (hidden,), 2 * layers),
        Weight("layers.*.self_attn.q_proj.weight", ATTENTION, ATTENTION, (queries, hidden), layers),
        Weight("layers.*.self_attn.kv_proj.weight", ATTENTION, ATTENTION, (keys, hidden), 2 * layers),
        Weight("layers.*.self_attn.o_proj.weight", ATTENTION, ATTENTION, (hidden, queries), layers),
        Weight("layers.*.self_attn.biases_and_sinks", ATTENTION, ATTENTION,
               (queries + 2 * keys + hidden + heads,), layers),
        Weight("layers.*.mlp.router.weight", ROUTER, ROUTER, (experts, hidden), layers),
        Weight("layers.*.mlp.router.bias", ROUTER, ROUTER, (experts,), layers),
        Weight("layers.*.mlp.experts.gate_up_proj", ROUTED, ROUTED, (experts, width, hidden), 2 * layers),
        Weight("layers.*.mlp.experts.down_proj", ROUTED, ROUTED, (experts, hidden, width), layers),
        Weight("layers.*.mlp.experts.biases", ROUTED, ROUTED, (experts * (2 * width + hidden),), layers),
    )  # fmt: skip
    return Model(
        name=name,
        family=GPT_OSS,
        hidden_size=hidden,
        layer_types=tuple(SLIDING if i % 2 == 0 else FULL for i in range(layers)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        vocab_size=vocab,
        max_positions=fields.integer("max_position_embeddings"),
        experts=experts,
        top_k=fields.integer("num_experts_per_tok"),
        sliding_window=fields.integer("sliding_window"),
        mtp_layers=0,
        delta=None,
        weights=weights,
        **extra,
    )
