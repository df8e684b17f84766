"""Prompts on the GPU, chunk by chunk: many rows of one or several sequences through all layers, in the prefill family.

Products and experts take the rows of all sequences at once, attention and DeltaNet those of one after the other.
DeltaNet chunks are anchored at absolute multiples of 64, every sum has one order: cut anywhere at multiples of 64,
alone or in company, a prompt leaves the same bits in pages, state and stream. Nothing waits for the host, and what lies
between launches was allocated before. A step goes on where the last chunk ended, with nothing to replay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from stoker.backends.family import CHUNK, PAGE_SIZE
from stoker.backends.gpu.kernels.attention import Pages
from stoker.backends.gpu.kernels.deltanet import DeltaRing
from stoker.backends.gpu.kernels.drafter import swiglu
from stoker.backends.gpu.kernels.launch import Workspace
from stoker.backends.gpu.kernels.linear import Best, linear
from stoker.backends.gpu.kernels.prefill_attention import prefill_attention, write_keys
from stoker.backends.gpu.kernels.prefill_deltanet import Prepared, prefill_deltanet
from stoker.backends.gpu.kernels.prefill_experts import PairTiles, group_pairs, prefill_experts
from stoker.backends.gpu.kernels.prefill_linear import prefill_linear
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
Keep = Callable[[int, int, int, int], None]  # what is to be kept of a DeltaNet layer: layer, slot, position, snapshot


@dataclass(frozen=True)
class Part:
    """The rows of a forward that are one sequence's: `count` tokens at positions `cached` on.

    Its pages are `table` [P] int32. Its recurrent state lies in `slot` and holds all tokens before them; where nothing
    is cached, it begins with zeros.
    """

    count: int
    table: Tensor
    slot: int
    cached: int
    keeps: Sequence[tuple[int, int]] = ()  # positions among its tokens, ascending, and the snapshots to make there
    chooses: bool = True  # what follows its last token is wanted


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
    scratch: Tensor  # the weight at hand
    joined: Tensor  # [T, 2 H]: what the MTP head reads
    drafted: Tensor  # [T, H]: its stream

    @classmethod
    def allocate(cls, config: ModelConfig, weights: StepWeights, tokens: int) -> "PrefillBuffers":
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
                tokens, delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, device
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
            scratch=empty(max((_scratch(weight) for weight in _dense(weights)), default=0)),
            joined=empty(rows, 2 * hidden),
            drafted=empty(rows, hidden),
        )  # fmt: skip


class Prefill:
    """Chunks of up to `chunk` tokens in all. What a forward leaves, of its T tokens: `buffers.x` and `buffers.normed`,
    the stream before and after the final norm; `features` [T, n * H], the stream after the layers of `taps`; and of the
    parts that choose, in their order, `logits` [MOST_PARTS, vocab] fp32 after the last token and the best `tokens`
    [MOST_PARTS] int32."""

    def __init__(
        self,
        config: ModelConfig,
        weights: StepWeights,
        cache: GpuCache,
        chunk: int,
        taps: Sequence[int] = (),
        keep: Keep | None = None,
    ) -> None:
        if chunk < CHUNK or chunk % CHUNK or chunk > 65536:
            raise ValueError(f"a chunk has a multiple of {CHUNK} tokens up to 65,536, not {chunk}")
        self.config, self.weights, self.cache, self.chunk = config, weights, cache, chunk
        self.buffers = PrefillBuffers.allocate(config, weights, chunk)
        device, head = weights.embedding.device, weights.head
        self._taps, self._keep = tuple(taps), keep
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

    def forward(self, token_ids: Tensor, parts: Sequence[Part]) -> None:
        """token_ids [T] int32 of all parts, one behind the other."""
        tokens = self._check(token_ids, parts)
        weights, buffers, eps = self.weights, self.buffers, self.config.rms_norm_eps
        layers, x, normed = weights.layers, buffers.x[:tokens], buffers.normed[:tokens]
        embed(token_ids, weights.embedding, x, layers[0].input_norm, normed, eps)
        following = [layer.input_norm for layer in layers[1:]] + [weights.norm]
        deltas = 0
        for index, (layer, state, scale) in enumerate(zip(layers, self.cache.layers, following, strict=True)):
            self._layer(layer, state, parts, x, scale, deltas)
            deltas += isinstance(state, DeltaRing)
            if index in self._taps:
                room = self.features[:tokens].unflatten(1, (len(self._taps), -1))
                room[:, self._taps.index(index)].copy_(x)
        self._choose(normed, parts)

    def _choose(self, normed: Tensor, parts: Sequence[Part]) -> None:
        """Logits and the best token after the last rows of the parts that want them."""
        ends = accumulate(part.count for part in parts)
        rows = [end - 1 for end, part in zip(ends, parts, strict=True) if part.chooses]
        if not rows:
            return
        count, whole = len(rows), self._best
        for place, row in enumerate(rows):
            self._lasts[place].copy_(normed[row])
        best = _first(whole, count)
        linear(self._lasts[:count], self.weights.head, best, self._space)
        best_tokens(best, self.config.vocab_size, self.tokens[:count])

    def logits_of(self, start: int, stop: int) -> Tensor:
        """[stop - start, vocab] fp32 after these rows of the last forward, at most SCORED_ROWS; until the next call."""
        some = _first(self._scored, stop - start)
        linear(self.buffers.normed[start:stop], self.weights.head, some, self._space)
        assert some.logits is not None
        return some.logits

    def draft(self, following: Tensor, parts: Sequence[Part], pages: KVPages, *, keys_only: bool = False) -> None:
        """The MTP head over the rows of the last forward and the tokens after them, `following` [T] int32: fills its
        keys and values in `pages`, and leaves its stream in `buffers.drafted` unless only keys are wanted."""
        mtp, buffers = self.weights.mtp, self.buffers
        if mtp is None:
            raise ValueError("this model has no MTP head")
        tokens = self._check(following, parts)
        joined, x, normed = buffers.joined[:tokens], buffers.drafted[:tokens], buffers.normed[:tokens]
        mtp_inputs(following, self.weights.embedding, buffers.x[:tokens], mtp.first, joined)
        prefill_linear(joined, mtp.fc, x, buffers.scratch)
        norm(x, mtp.layer.input_norm, normed, self.config.rms_norm_eps)
        if not keys_only:
            self._layer(mtp.layer, pages, parts, x, mtp.norm)
            return
        assert isinstance(mtp.layer.mixer, AttentionLayer)
        y = _cut(buffers.projected, tokens, mtp.layer.mixer.inputs.out_features)
        prefill_linear(normed, mtp.layer.mixer.inputs, y, buffers.scratch)
        for part, rows in _rows(parts):
            heads = heads_of(self.config)
            write_keys(y[rows], None, _pages(pages, part.table), mtp.layer.mixer.weights, heads, part.cached)

    def _layer(
        self,
        layer: LayerWeights,
        state: KVPages | DeltaRing,
        parts: Sequence[Part],
        x: Tensor,
        next_scale: Tensor,
        delta_index: int = 0,
    ) -> None:
        """`buffers.normed` holds the stream x after the layer's first norm, and afterwards after `next_scale`'s.
        `delta_index` counts DeltaNet layers."""
        buffers, tokens, eps = self.buffers, x.shape[0], self.config.rms_norm_eps
        normed, scratch, mixer = buffers.normed[:tokens], buffers.scratch, layer.mixer
        y = _cut(buffers.projected, tokens, mixer.inputs.out_features)
        mixed = _cut(buffers.mixed, tokens, mixer.out.in_features)
        prefill_linear(normed, mixer.inputs, y, scratch)
        if isinstance(mixer, AttentionLayer):
            assert isinstance(state, KVPages)
            heads = heads_of(self.config)
            for part, rows in _rows(parts):
                pages, queries = _pages(state, part.table), buffers.queries[rows]
                prefill_attention(y[rows], mixed[rows], queries, pages, mixer.weights, heads, part.cached)
        else:
            assert isinstance(state, DeltaRing)
            gates = None
            if mixer.gates is not None:
                gates = buffers.gates[:tokens]
                prefill_linear(normed, mixer.gates, gates, scratch)
            for part, rows in _rows(parts):
                own_gates = None if gates is None else gates[rows]
                self._delta(mixer, state, part, y[rows], mixed[rows], own_gates, delta_index)
        prefill_linear(mixed, mixer.out, x, scratch, add=True)
        norm(x, layer.post_norm, normed, eps, buffers.ordered[:tokens])
        self._experts(layer, x, next_scale)

    def _delta(
        self,
        mixer: DeltaLayer,
        state: DeltaRing,
        part: Part,
        y: Tensor,
        out: Tensor,
        gates: Tensor | None,
        delta_index: int,
    ) -> None:
        """One sequence through a DeltaNet layer, in pieces that end where snapshots are made: as when a chunk ends."""
        assert self.buffers.prepared is not None
        slot, cached = part.slot, part.cached
        if not cached:
            state.recurrent[slot].zero_()
        places = [cached, *(position for position, _ in part.keeps), cached + part.count]
        for piece, (start, stop) in enumerate(pairwise(places)):
            rows = slice(start - cached, stop - cached)
            piece_gates = None if gates is None else gates[rows]
            prefill_deltanet(y[rows], out[rows], state, mixer.weights, self.buffers.prepared, slot, start, piece_gates)
            if piece < len(part.keeps):
                assert self._keep is not None
                self._keep(delta_index, slot, stop, part.keeps[piece][1])

    def _experts(self, layer: LayerWeights, x: Tensor, next_scale: Tensor) -> None:
        moe, config, buffers, tokens = layer.moe, self.config.moe, self.buffers, x.shape[0]
        assert config is not None
        normed, scratch, pairs = buffers.normed[:tokens], buffers.scratch, tokens * config.top_k
        whole = buffers.choice
        choice = Choice(whole.experts[:tokens], whole.weights[:tokens], whole.shared[:tokens])
        logits = _cut(buffers.logits, tokens, moe.router.out_features)
        prefill_linear(normed, moe.router, logits, scratch)
        choose(logits, choice, config.renormalize, moe.shared_gate_up is not None)
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
            prefill_linear(normed, moe.shared_gate_up, both, scratch)
            middle = _cut(buffers.mixed, tokens, inter)
            swiglu(both, middle)
            prefill_linear(middle, moe.shared_down, shared, scratch)
        combine(outputs, choice, shared, x, next_scale, normed, self.config.rms_norm_eps)

    def _check(self, ids: Tensor, parts: Sequence[Part]) -> int:
        tokens = ids.shape[0]
        if not 1 <= tokens <= self.chunk:
            raise RequestError(f"a chunk has 1 to {self.chunk:,} tokens, found {tokens:,}.")
        if sum(part.count for part in parts) != tokens or len(parts) > MOST_PARTS:
            raise ValueError(f"{tokens} tokens were given for {len(parts)} parts of {[part.count for part in parts]}.")
        for part in parts:
            pages, cached = len(part.table), part.cached
            room = pages * PAGE_SIZE
            if cached < 0 or cached + part.count > room:
                raise RequestError(
                    f"{cached:,} + {part.count:,} tokens do not fit the {room:,} places of {pages} pages."
                )
        return tokens


def _rows(parts: Sequence[Part]) -> list[tuple[Part, slice]]:
    stops = [0, *accumulate(part.count for part in parts)]
    return [(part, slice(*stops[index : index + 2])) for index, part in enumerate(parts)]


def _first(best: Best, rows: int) -> Best:
    assert best.logits is not None
    return Best(best.values[:rows], best.rows[:rows], best.logits[:rows])


def _cut(flat: Tensor, rows: int, width: int) -> Tensor:
    return flat.view(-1)[: rows * width].view(rows, width)


def _pages(state: KVPages, table: Tensor) -> Pages:
    return Pages(state.keys, state.values, table.view(1, -1), state.key_scales, state.value_scales)


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
