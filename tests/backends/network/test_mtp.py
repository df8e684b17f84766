"""The MTP head computes what the published description says, however its input is cut up, and drafts in the right
places. Held against tests/backends/network/plain.py; the last tests show that the likely mistakes would not pass."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.backends.family import Family
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_model
from tests.backends.network import plain
from tests.backends.network.drive import MtpDrive, random_tokens, run_trunk
from tests.support.random_checkpoint import small_config, write_random_checkpoint

TOLERANCE = 1e-5
NOTICED = 1000 * TOLERANCE
LENGTH = 150
# half of the dims turn, the slowest by 0.05 a token: a position off by one must show in a single output row
ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}


@dataclass(frozen=True)
class Case:
    directory: Path
    model: Decoder
    config: dict[str, Any]
    tensors: plain.Tensors
    following: list[int]  # token t+1 for every t of the prompt; the last one is newly sampled
    hidden: Tensor  # [T, H] post-norm

    @property
    def ids(self) -> Tensor:
        return torch.tensor(self.following)

    def expected(self, **mistakes: Any) -> Tensor:
        return plain.mtp_head(self.tensors, self.config, self.hidden, self.ids, torch.arange(LENGTH), **mistakes)


def make_case(directory: Path, config: dict[str, Any]) -> Case:
    write_random_checkpoint(directory, config, dtype=torch.float32)
    model = load_model(directory, dtype=torch.float32).model
    tokens = random_tokens(LENGTH + 1)
    hidden, _ = run_trunk(model, tokens[:-1])
    return Case(directory, model, config, plain.load_tensors(directory), tokens[1:], hidden)


@pytest.fixture(scope="module", params=["qwen3_5_moe_text", "qwen3_5_text"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp(request.param), small_config(request.param, rope_parameters=ROPE))


@pytest.fixture(scope="module")
def expected(case: Case) -> Tensor:
    return case.expected()


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("chunk", [LENGTH, 64], ids=["whole", "chunks"])
def test_prompt_pass_equals_the_plain_computation(case: Case, expected: Tensor, family: Family, chunk: int) -> None:
    found = MtpDrive(case.model).feed_chunks(family, case.following, case.hidden, chunk)
    assert plain.relative_error(found, expected) <= TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7])
def test_prompt_token_by_token_equals_the_plain_computation(case: Case, expected: Tensor, chunk: int) -> None:
    found = MtpDrive(case.model).feed_chunks(Family.STEP, case.following, case.hidden, chunk)
    assert plain.relative_error(found, expected) <= TOLERANCE


@pytest.mark.parametrize("family", Family)
def test_two_sequences_in_one_batch_do_not_see_each_other(case: Case, family: Family) -> None:
    """The second sequence is another, shorter text, and joins when the first one is already 64 tokens in."""
    other = random_tokens(91, seed=5)
    other_hidden, _ = run_trunk(case.model, other[:-1])
    drive = MtpDrive(case.model)
    early = drive.feed(family, {0: case.following[:64]}, {0: case.hidden[:64]})[0]
    late = drive.feed(family, {0: case.following[64:], 1: other[1:]}, {0: case.hidden[64:], 1: other_hidden})
    assert plain.relative_error(torch.cat([early, late[0]]), case.expected()) <= TOLERANCE
    alone = plain.mtp_head(case.tensors, case.config, other_hidden, torch.tensor(other[1:]), torch.arange(90))
    assert plain.relative_error(late[1], alone) <= TOLERANCE


def test_drafting_feeds_back_the_normed_output_one_position_on(case: Case) -> None:
    """The first draft reads the prompt's last row; three further ones read the head's own output."""
    expected_drafts, expected_outputs = plain.mtp_drafts(case.tensors, case.config, case.hidden, case.ids, count=4)
    drive = MtpDrive(case.model)
    prompt = drive.feed_chunks(Family.PREFILL, case.following, case.hidden, LENGTH)
    drafts, outputs = drive.draft(prompt[-1:], count=4)
    assert drafts == expected_drafts
    assert plain.relative_error(outputs, expected_outputs) <= TOLERANCE


def test_rejected_drafts_leave_no_trace(case: Case) -> None:
    """Rows drafted ahead are overwritten from true hiddens: what follows equals never having drafted, bit for bit."""

    def tail(draft_first: bool) -> Tensor:
        drive = MtpDrive(case.model)
        prompt = drive.feed_chunks(Family.PREFILL, case.following[:128], case.hidden[:128], 128)
        if draft_first:
            drive.draft(prompt[-1:], count=4)
            drive.cached[0] = 128
        return drive.feed_chunks(Family.STEP, case.following[128:], case.hidden[128:], 2)

    assert torch.equal(tail(draft_first=True), tail(draft_first=False))


def test_tensor_names_are_the_published_ones(case: Case) -> None:
    """15 tensors in a dense head; 17 + 3 per expert in a sparse one that stores experts one by one."""
    names = {name.removeprefix("mtp.") for name in case.tensors if name.startswith("mtp.")}
    norms = {f"{name}.weight" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    layer = {f"layers.0.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")}
    attention = {f"layers.0.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    attention |= {f"layers.0.self_attn.{name}.weight" for name in ("q_norm", "k_norm")}
    projections = [f"{name}_proj.weight" for name in ("gate", "up", "down")]
    if "num_experts" in case.config:
        owners = ["shared_expert", *(f"experts.{e}" for e in range(case.config["num_experts"]))]
        mlp = {f"layers.0.mlp.{owner}.{name}" for owner in owners for name in projections}
        mlp |= {"layers.0.mlp.gate.weight", "layers.0.mlp.shared_expert_gate.weight"}
    else:
        mlp = {f"layers.0.mlp.{name}" for name in projections}
    assert names == {"fc.weight"} | norms | layer | attention | mlp


def test_fused_and_per_expert_storage_give_the_same_head(tmp_path: Path) -> None:
    heads = []
    for layout in [(), ("mtp.",)]:
        directory = tmp_path / ("fused" if not layout else "each")
        write_random_checkpoint(directory, small_config(), per_expert=layout)
        stored = plain.load_tensors(directory)
        assert ("mtp.layers.0.mlp.experts.gate_up_proj" in stored) == (not layout)
        heads.append(load_model(directory).model.mtp)
    fused, each = (dict(head.named_parameters()) for head in heads if head is not None)
    assert fused.keys() == each.keys()
    for name, parameter in fused.items():
        assert torch.equal(parameter, each[name]), name


# What a wrong head would look like: every mistake lies far outside the tolerance the tests above hold it to.


def found_output(case: Case) -> Tensor:
    return MtpDrive(case.model).feed_chunks(Family.PREFILL, case.following, case.hidden, LENGTH)


def test_hidden_first_in_the_concat_would_be_noticed(case: Case) -> None:
    assert plain.relative_error(found_output(case), case.expected(hidden_first=True)) >= NOTICED


def test_norms_without_the_offset_would_be_noticed(case: Case) -> None:
    assert plain.relative_error(found_output(case), case.expected(factor=plain.itself)) >= NOTICED


def test_pre_norm_hidden_would_be_noticed(case: Case) -> None:
    """The trunk hands out post-norm hiddens; fed with the residual stream before the norm the head says otherwise."""
    last_layer = case.config["num_hidden_layers"] - 1
    tokens = random_tokens(LENGTH + 1)[:-1]
    hidden, before_norm = run_trunk(case.model, tokens, taps=[last_layer])
    final = plain.rms_norm(before_norm, plain.one_plus(case.tensors["model.norm.weight"]), case.config["rms_norm_eps"])
    assert plain.relative_error(hidden, final) <= TOLERANCE
    wrong = plain.mtp_head(case.tensors, case.config, before_norm, case.ids, torch.arange(LENGTH))
    assert plain.relative_error(found_output(case), wrong) >= NOTICED


def test_embedding_of_the_same_token_would_be_noticed(case: Case) -> None:
    """Row t pairs h_t with the token after it, not with token t."""
    tokens = torch.tensor(random_tokens(LENGTH + 1)[:-1])
    wrong = plain.mtp_head(case.tensors, case.config, case.hidden, tokens, torch.arange(LENGTH))
    assert plain.relative_error(found_output(case), wrong) >= NOTICED


@pytest.mark.parametrize("step", [0, 2])
def test_draft_positions_off_by_one_would_be_noticed(case: Case, step: int) -> None:
    """Shifting *all* positions changes nothing, rope being relative; a draft at the wrong distance does."""
    drive = MtpDrive(case.model)
    prompt = drive.feed_chunks(Family.PREFILL, case.following, case.hidden, LENGTH)
    _, outputs = drive.draft(prompt[-1:], count=2)
    _, wrong = plain.mtp_drafts(case.tensors, case.config, case.hidden, case.ids, count=2, step=step)
    assert plain.relative_error(outputs[:1], wrong[:1]) <= TOLERANCE  # the prompt's own row is not concerned
    assert plain.relative_error(outputs[1:], wrong[1:]) >= NOTICED
