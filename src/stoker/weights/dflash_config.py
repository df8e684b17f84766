"""config.json of a DFlash drafter, in the spellings z-lab has published. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError, brief
from stoker.weights.config_fields import Fields
from stoker.weights.json_file import read_json
from stoker.weights.model_config import FULL, SLIDING, ModelConfig, rope_of

ARCHITECTURE = "DFlashDraftModel"


@dataclass(frozen=True)
class DFlashConfig:
    hidden_size: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    sliding_window: int
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]  # 0-based trunk layers whose output is read
    causal: bool | None  # attention inside a block; None: sliding layers are causal, full layers are not

    @classmethod
    def load(cls, directory: Path) -> "DFlashConfig":
        path = directory / "config.json"
        return cls.from_dict(read_json(path), where=str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str = "config.json") -> "DFlashConfig":
        fields = Fields(raw, where)
        refuse_other_drafters(raw, where)
        own = fields.object("dflash_config")
        theta, partial = rope_of(fields)
        for name, found, supported in (
            ("partial_rotary_factor", partial, 1.0),
            ("hidden_act", fields.get("hidden_act", "silu"), "silu"),
            ("attention_bias", fields.get("attention_bias", False), False),
        ):
            if found != supported:
                raise ConfigError(f"{where}: {name} is {brief(found)}; Stoker drafts only with {supported!r}.")
        vocab, mask = fields.integer("vocab_size"), own.integer("mask_token_id", minimum=0)
        if mask >= vocab:
            raise ConfigError(f"{where}: mask_token_id {mask} is outside the vocabulary of {vocab}.")
        kinds, window, forced = _attention_kinds(fields, own)
        # use_swa without layer_types adds windows and leaves attention inside the block bidirectional
        causal = fields.get("is_causal", own.get("causal", False if forced else None))
        if causal not in (None, True, False):
            raise ConfigError(f"{where}: causal is {brief(causal)}, expected true or false.")
        return cls(
            hidden_size=fields.integer("hidden_size"),
            layer_types=kinds,
            num_heads=fields.integer("num_attention_heads"),
            num_kv_heads=fields.integer("num_key_value_heads"),
            head_dim=fields.integer("head_dim"),
            intermediate_size=fields.integer("intermediate_size"),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            vocab_size=vocab,
            sliding_window=window,
            block_size=own.integer("block_size", fields.get("block_size"), minimum=2),
            mask_token_id=mask,
            taps=_taps(fields, own),
            causal=causal,
        )

    def check_fits(self, trunk: ModelConfig) -> None:
        """A drafter works with the one trunk it was made for."""
        if (self.hidden_size, self.vocab_size) != (trunk.hidden_size, trunk.vocab_size):
            raise ConfigError(
                f"the drafter has hidden_size {self.hidden_size} and vocab_size {self.vocab_size}, the model "
                f"{trunk.hidden_size} and {trunk.vocab_size}: it belongs to another model."
            )
        if max(self.taps) >= trunk.num_layers:
            raise ConfigError(
                f"the drafter reads layer {max(self.taps)} (target_layer_ids), the model has {trunk.num_layers} layers."
            )


def refuse_other_drafters(raw: dict[str, Any], where: str) -> None:
    """Variants of DFlash share its config keys but have parts that Stoker does not implement."""
    names = raw.get("architectures")
    other = next((name for name in names if name != ARCHITECTURE), None) if isinstance(names, list) else None
    if other is not None:
        raise ConfigError(
            f"{where}: the drafter's architecture is {str(other)[:80]!r}; Stoker computes {ARCHITECTURE}. Use a DFlash "
            "drafter of this model (z-lab's repositories named ...-DFlash), or draft with --draft mtp."
        )


def _attention_kinds(fields: Fields, own: Fields) -> tuple[tuple[str, ...], int, bool]:
    """The kind of each layer, the window, and whether use_swa made all layers sliding.

    Configs spell the window as sliding_window beside layer_types, or as use_swa with swa_window_size.
    """
    layers = fields.integer("num_hidden_layers")
    kinds = fields.get("layer_types") or [FULL] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise fields.error("layer_types", f"{layers} entries of {FULL} or {SLIDING}")
    use_swa = own.get("use_swa", fields.get("use_swa", False))
    if use_swa not in (True, False, None):
        raise ConfigError(f"{fields.where}: use_swa is {brief(use_swa)}, expected true or false.")
    given = [
        holder.integer(name, 0, minimum=0)
        for name in ("sliding_window", "swa_window_size")
        for holder in (fields, own)
        if holder.get(name) is not None
    ]
    windows = sorted({window for window in given if window})
    forced = bool(use_swa) and SLIDING not in kinds
    if forced:
        kinds = [SLIDING] * layers
    if SLIDING not in kinds:
        return tuple(kinds), 0, False
    if len(windows) != 1:
        found = " and ".join(map(str, windows)) if windows else "missing"
        named = "use_swa" if forced else f"layer_types names {SLIDING}"
        raise ConfigError(
            f"{fields.where}: {named}, and its window (sliding_window or swa_window_size) is {found}; "
            "expected one number."
        )
    return tuple(kinds), windows[0], forced


def _taps(fields: Fields, own: Fields) -> tuple[int, ...]:
    """target_layer_ids, or where z-lab's own code puts them: evenly from layer 1 to the third from the end."""
    if own.get("target_layer_ids") is not None:
        return own.integers("target_layer_ids")
    trunk, layers = fields.integer("num_target_layers", minimum=4), fields.integer("num_hidden_layers")
    if layers == 1:
        return (trunk // 2,)
    return tuple(round(1 + i * (trunk - 4) / (layers - 1)) for i in range(layers))
