"""Plain references of the step's kernels, one function for each, and of a prompt in steps: `STOKER_OPS=reference` puts
them in the kernels' places. They keep the promise the kernels keep, that a row's bits depend on that row alone: sums
are fp64 and rounded as the kernels round, and the recurrent state is rounded after each token.

They spell out every weight in fp64: for small models, and hundreds of times as fast as Triton's interpreter.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

import stoker.backends.gpu.dflash
import stoker.backends.gpu.mtp
import stoker.backends.gpu.prompts
import stoker.backends.gpu.slots
import stoker.backends.gpu.step
from stoker.backends.family import SPLIT
from stoker.backends.gpu.graphs import Recorder
from stoker.backends.gpu.kernels.attention import CAUSAL, AttentionWeights, Heads, Pages, Partials, Sight
from stoker.backends.gpu.kernels.deltanet import DeltaRing, DeltaWeights, Sequences
from stoker.backends.gpu.kernels.drafter import ContextPages, ContextWeights
from stoker.backends.gpu.kernels.experts import ExpertBuffers
from stoker.backends.gpu.kernels.launch import Workspace
from stoker.backends.gpu.kernels.linear import Best, Norm, Stream
from stoker.backends.gpu.kernels.prefill_deltanet import Kept
from stoker.backends.gpu.kernels.route import Routing
from stoker.backends.gpu.kernels.rows import MtpNorms
from stoker.backends.gpu.packed import PackedWeight
from stoker.backends.gpu.prefill import MOST_PARTS, Part
from stoker.backends.gpu.state import Bucket, GpuCache, StepBuffers, StepInputs
from stoker.backends.gpu.weights import DeltaLayer, StepWeights
from stoker.backends.network.cache import KVPages
from stoker.weights.model_config import ModelConfig

MODULES = (stoker.backends.gpu.dflash, stoker.backends.gpu.mtp, stoker.backends.gpu.slots, stoker.backends.gpu.step)


def install(replace: Callable[[object, str, object], None] = setattr) -> None:
    """The references take the kernels' places in every module of the step."""
    for reference in (begin, best_tokens, linear, attention, deltanet, route, experts, mtp_inputs, remember, swiglu):
        for module in MODULES:
            if hasattr(module, reference.__name__):
                replace(module, reference.__name__, reference)
    replace(stoker.backends.gpu.prompts, "Prefill", Prefill)


@functools.cache
def dense(weight: PackedWeight) -> Tensor:
    return weight.dequantize().double()


def _normed(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * scale


def begin(stream: Stream, squares: Tensor, ids: Tensor | None, table: Tensor | None, pdl: bool = False) -> None:
    if ids is not None and table is not None:
        stream.x.copy_(table[ids.long()])
    stream.scaled.copy_(stream.x.float() * stream.next_scale)
    squares.copy_(stream.x.double().square().unflatten(1, (-1, 16)).sum(-1))


def best_tokens(best: Best, vocab: int, tokens: Tensor, pdl: bool = False) -> None:
    top = best.values.amax(1, keepdim=True)
    tokens.copy_(torch.where(best.values == top, best.rows, vocab - 1).amin(1))


def linear(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor | Stream | Best,
    workspace: Workspace,
    norm: Norm | None = None,
    pdl: bool = False,
) -> None:
    y = x.double() @ dense(weight).t()
    if norm is not None:
        y = y * (norm.squares.double().sum(1, keepdim=True) / x.shape[1] + norm.eps).rsqrt()
    if isinstance(out, Stream):
        out.x.copy_(out.x.double() + y)
        out.scaled.copy_(out.x.float() * out.next_scale)
    elif isinstance(out, Best):
        scores = y.float()
        if out.logits is not None:
            out.logits.copy_(scores)
        units = pad(scores, (0, 16 * out.values.shape[1] - scores.shape[1]), value=-torch.inf).unflatten(1, (-1, 16))
        found = units.max(-1)
        out.values.copy_(found.values)
        out.rows.copy_(found.indices + torch.arange(units.shape[1], device=x.device) * 16)
    else:
        out.copy_(y)


def _turned(x: Tensor, scale: Tensor, positions: Tensor, weights: AttentionWeights | ContextWeights) -> Tensor:
    """[T, heads, D] fp64, normed and rotated, rounded to bf16 after each."""
    half = weights.cos.shape[1]
    x = _normed(x, scale, weights.eps).bfloat16().double()
    cos, sin = weights.cos[positions, None].double(), weights.sin[positions, None].double()
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], dim=-1)
    return turned.bfloat16().double()


def attention(
    y: Tensor,
    out: Tensor,
    pages: Pages,
    weights: AttentionWeights,
    heads: Heads,
    sequences: Sequences,
    partials: Partials,
    workspace: Workspace,
    pdl: bool = False,
    sight: Sight = CAUSAL,
) -> None:
    dim, kv, wide = heads.dim, heads.kv_count, heads.dim * (2 if heads.gated else 1)
    for b, (cached, length) in enumerate(zip(sequences.cached.tolist(), sequences.lengths.tolist(), strict=True)):
        if not length:
            continue
        assert cached + length <= partials.splits * SPLIT, "the bucket has too few splits"
        rows = slice(b * sequences.rows, b * sequences.rows + length)
        q, k, v = y[rows].double().split([heads.count * wide, kv * dim, kv * dim], dim=1)
        q = q.view(length, heads.count, wide)
        positions = torch.arange(cached, cached + length, device=y.device)
        places = pages.tables[b].long()
        at = places[positions // 64], positions % 64
        pages.keys[at] = _turned(k.view(length, kv, dim), weights.k_norm, positions, weights).bfloat16()
        pages.values[at] = v.view(length, kv, dim).bfloat16()
        every = torch.arange(cached + length, device=y.device)
        keys, values = (
            part[places[every // 64], every % 64].double().repeat_interleave(heads.group, 1)
            for part in (pages.keys, pages.values)
        )
        last = positions[-1:, None].expand(length, 1) if sight.whole_block else positions[:, None]
        seen = every[None] <= last
        if sight.window:
            seen &= every[None] > positions[:, None] - sight.window
        query = _turned(q[..., :dim], weights.q_norm, positions, weights)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * dim**-0.5
        found = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
        if heads.gated:
            found = found * torch.sigmoid(q[..., dim:])
        out[rows] = found.flatten(1).bfloat16()


def deltanet(
    y: Tensor,
    out: Tensor,
    state: DeltaRing,
    weights: DeltaWeights,
    sequences: Sequences,
    pdl: bool = False,
    gates: Tensor | None = None,
) -> None:
    heads, key_dim, value_dim = state.recurrent.shape[1:]
    ring, channels = state.inputs.shape[1:]
    taps, keys, values = len(weights.conv), state.key_heads * key_dim, heads * value_dim
    numbers = (sequences.slots, sequences.cached, sequences.lengths, sequences.replay)
    for b, (slot, cached, length, replay) in enumerate(zip(*(part.tolist() for part in numbers), strict=True)):
        assert 2 * max(length, replay) + taps - 1 <= ring, "the ring is too short"
        current = state.recurrent[slot].double()
        first = b * sequences.rows
        for place in range(length):  # what the next step replays
            row = y[first + place]
            own = row[channels + values :] if gates is None else gates[first + place]
            a, beta = own.double().split([heads, heads])
            state.inputs[slot, (cached + place) % ring] = row[:channels].bfloat16()
            state.gates[slot, (cached + place) % ring, 0] = (softplus(a + weights.bias) * weights.decay).float()
            state.gates[slot, (cached + place) % ring, 1] = torch.sigmoid(beta).float()
        for position in range(cached - replay, cached + length):
            reach = range(position - taps + 1, position + 1)
            nothing = torch.zeros(channels, dtype=torch.float64, device=y.device)
            inputs = torch.stack([state.inputs[slot, at % ring].double() if at >= 0 else nothing for at in reach])
            q, k, v = silu((inputs * weights.conv).sum(0)).split([keys, keys, values])
            q, k = (
                (part.view(-1, key_dim) / (part.view(-1, key_dim).square().sum(-1, keepdim=True) + 1e-6).sqrt())
                .repeat_interleave(heads // state.key_heads, 0)
                for part in (q, k)
            )  # fmt: skip
            g, beta = state.gates[slot, position % ring].double()
            current = current * g.exp()[:, None, None]
            change = beta[:, None] * (v.view(heads, value_dim) - (current * k[:, :, None]).sum(1))
            current = (current + k[:, :, None] * change[:, None]).float().double()
            if position < cached:
                if position == cached - 1:
                    state.recurrent[slot] = current.float()
                continue
            found = _normed((current * q[:, :, None]).sum(1) * key_dim**-0.5, weights.norm, weights.eps)
            row = first + position - cached
            z = y[row, channels : channels + values].double().view(heads, value_dim)
            out[row] = (found * silu(z)).flatten().bfloat16()


def route(
    x: Tensor,
    scaled: Tensor,
    weight: PackedWeight,
    routing: Routing,
    workspace: Workspace,
    *,
    eps: float,
    renormalize: bool,
    shared: bool,
    pdl: bool = False,
    sequences: Sequences | None = None,
) -> None:
    inverse = (x.double().square().mean(1) + eps).rsqrt()
    logits = scaled.double() @ dense(weight).t() * inverse[:, None]
    if shared:
        routing.shared.copy_(torch.sigmoid(logits[:, -1]))
        logits = logits[:, :-1]
    chances = logits.softmax(-1)
    weights, experts_ = chances.topk(routing.top_k)
    routing.inverse_rms.copy_(inverse)
    real = torch.ones(len(x), 1, dtype=torch.bool, device=x.device)
    if sequences is not None and len(x) > 1:
        real = (torch.arange(sequences.rows, device=x.device) < sequences.lengths[:, None]).view(-1, 1)
    routing.experts.copy_(torch.where(real, experts_, -1))
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    routing.weights.copy_(torch.where(real, weights, 0.0))
    pairs = routing.experts[routing.experts >= 0].unique(return_counts=True)[1]
    routing.tile_count.fill_(int((-(-pairs // 8)).sum()))


def experts(
    stream: Stream,
    routing: Routing,
    gate_up: PackedWeight,
    down: PackedWeight,
    shared_gate_up: PackedWeight | None,
    shared_down: PackedWeight | None,
    buffers: ExpertBuffers,
    squares: Tensor,
    workspace: Workspace,
    next_scale: Tensor,
    *,
    eps: float,
    pdl: bool = False,
) -> None:
    x = stream.scaled.double() * routing.inverse_rms.double()[:, None]

    def expert(rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
        gate, up = torch.einsum("th,toh->to", rows, first).chunk(2, dim=-1)
        return torch.einsum("ti,toi->to", (silu(gate) * up).bfloat16().double(), second)

    total = torch.zeros_like(x)
    for rank in range(routing.top_k):
        chosen = routing.experts[:, rank].clamp(min=0).long()  # rows that pad a batch have none, and no weight
        total += routing.weights[:, rank, None] * expert(x, dense(gate_up)[chosen], dense(down)[chosen])
    if shared_gate_up is not None and shared_down is not None:
        both = (dense(part).expand(len(x), -1, -1) for part in (shared_gate_up, shared_down))
        total += routing.shared[:, None] * expert(x, *both)
    stream.x.copy_(stream.x.double() + total)
    begin(Stream(stream.x, next_scale, stream.scaled), squares, None, None)


def mtp_inputs(ids: Tensor, table: Tensor, x: Tensor, norms: MtpNorms, joined: Tensor, pdl: bool = False) -> None:
    hidden = _normed(x.double(), norms.last, norms.eps).bfloat16().double()
    embedded = _normed(table[ids.long()].double(), norms.embedding, norms.eps)
    joined.copy_(torch.cat([embedded, _normed(hidden, norms.hidden, norms.eps)], dim=1))


def remember(
    y: Tensor, pages: ContextPages, tables: Tensor, weights: ContextWeights, sequences: Sequences, pdl: bool = False
) -> None:
    layers, _, _, heads, dim = pages.keys.shape
    for b, (cached, length) in enumerate(zip(sequences.cached.tolist(), sequences.lengths.tolist(), strict=True)):
        positions = torch.arange(cached, cached + length, device=y.device)
        at = tables[b].long()[positions // 64], positions % 64
        parts = y[b * sequences.rows : b * sequences.rows + length].double().view(length, layers, 2, heads, dim)
        for layer in range(layers if length else 0):
            pages.keys[layer][at] = _turned(parts[:, layer, 0], weights.k_norms[layer], positions, weights).bfloat16()
            pages.values[layer][at] = parts[:, layer, 1].bfloat16()


def swiglu(y: Tensor, out: Tensor, pdl: bool = False) -> None:
    gate, up = y.double().chunk(2, dim=1)
    out.copy_(silu(gate) * up)


class Prefill:
    """Takes the place of the prefill path: as many steps as the ring has room for, then all of it in the state."""

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
        self._config, self._weights, self._cache, self._taps, self._kept = config, weights, cache, taps, kept
        self.copies = None
        self._device = device = weights.embedding.device

        def zeros(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(rows, columns, dtype=dtype, device=device)

        self.features = zeros(chunk, len(taps) * config.hidden_size)
        self.logits = zeros(MOST_PARTS, config.vocab_size, torch.float32)
        self.tokens = zeros(MOST_PARTS, 1, torch.int32)[:, 0]
        self.buffers = SimpleNamespace(drafted=zeros(chunk, config.hidden_size))
        self._x, self._logits = zeros(chunk, config.hidden_size), zeros(chunk, config.vocab_size, torch.float32)

    def record(self, recorder: Recorder) -> None:
        """References look at numbers on the host: nothing can be recorded."""

    def forward(self, token_ids: Tensor, parts: Sequence[Part]) -> None:
        begin, chosen = 0, 0
        self._parts = parts
        for part in parts:
            assert part.cached % 64 == 0, "chunks are anchored at multiples of 64"
            places = [0, *(position - part.cached for position, _ in part.keeps), part.count]
            for piece, (start, stop) in enumerate(pairwise(places)):
                rows = slice(begin + start, begin + stop)
                self._piece(token_ids[rows], part, part.cached + start, rows)
                if piece < len(part.keeps):
                    self._keep(part.slot, *part.keeps[piece])
            begin += part.count
            if part.chooses:
                self.logits[chosen] = self._logits[begin - 1]
                self.tokens[chosen] = self.logits[chosen].argmax()
                chosen += 1

    def _keep(self, slot: int, position: int, snapshot: int) -> None:
        assert self._kept is not None
        rings = (state for state in self._cache.layers if isinstance(state, DeltaRing))
        for ring, kept in zip(rings, self._kept, strict=True):
            kept.recurrent[snapshot] = ring.recurrent[slot]
            for tap, inputs in enumerate(kept.inputs[snapshot]):
                inputs.copy_(ring.inputs[slot, (position - kept.inputs.shape[1] + tap) % ring.inputs.shape[1]])

    def _piece(self, token_ids: Tensor, part: Part, cached: int, whole: slice) -> None:
        """Tokens of one sequence, which its state then holds; what they leave goes to the rows of `whole`."""
        assert self._cache.deltas is not None
        room, replay = (self._cache.deltas.inputs.shape[2] - 3) // 2, 0
        for done in range(0, len(token_ids), room):
            ids = token_ids[done : done + room]
            inputs = self._inputs(len(ids), part, part.slot, cached + done, replay)
            inputs.token_ids.copy_(ids)
            bucket = Bucket(1, len(ids), inputs.tables.shape[1] // 4)
            step = stoker.backends.gpu.step.Step(
                self._config, self._weights, self._cache, bucket, logits=True, taps=self._taps, inputs=inputs
            )
            step.forward()
            rows = slice(whole.start + done, whole.start + done + len(ids))
            self.features[rows], self._x[rows], replay = step.features, step.buffers.x, len(ids)
            assert step.buffers.best.logits is not None
            self._logits[rows] = step.buffers.best.logits
        ended = self._inputs(1, part, part.slot, cached + len(token_ids), replay)
        ended.sequences.lengths.zero_()
        nothing = torch.zeros(1, 0, device=self._device)
        mixers = [layer.mixer for layer in self._weights.layers if isinstance(layer.mixer, DeltaLayer)]
        for ring, mixer in zip((s for s in self._cache.layers if isinstance(s, DeltaRing)), mixers, strict=True):
            deltanet(nothing, nothing, ring, mixer.weights, ended.sequences)

    def logits_of(self, start: int, stop: int) -> Tensor:
        return self._logits[start:stop]

    def draft(self, following: Tensor, pages: KVPages, *, keys_only: bool = False) -> None:
        self._logits.fill_(torch.nan)  # a pass of the head leaves nothing to score
        self.buffers.drafted.fill_(torch.nan)
        begin = 0
        for part in self._parts:
            rows = slice(begin, begin + part.count)
            drafted = self._draft(following[rows], part, pages, self._x[rows])
            if not keys_only:
                self.buffers.drafted[rows] = drafted
            begin += part.count

    def _draft(self, following: Tensor, part: Part, pages: KVPages, x: Tensor) -> Tensor:
        mtp, count = self._weights.mtp, len(following)
        assert mtp is not None
        inputs = self._inputs(count, part, 0, part.cached, 0)
        own = StepBuffers.allocate(self._config, Bucket(1, count, inputs.tables.shape[1] // 4), 1, self._device)
        joined = torch.zeros(count, 2 * self._config.hidden_size, dtype=torch.bfloat16, device=self._device)
        mtp_inputs(following, self._weights.embedding, x, mtp.first, joined)
        linear(joined, mtp.fc, own.x, own.workspace)
        begin(Stream(own.x, mtp.layer.input_norm, own.scaled), own.squares, None, None)
        stoker.backends.gpu.step.run_layer(
            self._config, mtp.layer, pages, inputs, own, own.routing[0], mtp.norm, pdl=False
        )
        return own.x

    def _inputs(self, rows: int, part: Part, slot: int, cached: int, replay: int) -> StepInputs:
        table = part.table
        assert table is not None
        inputs = StepInputs.allocate(Bucket(1, rows, -(-len(table) // 4)), 64, self._device)
        inputs.tables[0, : len(table)] = table
        inputs.sequences.slots.fill_(slot)
        inputs.sequences.cached.fill_(cached)
        inputs.sequences.replay.fill_(replay)
        return inputs
