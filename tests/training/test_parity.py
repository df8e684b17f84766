"""What is trained is what is served: exported weights give the training forward's numbers in Stoker and transformers,
for the trunk, the MTP head at every depth and the drafter."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training.config import TINY
from training.delta import delta_rule, invert_unit_lower
from training.dflash import Drafter
from training.export import export_drafter, export_model
from training.model import Model
from training.quantize import int4_names, round_int4, snap, straight_through

from stoker.backends.family import Family
from stoker.backends.network.load import load_drafter, load_model
from tests.backends.network.drive import DFlashDrive, MtpDrive, random_tokens, run_trunk

LENGTH = 150
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> Model:
    """Random weights far enough from their initial values for every term to matter."""
    torch.manual_seed(0)
    model = Model(TINY.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() > 1 and "conv1d" not in name:
                parameter.normal_(std=1.0 if "embed" in name else 1 / math.sqrt(parameter.shape[-1]))
    return model


@pytest.fixture(scope="module")
def directory(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported")
    export_model(model, TINY, path, dtype=torch.float32)
    return path


def tokens() -> list[int]:
    return random_tokens(LENGTH, vocab=TINY.trunk["vocab_size"])


@pytest.mark.parametrize("dispatch", ["dense", "grouped"])
def test_stoker_computes_the_logits_that_were_trained(model: Model, directory: Path, dispatch: str) -> None:
    for layer in model.layers:
        layer.mlp.dispatch = dispatch  # type: ignore[union-attr]
    with torch.no_grad():
        out = model(torch.tensor([tokens()]), taps=(1, 3))
        expected = model.lm_head(out.hidden)[0]
    served = load_model(directory).model
    hidden, features = run_trunk(served, tokens(), taps=(1, 3))
    assert (served.logits(hidden, Family.PREFILL) - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert (features - out.features[0]).abs().max() <= TOLERANCE * features.abs().max()


def test_transformers_computes_the_logits_that_were_trained(model: Model, directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = reference(torch.tensor([tokens()])).logits[0]
        found = model.lm_head(model(torch.tensor([tokens()])).hidden)[0]
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_mtp_drafts_as_it_was_trained(model: Model, directory: Path) -> None:
    """Three passes: the first over the whole sequence, the others fed with their own output, from one row."""
    ids = torch.tensor([tokens()])
    row = 100
    with torch.no_grad():
        hidden = model(ids).hidden
        embeddings = [model.embed_tokens(ids.roll(-1 - ahead, dims=1)) for ahead in range(3)]
        trained, _ = model.mtp(embeddings, hidden)
    served = load_model(directory).model
    drive = MtpDrive(served)
    last = drive.feed(Family.PREFILL, {0: tokens()[1 : row + 2]}, {0: hidden[0, : row + 1]})[0][-1:]
    for ahead in range(3):
        expected = trained[ahead][0, row]
        assert (last[0] - expected).abs().max() <= TOLERANCE * expected.abs().max()
        last = drive.feed(Family.STEP, {0: [tokens()[row + 2 + ahead]]}, {0: last})[0]


def test_the_drafter_drafts_as_it_was_trained(model: Model, directory: Path, tmp_path: Path) -> None:
    """Blocks trained side by side equal blocks drafted alone, before and past the sliding window."""
    torch.manual_seed(1)
    drafter = Drafter(TINY.dflash)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
    export_drafter(drafter, TINY, tmp_path, dtype=torch.float32)
    config = TINY.dflash
    anchors = [1, 20, 64, 130]
    ids = torch.tensor([tokens()])
    blocks = torch.tensor([[[tokens()[p]] + [config.mask_token_id] * (config.block_size - 1) for p in anchors]])
    with torch.no_grad():
        features = model(ids, taps=config.taps).features
        trained = drafter(features, model.embed_tokens(blocks), torch.tensor([anchors]))[0]
    served = load_model(directory).model
    serving = load_drafter(tmp_path, served.config, dtype=torch.float32)
    for place, anchor in enumerate(anchors):
        drive = DFlashDrive(serving, served)
        drive.observe(Family.PREFILL, {0: features[0, :anchor]})
        found = drive.propose({0: tokens()[anchor]})[0]
        assert (found - trained[place]).abs().max() <= TOLERANCE * found.abs().max()


def slow_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, ..., None] * change[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("length", [1, 64, 150])
def test_the_chunked_rule_and_its_gradients_equal_the_token_loop(length: int) -> None:
    torch.manual_seed(2)
    unit = torch.nn.functional.normalize
    shape = (2, length, 2)
    inputs = [unit(torch.randn(*shape, 16), dim=-1), unit(torch.randn(*shape, 16), dim=-1), torch.randn(*shape, 8)]
    inputs += [-torch.rand(shape) * 0.3, torch.rand(shape)]
    found, expected = ([x.clone().double().requires_grad_() for x in inputs] for _ in range(2))
    outs = delta_rule(*found), slow_delta_rule(*expected)
    assert torch.allclose(*outs, atol=1e-9)
    upstream = torch.randn_like(outs[0])
    for out in outs:
        out.backward(upstream)
    for a, b in zip(found, expected, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, b.grad, atol=1e-8)


def test_the_inverse_stays_accurate_when_all_keys_are_equal() -> None:
    """The worst case for a power series: 64 times the same key, written in full, never forgotten."""
    strict = torch.ones(2, 64, 64).tril(-1)
    expected = torch.linalg.inv(torch.eye(64) + strict)
    assert (invert_unit_lower(strict) - expected).abs().max() <= 1e-4


def test_rounding_in_training_is_rounding_in_stoker() -> None:
    from stoker.weights.formats.int4 import Int4

    torch.manual_seed(3)
    weight = torch.randn(16, 256) * 0.05
    weight[0, :128] = 0.0
    shipped = Int4.quantize(weight, group=128, clip_search=False, scale_rounding="short").dequantize()
    assert torch.equal(round_int4(weight, 128), shipped)
    leaf = weight.clone().requires_grad_()
    straight_through(leaf, 128).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.ones_like(weight))


def test_snapped_weights_lose_nothing_to_int4_even_after_bf16() -> None:
    from stoker.weights.formats.int4 import Int4

    torch.manual_seed(4)
    model = Model(TINY.model)
    snap(model, 32)
    names = int4_names(model, 32)
    assert "layers.0.mlp.experts.gate_up_proj" in names
    assert not [name for name in names if "embed" in name or "lm_head" in name or "shared_expert" in name]
    weight = model.get_parameter(names[0]).detach()
    assert torch.equal(weight.bfloat16().float(), weight)
    again = Int4.quantize(weight.bfloat16(), group=32).dequantize()
    assert torch.equal(again, weight)
