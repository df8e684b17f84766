"""Requests do not notice each other, drafting, or being pushed out: each equals itself alone and undrafted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.backends.cpu.drafting import CpuDFlash, CpuMtp
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_drafter, load_model
from stoker.engine.engine import EngineConfig
from stoker.engine.event import Finish
from stoker.errors import RequestError
from stoker.sampling.settings import Sampling
from stoker.speculate.drafter import Drafter
from stoker.speculate.lookup import LookupDrafter
from tests.engine.drive import DEPTH, PAGES, SLOTS, Oracle, drain, engine_on, settings_for
from tests.support.random_checkpoint import (
    small_config,
    small_drafter_config,
    write_random_checkpoint,
    write_random_drafter,
)


def drafter_of(
    name: str, model: Decoder, prompts: list[list[int]], alone: list[list[int]], tmp_path: Path
) -> Drafter | CpuMtp | CpuDFlash:
    if name == "mtp":
        return CpuMtp(model, PAGES, SLOTS)
    if name == "lookup":
        return LookupDrafter(DEPTH)
    if name == "dflash":
        write_random_drafter(tmp_path, small_drafter_config(small_config()))
        return CpuDFlash(model, load_drafter(tmp_path, model.config), PAGES)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, alone, strict=True)}
    return Oracle(answers, wrong=int(name.removeprefix("oracle-")))


@pytest.mark.parametrize("name", ["mtp", "dflash", "lookup", "oracle-3", "oracle-1000000"])
@pytest.mark.parametrize("pages", [PAGES, 4])
def test_every_request_equals_itself_alone_and_undrafted(
    model: Decoder, prompts: list[list[int]], alone: list[list[int]], tmp_path: Path, name: str, pages: int
) -> None:
    """All drafters, mixed depths (0 too), 8 requests on 4 slots; 4 pages force preemption."""
    drafter = drafter_of(name, model, prompts, alone, tmp_path)
    config = EngineConfig(
        pages=pages, slots=SLOTS, max_depth=DEPTH, prefill_budget=128, snapshots=3, snapshot_interval=64
    )
    engine = engine_on(model, config, drafter)
    for index, prompt in enumerate(prompts):
        engine.submit(prompt, settings_for(index), depth=[DEPTH, 2, 0, 5][index // 2])
    sequences = list(engine.scheduler.waiting)
    tokens = drain(engine)
    assert [tokens[index] for index in range(len(prompts))] == alone
    assert engine.scheduler.pages.free == pages - len(set(engine.scheduler.prefixes.pinned()))
    assert engine.scheduler.slots.free == SLOTS
    if pages == 4:
        assert sum(sequence.stats.preemptions for sequence in sequences) > 0
    if name == "oracle-1000000":
        drafted = [sequence for sequence in sequences if sequence.depth]
        assert all(sequence.stats.accepted == sequence.stats.drafted > 0 for sequence in drafted)
        assert drafted[0].stats.steps <= -(-19 // (DEPTH + 1))


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_moe"])
def test_the_other_families_too(checkpoints: dict[str, Path], prompts: list[list[int]], family: str) -> None:
    model = load_model(checkpoints[family]).model
    plain, drafted = (
        engine_on(model, EngineConfig(pages=PAGES, slots=slots, max_depth=DEPTH), LookupDrafter(DEPTH))
        for slots in (1, 4)
    )
    for prompt in prompts[:4]:
        plain.submit(prompt * 2, Sampling(max_tokens=16))
        drafted.submit(prompt * 2, Sampling(max_tokens=16), depth=DEPTH)
    assert drain(drafted) == drain(plain)


def test_mtp_rows_written_while_drafting_leave_no_trace(model: Decoder, prompts: list[list[int]]) -> None:
    """After random accepts the head's KV equals that of depth-0 steps over the same text."""
    pages = {}
    for depth in (0, DEPTH):
        drafter = CpuMtp(model, PAGES, 1)
        engine = engine_on(model, EngineConfig(pages=PAGES, slots=1, max_depth=DEPTH), drafter)
        engine.submit(prompts[2], Sampling(max_tokens=30), depth=depth)
        owned: list[int] = []
        while not engine.idle:
            owned = engine.scheduler.running[0].pages if engine.scheduler.running else owned
            engine.step()
        written = len(prompts[2]) + 28  # every token but the last has a row
        kv = drafter.pages
        pages[depth] = [tensor[owned].flatten(0, 1)[:written] for tensor in (kv.keys, kv.values)]
    assert all(torch.equal(a, b) for a, b in zip(pages[0], pages[DEPTH], strict=True))


def test_a_stop_inside_an_accepted_block_cuts_the_block(model: Decoder, prompts: list[list[int]]) -> None:
    engine = engine_on(model, EngineConfig(pages=PAGES, slots=1, max_depth=0))
    engine.submit(prompts[0], Sampling(max_tokens=20))
    free = drain(engine)[0]
    stop = next(token for token in free[3:] if free.index(token) >= 3)
    want = free[: free.index(stop) + 1]
    drafter = Oracle({tuple(prompts[0]): free}, wrong=10**6)
    engine = engine_on(model, EngineConfig(pages=PAGES, slots=1, max_depth=DEPTH), drafter)
    engine.submit(prompts[0], Sampling(max_tokens=20, stop_ids=(stop,)), depth=DEPTH)
    events = []
    while not engine.idle:
        events += engine.step()
    assert [token for event in events for token in event.tokens] == want
    assert events[-1].finish is Finish.STOP


def test_cancelling_frees_everything_within_a_step(model: Decoder, prompts: list[list[int]]) -> None:
    engine = engine_on(model, EngineConfig(pages=PAGES, slots=2, max_depth=0))
    ids = [engine.submit(prompt, Sampling(max_tokens=50)) for prompt in prompts[:4]]
    engine.step()
    for request_id in ids:
        event = engine.cancel(request_id)
        assert event is not None
        assert event.finish is Finish.CANCELLED
        engine.check_integrity()
    assert engine.idle
    assert (engine.scheduler.pages.free, engine.scheduler.slots.free) == (PAGES, 2)
    assert engine.cancel(ids[0]) is None


def test_what_can_never_be_served_is_refused_with_numbers(model: Decoder) -> None:
    engine = engine_on(model, EngineConfig(pages=2, slots=1, max_depth=2))
    with pytest.raises(RequestError, match=r"100 tokens and max_tokens asks 29: 129 > 128 tokens of KV cache"):
        engine.submit([1] * 100, Sampling(max_tokens=29))
    with pytest.raises(RequestError, match="depth is 3, expected 0 to 2"):
        engine.submit([1], Sampling(), depth=3)
    with pytest.raises(RequestError, match="depth is 1, but this engine has no drafter"):
        engine.submit([1], Sampling(), depth=1)
    with pytest.raises(RequestError, match="token id 600 is outside the vocabulary of 512"):
        engine.submit([1], Sampling(logit_bias={600: 1.0}))
    with pytest.raises(RequestError, match="stop asks for 2 stop strings, but this engine has no tokenizer"):
        engine.submit([1], Sampling(stop=("a", "b")))
    with pytest.raises(RequestError, match="the prompt is empty: it has 0 tokens, expected at least 1"):
        engine.submit([], Sampling())
    odd: Any = 1.5
    with pytest.raises(RequestError, match=r"token id 1\.5 is not a whole number"):
        engine.submit([1, odd], Sampling())
    with pytest.raises(RequestError, match="token id True is not a whole number"):
        engine.submit([1], Sampling(stop_ids=(True,)))
    with pytest.raises(RequestError, match=r"depth is 1\.5, expected 0 to 2"):
        engine.submit([1], Sampling(), depth=odd)
    with pytest.raises(RequestError, match=r"boundaries are \[1.5\], expected whole numbers"):
        engine.submit([1] * 70, Sampling(max_tokens=1), boundaries=[odd])
    assert engine.idle
    assert engine.cancel(7) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefill_budget": 100}, "prefill_budget is 100, expected a multiple of 64."),
        ({"prefill_budget": -64}, "prefill_budget is -64, expected a multiple of 64."),
        ({"snapshot_interval": 0}, "snapshot_interval is 0, expected a multiple of 64."),
        ({"pages": 0}, "pages is 0, expected at least 1."),
        ({"slots": -2}, "slots is -2, expected at least 1."),
        ({"max_depth": -1}, "max_depth is -1, expected at least 0."),
        ({"snapshots": -1}, "snapshots is -1, expected at least 0."),
        ({"kv_dtype": "int4"}, "kv_dtype is 'int4', expected bf16 or fp32 or fp8."),
    ],
)
def test_an_engine_that_cannot_be_is_refused_with_numbers(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as error:
        EngineConfig(**options)
    assert str(error.value) == words


def test_a_head_that_is_missing_is_said(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, small_config(mtp_num_hidden_layers=0))
    with pytest.raises(ValueError, match="no MTP head"):
        CpuMtp(load_model(tmp_path).model, 1, 1)
