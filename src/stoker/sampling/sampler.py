"""Choosing tokens for many rows at once. Sampling is argmax(log p + G) with noise G(seed, position, token).

So a seed reproduces whatever else runs beside it, and a drafter that adds the same noise guesses the same token.
Per row: penalties, bias and barred tokens; temperature; min-p, top-k, top-p; then the noise. Logprobs are those of the
model itself, before all of that.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from stoker.sampling.settings import Sampling

_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # splitmix64, as signed


class Past:
    """What penalties ask about a text, kept up to date token by token so that no step reads the text again."""

    def __init__(self, vocab_size: int, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self.seen = torch.zeros(vocab_size, dtype=torch.bool)  # in prompt or output
        self.times = torch.zeros(vocab_size)  # in the output
        self.tokens = 0  # of the output
        self.seen[list(prompt)] = True
        for token in output:
            self.push(token)

    def push(self, token: int) -> None:
        self.seen[token] = True
        self.times[token] += 1
        self.tokens += 1

    def with_more(self, tokens: Sequence[int]) -> "Past":
        """A copy with some tokens added."""
        other = Past.__new__(Past)
        other.seen, other.times, other.tokens = self.seen.clone(), self.times.clone(), self.tokens
        for token in tokens:
            other.push(token)
        return other


class Extended(Sequence[int]):
    """`text` followed by `more`, read as one sequence. Both may grow; the view grows with them.

    A step looks at the text after each of its drafts; copying a text of 100,000 tokens for each would cost more than
    the step.
    """

    def __init__(self, text: Sequence[int], more: Sequence[int]) -> None:
        self._text, self._more = text, more

    def __len__(self) -> int:
        return len(self._text) + len(self._more)

    def __iter__(self) -> Iterator[int]:
        return chain(self._text, self._more)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        border = len(self._text)
        if isinstance(index, slice):
            start, stop, stride = index.indices(len(self))
            if stride != 1:
                return [self[i] for i in range(start, stop, stride)]
            behind = slice(max(start - border, 0), max(stop - border, 0))
            return [*self._text[start : min(stop, border)], *self._more[behind]]
        if index < 0:
            index += len(self)
        if index < 0:
            raise IndexError("before the beginning")
        return self._text[index] if index < border else self._more[index - border]


@dataclass(slots=True)
class Row:
    """One position of one request. `output` are the tokens before it, drafted ones included."""

    sampling: Sampling
    position: int  # of the token to be chosen, in the whole sequence
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    allowed: Tensor | None = None  # [vocab] bool, what a grammar permits here
    past: Past | None = None  # of the prompt and a beginning of `output`; without it both are counted anew


def choose(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Token ids [R] from logits [R, vocab]. Ties go to the lowest id."""
    scores = logits.float()
    shaped = [i for i, row in enumerate(rows) if _is_shaped(row)]
    if shaped:
        scores = scores.clone()
        for i in shaped:
            _shape(scores[i], rows[i])
    warm = [i for i, row in enumerate(rows) if row.sampling.temperature > 0.0]
    chosen = scores.argmax(-1)
    if warm:
        chosen[warm] = _sample(scores[warm], [rows[i] for i in warm])
    return chosen


class Score(NamedTuple):
    """What a row of logits says about one token."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens and their log-probabilities, likeliest first
    rank: int  # 1 if no token is likelier


def score(logits: Tensor, tokens: Sequence[int], top: int) -> list[Score]:
    """Of tokens[i] under row i of fp32 logits [R, vocab]; ties go to the lowest id. All numbers come to the host in one
    read. Calls with the same R give a row the same digits whatever its neighbours are."""
    scores = logits.double()
    totals = torch.logsumexp(scores, 1, keepdim=True)
    own = scores.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (scores > own).sum(1, keepdim=True) + 1
    best = _likeliest(logits, min(top, logits.shape[1]))
    told = torch.cat([own - totals, ranks.double(), best.double(), scores.gather(1, best) - totals], 1).tolist()
    width = best.shape[1]
    found = []
    for logprob, rank, *rest in told:
        likeliest = zip(map(int, rest[:width]), rest[width:], strict=True)
        found.append(Score(logprob, tuple(likeliest), int(rank)))
    return found


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """Ids [R, count] of the largest fp32 logits of each row, ties in the order of ids, which topk alone leaves open."""
    bits = (logits.float() + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers in the order of the floats
    last = (1 << 32) - 1
    keys = (ordered << 32) + (last - torch.arange(logits.shape[1], device=logits.device))
    return last - (keys.topk(count, 1).values & last)


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """fp64 Gumbel noise -log(-log u), u from a counter-based generator, for int64 tensors that broadcast."""
    bits = (_mix(_mix(_mix(seeds) + positions) + tokens) >> 12) & ((1 << 52) - 1)
    uniform = (bits.double() + 0.5) * 2.0**-52  # never 0 or 1
    return -_log(-_log(uniform))


def _is_shaped(row: Row) -> bool:
    return row.sampling.shapes or row.allowed is not None


def _shape(scores: Tensor, row: Row) -> None:
    """Penalties, bias and bars on one row [vocab], in place."""
    sampling = row.sampling
    if sampling.penalizes:
        past = _past(row, len(scores))
        seen = past.seen.nonzero()[:, 0].to(scores.device)
        values = scores[seen]
        penalty = sampling.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
        made = past.times.nonzero()[:, 0]
        times = past.times[made].to(scores.device)
        scores[made.to(scores.device)] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.logit_bias:
        tokens, biases = sampling.bias_arrays
        scores[_tensor(tokens, torch.long, scores)] += _tensor(biases, torch.float32, scores)
    if sampling.stop_ids and len(row.output) < sampling.min_tokens:
        scores[_tensor(sampling.stop_array, torch.long, scores)] = -torch.inf
    if row.allowed is not None:
        scores.masked_fill_(~row.allowed.to(scores.device), -torch.inf)


def _tensor(numbers: "array[int] | array[float]", dtype: torch.dtype, like: Tensor) -> Tensor:
    """Shares the memory of an array that is not empty, or copies it to the device of `like`."""
    return torch.frombuffer(numbers, dtype=dtype).to(like.device)


def _past(row: Row, vocab_size: int) -> Past:
    if row.past is None:
        return Past(vocab_size, row.prompt, row.output)
    drafts = row.output[row.past.tokens :]
    return row.past.with_more(drafts) if drafts else row.past


def _sample(scores: Tensor, rows: Sequence[Row]) -> Tensor:
    """Rows with a temperature: filters, then the noise, on what is left of each."""
    scores = scores / _column(rows, "temperature", scores)
    if any(row.sampling.min_p > 0.0 for row in rows):
        floor = scores.amax(-1, keepdim=True) + _column(rows, "min_p", scores).log()
        scores = scores.masked_fill(scores < floor, -torch.inf)
    chosen = torch.empty(len(rows), dtype=torch.long, device=scores.device)
    for width, members in _by_width(rows, scores.shape[1]).items():
        mine = [rows[i] for i in members]
        own = scores if len(members) == len(rows) else scores[members]
        if width is None:
            chosen[members] = _noisiest(own, torch.arange(own.shape[1], device=own.device)[None], mine)
        else:
            chosen[members] = _filtered(own, mine, width)
    return chosen


def _by_width(rows: Sequence[Row], vocab_size: int) -> dict[int | None, list[int]]:
    """Rows by how many of the likeliest tokens to look at first, None where no filter asks which these are: a row's own
    settings decide, not its neighbours."""
    found: dict[int | None, list[int]] = {}
    for i, row in enumerate(rows):
        width = min(vocab_size, max(64, 1 << row.sampling.top_k.bit_length())) if row.sampling.filters else None
        found.setdefault(width, []).append(i)
    return found


def _filtered(scores: Tensor, rows: Sequence[Row], width: int) -> Tensor:
    """Bars all but the top_k largest, then all but the smallest set whose probability reaches top_p; then samples.

    Only the `width` largest are sorted. Rows that turn out to need more are done again with more.
    """
    ids = _largest(scores, width)
    ordered = scores.gather(1, ids)
    rank = torch.arange(width, device=scores.device)
    top_k = _column(rows, "top_k", scores, torch.long)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    probabilities = torch.where(top_k > 0, ordered.softmax(-1), scores.softmax(-1).gather(1, ids))
    before = probabilities.cumsum(-1) - probabilities
    top_p = _column(rows, "top_p", scores)
    dropped = ((before >= top_p) & (top_p < 1.0) & (rank > 0)) | (ordered == -torch.inf)
    kept = (~dropped).sum(-1, keepdim=True)
    chosen = _noisiest(ordered.masked_fill(dropped, -torch.inf), ids, rows)
    if width == scores.shape[1]:
        return chosen
    # the last one kept must be larger than the last one looked at, or its equals may have been left out
    unsure = scores.gather(1, ids.gather(1, (kept - 1).clamp(min=0))) <= scores.gather(1, ids[:, -1:])
    again = unsure[:, 0].nonzero()[:, 0].tolist()
    if again:
        chosen[again] = _filtered(scores[again], [rows[i] for i in again], min(8 * width, scores.shape[1]))
    return chosen


def _largest(scores: Tensor, count: int) -> Tensor:
    """Ids [R, count] of the largest, in falling order; equals in the order of their ids."""
    if count == scores.shape[1]:
        return scores.sort(dim=-1, descending=True, stable=True).indices
    ids = scores.topk(count, sorted=False).indices.sort(-1).values
    return ids.gather(1, scores.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices)


def _noisiest(scores: Tensor, ids: Tensor, rows: Sequence[Row]) -> Tensor:
    """argmax(score + G) for scores [R, n] of tokens ids [R or 1, n]."""
    positions = torch.tensor([row.position for row in rows], device=scores.device)[:, None]
    noise = gumbel(_column(rows, "seed", scores, torch.long), positions, ids)
    place = (scores.double() + noise).argmax(-1, keepdim=True)
    return ids.expand(len(rows), -1).gather(1, place)[:, 0]


def _column(rows: Sequence[Row], name: str, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A setting of every row, [R, 1]."""
    return torch.tensor([getattr(row.sampling, name) for row in rows], dtype=dtype, device=like.device)[:, None]


def _log(x: Tensor) -> Tensor:
    """On the CPU numpy's is several times as fast as torch's, and noise is most of what sampling costs there."""
    return torch.from_numpy(np.log(x.numpy())) if x.is_cpu else torch.log(x)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's output function on int64, which wraps around like uint64."""
    x = x * _GOLDEN
    x += _GOLDEN
    for bits, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        shifted = x >> bits
        shifted &= (1 << (64 - bits)) - 1  # the sign must not come along
        x ^= shifted
        x *= factor
    return x
