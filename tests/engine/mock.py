"""A model that computes nothing: the token after `token` at `position` is a formula. For what the engine itself costs.

It keeps the interfaces of the real one, counts its rows and the time spent inside it, and has pages and slots of a few
bytes.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from stoker.backends.family import Family
from stoker.backends.network.batch import Batch
from stoker.backends.network.cache import Cache
from stoker.backends.network.decoder import Decoder, Embedding
from stoker.speculate.depth.cost import DraftCost
from stoker.speculate.drafter import Draft, DraftRequest, GoOn
from stoker.weights.model_config import ModelConfig
from tests.support.random_checkpoint import small_config

VOCAB = 256


def following(token: int, position: int) -> int:
    """The token after `token`, which stands at `position`."""
    return (token * 31 + position * 7 + 11) % VOCAB


def answer(prompt: Sequence[int], tokens: int) -> list[int]:
    """What the mock says after a prompt."""
    text = [prompt[-1]]
    for position in range(len(prompt) - 1, len(prompt) - 1 + tokens):
        text.append(following(text[-1], position))
    return text[1:]


class MockModel:
    def __init__(self, max_positions: int = 1 << 20) -> None:
        config = ModelConfig.from_dict(small_config("qwen3_5_text", hidden_size=8, num_attention_heads=2, head_dim=8))
        delta = config.delta
        assert delta is not None
        tiny = replace(delta, key_heads=1, value_heads=1, key_dim=1, value_dim=1)
        self.config = replace(
            config, vocab_size=VOCAB, max_positions=max_positions, num_kv_heads=1, head_dim=1, delta=tiny
        )
        self.embed_tokens = Embedding(VOCAB, 8)
        self.seconds = 0.0
        self.step_rows = self.most_rows = 0  # of all verify forwards, and of the largest
        self._rows = torch.eye(VOCAB) * 10.0 - torch.arange(VOCAB) * 1e-3  # no two tokens tie, as in a real one

    def __call__(self, batch: Batch, cache: Cache, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        started = time.perf_counter()
        chosen = (batch.token_ids * 31 + batch.positions * 7 + 11) % VOCAB
        hidden = chosen[:, None].expand(-1, 8).float()
        if batch.family is Family.STEP:
            self.step_rows += batch.num_tokens
            self.most_rows = max(self.most_rows, batch.num_tokens)
        self.seconds += time.perf_counter() - started
        return hidden, hidden[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        started = time.perf_counter()
        logits = self._rows[hidden[:, 0].long()]
        self.seconds += time.perf_counter() - started
        return logits

    @property
    def decoder(self) -> Decoder:
        """Itself, for signatures that ask for a real one."""
        return cast(Decoder, self)


class MockDrafter:
    """Right until the first position that `wrong` divides."""

    costs: Mapping[str, DraftCost] = {}

    def __init__(self, max_depth: int, wrong: int) -> None:
        self.max_depth, self._wrong = max_depth, wrong
        self.seconds = 0.0

    def reset(self, slot: int) -> None: ...

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        started = time.perf_counter()
        drafts = [self._draft(request) for request in requests]
        self.seconds += time.perf_counter() - started
        return drafts

    def _draft(self, request: DraftRequest) -> Draft:
        token, tokens = request.output[-1], []
        for position in range(request.length - 1, request.length - 1 + min(request.depth, self.max_depth)):
            token = (following(token, position) + (position % self._wrong == 0)) % VOCAB
            tokens.append(token)
        return Draft(tokens, [0.9] * len(tokens), "mock")
