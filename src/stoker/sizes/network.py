"""What of a network decides its bytes: the shapes of its weights, and what it keeps of each token and each sequence."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Self

from stoker.weights.model_config import FULL, LINEAR, SLIDING, DeltaConfig, ModelConfig
from stoker.weights.names import EMBEDDING, MTP, OTHER, ROUTED, group_of, model_parameters, part_of

if TYPE_CHECKING:
    from stoker.weights.dflash_config import DFlashConfig

Shape = tuple[int, ...]


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

    @classmethod
    def of(cls, config: "DFlashConfig") -> Self:
        return cls(
            repository="",
            hidden_size=config.hidden_size,
            layers=len(config.layer_types),
            sliding_layers=config.layer_types.count(SLIDING),
            sliding_window=config.sliding_window,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            taps=len(config.taps),
            block_size=config.block_size,
        )

    @property
    def parameters(self) -> int:
        hidden, queries = self.hidden_size, self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * self.intermediate_size
        norms = 2 * hidden + 2 * self.head_dim
        return self.taps * hidden * hidden + 2 * hidden + self.layers * (layer + norms)

    def kv_bytes(self, context: int, item: float) -> int:
        """Of one sequence, if sliding layers keep their window alone."""
        full = self.layers - self.sliding_layers
        rows = full * context + self.sliding_layers * min(context, self.sliding_window)
        return int(rows * 2 * self.num_key_value_heads * self.head_dim * item)


@dataclass(frozen=True, kw_only=True)
class Network:
    """What of a network decides its bytes."""

    hidden_size: int
    layer_types: tuple[str, ...]
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    experts: int  # 0: dense
    top_k: int
    mtp_layers: int
    delta: DeltaConfig | None
    weights: tuple[Weight, ...]
    sliding_window: int = 0
    vision_parameters: int = 0
    drafter: Drafter | None = None
    full_kv: int = 0  # values a token adds to a full layer's cache; 0: keys and values of num_kv_heads
    mamba_bytes: int = 0  # fp32 state of one sequence, of Mamba instead of DeltaNet layers

    @classmethod
    def of(cls, config: ModelConfig, /, **more: Any) -> Self:
        """`more` are fields of a subclass, or a drafter."""
        moe = config.moe
        return cls(
            hidden_size=config.hidden_size,
            layer_types=config.layer_types,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            experts=moe.num_experts if moe else 0,
            top_k=moe.top_k if moe else 0,
            mtp_layers=config.mtp_layers,
            delta=config.delta,
            weights=tuple(_weights(config)),
            **more,
        )

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

    def conv_bytes(self, taps: int | None = None, item: int = 2) -> int:
        """Inputs the causal convolutions look back on; `taps` other than kernel - 1 where an engine keeps more."""
        if not self.delta:
            return 0
        rows = self.delta.conv_kernel - 1 if taps is None else taps
        return self.layers_of(LINEAR) * self.delta.conv_channels * rows * item


def _weights(config: ModelConfig) -> Iterator[Weight]:
    for name, shape in model_parameters(config).items():
        group = group_of(name)
        part = part_of(name)
        if part == ROUTED and name.endswith("gate_up_proj"):  # stored as two matrices per expert
            experts, rows, columns = shape
            yield Weight(name, group, part, (experts, rows // 2, columns), 2)
        else:
            yield Weight(name, group, part, shape)
