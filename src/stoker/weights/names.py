"""What the tensors of the networks that Stoker runs are called. No other module spells a tensor's name.

`model_parameters` and `drafter_parameters` list what a config asks for, under the names of the network itself: the
published names without their prefix, experts fused. The rest says how published files spell them. No torch.
"""

import re
from collections.abc import Collection

from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import FULL, ModelConfig

Shape = tuple[int, ...]

HEAD_WEIGHT, EMBEDDING_WEIGHT = "lm_head.weight", "embed_tokens.weight"
HEAD_NAMES = (HEAD_WEIGHT, "language_model.lm_head.weight")
# What stands before `layers.0.`: in multimodal files, in text-only ones, and in bare ones.
TRUNK_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
MTP_PREFIX = "mtp."
VISION_PREFIXES = ("model.visual.", "visual.")
EXPERTS = ".mlp.experts."
SINGLE_EXPERT = re.compile(r"(?<=\.mlp\.experts\.)\d+(?=\.)")
LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
MTP_FC = "mtp.fc.weight"  # joins a hidden state and an embedding; quantisers leave it alone

# The groups that `stoker inspect` and the planner count by.
ROUTED, SHARED, ROUTER = "routed experts", "shared experts", "router"
ATTENTION, DELTANET, DENSE = "attention", "DeltaNet", "dense MLP"
HEAD, EMBEDDING, NORMS = "head", "embedding", "norms"
MTP, VISION, OTHER = "MTP", "vision", "other"

# In the order they are shown: what a step reads first, what it never reads last.
GROUPS = (ROUTED, SHARED, DENSE, DELTANET, ATTENTION, HEAD, ROUTER, NORMS, EMBEDDING, MTP, VISION, OTHER)
_PARTS = (
    (".mlp.experts.", ROUTED),
    (".mlp.shared_expert.", SHARED),
    (".mlp.shared_expert_gate.", ROUTER),
    (".mlp.gate.", ROUTER),
    (".mlp.", DENSE),
    (".linear_attn.", DELTANET),
    (".self_attn.", ATTENTION),
    ("lm_head.", HEAD),
    ("embed_tokens.", EMBEDDING),
    ("layernorm.", NORMS),
)

# in_proj_a and in_proj_b steer the decay of the recurrent state and are tiny: quantisers leave them alone.
_PROJECTIONS = (".q_proj", ".k_proj", ".v_proj", ".o_proj", ".in_proj_qkv", ".in_proj_z", ".out_proj")
_DECAY_GATES = (".in_proj_a", ".in_proj_b")
_IN_FP32 = (".A_log", ".linear_attn.norm")
_NEVER_QUANTISED = ("embed_tokens", "conv1d")


def model_parameters(config: ModelConfig) -> dict[str, Shape]:
    """The trunk and, under `mtp.`, the MTP head where the config has one. A tied head is no parameter of its own."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING_WEIGHT: (config.vocab_size, hidden), "norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes[HEAD_WEIGHT] = (config.vocab_size, hidden)
    for i, (kind, sparse) in enumerate(zip(config.layer_types, config.sparse_layers, strict=True)):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer(config, kind, sparse).items()}
    if config.mtp_layers:
        shapes[MTP_FC] = (hidden, 2 * hidden)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            shapes[f"mtp.{name}.weight"] = (hidden,)
        for name, shape in _layer(config, FULL, sparse=config.moe is not None).items():
            shapes[f"mtp.layers.0.{name}"] = shape
    return shapes


def drafter_parameters(config: DFlashConfig) -> dict[str, Shape]:
    """Those of a DFlash drafter, which is published under exactly these names."""
    hidden, layers = config.hidden_size, range(len(config.layer_types))
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    layer |= _attention(hidden, config.num_heads, config.num_heads, config.num_kv_heads, config.head_dim)
    layer |= _dense_mlp("mlp", hidden, config.intermediate_size)
    return shapes | {f"layers.{i}.{name}": shape for i in layers for name, shape in layer.items()}


def single_experts(name: str, shape: Shape) -> dict[str, Shape]:
    """Fused experts as they are called where each has tensors of its own, expert by expert.

    experts.gate_up_proj [E, 2I, H] becomes experts.E.gate_proj.weight and up_proj.weight [I, H]; down_proj likewise.
    """
    stem, kind = name.rsplit(".", 1)
    count, rows, columns = shape
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    each = (rows // len(parts), columns)
    return {f"{stem}.{expert}.{part}.weight": each for expert in range(count) for part in parts}


def trunk_prefix(modules: Collection[str]) -> str:
    """What stands before `embed_tokens` in these names of modules or tensors or, without one, before their layers."""
    for prefix in TRUNK_PREFIXES:
        if f"{prefix}embed_tokens" in modules or prefix + EMBEDDING_WEIGHT in modules:
            return prefix
    for prefix in TRUNK_PREFIXES:
        if any(name.startswith(f"{prefix}layers.") for name in modules):
            return prefix
    return TRUNK_PREFIXES[0]


def module_of(name: str) -> str:
    """The layer that a plain tensor is the weight of."""
    return name.removesuffix(".weight")


def is_mtp(name: str) -> bool:
    return name.startswith(MTP_PREFIX)


def is_vision(name: str) -> bool:
    return name.startswith(VISION_PREFIXES)


def is_rotary_table(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")


def is_cache_scale(name: str) -> bool:
    return name.endswith((".k_scale", ".v_scale"))


def is_projection(name: str) -> bool:
    """Whether it is a matrix of attention or DeltaNet that quantisers quantise."""
    return module_of(name).endswith(_PROJECTIONS)


def is_decay_gate(name: str) -> bool:
    return module_of(name).endswith(_DECAY_GATES)


def is_published_in_fp32(name: str) -> bool:
    """Two small tensors of a DeltaNet layer are published in either precision and computed in fp32."""
    return module_of(name).endswith(_IN_FP32)


def is_never_quantised(name: str) -> bool:
    """Matrices that are no linear layers: Stoker reads them in 16 or 32 bit only."""
    return module_of(name).endswith(_NEVER_QUANTISED)


def group_of(name: str) -> str:
    """The group of a tensor or of a module. The whole MTP head is one group, whatever its parts are."""
    if is_mtp(name):
        return MTP
    if is_vision(name):
        return VISION
    if is_rotary_table(name):
        return OTHER
    dotted = f"{name}."  # so that "mlp.gate" and "mlp.gate.weight" match alike, and "mlp.gate_proj" does not
    for part, group in _PARTS:
        if part in dotted:
            return group
    return NORMS if dotted.startswith(("norm.", "model.norm.")) or ".norm." in dotted else OTHER


def part_of(name: str) -> str:
    """The group of a tensor or, of one in the MTP head, the group of the trunk that it resembles."""
    return group_of(name.removeprefix(MTP_PREFIX))


def kind_of(module: str) -> str:
    """What a module of a layer is, whichever layer and expert it belongs to; empty for what is in no layer.

    Fused experts and single ones are of one kind, and so are their gate and up projections. The MTP head's fc yields a
    hidden state like an output projection of attention does.
    """
    if module == module_of(MTP_FC):
        return "self_attn.o_proj"
    match = LAYER.search(module)
    if match is None:
        return ""
    name = re.sub(r"\.experts\.\d+\.", ".experts.", module[match.end() :])
    return re.sub(r"\.experts\.(gate|up)_proj", ".experts.gate_up_proj", name)


def _layer(config: ModelConfig, kind: str, sparse: bool) -> dict[str, Shape]:
    hidden, heads = config.hidden_size, config.num_heads
    if kind == FULL:
        queries = heads * (2 if config.attention_gate else 1)  # a gate per head beside its query
        mixer = _attention(hidden, queries, heads, config.num_kv_heads, config.head_dim)
    else:
        mixer = _deltanet(config)
    return {
        "input_layernorm.weight": (hidden,),
        **mixer,
        "post_attention_layernorm.weight": (hidden,),
        **(_sparse_mlp(config) if sparse else _dense_mlp("mlp", hidden, config.intermediate_size)),
    }


def _attention(hidden: int, queries: int, heads: int, kv_heads: int, size: int) -> dict[str, Shape]:
    return {
        "self_attn.q_proj.weight": (queries * size, hidden),
        "self_attn.k_proj.weight": (kv_heads * size, hidden),
        "self_attn.v_proj.weight": (kv_heads * size, hidden),
        "self_attn.o_proj.weight": (hidden, heads * size),
        "self_attn.q_norm.weight": (size,),
        "self_attn.k_norm.weight": (size,),
    }


def _deltanet(config: ModelConfig) -> dict[str, Shape]:
    delta, hidden = config.delta, config.hidden_size
    assert delta is not None  # ModelConfig has one wherever a layer is linear
    values = delta.value_heads * delta.value_dim
    return {
        "linear_attn.in_proj_qkv.weight": (delta.conv_channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (delta.value_heads, hidden),
        "linear_attn.in_proj_a.weight": (delta.value_heads, hidden),
        "linear_attn.conv1d.weight": (delta.conv_channels, 1, delta.conv_kernel),
        "linear_attn.A_log": (delta.value_heads,),
        "linear_attn.dt_bias": (delta.value_heads,),
        "linear_attn.norm.weight": (delta.value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _sparse_mlp(config: ModelConfig) -> dict[str, Shape]:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None  # ModelConfig has one wherever a layer is sparse
    shapes: dict[str, Shape] = {
        "mlp.gate.weight": (moe.num_experts, hidden),
        "mlp.experts.gate_up_proj": (moe.num_experts, 2 * moe.intermediate_size, hidden),
        "mlp.experts.down_proj": (moe.num_experts, hidden, moe.intermediate_size),
    }
    if moe.shared_intermediate_size:
        shapes |= _dense_mlp("mlp.shared_expert", hidden, moe.shared_intermediate_size)
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _dense_mlp(name: str, hidden: int, intermediate: int) -> dict[str, Shape]:
    return {
        f"{name}.gate_proj.weight": (intermediate, hidden),
        f"{name}.up_proj.weight": (intermediate, hidden),
        f"{name}.down_proj.weight": (hidden, intermediate),
    }
