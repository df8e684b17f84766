"""One small model, eight prompts, and what each is answered alone and undrafted."""

from pathlib import Path

import pytest
import torch

from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_model
from stoker.engine.engine import EngineConfig
from tests.engine.drive import PAGES, drain, engine_on, settings_for


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> Decoder:
    return load_model(checkpoints["qwen3_5_moe_text"]).model


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = (60, 125, 50, 1, 63, 200, 64, 90)  # most grow into another page while they decode
    return [torch.randint(0, 512, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def alone(model: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    """Each request by itself, one token a step."""
    answers = []
    for index, prompt in enumerate(prompts):
        engine = engine_on(model, EngineConfig(pages=PAGES, slots=1, max_depth=0))
        engine.submit(prompt, settings_for(index))
        answers.append(drain(engine)[0])
    return answers
