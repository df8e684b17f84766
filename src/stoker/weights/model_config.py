"""The shape of a network, read from a Hugging Face `config.json`. No torch: planning and inspection use it too.

Whatever Stoker would compute differently from what the file asks for is refused here, by name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import CheckpointError, ConfigError, brief
from stoker.weights.config_fields import Fields
from stoker.weights.json_file import read_json

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}  # that models compute in
# model_type of the whole file or of its text part -> family
FAMILIES = {
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_moe": "qwen3_moe",
}

MOST_EXPERTS = 200_000  # of all layers together; the largest published have 30,720


@dataclass(frozen=True)
class MoeConfig:
    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int  # 0: no shared expert
    renormalize: bool  # divide the top-k weights by their sum


@dataclass(frozen=True)
class DeltaConfig:
    """GatedDeltaNet. Value head h reads key head h // (value_heads // key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class ModelConfig:
    family: str  # qwen3_5_moe, qwen3_5 or qwen3_moe
    hidden_size: int
    layer_types: tuple[str, ...]  # FULL or LINEAR per layer
    sparse_layers: tuple[bool, ...]  # True: mixture of experts, False: dense MLP
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    max_positions: int
    tie_word_embeddings: bool
    attention_gate: bool  # q_proj also yields a gate per head
    norm_offset: bool  # RMSNorm multiplies by (1 + w) instead of w
    intermediate_size: int  # of dense MLPs, 0 if there are none
    moe: MoeConfig | None
    delta: DeltaConfig | None
    mtp_layers: int
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def dtype_bytes(self) -> int:
        """Of an activation. Raises a CheckpointError for a dtype that nothing is computed in."""
        if self.dtype not in DTYPE_BYTES:
            raise CheckpointError(
                f"config.json asks for dtype {brief(self.dtype)}, expected one of {', '.join(DTYPE_BYTES)}."
            )
        return DTYPE_BYTES[self.dtype]

    @classmethod
    def load(cls, directory: Path) -> "ModelConfig":
        path = directory / "config.json"
        config = cls.from_dict(read_json(path), where=str(path))
        generation = directory / "generation_config.json"
        if generation.exists():  # config.json names only <|endoftext|>; the end of a turn is listed here
            eos = _eos(Fields(read_json(generation), str(generation)))
            config = _with_eos(config, eos)
        return config

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str = "config.json") -> "ModelConfig":
        text = {**raw, **raw["text_config"]} if isinstance(raw.get("text_config"), dict) else raw
        model_type = raw.get("model_type", text.get("model_type"))
        family = FAMILIES.get(str(model_type))
        if family is None:
            raise ConfigError(
                f"{where}: model_type is {brief(model_type)}; Stoker's engine computes {', '.join(sorted(FAMILIES))}."
            )
        fields = Fields(text, where)
        _refuse_unsupported(fields)
        layers = fields.integer("num_hidden_layers")
        hybrid = family != "qwen3_moe"
        layer_types = _layer_types(fields, layers) if hybrid else (FULL,) * layers
        sparse = _sparse_layers(fields, layers, family)
        moe = _moe(fields, family) if any(sparse) else None
        if moe and sum(sparse) * moe.num_experts > MOST_EXPERTS:
            raise ConfigError(
                f"{where}: {sum(sparse):,} layers of num_experts {moe.num_experts:,} are "
                f"{sum(sparse) * moe.num_experts:,} experts, expected at most {MOST_EXPERTS:,}."
            )
        heads = fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads")
        if heads % kv_heads:
            raise ConfigError(
                f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}."
            )
        head_dim = fields.integer("head_dim", fields.integer("hidden_size") // heads)
        theta, partial = rope_of(fields, default_partial=0.25 if hybrid else 1.0)
        rotary_dim = int(head_dim * partial)
        if rotary_dim < 2 or rotary_dim % 2:
            raise ConfigError(
                f"{where}: head_dim {head_dim} with partial_rotary_factor {partial:g} makes {rotary_dim} rotary "
                "dimensions, expected an even number."
            )
        return cls(
            family=family,
            hidden_size=fields.integer("hidden_size"),
            layer_types=layer_types,
            sparse_layers=sparse,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=theta,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings"),
            # the top level takes precedence: text_config of multimodal files repeats a default that does not apply
            tie_word_embeddings=(Fields(raw, where) if "tie_word_embeddings" in raw else fields).boolean(
                "tie_word_embeddings"
            ),
            attention_gate=hybrid,
            norm_offset=hybrid,
            intermediate_size=0 if all(sparse) else fields.integer("intermediate_size"),
            moe=moe,
            delta=_delta(fields) if LINEAR in layer_types else None,
            mtp_layers=fields.integer("mtp_num_hidden_layers", 0, minimum=0) if hybrid else 0,
            dtype=str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"),
            eos_token_ids=_eos(fields),
        )


def rope_of(fields: Fields, default_partial: float = 1.0) -> tuple[float, float]:
    """theta and partial_rotary_factor, which stand in rope_parameters, at the top level, or both. Older files name a
    scaling in rope_scaling, which takes precedence."""
    sources = [fields.object(name) for name in ("rope_scaling", "rope_parameters")]
    for source in sources:
        kind = source.get("rope_type", source.get("type", "default"))
        if kind != "default":
            raise ConfigError(
                f"{source.where}: rope_type is {brief(kind)}; Stoker computes only 'default' "
                f"(contexts up to max_position_embeddings {brief(fields.get('max_position_embeddings'))}). "
                "Remove the rope scaling to run within that length."
            )
    sources.append(fields)
    theta = next((source.number("rope_theta") for source in sources if source.get("rope_theta") is not None), None)
    if theta is None:
        raise ConfigError(f"{fields.where}: rope_theta is missing (looked in rope_parameters and at the top level).")
    partial = next((s.number("partial_rotary_factor") for s in sources if s.get("partial_rotary_factor")), None)
    if partial is not None and partial > 1.0:
        raise ConfigError(f"{fields.where}: partial_rotary_factor is {partial}, expected at most 1.")
    return theta, partial or default_partial


def _refuse_unsupported(fields: Fields) -> None:
    for name, supported in {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "output_gate_type": ("swish", "silu"),
        "mtp_use_dedicated_embeddings": (False,),
    }.items():
        value = fields.get(name, supported[0])
        if value not in supported:
            expected = " or ".join(repr(s) for s in supported)
            raise ConfigError(f"{fields.where}: {name} is {brief(value)}; Stoker computes only {expected}.")
    if fields.integer("mtp_num_hidden_layers", 0, minimum=0) > 1:
        raise ConfigError(
            f"{fields.where}: mtp_num_hidden_layers is {brief(fields.get('mtp_num_hidden_layers'))}; "
            "Stoker computes MTP heads of one layer."
        )


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    kinds = fields.get("layer_types")
    if kinds is None:
        interval = fields.integer("full_attention_interval", 4)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers))
    if not isinstance(kinds, list):
        raise fields.error("layer_types", "a list")
    if len(kinds) != layers:
        raise ConfigError(f"{fields.where}: layer_types has {len(kinds)} entries, num_hidden_layers is {layers}.")
    for i, kind in enumerate(kinds):
        if kind not in (FULL, LINEAR):
            raise ConfigError(f"{fields.where}: layer_types[{i}] is {brief(kind)}, expected {FULL!r} or {LINEAR!r}.")
    return tuple(kinds)


def _sparse_layers(fields: Fields, layers: int, family: str) -> tuple[bool, ...]:
    if family == "qwen3_5":
        return (False,) * layers
    dense, stride = frozenset(fields.integers("mlp_only_layers", [])), fields.integer("decoder_sparse_step", 1)
    return tuple(i not in dense and (i + 1) % stride == 0 for i in range(layers))


def _moe(fields: Fields, family: str) -> MoeConfig:
    moe = MoeConfig(
        num_experts=fields.integer("num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", 0, minimum=0)
        if family == "qwen3_5_moe"
        else 0,
        # Qwen3.5 has no such field and always renormalises
        renormalize=True if family == "qwen3_5_moe" else fields.boolean("norm_topk_prob"),
    )
    if not 0 < moe.top_k <= moe.num_experts:
        raise ConfigError(
            f"{fields.where}: num_experts_per_tok is {moe.top_k}, expected 1 to num_experts {moe.num_experts}."
        )
    return moe


def _delta(fields: Fields) -> DeltaConfig:
    delta = DeltaConfig(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim"),
    )
    if delta.value_heads % delta.key_heads:
        raise ConfigError(
            f"{fields.where}: linear_num_value_heads {delta.value_heads} is not a multiple of "
            f"linear_num_key_heads {delta.key_heads}."
        )
    return delta


def _eos(fields: Fields) -> tuple[int, ...]:
    if isinstance(fields.get("eos_token_id"), list):
        return fields.integers("eos_token_id")
    return () if fields.get("eos_token_id") is None else (fields.integer("eos_token_id", minimum=0),)


def _with_eos(config: ModelConfig, extra: tuple[int, ...]) -> ModelConfig:
    merged = tuple(dict.fromkeys(config.eos_token_ids + extra))
    return ModelConfig(**{**config.__dict__, "eos_token_ids": merged})
