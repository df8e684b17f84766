"""The physical limit of what a server was asked: no card computes it sooner.

A step reads its weights, experts, states and keys once, at the bandwidth that this card delivers to a plain read; a
prompt is also no faster than its products are at the rate of a large one. Independent routing is assumed, as random
weights have it.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.timing import bandwidth, graph_us
from stoker.checkpoint.inspect.report import inspect
from stoker.sizes.network import Network
from stoker.sizes.step import Draft, distinct_experts, step_reads
from stoker.sizes.weights import WeightBytes
from stoker.weights.model_config import FULL, ModelConfig
from stoker.weights.names import ROUTED

SIDE = 8192  # of the product whose rate counts as the card's


@dataclass(frozen=True)
class Card:
    bytes_per_s: float
    products_per_s: float  # operations in bf16, two for each product and sum


@dataclass(frozen=True)
class Limits:
    """Of one checkpoint on one card."""

    config: ModelConfig
    weights: WeightBytes
    card: Card
    draft: Draft
    tokens_per_step: float  # of a sequence

    @classmethod
    def of(cls, directory: Path, card: Card, draft: Draft, tokens_per_step: float) -> "Limits":
        return cls(ModelConfig.load(directory), inspect(directory).weights, card, draft, tokens_per_step)

    def prompt_s(self, streams: int, tokens: int, cached: int) -> float:
        network = Network.of(self.config)
        count = streams * (tokens - cached)
        # each new token looks back at those before it
        pairs = streams * (tokens * (tokens + 1) - cached * (cached + 1)) / 2
        looks = 4 * network.layers_of(FULL) * self.config.num_heads * self.config.head_dim * pairs
        head = network.vocab_size * network.hidden_size  # of the last token alone
        products = 2 * (network.active_parameters - network.looked_up_parameters - head) * count + looks
        distinct = distinct_experts(count, network.top_k, network.experts) / network.experts
        reads = sum(self.weights.fixed.values()) + self.weights.groups[ROUTED] * distinct
        return max(products / self.card.products_per_s, reads / self.card.bytes_per_s)

    def decode_s(self, streams: int, tokens: int, context: int) -> float:
        """So many tokens of each stream after the first."""
        network = Network.of(self.config)
        reads = step_reads(
            network, self.weights, self.draft, context=context, users=streams, pool=network.experts, kv_item=2.0
        )
        return tokens / self.tokens_per_step * reads.total / self.card.bytes_per_s

    def row_s(self, row: Mapping[str, Any]) -> float:
        """All of it: prompts, then answers side by side."""
        prompt, cached, tokens = row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]
        answers = self.decode_s(row["streams"], tokens - 1, prompt + tokens // 2)
        return self.prompt_s(row["streams"], prompt, cached) + answers


def measure_card() -> Card:
    """On a card that does nothing else."""
    left, right = (torch.randn(SIDE, SIDE, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    seconds = graph_us([lambda: torch.mm(left, right, out=out)] * 4) / 1e6
    return Card(bandwidth()["read"], 2 * SIDE**3 / seconds)


def beside(rows: Sequence[dict[str, Any]], limits: Limits) -> float:
    """Adds the limit to each row, and how much of it was reached; prints both. Returns the median share."""
    for row in rows:
        row["limit_s"] = round(limits.row_s(row), 4)
        row["of_limit"] = round(row["limit_s"] / row["seconds"], 3)
        took = f"{row['seconds']:8.3f} s, at least {row['limit_s']:.3f}"
        print(f"{row['name']:52} {took}: {row['of_limit']:.0%} of the limit", flush=True)
    return statistics.median(row["of_limit"] for row in rows)
