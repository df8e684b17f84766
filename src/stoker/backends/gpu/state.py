"""What a step reads and writes beside weights: a sequence's past, the batch at hand, and memory between launches.

Everything has a fixed place and size for one bucket, so that a CUDA graph can be captured over it. Filling in a batch
is writing numbers into these tensors. Buckets that run in turn share the memory between launches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.backends.family import SPLIT
from stoker.backends.gpu.kernels.attention import Heads, Partials, slots_of
from stoker.backends.gpu.kernels.deltanet import DeltaRing, Sequences
from stoker.backends.gpu.kernels.experts import ExpertBuffers
from stoker.backends.gpu.kernels.launch import Workspace
from stoker.backends.gpu.kernels.linear import Best
from stoker.backends.gpu.kernels.route import Routing
from stoker.backends.gpu.packed import UNIT
from stoker.backends.network.cache import KVPages
from stoker.weights.model_config import FULL, LINEAR, ModelConfig

LINE = 32  # int32 of a cache line: kernels of one layer count in it while those of another read theirs


@dataclass(frozen=True)
class Bucket:
    """Steps of one shape: `rows` rows for each of `sequences` sequences, contexts up to `splits` times 256 keys."""

    sequences: int
    rows: int
    splits: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.rows

    @property
    def cells(self) -> int:
        """Unfinished sums of attention, for each head."""
        return self.tokens * slots_of(self.tokens, self.splits)


class GpuCache:
    """State of every layer, in layer order. DeltaNet layers lie in one block of memory, so that a slot of all of them
    is copied at once."""

    def __init__(self, layers: Sequence[KVPages | DeltaRing], deltas: DeltaRing | None) -> None:
        self.layers = tuple(layers)
        self.deltas = deltas  # with a layer dimension in front; None without such layers

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
        kinds = kinds or config.layer_types
        deltas = None
        if LINEAR in kinds:
            delta = config.delta
            assert delta is not None
            sizes = (delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.conv_kernel)
            deltas = DeltaRing.allocate(slots, window, *sizes, device, layers=kinds.count(LINEAR))
        layers: list[KVPages | DeltaRing] = []
        for kind in kinds:
            if kind == FULL:
                layers.append(KVPages.allocate(pages, config.num_kv_heads, config.head_dim, kv_dtype, device))
            else:
                assert deltas is not None
                layers.append(deltas.layer(sum(isinstance(layer, DeltaRing) for layer in layers)))
        return cls(layers, deltas)


@dataclass(frozen=True)
class StepInputs:
    """int32 throughout; sequence b has rows b * rows .. of `token_ids`."""

    token_ids: Tensor  # [T]
    sequences: Sequences
    tables: Tensor  # [B, P]

    @classmethod
    def allocate(cls, bucket: Bucket, page_size: int, device: torch.device | str) -> "StepInputs":
        """For batches of which every row is a token."""
        inputs = cls.over(cls.numbers(bucket, device), bucket, page_size)
        inputs.sequences.lengths.fill_(bucket.rows)
        return inputs

    @staticmethod
    def numbers(bucket: Bucket, device: torch.device | str) -> Tensor:
        """Memory for a batch: token ids, then slots, cached, lengths and replay of each sequence."""
        return torch.zeros(bucket.tokens + 4 * bucket.sequences, dtype=torch.int32, device=device)

    @classmethod
    def over(cls, numbers: Tensor, bucket: Bucket, page_size: int) -> "StepInputs":
        """Lies in `numbers`, which one copy fills; page tables apart."""
        count = bucket.sequences
        ids, *each = numbers.split([bucket.tokens, count, count, count, count])
        tables = torch.zeros(count, bucket.splits * SPLIT // page_size, dtype=torch.int32, device=numbers.device)
        return cls(ids, Sequences(bucket.rows, *each), tables)


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
    results: Tensor  # int32, for one read by the host: the tile count of each layer in a line of its own, then `tokens`
    tokens: Tensor  # [T] int32: the token with the largest logit after each row
    workspace: Workspace

    @classmethod
    def allocate(
        cls, config: ModelConfig, bucket: Bucket, layers: int, device: torch.device | str, logits: bool = False
    ) -> "StepBuffers":
        return cls.shared(config, [bucket], layers, device, logits)[0]

    @classmethod
    def shared(
        cls, config: ModelConfig, buckets: Sequence[Bucket], layers: int, device: torch.device | str, logits: bool
    ) -> list["StepBuffers"]:
        """Of each bucket, in the same memory: their steps run one after the other."""
        assert config.moe is not None
        tokens, cells = max(bucket.tokens for bucket in buckets), max(bucket.cells for bucket in buckets)
        hidden, moe, fp32 = config.hidden_size, config.moe, torch.float32

        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            # not empty: rows that pad a batch are computed from what lies here, which must be finite
            return torch.zeros(tokens, *shape, dtype=dtype, device=device)

        heads = heads_of(config)
        widths, outs = {FULL: heads.width}, {FULL: heads.count * heads.dim}
        if config.delta is not None:
            values = config.delta.value_heads * config.delta.value_dim
            widths[LINEAR] = config.delta.conv_channels + values + 2 * config.delta.value_heads
            outs[LINEAR] = values
        units = -(-config.vocab_size // (2 * UNIT)) * 2
        rows = max(config.vocab_size, *widths.values(), 2 * hidden) + 32
        results = torch.zeros(layers * LINE + tokens, dtype=torch.int32, device=device)
        counts = results[: layers * LINE].view(layers, LINE)[:, :1]
        largest = cls(
            x=zeros(hidden),
            scaled=zeros(hidden),
            squares=zeros(hidden // UNIT, dtype=fp32),
            projected={kind: zeros(width, dtype=fp32) for kind, width in widths.items()},
            gates=zeros(2 * config.delta.value_heads if config.delta else 0, dtype=fp32),
            mixed={kind: zeros(width) for kind, width in outs.items()},
            partials=Partials.allocate(cells, heads, 1, device),
            experts=ExpertBuffers.allocate(tokens, moe.top_k, moe.intermediate_size, hidden, device),
            routing=tuple(Routing.allocate(tokens, moe.top_k, device, count) for count in counts),
            best=Best(
                zeros(units, dtype=fp32),
                zeros(units, dtype=torch.int32),
                zeros(config.vocab_size, dtype=fp32) if logits else None,
            ),
            results=results,
            tokens=results[layers * LINE :],
            # up to six parts of a row's sum; only projections of few rows have any
            workspace=Workspace.allocate(6 * tokens * 8192, -(-tokens // 8) * rows // UNIT + 1024, device),
        )
        return [largest._cut(bucket) for bucket in buckets]

    def chosen(self, results: Tensor) -> list[int]:
        """`tokens`, as the host reads them in `results`."""
        found: list[int] = results[len(self.routing) * LINE :].tolist()
        return found

    def distinct_experts(self, results: Tensor) -> float:
        """How many tiles of one expert a layer had on average, as the host reads it in `results`. That is its number of
        distinct experts; of more than eight tokens an upper bound, since an expert of many has several."""
        lines = len(self.routing) * LINE
        return float(sum(results[:lines:LINE].tolist())) / len(self.routing)

    def _cut(self, bucket: Bucket) -> "StepBuffers":
        tokens = bucket.tokens
        pairs = tokens * self.routing[0].top_k if self.routing else 0
        best = self.best
        return StepBuffers(
            x=self.x[:tokens],
            scaled=self.scaled[:tokens],
            squares=self.squares[:tokens],
            projected={kind: part[:tokens] for kind, part in self.projected.items()},
            gates=self.gates[:tokens],
            mixed={kind: part[:tokens] for kind, part in self.mixed.items()},
            partials=cut_partials(self.partials, bucket),
            experts=ExpertBuffers(self.experts.hidden[: pairs + tokens], self.experts.outputs[: pairs + tokens]),
            routing=tuple(
                Routing(
                    part.inverse_rms[:tokens],
                    part.experts[:tokens],
                    part.weights[:tokens],
                    part.shared[:tokens],
                    part.tile_expert[:pairs],
                    part.tile_pairs[:pairs],
                    part.tile_count,
                )
                for part in self.routing
            ),
            best=Best(best.values[:tokens], best.rows[:tokens], None if best.logits is None else best.logits[:tokens]),
            results=self.results[: len(self.routing) * LINE + tokens],
            tokens=self.tokens[:tokens],
            workspace=self.workspace,
        )


def cut_partials(partials: Partials, bucket: Bucket) -> Partials:
    """The first cells of a larger memory."""
    tokens, kept = bucket.tokens, slots_of(bucket.tokens, bucket.splits)
    heads, _, dim = partials.sums.shape[1:]
    sums = partials.sums.view(-1)[: bucket.cells * heads * dim].view(tokens, heads, kept, dim)
    highest, totals = (
        part.view(-1)[: bucket.cells * heads].view(tokens, heads, kept) for part in (partials.highest, partials.totals)
    )
    return Partials(sums, highest, totals, bucket.splits)


def heads_of(config: ModelConfig) -> Heads:
    return Heads(config.num_heads, config.num_kv_heads, config.head_dim, config.attention_gate)
