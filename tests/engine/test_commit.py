"""A state is written once per step whatever the depth, and drafts that came to nothing leave no trace in any cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker.backends.cpu.backend import CpuBackend
from stoker.backends.cpu.drafting import CpuDFlash, CpuMtp
from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.memory import tensor_bytes
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache, KVPages
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.deltanet import DeltaState
from stoker.backends.network.load import load_drafter
from stoker.engine.engine import Engine, EngineConfig
from stoker.sampling.settings import Sampling
from stoker.speculate.depth.cost import DraftCost
from stoker.speculate.drafter import Draft, Drafter, DraftRequest, GoOn
from tests.engine.drive import DEPTH, Oracle, engine_on
from tests.support.random_checkpoint import small_config, small_drafter_config, write_random_drafter

PAGES, TOKENS = 4, 60


@dataclass
class Observed:
    """What a drafter is shown of one family: hidden [T, H], taps [T, n * H] and the tokens that follow."""

    hidden: list[Tensor] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)
    following: list[Tensor] = field(default_factory=list)


class Recorder:
    """A network that keeps what it is shown."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self.seen = {family: Observed() for family in Family}

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None:
        seen = self.seen[batch.family]
        seen.hidden.append(hidden)
        seen.taps.append(taps)
        seen.following.append(following)

    def reset(self, slot: int) -> None: ...

    def flush(self, slot: int) -> None: ...


class Guided:
    """A real drafter whose guesses are replaced by partly right ones: its own KV sees drafts come and go.

    Every third step it is not asked at all, every fourth something else drafts, as lookup would.
    """

    costs: Mapping[str, DraftCost] = {}

    def __init__(self, inner: Drafter, oracle: Oracle) -> None:
        self.inner, self._oracle, self._steps = inner, oracle, 0
        self.max_depth = inner.max_depth

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        self._steps += 1
        if self._steps % 3 == 0:
            return [Draft() for _ in requests]
        if self._steps % 4:
            self.inner.propose(requests, go_on)
        return self._oracle.propose(requests, go_on)

    def reset(self, slot: int) -> None:
        self.inner.reset(slot)


def run_until(engine: Engine, tokens: int) -> tuple[int, int]:
    """Steps until so many tokens are out, with no step under way. -> tokens in the cache, how many of them pending."""
    sequence = next(iter(engine.scheduler))
    while len(sequence.output) < tokens:
        engine.step()
        engine._end_step()
    return sequence.computed, sequence.replay


def cache_of(engine: Engine) -> Cache:
    assert isinstance(engine.backend, CpuBackend)
    return engine.backend.cache


def state_of(engine: Engine, pending: int) -> list[Tensor]:
    """The recurrent state of slot 0 with its pending tokens."""
    cache = cache_of(engine)
    snapshots = cache.snapshots(1)
    snapshots.save(cache, 0, 0, pending)
    return [tensor for layer in snapshots.layers for tensor in layer]


def plain_text(model: Decoder, prompt: list[int], taps: tuple[int, ...] = ()) -> tuple[list[int], Recorder]:
    recorder = Recorder(taps)
    config = EngineConfig(PAGES, 1, max_depth=0)
    engine = Engine(config, CpuBackend(model, config, recorder))
    engine.submit(prompt, Sampling(max_tokens=TOKENS))
    sequence = next(iter(engine.scheduler))
    while not engine.idle:
        engine.step()
    return sequence.output, recorder


@pytest.mark.parametrize("wrong", [2, 3, 10**6])
@pytest.mark.parametrize("tokens", [2, 17, 33, 58])
def test_the_state_after_any_accepted_prefix_is_that_of_single_steps(
    model: Decoder, prompts: list[list[int]], wrong: int, tokens: int
) -> None:
    prompt = prompts[2]
    answer, _ = plain_text(model, prompt)
    drafted = engine_on(model, EngineConfig(PAGES, 1, max_depth=DEPTH), Oracle({tuple(prompt): answer}, wrong))
    drafted.submit(prompt, Sampling(max_tokens=TOKENS), DEPTH)
    computed, pending = run_until(drafted, tokens)
    single = engine_on(model, EngineConfig(PAGES, 1, max_depth=0))
    single.submit(prompt, Sampling(max_tokens=TOKENS))
    assert run_until(single, computed - len(prompt) + 1) == (computed, 1)
    for ours, theirs in zip(state_of(drafted, pending), state_of(single, 1), strict=True):
        assert torch.equal(ours, theirs)


def test_there_is_one_state_per_request_whatever_the_depth(model: Decoder) -> None:
    """Deeper steps keep more small inputs to replay, not more states; a token to replay is far smaller than one."""
    states, windows = {}, {}
    for depth in (0, 8, 16, 32):
        engine = engine_on(model, EngineConfig(PAGES, 2, max_depth=depth))
        delta = [layer for layer in cache_of(engine).layers if isinstance(layer, DeltaState)]
        states[depth] = sum(state.recurrent.nbytes for state in delta)
        windows[depth] = sum(tensor_bytes(state) for state in delta) - states[depth]
    assert len(set(states.values())) == 1
    per_token = (windows[32] - windows[0]) / 32 / 2
    assert 0 < per_token < states[0] / 2 / 4


def network_of(name: str, model: Decoder, tmp_path: Path, postpone: int) -> CpuMtp | CpuDFlash:
    if name == "mtp":
        return CpuMtp(model, PAGES, 1, postpone=postpone)
    write_random_drafter(tmp_path, small_drafter_config(small_config()))
    return CpuDFlash(model, load_drafter(tmp_path, model.config), PAGES, postpone=postpone)


def kv_of(network: CpuMtp | CpuDFlash, pages: list[int], tokens: int) -> list[Tensor]:
    layers = [network.pages] if isinstance(network.pages, KVPages) else network.pages
    return [tensor[pages].flatten(0, 1)[:tokens] for layer in layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("name", ["mtp", "dflash"])
@pytest.mark.parametrize("postpone", [0, 5])
@pytest.mark.parametrize("wrong", [2, 5])
def test_a_drafters_kv_is_that_of_one_pass_over_the_final_text(
    model: Decoder, prompts: list[list[int]], tmp_path: Path, name: str, postpone: int, wrong: int
) -> None:
    """Random accepts, steps without drafts and drafts from elsewhere, against the model's true hiddens in one go."""
    prompt = prompts[2]
    network = network_of(name, model, tmp_path, postpone)
    answer, recorder = plain_text(model, prompt, network.taps)
    oracle = Oracle({tuple(prompt): answer}, wrong)
    engine = engine_on(model, EngineConfig(PAGES, 1, max_depth=DEPTH), network, wrap=lambda own: Guided(own, oracle))
    engine.submit(prompt, Sampling(max_tokens=TOKENS), DEPTH)
    sequence = next(iter(engine.scheduler))
    pages: list[int] = []
    while not engine.idle:
        pages = sequence.pages or pages
        engine.step()
        pages = sequence.pages or pages
    network.flush(0)
    assert sequence.output == answer
    assert 0 < sequence.stats.accepted < sequence.stats.drafted

    reference = network_of(name, model, tmp_path, 0)
    text, cached = [*prompt, *answer], 0
    for family, stop in ((Family.PREFILL, len(prompt)), (Family.STEP, len(text) - 1)):
        batch = Batch.of(family, [Run(text[cached:stop], cached, 0, list(range(PAGES)))], PAGE_SIZE)
        seen = recorder.seen[family]
        reference.observe(batch, torch.cat(seen.hidden), torch.cat(seen.taps), torch.cat(seen.following))
        cached = stop
    tokens = len(text) - 1
    for ours, theirs in zip(kv_of(network, pages, tokens), kv_of(reference, list(range(PAGES)), tokens), strict=True):
        assert torch.equal(ours, theirs)
