"""The DFlash drafter computes what the published description says, however its context was observed, and a proposal
leaves nothing behind. Held against `plain.py`; some tests show that likely mistakes would not pass."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from stoker.backends.family import Family
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.dflash import DFlash
from stoker.backends.network.load import load_drafter, load_model
from stoker.weights.model_config import ModelConfig
from tests.backends.network import plain
from tests.backends.network.drive import DFlashDrive, random_tokens, read_config, run_trunk
from tests.support.random_checkpoint import (
    small_config,
    small_drafter_config,
    write_random_checkpoint,
    write_random_drafter,
)

TOLERANCE = 1e-5
NOTICED = 1000 * TOLERANCE
LENGTH = 150  # three times the sliding window of the small drafter
BY_KIND = {"sliding_attention": True, "full_attention": False}
EVERYWHERE = {"sliding_attention": True, "full_attention": True}
NOWHERE = {"sliding_attention": False, "full_attention": False}


@dataclass(frozen=True)
class Trunk:
    directory: Path
    model: Decoder
    config: dict[str, Any]
    embedding: Tensor
    tokens: list[int]  # LENGTH committed ones and the anchor
    streams: dict[int, Tensor]  # residual stream [LENGTH, H] after each layer

    @property
    def anchor(self) -> int:
        return self.tokens[-1]

    def features(self, taps: tuple[int, ...], length: int = LENGTH) -> Tensor:
        return torch.cat([self.streams[tap][:length] for tap in taps], dim=-1)


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Trunk:
    directory = tmp_path_factory.mktemp("trunk")
    config = small_config("qwen3_5_text")
    write_random_checkpoint(directory, config, dtype=torch.float32)
    model = load_model(directory, dtype=torch.float32).model
    tokens = random_tokens(LENGTH + 1)
    layers = list(range(config["num_hidden_layers"]))
    _, streams = run_trunk(model, tokens[:-1], taps=layers)
    by_layer = dict(zip(layers, streams.split(config["hidden_size"], dim=-1), strict=True))
    embedding = plain.load_tensors(directory)["model.embed_tokens.weight"]
    return Trunk(directory, model, config, embedding, tokens, by_layer)


@dataclass(frozen=True)
class Case:
    trunk: Trunk
    drafter: DFlash
    config: dict[str, Any]
    tensors: plain.Tensors

    def features(self, length: int = LENGTH) -> Tensor:
        return self.trunk.features(tuple(self.config["dflash_config"]["target_layer_ids"]), length)

    def drive(self) -> DFlashDrive:
        return DFlashDrive(self.drafter, self.trunk.model)

    def expected(self, length: int = LENGTH, size: int = 8, causal: dict[str, bool] = BY_KIND, **more: Any) -> Tensor:
        own = self.config["dflash_config"]
        taps = [self.trunk.streams[tap][:length] for tap in own["target_layer_ids"]]
        block = [self.trunk.tokens[length]] + [own["mask_token_id"]] * (size - 1)
        embedded = self.trunk.embedding[torch.tensor(block)]
        return plain.dflash_block(self.tensors, self.config, taps, embedded, causal=causal, **more)

    def found(self, length: int = LENGTH) -> Tensor:
        drive = self.drive()
        drive.observe(Family.PREFILL, {0: self.features(length)})
        return drive.propose({0: self.trunk.tokens[length]})[0]


def make_case(trunk: Trunk, directory: Path, changes: dict[str, Any] | None = None, **own: Any) -> Case:
    config = small_drafter_config(trunk.config, num_hidden_layers=3) | {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]
    }
    config |= changes or {}
    config["dflash_config"] |= own
    write_random_drafter(directory, config, dtype=torch.float32)
    drafter = load_drafter(directory, ModelConfig.from_dict(trunk.config), dtype=torch.float32)
    return Case(trunk, drafter, read_config(directory), plain.load_tensors(directory))


@pytest.fixture(scope="module")
def case(trunk: Trunk, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(trunk, tmp_path_factory.mktemp("drafter"))


@pytest.mark.parametrize("length", [1, 20, 64, LENGTH])
def test_a_proposal_equals_the_plain_computation(case: Case, length: int) -> None:
    """Contexts shorter and longer than the sliding window, ending on and off a page border."""
    assert plain.relative_error(case.found(length), case.expected(length)) <= TOLERANCE


def test_a_context_past_the_sliding_window_is_cut_off_there(case: Case) -> None:
    assert case.config["sliding_window"] < LENGTH
    wide = Case(case.trunk, case.drafter, case.config | {"sliding_window": LENGTH + 8}, case.tensors)
    off_by_one = Case(case.trunk, case.drafter, case.config | {"sliding_window": 49}, case.tensors)
    assert plain.relative_error(case.found(), wide.expected()) >= NOTICED
    assert plain.relative_error(case.found(), off_by_one.expected()) >= 100 * TOLERANCE  # one key of 49


@pytest.mark.parametrize(("family", "chunk"), [(Family.PREFILL, 64), (Family.STEP, 1), (Family.STEP, 7)])
def test_context_observed_in_chunks_equals_the_plain_computation(case: Case, family: Family, chunk: int) -> None:
    drive = case.drive()
    drive.observe(family, {0: case.features()}, chunk)
    assert plain.relative_error(drive.propose({0: case.trunk.anchor})[0], case.expected()) <= TOLERANCE


def test_prompt_in_prefill_and_the_rest_in_steps_equals_the_plain_computation(case: Case) -> None:
    drive = case.drive()
    drive.observe(Family.PREFILL, {0: case.features(100)})
    drive.observe(Family.STEP, {0: case.features()[100:]}, chunk=3)
    assert plain.relative_error(drive.propose({0: case.trunk.anchor})[0], case.expected()) <= TOLERANCE


@pytest.mark.parametrize("family", Family)
def test_two_sequences_of_different_length_equal_each_alone(case: Case, family: Family) -> None:
    lengths, tokens = {0: LENGTH, 1: 33}, case.trunk.tokens
    features = {s: case.features(n) for s, n in lengths.items()}
    together = case.drive()
    together.observe(family, features)
    both = together.propose({s: tokens[n] for s, n in lengths.items()})
    for s, n in lengths.items():
        alone = case.drive()
        alone.observe(family, {s: features[s]})
        assert torch.equal(both[s], alone.propose({s: tokens[n]})[s])
        assert plain.relative_error(both[s], case.expected(n)) <= TOLERANCE


def test_proposing_twice_gives_the_same_block(case: Case) -> None:
    drive = case.drive()
    drive.observe(Family.PREFILL, {0: case.features()})
    first = drive.propose({0: case.trunk.anchor})[0]
    assert torch.equal(first, drive.propose({0: case.trunk.anchor})[0])


@pytest.mark.parametrize(("accepted", "size"), [(1, 3), (2, 8), (8, 8), (10, 1)])
def test_a_proposal_leaves_no_trace(case: Case, accepted: int, size: int) -> None:
    """Whatever was proposed before and however much of it was accepted, the next block is the same bit for bit."""

    def next_block(proposals_before: int) -> Tensor:
        drive = case.drive()
        drive.observe(Family.PREFILL, {0: case.features(120)})
        for _ in range(proposals_before):
            drive.propose({0: case.trunk.tokens[120]})
        drive.observe(Family.STEP, {0: case.features()[120 : 120 + accepted]})
        return drive.propose({0: case.trunk.tokens[120 + accepted]}, size)[0]

    undisturbed = next_block(proposals_before=0)
    assert torch.equal(next_block(proposals_before=1), undisturbed)
    assert torch.equal(next_block(proposals_before=2), undisturbed)
    assert plain.relative_error(undisturbed, case.expected(120 + accepted, size)) <= TOLERANCE


@pytest.mark.parametrize(
    ("changes", "own", "causal"),
    [
        ({}, {}, BY_KIND),
        ({"is_causal": True}, {}, EVERYWHERE),
        ({"is_causal": False}, {}, NOWHERE),
        ({}, {"causal": True}, EVERYWHERE),
        ({}, {"causal": False}, NOWHERE),
        ({"is_causal": False}, {"causal": True}, NOWHERE),  # the top level wins
        ({"is_causal": None}, {"causal": True}, EVERYWHERE),  # null says nothing
    ],
    ids=json.dumps,
)
def test_the_config_may_override_who_sees_whom_in_the_block(
    trunk: Trunk, tmp_path: Path, changes: dict[str, Any], own: dict[str, Any], causal: dict[str, bool]
) -> None:
    case = make_case(trunk, tmp_path, changes, **own)
    found = case.found()
    for rule in (BY_KIND, EVERYWHERE, NOWHERE):
        error = plain.relative_error(found, case.expected(causal=rule))
        assert error <= TOLERANCE if rule == causal else error >= NOTICED


def test_taps_are_joined_in_the_order_of_the_config(trunk: Trunk, tmp_path: Path) -> None:
    outputs = []
    for taps in ([0, 2, 3], [3, 0, 2]):
        case = make_case(trunk, tmp_path / str(taps[0]), target_layer_ids=taps)
        tokens = trunk.tokens[:-1]
        _, features = run_trunk(trunk.model, tokens, taps=case.drafter.config.taps)
        drive = case.drive()
        drive.observe(Family.PREFILL, {0: features})
        found = drive.propose({0: trunk.anchor})[0]
        assert plain.relative_error(found, case.expected()) <= TOLERANCE
        outputs.append(found)
    assert plain.relative_error(*outputs) >= NOTICED


def test_a_tap_is_the_residual_stream_after_its_layer(trunk: Trunk) -> None:
    """As transformers computes it: what layer i hands to layer i + 1, before any norm."""
    reference = AutoModelForCausalLM.from_pretrained(trunk.directory, dtype=torch.float32, attn_implementation="eager")
    seen: dict[int, Tensor] = {}
    for index, layer in enumerate(reference.model.layers):
        layer.register_forward_hook(lambda _m, _i, out, index=index: seen.update({index: out[0]}))
    with torch.no_grad():
        reference(torch.tensor([trunk.tokens[:-1]]))
    for index, stream in trunk.streams.items():
        assert plain.relative_error(stream, seen[index].reshape(LENGTH, -1)) <= 2e-5


def test_the_mask_token_comes_from_the_config(trunk: Trunk, tmp_path: Path) -> None:
    outputs = []
    for mask in (511, 77):
        case = make_case(trunk, tmp_path / str(mask), mask_token_id=mask)
        assert case.drafter.config.mask_token_id == mask
        assert plain.relative_error(case.found(), case.expected()) <= TOLERANCE
        outputs.append(case.found())
    assert plain.relative_error(*outputs) >= NOTICED


def test_norms_with_an_offset_would_be_noticed(case: Case) -> None:
    """Drafter norms multiply by w, unlike the trunk's 1 + w."""
    assert plain.relative_error(case.found(), case.expected(factor=plain.one_plus)) >= NOTICED


def test_context_through_the_input_norm_would_be_noticed(case: Case) -> None:
    """The context goes straight to the key and value projections."""
    assert plain.relative_error(case.found(), case.expected(norm_context=True)) >= NOTICED


def test_a_block_one_position_too_far_would_be_noticed(case: Case) -> None:
    """The anchor stands right after the context."""
    assert plain.relative_error(case.found(), case.expected(gap=1)) >= NOTICED


def test_tensor_names_and_shapes_are_the_published_ones(case: Case) -> None:
    """fc takes all taps at once; no prefix, no embedding, no head."""
    hidden, inner = case.config["hidden_size"], case.config["intermediate_size"]
    query, keys = 4 * 32, 2 * 32
    layer = {
        "self_attn.q_proj": [query, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, query],
        "self_attn.q_norm": [32],
        "self_attn.k_norm": [32],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    expected = {"fc.weight": [hidden, 2 * hidden], "hidden_norm.weight": [hidden], "norm.weight": [hidden]}
    expected |= {f"layers.{i}.{name}.weight": shape for i in range(3) for name, shape in layer.items()}
    assert {name: list(values.shape) for name, values in case.tensors.items()} == expected
