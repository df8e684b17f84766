"""Memory given back under pressure: the prefix cache goes, its pages read as zeros, and answers stay the same."""

import torch

from stoker.backends.memory import discard
from stoker.backends.network.decoder import Decoder
from stoker.engine.engine import EngineConfig
from stoker.sampling.settings import Sampling
from tests.engine.drive import drain, engine_on


def test_releasing_memory_drops_every_snapshot_and_changes_no_answer(model: Decoder) -> None:
    engine = engine_on(model, EngineConfig(pages=16, slots=2, snapshots=4))
    prompt = [(7 * place) % 200 for place in range(200)]
    first = engine.submit(prompt, Sampling(max_tokens=6))
    answer = drain(engine)[first]
    assert engine.stats().snapshots > 0
    assert engine.stats().pages_cached > 0
    assert engine.release_memory() > 0
    assert (engine.stats().snapshots, engine.stats().pages_used) == (0, 0)
    engine.check_integrity()
    again = engine.submit(prompt, Sampling(max_tokens=6))
    assert drain(engine)[again] == answer


def test_a_running_request_keeps_its_pages(model: Decoder) -> None:
    prompt = [(7 * place) % 200 for place in range(150)]
    answers = []
    for short in (False, True):
        engine = engine_on(model, EngineConfig(pages=16, slots=2, snapshots=4))
        request = engine.submit(prompt, Sampling(max_tokens=20))
        made = []
        while not engine.idle:
            made += [token for event in engine.step() for token in event.tokens if event.request_id == request]
            if short:
                engine.release_memory()
        engine.check_integrity()
        answers.append(made)
    assert answers[0] == answers[1]


def test_discarded_rows_read_as_zeros_and_others_stay() -> None:
    tensor = torch.ones(64, 4096)  # 16 KiB a row
    given = discard([tensor], [0, 1, 2, 3, 8, 9, 63])
    assert given > 0
    assert given % 4096 == 0
    assert tensor[4:8].eq(1).all()
    assert tensor[10:63].eq(1).all()
    assert tensor[1:3].eq(0).all()
    assert discard([torch.ones(4, 4)], [0]) == 0, "less than a page cannot be given back"
