"""What an interrupted suite finds again."""

from pathlib import Path

import pytest

from stoker.bench.answer import Answer
from stoker.bench.document import load
from stoker.bench.journal import Journal
from stoker.bench.measure import to_request
from stoker.bench.record import Request
from stoker.bench.wire import Exchange
from stoker.errors import BenchError

IDENTITY = {"suite": "quick"}


@pytest.fixture
def requests() -> list[Request]:
    answer = Answer(content="one\u2028two\u0085three \U0001f600")
    return [
        to_request(
            answer, Exchange(), server="A", workload="Q&A", variant="cold", concurrency=1, round=1,
            rate=None, depth=None, began=0.0, wanted=None, wants_json=False,
        )
    ]  # fmt: skip


def test_rounds_come_back_whatever_their_answers_contain(tmp_path: Path, requests: list[Request]) -> None:
    path = tmp_path / "journal"
    Journal(path, IDENTITY, Request).add("1", requests)
    assert Journal(path, IDENTITY, Request).rounds == {"1": requests}


def test_a_round_that_a_kill_cut_within_a_character_is_measured_again(tmp_path: Path, requests: list[Request]) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, IDENTITY, Request)
    journal.add("1", requests)
    whole = path.read_bytes()
    journal.add("2", requests)
    written = path.read_bytes()
    inside = written.index("\U0001f600".encode(), len(whole)) + 2
    path.write_bytes(written[:inside])
    assert set(Journal(path, IDENTITY, Request).rounds) == {"1"}


def test_a_file_that_is_no_text_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(b'{"version": 1, "requests": "\xff"}')
    with pytest.raises(BenchError, match="is no JSON"):
        load(path)
