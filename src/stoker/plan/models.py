"""Models as the planner knows them: a network whose bytes can be counted, its names and its limits.

Qwen families are read by the engine's own `ModelConfig`; gpt-oss, which the engine does not run, is counted here.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stoker.sizes.network import Network, Shape, Weight
from stoker.weights.config_fields import Fields
from stoker.weights.model_config import FAMILIES, FULL, SLIDING, ModelConfig
from stoker.weights.names import ATTENTION, EMBEDDING, HEAD, ROUTED, ROUTER, group_of

GPT_OSS = "gpt_oss"


@dataclass(frozen=True, kw_only=True)
class Model(Network):
    name: str
    family: str
    num_heads: int
    max_positions: int
    default_weights: str = "bf16"
    source: str = ""
    note: str = ""  # what is not known of it, where it is not counted in full
    config: ModelConfig | None = field(default=None, repr=False)


def from_config(raw: Mapping[str, Any], where: str, name: str = "", **extra: Any) -> Model:
    """A model from the fields of a config.json; raises ConfigError with what the planner lacks."""
    text = {**raw, **raw["text_config"]} if isinstance(raw.get("text_config"), dict) else dict(raw)
    kind = str(raw.get("model_type", text.get("model_type")))
    if kind == GPT_OSS:
        return _gpt_oss(Fields(text, where), name or GPT_OSS, extra)
    if kind not in FAMILIES:
        from stoker.plan.families import stranger

        return stranger({**text, "model_type": kind.removesuffix("_text")}, name or kind, where)
    config = ModelConfig.from_dict(dict(raw), where)
    whole = Model.of(
        config,
        name=name or config.family,
        family=config.family,
        num_heads=config.num_heads,
        max_positions=config.max_positions,
        config=config,
        **extra,
    )
    return replace(whole, weights=_merged(whole.weights))


def _merged(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Weights that layers have alike as one with a count: formats ask for names and shapes, never for a layer."""
    found: dict[tuple[str, str, str, Shape], Weight] = {}
    for weight in weights:
        key = (re.sub(r"\.\d+\.", ".", weight.name), weight.group, weight.part, weight.shape)
        before = found.get(key)
        found[key] = weight if before is None else replace(before, count=before.count + weight.count)
    return tuple(found.values())


def from_file(path: Path, name: str = "") -> Model:
    from stoker.weights.json_file import read_json

    return from_raw(read_json(path), str(path), name or path.parent.name)


def from_raw(raw: Mapping[str, Any], where: str, name: str) -> Model:
    """A model from a whole config.json, in the format that it says its weights have."""
    return replace(from_config(raw, where, name=name), default_weights=_format_of(raw))


# quant_method of a config.json -> the planner's nearest format
METHODS = {"fp8": "fp8", "mxfp4": "mxfp4", "gptq": "gptq-int4", "awq": "int4", "auto-round": "int4",
           "intel/auto-round": "int4", "modelopt": "nvfp4-experts"}  # fmt: skip


def _format_of(raw: Mapping[str, Any]) -> str:
    quantised = raw.get("quantization_config")
    if not isinstance(quantised, dict):
        return "bf16"
    method = str(quantised.get("quant_method", ""))
    if method == "compressed-tensors":
        return "nvfp4" if "nvfp4" in str(quantised.get("format", "")) else "int4"
    return METHODS.get(method, "bf16")


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
