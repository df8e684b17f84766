"""Networks that appear among the measurements but that Stoker does not run, counted from their config.json: enough to
predict what a step reads, and to plan with: their bytes are counted, how engines lay out their caches is not
modelled. A network of which only the size is known is counted from that."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from stoker.plan.models import Model, from_config
from stoker.sizes.network import Weight
from stoker.sizes.weights import FEEDING
from stoker.weights.config_fields import Fields
from stoker.weights.model_config import FAMILIES, FULL, LINEAR, SLIDING
from stoker.weights.names import (
    ATTENTION,
    DELTANET,
    DENSE,
    EMBEDDING,
    HEAD,
    OTHER,
    ROUTED,
    ROUTER,
    SHARED,
    group_of,
)

NORMS = group_of("norm.weight")
TYPICAL_LAYERS = 40
TYPICAL_TOP_K = 8
ALWAYS = 0.4  # of the active parameters, that no router chooses: attention, shared experts, head
BY_SIZE = "known by its size alone: its caches are not counted, and its layers are assumed"
MAMBA, MOE, MLP, ATTEND = "M", "E", "-", "*"  # of a Nemotron-H pattern


def stranger(config: Mapping[str, Any], name: str, source: str) -> Model:
    if config["model_type"] in FAMILIES:
        return from_config(config, name, name, source=source)
    build = BUILDERS.get(str(config["model_type"]))
    if build is None:
        from stoker.plan.general import general

        return general(config, name, source)
    return build(Fields({**_every(config), **config}, name), name, source)


def _every(config: Mapping[str, Any]) -> dict[str, Any]:
    """Files list the kind of every layer; tables here say every how many attention is full."""
    types = config.get("layer_types")
    full = isinstance(types, list) and FULL in types
    return {"full_attention_every": types.index(FULL) + 1} if full and isinstance(types, list) else {}


def sized(name: str, active_parameters: float, parameters: float) -> Model:
    """A network of which only two sizes are known, to be planned: what every token reads, and what lies in experts. Its
    caches are unknown and not counted."""
    if parameters < 1.2 * active_parameters:
        return replace(by_size(name, active_parameters), note=BY_SIZE)
    always = ALWAYS * active_parameters
    experts = round(TYPICAL_TOP_K * (parameters - always) / (active_parameters - always))
    plain = by_size(name, always)
    rows = round((parameters - always) / experts / 4096 / TYPICAL_LAYERS)
    routed = Weight("experts", ROUTED, ROUTED, (experts, rows, 4096), TYPICAL_LAYERS)
    return replace(plain, experts=experts, top_k=TYPICAL_TOP_K, weights=(*plain.weights, routed), note=BY_SIZE)


def by_size(name: str, active_parameters: float) -> Model:
    """Reads its active parameters once per token, in as many layers as most have; no KV cache, no drafts."""
    return Model(
        name=name, family="unknown", hidden_size=1, layer_types=("unknown",) * TYPICAL_LAYERS, num_heads=1,
        num_kv_heads=1, head_dim=1, vocab_size=1, max_positions=1 << 20, experts=0, top_k=0, sliding_window=0,
        mtp_layers=0, delta=None, weights=(matrix("all", DENSE, round(active_parameters / 4096), 4096),),
    )  # fmt: skip


def matrix(name: str, part: str, rows: int, columns: int, count: int = 1, group: str = "") -> Weight:
    return Weight(name, group or part, part, (rows, columns), count)


def ends(f: Fields, hidden: int) -> list[Weight]:
    vocab = f.integer("vocab_size")
    ends = [matrix("embed_tokens", EMBEDDING, vocab, hidden), Weight("norm", NORMS, NORMS, (hidden,))]
    return ends if f.get("tie_word_embeddings", False) else [*ends, matrix("lm_head", HEAD, vocab, hidden)]


def network(f: Fields, name: str, source: str, types: list[str], weights: list[Weight], **extra: Any) -> Model:
    return Model(
        name=name,
        family=str(f.get("model_type")),
        hidden_size=f.integer("hidden_size"),
        layer_types=tuple(types),
        num_heads=f.integer("num_attention_heads"),
        num_kv_heads=f.integer("num_key_value_heads", f.integer("num_attention_heads")),
        head_dim=f.integer("head_dim", 0, 0) or f.integer("hidden_size") // f.integer("num_attention_heads"),
        vocab_size=f.integer("vocab_size"),
        max_positions=f.integer("max_position_embeddings", 131_072),
        experts=extra.pop("experts", 0),
        top_k=extra.pop("top_k", 0),
        sliding_window=f.integer("sliding_window", 0, minimum=0) if f.get("sliding_window") else 0,
        mtp_layers=0,
        delta=None,
        weights=tuple(weight for weight in weights if weight.count),
        source=source,
        **extra,
    )


def _llama(f: Fields, name: str, source: str) -> Model:
    """Llama, Mistral and Ministral, Qwen3, Muse; and LFM2, where short convolutions stand in for most attention."""
    hidden, layers, convs = f.integer("hidden_size"), f.integer("num_hidden_layers"), f.integer("conv_layers", 0, 0)
    queries = f.integer("num_attention_heads") * f.integer("head_dim")
    keys = f.integer("num_key_value_heads") * f.integer("head_dim")
    width, attending = f.integer("intermediate_size"), layers - convs
    weights = [
        *ends(f, hidden),
        matrix("q_proj, o_proj, gate", ATTENTION, queries, hidden, (3 if f.get("output_gate") else 2) * attending),
        matrix("k_proj, v_proj", ATTENTION, keys, hidden, 2 * attending),
        matrix("conv.in_proj", DELTANET, 3 * hidden, hidden, convs),
        matrix("conv.out_proj", DELTANET, hidden, hidden, convs),
        Weight("conv.conv", DELTANET, DELTANET, (hidden * f.integer("conv_L_cache", 1),), convs),
        matrix("gate, up, down", DENSE, width, hidden, 3 * layers),
        Weight("layernorms", NORMS, NORMS, (hidden,), f.integer("norms_per_layer", 2) * layers),
        Weight("q_norm, k_norm", NORMS, NORMS, (f.integer("head_dim"),), 2 * attending * f.integer("qk_norm", 0, 0)),
    ]
    every = f.integer("full_attention_every", 1)
    types = [FULL if (i + 1) % every == 0 else SLIDING for i in range(attending)]
    return network(f, name, source, types + ["convolution"] * convs, weights)


def _gemma4(f: Fields, name: str, source: str) -> Model:
    """Sliding and full layers with heads of their own; the last layers may have no keys and values, and wider MLPs; the
    small models add an embedding per layer, of which a token takes a row."""
    hidden, layers, width = f.integer("hidden_size"), f.integer("num_hidden_layers"), f.integer("intermediate_size")
    heads, kv_heads, dim = (f.integer(k) for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    full_dim, full_kv = f.integer("global_head_dim"), f.integer("num_global_key_value_heads", kv_heads)
    shared, every = f.integer("num_kv_shared_layers", 0, 0), f.integer("full_attention_every")
    per_layer, experts = f.integer("hidden_size_per_layer_input", 0, 0), f.integer("num_experts", 0, 0)
    expert_width = f.integer("moe_intermediate_size", 0, 0)
    types = [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)]
    weights = ends(f, hidden)
    for i, kind in enumerate(types):
        size, keys = (full_dim, full_kv) if kind == FULL else (dim, kv_heads)
        own = 0 if i >= layers - shared else 1 if kind == FULL and f.get("attention_k_eq_v") else 2
        wide = 2 if i >= layers - shared and f.get("use_double_wide_mlp") else 1
        weights += [
            matrix("q_proj, o_proj", ATTENTION, heads * size, hidden, 2),
            matrix("k_proj, v_proj", ATTENTION, keys * size, hidden, own),
            matrix("gate, up, down", DENSE, wide * width, hidden, 3),
            Weight("norms", NORMS, NORMS, (4 * hidden + (2 if own else 1) * size + 1,)),
        ]
    if per_layer:
        weights += [
            matrix("per_layer_gate, per_layer_projection", DENSE, per_layer, hidden, 2 * layers),
            matrix("per_layer_model_projection", DENSE, per_layer * layers, hidden),
            matrix("embed_tokens_per_layer", OTHER, f.integer("vocab_size"), per_layer * layers),
            Weight("per_layer_norms", NORMS, NORMS, (hidden * layers + per_layer,)),
        ]
    if experts:
        weights += [
            Weight("experts: gate, up, down", ROUTED, ROUTED, (experts, expert_width, hidden), 3 * layers),
            matrix("router", ROUTER, experts, hidden, layers),
            Weight("router scales, norms", NORMS, NORMS, (experts + 4 * hidden,), layers),
        ]
    return network(f, name, source, types, weights, experts=experts, top_k=f.integer("top_k_experts", 0, 0),
                  full_kv=2 * full_kv * full_dim)  # fmt: skip


def _nemotron_h(f: Fields, name: str, source: str) -> Model:
    """Mamba-2, attention, experts and MLPs, one after the other as the pattern says. A layer is a mixer and what
    follows it. Some of NVIDIA's files leave the Mamba layers before attention in 16 bit: a part of their own."""
    pattern, hidden = str(f.get("hybrid_override_pattern")), f.integer("hidden_size")
    queries = f.integer("num_attention_heads") * f.integer("head_dim")
    keys = f.integer("num_key_value_heads") * f.integer("head_dim")
    heads, groups, state = f.integer("mamba_num_heads"), f.integer("n_groups"), f.integer("ssm_state_size")
    inner = heads * f.integer("mamba_head_dim")
    convolved = inner + 2 * groups * state
    weights = [*ends(f, hidden), Weight("layernorms", NORMS, NORMS, (hidden,), len(pattern))]
    mixers = [i for i, kind in enumerate(pattern) if kind in (MAMBA, ATTEND)]
    before = {mixers[k - 1] for k, i in enumerate(mixers) if pattern[i] == ATTEND and k}
    for i in mixers:
        if pattern[i] == ATTEND:
            weights.append(matrix("q_proj, o_proj", ATTENTION, queries, hidden, 2))
            weights.append(matrix("k_proj, v_proj", ATTENTION, keys, hidden, 2))
            continue
        part = FEEDING if i in before else DELTANET
        weights.append(matrix("mamba.in_proj", part, inner + convolved + heads, hidden, group=DELTANET))
        weights.append(matrix("mamba.out_proj", part, hidden, inner, group=DELTANET))
        conv = convolved * (f.integer("conv_kernel") + 1)  # and its bias
        weights.append(Weight("mamba.conv, A, D, dt, norm", DELTANET, DELTANET, (conv + 3 * heads + inner,)))
    weights.append(matrix("up, down", DENSE, f.integer("intermediate_size"), hidden, 2 * pattern.count(MLP)))
    sparse, experts = pattern.count(MOE), 0
    if sparse:
        experts, width = f.integer("n_routed_experts"), f.integer("moe_intermediate_size")
        latent = f.integer("moe_latent_size", 0, 0)
        shared = f.integer("moe_shared_expert_intermediate_size")
        weights += [
            Weight("experts: up, down", ROUTED, ROUTED, (experts, width, latent or hidden), 2 * sparse),
            matrix("shared_experts: up, down", SHARED, shared, hidden, 2 * sparse),
            matrix("to and from the latent", DENSE, latent, hidden, 2 * sparse if latent else 0),
            matrix("gate", ROUTER, experts, hidden, sparse),
            Weight("gate.bias", ROUTER, ROUTER, (experts,), sparse),
        ]
    types = [FULL if pattern[i] == ATTEND else LINEAR for i in mixers]
    return network(f, name, source, types, weights, experts=experts, top_k=f.integer("num_experts_per_tok", 0, 0),
                  mamba_bytes=4 * types.count(LINEAR) * inner * state)  # fmt: skip


BUILDERS: dict[str, Callable[[Fields, str, str], Model]] = {
    "llama": _llama,
    "ministral3": _llama,
    "muse_glimmer": _llama,
    "lfm2": _llama,
    "gemma4": _gemma4,
    "nemotron_h": _nemotron_h,
}
