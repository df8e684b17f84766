"""Weights that are NaN or Inf end requests with a sentence: no arbitrary token, and never the process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stoker.backends.cpu.drafting import CpuMtp
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_model
from stoker.engine.engine import EngineConfig
from stoker.engine.event import Finish
from stoker.errors import CheckpointError
from stoker.sampling.settings import Sampling
from stoker.server.errors import api_error
from tests.engine.drive import DEPTH, PAGES, SLOTS, drain, engine_on, generate, run
from tests.support.random_checkpoint import small_config, write_random_checkpoint

SENTENCE = r"logits are not finite at token 1 of the answer: .* stoker inspect --verify"


def damaged(directory: Path, part: str, value: float) -> Decoder:
    write_random_checkpoint(directory, small_config())
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if part in name and not name.startswith("mtp."):
                tensor.fill_(value)
        save_file(tensors, file)
    return load_model(directory).model


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", ["", "layers.2.input_layernorm", "mlp.gate.weight", "A_log", "lm_head"])
def test_a_request_to_damaged_weights_ends_with_a_sentence(part: str, value: float, tmp_path: Path) -> None:
    model = damaged(tmp_path, part, value)
    for sampling in (Sampling(8), Sampling(8, temperature=1.0, top_p=0.9, seed=1)):
        produced: list[int] = []
        with pytest.raises(CheckpointError, match=SENTENCE):
            produced.extend(generate(model, list(range(70)), sampling))
        assert not produced


def test_steps_of_many_requests_and_drafts_survive_damaged_weights(tmp_path: Path) -> None:
    model = damaged(tmp_path, "layers.2.input_layernorm", torch.nan)
    drafter = CpuMtp(model, PAGES, SLOTS)
    engine = engine_on(model, EngineConfig(pages=PAGES, slots=SLOTS, max_depth=DEPTH), drafter)
    for length in (1, 63, 64, 130, 5):
        engine.submit(list(range(length)), Sampling(8), depth=DEPTH)
    for events in run(engine).values():
        assert [(event.finish, event.damaged, event.tokens) for event in events] == [(Finish.ERROR, True, ())]
    engine.check_integrity()


def test_a_step_that_goes_wrong_in_the_middle_ends_its_request_alone(
    model: Decoder, prompts: list[list[int]], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens until then are told; the one that NaN chose is not."""
    logits, calls = model.logits, 0

    def spoiled(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        found = logits(hidden)
        return found * torch.nan if calls == 4 else found

    monkeypatch.setattr(model, "logits", spoiled)
    engine = engine_on(model, EngineConfig(pages=PAGES, slots=1))
    engine.submit(prompts[0], Sampling(20))
    (events,) = run(engine).values()
    assert [token for event in events for token in event.tokens] == alone[0][:3]
    assert "at token 4 of the answer" in str(events[-1].error)
    engine.submit(prompts[0], Sampling(20))
    assert list(drain(engine).values()) == [alone[0]]


def test_the_model_is_to_blame_and_not_the_request(tmp_path: Path) -> None:
    model = damaged(tmp_path, "model.norm", torch.nan)
    engine = engine_on(model, EngineConfig(pages=2, slots=1))
    engine.submit([1, 2, 3], Sampling(4))
    (events,) = run(engine).values()
    failure = events[-1].failure
    assert isinstance(failure, CheckpointError)
    assert api_error(failure).status == 500
