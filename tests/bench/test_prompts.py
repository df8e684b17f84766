"""Prompts have exactly the tokens they say, cold ones share no beginning, warm ones do, and answers are looked at."""

import asyncio
import json
from random import Random
from typing import Any

import pytest

from stoker.bench import agent
from stoker.bench.answer import Answer
from stoker.bench.fit import fit
from stoker.bench.journal import Journal
from stoker.bench.quality import looping, problems
from stoker.bench.record import Request
from stoker.bench.run import Runner
from stoker.bench.suites import NAMES, Cell, Options, Plan, plan
from stoker.bench.target import Target
from stoker.bench.texts import Material, prose
from stoker.bench.tokens import Counter
from stoker.bench.workloads import MIXES, SINGLE, WORKLOADS, Prompt, Prompts
from stoker.errors import BenchError
from tests.bench.drive import bench
from tests.bench.mock import Behaviour, Mock, VirtualClock, prompt_length


def _with(how: Behaviour, use: Any) -> Any:
    async def run() -> Any:
        mock = Mock(how, VirtualClock())
        async with mock.running(), Target(mock.url) as target:
            return await use(target)

    return asyncio.run(run())


@pytest.mark.parametrize("tokenize", [True, False])
@pytest.mark.parametrize("name", [*SINGLE, "Long-RAG-128K"])
def test_a_prompt_has_exactly_its_tokens(name, tokenize):
    async def use(target: Target) -> Prompt:
        return await Prompts(target, "s").cold(WORKLOADS[name])

    prompt = _with(Behaviour(tokenize=tokenize), use)
    if tokenize or WORKLOADS[name].prompt_tokens <= 2048:  # beyond, without /tokenize, it is scaled from a sample
        assert prompt.tokens == prompt_length(prompt.body) == WORKLOADS[name].prompt_tokens
    else:
        assert prompt_length(prompt.body) == pytest.approx(WORKLOADS[name].prompt_tokens, rel=0.02)


@pytest.mark.parametrize(("task", "wanted", "expected"), [(89, 96, 96), (89, 92, 128), (97, 96, 128), (124, 128, 192)])
def test_a_prompt_that_cannot_have_its_tokens_has_the_next_multiple_of_64(task, wanted, expected):
    """Where the task is too long, or the five-token sentence that leads in to filler is."""

    class Words(Counter):
        async def chat(self, body: dict[str, Any]) -> int:
            return len(body["text"].split())

    def render(filler: str) -> dict[str, Any]:
        return {"text": " ".join(["word"] * task) + (f" so leads in a sentence {filler}" if filler else "")}

    body, tokens = asyncio.run(fit(render, Material(prose, 1), wanted, Words()))
    assert tokens == expected == len(body["text"].split())


def test_cold_prompts_share_no_beginning_and_warm_ones_do():
    async def use(target: Target) -> list[str]:
        prompts = Prompts(target, "s")
        workload = WORKLOADS["Long-RAG-8K"]
        made = [await prompts.cold(workload), await prompts.cold(workload)]
        made += [await prompts.warm(workload, 0), await prompts.warm(workload, 1), made[0].resalted(Random(5))]
        return [prompt.body["messages"][0]["content"] for prompt in made]

    cold, other, warm, again, salted = _with(Behaviour(), use)
    assert cold[:20] != other[:20] != salted[:20] != cold[:20]
    assert cold[40:2000] == other[40:2000]  # the same words, so that runs differ by noise alone
    assert warm[:30000] == again[:30000]
    assert warm[-60:] != again[-60:]
    assert len(salted.split()) == len(cold.split())


@pytest.mark.parametrize(
    "cell", [Cell("Math", rounds=2, each=2), Cell(agent.NAME, "warm", histories=(2000,), rounds=1)]
)
def test_two_servers_are_asked_the_same_but_one_server_never_twice(cell):
    async def ask(*mocks: Mock) -> None:
        async with Target(mocks[0].url, name="A") as a, Target(mocks[-1].url, name="B") as b:
            await Runner([a, b], Plan([cell]), Options(), Journal(None, {}, Request), "salt").run()

    async def run() -> list[Mock]:
        mocks = [Mock(Behaviour(chunks=2, ttft_s=0.0, steps_per_s=1e4)) for _ in range(3)]
        async with mocks[0].running(), mocks[1].running(), mocks[2].running():
            await ask(mocks[0], mocks[1])
            await ask(mocks[2])
        return mocks

    def prompts(mock: Mock) -> list[str]:
        return [json.dumps(body["messages"]) + str(body.get("tools")) for body in mock.asked if body["max_tokens"] > 1]

    first, second, twice = map(prompts, asyncio.run(run()))
    assert first == second
    assert len(twice) == 2 * len(first)
    assert len(set(twice)) == len(twice)


def test_filler_does_not_repeat_itself():
    words = Material(prose, 1).first(20_000)
    sentences = words.split(". ")
    assert len(set(sentences)) > 0.98 * len(sentences)


def test_every_suite_has_cells_and_leaves_out_what_does_not_fit():
    for name in NAMES:
        assert plan(name, Options(), None).cells
    small = plan("single", Options(), 8192)
    assert [cell.name for cell in small.cells] == [name for name in SINGLE if name != "Long-RAG-32K"]
    assert small.skipped == ["Long-RAG-32K is left out: Long-RAG-32K takes 30,256 tokens, the context is 8,192."]
    assert {cell.concurrency for cell in plan("mix", Options(), None).cells if cell.name == "long_only_128k"} == {2, 4}
    depths = plan("depth", Options(), None).cells
    assert len(depths) == 7 * 4
    with pytest.raises(BenchError, match="no suite called 'fast'"):
        plan("fast", Options(), None)
    with pytest.raises(BenchError, match="no workload called Cod"):
        plan("single", Options(workloads=("Cod",)), None)
    assert set(MIXES) == {"uniform_short", "mixed_typical", "long_only_128k"}


@pytest.mark.parametrize("share", [0.0, 0.73, 1.0])
def test_an_agents_history_grows_to_the_points_of_measurement(share):
    mock = Mock(Behaviour(tool_call=True, chunks=10), VirtualClock())

    async def run() -> Any:
        async with mock.running(), Target(mock.url) as target:
            talk = agent.Conversation(target, "s", share)
            lengths, wanted = [], []
            for turn in agent.turns((8000, 32000)):
                prompt = await talk.prompt(turn)
                lengths.append((turn.load, prompt_length(prompt.body)))
                wanted.append("next" in str(prompt.body["messages"][-1]["content"]).rsplit("\n", 1)[-1])
                call = {"name": "read_file", "arguments": '{"path": "a"}'}
                talk.answered(Answer(calls={0: call}))
            return lengths, wanted, prompt.body["messages"]

    lengths, wanted, messages = asyncio.run(run())
    assert [n for _, n in lengths] == [6800, 7100, 7400, 7700, 8000, 30800, 31100, 31400, 31700, 32000]
    assert [load for load, _ in lengths] == [True, False, False, False, False] * 2
    assert messages[-1]["role"] == "tool"
    assert messages[-1]["tool_call_id"] == messages[-2]["tool_calls"][0]["id"]
    assert sum(wanted) / len(wanted) == pytest.approx(share, abs=0.25)


def test_a_conversation_is_measured_by_length_of_history():
    async def run() -> Any:
        mock = Mock(Behaviour(tool_call=True, per_chunk=(4,), cached_share=0.9), VirtualClock())
        async with mock.running():
            return await bench(mock, Cell(agent.NAME, "warm", histories=(2000, 8000), rounds=2))

    found = asyncio.run(run())
    assert [(point.history_tokens, point.turns) for point in found.turns] == [(2000, 8), (8000, 8)]
    assert found.turns[0].seconds.p50 == pytest.approx(0.2 + 39 / 25, rel=0.02)
    assert found.headline.agent_decode_tokens_per_s == pytest.approx(100, rel=0.02)
    assert "s per agent turn at 8K" in found.headline.text
    assert {row.variant for row in found.workloads} == {"warm", "load"}


def test_what_is_wrong_with_an_answer():
    assert problems(Answer(content="Ice floats because it is less dense than water."), False) == []
    assert problems(Answer(content="  \n"), False) == ["blank"]
    assert problems(Answer(content="the same words " * 40), False) == ["looping"]
    assert problems(Answer(content="Sure: {"), True) == ["not JSON"]
    assert problems(Answer(content='```json\n{"a": 1}\n```'), True) == []
    assert problems(Answer(content='{"a": ', finish_reason="length"), True) == []
    assert problems(Answer(calls={0: {"name": "f", "arguments": "{path"}}), False) == ["tool arguments not JSON"]
    assert problems(Answer(calls={0: {"name": "f", "arguments": '{"a": 1}'}}), False) == []


def test_tables_and_lists_are_no_loops():
    assert not looping(json.dumps([{"id": i, "name": f"part {i}"} for i in range(40)], indent=1))
    assert not looping("\n".join(f"| {i} | {i * i} |" for i in range(60)))
    assert looping("It begins well. " + "and then " * 30)
