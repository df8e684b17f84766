"""Engines behind a queue, in their own process and in a thread."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.engine.worker.client import EngineClient, LocalEngine
from stoker.engine.worker.messages import Loading
from stoker.engine.worker.process import EngineProcess
from stoker.engine.worker.spec import EngineSpec
from stoker.speculate.choice import DraftChoice
from tests.engine.specs import Slow
from tests.engine.worker.waiting import CONFIG, PATIENCE_S, PAUSE, live


@pytest.fixture(scope="module")
def spec(checkpoints: dict[str, Path]) -> EngineSpec:
    return EngineSpec(checkpoints["qwen3_5_moe_text"], CONFIG, DraftChoice.parse("mtp:2"))


@pytest.fixture(scope="module")
def heard() -> list[Loading]:
    """What `running` says while it loads."""
    return []


@pytest.fixture(scope="module")
def running(spec: EngineSpec, heard: list[Loading]) -> Iterator[EngineProcess]:
    with EngineProcess(Slow(spec, PAUSE), heard.append) as engine:
        engine.ready.result(PATIENCE_S)
        yield engine


@pytest.fixture
def engine(running: EngineProcess) -> Iterator[EngineProcess]:
    """The one process most tests share; each must leave it without requests."""
    yield running
    assert live(running) == 0


@pytest.fixture(params=["process", "thread"])
def either(request: pytest.FixtureRequest, spec: EngineSpec) -> Iterator[EngineClient]:
    """What both kinds of engine promise."""
    if request.param == "process":
        yield request.getfixturevalue("engine")
    else:
        with LocalEngine(Slow(spec, PAUSE).build(lambda loading: None).engine) as local:
            yield local
