"""The language-model head as drafters use it: perhaps over fewer tokens, perhaps with fewer bits.

A drafter reads the head once per pass, and at 250k tokens it is most of what a pass costs. Guesses may be made from a
part of it: a token that is left out is never guessed, which costs an acceptance and never changes the output.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from stoker.backends.family import Family
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.linear import Weight, as_tensor, linear
from stoker.backends.network.low_bits import Bits, lower
from stoker.backends.network.packing.products import Packed
from stoker.sampling.sampler import Row, choose
from stoker.speculate.drafter import DraftRequest
from stoker.weights.formats.int8 import Int8Row

MISSES = 32  # tokens of the text that were left out before the list is made anew


@dataclass(frozen=True)
class HeadChoice:
    """`vocab` tokens are kept: those the text uses most, then those of the lowest ids, which a BPE learned first."""

    vocab: int | None = None  # None: all
    bits: Bits | None = None  # None: as the model stores it


class DraftHead:
    def __init__(self, model: Decoder, how: HeadChoice | None = None) -> None:
        self._model, self._how = model, how or HeadChoice()
        self._size = model.config.vocab_size
        self._counts: Counter[int] = Counter()
        self._read: dict[int, int] = {}  # tokens of each slot's text that were counted
        self._known: set[int] = set()
        self._misses = 0
        self._ids: Tensor | None = None  # [n] tokens the rows of `_weight` stand for, rising; None: all
        self._weight: Weight = model.lm_head.weight
        self._packed: Packed | None = None
        if self._how.vocab is not None:
            self._renew()
        elif self._how.bits:
            self._use(as_tensor(model.lm_head.weight))

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    @property
    def kept(self) -> list[int]:
        """Tokens that can be guessed."""
        return list(range(self._size)) if self._ids is None else self._ids.tolist()

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, vocab], -inf for tokens that are left out."""
        if self._weight is self._model.lm_head.weight:
            return self._model.logits(hidden)
        if self._packed is not None:
            found = self._packed(hidden, torch.float32)
        else:
            found = linear(hidden, self._weight, Family.STEP, torch.float32)
        if self._ids is None:
            return found
        return found.new_full((len(found), self._size), -torch.inf).index_copy_(1, self._ids, found)

    def guess(self, logits: Tensor, rows: Sequence[Row]) -> list[tuple[int, float]]:
        """Each row's token, chosen as the model would choose it, and its probability."""
        tokens = choose(logits, rows)
        sure = (logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)).exp()
        return list(zip(tokens.tolist(), sure.tolist(), strict=True))

    def read(self, requests: Sequence[DraftRequest]) -> None:
        """Learns which tokens these texts use; each is counted once."""
        if self._ids is None:
            return
        for request in requests:
            done = self._read.get(request.slot, 0)
            before = len(request.prompt)
            fresh = [*request.prompt[done:], *request.output[max(0, done - before) :]]
            self._read[request.slot] = request.length
            self._counts.update(fresh)
            self._misses += sum(token not in self._known for token in fresh)
        if self._misses >= MISSES:
            self._renew()

    def reset(self, slot: int) -> None:
        self._read.pop(slot, None)

    def _renew(self) -> None:
        assert self._how.vocab is not None
        by_use = (token for token, _ in self._counts.most_common(self._how.vocab))
        wanted = dict.fromkeys([*self._model.config.eos_token_ids, *by_use, *range(self._size)])
        self._known = set(islice(wanted, self._how.vocab))
        self._ids = torch.tensor(sorted(self._known), device=self._model.embed_tokens.weight.device)
        self._use(_rows(self._model.lm_head.weight, self._ids))
        self._misses = 0

    def _use(self, weight: Weight) -> None:
        """In the bits asked for, and packed where the model's own head is."""
        self._weight = lower(as_tensor(weight), self._how.bits) if self._how.bits else weight
        if self._model.outputs.packed is not None:
            from stoker.backends.network.packing.pack import pack

            self._packed = pack(self._weight)


def _rows(weight: Weight, ids: Tensor) -> Weight:
    """Some rows of a head, in its own format where that stores rows by themselves."""
    if isinstance(weight, Int8Row):
        return Int8Row(weight=weight.weight[ids], weight_scale=weight.weight_scale[ids])
    dense = weight if isinstance(weight, Tensor) else weight.dequantize(torch.bfloat16)
    return dense[ids].contiguous()
