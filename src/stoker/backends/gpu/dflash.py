"""Drafting with a DFlash network on the GPU: context keys and values from a step's taps, then one block for all drafts.

The context of all layers comes from one product, since every layer reads the same features. Rows of rejected drafts
leave keys behind the accepted ones; the next block, and then the next step, overwrite them before anyone sees them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.kernels.attention import AttentionWeights, Heads, Pages, Partials, Sight, attention
from stoker.backends.gpu.kernels.drafter import ContextPages, ContextWeights, remember, swiglu
from stoker.backends.gpu.kernels.launch import Workspace
from stoker.backends.gpu.kernels.linear import Best, Norm, Stream, linear
from stoker.backends.gpu.kernels.rows import begin, best_tokens
from stoker.backends.gpu.mtp import confidence
from stoker.backends.gpu.packed import UNIT, PackedWeight
from stoker.backends.gpu.state import Bucket, StepInputs, cut_partials
from stoker.backends.gpu.weights import StepWeights, pack, rope_of, scale_of
from stoker.backends.network.dflash import DFlash, DFlashLayer
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import SLIDING


@dataclass(frozen=True)
class DFlashLayerWeights:
    input_norm: Tensor  # [H] fp32
    inputs: PackedWeight  # q, k, v
    attention: AttentionWeights
    out: PackedWeight
    post_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight

    @property
    def products(self) -> tuple[PackedWeight, ...]:
        return self.inputs, self.out, self.gate_up, self.down


@dataclass(frozen=True)
class DFlashWeights:
    fc: PackedWeight
    hidden_norm: Tensor
    memories: PackedWeight  # k and v of every layer, one above the other
    context: ContextWeights
    layers: Sequence[DFlashLayerWeights]
    norm: Tensor

    @property
    def nbytes(self) -> int:
        """Read by observing a step and drafting a block, the head apart."""
        parts = [self.fc, self.memories, *(part for layer in self.layers for part in layer.products)]
        return sum(part.nbytes for part in parts)


def pack_dflash(network: DFlash, positions: int) -> DFlashWeights:
    """A loaded drafter for the kernels, on the device it lies on. `positions` is the longest context."""
    config, device = network.config, network.norm.weight.device
    cos, sin = rope_of(positions, config.rope_theta, config.head_dim, device)
    layers = [layer for layer in network.layers if isinstance(layer, DFlashLayer)]
    memories = [part.weight for layer in layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
    norms = torch.stack([scale_of(layer.self_attn.k_norm) for layer in layers])

    def packed(layer: DFlashLayer) -> DFlashLayerWeights:
        net, mlp = layer.self_attn, layer.mlp
        return DFlashLayerWeights(
            input_norm=scale_of(layer.input_layernorm),
            inputs=pack([net.q_proj.weight, net.k_proj.weight, net.v_proj.weight]),
            attention=AttentionWeights(scale_of(net.q_norm), scale_of(net.k_norm), cos, sin, config.rms_norm_eps),
            out=pack([net.o_proj.weight]),
            post_norm=scale_of(layer.post_attention_layernorm),
            gate_up=pack([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=pack([mlp.down_proj.weight]),
        )

    return DFlashWeights(
        fc=pack([network.fc.weight]),
        hidden_norm=scale_of(network.hidden_norm),
        memories=pack(memories),
        context=ContextWeights(norms, cos, sin, config.rms_norm_eps),
        layers=[packed(layer) for layer in layers],
        norm=scale_of(network.norm),
    )


class DFlashNetwork:
    """The network with the trunk's embedding and head, and its keys and values."""

    def __init__(
        self, config: DFlashConfig, weights: DFlashWeights, trunk: StepWeights, pages: int, pdl: bool = True
    ) -> None:
        self.config, self.weights, self.trunk, self.pdl = config, weights, trunk, pdl
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, gated=False)
        self.device = trunk.embedding.device
        shape = (len(config.layer_types), pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        # zeros, not empty: masked keys are multiplied by an exact 0, which a stray NaN would survive
        self.pages = ContextPages(*(torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in range(2)))

    def sight(self, kind: str) -> Sight:
        causal = self.config.causal if self.config.causal is not None else kind == SLIDING
        return Sight(whole_block=not causal, window=self.config.sliding_window if kind == SLIDING else 0)


class DFlashObserve:
    """The context of rows, from the `features` that a step or a prompt left. No token needs to be known for it."""

    def __init__(
        self,
        drafter: DFlashNetwork,
        features: Tensor,
        inputs: StepInputs,
        largest: "DFlashObserve | None" = None,
    ) -> None:
        """In the memory of another that has as many rows or more, if given: they run one after the other."""
        self._drafter, self._features, self._inputs = drafter, features, inputs
        tokens, hidden, device = len(features), drafter.config.hidden_size, drafter.device
        memories = drafter.weights.memories.out_features

        def room(name: str, size: int, dtype: torch.dtype) -> Tensor:
            found = getattr(largest, name) if largest else torch.zeros(tokens, size, dtype=dtype, device=device)
            assert isinstance(found, Tensor)
            return found[:tokens]

        self._x, self._scaled = (room(name, hidden, torch.bfloat16) for name in ("_x", "_scaled"))
        self._squares = room("_squares", hidden // UNIT, torch.float32)
        self._memories = room("_memories", memories, torch.float32)
        self._space: Workspace = largest._space if largest else _workspace(tokens, max(hidden, memories), device)

    def run(self) -> None:
        own, inputs, weights = self._drafter, self._inputs, self._drafter.weights
        linear(self._features, weights.fc, self._x, self._space, None, own.pdl)
        begin(Stream(self._x, weights.hidden_norm, self._scaled), self._squares, None, None, own.pdl)
        norm = Norm(self._squares, own.config.rms_norm_eps)
        linear(self._scaled, weights.memories, self._memories, self._space, norm, own.pdl)
        remember(self._memories, own.pages, inputs.tables, weights.context, inputs.sequences, own.pdl)


@dataclass(frozen=True)
class BlockBuffers:
    """Between the launches of a block."""

    x: Tensor  # [T, H] bf16
    scaled: Tensor
    squares: Tensor  # [T, H / 16] fp32
    projected: Tensor  # [T, heads.width] fp32
    mixed: Tensor  # [T, heads * D] bf16
    gate_up: Tensor  # [T, 2 I] fp32
    middle: Tensor  # [T, I] bf16
    partials: Partials
    best: Best
    workspace: Workspace

    @classmethod
    def shared(cls, drafter: DFlashNetwork, buckets: Sequence[Bucket]) -> list["BlockBuffers"]:
        """Of each bucket, in the same memory: their blocks run one after the other."""
        config, heads, device = drafter.config, drafter.heads, drafter.device
        tokens, cells = max(bucket.tokens for bucket in buckets), max(bucket.cells for bucket in buckets)
        hidden, inter, head = config.hidden_size, config.intermediate_size, drafter.trunk.head
        fp32 = torch.float32

        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(tokens, *shape, dtype=dtype, device=device)

        units = head.rows // UNIT
        largest = cls(
            x=zeros(hidden),
            scaled=zeros(hidden),
            squares=zeros(hidden // UNIT, dtype=fp32),
            projected=zeros(heads.width, dtype=fp32),
            mixed=zeros(heads.count * heads.dim),
            gate_up=zeros(2 * inter, dtype=fp32),
            middle=zeros(inter),
            partials=Partials.allocate(cells, heads, 1, device),
            best=Best(
                zeros(units, dtype=fp32),
                zeros(units, dtype=torch.int32),
                zeros(config.vocab_size, dtype=fp32),
            ),
            workspace=_workspace(tokens, max(head.rows, heads.width, 2 * inter), device),
        )
        return [largest._cut(bucket) for bucket in buckets]

    def _cut(self, bucket: Bucket) -> "BlockBuffers":
        tokens, best = bucket.tokens, self.best
        return BlockBuffers(
            x=self.x[:tokens],
            scaled=self.scaled[:tokens],
            squares=self.squares[:tokens],
            projected=self.projected[:tokens],
            mixed=self.mixed[:tokens],
            gate_up=self.gate_up[:tokens],
            middle=self.middle[:tokens],
            partials=cut_partials(self.partials, bucket),
            best=Best(best.values[:tokens], best.rows[:tokens], None if best.logits is None else best.logits[:tokens]),
            workspace=self.workspace,
        )


class DFlashPropose:
    """Blocks for the sequences of a bucket. Row 0 of a block is the newest token, the others are the mask.

    To be filled in: `inputs`, where `cached` is the position of the newest token and `lengths` the depth and one. The
    token at row j of sequence b is guessed to be tokens[b, j], with the probability sure[b, j]; row 0 guesses nothing.
    """

    def __init__(
        self,
        drafter: DFlashNetwork,
        bucket: Bucket,
        inputs: StepInputs | None = None,
        buffers: BlockBuffers | None = None,
    ) -> None:
        self._drafter, self.bucket = drafter, bucket
        self.inputs = inputs or StepInputs.allocate(bucket, PAGE_SIZE, drafter.device)
        self._buffers = buffers or BlockBuffers.shared(drafter, [bucket])[0]
        # one read for both
        self.results = torch.zeros(2, bucket.tokens, dtype=torch.int32, device=drafter.device)
        self.tokens = self.results[0].view(bucket.sequences, bucket.rows)
        self.sure = self.results[1].view(torch.float32).view(bucket.sequences, bucket.rows)

    @property
    def logits(self) -> Tensor:
        """[T, vocab] fp32"""
        assert self._buffers.best.logits is not None
        return self._buffers.best.logits

    def run(self) -> None:
        drafter, weights, pdl, own = self._drafter, self._drafter.weights, self._drafter.pdl, self._buffers
        layers, norm = weights.layers, Norm(own.squares, drafter.config.rms_norm_eps)
        start = Stream(own.x, layers[0].input_norm, own.scaled)
        begin(start, own.squares, self.inputs.token_ids, drafter.trunk.embedding, pdl)
        following = [layer.input_norm for layer in layers[1:]] + [weights.norm]
        for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            linear(own.scaled, layer.inputs, own.projected, own.workspace, norm, pdl)
            pages = Pages(drafter.pages.keys[index], drafter.pages.values[index], self.inputs.tables)
            attention(
                own.projected, own.mixed, pages, layer.attention, drafter.heads, self.inputs.sequences, own.partials,
                own.workspace, pdl, drafter.sight(drafter.config.layer_types[index]),
            )  # fmt: skip
            self._add(own.mixed, layer.out, layer.post_norm)
            linear(own.scaled, layer.gate_up, own.gate_up, own.workspace, norm, pdl)
            swiglu(own.gate_up, own.middle, pdl)
            self._add(own.middle, layer.down, next_norm)
        linear(own.scaled, drafter.trunk.head, own.best, own.workspace, norm, pdl)
        best_tokens(own.best, drafter.config.vocab_size, self.results[0], pdl)
        self.sure.view(-1).copy_(confidence(own.best.values, self.logits))

    def _add(self, x: Tensor, weight: PackedWeight, next_norm: Tensor) -> None:
        """A product to the stream, which is then prepared for the next norm."""
        own, pdl = self._buffers, self._drafter.pdl
        stream = Stream(own.x, next_norm, own.scaled)
        linear(x, weight, stream, own.workspace, None, pdl)
        begin(stream, own.squares, None, None, pdl)


def _workspace(tokens: int, rows: int, device: torch.device) -> Workspace:
    """Two parts of a row's sum where rows are few; a counter for each unit of rows and block of tokens."""
    return Workspace.allocate(2 * tokens * 8192, -(-tokens // 8) * (rows // UNIT + 1) + 1024, device)
