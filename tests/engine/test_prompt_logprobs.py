"""Log-probabilities of prompt tokens are the model's own, however the prompt is cut and whatever runs beside it."""

import pytest
import torch

from stoker.backends.cpu.backend import CpuBackend
from stoker.backends.network.decoder import Decoder
from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.event import TokenLogprob
from stoker.sampling.settings import Sampling
from tests.engine.drive import PAGES, engine_on, run

PROMPT = [(7 * place * place + 3) % 512 for place in range(300)]


def scored(engine: Engine, others: int = 0) -> tuple[TokenLogprob, ...]:
    mine = engine.submit(PROMPT, Sampling(max_tokens=3, prompt_logprobs=2))
    for other in range(others):
        engine.submit([other + 5, *PROMPT[: 70 * other + 20]], Sampling(max_tokens=8))
    return run(engine)[mine][0].prompt_logprobs


@pytest.fixture(scope="module")
def whole(model: Decoder) -> tuple[TokenLogprob, ...]:
    return scored(engine_on(model, EngineConfig(pages=PAGES, slots=4, prefill_budget=512)))


def test_they_are_the_log_softmax_of_a_forward_over_the_prompt(model: Decoder, whole: tuple[TokenLogprob, ...]) -> None:
    engine = engine_on(model, EngineConfig(pages=PAGES, slots=1, prefill_budget=512))
    assert isinstance(engine.backend, CpuBackend)
    engine.submit(PROMPT, Sampling(max_tokens=1))
    run(engine)
    with torch.inference_mode():
        table = torch.cat([torch.log_softmax(model.logits(row[None]).double(), -1) for row in engine.backend._hidden])
    assert len(whole) == len(PROMPT) - 1
    for place, found in enumerate(whole):
        assert found.token == PROMPT[place + 1]
        assert found.logprob == pytest.approx(float(table[place, found.token]), abs=1e-3)
        best = table[place].topk(2).values.tolist()
        assert [value for _, value in found.top] == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("others", [0, 3])
def test_chunks_and_neighbours_change_no_digit(model: Decoder, whole: tuple[TokenLogprob, ...], others: int) -> None:
    engine = engine_on(model, EngineConfig(pages=PAGES, slots=4, prefill_budget=64))
    assert scored(engine, others) == whole


def test_a_cached_prompt_is_computed_again(model: Decoder, whole: tuple[TokenLogprob, ...]) -> None:
    engine = engine_on(model, EngineConfig(pages=PAGES, slots=2, snapshots=8, snapshot_interval=64))
    plain = engine.submit(PROMPT, Sampling(max_tokens=3))
    answer = [token for event in run(engine)[plain] for token in event.tokens]
    assert scored(engine) == whole
    again = engine.submit(PROMPT, Sampling(max_tokens=3))
    events = run(engine)[again]
    assert [token for event in events for token in event.tokens] == answer
    assert events[0].prompt_logprobs == ()
    assert events[-1].stats is not None
    assert events[-1].stats.cached_tokens > 0
