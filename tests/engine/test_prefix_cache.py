"""A cached prompt is computed once, and its answer is that of a cold start, bit for bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker.backends.cpu.drafting import CpuMtp
from stoker.backends.family import Family
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_model
from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.pages import Pool
from stoker.engine.prefix_cache import PrefixCache
from stoker.sampling.settings import Sampling
from tests.conftest import FAMILIES
from tests.engine.drive import drain, engine_on

PAGES = 40


def words(seed: int, count: int) -> list[int]:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def new_engine(model: Decoder, snapshots: int, mtp: bool = True, pages: int = PAGES) -> Engine:
    drafter = CpuMtp(model, pages, 2) if mtp and model.mtp else None
    config = EngineConfig(pages=pages, slots=2, max_depth=4, snapshots=snapshots, snapshot_interval=256)
    return engine_on(model, config, drafter)


def ask(engine: Engine, prompt: list[int], boundaries: list[int], depth: int = 4) -> tuple[list[int], int, int]:
    """-> answer, prompt tokens computed, prompt tokens taken from the cache."""
    engine.submit(prompt, Sampling(max_tokens=12), depth if engine.drafter else 0, boundaries)
    stats = engine.scheduler.waiting[-1].stats
    answer = next(iter(drain(engine).values()))
    return answer, stats.prefill_tokens, stats.cached_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_of_five_turns_computes_only_what_is_new(checkpoints: dict[str, Path], family: str) -> None:
    """System and tools, then turns of question, answer and tool result; drafting on."""
    model = load_model(checkpoints[family]).model
    warm = new_engine(model, snapshots=12)
    prompt, boundaries, previous = words(1, 300), [300], 0
    for turn in range(5):
        prompt = prompt + words(10 + turn, 70)
        boundaries = [*boundaries, len(prompt)]
        answer, computed, cached = ask(warm, prompt, boundaries)
        cold, all_tokens, none = ask(new_engine(model, snapshots=0), prompt, [])
        assert answer == cold
        assert (all_tokens, none) == (len(prompt), 0)
        assert computed + cached == len(prompt)
        if turn:
            # the last snapshot lies within 64 tokens before the end of the previous prompt
            assert computed <= len(prompt) - previous + 64
        previous = len(prompt)
        prompt = prompt + answer


def logits_of(model: Decoder, engine: Engine, prompt: list[int]) -> Tensor:
    """The first logits an engine computes for a prompt, caught on their way to the sampler."""
    caught: list[Tensor] = []
    original = model.logits

    def logits(hidden: Tensor, family: Family = Family.STEP) -> Tensor:
        caught.append(original(hidden, family))
        return caught[-1]

    try:
        model.logits = logits  # type: ignore[method-assign]
        ask(engine, prompt, [], depth=0)
    finally:
        del model.logits
    return caught[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_logits_are_the_cold_ones_bit_for_bit(checkpoints: dict[str, Path], family: str) -> None:
    model = load_model(checkpoints[family]).model
    first, second = words(1, 330), words(1, 330)[:290] + words(2, 90)
    warm = new_engine(model, snapshots=8, mtp=False)
    ask(warm, first, [100, 200], depth=0)
    got = logits_of(model, warm, second)
    assert torch.equal(got, logits_of(model, new_engine(model, snapshots=0, mtp=False), second))
    answer, _, cached = ask(warm, second, [])
    assert cached == 256 + 64  # its own snapshot by now; the shared one lies at 256
    assert answer == ask(new_engine(model, snapshots=0), second, [])[0]


def test_a_prompt_that_differs_in_one_early_token_shares_nothing(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["qwen3_5_text"]).model
    engine = new_engine(model, snapshots=8)
    prompt = words(1, 200)
    ask(engine, prompt, [])
    other = [(prompt[0] + 1) % 512, *prompt[1:]]
    answer, _, cached = ask(engine, other, [])
    assert cached == 0
    assert answer == ask(new_engine(model, snapshots=0), other, [])[0]


def test_checkpoints_give_way_to_requests_and_to_younger_checkpoints(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["qwen3_5_text"]).model
    engine = new_engine(model, snapshots=2, pages=6)
    for seed in range(6):
        ask(engine, words(seed, 150), [64, 128])
        assert len(engine.scheduler.prefixes._entries) <= 2
    long = words(9, 360)  # needs all six pages
    assert ask(engine, long, [])[0] == ask(new_engine(model, snapshots=0), long, [])[0]


def test_snapshots_lie_before_boundaries_at_multiples_of_64() -> None:
    cache = PrefixCache(Pool(8), snapshots=4, interval=256)
    assert cache.wanted(range(700), [0, 10, 65, 300, 640]) == [64, 256, 512, 576, 640]
    assert cache.wanted(range(64), []) == []
    assert cache.wanted(range(65), []) == [64]
    assert PrefixCache(Pool(8), snapshots=0, interval=256).wanted(range(700), [300]) == []
