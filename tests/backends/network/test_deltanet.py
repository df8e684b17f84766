"""Steps leave the committed state alone; committing an accepted prefix equals having run just that, bit for bit."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from stoker.backends.family import STEP_CHUNK, Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import allocate_delta_state
from stoker.backends.network.delta_rule import delta_rule_chunk
from stoker.backends.network.deltanet import PrefillPlan, StepPlan, commit, deltanet_chunks, deltanet_steps
from stoker.backends.network.recurrence import Recurrence
from stoker.weights.model_config import DeltaConfig

DELTA = DeltaConfig(key_heads=2, value_heads=6, key_dim=24, value_dim=40, conv_kernel=4)
DTYPES = (torch.float32, torch.bfloat16)
LENGTH, SEQUENCES, WINDOW = 200, 3, 40


@dataclass
class Layer:
    """Three sequences of random inputs, and one layer's state they run through."""

    dtype: torch.dtype

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(4, DELTA.conv_channels).to(self.dtype).float()
        self.qkv = torch.randn(SEQUENCES, LENGTH, DELTA.conv_channels).to(self.dtype)
        self.g = -torch.rand(SEQUENCES, LENGTH, DELTA.value_heads)
        self.beta = torch.rand(SEQUENCES, LENGTH, DELTA.value_heads)
        self.state = allocate_delta_state(SEQUENCES, WINDOW, DELTA, self.dtype, "cpu")
        self.books = Recurrence(SEQUENCES, WINDOW, DELTA.conv_kernel, "cpu")
        self.state.recurrent.normal_()
        self.state.inputs.normal_()
        self.done = [0] * SEQUENCES  # accepted tokens, pending ones included
        self.pending = [0] * SEQUENCES

    def run(self, family: Family, step: list[tuple[int, int]], accept: list[int] | None = None) -> list[Tensor]:
        """Feeds (sequence, tokens) pairs and accepts a prefix of each (all of it by default). -> outputs per pair."""
        runs = [Run([0] * n, self.done[s], s, range(4 * s, 4 * s + 4), self.pending[s]) for s, n in step]
        batch = Batch.of(family, runs, 64)
        qkv, g, beta = (torch.cat([x[s, self.done[s] :][:n] for s, n in step]) for x in (self.qkv, self.g, self.beta))
        plan, gates = self.books.begin(batch), torch.stack([g, beta], dim=1)
        commit(self.state, plan.commits)
        if isinstance(plan, StepPlan):
            out = deltanet_steps(qkv, gates, self.weight, self.state, plan)
        else:
            assert isinstance(plan, PrefillPlan)
            out = deltanet_chunks(qkv, gates, self.weight, self.state, plan)
        for (s, _), taken in zip(step, accept or [n for _, n in step], strict=True):
            self.done[s] += taken
            self.pending[s] = taken if family is Family.STEP else 0
        return list(out.split([n for _, n in step]))

    def settled(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Conv inputs and state of one sequence with nothing pending."""
        commit(self.state, self.books.flush(sequence, self.pending[sequence]))
        self.pending[sequence] = 0
        carried = self.books.carried(sequence, self.done[sequence])
        return self.state.inputs.flatten(0, 1)[carried], self.state.recurrent[sequence].clone()


def assert_same_state(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "steps",
    [
        [[(0, 1)]] * 40,
        [[(0, 7)], [(0, 1)], [(0, 32)]],
        [[(1, 5), (0, 16), (2, 1)], [(0, 2), (1, 30)], [(2, 17), (1, 2), (0, 22)]],
    ],
)
def test_a_block_equals_its_tokens_one_by_one(dtype: torch.dtype, steps: list[list[tuple[int, int]]]) -> None:
    whole, parts = Layer(dtype), Layer(dtype)
    want = whole.run(Family.STEP, [(0, 40)])[0]
    got = [out for step in steps for (s, _), out in zip(step, parts.run(Family.STEP, step), strict=True) if s == 0]
    assert torch.equal(torch.cat(got), want)
    assert_same_state(parts.settled(0), whole.settled(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4, 7, 12, 13])
def test_a_rejected_tail_leaves_no_trace(dtype: torch.dtype, accepted: int) -> None:
    """A verify step of 13 of which some are accepted, then 5 more, against a run that never saw the rest."""
    drafted, plain = Layer(dtype), Layer(dtype)
    for layer in (drafted, plain):
        layer.run(Family.PREFILL, [(0, 30), (1, 64)])
    drafted.run(Family.STEP, [(1, 13), (0, 13)], accept=[5, accepted])
    got = drafted.run(Family.STEP, [(0, 5)])[0]
    for _ in range(accepted):
        plain.run(Family.STEP, [(0, 1)])
    assert torch.equal(got, plain.run(Family.STEP, [(0, 5)])[0])
    assert_same_state(drafted.settled(0), plain.settled(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_does_not_touch_the_committed_state(dtype: torch.dtype) -> None:
    layer = Layer(dtype)
    layer.run(Family.PREFILL, [(0, 30), (1, 10)])
    before = layer.state.recurrent.clone()
    layer.run(Family.STEP, [(0, 9), (1, 4)])
    assert torch.equal(layer.state.recurrent, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [[[(0, 64)], [(0, 128)], [(0, 8)]], [[(1, 17), (0, 128)], [(0, 72), (1, 180)]]])
def test_prefill_split_at_multiples_of_64_is_bit_identical(
    dtype: torch.dtype, steps: list[list[tuple[int, int]]]
) -> None:
    whole, parts = Layer(dtype), Layer(dtype)
    want = whole.run(Family.PREFILL, [(0, LENGTH)])[0]
    got = [out for step in steps for (s, _), out in zip(step, parts.run(Family.PREFILL, step), strict=True) if s == 0]
    assert torch.equal(torch.cat(got), want)
    assert_same_state(parts.settled(0), whole.settled(0))


def test_chunks_and_steps_agree() -> None:
    chunked, recurrent = Layer(torch.float32), Layer(torch.float32)
    want = chunked.run(Family.PREFILL, [(0, LENGTH)])[0]
    got = torch.cat([recurrent.run(Family.STEP, [(0, 40)])[0] for _ in range(5)])
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    ours, theirs = recurrent.settled(0)[1], chunked.settled(0)[1]
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_prefill_after_steps_commits_what_was_accepted_first() -> None:
    mixed, plain = Layer(torch.float32), Layer(torch.float32)
    mixed.run(Family.STEP, [(0, 10)], accept=[4])
    plain.run(Family.STEP, [(0, 4)])
    plain.settled(0)
    assert torch.equal(mixed.run(Family.PREFILL, [(0, 100)])[0], plain.run(Family.PREFILL, [(0, 100)])[0])
    assert_same_state(mixed.settled(0), plain.settled(0))


def test_a_chunk_follows_the_rule_token_by_token() -> None:
    """S <- exp(g) S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q, spelled out."""
    heads, places, keys, values = 3, STEP_CHUNK, 24, 40
    q, k = (torch.nn.functional.normalize(torch.randn(heads, places, keys), dim=-1) for _ in range(2))
    v, state = torch.randn(heads, places, values), torch.randn(heads, keys, values)
    g, beta = -torch.rand(heads, places), torch.rand(heads, places)
    got, after = delta_rule_chunk(torch.cat([q, k], dim=1), v, g, beta, state, advance=True)
    assert after is not None
    s = state.double()
    for i in range(places):
        s = s * g[:, i, None, None].double().exp()
        change = beta[:, i, None] * (v[:, i] - torch.einsum("hk,hkv->hv", k[:, i].double(), s))
        s = s + k[:, i, :, None] * change[:, None]
        want = torch.einsum("hk,hkv->hv", q[:, i].double(), s)
        assert torch.allclose(got[:, i].double(), want, atol=1e-5)
    assert torch.allclose(after.double(), s, atol=1e-5)
