"""What a request's grammar may say about its next token, and how that reaches the positions of a drafted block."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from typing import Protocol

import torch
from torch import Tensor

from stoker.errors import RequestError
from stoker.sampling.sampler import Extended
from stoker.sampling.settings import Sampling


class TokenMask(Protocol):
    """Rules of one request. Both answers must depend on `output` alone: drafts that are thrown away again are asked
    about too, in any order. `output` is only valid during the call."""

    def allowed(self, output: Sequence[int]) -> Tensor | None:
        """[vocab] bool on the CPU: tokens that may follow `output`; None if any may."""

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """Tokens that can only come next, one after another; () if there is a choice. They are drafts for free."""


class RemoteMask(ABC):
    """A TokenMask that is computed elsewhere: asked ahead of time, a step can go on without those that are late.

    `allowed` and `forced` wait for what was not asked before.
    """

    @abstractmethod
    def ask(self, output: Sequence[int], drafts: Sequence[int] = (), room: int = 0) -> int:
        """Begins to compute what may follow `output`, each of the drafts, and up to `room` tokens that are forced.

        Returns how many of the drafts the answer will cover."""

    @abstractmethod
    def ready(self, output: Sequence[int]) -> bool:
        """Whether what may follow `output`, or why the mask has failed, is there, and nothing is being computed."""

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Whether something is being computed."""

    @property
    @abstractmethod
    def connection(self) -> Connection | None:
        """What to sleep on while it is."""

    @abstractmethod
    def allowed(self, output: Sequence[int]) -> Tensor | None: ...

    @abstractmethod
    def forced(self, output: Sequence[int]) -> Sequence[int]: ...

    @abstractmethod
    def close(self) -> None:
        """The request has ended."""


def wait_for(masks: Sequence[RemoteMask], seconds: float) -> None:
    """Until nothing is being computed any more, or nothing has come for so long; at most ten times that."""
    last = began = time.monotonic()
    left = [mask for mask in masks if mask.waiting]
    while left:
        now = time.monotonic()
        room = min(last + seconds, began + 10 * seconds) - now
        if room <= 0:
            return
        wait_any({connection for mask in left if (connection := mask.connection)}, room)  # some share one
        still = [mask for mask in left if mask.waiting]
        if len(still) < len(left):
            last = time.monotonic()
        left = still


def forced_by(mask: TokenMask, output: Sequence[int], vocab_size: int) -> list[int]:
    """What the mask forces after `output`. Raises RequestError if it fails."""
    try:
        forced = [int(token) for token in mask.forced(output)]
    except BaseException as error:
        raise _failed(error, len(output)) from error
    outside = next((token for token in forced if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise RequestError(f"the token mask forces token {outside}, outside the vocabulary of {vocab_size:,}.")
    return forced


def first_mask(mask: TokenMask, sampling: Sampling, output: Sequence[int], vocab_size: int) -> Tensor | None:
    """What may follow `output`; None: anything. Raises RequestError if the mask fails or leaves nothing."""
    return _ask(mask, sampling, output, vocab_size)


def mask_drafts(
    mask: TokenMask,
    sampling: Sampling,
    output: Sequence[int],
    first: Tensor | None,
    drafts: Sequence[int],
    vocab_size: int,
) -> list[Tensor | None]:
    """Masks of the positions of a drafted block, `first` in front: one more than the drafts that may stand.

    Drafts end before the first that is barred, for behind it the rules have nothing to say. They also end where the
    rules fail: that text may never come about, and if it does, it fails as the beginning of its own step. So a request
    fails after the same tokens with and without drafts.
    """
    masks = [first]
    for place, token in enumerate(drafts):
        current = masks[-1]
        if current is not None and not bool(current[token]):
            break
        try:
            masks.append(_ask(mask, sampling, Extended(output, drafts[: place + 1]), vocab_size))
        except RequestError:
            break
    return masks


def _ask(mask: TokenMask, sampling: Sampling, output: Sequence[int], vocab_size: int) -> Tensor | None:
    try:
        allowed = mask.allowed(output)
    except BaseException as error:
        raise _failed(error, len(output)) from error
    if allowed is None:
        return None
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool or tuple(allowed.shape) != (vocab_size,):
        found = f"{allowed.dtype} {list(allowed.shape)}" if isinstance(allowed, Tensor) else type(allowed).__name__
        raise RequestError(f"the token mask is {found}, expected torch.bool [{vocab_size}] or None.")
    barred = sampling.stop_ids and len(output) < sampling.min_tokens
    if barred:
        allowed = allowed.clone()
        allowed[torch.frombuffer(sampling.stop_array, dtype=torch.long)] = False
    if not bool(allowed.any()):
        because = f" once stop ids are barred until min_tokens ({sampling.min_tokens})" if barred else ""
        raise RequestError(f"the token mask allows no token after {len(output)} output tokens{because}.")
    return allowed


def _failed(error: BaseException, tokens: int) -> RequestError:
    """A panic of the library behind a mask is no Exception; only Ctrl-C is meant for somebody else."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    return RequestError(f"the token mask failed after {tokens} output tokens: {type(error).__name__}: {error}")
