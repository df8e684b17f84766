"""Sampling draws from the distribution asked for, and depends on seed, position and token alone."""

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stoker.errors import RequestError
from stoker.sampling.sampler import Extended, Past, Row, choose, gumbel, score
from stoker.sampling.settings import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 1.7])
DRAWS = 20_000
NUMBERS = st.lists(st.integers(0, 9), max_size=6)
EDGES = st.one_of(st.none(), st.integers(-14, 14))


def draw(logits: Tensor, draws: int = DRAWS, **sampling: Any) -> Tensor:
    """How often each token comes out over as many positions."""
    how = Sampling(**({"temperature": 1.0, "seed": 7} | sampling))
    chosen = choose(logits.expand(draws, -1), [Row(how, position) for position in range(draws)])
    return torch.bincount(chosen, minlength=len(logits)).double()


def p_value(observed: Tensor, probabilities: Tensor) -> float:
    """Chi-square test of counts against probabilities; a token of probability 0 must not occur."""
    assert observed[probabilities == 0].sum() == 0
    live = probabilities > 0
    expected = probabilities[live].double() * observed.sum()
    statistic = ((observed[live] - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((int(live.sum()) - 1) / 2.0).double(), statistic / 2.0))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_match_the_softmax(temperature: float) -> None:
    counts = draw(LOGITS, temperature=temperature)
    assert p_value(counts, torch.softmax(LOGITS / temperature, -1)) > 1e-3
    # the same test notices a temperature 10 % off
    assert p_value(counts, torch.softmax(LOGITS / (temperature * 1.1), -1)) < 1e-3


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 3}, [0, 1, 5]),
        ({"top_p": 0.69}, [0, 5]),  # probabilities 0.397, 0.294, 0.146, ...
        ({"top_p": 0.70}, [0, 1, 5]),
        ({"top_k": 2, "top_p": 0.99}, [0, 5]),
        ({"min_p": 0.3}, [0, 1, 5]),
        ({"top_k": 1}, [0]),
        ({"top_p": 1e-9}, [0]),
    ],
)
def test_filters_keep_the_right_tokens_in_the_right_proportion(options: dict[str, Any], kept: list[int]) -> None:
    probabilities = torch.zeros(6)
    probabilities[kept] = torch.softmax(LOGITS[kept], -1)
    counts = draw(LOGITS, **options)
    assert (counts > 0).nonzero()[:, 0].tolist() == kept
    if len(kept) > 1:
        assert p_value(counts, probabilities) > 1e-3


def by_full_sort(logits: Tensor, row: Row) -> int:
    """The rule in its plainest form: sort everything, cut, add noise, take the largest."""
    how = row.sampling
    scores = logits / torch.tensor(how.temperature)
    order = sorted(range(len(scores)), key=lambda token: (-float(scores[token]), token))
    if how.top_k:
        order = order[: how.top_k]
    probabilities = torch.softmax(scores[order] if how.top_k else scores, -1)
    kept, mass = [], 0.0
    for place, token in enumerate(order):
        if place and mass >= how.top_p:
            break
        kept.append(token)
        mass += float(probabilities[place if how.top_k else token])
    noise = gumbel(torch.tensor(how.seed), torch.tensor(row.position), torch.tensor(kept))
    return kept[int((scores[kept].double() + noise).argmax())]


@pytest.mark.parametrize("spread", [0.05, 1.0, 8.0])
@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_p": 0.5, "top_k": 300}, {"top_k": 64}, {"top_k": 3}])
def test_only_as_much_is_sorted_as_is_needed_and_the_choice_is_that_of_sorting_everything(
    spread: float, options: dict[str, Any]
) -> None:
    """Rounded to bf16, so that many tokens tie; nearly flat ones need far more than the first 64."""
    logits = (torch.randn(12, 3000) * spread).bfloat16().float()
    rows = [Row(Sampling(temperature=0.8, seed=seed, **options), 40 + seed) for seed in range(12)]
    chosen = choose(logits, rows).tolist()
    assert chosen == [by_full_sort(logits[i], row) for i, row in enumerate(rows)]
    assert chosen == [int(choose(logits[i : i + 1], [row])) for i, row in enumerate(rows)]


def test_rows_with_different_settings_do_not_touch_each_other() -> None:
    settings = [
        Sampling(),
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.7, top_p=0.8, seed=4),
        Sampling(temperature=1.0, top_k=2, min_p=0.1),
        Sampling(logit_bias={3: 100.0}),
    ]
    rows = [Row(sampling, 11 + i) for i, sampling in enumerate(settings)]
    logits = torch.randn(5, 300)
    together = choose(logits, rows)
    for i, row in enumerate(rows):
        assert int(choose(logits[i : i + 1], [row])) == int(together[i])
    assert int(together[4]) == 3


def test_the_rarest_token_stays_possible_whatever_runs_beside_it() -> None:
    """Its probability, 1.3e-7, is lost when the others are added up in fp32; without top_p nothing may be cut off."""
    logits = torch.tensor([[0.0, -0.9378, -15.5521]])
    free = Sampling(temperature=1.0, seed=1202963)  # whose noise at position 7 favours token 2
    neighbour = Row(Sampling(temperature=1.0, top_p=0.9), 7)
    assert int(choose(logits, [Row(free, 7)])) == 2
    assert int(choose(logits.expand(2, -1), [Row(free, 7), neighbour])[0]) == 2
    assert int(choose(logits, [Row(replace(free, top_k=3), 7)])) == 2
    assert int(choose(logits, [Row(replace(free, top_k=2), 7)])) != 2


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize(
    "options",
    [{}, {"repetition_penalty": 1e6}, {"repetition_penalty": 1e-6}, {"presence_penalty": 1e6},
     {"frequency_penalty": -1e6}, {"logit_bias": {2: -1e6, 3: -1e6}}, {"top_k": (1 << 31) - 1}, {"min_p": 0.999}],
)  # fmt: skip
def test_a_mask_holds_with_the_most_extreme_settings(temperature: float, options: dict[str, Any]) -> None:
    allowed = torch.tensor([False, False, True, True, False, False])
    rows = [Row(Sampling(temperature=temperature, **options), p, [2, 4], [3, 5], allowed) for p in range(50)]
    chosen = set(choose(30 * LOGITS.expand(50, -1), rows).tolist())
    assert chosen <= {2, 3}
    if temperature == 1e-6:  # which leaves the likeliest token alone
        assert chosen == {int(choose(30 * LOGITS[None], [replace(rows[0], sampling=Sampling(**options))]))}


def test_penalties_follow_prompt_and_output() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, -1.0]])

    def greedy(prompt: list[int], output: list[int], **options: Any) -> int:
        return int(choose(logits, [Row(Sampling(**options), 9, prompt, output)]))

    assert greedy([0], [], repetition_penalty=2.0) == 1  # the prompt counts for repetition ...
    assert greedy([0], [], presence_penalty=5.0) == 0  # ... and not for presence
    assert greedy([], [0], presence_penalty=1.5) == 1

    assert greedy([], [0, 0, 0, 1], frequency_penalty=0.8) == 1  # 4 - 2.4 = 1.6, 3 - 0.8 = 2.2, 2


def test_what_is_known_of_the_text_counts_like_the_text_itself() -> None:
    """Kept token by token, with drafts behind it that are not counted yet."""
    how = Sampling(temperature=0.9, seed=2, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    prompt, output, drafts = [1, 2, 2, 9], [3, 3, 1, 7, 3], [7, 5, 9]
    past = Past(30, prompt)
    for token in output:
        past.push(token)
    for place in range(4):
        logits = torch.randn(1, 30)
        text = [*output, *drafts[:place]]
        known = Row(how, 9 + place, prompt, Extended(output, drafts[:place]), past=past)
        assert int(choose(logits, [known])) == int(choose(logits, [Row(how, 9 + place, prompt, text)]))
    assert past.tokens == 5  # drafts left no trace
    assert past.times.sum() == 5


def test_logprobs_of_ties_name_the_lowest_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 2.0]])
    ((chosen, top, rank),) = score(logits, [5], 2)
    table = torch.log_softmax(logits[0].double(), -1)
    assert chosen == pytest.approx(float(table[5]))
    assert rank == 4
    assert [token for token, _ in top] == [1, 2]
    assert [value for _, value in top] == pytest.approx([float(table[1])] * 2)
    assert [token for token, _ in score(logits, [5], 20)[0].top] == [1, 2, 4, 5, 0, 3]
    assert score(logits, [2], 0)[0][1:] == ((), 1)


def test_the_likeliest_tokens_are_in_order_whatever_their_sign() -> None:
    logits = torch.tensor([[-0.0, 0.0, -3.5, 2.5, -1e-30, float("-inf")], [-1.0, -2.0, -3.0, -1.0, -5.0, -4.0]])
    found = score(logits, [3, 1], 6)
    assert [token for token, _ in found[0].top] == [3, 0, 1, 4, 2, 5]
    assert [token for token, _ in found[1].top] == [0, 3, 1, 2, 5, 4]
    assert [each.rank for each in found] == [1, 3]


def test_stop_ids_are_barred_until_min_tokens() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0]])
    sampling = Sampling(min_tokens=2, stop_ids=(1,))
    assert [int(choose(logits, [Row(sampling, n, (), [0] * n)])) for n in range(4)] == [2, 2, 1, 1]


def test_many_biases_and_stop_ids_cost_a_row_little_and_act_one_by_one() -> None:
    """As many as there are tokens: a step must not loop over them in Python."""
    vocab = 248_000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0))
    bias = {token: ((token * 7) % 200 - 100) / 10 for token in range(vocab)}
    biased = logits + torch.tensor([list(bias.values())])
    sampling = Sampling(max_tokens=9, min_tokens=9, logit_bias=bias, stop_ids=tuple(range(0, vocab, 2)))
    barred = biased.clone()
    barred[:, ::2] = -math.inf
    assert int(choose(logits, [Row(sampling, 5)])) == int(barred.argmax())
    assert int(choose(logits, [Row(sampling, 5, (), [1] * 9)])) == int(biased.argmax())
    started = time.process_time()
    for _ in range(10):
        choose(logits, [Row(sampling, 5)])
    assert time.process_time() - started < 1.0  # a loop over the entries took 3 s for a single row


def test_a_mask_bars_everything_else() -> None:
    allowed = torch.tensor([False, False, True, True, False, False])
    for temperature in (0.0, 1.0):
        rows = [Row(Sampling(temperature=temperature), p, allowed=allowed) for p in range(200)]
        assert set(choose(LOGITS.expand(200, -1), rows).tolist()) <= {2, 3}


def test_noise_has_the_gumbel_mean_and_variance() -> None:
    noise = gumbel(torch.tensor(1), torch.tensor(2), torch.arange(200_000))
    assert abs(noise.mean().item() - 0.57722) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.03


def test_noise_depends_on_seed_position_and_token_and_nothing_else() -> None:
    def noise(seed: int, position: int, count: int = 100) -> Tensor:
        return gumbel(torch.tensor(seed), torch.tensor(position), torch.arange(count))

    assert torch.equal(noise(3, 5), noise(3, 5, 1000)[:100])
    for other in (noise(3, 6), noise(4, 5), noise(5, 3)):
        assert not torch.equal(noise(3, 5), other)


def test_temperature_zero_is_greedy_and_ties_go_to_the_lowest_id() -> None:
    assert int(choose(torch.tensor([[0.0, 3.0, 3.0, 1.0]]), [Row(Sampling(), 4)])) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, expected at least 1"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens is 9, expected 0 to max_tokens \(8\)"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": 1e-7}, r"temperature is 1e-07, expected 0 \(greedy\) or 0.000001 to 1000000"),
        ({"temperature": 1e39}, "temperature is 1e\\+39"),
        ({"top_p": 0.0}, "top_p is 0.0, expected more than 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1 << 63}, "top_k is 9223372036854775808, expected 0"),
        ({"min_p": 1.0}, "min_p is 1.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"logit_bias": {1: -1e39}}, "expected numbers of -1000000 to 1000000"),
        ({"seed": 1 << 70}, "64 bits"),
        ({"stop": ("a", "")}, "expected a tuple of strings that are not empty"),
        ({"stop": "END"}, "stop is END, expected a tuple of strings"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0, expected a whole number"),
        ({"min_tokens": True}, "min_tokens is True, expected a whole number"),
        ({"top_k": 1.5}, "top_k is 1.5, expected a whole number"),
        ({"logprobs": 1.5}, "logprobs is 1.5, expected a whole number or None"),
        ({"repetition_penalty": 10**400}, "repetition_penalty is 1000"),
        ({"presence_penalty": 10**400}, "presence_penalty is 1000"),
        ({"logprobs": 21}, "logprobs is 21, expected 0 to 20"),
        ({"logprobs": -1}, "logprobs is -1, expected 0 to 20"),
    ],
)
def test_impossible_settings_are_refused_with_their_value(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Sampling(**options)


@given(NUMBERS, NUMBERS, EDGES, EDGES, st.sampled_from([None, 1, 2, -1]))
def test_an_extended_text_reads_like_the_list_of_both(
    text: list[int], more: list[int], start: int | None, stop: int | None, stride: int | None
) -> None:
    both, view = [*text, *more], Extended(text, more)
    assert list(view) == both
    assert len(view) == len(both)
    assert view[start:stop:stride] == both[start:stop:stride]
    for index in range(-len(both) - 1, len(both) + 1):
        try:
            expected = both[index]
        except IndexError:
            continue
        assert view[index] == expected


def test_an_extended_text_grows_with_its_parts_and_ends_where_they_end() -> None:
    text: list[int] = [1]
    view = Extended(text, [3])
    text.append(2)
    assert list(view) == [1, 2, 3]
    for index in (3, -4):
        try:
            view[index]
        except IndexError:
            continue
        raise AssertionError(f"{index} is outside")
