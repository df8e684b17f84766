"""Turns of a conversation compute only what is new, generated text included, and change nothing by it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from stoker.backends.cpu.backend import CpuBackend
from stoker.backends.cpu.drafting import CpuMtp
from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache
from stoker.backends.network.decoder import Decoder
from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.event import Event, TokenLogprob
from stoker.engine.prefix_cache import Stretches, message_boundaries
from stoker.sampling.settings import Sampling
from tests.engine.drive import engine_on

TEMPLATE = Path(__file__).parents[2] / "training" / "chat_template.jinja"
PAGES, DEPTH = 80, 12
TOOLS = [{"name": "read_file", "description": "Reads a file.", "parameters": {"path": {"type": "string"}}}]


class Script:
    """A mask that lets only a given answer be said. What is compared is how likely the model found it."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self._tokens, self._vocab_size = tokens, vocab_size

    def allowed(self, output: Sequence[int]) -> Tensor | None:
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[self._tokens[len(output)]] = True
        return mask

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """A stretch of it now and then, so that long and short steps take turns; else the drafter guesses."""
        return self._tokens[len(output) :] if len(output) % 16 > 2 else ()


class Chat:
    """Renders conversations with the embedded model's template, a token per byte."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        self.start = self._tokenizer.convert_tokens_to_ids("<|im_start|>")

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=TEMPLATE.read_text(), tokenize=False, add_generation_prompt=True
        )
        return self.encode(str(text))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture(scope="module")
def chat(checkpoints: dict[str, Path]) -> Chat:
    return Chat(checkpoints["qwen3_5_moe_text"])


def new_engine(model: Decoder, snapshots: int = 0, pages: int = PAGES, slots: int = 1) -> Engine:
    config = EngineConfig(pages=pages, slots=slots, max_depth=DEPTH, snapshots=snapshots, snapshot_interval=512)
    return engine_on(model, config, CpuMtp(model, pages, slots))


class Turn:
    """One request run to its end, and what came of it."""

    def __init__(self, engine: Engine, prompt: list[int], script: list[int], start: int, like: "Turn | None" = None):
        """`like` makes the prompt be computed in the families of another turn, from nothing."""
        sampling = Sampling(max_tokens=len(script), logprobs=3)
        mask = Script(script, engine.backend.model.vocab_size)
        number = engine.submit(prompt, sampling, DEPTH, message_boundaries(prompt, start), mask)
        self.request = engine.scheduler.waiting[-1]
        if like:
            self.request.stepped = like.stepped
        events: list[Event] = []
        pages: list[int] = []
        while not engine.idle:
            events += engine.step()
            engine.check_integrity()
            pages = self.request.pages or pages
        assert {event.request_id for event in events} == {number}
        assert events[-1].stats is not None
        assert isinstance(engine.backend, CpuBackend)
        assert isinstance(engine.backend.network, CpuMtp)
        kv = engine.backend.network.pages
        self.drafter_kv = [
            tensor[pages].flatten(0, 1)[: len(prompt) + len(script) - 1] for tensor in (kv.keys, kv.values)
        ]
        self.stats, self.text = events[-1].stats, prompt + script
        self.logprobs: list[TokenLogprob] = [entry for event in events for entry in event.logprobs]
        assert [entry.token for entry in self.logprobs] == script

    @property
    def stepped(self) -> Stretches:
        assert self.request.stepped is not None
        return self.request.stepped


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_turn(model: Decoder, turn: Turn, before: Turn | None, prompt: list[int], script: list[int]) -> int:
    """What a turn may cost, and that it is what a cold one is. -> tokens it had in common with the turn before."""
    assert turn.stats.prefill_tokens + turn.stats.cached_tokens == len(prompt)
    assert turn.stats.replayed_tokens == 0
    known = 0
    if before:
        known = common(before.text, prompt)
        assert turn.stats.prefill_tokens <= len(prompt) - known + 64
    cold = Turn(new_engine(model), prompt, script, -1, like=turn)
    assert cold.stats.cached_tokens == 0
    assert cold.stats.prefill_tokens + cold.stats.replayed_tokens == len(prompt)
    assert turn.logprobs == cold.logprobs  # to the last bit
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(turn.drafter_kv, cold.drafter_kv, strict=True))
    return known


def test_an_agent_of_five_turns_computes_only_the_tool_results(model: Decoder, chat: Chat) -> None:
    """One question, five tool calls: the template keeps thoughts, so all generated text comes back as prompt."""
    warm = new_engine(model, snapshots=12)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful agent. " * 8},
        {"role": "user", "content": "Which of the files sets the port?"},
    ]
    before: Turn | None = None
    stepped = 0
    for number in range(5):
        prompt = chat.prompt(messages, TOOLS)
        thought, path = f"File {number} may have it. " * (1 + number), f"src/part_{number}.py"
        call = f"<tool_call>\n<function=read_file>\n<parameter=path>\n{path}\n</parameter>\n</function>\n</tool_call>"
        script = chat.encode(f"{thought.strip()}\n</think>\n\n{call}<|im_end|>")
        turn = Turn(warm, prompt, script, chat.start)
        known = check_turn(model, turn, before, prompt, script)
        if before:
            assert known == len(before.text)  # generated tokens included
            assert turn.stats.cached_tokens > len(before.text) - 65
        stepped += sum(stop - start for start, stop in turn.stepped)
        before = turn
        messages += [
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": thought,
                "tool_calls": [{"function": {"name": "read_file", "arguments": {"path": path}}}],
            },
            {"role": "tool", "content": f"PORT_{number} = {number}\n" * (3 + 2 * number)},
        ]
    assert stepped > 3 * 64  # the cache was hit behind generated text


def test_a_chat_with_thinking_computes_only_what_the_template_kept(model: Decoder, chat: Chat) -> None:
    """A new question drops old thoughts, so the text goes apart where the last answer began."""
    warm = new_engine(model, snapshots=12)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief. " * 10}]
    before: Turn | None = None
    for number in range(5):
        messages.append({"role": "user", "content": f"And what about number {number}? " * (1 + number)})
        prompt = chat.prompt(messages)
        thought, answer = "Let me think. " * (3 + 2 * number), f"Number {number} is fine. " * 2
        script = chat.encode(f"{thought.strip()}\n</think>\n\n{answer.strip()}<|im_end|>")
        turn = Turn(warm, prompt, script, chat.start)
        check_turn(model, turn, before, prompt, script)
        assert turn.stepped == ()  # no generated text came back as it was
        if before:
            header = len(chat.encode("<|im_start|>assistant\n<think>\n"))
            assert turn.stats.cached_tokens >= before.stats.prompt_tokens - header - 64
        before = turn
        messages.append({"role": "assistant", "content": answer, "reasoning_content": thought})


def test_a_snapshot_behind_generated_text_is_that_of_the_steps_that_made_it(model: Decoder) -> None:
    """The second request's first logits, against forwards driven by hand: prompt, single steps, then prompt again."""
    words = torch.randint(0, 512, (330,), generator=torch.Generator().manual_seed(1)).tolist()
    first, script, more = words[:70], words[70:210], words[210:]
    engine = new_engine(model, snapshots=4)
    Turn(engine, first, script, -1)
    turn = Turn(engine, first + script + more, [5], -1)
    assert turn.stepped == ((70, 192),)
    assert turn.stats.cached_tokens == 192

    cache = Cache.allocate(model.config, pages=6, slots=1)
    text, cached, replay = first + script + more, 0, 0
    for family, stop in [(Family.PREFILL, 70), *((Family.STEP, n) for n in range(71, 193)), (Family.PREFILL, 330)]:
        batch = Batch.of(family, [Run(text[cached:stop], cached, 0, [3, 1, 0, 5, 2, 4], replay)], PAGE_SIZE)
        hidden, _ = model(batch, cache)
        cached, replay = stop, int(family is Family.STEP)
    table = torch.log_softmax(model.logits(hidden[-1:])[0].double(), -1)
    assert turn.logprobs[0].logprob == pytest.approx(float(table[5]), abs=1e-12)


def test_a_request_behind_generated_text_survives_preemption_bit_for_bit(model: Decoder) -> None:
    """It is pushed out after its snapshots are gone: what was generated once is computed as steps again."""
    words = torch.randint(0, 512, (500,), generator=torch.Generator().manual_seed(2)).tolist()
    engine = new_engine(model, snapshots=4, pages=8, slots=2)
    Turn(engine, words[:70], words[70:210], -1)
    prompt, script = words[:300], words[300:330]
    # an older request that grows pushes the younger one out: 8 pages do not hold 200 + 330 tokens
    older = engine.submit(words[300:425], Sampling(max_tokens=120))
    sampling = Sampling(max_tokens=len(script), logprobs=3)
    younger = engine.submit(prompt, sampling, DEPTH, (), Script(script, 512))
    sequence = engine.scheduler.waiting[-1]
    events: dict[int, list[Event]] = {older: [], younger: []}
    while not engine.idle:
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check_integrity()
        if sequence.output and not sequence.stats.preemptions:
            engine.scheduler._preempt(sequence)
            while len(engine.scheduler.prefixes) and engine.scheduler.prefixes.evict():
                pass
    assert sequence.stats.preemptions
    assert sequence.stepped == ((70, 192),)
    assert sequence.stats.replayed_tokens >= 192 - 70
    calm = new_engine(model, snapshots=4)
    Turn(calm, words[:70], words[70:210], -1)
    alone = Turn(calm, prompt, script, -1)
    assert alone.stepped == ((70, 192),)
    assert [entry for event in events[younger] for entry in event.logprobs] == alone.logprobs


def test_generated_text_is_left_out_when_asked(model: Decoder) -> None:
    words = torch.randint(0, 512, (330,), generator=torch.Generator().manual_seed(1)).tolist()
    config = EngineConfig(pages=PAGES, slots=1, max_depth=DEPTH, snapshots=4, cache_generated=False)
    engine = engine_on(model, config, CpuMtp(model, PAGES, 1))
    Turn(engine, words[:70], words[70:210], -1)
    turn = Turn(engine, words, [5], -1)
    assert (turn.stepped, turn.stats.cached_tokens) == ((), 64)


def test_a_preempted_request_goes_on_from_the_snapshot_in_its_own_output(model: Decoder) -> None:
    words = torch.randint(0, 512, (330,), generator=torch.Generator().manual_seed(4)).tolist()
    prompt, script = words[:70], words[70:270]
    engine = new_engine(model, snapshots=4)
    sampling = Sampling(max_tokens=len(script), logprobs=3)
    engine.submit(prompt, sampling, DEPTH, (), Script(script, 512))
    sequence, logprobs = engine.scheduler.waiting[-1], []
    while not engine.idle:
        logprobs += [entry for event in engine.step() for entry in event.logprobs]
        if len(sequence.output) > 140 and not sequence.stats.preemptions:
            engine.scheduler._preempt(sequence)
    assert sequence.stats.prefill_tokens == 70
    assert 0 < sequence.stats.replayed_tokens <= 64 + DEPTH
    assert logprobs == Turn(new_engine(model), prompt, script, -1).logprobs
