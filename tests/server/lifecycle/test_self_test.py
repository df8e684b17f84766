"""The start-up self-test finds what would otherwise only show as slow or senseless answers."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from stoker.backends.cpu.build import cpu_backend
from stoker.backends.network.load import Loaded, load_model
from stoker.demo import EMBEDDED
from stoker.engine.engine import Engine
from stoker.engine.worker.client import LocalEngine
from stoker.errors import StokerError
from stoker.server.config import ServerConfig
from stoker.server.lifecycle.memory_guard import Reading
from stoker.server.lifecycle.plan import Plan, plan_engine
from stoker.server.lifecycle.self_test import self_test
from stoker.server.model import ServedModel
from stoker.speculate.choice import DraftChoice
from stoker.speculate.drafter import Draft

GIB = 1 << 30
CHOICE = DraftChoice.parse("mtp:2")


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model(EMBEDDED)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel(EMBEDDED, ["demo"], 8192, {})


@pytest.fixture(scope="module")
def plan() -> Plan:
    config = ServerConfig(EMBEDDED, ("demo",), draft="mtp:2", users=1, context=512)
    return plan_engine(config, Reading(8 * GIB, 16 * GIB))


@pytest.fixture
def engine(loaded: Loaded, plan: Plan, model: ServedModel) -> Engine:
    backend, drafter = cpu_backend(loaded.model, plan.engine, CHOICE, EMBEDDED)
    return Engine(plan.engine, backend, drafter, model.tokenizer.backend)


def check(engine: Engine, model: ServedModel, plan: Plan) -> None:
    with LocalEngine(engine) as client:
        asyncio.run(self_test(client, model, CHOICE, plan))


def test_a_sound_engine_passes(engine: Engine, model: ServedModel, plan: Plan) -> None:
    check(engine, model, plan)


def test_a_drafter_at_chance_is_refused(
    engine: Engine, model: ServedModel, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter: Any = engine.drafter
    propose = drafter.propose

    def guess(requests: Any, go_on: Any = None) -> list[Draft]:
        return [Draft([7] * len(draft), list(draft.confidence), draft.source) for draft in propose(requests, go_on)]

    monkeypatch.setattr(drafter, "propose", guess)
    with pytest.raises(StokerError, match=r"\d% were right, no better than chance: .*--draft none"):
        check(engine, model, plan)


def test_logits_that_are_not_finite_are_refused(
    engine: Engine, loaded: Loaded, model: ServedModel, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = loaded.model.logits
    monkeypatch.setattr(loaded.model, "logits", lambda hidden: logits(hidden) * torch.tensor(float("nan")))
    with pytest.raises(StokerError, match="not finite"):
        check(engine, model, plan)


def test_caches_of_another_size_than_planned_are_refused(engine: Engine, model: ServedModel, plan: Plan) -> None:
    with pytest.raises(StokerError, match="were planned"):
        check(engine, model, replace(plan, cache_bytes=plan.cache_bytes + 1))
