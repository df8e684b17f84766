"""The engine on the GPU's runner, with plain twins in the kernels' places: what it promises of tokens, pages and reads.

`test_step.py` and `test_dflash.py` compare the kernels themselves with the model, in Triton's interpreter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from stoker.demo.random_checkpoint import random_tensors, small_config
from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.gpu import graphs
from stoker.engine.gpu.dflash import pack_dflash
from stoker.engine.gpu.runner import GpuBackend
from stoker.engine.gpu.weights import StepWeights, pack_decoder
from stoker.engine.request import Event, Finish
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.speculate.dflash import DFlashDrafter
from stoker.speculate.draft import Draft
from stoker.speculate.drafter import Drafter, DraftRequest
from stoker.speculate.mtp import MtpDrafter
from stoker.speculate.sampling import Sampling
from tests.engine.drive import Oracle, drain, run, settings_for
from tests.engine.gpu import test_dflash, twins

VOCAB, TOKENS, DEPTH = 64, 14, 3
LENGTHS = (60, 125, 5, 40, 1)
Answers = dict[tuple[int, ...], list[int]]


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    twins.install(monkeypatch)


@pytest.fixture(scope="module")
def model() -> Decoder:
    raw = small_config(
        num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], vocab_size=VOCAB,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, shared_expert_intermediate_size=128,
        linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
    )  # fmt: skip
    decoder = Decoder(ModelConfig.from_dict(raw, where="test"))
    for (name, values), parameter in zip(random_tensors(decoder, True, 3), decoder.parameters(), strict=True):
        exact = name.endswith(("A_log", "linear_attn.norm.weight"))
        parameter.data = values.float() if exact else values.bfloat16()
    return decoder


@pytest.fixture(scope="module")
def weights(model: Decoder) -> StepWeights:
    return pack_decoder(model, 2048)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


class Gpu:
    """Makes engines on one model."""

    def __init__(self, model: Decoder, weights: StepWeights) -> None:
        self.model, self.weights = model, weights

    def __call__(self, drafter: str | Drafter | None = None, **sizes: Any) -> Engine:
        depth = DEPTH if drafter else 0
        config = replace(EngineConfig(pages=24, slots=4, max_depth=depth, prefill_budget=64), **sizes)
        backend = GpuBackend(self.model.config, config, self.weights)
        asked: Drafter | None = None
        if drafter == "mtp":
            asked = backend.draft_with_mtp(DEPTH)
        elif drafter == "dflash":
            torch.manual_seed(7)
            network = test_dflash.network()
            asked = backend.draft_with_dflash(network.config, pack_dflash(network, 2048), DEPTH)
        elif drafter is not None and not isinstance(drafter, str):
            asked = drafter
        return Engine(self.model, config, asked, None, backend)


@pytest.fixture
def gpu(model: Decoder, weights: StepWeights) -> Gpu:
    return Gpu(model, weights)


@pytest.fixture(scope="module")
def alone(model: Decoder, weights: StepWeights, prompts: list[list[int]]) -> list[list[Event]]:
    """Every request by itself, undrafted, with its logprobs."""
    with pytest.MonkeyPatch.context() as patch:
        twins.install(patch)
        return [ask(Gpu(model, weights)(slots=1), [prompt], [asked(i)])[0] for i, prompt in enumerate(prompts)]


def asked(index: int) -> Sampling:
    return replace(settings_for(index, TOKENS), logprobs=2)


def ask(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: Sequence[Sampling], depths: Sequence[int] = ()
) -> list[list[Event]]:
    """Submits all and runs to the end. -> events of each."""
    ids = [
        engine.submit(prompt, sampling, depth)
        for prompt, sampling, depth in zip(prompts, settings, depths or [0] * len(prompts), strict=True)
    ]
    events = run(engine)
    assert engine.scheduler.slots.free == engine.config.slots
    return [events[i] for i in ids]


def tokens(events: Sequence[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def told(events: Sequence[Event]) -> list[object]:
    return [each for event in events for each in event.logprobs]


class Knowing(Oracle):
    """Spoils some of its guesses within the small vocabulary."""

    max_depth = DEPTH

    def propose(self, requests: Sequence[DraftRequest], go_on: object = None) -> list[Draft]:
        found = super().propose(requests)
        return [Draft([token % VOCAB for token in draft.tokens], draft.confidence) for draft in found]


def knowing(prompts: list[list[int]], alone: list[list[Event]]) -> Knowing:
    return Knowing({tuple(p): tokens(events) for p, events in zip(prompts, alone, strict=True)}, wrong=4)


def test_tokens_are_those_of_the_model_on_the_cpu(model: Decoder, prompts, alone) -> None:
    engine = Engine(model, EngineConfig(pages=24, slots=8, max_depth=0))
    expected = ask(engine, prompts, [asked(i) for i in range(len(prompts))])
    # the two round differently, so a near tie may fall otherwise; anything wired wrongly changes all of them
    assert sum(tokens(a) == tokens(b) for a, b in zip(alone, expected, strict=True)) >= len(prompts) - 1


def test_company_changes_no_bit(gpu: Gpu, prompts, alone) -> None:
    """Five requests on four slots, padded to buckets as they come and go."""
    found = ask(gpu(), prompts, [asked(i) for i in range(len(prompts))])
    assert [told(events) for events in found] == [told(events) for events in alone]


def test_drafts_of_every_depth_change_no_bit(gpu: Gpu, prompts, alone) -> None:
    engine = gpu(knowing(prompts, alone))
    found = ask(engine, prompts, [asked(i) for i in range(len(prompts))], [0, 1, 3, 2, 3])
    assert [told(events) for events in found] == [told(events) for events in alone]
    totals = engine.stats().totals
    assert 0 < totals.accepted < totals.drafted


@pytest.mark.parametrize("drafter", ["mtp", "dflash"])
def test_networks_change_no_bit_and_draft_as_on_the_cpu(gpu: Gpu, model: Decoder, prompts, alone, drafter) -> None:
    depths = [3, 1, 2, 0, 3]
    found = ask(gpu(drafter), prompts, [asked(i) for i in range(len(prompts))], depths)
    assert [told(events) for events in found] == [told(events) for events in alone]
    torch.manual_seed(7)
    cpu: Drafter = MtpDrafter(model, 24, 4, DEPTH)
    if drafter == "dflash":
        cpu = DFlashDrafter(model, test_dflash.network(), 24, DEPTH)
    engine = Engine(model, EngineConfig(pages=24, slots=4, max_depth=DEPTH, prefill_budget=64), cpu)
    expected = ask(engine, prompts, [asked(i) for i in range(len(prompts))], depths)
    alike = [
        ours == theirs
        for a, b in zip(found, expected, strict=True)
        if tokens(a) == tokens(b)
        for one, other in zip(a, b, strict=False)
        for ours, theirs in zip(one.drafts, other.drafts, strict=False)
    ]
    # a random network is often undecided, and the two round differently; by chance one in 64 would be alike
    assert sum(alike) > 0.8 * len(alike) > 40


def test_preempted_requests_give_the_same_tokens(gpu: Gpu, prompts, alone) -> None:
    engine = gpu(knowing(prompts, alone), pages=4)
    found = ask(engine, prompts, [asked(i) for i in range(len(prompts))], [3] * len(prompts))
    assert engine.scheduler.preemptions > 0
    assert [tokens(events) for events in found] == [tokens(events) for events in alone]


def test_cancelled_requests_leave_nothing_behind(gpu: Gpu, prompts, alone) -> None:
    engine = gpu("mtp")
    first, second, third = (engine.submit(prompt, asked(i), 2) for i, prompt in enumerate(prompts[:3]))
    for _ in range(5):
        engine.step()
    event = engine.cancel(second)
    assert event is not None
    assert event.finish is Finish.CANCELLED
    engine.check_integrity()
    made = drain(engine)
    assert made.keys() <= {first, third}
    assert engine.scheduler.pages.free == engine.config.pages
    assert engine.scheduler.slots.free == engine.config.slots
    again = ask(engine, [prompts[1]], [asked(1)], [2])[0]  # in slots and pages that others have used
    assert told(again) == told(alone[1])


@pytest.mark.parametrize("drafter", [None, "mtp", "dflash"])
def test_cached_text_equals_cold_text(gpu: Gpu, prompts, drafter) -> None:
    """A conversation whose second turn starts from the first's prompt and answer."""
    depth = 2 if drafter else 0
    settings = Sampling(max_tokens=70, logprobs=2)
    warm = gpu(drafter, checkpoints=6)
    first = ask(warm, [prompts[1]], [settings], [depth])[0]
    longer = [*prompts[1], *tokens(first), *prompts[3]]
    second = ask(warm, [longer], [settings], [depth])[0]
    stats = second[-1].stats
    assert stats is not None
    assert stats.cached_tokens >= 128, "the checkpoint in the answer was not found"
    cold = ask(gpu(drafter), [longer], [settings], [depth])[0]
    assert told(second) == told(cold)
    warm.check_integrity()


def test_a_step_reads_twice_and_records_nothing(gpu: Gpu, prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = gpu("mtp")
    reads = 0

    def counted(self: graphs.Download, read=graphs.Download.read) -> Tensor:
        nonlocal reads
        reads += 1
        return read(self)

    def refuse(self: graphs.Recorder, body: object) -> None:
        raise AssertionError("recorded in the step loop")

    monkeypatch.setattr(graphs.Download, "read", counted)
    monkeypatch.setattr(graphs.Recorder, "record", refuse)
    for prompt in prompts[:3]:
        engine.submit(prompt, Sampling(max_tokens=TOKENS), DEPTH)
    while any(sequence.computed < len(sequence.prompt) for sequence in engine.scheduler):
        engine.step()
    while not engine.idle:
        reads = 0
        engine.step()
        assert reads <= 2


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield
