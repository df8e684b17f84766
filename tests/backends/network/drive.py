"""Drives Stoker's networks over sequences as an engine would: in chunks, several at a time, on scattered pages."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache, KVPages
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.dflash import DFlash

SEQUENCES, PAGES_EACH = 2, 4  # up to 256 positions for each of two sequences


def page_table(sequence: int) -> list[int]:
    """Pages of the two sequences lie interleaved and back to front, so that a mix-up cannot go unseen."""
    return [sequence + SEQUENCES * page for page in reversed(range(PAGES_EACH))]


def random_tokens(count: int, vocab: int = 512, seed: int = 0) -> list[int]:
    return torch.randint(1, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def spans(total: int, chunk: int) -> list[tuple[int, int]]:
    return [(start, min(start + chunk, total)) for start in range(0, total, chunk)]


def run_trunk(
    model: Decoder, tokens: Sequence[int], taps: Sequence[int] = (), family: Family = Family.PREFILL
) -> tuple[Tensor, Tensor]:
    """Post-norm hidden [T, H] and tapped residual streams [T, n * H] of one fresh sequence."""
    cache = Cache.allocate(model.config, pages=SEQUENCES * PAGES_EACH, slots=1, dtype=model.embed_tokens.weight.dtype)
    run = Run(tokens, cached=0, slot=0, pages=page_table(0))
    return model(Batch.of(family, [run], PAGE_SIZE), cache, taps=taps)


@dataclass
class MtpDrive:
    """The MTP head with KV pages of its own, and how many positions of each sequence they hold."""

    model: Decoder
    cached: list[int] = field(default_factory=lambda: [0] * SEQUENCES)

    def __post_init__(self) -> None:
        config = self.model.config
        self.pages = KVPages.allocate(
            SEQUENCES * PAGES_EACH, config.num_kv_heads, config.head_dim, self.model.embed_tokens.weight.dtype, "cpu"
        )

    def feed(self, family: Family, following: dict[int, list[int]], hidden: dict[int, Tensor]) -> dict[int, Tensor]:
        """One pass over some tokens of some sequences: h_t and the token after it -> [T, H] each."""
        assert self.model.mtp is not None
        runs = [Run(ids, self.cached[s], slot=s, pages=page_table(s)) for s, ids in following.items()]
        batch = Batch.of(family, runs, PAGE_SIZE)
        embeddings = self.model.embed_tokens(batch.token_ids)
        out = self.model.mtp(batch, embeddings, torch.cat([hidden[s] for s in following]), self.pages)
        for s, ids in following.items():
            self.cached[s] += len(ids)
        return dict(zip(following, out.split([len(ids) for ids in following.values()]), strict=True))

    def feed_chunks(self, family: Family, following: list[int], hidden: Tensor, chunk: int) -> Tensor:
        """A prompt of sequence 0, `chunk` tokens at a time."""
        parts = [self.feed(family, {0: following[a:b]}, {0: hidden[a:b]})[0] for a, b in spans(len(following), chunk)]
        return torch.cat(parts)

    def draft(self, last: Tensor, count: int, sequence: int = 0) -> tuple[list[int], Tensor]:
        """`count` greedy drafts from the prompt's last output [1, H], and the outputs they were read from."""
        outputs = [last]
        drafts = [int(self.model.logits(last).argmax())]
        while len(drafts) < count:
            last = self.feed(Family.STEP, {sequence: drafts[-1:]}, {sequence: last})[sequence]
            outputs.append(last)
            drafts.append(int(self.model.logits(last).argmax()))
        return drafts, torch.cat(outputs)


@dataclass
class DFlashDrive:
    """A drafter with its context pages, and how much context each sequence has."""

    drafter: DFlash
    model: Decoder  # lends the embedding
    context: list[int] = field(default_factory=lambda: [0] * SEQUENCES)

    def __post_init__(self) -> None:
        config, dtype = self.drafter.config, self.model.embed_tokens.weight.dtype
        self.pages = [
            KVPages.allocate(SEQUENCES * PAGES_EACH, config.num_kv_heads, config.head_dim, dtype, "cpu")
            for _ in config.layer_types
        ]

    def observe(self, family: Family, features: dict[int, Tensor], chunk: int = 256) -> None:
        """Adds taps [n, taps * H] to the context of each sequence, `chunk` tokens at a time."""
        for a, b in spans(max(len(f) for f in features.values()), chunk):
            parts = {s: f[a:b] for s, f in features.items() if len(f) > a}
            runs = [Run([0] * len(f), self.context[s], slot=s, pages=page_table(s)) for s, f in parts.items()]
            self.drafter.observe(Batch.of(family, runs, PAGE_SIZE), torch.cat(list(parts.values())), self.pages)
            for s, f in parts.items():
                self.context[s] += len(f)

    def propose(self, anchors: dict[int, int], size: int | None = None) -> dict[int, Tensor]:
        """Drafter outputs [block, H] for blocks [anchor, mask, ...] right after each sequence's context."""
        config = self.drafter.config
        size = size or config.block_size
        blocks = {s: [anchor] + [config.mask_token_id] * (size - 1) for s, anchor in anchors.items()}
        runs = [Run(ids, self.context[s], slot=s, pages=page_table(s)) for s, ids in blocks.items()]
        batch = Batch.of(Family.STEP, runs, PAGE_SIZE)
        out = self.drafter(batch, self.model.embed_tokens(batch.token_ids), self.pages)
        return dict(zip(blocks, out.split(size), strict=True))
