"""Stop strings, logprobs and token masks hold inside drafted blocks, and give with drafts what they give without."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache
from stoker.backends.network.decoder import Decoder
from stoker.engine.engine import EngineConfig
from stoker.engine.event import Event, Finish
from stoker.engine.text import TextStream
from stoker.sampling.mask import TokenMask
from stoker.sampling.settings import Sampling
from tests.engine.drive import DEPTH, PAGES, SLOTS, Oracle, engine_on, run

VOCAB = 512
LETTERS = dict.fromkeys(range(90), 50.0)  # a bias that leaves printable ASCII, of the byte tokenizer's tokens


@pytest.fixture(scope="module")
def tokenizer(checkpoints: dict[str, Path]) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoints["qwen3_5_moe_text"] / "tokenizer.json"))


def ask(
    model: Decoder,
    prompt: list[int],
    sampling: Sampling,
    answer: list[int] | None = None,
    wrong: int = 10**6,
    tokenizer: Tokenizer | None = None,
    mask: TokenMask | None = None,
) -> tuple[list[int], list[Event]]:
    """One request; drafted from `answer` if there is one. -> tokens and events."""
    drafter = Oracle({tuple(prompt): answer}, wrong) if answer else None
    engine = engine_on(model, EngineConfig(pages=PAGES, slots=1, max_depth=DEPTH), drafter, tokenizer)
    engine.submit(prompt, sampling, depth=DEPTH if answer else 0, mask=mask)
    sequence = engine.scheduler.waiting[0]
    events = run(engine)[0]
    tokens = [token for event in events for token in event.tokens]
    assert sequence.output == tokens
    if sequence.output:
        assert sequence.computed == sequence.length - 1  # what was cut off was not kept for the next step either
    return tokens, events


def stats_of(events: list[Event]) -> dict[str, int]:
    stats = events[-1].stats
    assert stats is not None
    return {name: getattr(stats, name) for name in ("output_tokens", "steps", "drafted", "accepted", "forced")}


# -- stop strings


def shown(tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str]) -> str:
    stream = TextStream(tokenizer, stops)
    return "".join([*(stream.push(token) for token in tokens), stream.flush()])


@pytest.mark.parametrize("wrong", [10**6, 3])
def test_a_stop_string_inside_a_block_cuts_tokens_logprobs_and_usage_alike(
    model: Decoder, prompts: list[list[int]], tokenizer: Tokenizer, wrong: int
) -> None:
    free = Sampling(max_tokens=40, temperature=1.0, seed=5, logit_bias=LETTERS)
    answer, _ = ask(model, prompts[0], free)
    whole = tokenizer.decode(answer, skip_special_tokens=True)
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    end = next(n for n in range(1, 41) if stop in tokenizer.decode(answer[:n], skip_special_tokens=True))
    sampling = replace(free, logprobs=2, stop=("not there", stop))
    plain, plain_events = ask(model, prompts[0], sampling, tokenizer=tokenizer)
    drafted, events = ask(model, prompts[0], sampling, answer, wrong, tokenizer)
    assert drafted == plain == answer[:end]
    assert len(answer[:end]) < 40
    for found in (plain_events, events):
        assert (found[-1].finish, found[-1].stop) == (Finish.STOP, stop)
        assert sum(len(event.logprobs) for event in found) == end == stats_of(found)["output_tokens"]
    assert len(events) < len(plain_events)
    assert shown(tokenizer, drafted, sampling.stop) == whole[: whole.index(stop)]


def test_min_tokens_puts_off_stop_strings_and_stop_ids_inside_blocks_too(
    model: Decoder, prompts: list[list[int]], tokenizer: Tokenizer
) -> None:
    free = Sampling(max_tokens=60, temperature=1.0, seed=5, logit_bias=dict.fromkeys(range(30), 50.0))
    answer, _ = ask(model, prompts[0], free)
    stop, stop_id = shown(tokenizer, answer[5:6], ()), answer[3]
    assert stop_id != answer[5]
    sampling = replace(free, min_tokens=12, stop=(stop,), stop_ids=(stop_id,))
    plain, events = ask(model, prompts[0], sampling, tokenizer=tokenizer)
    assert stop in shown(tokenizer, plain[:12], ())
    assert stop_id not in plain[:12]
    assert len(plain) > 12
    assert events[-1].finish is Finish.STOP
    assert ask(model, prompts[0], sampling, plain, 3, tokenizer)[0] == plain


# -- logprobs


def test_logprobs_are_the_models_own_and_the_same_with_and_without_drafts(
    model: Decoder, prompts: list[list[int]]
) -> None:
    """Penalties, bias and temperature shape the choice, not the logprobs."""
    sampling = Sampling(
        max_tokens=20, temperature=0.7, top_k=20, seed=3, logprobs=4, presence_penalty=1.0, logit_bias={7: 2.0}
    )
    plain, plain_events = ask(model, prompts[4], sampling)
    expected = [entry for event in plain_events for entry in event.logprobs]
    for wrong in (10**6, 2, 3):
        drafted, events = ask(model, prompts[4], sampling, plain, wrong)
        assert drafted == plain
        assert [entry for event in events for entry in event.logprobs] == expected  # to the last bit
        assert len(events) < len(plain_events)
    assert [entry.token for entry in expected] == plain
    for entry, logits in zip(expected, reference_logits(model, prompts[4], plain), strict=True):
        table = torch.log_softmax(logits.double(), -1)
        assert entry.logprob == pytest.approx(float(table[entry.token]), abs=1e-9)
        assert [value for _, value in entry.top] == pytest.approx(table.topk(4).values.tolist(), abs=1e-9)
        assert [float(table[token]) for token, _ in entry.top] == pytest.approx([value for _, value in entry.top])


def reference_logits(model: Decoder, prompt: list[int], output: list[int]) -> list[Tensor]:
    """The logits each output token was chosen from, one forward per token and no engine."""
    cache = Cache.allocate(model.config, pages=4, slots=1)
    pages, logits, cached, replay = [0, 1, 2, 3], [], 0, 0
    for family, tokens in [(Family.PREFILL, prompt), *((Family.STEP, [token]) for token in output[:-1])]:
        batch = Batch.of(family, [Run(tokens, cached, 0, pages, replay)], PAGE_SIZE)
        hidden, _ = model(batch, cache)
        logits.append(model.logits(hidden[-1:])[0])
        cached, replay = cached + len(tokens), int(family is Family.STEP)
    return logits


def test_logprobs_of_no_more_than_the_chosen_token(model: Decoder, prompts: list[list[int]]) -> None:
    _, events = ask(model, prompts[3], Sampling(max_tokens=3, logprobs=0))
    assert [entry.top for event in events for entry in event.logprobs] == [(), (), ()]
    _, events = ask(model, prompts[3], Sampling(max_tokens=3))
    assert all(event.logprobs == () for event in events)


# -- masks


class Digits:
    """A made-up grammar: after n tokens, only tokens n, n + 7, n + 14, ... (mod 50) may come, and every fifth token
    is forced."""

    def __init__(self) -> None:
        self.asked = 0

    def allowed(self, output: Sequence[int]) -> Tensor | None:
        self.asked += 1
        assert all(token < 50 for token in output)  # nobody asks about text that broke the rules
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        forced = self.forced(output)
        mask[list(forced[:1]) or [(len(output) + 7 * i) % 50 for i in range(6)]] = True
        return mask

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        return [11, 12, 13] if len(output) % 5 == 2 else [12, 13] if len(output) % 5 == 3 else []


SAMPLINGS = [
    Sampling(max_tokens=25),
    Sampling(max_tokens=25, temperature=1.0, top_p=0.9, seed=4, presence_penalty=0.7, min_tokens=5, stop_ids=(3,)),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_mask_holds_at_every_position_of_a_block(
    model: Decoder, prompts: list[list[int]], sampling: Sampling
) -> None:
    plain, events = ask(model, prompts[2], sampling, mask=Unforced())
    for place, token in enumerate(plain):
        allowed = Digits().allowed(plain[:place])
        assert allowed is not None
        assert bool(allowed[token])
    for wrong in (10**6, 2):
        drafted, _ = ask(model, prompts[2], sampling, plain, wrong, mask=Unforced())
        assert drafted == plain
    spoilt = [(token + 50) % VOCAB if place % 3 else token for place, token in enumerate(plain)]
    assert ask(model, prompts[2], sampling, spoilt, mask=Unforced())[0] == plain  # barred drafts are cut off
    forced, forced_events = ask(model, prompts[2], sampling, mask=Digits())
    assert forced == plain
    assert stats_of(forced_events)["forced"] > 0 == stats_of(events)["forced"]
    assert stats_of(forced_events)["steps"] < stats_of(events)["steps"]  # though no drafter is there
    assert stats_of(forced_events)["drafted"] == 0


class Unforced(Digits):
    def allowed(self, output: Sequence[int]) -> Tensor | None:
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        forced = Digits().forced(output)
        mask[list(forced[:1]) or [(len(output) + 7 * i) % 50 for i in range(6)]] = True
        return mask

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        return ()


class Failing:
    """Anything goes until `after` tokens are out; then `what` happens."""

    def __init__(self, after: int, what: Callable[[], Any]) -> None:
        self.after, self.what = after, what

    def allowed(self, output: Sequence[int]) -> Tensor | None:
        result: Tensor | None = self.what() if len(output) >= self.after else None
        return result

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        return ()


def explode() -> Tensor | None:
    raise KeyError("no such rule")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (explode, "the token mask failed after 7 output tokens: KeyError: 'no such rule'"),
        (lambda: torch.zeros(VOCAB, dtype=torch.bool), "the token mask allows no token after 7 output tokens."),
        (
            lambda: torch.ones(5, dtype=torch.bool),
            "the token mask is torch.bool [5], expected torch.bool [512] or None.",
        ),
        (lambda: torch.ones(VOCAB), "the token mask is torch.float32 [512], expected torch.bool [512] or None."),
        (lambda: [True] * VOCAB, "the token mask is list, expected torch.bool [512] or None."),
    ],
)
def test_a_mask_that_fails_ends_its_request_alone_and_after_the_same_tokens(
    model: Decoder, prompts: list[list[int]], alone: list[list[int]], what: Callable[[], Any], words: str
) -> None:
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, alone, strict=True)}
    engine = engine_on(model, EngineConfig(pages=PAGES, slots=SLOTS, max_depth=DEPTH), Oracle(answers, 4))
    bad = engine.submit(prompts[0], Sampling(max_tokens=20), DEPTH, mask=Failing(7, what))
    at_once = engine.submit(prompts[2], Sampling(max_tokens=20), DEPTH, mask=Failing(0, what))
    good = engine.submit(prompts[4], Sampling(max_tokens=20), DEPTH)
    events = run(engine)
    tokens = {request: [t for event in found for t in event.tokens] for request, found in events.items()}
    assert (events[bad][-1].finish, events[bad][-1].error) == (Finish.ERROR, words)
    assert events[at_once][-1].error == words.replace("after 7", "after 0")
    assert tokens == {bad: alone[0][:7], at_once: [], good: alone[4]}
    assert (engine.scheduler.pages.free, engine.scheduler.slots.free) == (PAGES, SLOTS)


class Forcing(Failing):
    def forced(self, output: Sequence[int]) -> Sequence[int]:
        return [VOCAB] if len(output) >= 3 else ()


def test_a_mask_that_forces_what_is_no_token_ends_its_request(model: Decoder, prompts: list[list[int]]) -> None:
    tokens, events = ask(model, prompts[2], Sampling(max_tokens=9), mask=Forcing(99, explode))
    assert len(tokens) == 3
    assert events[-1].error == "the token mask forces token 512, outside the vocabulary of 512."


def test_a_mask_that_leaves_only_barred_stop_ids_says_so(model: Decoder, prompts: list[list[int]]) -> None:
    def only_the_end() -> Tensor:
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[9] = True
        return mask

    sampling = Sampling(max_tokens=10, min_tokens=4, stop_ids=(9,))
    tokens, events = ask(model, prompts[2], sampling, mask=Failing(2, only_the_end))
    assert len(tokens) == 2
    assert events[-1].error == (
        "the token mask allows no token after 2 output tokens once stop ids are barred until min_tokens (4)."
    )
    assert ask(model, prompts[2], sampling, mask=Failing(4, only_the_end))[0][4:] == [9]
