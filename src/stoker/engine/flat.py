"""Runs of several sequences as the flat tensors of one forward. Page tables come ready-made, so the work of a step does
not grow with the context behind it, and all other numbers travel to the device in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.backends.cpu.batch import Batch
from stoker.backends.family import PAGE_SIZE, Family
from stoker.engine.request import Sequence as Request


@dataclass(slots=True)
class Part:
    """Tokens of one request that a forward computes, after those it has computed already."""

    request: Request
    tokens: list[int]


def flat_batch(family: Family, parts: Sequence[Part], tables: Tensor) -> Batch:
    """`tables` [slots, P] has the pages of each slot."""
    token_ids: list[int] = []
    positions: list[int] = []
    sequence: list[int] = []
    starts = [0]
    cached, slots, replay, width = [], [], [], 0
    for index, part in enumerate(parts):
        request, count = part.request, len(part.tokens)
        room = len(request.pages) * PAGE_SIZE
        if not 0 < count <= room - request.computed:
            raise ValueError(f"{count} tokens after {request.computed} do not fit the {room} places of a request")
        token_ids += part.tokens
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
