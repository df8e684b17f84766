"""Running a decoder on whole sequences in tests: any chunking, any family, state in scattered pages."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache, KVPages
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.deltanet import DeltaState


def new_cache(model: Decoder, pages: int = 16, slots: int = 4) -> Cache:
    dtype = model.embed_tokens.weight.dtype
    return Cache.allocate(model.config, pages=pages, slots=slots, window=150, dtype=dtype)


@torch.inference_mode()
def run_chunks(
    model: Decoder,
    cache: Cache,
    tokens: Sequence[int],
    chunks: Sequence[int],
    family: Family,
    *,
    slot: int = 0,
    pages: Sequence[int] = range(16),
    cached: int = 0,
) -> Tensor:
    """Logits [len(tokens), vocab] of a sequence fed in chunks of the given lengths, all of it committed at the end."""
    rows, begin, replay = [], 0, 0
    for length in chunks:
        run = Run(list(tokens[begin : begin + length]), cached + begin, slot, list(pages), replay)
        hidden, _ = model(Batch.of(family, [run], PAGE_SIZE), cache)
        rows.append(model.logits(hidden, family))
        begin += length
        replay = length if family is Family.STEP else 0
    cache.settle(slot, replay)
    assert begin == len(tokens)
    return torch.cat(rows)


def split(total: int, size: int) -> list[int]:
    """total = size + size + ... + rest."""
    return [min(size, total - begin) for begin in range(0, total, size)]


def state_of(cache: Cache, slot: int, pages: Sequence[int], length: int) -> list[Tensor]:
    """Everything a sequence has left behind: keys and values up to `length`, conv and recurrent states."""
    parts: list[Tensor] = []
    for layer in cache.layers:
        if isinstance(layer, KVPages):
            parts += [tensor[list(pages)].flatten(0, 1)[:length] for tensor in (layer.keys, layer.values)]
        else:
            assert isinstance(layer, DeltaState)
            carried = cache.recurrence.carried(slot, length)
            parts += [layer.inputs.flatten(0, 1)[carried], layer.recurrent[slot]]
    return parts


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """Relative L2 distance per row."""
    return (got - want).norm(dim=-1) / want.norm(dim=-1)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).float().norm() / want.float().norm())
