"""Choosing tokens for many rows at once. Sampling is argmax(log p + G) with noise G(seed, position, token).

So a seed reproduces whatever else runs beside it, and a drafter that adds the same noise guesses the same token.
Per row: penalties, bias and barred tokens; temperature; min-p, top-k, top-p; then the noise.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.speculate.sampling import Sampling

_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # splitmix64, as signed


@dataclass(frozen=True)
class Row:
    """One position of one request. `output` are the tokens before it, drafted ones included."""

    sampling: Sampling
    position: int  # of the token to be chosen, in the whole sequence
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    allowed: Tensor | None = None  # [vocab] bool, what a grammar permits here


def choose(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Token ids [R] from logits [R, vocab]. Ties go to the lowest id."""
    scores = logits.float()
    if any(_is_shaped(row) for row in rows):
        scores = torch.stack([_shape(scores[i], row) for i, row in enumerate(rows)])
    warm = [i for i, row in enumerate(rows) if row.sampling.temperature > 0.0]
    chosen = scores.argmax(-1)
    if warm:
        chosen[warm] = _sample(scores[warm], [rows[i] for i in warm])
    return chosen


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """fp64 Gumbel noise -log(-log u), u from a counter-based generator, for int64 tensors that broadcast."""
    bits = (_mix(_mix(_mix(seeds) + positions) + tokens) >> 12) & ((1 << 52) - 1)
    uniform = (bits.double() + 0.5) * 2.0**-52  # never 0 or 1
    return -torch.log(-torch.log(uniform))


def _is_shaped(row: Row) -> bool:
    sampling = row.sampling
    barred = sampling.stop_ids and len(row.output) < sampling.min_tokens
    return bool(sampling.penalizes or sampling.logit_bias or barred or row.allowed is not None)


def _shape(scores: Tensor, row: Row) -> Tensor:
    """Penalties, bias and bars on one row [vocab]."""
    sampling, scores = row.sampling, scores.clone()
    if sampling.penalizes:
        seen = torch.tensor(sorted({*row.prompt, *row.output}), dtype=torch.long, device=scores.device)
        values = scores[seen]
        penalty = sampling.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
        counts = Counter(row.output)
        made = torch.tensor(list(counts), dtype=torch.long, device=scores.device)
        times = torch.tensor(list(counts.values()), dtype=scores.dtype, device=scores.device)
        scores[made] -= sampling.presence_penalty + sampling.frequency_penalty * times
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    if len(row.output) < sampling.min_tokens:
        scores[list(sampling.stop_ids)] = -torch.inf
    if row.allowed is not None:
        scores = scores.masked_fill(~row.allowed, -torch.inf)
    return scores


def _sample(scores: Tensor, rows: Sequence[Row]) -> Tensor:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(row.sampling, name) for row in rows], dtype=dtype, device=scores.device)[:, None]

    scores = scores / column("temperature", torch.float32)
    if any(row.sampling.min_p > 0.0 for row in rows):
        floor = scores.amax(-1, keepdim=True) + column("min_p", torch.float32).log()
        scores = scores.masked_fill(scores < floor, -torch.inf)
    top_k, top_p = column("top_k", torch.long), column("top_p", torch.float32)
    if bool((top_k > 0).any()) or bool((top_p < 1.0).any()):
        scores = _top(scores, top_k, top_p)
    row, token = (scores > -torch.inf).nonzero(as_tuple=True)  # noise is made only for what is left
    positions = torch.tensor([r.position for r in rows], device=scores.device)
    noise = gumbel(column("seed", torch.long)[row, 0], positions[row], token)
    noisy = torch.full_like(scores, -torch.inf, dtype=torch.float64)
    noisy[row, token] = scores[row, token].double() + noise
    return noisy.argmax(-1)


def _top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Bars all but the top_k largest, then all but the smallest set whose probability reaches top_p."""
    ordered, index = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    ordered = ordered.masked_fill((before >= top_p) & (rank > 0), -torch.inf)
    return torch.empty_like(scores).scatter_(1, index, ordered)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's output function on int64, which wraps around like uint64."""
    x = x * _GOLDEN + _GOLDEN
    x = (x ^ _logical_shift(x, 30)) * _MIX_1
    x = (x ^ _logical_shift(x, 27)) * _MIX_2
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
