"""What a step reads and writes beside weights: a sequence's past, the batch at hand, and memory between launches.

Everything has a fixed place and size for one bucket, so that a CUDA graph can be captured over it. Filling in a batch
is writing numbers into these tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.model.cache import KVPages
from stoker.model.config import FULL, LINEAR, ModelConfig
from stoker.ops.attention import SPLIT
from stoker.ops.int4_linear import UNIT
from stoker.ops.triton.attention import Heads, Partials
from stoker.ops.triton.deltanet import DeltaRing, Sequences
from stoker.ops.triton.experts import ExpertBuffers
from stoker.ops.triton.launch import Workspace
from stoker.ops.triton.linear import Best
from stoker.ops.triton.route import Routing


@dataclass(frozen=True)
class Bucket:
    """Steps of one shape: `rows` rows for each of `sequences` sequences, contexts up to `splits` times 256 keys."""

    sequences: int
    rows: int
    splits: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.rows


@dataclass(frozen=True)
class GpuCache:
    """State of every layer, in layer order."""

    layers: tuple[KVPages | DeltaRing, ...]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        pages: int,
        slots: int,
        window: int,
        device: torch.device | str,
        kv_dtype: torch.dtype = torch.bfloat16,
        kinds: Sequence[str] = (),
    ) -> "GpuCache":
        """`kinds` of layers, those of the trunk by default; `window` is the longest step of one sequence."""
        delta = config.delta

        def state(kind: str) -> KVPages | DeltaRing:
            if kind == FULL:
                return KVPages.allocate(pages, config.num_kv_heads, config.head_dim, kv_dtype, device)
            assert delta is not None
            sizes = (delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.conv_kernel)
            return DeltaRing.allocate(slots, window, *sizes, device)

        return cls(tuple(state(kind) for kind in kinds or config.layer_types))


@dataclass(frozen=True)
class StepInputs:
    """int32 throughout; sequence b has rows b * rows .. of `token_ids`."""

    token_ids: Tensor  # [T]
    sequences: Sequences
    tables: Tensor  # [B, P]

    @classmethod
    def allocate(cls, bucket: Bucket, page_size: int, device: torch.device | str) -> "StepInputs":
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        count = bucket.sequences
        sequences = Sequences(bucket.rows, zeros(count), zeros(count), zeros(count) + bucket.rows, zeros(count))
        return cls(zeros(bucket.tokens), sequences, zeros(count, bucket.splits * SPLIT // page_size))


@dataclass(frozen=True)
class StepBuffers:
    """Between the launches of one bucket."""

    x: Tensor  # [T, H] bf16: the residual stream
    scaled: Tensor  # [T, H] bf16: times the weight of the norm that comes next
    squares: Tensor  # [T, H / 16] fp32: sums of its squares
    projected: dict[str, Tensor]  # by kind of layer: what the input projections make, fp32
    gates: Tensor  # [T, 2 HV] fp32: DeltaNet's a and b, where their projection is apart
    mixed: dict[str, Tensor]  # by kind of layer: what the output projection reads, bf16
    partials: Partials
    experts: ExpertBuffers
    routing: tuple[Routing, ...]  # of each layer, for whoever counts experts
    best: Best
    tokens: Tensor  # [T] int32: the token with the largest logit after each row
    workspace: Workspace

    @classmethod
    def allocate(
        cls, config: ModelConfig, bucket: Bucket, layers: int, device: torch.device | str, logits: bool = False
    ) -> "StepBuffers":
        assert config.moe is not None
        count, hidden, moe = bucket.tokens, config.hidden_size, config.moe

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        heads = heads_of(config)
        widths, outs = {FULL: heads.width}, {FULL: heads.count * heads.dim}
        if config.delta is not None:
            values = config.delta.value_heads * config.delta.value_dim
            widths[LINEAR] = config.delta.conv_channels + values + 2 * config.delta.value_heads
            outs[LINEAR] = values
        units = -(-config.vocab_size // (2 * UNIT)) * 2
        fp32 = torch.float32
        rows = max(config.vocab_size, *widths.values(), 2 * hidden) + 32
        return cls(
            x=empty(count, hidden),
            scaled=empty(count, hidden),
            squares=empty(count, hidden // UNIT, dtype=fp32),
            projected={kind: empty(count, width, dtype=fp32) for kind, width in widths.items()},
            gates=empty(count, 2 * config.delta.value_heads if config.delta else 0, dtype=fp32),
            mixed={kind: empty(count, width) for kind, width in outs.items()},
            partials=Partials.allocate(count, heads, bucket.splits, device),
            experts=ExpertBuffers.allocate(count, moe.top_k, moe.intermediate_size, hidden, device),
            routing=tuple(Routing.allocate(count, moe.top_k, device) for _ in range(layers)),
            best=Best(
                empty(count, units, dtype=fp32),
                empty(count, units, dtype=torch.int32),
                empty(count, config.vocab_size, dtype=fp32) if logits else None,
            ),
            tokens=empty(count, dtype=torch.int32),
            # up to six parts of a row's sum; only projections of few rows have any
            workspace=Workspace.allocate(6 * count * 8192, -(-count // 8) * rows // UNIT + 1024, device),
        )


def heads_of(config: ModelConfig) -> Heads:
    return Heads(config.num_heads, config.num_kv_heads, config.head_dim, config.attention_gate)
