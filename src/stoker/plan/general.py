"""Networks counted from the usual fields of a config.json: attention with grouped or latent keys, MLPs or experts.

Enough to weigh them and to predict what a step reads. Stoker's engine does not run them, their drafters are not
modelled, and a family that is in no list here is taken for a plain transformer, which its `note` says."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stoker.errors import ConfigError
from stoker.plan.families import NORMS, ends, matrix, network
from stoker.plan.models import Model
from stoker.sizes.network import Weight
from stoker.weights.config_fields import Fields
from stoker.weights.model_config import FULL, LINEAR, SLIDING
from stoker.weights.names import ATTENTION, DELTANET, DENSE, OTHER, ROUTED, ROUTER, SHARED

# of which the counts below are those of the built networks (tests), or agree with the published sizes
COUNTED = (
    "llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "mixtral", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
    "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "kimi_k2", "minimax_m2", "minimax_m3_vl_text", "mistral4", "step3p7",
    "qwen4_exp",
)  # fmt: skip
PLAIN = "of a family ({}) that the planner does not know, and counted as a plain transformer from its config.json"
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")


def general(config: Mapping[str, Any], name: str, source: str) -> Model:
    kind = str(config.get("model_type", "")).removesuffix("_text")
    fields = Fields(dict(config), source or name)
    lacking = [k for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size") if k not in config]
    if lacking:
        raise ConfigError(
            f"{source or name}: model_type is {kind!r}, and to count its layers {', '.join(lacking)} lack."
        )
    known = kind in COUNTED or f"{kind}_text" in COUNTED
    return BUILDERS.get(kind, _usual)(fields, name, source, "" if known else PLAIN.format(kind))


def _first(f: Fields, names: tuple[str, ...], default: int = 0) -> int:
    return next((f.integer(name) for name in names if f.get(name)), default)


def _usual(f: Fields, name: str, source: str, note: str) -> Model:
    layers = f.integer("num_hidden_layers")
    types = _types(f, layers)
    attention, kept = (_latent if f.get("kv_lora_rank") else _grouped)(f, layers)
    weights = [*ends(f, f.integer("hidden_size")), *attention, *_mlps(f, layers)]
    return _network(f, name, source, types, weights, kept, note)


def _types(f: Fields, layers: int) -> list[str]:
    given = f.get("layer_types")
    if not isinstance(given, list) or len(given) != layers:
        return [FULL] * layers
    return [SLIDING if "sliding" in str(kind) else FULL for kind in given]


def _grouped(f: Fields, layers: int) -> tuple[list[Weight], int]:
    """Weights, and values that a token adds to a layer's cache; 0: keys and values of its heads."""
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    dim = _head_dim(f)
    kv = f.integer("num_key_value_heads", heads) * dim
    return [
        matrix("q_proj, o_proj", ATTENTION, heads * dim, hidden, 2 * layers),
        matrix("k_proj, v_proj", ATTENTION, kv, hidden, 2 * layers),
    ], 0


def _head_dim(f: Fields) -> int:
    return f.integer("head_dim") if f.get("head_dim") else f.integer("hidden_size") // f.integer("num_attention_heads")


def _latent(f: Fields, layers: int) -> tuple[list[Weight], int]:
    """Keys and values out of one latent vector, which alone is cached, with the rotated part of the keys."""
    hidden, heads, rank = f.integer("hidden_size"), f.integer("num_attention_heads"), f.integer("kv_lora_rank")
    plain, rotated = f.integer("qk_nope_head_dim"), f.integer("qk_rope_head_dim", 0, 0)
    values, queries = f.integer("v_head_dim"), f.integer("q_lora_rank") if f.get("q_lora_rank") else 0
    weights = [
        matrix("kv_a_proj", ATTENTION, rank + rotated, hidden, layers),
        matrix("kv_b_proj", ATTENTION, heads * (plain + values), rank, layers),
        matrix("o_proj", ATTENTION, hidden, heads * values, layers),
        matrix("q_b_proj", ATTENTION, heads * (plain + rotated), queries or hidden, layers),
        matrix("q_a_proj", ATTENTION, queries, hidden, layers if queries else 0),
    ]
    kept = rank + rotated
    if f.get("index_n_heads"):
        size, count = f.integer("index_head_dim"), f.integer("index_n_heads")
        weights += [
            matrix("indexer.q", ATTENTION, count * size, queries or hidden, layers),
            matrix("indexer.k, weights", ATTENTION, size + count, hidden, layers),
        ]
        kept += size
    return weights, kept


def _mlps(f: Fields, layers: int) -> Iterator[Weight]:
    hidden, experts = f.integer("hidden_size"), _first(f, EXPERTS)
    if not experts:
        yield matrix("gate, up, down", DENSE, f.integer("intermediate_size"), hidden, 3 * layers)
        return
    given = f.get("mlp_layer_types")
    dense = f.integer("first_k_dense_replace", 0, 0)
    if isinstance(given, list):
        dense = sum(kind == "dense" for kind in given)
    width = _first(f, ("moe_intermediate_size", "intermediate_size"))
    sparse = layers - dense
    shared = _first(f, SHARED_WIDTH, f.integer("n_shared_experts", 0, 0) * width)
    yield Weight("experts: gate, up, down", ROUTED, ROUTED, (experts, width, hidden), 3 * sparse)
    yield matrix("router", ROUTER, experts, hidden, sparse)
    if shared:
        yield matrix("shared experts: gate, up, down", SHARED, shared, hidden, 3 * sparse)
    if dense:
        wide = _first(f, ("dense_intermediate_size", "intermediate_size"))
        yield matrix("gate, up, down", DENSE, wide, hidden, 3 * dense)


def _deepseek_v4(f: Fields, name: str, source: str, note: str) -> Model:
    """One key and value of `head_dim` for all heads, the newest of a window whole, the older ones compressed by each
    layer's ratio; queries and outputs through low ranks; four residual streams."""
    hidden, layers, heads = f.integer("hidden_size"), f.integer("num_hidden_layers"), f.integer("num_attention_heads")
    dim, queries, outputs = f.integer("head_dim"), f.integer("q_lora_rank"), f.integer("o_lora_rank")
    groups, streams = f.integer("o_groups"), f.integer("hc_mult", 4)
    ratios = list(f.integers("compress_ratios"))[:layers]
    overlapping, compressed = sum(r == 4 for r in ratios), sum(r > 4 for r in ratios)
    size, count = f.integer("index_head_dim"), f.integer("index_n_heads")
    weights = [
        *ends(f, hidden),
        matrix("q_a_proj", ATTENTION, queries, hidden, layers),
        matrix("q_b_proj", ATTENTION, heads * dim, queries, layers),
        matrix("kv_proj", ATTENTION, dim, hidden, layers),
        matrix("o_a_proj", ATTENTION, groups * outputs, heads * dim // groups, layers),
        matrix("o_b_proj", ATTENTION, hidden, groups * outputs, layers),
        matrix("compressor: kv, gate", ATTENTION, dim, hidden, 2 * (compressed + 2 * overlapping)),
        matrix("indexer: kv, gate", ATTENTION, 2 * size, hidden, 2 * overlapping),
        matrix("indexer: q", ATTENTION, count * size, queries, overlapping),
        matrix("indexer: weights", ATTENTION, count, hidden, overlapping),
        matrix("streams", OTHER, (2 + streams) * streams, streams * hidden, 2 * layers),
        *_mlps(f, layers),
    ]
    # a layer keeps dim values for every `ratio` tokens; the index of a layer of ratio 4 beside them
    kept = sum((dim + (size if r == 4 else 0)) / r for r in ratios if r)
    return _network(f, name, source, [FULL] * layers, weights, max(1, round(kept / layers)), note)


def _qwen4_exp(f: Fields, name: str, source: str, note: str) -> Model:
    """Three GatedDeltaNet layers to one of sparse attention; experts as in Qwen3.5; residual streams mixed through a
    low rank; and tables of n-grams, of which a token takes a few rows."""
    hidden, layers = f.integer("hidden_size"), f.integer("num_hidden_layers")
    full = layers // f.integer("full_attention_interval", 4)
    linear = layers - full
    heads, kv_heads, dim = (f.integer(k) for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    keys = f.integer("linear_num_key_heads") * f.integer("linear_key_head_dim")
    value_heads, value_dim = f.integer("linear_num_value_heads"), f.integer("linear_value_head_dim")
    values, streams, rank = value_heads * value_dim, f.integer("hc_count"), f.integer("hc_lowrank")
    size, count = f.integer("indexer_head_dim"), f.integer("indexer_n_heads") + f.integer("indexer_kv_heads")
    tables = len(f.integers("ple_layer_ids", []))
    rows, orders = int(f.get("ngram_vocab_size_base", 20_000_000)), f.integer("ngram_size") - 1
    embedded = f.integer("ple_embed_dim")
    types = [FULL if (i + 1) % f.integer("full_attention_interval", 4) == 0 else LINEAR for i in range(layers)]
    weights = [
        *ends(f, hidden),
        matrix("q_proj and gate", ATTENTION, 2 * heads * dim, hidden, full),
        matrix("k_proj, v_proj", ATTENTION, kv_heads * dim, hidden, 2 * full),
        matrix("o_proj", ATTENTION, hidden, heads * dim, full),
        matrix("indexer", ATTENTION, count * size, hidden, full),
        matrix("in_proj_qkv, in_proj_z", DELTANET, 2 * keys + 2 * values, hidden, linear),
        matrix("in_proj_a, in_proj_b", DELTANET, 2 * value_heads, hidden, linear),
        matrix("out_proj", DELTANET, hidden, values, linear),
        Weight("conv1d, A, dt, norm", DELTANET, DELTANET,
               ((2 * keys + values) * f.integer("linear_conv_kernel_dim") + 2 * value_heads + value_dim,), linear),
        matrix("streams: down, up", DENSE, rank, streams * hidden, 2 * (2 * layers + 1)),
        matrix("streams: inject", DENSE, streams, streams * hidden, 2 * layers),
        matrix("ple: key, value", DENSE, (streams + 1) * hidden, embedded, tables),
        matrix("ple: tables of n-grams", OTHER, rows * orders * f.integer("heads_per_ngram"),
               embedded // (orders * f.integer("heads_per_ngram")), tables),
        Weight("norms", NORMS, NORMS, (2 * hidden,), layers),
        matrix("shared_expert_gate", SHARED, 1, hidden, layers),
        *_mlps(f, layers),
    ]  # fmt: skip
    kept = 2 * kv_heads * dim + size // f.integer("indexer_compress_ratio", 4)
    state = 4 * linear * values * f.integer("linear_key_head_dim")
    return _network(f, name, source, types, weights, kept, note, mamba_bytes=state)


def _network(
    f: Fields, name: str, source: str, types: list[str], weights: list[Weight], kept: int, note: str, **extra: Any
) -> Model:
    return network(f, name, source, types, weights, experts=_first(f, EXPERTS), full_kv=kept, note=note,
                   top_k=f.integer("num_experts_per_tok", 0, 0), **extra)  # fmt: skip


BUILDERS: dict[str, Callable[[Fields, str, str, str], Model]] = {
    "deepseek_v4": _deepseek_v4,
    "qwen4_exp": _qwen4_exp,
}
