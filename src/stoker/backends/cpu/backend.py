"""The engine's backend on the CPU: one forward over flat batches; dense models on accelerators use it too."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from stoker.backends.cpu.drafting import DraftNetwork
from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.memory import discard, tensor_bytes
from stoker.backends.network.batch import Batch
from stoker.backends.network.cache import Cache, KVPages
from stoker.backends.network.count import step_bytes
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.experts import SparseMlp
from stoker.engine.backend import Choices
from stoker.engine.config import EngineConfig
from stoker.engine.step import Chunk, StepTokens, split_rows
from stoker.sampling.sampler import choose
from stoker.speculate.depth.cost import StepBytes

COUNT_EVERY = 5  # steps: looking at what all layers chose takes a hundredth of one


class CpuBackend:
    """Computes where the model's weights lie. `network` drafts, if anything does that needs to see tokens."""

    def __init__(self, model: Decoder, engine: EngineConfig, network: DraftNetwork | None = None) -> None:
        self.model, self.network = model.config, network
        self._decoder = model
        weight = model.embed_tokens.weight
        self._device = weight.device
        self.cache = Cache.of_engine(model.config, engine, weight.dtype, weight.device)
        self.snapshots = self.cache.snapshots(engine.snapshots)
        self.cache_bytes = tensor_bytes(self.cache.layers) + tensor_bytes(self.snapshots)
        width = engine.table_width(model.config.max_positions)
        self.tables = torch.zeros(engine.slots, width, dtype=torch.long, device=weight.device)
        self._chunks: Sequence[Chunk] = ()  # of the last prefill
        self._asked = 0  # times that distinct experts were asked for

    @property
    def step_bytes(self) -> StepBytes:
        return step_bytes(self._decoder)

    # -- computing

    @property
    def keeps_inside(self) -> bool:
        return False

    def prompt_groups(self, chunks: Sequence[Chunk]) -> list[Sequence[Chunk]]:
        return [chunks] if chunks else []

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if self.network and chunk.request.replay:
                self.network.flush(chunk.request.slot)  # the steps before must be in its KV when the prompt goes on
        self._chunks = chunks
        self._forward(Family.PREFILL, chunks)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def prompt_logits(self, index: int, start: int, stop: int) -> Tensor:
        first = sum(len(chunk.tokens) for chunk in self._chunks[:index])
        return self._decoder.logits(self._hidden[first + start : first + stop])

    def first_tokens(self) -> Choices:
        ending = [(index, chunk.first) for index, chunk in enumerate(self._chunks) if chunk.first is not None]
        logits = self._decoder.logits(self._hidden[self._batch.last_rows[[index for index, _ in ending]]])
        return Choices(choose(logits, [row for _, row in ending]).tolist(), logits, list(range(len(ending))))

    def step_groups(self, entries: Sequence[StepTokens]) -> list[list[StepTokens]]:
        return split_rows(entries)

    def step(self, entries: Sequence[StepTokens]) -> None:
        self._forward(Family.STEP, entries)
        self._choices = self._chosen(entries)

    def choices(self) -> Choices:
        return self._choices

    def _chosen(self, entries: Sequence[StepTokens]) -> Choices:
        firsts, start = [], 0
        for entry in entries:
            firsts.append(start)
            start += len(entry.tokens) if entry.verifies else 0
        hidden = self._hidden
        if not all(entry.verifies for entry in entries):
            verified = torch.tensor([entry.verifies for entry in entries], device=self._device)
            hidden = hidden[verified[self._batch.sequence]]
        rows = [row for entry in entries if entry.verifies for row in entry.rows()]
        if not rows:
            return Choices([], hidden, firsts)
        logits = self._decoder.logits(hidden)
        return Choices(choose(logits, rows).tolist(), logits, firsts)

    def observe(self, following: Sequence[Sequence[int]]) -> None:
        self._chunks = ()  # requests that have ended are not kept alive
        if self.network is None or not any(following):
            return
        kept = [len(tokens) for tokens in following]
        batch, hidden, taps = self._batch, self._hidden, self._taps
        after = torch.tensor([token for tokens in following for token in tokens], device=self._device)
        if len(after) < batch.num_tokens and len(kept) == 1:
            batch, hidden, taps = batch.first(kept[0]), hidden[: kept[0]], taps[: kept[0]]
        elif len(after) < batch.num_tokens:
            counts = torch.tensor(kept, device=self._device)
            place = torch.arange(batch.num_tokens, device=self._device) - batch.starts[batch.sequence]
            keep = place < counts[batch.sequence]
            batch, hidden, taps = batch.select(keep), hidden[keep], taps[keep]
        self.network.observe(batch, hidden, taps, after)

    def distinct_experts(self, tokens: int) -> float | None:
        """Of every fifth step that is asked about."""
        self._asked += 1
        return distinct_experts(self._sparse, tokens) if self._asked % COUNT_EVERY == 1 else None

    # -- remembering

    def reset(self, slot: int) -> None:
        self.cache.reset(slot)
        if self.network:
            self.network.reset(slot)

    def save(self, slot: int, index: int, pending: int = 0) -> None:
        self.snapshots.save(self.cache, slot, index, pending)
        if self.network:
            self.network.flush(slot)  # its KV of the text so far is shared from here on

    def restore(self, slot: int, index: int) -> None:
        self.snapshots.restore(self.cache, slot, index)

    def release_memory(self, pages: Sequence[int]) -> int:
        states = [tensor for layer in self.snapshots.layers for tensor in layer]
        found = [layer for layer in self.cache.layers if isinstance(layer, KVPages)]
        kv = [tensor for layer in found for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales)]
        return discard(states, range(len(self.snapshots.positions))) + discard(
            [tensor for tensor in kv if tensor is not None], pages
        )

    # --

    def _forward(self, family: Family, members: Sequence[Chunk | StepTokens]) -> None:
        self._batch = flat_batch(family, members, self.tables)
        taps = self.network.taps if self.network else ()
        self._hidden, self._taps = self._decoder(self._batch, self.cache, taps)

    @cached_property
    def _sparse(self) -> list[SparseMlp]:
        return [module for module in self._decoder.layers.modules() if isinstance(module, SparseMlp)]


def flat_batch(family: Family, members: Sequence[Chunk | StepTokens], tables: Tensor) -> Batch:
    """`tables` [slots, P] has the pages of each slot. Page tables come ready-made, so the work of a step does not grow
    with the context behind it, and all other numbers travel to the device in one copy."""
    token_ids: list[int] = []
    positions: list[int] = []
    sequence: list[int] = []
    starts = [0]
    cached, slots, replay, width = [], [], [], 0
    for index, member in enumerate(members):
        request, count = member.request, len(member.tokens)
        room = len(request.pages) * PAGE_SIZE
        if not 0 < count <= room - request.computed:
            raise ValueError(f"{count} tokens after {request.computed} do not fit the {room} places of a request")
        token_ids += member.tokens
        positions += range(request.computed, request.computed + count)
        sequence += [index] * count
        starts.append(len(token_ids))
        cached.append(request.computed)
        slots.append(request.slot)
        replay.append(request.replay)
        width = max(width, len(request.pages))
    groups = (token_ids, positions, sequence, starts, cached, slots, replay)
    numbers = torch.tensor([number for group in groups for number in group], dtype=torch.long).to(tables.device)
    on_device = numbers.split([len(group) for group in groups])
    return Batch(
        family=family,
        page_size=PAGE_SIZE,
        token_ids=on_device[0],
        positions=on_device[1],
        starts=on_device[3],
        sequence=on_device[2],
        cached=on_device[4],
        slots=on_device[5],
        replay=on_device[6],
        tables=tables[on_device[5], :width],
    )


def distinct_experts(layers: Sequence[SparseMlp], tokens: int) -> float | None:
    """Per layer on average, in the forward over these `tokens` just done; None if that cannot be told."""
    if tokens == 1 and layers:
        return float(layers[0].moe.top_k)
    routed = [layer.routed for layer in layers if layer.routed is not None and len(layer.routed) == tokens]
    if not routed:
        return None
    return sum(len(set().union(*chosen.tolist())) for chosen in routed) / len(routed)
