"""Prompts on the GPU, chunk by chunk: many rows of one or several sequences through all layers, in the prefill family.

DeltaNet chunks are anchored at absolute multiples of 64, every sum has one order: cut anywhere at multiples of 64,
alone or in company, a prompt leaves the same bits in pages, state and stream. Nothing waits for the host, and what lies
between launches was allocated before. A step goes on where the last chunk ended, with nothing to replay.

The host takes longer to make the launches of a short forward than the GPU to compute it, so those are recorded, each
for up to so many rows: rows that are not in use choose no expert, and kernels that touch state or pages read from the
device how many there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stoker.backends.family import CHUNK, PAGE_SIZE
from stoker.backends.gpu.graphs import Recorded, Recorder
from stoker.backends.gpu.kernels.attention import Pages
from stoker.backends.gpu.kernels.deltanet import DeltaRing
from stoker.backends.gpu.kernels.drafter import swiglu
from stoker.backends.gpu.kernels.launch import Workspace
from stoker.backends.gpu.kernels.linear import Best, linear
from stoker.backends.gpu.kernels.places import Place, Places, PlacesUpload
from stoker.backends.gpu.kernels.prefill_attention import prefill_attention, write_keys
from stoker.backends.gpu.kernels.prefill_deltanet import Kept, Prepared, prefill_deltanet
from stoker.backends.gpu.kernels.prefill_experts import PairTiles, group_pairs, prefill_experts
from stoker.backends.gpu.kernels.prefill_linear import prefill_linear, unpacked
from stoker.backends.gpu.kernels.prefill_rows import Choice, choose, combine, embed, norm
from stoker.backends.gpu.kernels.rows import best_tokens, mtp_inputs
from stoker.backends.gpu.packed import UNIT, Kind, PackedWeight
from stoker.backends.gpu.state import GpuCache, heads_of
from stoker.backends.gpu.weights import AttentionLayer, DeltaLayer, LayerWeights, MtpWeights, StepWeights
from stoker.backends.network.cache import KVPages
from stoker.engine.backend import SCORED_ROWS
from stoker.errors import RequestError
from stoker.weights.model_config import ModelConfig

MOST_PARTS = SCORED_ROWS  # sequences of a forward: so many first tokens are chosen at a time
RECORDED_ROWS = (64, 128, 256, 512, 1024)  # of recorded forwards; longer ones keep the GPU busy while they are launched
RECORDED_PARTS = 8  # sequences of a recorded forward


@dataclass(frozen=True)
class Part(Place):
    """The rows of a forward that are one sequence's, and its pages [P] int32."""

    table: Tensor | None = None
    chooses: bool = False  # whether the token after the last of them is wanted


@dataclass(frozen=True)
class PrefillBuffers:
    """Between the launches of a chunk of up to T tokens. bf16, but for what projections and the router make."""

    x: Tensor  # [T, H]: the residual stream
    normed: Tensor  # [T, H]: after the norm that comes next
    ordered: Tensor  # [T, H]: the same in operand order
    projected: Tensor  # fp32: [T, width] of input projections; the shared expert's gate and up
    gates: Tensor  # fp32 [T, 2 HV]: DeltaNet's a and b, where their projection is apart
    mixed: Tensor  # [T, width]: what output projections read
    queries: Tensor  # [T, heads, D]
    prepared: Prepared | None
    logits: Tensor  # fp32 [T, experts + 1] of the router
    choice: Choice
    tiles: PairTiles
    hidden: Tensor  # [T * top_k, I]
    outputs: Tensor  # [T * top_k, H]
    shared: Tensor  # [T, H]
    scratch: Tensor  # the weight at hand, if it is not kept in 16 bit
    joined: Tensor  # [T, 2 H]: what the MTP head reads
    drafted: Tensor  # [T, H]: its stream

    @classmethod
    def allocate(
        cls, config: ModelConfig, weights: StepWeights, tokens: int, chunks: int, *, copies: bool
    ) -> "PrefillBuffers":
        assert config.moe is not None
        moe, hidden, delta, heads = config.moe, config.hidden_size, config.delta, heads_of(config)
        device = weights.embedding.device

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        fp32, pairs = torch.float32, tokens * moe.top_k
        width, out = max(heads.width, 2 * moe.shared_intermediate_size), heads.count * heads.dim
        prepared = None
        if delta is not None:
            values = delta.value_heads * delta.value_dim
            width, out = max(width, delta.conv_channels + values + 2 * delta.value_heads), max(out, values)
            prepared = Prepared.allocate(
                tokens, chunks, delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, device
            )
        rows = tokens if weights.mtp is not None else 0
        return cls(
            x=empty(tokens, hidden),
            normed=empty(tokens, hidden),
            ordered=empty(tokens, hidden),
            projected=empty(tokens * width, dtype=fp32),
            gates=empty(tokens, 2 * delta.value_heads if delta else 0, dtype=fp32),
            mixed=empty(tokens * out),
            queries=empty(tokens, heads.count, heads.dim),
            prepared=prepared,
            logits=empty(tokens * (moe.num_experts + 1), dtype=fp32),
            choice=Choice(empty(tokens, moe.top_k, dtype=torch.int32), empty(tokens, moe.top_k, dtype=fp32),
                          empty(tokens, dtype=fp32)),
            tiles=PairTiles.allocate(pairs, moe.num_experts, device),
            hidden=empty(pairs, moe.intermediate_size),
            outputs=empty(pairs, hidden),
            shared=empty(tokens, hidden),
            scratch=empty(0 if copies else max((_scratch(weight) for weight in _dense(weights)), default=0)),
            joined=empty(rows, 2 * hidden),
            drafted=empty(rows, hidden),
        )  # fmt: skip


class DenseCopies:
    """16-bit copies of the weights that all tokens are multiplied with, made when they are first asked for. They spare
    every forward the unpacking."""

    def __init__(self, weights: StepWeights) -> None:
        device = weights.embedding.device
        self._room = {
            id(weight): torch.empty(count, dtype=torch.bfloat16, device=device)
            for weight in _dense(weights)
            if (count := _scratch(weight))
        }
        self._made: dict[int, PackedWeight] = {}

    def of(self, weight: PackedWeight) -> PackedWeight:
        found = self._made.get(id(weight))
        if found is None:
            found = self._made[id(weight)] = unpacked(weight, self._room.get(id(weight), weight.packed))
        return found


class Prefill:
    """Chunks of up to `chunk` tokens in all. What a forward leaves, of its T tokens: `buffers.x` and `buffers.normed`,
    the stream before and after the final norm; `features` [T, n * H], the stream after the layers of `taps`; and of the
    parts that choose, in their order, `logits` [MOST_PARTS, vocab] fp32 after the last token and the best `tokens`
    [MOST_PARTS] int32. `kept` holds snapshots, a pair of views for each DeltaNet layer; None: none are made."""

    def __init__(
        self,
        config: ModelConfig,
        weights: StepWeights,
        cache: GpuCache,
        chunk: int,
        taps: Sequence[int] = (),
        kept: Sequence[Kept] | None = None,
        parts: int = MOST_PARTS,
        copies: bool = False,
    ) -> None:
        if chunk < CHUNK or chunk % CHUNK or chunk > 65536:
            raise ValueError(f"a chunk has a multiple of {CHUNK} tokens up to 65,536, not {chunk}")
        self.config, self.weights, self.cache, self.chunk = config, weights, cache, chunk
        device, head = weights.embedding.device, weights.head
        self._parts = min(parts, MOST_PARTS)
        self._places = PlacesUpload(self._parts, chunk, device)
        self.buffers = PrefillBuffers.allocate(config, weights, chunk, self._places.most_chunks, copies=copies)
        self.copies = DenseCopies(weights) if copies else None
        self._taps, self.kept = tuple(taps), kept
        self._ids = torch.zeros(chunk, dtype=torch.int32, device=device)
        width = next((len(state.keys) for state in cache.layers if isinstance(state, KVPages)), 1)
        self._tables = torch.zeros(self._parts, width, dtype=torch.int32, device=device)
        self._recorded: dict[int, Recorded] = {}
        self.features = torch.empty(chunk, len(taps) * config.hidden_size, dtype=torch.bfloat16, device=device)
        self.logits = torch.empty(MOST_PARTS, config.vocab_size, device=device)
        self.tokens = torch.empty(MOST_PARTS, dtype=torch.int32, device=device)
        self._lasts = torch.empty(MOST_PARTS, config.hidden_size, dtype=torch.bfloat16, device=device)
        units = head.rows // UNIT

        def best(rows: int, logits: Tensor) -> Best:
            index = torch.empty(rows, units, dtype=torch.int32, device=device)
            return Best(torch.empty(rows, units, device=device), index, logits)

        self._best = best(MOST_PARTS, self.logits)
        self._scored = best(SCORED_ROWS, torch.empty(SCORED_ROWS, config.vocab_size, device=device))
        # heads of up to 8,192 rows are multiplied in two parts
        self._space = Workspace.allocate(2 * SCORED_ROWS * 8192, head.rows // UNIT, device)

    def record(self, recorder: Recorder, rows: Sequence[int] = RECORDED_ROWS) -> None:
        """Forwards of up to so many rows are replayed from now on."""
        for count in rows:
            if count <= self.chunk:
                parts = min(self._parts, RECORDED_PARTS)
                places = self._places.bounded(count, parts)
                self._recorded[count] = recorder.record(partial(self._forward, count, places, parts))

    def forward(self, token_ids: Tensor, parts: Sequence[Part]) -> None:
        """token_ids [T] int32 of all parts, one behind the other."""
        tokens = self._check(token_ids, parts)
        self._ids[:tokens].copy_(token_ids)
        choosing = [index for index, part in enumerate(parts) if part.chooses]
        places = self._places.send(parts, choosing)
        for row, part in zip(self._tables, parts, strict=False):
            assert part.table is not None
            row[: len(part.table)].copy_(part.table[: len(row)])
        fitting = [rows for rows, recorded in self._recorded.items() if rows >= tokens and recorded.graphs]
        self._rows, self._at = tokens, places
        if fitting and len(parts) <= RECORDED_PARTS:
            self._recorded[min(fitting)]()
        else:
            self._forward(tokens, places, len(choosing))

    def _forward(self, tokens: int, places: Places, choosing: int) -> None:
        """Rows behind those in use may be computed too: nobody sees them."""
        weights, buffers, eps = self.weights, self.buffers, self.config.rms_norm_eps
        layers, x, normed = weights.layers, buffers.x[:tokens], buffers.normed[:tokens]
        embed(self._ids[:tokens], weights.embedding, x, layers[0].input_norm, normed, eps)
        following = [layer.input_norm for layer in layers[1:]] + [weights.norm]
        deltas = 0
        for index, (layer, state, scale) in enumerate(zip(layers, self.cache.layers, following, strict=True)):
            kept = self.kept[deltas] if self.kept and isinstance(state, DeltaRing) else None
            self._layer(layer, state, places, x, scale, kept)
            deltas += isinstance(state, DeltaRing)
            if index in self._taps:
                room = self.features[:tokens].unflatten(1, (len(self._taps), -1))
                room[:, self._taps.index(index)].copy_(x)
        if choosing:
            lasts, best = self._lasts[:choosing], _first(self._best, choosing)
            torch.index_select(normed, 0, places.ends[:choosing], out=lasts)
            linear(lasts, weights.head, best, self._space)
            best_tokens(best, self.config.vocab_size, self.tokens[:choosing])

    def logits_of(self, start: int, stop: int) -> Tensor:
        """[stop - start, vocab] fp32 after these rows of the last forward, at most SCORED_ROWS; until the next call."""
        some = _first(self._scored, stop - start)
        linear(self.buffers.normed[start:stop], self.weights.head, some, self._space)
        assert some.logits is not None
        return some.logits

    def draft(self, following: Tensor, pages: KVPages, *, keys_only: bool = False) -> None:
        """The MTP head over the rows of the last forward and the tokens after them, `following` [T] int32: fills its
        keys and values in `pages`, and leaves its stream in `buffers.drafted` unless only keys are wanted."""
        mtp, buffers, places, tokens = self.weights.mtp, self.buffers, self._at, self._rows
        if mtp is None:
            raise ValueError("this model has no MTP head")
        if following.shape[0] != tokens:
            raise ValueError(f"the last forward had {tokens} tokens, {following.shape[0]} follow.")
        joined, x, normed = buffers.joined[:tokens], buffers.drafted[:tokens], buffers.normed[:tokens]
        mtp_inputs(following, self.weights.embedding, buffers.x[:tokens], mtp.first, joined)
        self._linear(joined, mtp.fc, x)
        norm(x, mtp.layer.input_norm, normed, self.config.rms_norm_eps)
        if not keys_only:
            self._layer(mtp.layer, pages, places, x, mtp.norm)
            return
        mixer = mtp.layer.mixer
        assert isinstance(mixer, AttentionLayer)
        y = _cut(buffers.projected, tokens, mixer.inputs.out_features)
        self._linear(normed, mixer.inputs, y)
        write_keys(y, None, self._pages(pages), mixer.weights, heads_of(self.config), places)

    def _layer(
        self,
        layer: LayerWeights,
        state: KVPages | DeltaRing,
        places: Places,
        x: Tensor,
        next_scale: Tensor,
        kept: Kept | None = None,
    ) -> None:
        """`buffers.normed` holds the stream x after the layer's first norm, and afterwards after `next_scale`'s."""
        buffers, tokens, eps = self.buffers, x.shape[0], self.config.rms_norm_eps
        normed, mixer = buffers.normed[:tokens], layer.mixer
        y = _cut(buffers.projected, tokens, mixer.inputs.out_features)
        mixed = _cut(buffers.mixed, tokens, mixer.out.in_features)
        self._linear(normed, mixer.inputs, y)
        if isinstance(mixer, AttentionLayer):
            assert isinstance(state, KVPages)
            queries, pages = buffers.queries[:tokens], self._pages(state)
            prefill_attention(y, mixed, queries, pages, mixer.weights, heads_of(self.config), places)
        else:
            assert isinstance(state, DeltaRing)
            assert buffers.prepared is not None
            gates = None
            if mixer.gates is not None:
                gates = buffers.gates[:tokens]
                self._linear(normed, mixer.gates, gates)
            prefill_deltanet(y, mixed, state, mixer.weights, buffers.prepared, places, gates, kept)
        self._linear(mixed, mixer.out, x, add=True)
        norm(x, layer.post_norm, normed, eps, buffers.ordered[:tokens])
        self._experts(layer, places, x, next_scale)

    def _experts(self, layer: LayerWeights, places: Places, x: Tensor, next_scale: Tensor) -> None:
        moe, config, buffers, tokens = layer.moe, self.config.moe, self.buffers, x.shape[0]
        assert config is not None
        normed, pairs = buffers.normed[:tokens], tokens * config.top_k
        whole = buffers.choice
        choice = Choice(whole.experts[:tokens], whole.weights[:tokens], whole.shared[:tokens])
        logits = _cut(buffers.logits, tokens, moe.router.out_features)
        self._linear(normed, moe.router, logits)
        choose(logits, choice, config.renormalize, moe.shared_gate_up is not None, places.total)
        group_pairs(choice.experts, buffers.tiles)
        outputs = buffers.outputs[:pairs]
        prefill_experts(
            buffers.ordered[:tokens], config.top_k, buffers.tiles, moe.gate_up, moe.down, buffers.hidden[:pairs],
            outputs,
        )  # fmt: skip
        shared = None
        if moe.shared_gate_up is not None and moe.shared_down is not None:
            shared, inter = buffers.shared[:tokens], moe.shared_down.in_features
            both = _cut(buffers.projected, tokens, 2 * inter)
            self._linear(normed, moe.shared_gate_up, both)
            middle = _cut(buffers.mixed, tokens, inter)
            swiglu(both, middle)
            self._linear(middle, moe.shared_down, shared)
        combine(outputs, choice, shared, x, next_scale, normed, self.config.rms_norm_eps)

    def _linear(self, x: Tensor, weight: PackedWeight, y: Tensor, add: bool = False) -> None:
        dense = self.copies.of(weight) if self.copies else unpacked(weight, self.buffers.scratch)
        prefill_linear(x, dense, y, add=add, row_scales=weight.kind in (Kind.INT8, Kind.NVFP4))

    def _pages(self, state: KVPages) -> Pages:
        return Pages(state.keys, state.values, self._tables, state.key_scales, state.value_scales)

    def _check(self, ids: Tensor, parts: Sequence[Part]) -> int:
        tokens = ids.shape[0]
        if not 1 <= tokens <= self.chunk:
            raise RequestError(f"a chunk has 1 to {self.chunk:,} tokens, found {tokens:,}.")
        if sum(part.count for part in parts) != tokens or len(parts) > self._parts:
            raise ValueError(f"{tokens} tokens were given for {len(parts)} parts of {[part.count for part in parts]}.")
        for part in parts:
            pages, cached = 0 if part.table is None else len(part.table), part.cached
            room = pages * PAGE_SIZE
            if cached < 0 or cached + part.count > room:
                raise RequestError(
                    f"{cached:,} + {part.count:,} tokens do not fit the {room:,} places of {pages} pages."
                )
        return tokens


def _first(best: Best, rows: int) -> Best:
    assert best.logits is not None
    return Best(best.values[:rows], best.rows[:rows], best.logits[:rows])


def _cut(flat: Tensor, rows: int, width: int) -> Tensor:
    return flat.view(-1)[: rows * width].view(rows, width)


def _dense(weights: StepWeights) -> list[PackedWeight]:
    """Weights that all tokens are multiplied with."""
    mtp: list[MtpWeights] = [weights.mtp] if weights.mtp is not None else []
    found = [head.fc for head in mtp]
    for layer in [*weights.layers, *(head.layer for head in mtp)]:
        mixer, moe = layer.mixer, layer.moe
        gates = mixer.gates if isinstance(mixer, DeltaLayer) else None
        parts = (mixer.inputs, mixer.out, gates, moe.router, moe.shared_gate_up, moe.shared_down)
        found += [part for part in parts if part is not None]
    return found


def _scratch(weight: PackedWeight) -> int:
    return 0 if weight.kind is Kind.BF16 else weight.rows * weight.in_features
