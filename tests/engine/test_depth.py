"""A depth that adapts changes how fast tokens come, never which; its choices are there to be read."""

from collections.abc import Sequence

import pytest
import torch

from stoker.backends.cpu.backend import COUNT_EVERY, distinct_experts
from stoker.backends.cpu.drafting import CpuMtp
from stoker.backends.network.count import step_bytes
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.experts import SparseMlp
from stoker.engine.engine import EngineConfig
from stoker.engine.event import AUTO
from stoker.errors import RequestError
from stoker.sampling.settings import Sampling
from stoker.speculate.depth.controller import DepthController
from stoker.speculate.drafter import Draft, Drafter
from stoker.speculate.lookup import LookupDrafter
from tests.engine.drive import DEPTH, PAGES, SLOTS, Oracle, drain, engine_on, run, settings_for


def drafter_of(name: str, model: Decoder, answers: dict[tuple[int, ...], list[int]]) -> Drafter | CpuMtp:
    if name == "mtp":
        return CpuMtp(model, PAGES, SLOTS)
    return LookupDrafter(DEPTH) if name == "lookup" else Oracle(answers, wrong=4)


@pytest.mark.parametrize("name", ["mtp", "lookup", "oracle"])
@pytest.mark.parametrize("fixed_too", [False, True])
def test_tokens_are_those_of_plain_decoding(
    model: Decoder, prompts: list[list[int]], alone: list[list[int]], name: str, fixed_too: bool
) -> None:
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, alone, strict=True)}
    config = EngineConfig(pages=8, slots=SLOTS, max_depth=DEPTH, prefill_budget=128, snapshots=3)
    engine = engine_on(model, config, drafter_of(name, model, answers))
    for index, prompt in enumerate(prompts):
        engine.submit(prompt, settings_for(index), 3 if fixed_too and index % 2 else AUTO)
    tokens = drain(engine)
    assert [tokens[index] for index in range(len(prompts))] == alone
    stats = engine.stats().depth_controller
    assert stats is not None
    if not fixed_too:
        assert stats["steps"] > 0
        assert stats["step_s"]["measured"] > 0.0
        assert 1.0 <= stats["distinct_experts"]["measured"] <= 8.0


class Scripted(DepthController):
    """Cuts by a pattern instead of by cost, and writes down what it is told."""

    def __init__(self, model: Decoder, pattern: list[int]) -> None:
        super().__init__(step_bytes(model), {})
        self.pattern, self.told = pattern, []  # type: ignore[var-annotated]
        self.forgotten: list[int] = []

    def cut(self, drafts: Sequence[Draft]) -> list[int]:
        super().cut(drafts)
        depths = [min(len(draft), self.pattern[len(self.told) % len(self.pattern)]) for draft in drafts]
        self._current().depths = depths
        return depths

    def observe(
        self, emitted: Sequence[Sequence[int]], verify_s: float, draft_s: float, distinct: float | None = None
    ) -> None:
        assert verify_s > 0.0
        assert draft_s > 0.0
        self.told.append((list(self._current().depths), [list(tokens) for tokens in emitted], distinct))
        super().observe(emitted, verify_s, draft_s, distinct)

    def forget(self, key: int) -> None:
        self.forgotten.append(key)
        super().forget(key)


def test_the_controllers_word_is_followed_and_it_hears_what_came_of_it(
    model: Decoder, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    engine = engine_on(
        model, EngineConfig(pages=PAGES, slots=1, max_depth=DEPTH), Oracle({tuple(prompts[0]): alone[0]}, wrong=10**6)
    )
    assert engine._drafting is not None
    engine._drafting.adapt()
    controller = engine._drafting.controller = Scripted(model, [3, 0, 5, 1])
    engine.submit(prompts[0], settings_for(0), AUTO)
    stats = run(engine)[0][-1].stats
    assert stats is not None
    assert [depths for depths, _, _ in controller.told] == [
        [3],
        [0],
        [5],
        [1],
        [3],
        [0],
        [0],
    ]  # the last has room for none
    assert [token for _, emitted, _ in controller.told for token in emitted[0]] == alone[0][1:]
    experts = [experts for _, _, experts in controller.told]
    assert all(3.0 <= counted <= 8.0 for counted in experts[::COUNT_EVERY])
    assert not any(counted for place, counted in enumerate(experts) if place % COUNT_EVERY)
    assert controller.forgotten == [0]
    assert stats.depths == {3: 2, 0: 3, 5: 1, 1: 1}
    assert (stats.drafted_at, stats.accepted_at) == ([4, 3, 3, 1, 1], [4, 3, 3, 1, 1])
    assert engine.stats().totals.depths == stats.depths


def test_experts_of_the_last_forward_are_counted(model: Decoder) -> None:
    layers = [module for module in model.layers.modules() if isinstance(module, SparseMlp)]
    assert len(layers) > 1
    for number, layer in enumerate(layers):
        layer.routed = torch.tensor([[0, 1], [1, 2]]) if number else torch.tensor([[0, 1], [0, 1]])
    assert distinct_experts(layers, 2) == pytest.approx((2 + 3 * (len(layers) - 1)) / len(layers))
    assert distinct_experts(layers, 5) is None  # another forward's


def test_depths_that_make_no_sense_are_refused(model: Decoder) -> None:
    engine = engine_on(model, EngineConfig(pages=2, slots=1, max_depth=2))
    with pytest.raises(RequestError, match="depth is auto, but this engine has no drafter"):
        engine.submit([1], Sampling(), AUTO)
    with pytest.raises(RequestError, match="depth is 'deep', expected 'auto' or 0 to 2"):
        engine.submit([1], Sampling(), "deep")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="depth is -1, expected 0 to 2"):
        engine.submit([1], Sampling(), -1)
