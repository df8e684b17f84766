"""Every parameter a config.json asks for, by name and shape, without building the network. No torch.

Names are those of `model.decoder.Decoder`, which a test holds this file to: the published ones without their prefix,
experts fused. `single_experts` gives the other form they are published in.
"""

from collections.abc import Iterator
from math import prod

from stoker.weights.model_config import FULL, ModelConfig

Shape = tuple[int, ...]


def expected_parameters(config: ModelConfig) -> dict[str, Shape]:
    """Trunk and, under `mtp.`, the MTP head where the config has one. A tied head is no parameter of its own."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"embed_tokens.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i, (kind, sparse) in enumerate(zip(config.layer_types, config.sparse_layers, strict=True)):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer(config, kind, sparse)}
    if config.mtp_layers:
        shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            shapes[f"mtp.{name}.weight"] = (hidden,)
        for name, shape in _layer(config, FULL, sparse=config.moe is not None):
            shapes[f"mtp.layers.0.{name}"] = shape
    return shapes


def single_experts(name: str, shape: Shape) -> dict[str, Shape]:
    """experts.gate_up_proj [E, 2I, H] as experts.E.gate_proj.weight and up_proj.weight [I, H]; down_proj likewise."""
    stem, kind = name.rsplit(".", 1)
    count, rows, columns = shape
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    each = (rows // len(parts), columns)
    return {f"{stem}.{expert}.{part}.weight": each for expert in range(count) for part in parts}


def active_parameters(config: ModelConfig) -> int:
    """Of the trunk, per token: all but the experts that are not chosen. Embedding and head count whole, as in the
    names models are sold under (A10B)."""
    total = 0
    for name, shape in expected_parameters(config).items():
        if name.startswith("mtp."):
            continue
        count = prod(shape)
        if ".mlp.experts." in name and config.moe:
            count = count * config.moe.top_k // config.moe.num_experts
        total += count
    return total


def _layer(config: ModelConfig, kind: str, sparse: bool) -> Iterator[tuple[str, Shape]]:
    hidden = config.hidden_size
    yield "input_layernorm.weight", (hidden,)
    yield from _attention(config) if kind == FULL else _deltanet(config)
    yield "post_attention_layernorm.weight", (hidden,)
    if sparse:
        yield from _sparse_mlp(config)
    else:
        yield from _dense_mlp("mlp", hidden, config.intermediate_size)


def _attention(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    yield "self_attn.q_proj.weight", (queries * (2 if config.attention_gate else 1), hidden)
    yield "self_attn.k_proj.weight", (keys, hidden)
    yield "self_attn.v_proj.weight", (keys, hidden)
    yield "self_attn.o_proj.weight", (hidden, queries)
    yield "self_attn.q_norm.weight", (config.head_dim,)
    yield "self_attn.k_norm.weight", (config.head_dim,)


def _deltanet(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    delta, hidden = config.delta, config.hidden_size
    assert delta is not None  # ModelConfig has one wherever a layer is linear
    values = delta.value_heads * delta.value_dim
    yield "linear_attn.in_proj_qkv.weight", (delta.conv_channels, hidden)
    yield "linear_attn.in_proj_z.weight", (values, hidden)
    yield "linear_attn.in_proj_b.weight", (delta.value_heads, hidden)
    yield "linear_attn.in_proj_a.weight", (delta.value_heads, hidden)
    yield "linear_attn.conv1d.weight", (delta.conv_channels, 1, delta.conv_kernel)
    yield "linear_attn.A_log", (delta.value_heads,)
    yield "linear_attn.dt_bias", (delta.value_heads,)
    yield "linear_attn.norm.weight", (delta.value_dim,)
    yield "linear_attn.out_proj.weight", (hidden, values)


def _sparse_mlp(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None  # ModelConfig has one wherever a layer is sparse
    yield "mlp.gate.weight", (moe.num_experts, hidden)
    yield "mlp.experts.gate_up_proj", (moe.num_experts, 2 * moe.intermediate_size, hidden)
    yield "mlp.experts.down_proj", (moe.num_experts, hidden, moe.intermediate_size)
    if moe.shared_intermediate_size:
        yield from _dense_mlp("mlp.shared_expert", hidden, moe.shared_intermediate_size)
        yield "mlp.shared_expert_gate.weight", (1, hidden)


def _dense_mlp(name: str, hidden: int, intermediate: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.gate_proj.weight", (intermediate, hidden)
    yield f"{name}.up_proj.weight", (intermediate, hidden)
    yield f"{name}.down_proj.weight", (hidden, intermediate)
