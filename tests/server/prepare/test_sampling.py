"""What a request leaves open comes from the operator, then from generation_config.json, then from the API."""

import pytest

from stoker.demo import EMBEDDED
from stoker.server.model import ServedModel
from stoker.server.prepare.sampling import sampling_of
from stoker.server.schemas.chat import ChatRequest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory = tmp_path_factory.mktemp("model")
    for file in EMBEDDED.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "generation_config.json").unlink()
    (directory / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.95, "top_k": 20}')
    return ServedModel(directory, ["x"], 8192, {}, sampling={"temperature": 0.2, "top_k": -1})


def test_an_operators_defaults_go_before_the_models_and_after_the_requests(model: ServedModel) -> None:
    left_open = sampling_of(ChatRequest.model_validate({"messages": []}), model, 8)
    assert (left_open.temperature, left_open.top_p, left_open.top_k) == (0.2, 0.95, 0)
    asked = sampling_of(ChatRequest.model_validate({"messages": [], "temperature": 0.9, "top_k": 3}), model, 8)
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.9, 0.95, 3)
