"""How large an engine is, and which requests it could never serve. `sizes.memory` plans these numbers from bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.backends.family import CHUNK, PAGE_SIZE
from stoker.errors import RequestError
from stoker.sampling.settings import Sampling, are_whole
from stoker.weights.model_config import ModelConfig

KV_DTYPES = ("bf16", "fp32", "fp8")


@dataclass(frozen=True)
class EngineConfig:
    pages: int = 128  # of 64 tokens
    slots: int = 8  # requests running at a time
    max_depth: int = 8  # drafts per step
    prefill_budget: int = 512  # prompt tokens per step at most, a multiple of 64
    dense_copies: bool = False  # whether a GPU keeps 16-bit copies of its dense weights for prompts
    prefill_pause: float = math.inf  # seconds that the prompts of a step may keep running answers waiting
    snapshots: int = 0  # recurrent states the prefix cache may keep; 0 turns it off
    snapshot_interval: int = 1024  # tokens from one to the next, a multiple of 64
    cache_generated: bool = True  # whether snapshots are also taken in generated text
    kv_dtype: str | None = None  # how keys and values are stored, of KV_DTYPES; None: as the model computes
    assumed_tokens: float | None = None  # a step's mean if drafts are accepted unseen (speculate/assumed.py)

    def __post_init__(self) -> None:
        for name, least in (("pages", 1), ("slots", 1), ("max_depth", 0), ("snapshots", 0)):
            if getattr(self, name) < least:
                raise RequestError(f"{name} is {getattr(self, name)}, expected at least {least}.")
        if not self.prefill_pause > 0:
            raise RequestError(f"prefill_pause is {self.prefill_pause} s, expected more than 0.")
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise RequestError(f"kv_dtype is {self.kv_dtype!r}, expected {' or '.join(KV_DTYPES)}.")
        for name in ("prefill_budget", "snapshot_interval"):
            value = getattr(self, name)
            if value < CHUNK or value % CHUNK:
                raise RequestError(f"{name} is {value}, expected a multiple of {CHUNK}.")

    @property
    def window(self) -> int:
        """Most tokens of one request in a step: the newest and its drafts."""
        return 1 + self.max_depth

    def table_width(self, max_positions: int) -> int:
        """Most pages of one request."""
        return min(self.pages, -(-max_positions // PAGE_SIZE))


def check_request(config: ModelConfig, prompt: Sequence[int], sampling: Sampling) -> None:
    """Refuses what the model itself cannot serve, with the numbers."""
    if not prompt:
        raise RequestError("the prompt is empty: it has 0 tokens, expected at least 1.")
    tokens = [*prompt, *sampling.logit_bias, *sampling.stop_ids]
    if not are_whole(tokens):
        odd = next(token for token in tokens if not are_whole([token]))
        raise RequestError(f"token id {odd!r} is not a whole number.")
    outside = next((token for token in tokens if not 0 <= token < config.vocab_size), None)
    if outside is not None:
        raise RequestError(f"token id {outside} is outside the vocabulary of {config.vocab_size:,}.")
    need = len(prompt) + sampling.max_tokens
    if need > config.max_positions:
        raise RequestError(
            f"prompt has {len(prompt):,} tokens and max_tokens asks {sampling.max_tokens:,}: "
            f"{need:,} > context {config.max_positions:,}. Shorten the prompt or lower max_tokens."
        )
