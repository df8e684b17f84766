"""One forward of the model: what goes in, which tokens come out, what the drafter and the prefix cache get of it."""

from collections.abc import Sequence as Many
from functools import cached_property, partial

import torch
from torch import Tensor

from stoker.backends.cpu.batch import Batch
from stoker.backends.cpu.cache import Cache
from stoker.backends.cpu.decoder import Decoder
from stoker.backends.cpu.experts import SparseMlp
from stoker.backends.family import Family
from stoker.engine.block import Block
from stoker.engine.flat import Part, flat_batch
from stoker.engine.outcome import Emitted, emit, following, score_prompt, settle
from stoker.engine.request import Sequence
from stoker.engine.scheduler import Scheduler
from stoker.sampling.sampler import Row, choose
from stoker.speculate.drafter import Drafter

COUNT_EVERY = 5  # steps: looking at what all layers chose takes a hundredth of one


class Runner:
    def __init__(self, model: Decoder, cache: Cache, drafter: Drafter | None, scheduler: Scheduler) -> None:
        self._model, self._cache, self._drafter, self._scheduler = model, cache, drafter, scheduler
        self._device = model.embed_tokens.weight.device
        self._asked = 0  # times that distinct experts were asked for

    def prefill(self, parts: list[Part], first_rows: dict[int, Row]) -> Emitted:
        """Prompt chunks; requests in `first_rows` end their prompt here and get their first token."""
        members = [part.request for part in parts]
        for sequence in members:
            if self._drafter and sequence.replay:
                self._drafter.flush(sequence.slot)  # the steps before must be in its KV when the prompt goes on
        batch = flat_batch(Family.PREFILL, parts, self._scheduler.tables)
        hidden, taps = self._forward(batch)
        for part, own in zip(parts, hidden.split([len(part.tokens) for part in parts]), strict=True):
            if part.request.scores_prompt:
                score_prompt(part.request, len(own), partial(self._logits_of, own))
        for part in parts:
            part.request.computed += len(part.tokens)
            part.request.replay = 0
            part.request.stats.prefill_tokens += len(part.tokens)
        fresh = [index for index, sequence in enumerate(members) if sequence.id in first_rows]
        emitted: Emitted = []
        if fresh:
            logits = self._model.logits(hidden[batch.last_rows[fresh]])
            chosen = choose(logits, [first_rows[members[index].id] for index in fresh]).tolist()
            for row, (index, token) in enumerate(zip(fresh, chosen, strict=True)):
                emitted.append((members[index], emit(members[index], [token], logits, row)))
        self._observe(batch, members, hidden, taps, [len(part.tokens) for part in parts])
        for sequence in members:
            self._scheduler.keep_prompt(sequence)
        return emitted

    def verify(self, blocks: list[Block]) -> Emitted:
        """One step: the newest token of each block and its drafts, or tokens to compute again."""
        parts = [Part(block.sequence, block.tokens) for block in blocks]
        batch = flat_batch(Family.STEP, parts, self._scheduler.tables)
        hidden, taps = self._forward(batch)
        logits, targets = self._targets(batch, hidden, blocks)
        firsts, start = [], 0
        for block in blocks:
            firsts.append(start)
            start += len(block.tokens) if block.verifies else 0
        emitted, kept = settle(blocks, targets, logits, firsts)
        self._observe(batch, [block.sequence for block in blocks], hidden, taps, kept)
        for block in blocks:
            if block.sequence.computed > len(block.sequence.prompt):
                self._scheduler.keep_output(block.sequence)
        return emitted

    def distinct_experts(self, tokens: int) -> float | None:
        """In the last forward, if that was one over so many tokens, and it is one of those that are counted."""
        self._asked += 1
        return distinct_experts(self._sparse, tokens) if self._asked % COUNT_EVERY == 1 else None

    @cached_property
    def _sparse(self) -> list[SparseMlp]:
        return [module for module in self._model.layers.modules() if isinstance(module, SparseMlp)]

    def _logits_of(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        return self._model.logits(hidden[start:stop])

    def _targets(self, batch: Batch, hidden: Tensor, blocks: list[Block]) -> tuple[Tensor, list[int]]:
        """Logits [R, vocab] of the rows to verify, and the model's choice after each."""
        if not all(block.verifies for block in blocks):
            verified = torch.tensor([block.verifies for block in blocks], device=self._device)
            hidden = hidden[verified[batch.sequence]]
        rows = [row for block in blocks if block.verifies for row in block.rows()]
        if not rows:
            return hidden, []
        logits = self._model.logits(hidden)
        return logits, choose(logits, rows).tolist()

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._model(batch, self._cache, self._drafter.taps if self._drafter else ())

    def _observe(self, batch: Batch, members: list[Sequence], hidden: Tensor, taps: Tensor, kept: list[int]) -> None:
        """Shows the drafter the first kept[i] tokens of each run, now that the token after each is known."""
        if self._drafter is None or not self._drafter.observes or not any(kept):
            return
        after = torch.tensor(following(members, kept), device=self._device)
        if len(after) < batch.num_tokens and len(members) == 1:
            batch, hidden, taps = batch.first(kept[0]), hidden[: kept[0]], taps[: kept[0]]
        elif len(after) < batch.num_tokens:
            counts = torch.tensor(kept, device=self._device)
            place = torch.arange(batch.num_tokens, device=self._device) - batch.starts[batch.sequence]
            keep = place < counts[batch.sequence]
            batch, hidden, taps = batch.select(keep), hidden[keep], taps[keep]
        self._drafter.observe(batch, hidden, taps, after)


def distinct_experts(layers: Many[SparseMlp], tokens: int) -> float | None:
    """Per layer on average, in the forward over these `tokens` just done; None if that cannot be told."""
    if tokens == 1 and layers:
        return float(layers[0].moe.top_k)
    routed = [layer.routed for layer in layers if layer.routed is not None and len(layer.routed) == tokens]
    if not routed:
        return None
    return sum(len(set().union(*chosen.tolist())) for chosen in routed) / len(routed)
