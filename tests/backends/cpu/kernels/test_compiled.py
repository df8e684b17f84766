"""The compiled kernels against the references, a row's bits against its neighbours, and life without them."""

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker.backends.cpu.batch import Batch, Run
from stoker.backends.cpu.kernels import enable
from stoker.backends.cpu.ops.attention import gated_attention, write_pages
from stoker.backends.cpu.ops.deltanet import DeltaConstants, DeltaState, Replay, SerialPlan, commit, gated_delta
from stoker.backends.cpu.ops.dispatch import KERNELS
from stoker.backends.cpu.ops.experts import route, routed_experts
from stoker.backends.cpu.ops.linear import Weight, as_tensor
from stoker.backends.cpu.ops.norm import scaled_rms_norm
from stoker.backends.cpu.ops.rope import head_norm_rope
from stoker.backends.family import Family
from stoker.errors import EngineError
from stoker.sampling.probabilities import best_tokens, probabilities
from stoker.weights.formats.int4 import Int4
from tests.backends.cpu.ops.test_exactness import assert_rows_independent
from tests.support.random_checkpoint import (
    small_config,
    small_drafter_config,
    write_random_checkpoint,
    write_random_drafter,
)

HIDDEN, WIDTH, EXPERTS = 128, 64, 6
HEADS, KV_HEADS, DIM = 4, 2, 64


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    assert enable.compiled_kernels()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def near(found: Tensor, wanted: Tensor, tolerance: float = 0.005) -> bool:
    return bool((found.float() - wanted.float()).norm() <= tolerance * wanted.float().norm())


def test_norm() -> None:
    x, scale = torch.randn(128, 200).bfloat16(), torch.randn(200)
    both = torch.cat([scale, scale])
    assert_rows_independent(lambda x: (scaled_rms_norm(x, both, 1e-6),), x)
    assert near(scaled_rms_norm(x, both, 1e-6), scaled_rms_norm.reference(x.float(), both, 1e-6))


@pytest.mark.parametrize("renormalize", [True, False])
def test_routing(renormalize: bool) -> None:
    logits = torch.randn(128, 40)[:, :EXPERTS]  # as it comes: part of wider rows
    assert_rows_independent(lambda x: route(x, 3, renormalize), logits)
    chosen, weights = route(logits, 3, renormalize)
    wanted, shares = route.reference(logits, 3, renormalize)
    assert torch.equal(chosen, wanted)
    assert torch.allclose(weights, shares, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("count", [1, EXPERTS])
def test_logits_that_are_not_finite_choose_experts_that_exist_and_each_once(value: float, count: int) -> None:
    """What follows counts on it: a token that chose an expert twice was written past the end of its memory."""
    logits = torch.randn(5, EXPERTS)
    logits[:, :count] = value
    chosen, weights = route(logits, 4, True)
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < EXPERTS for row in chosen.tolist())
    assert (value == -torch.inf and count == 1) or weights.isnan().all()


def test_equal_logits_go_to_the_first_expert() -> None:
    chosen, weights = route(torch.zeros(2, 5), 2, True)
    assert chosen.tolist() == [[0, 1], [0, 1]]
    assert torch.allclose(weights, torch.full((2, 2), 0.5))


def test_best_tokens() -> None:
    scores = torch.randn(128, 1000).masked_fill(torch.rand(128, 1000) < 0.3, -torch.inf)
    scores[5, [40, 7, 900]] = 9.0
    scores[6] = -torch.inf
    assert_rows_independent(lambda x: (best_tokens(x),), scores)
    assert torch.equal(best_tokens(scores), scores.argmax(-1))
    assert best_tokens(scores[5:7]).tolist() == [7, 0]
    assert 0 <= int(best_tokens(torch.full((1, 50), torch.nan))) < 50


def test_probabilities() -> None:
    logits = 5 * torch.randn(128, 1000)
    logits[3, :500] = -torch.inf
    tokens = best_tokens(logits)
    wanted = logits.softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(probabilities(logits, tokens), wanted, rtol=1e-5)
    assert_rows_independent(lambda x: (probabilities(x, best_tokens(x)),), logits)


@pytest.mark.parametrize("shared_width", [0, WIDTH, 96])
@pytest.mark.parametrize("group", [32, 64, None])
def test_experts(shared_width: int, group: int | None) -> None:
    """In INT4, and in bf16 where no group is given."""
    from stoker.backends.cpu.kernels.experts import StepExperts

    def stored(*shape: int) -> Weight:
        dense = torch.randn(EXPERTS, *shape) / 11
        return Int4.quantize(dense, group=group) if group else dense.bfloat16()

    gate_up, down = [stored(WIDTH, HIDDEN) for _ in range(2)], stored(HIDDEN, WIDTH)
    own = None
    if shared_width:
        up, result = (torch.randn(2 * shared_width, HIDDEN) / 11).bfloat16(), torch.randn(HIDDEN, shared_width) / 8
        own = up[:shared_width], up[shared_width:], result.bfloat16()
    kernel = StepExperts.of(gate_up, [down], own)
    assert kernel is not None
    x, router = torch.randn(128, HIDDEN).bfloat16(), torch.randn(EXPERTS, HIDDEN)

    def mixture(x: Tensor) -> tuple[Tensor, ...]:
        logits = torch.stack([(row.float() * router).sum(1) for row in x])
        chosen, weights = route(logits, 3, True)
        return chosen, weights, kernel(x, chosen, weights, x[:, :1].float() if own else None)

    assert_rows_independent(mixture, x)
    chosen, weights, out = mixture(x)
    dense = torch.cat([as_tensor(part).float() for part in gate_up], dim=1)
    want = routed_experts.reference(x.float(), chosen, weights, dense, as_tensor(down).float(), Family.STEP)
    if own:
        gate, up = (x.float() @ part.float().t() for part in own[:2])
        hidden = torch.nn.functional.silu(gate) * up
        want = want + torch.sigmoid(x[:, :1].float()) * (hidden @ own[2].float().t())
    assert near(out, want, 3e-3)  # what goes into the last product is bf16


def test_experts_that_the_kernel_does_not_take() -> None:
    from stoker.backends.cpu.kernels.experts import StepExperts

    up, down = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN), torch.randn(EXPERTS, HIDDEN, WIDTH)
    int4 = [Int4.quantize(up, group=32)], [Int4.quantize(down, group=32)]
    assert StepExperts.of([up], [down]) is None
    assert StepExperts.of(*int4, (up[0, :WIDTH], up[0, WIDTH:], down[0])) is None  # bf16 does not hold the values
    narrow = [Int4.quantize(up[:, :32], group=32)], [Int4.quantize(down[:, :, :32], group=32)]
    assert StepExperts.of(*narrow) is None


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn])
def test_attention(stored: torch.dtype, gated: bool) -> None:
    """Blocks of several requests, some behind several pages; a window cuts off the oldest keys of every row."""
    lengths, cached = [1, 5, 16, 3], [0, 63, 130, 200]
    pages = torch.randperm(16).view(4, 4).tolist()
    runs = [Run([1] * n, at, i, pages[i]) for i, (n, at) in enumerate(zip(lengths, cached, strict=True))]
    batch = Batch.of(Family.STEP, runs, 64)
    keys, values = (torch.zeros(16, 64, KV_HEADS, DIM).to(stored) for _ in range(2))
    scales = [torch.zeros(16, 64, KV_HEADS, dtype=torch.bfloat16) if stored == torch.float8_e4m3fn else None] * 2
    everywhere = torch.arange(16 * 64)
    scales = [None if scale is None else scale.clone() for scale in scales]
    for pool, scale in zip((keys, values), scales, strict=True):
        write_pages(pool, torch.randn(16 * 64, KV_HEADS, DIM).bfloat16(), everywhere, scale)
    q = torch.randn(batch.num_tokens, HEADS, 2 * DIM).bfloat16()
    q, gate = q[:, :, :DIM], q[:, :, DIM:] if gated else None
    for first in (torch.zeros_like(batch.positions), (batch.positions - 70).clamp(min=0)):
        tiles = batch.tiles(first, batch.positions)
        found = gated_attention(q, gate, keys, values, tiles, *scales)
        wide = None if gate is None else gate.float()
        if stored == torch.bfloat16:
            wanted = gated_attention.reference(q.float(), wide, keys.float(), values.float(), tiles)
        else:
            wanted = gated_attention.reference(q.float(), wide, keys, values, tiles, *scales)
        assert near(found, wanted)
        start = 0
        for run in runs:  # each run alone gives the same bits
            rows = slice(start, start + len(run.tokens))
            start = rows.stop
            own = Batch.of(Family.STEP, [run], 64).tiles(first[rows], batch.positions[rows])
            part = gated_attention(q[rows], None if gate is None else gate[rows], keys, values, own, *scales)
            assert torch.equal(part, found[rows])


def test_norm_and_rope_of_heads() -> None:
    q, k = torch.randn(40, HEADS, 2 * DIM).bfloat16()[:, :, :DIM], torch.randn(40, KV_HEADS, DIM).bfloat16()
    scales, angles = torch.randn(HEADS + KV_HEADS, DIM), torch.randn(40, 8)
    found = head_norm_rope(q, k, scales, 1e-6, angles.cos(), angles.sin())
    wanted = head_norm_rope.reference(q, k, scales, 1e-6, angles.cos(), angles.sin())
    for mine, his in zip(found, wanted, strict=True):
        assert near(mine, his)
        assert mine.is_contiguous()


class Delta:
    """A layer with two requests, and the tokens they are fed."""

    KEY_HEADS, HEADS, KEYS, VALUES, TAPS, RING = 2, 4, 32, 48, 4, 24

    def __init__(self) -> None:
        torch.manual_seed(1)
        heads, values, keys = self.HEADS, self.VALUES, self.KEY_HEADS * self.KEYS
        channels = 2 * keys + heads * values
        self.constants = DeltaConstants(
            -torch.rand(heads) * 2,
            torch.randn(2 * heads),
            torch.randn(self.TAPS, channels) / 2,
            torch.rand(values),
            1e-6,
        )
        self.state = DeltaState(
            torch.randn(2, heads, self.KEYS, values) / 4,
            torch.randn(2, self.RING, channels).bfloat16(),
            torch.zeros(2, self.RING, 2 * keys + heads * (values + 2)),
        )
        self.qkv = torch.randn(2, 60, channels).bfloat16()
        self.z, self.gates = torch.randn(2, 60, heads * values).bfloat16(), torch.randn(2, 60, 2 * heads)

    def step(self, how, runs: list[tuple[int, int, int, int]]) -> Tensor:
        """Runs of (slot, accepted tokens to add first, position, tokens); q, k, v of a token are those of its place."""
        replay = Replay(torch.tensor([[s, s, at - accepted, at] for s, accepted, at, _ in runs]))
        plan = SerialPlan(replay, torch.tensor([[s, at, n] for s, _, at, n in runs]))
        rows = [torch.cat([x[s, at : at + n] for s, _, at, n in runs]) for x in (self.qkv, self.z, self.gates)]
        return how(*rows, self.constants, self.state, plan)


def test_delta_rule_in_blocks_and_batches_equals_token_by_token() -> None:
    """With drafts that are rejected: they leave no trace in any bit."""
    alone, together = Delta(), Delta()
    expected = [[alone.step(gated_delta, [(slot, int(t > 0), t, 1)]) for t in range(40)] for slot in range(2)]
    positions, accepted = [0, 0], [0, 0]
    for drafts, keep in [((5, 1), (2, 1)), ((16, 3), (16, 3)), ((1, 7), (1, 2)), ((8, 8), (3, 8)), ((2, 16), (2, 16))]:
        runs = [(slot, accepted[slot], positions[slot], drafts[slot]) for slot in range(2)]
        found = together.step(gated_delta, runs).split(drafts)
        for slot in range(2):
            rows = range(positions[slot], positions[slot] + drafts[slot])
            assert torch.equal(found[slot], torch.cat([expected[slot][t] for t in rows]))
            positions[slot], accepted[slot] = positions[slot] + keep[slot], keep[slot]


@pytest.mark.parametrize("accepted", range(5))
def test_a_step_adds_what_was_accepted_and_nothing_of_its_own(accepted: int) -> None:
    """However many tokens either has: they go into a state in passes of one or two."""
    alone = Delta()
    expected, states = [], []
    for t in range(12):
        expected.append(alone.step(gated_delta, [(0, int(t > 0), t, 1)]))
        states.append(alone.state.recurrent[0].clone())
    for count in range(1, 8):
        blocks = Delta()
        if accepted:
            blocks.step(gated_delta, [(0, 0, 0, accepted)])
        found = blocks.step(gated_delta, [(0, accepted, accepted, count)])
        assert torch.equal(found, torch.cat(expected[accepted : accepted + count]))
        assert torch.equal(blocks.state.recurrent[0], states[accepted])


def test_committing_adds_what_was_accepted() -> None:
    blocks, alone = Delta(), Delta()
    blocks.step(gated_delta, [(1, 0, 0, 9)])
    commit(blocks.state, Replay(torch.tensor([[1, 1, 0, 4]])))  # four of nine
    for t in range(4):
        alone.step(gated_delta, [(1, int(t > 0), t, 1)])
    commit(alone.state, Replay(torch.tensor([[1, 1, 3, 4]])))
    assert torch.equal(blocks.state.recurrent, alone.state.recurrent)


def test_delta_rule_is_that_of_the_reference() -> None:
    kernel, reference = Delta(), Delta()
    for runs in ([(0, 0, 0, 5), (1, 0, 0, 2)], [(0, 3, 3, 4), (1, 2, 2, 1)], [(0, 1, 4, 16)]):
        assert near(kernel.step(gated_delta, runs), reference.step(gated_delta.reference, runs))
    replay = Replay(torch.tensor([[0, 0, 4, 20]]))
    commit(kernel.state, replay)
    commit.reference(reference.state, replay)
    assert near(kernel.state.recurrent, reference.state.recurrent, 1e-5)


@pytest.mark.parametrize("broken", ["scaled_rms_norm", "small_product"])
def test_kernels_whose_rows_depend_on_each_other_are_not_used(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.backends.cpu.kernels import rows

    sound = getattr(rows, broken)
    monkeypatch.setattr(rows, broken, lambda x, *rest: sound(x, *rest) * (1 + 2**-6 * (x.shape[0] > 1)))
    kept = dict(KERNELS["cpu"])
    KERNELS["cpu"].clear()
    try:
        assert not enable.compiled_kernels.__wrapped__()
        assert not KERNELS["cpu"]
    finally:
        KERNELS["cpu"].update(kept)


WITHOUT = """
import sys
sys.modules["numba"] = None
from stoker.demo import EMBEDDED
from stoker.backends.cpu.cache import Cache
from stoker.backends.cpu.load import load_model
from stoker.backends.cpu.ops.dispatch import KERNELS
model = load_model(EMBEDDED).model
assert "gated_delta" not in KERNELS["cpu"]
assert not Cache.allocate(model.config, pages=1, slots=1).recurrence.serial
assert all(layer.mlp.steps.kernel is None for layer in model.layers)
"""


def test_without_numba_a_model_is_packed_and_runs_in_chunks() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=300)


def test_kernels_of_old_versions_do_not_pile_up(tmp_path: Path) -> None:
    for age in range(6):
        old = tmp_path / "stoker" / f"kernels-{age}"
        old.mkdir(parents=True)
        os.utime(old, (age, age))
    script = "import numba; from stoker.backends.cpu.kernels import compiled; print(numba.config.CACHE_DIR)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    used = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    left = {folder.name for folder in (tmp_path / "stoker").iterdir()}
    assert left == {"kernels-3", "kernels-4", "kernels-5", Path(used.stdout.strip()).name}


def test_what_a_full_disk_left_of_compiled_kernels_is_removed(tmp_path: Path) -> None:
    from stoker.backends.cpu.kernels.compiled import remove_cut_off

    inside = tmp_path / "rows"
    inside.mkdir()
    whole, cut, empty = inside / "a.1.nbc", inside / "a.2.nbc", inside / "a.nbi"
    whole.write_bytes(pickle.dumps([1, 2]))
    cut.write_bytes(pickle.dumps([1, 2])[:-3])
    empty.touch()
    remove_cut_off(tmp_path)
    assert list(inside.iterdir()) == [whole]


def test_kernels_that_cannot_be_kept_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(enable, "_rows_hold", full)
    with pytest.raises(EngineError, match=r"No space left on device\. Make room there, or let XDG_CACHE_HOME"):
        enable.compiled_kernels.__wrapped__()


@pytest.mark.parametrize("home", ["/dev/null", "~nobody-of-this-name"])
def test_without_a_place_to_keep_them_kernels_leave_nothing_behind(tmp_path: Path, home: str) -> None:
    script = "import numba; from stoker.backends.cpu.kernels import compiled; print(numba.config.CACHE_DIR)"
    environment = {**os.environ, "XDG_CACHE_HOME": home, "TMPDIR": str(tmp_path)}
    used = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert Path(used.stdout.strip()).parent == tmp_path
    assert not list(tmp_path.glob("stoker-kernels-*"))


DRAFTER = """
import sys
from pathlib import Path
from stoker.backends.cpu import pack
from stoker.backends.cpu.load import load_drafter, load_model
from stoker.backends.cpu.kernels.enable import in_use
from stoker.speculate.low_bits import lower_all
pack.SMALL_MODEL = 1 << 20
trunk, drafter = map(Path, sys.argv[1:])
model = load_model(trunk).model
assert not in_use()
load_drafter(drafter, model.config)
lower_all(model.mtp, 8)
assert not in_use()
pack.SMALL_MODEL = 1 << 28
load_model(trunk)
assert in_use()
"""


def test_a_drafter_does_not_change_how_its_trunk_is_computed(tmp_path: Path) -> None:
    """The trunk is too large for compiled kernels, its drafting networks are not."""
    trunk, drafter = tmp_path / "trunk", tmp_path / "drafter"
    write_random_checkpoint(trunk, small_config())
    write_random_drafter(drafter, small_drafter_config(small_config()))
    large, small = (sum(f.stat().st_size for f in folder.glob("*.safetensors")) for folder in (trunk, drafter))
    assert small < 1 << 20 < large
    subprocess.run([sys.executable, "-c", DRAFTER, str(trunk), str(drafter)], check=True, timeout=300)


@pytest.mark.parametrize("place", ["", "stoker"])
def test_kernels_are_taken_only_from_a_folder_that_nobody_else_can_write(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from stoker.backends.cpu.kernels.compiled import _cache

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = _cache()
    assert folder.parent == tmp_path / "stoker"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)  # as earlier versions made it
    assert _cache() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    open_to_others = folder.parent if place else folder
    open_to_others.chmod(0o777)
    other = _cache()
    assert other.parent != folder.parent
    assert stat.S_IMODE(other.stat().st_mode) == 0o700
    assert "can be written by other users" in caplog.text
    open_to_others.chmod(0o700)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)  # somebody else's
    assert _cache() != folder
