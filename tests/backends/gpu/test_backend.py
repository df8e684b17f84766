"""The engine on the GPU's backend, with plain references of the kernels: what it promises of tokens, pages and reads.

`test_step.py` and `test_dflash.py` compare the kernels themselves with the model, in Triton's interpreter.
"""

import gc
import statistics
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from stoker.backends.cpu.drafting import CpuDFlash, CpuMtp
from stoker.backends.gpu import graphs, reference
from stoker.backends.gpu.backend import GpuBackend, Program
from stoker.backends.gpu.dflash import pack_dflash
from stoker.backends.gpu.drafting import GpuDFlash, GpuMtp
from stoker.backends.gpu.mtp import Mtp, MtpPropose
from stoker.backends.gpu.state import Bucket
from stoker.backends.gpu.weights import StepWeights, pack_decoder
from stoker.backends.network.cache import KVPages
from stoker.backends.network.count import step_bytes
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.dflash import DFlash
from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.event import AUTO, Event, Finish
from stoker.engine.step import Chunk
from stoker.sampling.settings import Sampling
from stoker.speculate.depth.controller import DepthController
from stoker.speculate.dflash import DFlashDrafter
from stoker.speculate.drafter import Draft, Drafter, DraftRequest, FirstOf
from stoker.speculate.mtp import MtpDrafter
from stoker.weights.model_config import ModelConfig
from tests.backends.gpu import test_dflash
from tests.engine.drive import Oracle, drain, engine_on, run, settings_for
from tests.support.random_checkpoint import random_tensors, small_config

VOCAB, TOKENS, DEPTH = 64, 20, 3
LENGTHS = (60, 125, 5, 40, 1)
Answers = dict[tuple[int, ...], list[int]]


@pytest.fixture(autouse=True)
def _references(monkeypatch: pytest.MonkeyPatch) -> None:
    reference.install(monkeypatch.setattr)


@pytest.fixture(scope="module")
def model() -> Decoder:
    raw = small_config(
        num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], vocab_size=VOCAB,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, shared_expert_intermediate_size=128,
        linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
    )  # fmt: skip
    decoder = Decoder(ModelConfig.from_dict(raw, where="test"))
    for (name, values), parameter in zip(random_tensors(decoder, True, 3), decoder.parameters(), strict=True):
        if name.startswith("mtp") and name.endswith(("q_norm.weight", "k_norm.weight")):
            values = values + 2.0  # it looks closely at few keys
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
        if isinstance(drafter, str):
            return self.with_network(drafter, **sizes)[0]
        config = self._config(DEPTH if drafter else 0, sizes)
        return Engine(config, self._backend(config), drafter)

    def with_network(
        self, kind: str, wrap: Callable[[Drafter], Drafter] = lambda own: own, depth: int = DEPTH, **sizes: Any
    ) -> tuple[Engine, Drafter]:
        config = self._config(depth, sizes)
        pages, slots = config.pages, config.slots
        network: GpuMtp | GpuDFlash
        own: Drafter
        if kind == "mtp":
            network = GpuMtp(self.model.config, self.weights, pages, slots, depth)
            own = MtpDrafter(network, depth)
        else:
            drafter = self.dflash()
            network = GpuDFlash(drafter.config, pack_dflash(drafter, 2048), self.weights, pages, slots, depth)
            own = DFlashDrafter(network, depth)
        return Engine(config, self._backend(config, network), wrap(own)), own

    def dflash(self) -> DFlash:
        torch.manual_seed(7)
        return test_dflash.network()

    def _config(self, depth: int, sizes: dict[str, Any]) -> EngineConfig:
        return replace(EngineConfig(pages=24, slots=4, max_depth=depth, prefill_budget=64), **sizes)

    def _backend(self, config: EngineConfig, network: GpuMtp | GpuDFlash | None = None) -> GpuBackend:
        return GpuBackend(self.model.config, config, self.weights, step_bytes(self.model), network)


@pytest.fixture
def gpu(model: Decoder, weights: StepWeights) -> Gpu:
    return Gpu(model, weights)


@pytest.fixture(scope="module")
def alone(model: Decoder, weights: StepWeights, prompts: list[list[int]]) -> list[list[Event]]:
    """Every request by itself, undrafted, with its logprobs."""
    with pytest.MonkeyPatch.context() as patch:
        reference.install(patch.setattr)
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
    """Spoils its guess at every fourth place of the text."""

    max_depth = DEPTH

    def propose(self, requests: Sequence[DraftRequest], go_on: object = None) -> list[Draft]:
        found = []
        for request in requests:
            answer = self.answers[tuple(request.prompt)][len(request.output) :][: request.depth]
            spoiled = [
                (t + (request.length + i) % self.wrong // (self.wrong - 1)) % VOCAB for i, t in enumerate(answer)
            ]
            found.append(Draft(spoiled, [1.0] * len(spoiled)))
        return found


def knows(prompts: list[list[int]], alone: list[list[Event]]) -> tuple[Answers, int]:
    """The answers, and how many tokens there are for each that is to be spoiled."""
    return {tuple(p): tokens(events) for p, events in zip(prompts, alone, strict=True)}, 4


def test_tokens_are_those_of_the_model_on_the_cpu(model: Decoder, prompts, alone) -> None:
    engine = engine_on(model, EngineConfig(pages=24, slots=8, max_depth=0))
    expected = ask(engine, prompts, [asked(i) for i in range(len(prompts))])
    # the two round differently: a near tie may fall otherwise, and all that follows with it
    shared = [
        len(list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens(a), tokens(b), strict=True))))
        for a, b in zip(alone, expected, strict=True)
    ]
    assert sum(shared) > 0.6 * TOKENS * len(prompts), shared


def test_company_changes_no_bit(gpu: Gpu, prompts, alone) -> None:
    """Five requests on four slots, padded to buckets as they come and go."""
    found = ask(gpu(), prompts, [asked(i) for i in range(len(prompts))])
    assert [told(events) for events in found] == [told(events) for events in alone]


def test_drafts_of_every_depth_change_no_bit(gpu: Gpu, prompts, alone) -> None:
    engine = gpu(Knowing(*knows(prompts, alone)))
    found = ask(engine, prompts, [asked(i) for i in range(len(prompts))], [0, 1, 3, 2, 3])
    assert [told(events) for events in found] == [told(events) for events in alone]
    totals = engine.stats().totals
    assert 0 < totals.accepted < totals.drafted


class Sometimes(Knowing):
    """Knows nothing every other time, which leaves the network behind it to draft after blocks that were accepted."""

    def propose(self, requests: Sequence[DraftRequest], go_on: object = None) -> list[Draft]:
        found = super().propose(requests)
        return [Draft() if len(r.output) % 2 else draft for r, draft in zip(requests, found, strict=True)]


def noted(network: Drafter) -> dict[tuple[int, int], Draft]:
    """What a network goes on to draft, by first token of the prompt and length of the text."""
    found: dict[tuple[int, int], Draft] = {}
    propose = network.propose

    def noting(requests: Sequence[DraftRequest], go_on: Any = None) -> list[Draft]:
        drafts = propose(requests, go_on)
        found.update({(r.prompt[0], r.length): draft for r, draft in zip(requests, drafts, strict=True) if len(draft)})
        return drafts

    network.propose = noting  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_networks_change_no_bit_and_draft_as_on_the_cpu(gpu: Gpu, model: Decoder, prompts, alone, kind: str) -> None:
    """Confidences are compared, which a key too many or a place too far changes more than rounding does."""
    settings, depths = [asked(i) for i in range(len(prompts))], [2, 3, 3, 0, 3]
    engine, network = gpu.with_network(kind, lambda own: FirstOf(Sometimes(*knows(prompts, alone)), own))
    ours = noted(network)
    found = ask(engine, prompts, settings, depths)
    assert [told(events) for events in found] == [told(events) for events in alone]
    assert engine.stats().totals.accepted > 10
    config = EngineConfig(pages=24, slots=4, max_depth=DEPTH, prefill_budget=64)
    theirs: dict[tuple[int, int], Draft] = {}

    def behind(own: Drafter) -> Drafter:
        nonlocal theirs
        theirs = noted(own)
        return FirstOf(Sometimes(*knows(prompts, alone)), own)

    own = CpuMtp(model, 24, 4) if kind == "mtp" else CpuDFlash(model, gpu.dflash(), 24)
    ask(engine_on(model, config, own, wrap=behind), prompts, settings, depths)
    common = ours.keys() & theirs.keys()
    assert len(common) > 12
    pairs = [pair for key in common for pair in _pairs(ours[key], theirs[key])]
    off = [abs(mine - other) / other for (_, mine), (_, other) in pairs]
    assert sum(a == b for (a, _), (b, _) in pairs) > 0.8 * len(pairs)
    assert statistics.median(off) < 0.03


def _pairs(ours: Draft, theirs: Draft) -> Iterator[tuple[tuple[int, float], tuple[int, float]]]:
    """Tokens and confidences of both, as long as they agree."""
    for mine, other in zip(
        zip(ours.tokens, ours.confidence, strict=True), zip(theirs.tokens, theirs.confidence, strict=True), strict=True
    ):
        yield mine, other
        if mine[0] != other[0]:
            return


class Even:
    """Allows even tokens, and after a 4 nothing but a 6."""

    def allowed(self, output: Sequence[int]) -> Tensor:
        found = torch.arange(VOCAB) % 2 == 0
        return torch.arange(VOCAB) == 6 if output and output[-1] == 4 else found

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        return [6] if output and output[-1] == 4 else []


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_depths_chosen_by_the_controller_and_masks_change_no_token(gpu: Gpu, prompts, kind: str) -> None:
    answers = []
    for engine, depth in ((gpu(), 0), (gpu(kind), AUTO)):
        biased = [Sampling(max_tokens=TOKENS, logit_bias={4: 1.0}), asked(1), Sampling(max_tokens=TOKENS)]
        ids = [
            engine.submit(prompt, settings, depth, mask=Even() if index < 2 else None)
            for index, (prompt, settings) in enumerate(zip(prompts, biased, strict=False))
        ]
        events = run(engine)
        answers.append([tokens(events[i]) for i in ids])
    assert answers[0] == answers[1]
    assert all(token % 2 == 0 for answer in answers[0][:2] for token in answer)


def test_an_mtp_head_writes_no_key_past_the_depth_asked_for(model: Decoder, weights: StepWeights) -> None:
    """Where a request's pages end, the next ones are somebody else's."""
    mtp = Mtp(model.config, weights, pages=2, slots=2)
    propose = MtpPropose(mtp, Bucket(2, 1, 1), depth=3)
    propose.inputs.tables.copy_(torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0]]))
    propose.inputs.sequences.cached.copy_(torch.tensor([10, 20]))
    propose.depths.copy_(torch.tensor([1, 3]))
    propose.first()
    propose.next()
    propose.next()
    assert isinstance(mtp.pages, KVPages)
    written = mtp.pages.keys.abs().sum((2, 3)).nonzero().tolist()
    assert written == [[1, 21], [1, 22]]


def test_preempted_requests_give_the_same_tokens(gpu: Gpu, prompts, alone) -> None:
    engine = gpu(Knowing(*knows(prompts, alone)), pages=4)
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
    warm = gpu(drafter, snapshots=6)
    first = ask(warm, [prompts[1]], [settings], [depth])[0]
    longer = [*prompts[1], *tokens(first), *prompts[3]]
    second = ask(warm, [longer], [settings], [depth])[0]
    stats = second[-1].stats
    assert stats is not None
    assert stats.cached_tokens >= 128, "the snapshot in the answer was not found"
    cold = ask(gpu(drafter), [longer], [settings], [depth])[0]
    assert told(second) == told(cold)
    warm.check_integrity()


@pytest.mark.parametrize("drafter", ["mtp", "dflash"])
def test_prompts_computed_at_once_leave_the_snapshots_of_prompts_in_chunks(gpu: Gpu, prompts, drafter) -> None:
    """Three prompts in one forward, with snapshots inside them; then more of the text goes on from each of those."""
    long = [prompts[1] * 3, prompts[0] * 4, prompts[3] * 5]
    settings = [replace(asked(i), max_tokens=6) for i in range(3)]
    depths = [DEPTH] * 3
    sizes: dict[str, Any] = {"pages": 48, "snapshots": 24, "snapshot_interval": 64}
    at_once, in_chunks = gpu(drafter, prefill_budget=2048, **sizes), gpu(drafter, prefill_budget=64, **sizes)
    forwards = []
    prefill = at_once.backend.prefill

    def noting(chunks: Sequence[Chunk]) -> None:
        forwards.append([(len(chunk.tokens), len(chunk.keeps)) for chunk in chunks])
        prefill(chunks)

    at_once.backend.prefill = noting  # type: ignore[method-assign]
    whole = ask(at_once, long, settings, depths)
    assert [[tokens for tokens, _ in parts] for parts in forwards] == [[len(prompt) for prompt in long]]
    assert all(keeps >= 2 for _, keeps in forwards[0])
    assert [told(events) for events in whole] == [told(events) for events in ask(in_chunks, long, settings, depths)]
    assert len(at_once.scheduler.prefixes) == len(in_chunks.scheduler.prefixes)
    again = [[*prompt[:cut], 5, 7] for prompt, cut in zip(long, (65, 130, 194), strict=True)]
    cold = ask(gpu(drafter, **sizes), again, settings, depths)
    for engine in (at_once, in_chunks):
        found = ask(engine, again, settings, depths)
        assert [told(events) for events in found] == [told(events) for events in cold]
        assert [events[-1].stats.cached_tokens for events in found] == [64, 128, 192]  # type: ignore[union-attr]
    at_once.check_integrity()


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_nothing_refers_to_requests_that_have_ended(gpu: Gpu, prompts, kind: str) -> None:
    """`Request`, `DraftRequest` and `Row` all hold the sampling settings of their request."""
    engine = gpu(kind, slots=2)
    settings = [replace(settings_for(i), max_tokens=6) for i in range(3)]  # greedy, sampled, penalised
    known = [weakref.ref(each) for each in settings]
    ask(engine, prompts[:3], settings, [DEPTH] * 3)
    assert engine.stats().totals.drafted > 0
    del settings
    gc.collect()
    assert [ref() for ref in known] == [None] * 3


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


def test_the_controller_is_told_how_many_experts_a_step_touched(
    gpu: Gpu, model: Decoder, prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests in buckets for four: what pads them counts for nothing. Eight rows and more are an upper bound."""
    steps: list[tuple[int, bool, float]] = []

    def noted(self: GpuBackend, tokens: int, own=GpuBackend.distinct_experts) -> float | None:
        found = own(self, tokens)
        assert found is not None
        assert own(self, tokens + 1) is None, "another forward's"
        [program] = [each for each in self.programs if each is forwarded[-1]]
        chosen = [routing.experts.flatten() for routing in program.step.buffers.routing]
        pairs = [experts[experts >= 0].unique(return_counts=True)[1] for experts in chosen]
        assert all(int(count.sum()) == tokens * 2 for count in pairs), "rows that are no tokens chose experts"
        exact = sum(map(len, pairs)) / len(pairs)
        assert found == exact if tokens <= 8 else found >= exact
        steps.append((tokens, program.bucket.tokens > tokens, found - exact))
        return found

    forwarded: list[Program] = []

    def forward(self: Program, rows: Any, own=Program.forward) -> None:
        forwarded.append(self)
        own(self, rows)

    def unhurried(
        self: DepthController, emitted: Any, _: float, __: float, distinct: Any, own=DepthController.observe
    ) -> None:
        own(self, emitted, 1e-3, 0.0, distinct)  # a draft costs nothing, however busy the machine: all are verified

    monkeypatch.setattr(GpuBackend, "distinct_experts", noted)
    monkeypatch.setattr(Program, "forward", forward)
    monkeypatch.setattr(DepthController, "observe", unhurried)
    answers = {tuple(prompt): [7] * TOKENS for prompt in prompts}
    engine = gpu(Knowing(answers, 4))
    for prompt in prompts[:3]:
        engine.submit(prompt, Sampling(max_tokens=TOKENS, logit_bias={7: 1000.0}), AUTO)
    run(engine)
    assert any(padded for _, padded, _ in steps)
    assert any(excess > 0 for tokens, _, excess in steps if tokens > 8)
    stats = engine.stats().depth_controller
    assert stats is not None
    assert 2.0 <= stats["distinct_experts"]["measured"] <= 6.0


@pytest.mark.parametrize(("kind", "depth"), [("mtp", 1), ("mtp", DEPTH), ("dflash", 1), ("dflash", DEPTH)])
def test_recording_leaves_no_trace(
    gpu: Gpu, prompts, alone, monkeypatch: pytest.MonkeyPatch, kind: str, depth: int
) -> None:
    """On a GPU every program runs once on an empty batch before the first request comes, whatever it drafts."""

    def record(self: graphs.Recorder, *bodies: Callable[[], None]) -> graphs.Recorded:
        recorded = graphs.Recorded(bodies)
        recorded()
        return recorded

    monkeypatch.setattr(graphs.Recorder, "record", record)
    engine = gpu.with_network(kind, depth=depth)[0]
    found = ask(engine, prompts, [asked(i) for i in range(len(prompts))], [depth] * len(prompts))
    assert [told(events) for events in found] == [told(events) for events in alone]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("kind", [None, "mtp", "dflash"])
def test_log_probabilities_of_a_prompt_are_those_of_the_answer_and_no_chunk_changes_them(
    gpu: Gpu, prompts: list[list[int]], kind: str | None
) -> None:
    """The longest prompt, which takes two chunks of 64 tokens, or one of 128."""
    prompt, sampling = prompts[1], Sampling(max_tokens=2, prompt_logprobs=3, logprobs=3)
    events = ask(gpu(kind), [prompt, prompts[0]], [sampling, Sampling(max_tokens=9)])[0]
    found = events[0].prompt_logprobs
    assert [each.token for each in found] == prompt[1:]
    assert ask(gpu(kind, prefill_budget=128), [prompt], [sampling])[0][0].prompt_logprobs == found
    # the first token of an answer to the prompt's beginning has the distribution that its next token is judged by
    for cut in (1, 17, 64, 100):
        (first,) = ask(gpu(kind), [prompt[:cut]], [replace(sampling, max_tokens=1)])[0]
        assert first.logprobs[0].top == found[cut - 1].top
    # and the last tokens judged leave the drafting network and the answer as they were
    plain = ask(gpu(kind), [prompt], [Sampling(max_tokens=12)], [DEPTH if kind else 0])[0]
    scored = ask(gpu(kind), [prompt], [Sampling(max_tokens=12, prompt_logprobs=0)], [DEPTH if kind else 0])[0]
    assert tokens(scored) == tokens(plain)
    assert [event.drafts for event in scored] == [event.drafts for event in plain]
