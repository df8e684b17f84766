"""Receipts: written without secrets, read back or refused, compared, and turned into rows that the planner shows."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.engines.engine import Launch
from stoker.plan.answer import Question, answer
from stoker.plan.evidence import measurements, of_model, own_file
from stoker.report.receipts import compared, remarks
from stoker.up import receipt
from stoker.up.evidence import rows_of
from stoker.up.measure import Measured
from stoker.up.receipt import Receipt, ReceiptError, RecipeFacts, Revision
from stoker.up.state import PhaseTime

FACTS = RecipeFacts("mine", "t", "a" * 64, "stoker", "122b", "int4", "spark", "mtp:2", 4, 131072, "")


def made(speed: float = 35.0, **changes: Any) -> Receipt:
    rows = (
        Measured("Q&A", 1, 2, 0, speed, 30.0, 2.2, 0.3, "response"),
        Measured("Q&A", 4, 8, 1, 20.0, 15.0, 2.2, 0.5, "response"),
        Measured("general", 1, 2, 0, speed, 30.0, 2.2, 0.3, "response"),
    )
    fields: dict[str, Any] = {
        "receipt": receipt.VERSION,
        "date": "2026-11-19T12:00:00+00:00",
        "service": "default",
        "model_name": "mine",
        "recipe": FACTS,
        "revisions": (Revision("model", "hf:a/b", "c0ffee" * 6, 7),),
        "build": "",
        "image": "",
        "versions": {"stoker": "0.1.0"},
        "launches": (Launch(("stoker", "serve"), {"NOTE": "x"}),),
        "box": "spark",
        "probe": None,
        "phases": (PhaseTime("loading", 3.0),),
        "start_s": 12.0,
        "memory_bytes": 1 << 30,
        "stages": {"plan": 0.1},
        "smoke": None,
        "greedy_sha256": "b" * 64,
        "measured": rows,
        "expected": (),
        "kept": True,
    }
    return Receipt(**fields | changes)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def stoker(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_a_receipt_is_read_back_and_holds_no_secret_of_the_environment(home, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_sesame")
    launches = (Launch(("stoker", "serve", "--note", "hf_sesame")),)
    file = receipt.write(made(launches=launches))
    assert file.stat().st_mode & 0o077 == 0
    assert "sesame" not in file.read_text()
    found = receipt.read(file)
    assert found.launches[0].command[-1] == "***"
    assert msgspec.structs.replace(found, launches=()) == made(launches=())


def test_what_is_no_receipt_is_refused_in_a_sentence(tmp_path):
    file = tmp_path / "r.json"
    for text, says in (
        ("{", "is no JSON"),
        ('{"a": 1}', "is no receipt"),
        ('{"receipt": 99}', "version 99"),
        ('{"receipt": 1}', "is not whole"),
    ):
        file.write_text(text)
        with pytest.raises(ReceiptError, match=says):
            receipt.read(file)
    with pytest.raises(ReceiptError, match="cannot be read"):
        receipt.read(tmp_path / "none.json")


def test_rows_of_a_receipt_are_shown_beside_published_ones_and_not_fitted(home):
    published = len(of_model("Qwen3.5-122B-A10B"))
    file = receipt.write(made(speed=34.5))
    done = stoker("evidence", "--add", file)
    assert done.exit_code == 0, done.output
    assert "2 rows of Qwen3.5-122B-A10B added" in " ".join(done.output.split())
    assert "there already" in " ".join(stoker("evidence", "--add", file).output.split())
    rows = of_model("Qwen3.5-122B-A10B")
    assert len(rows) == published + 2
    one, four = (row for row in rows if row.own)
    assert (one.decode_tok_s, one.users, one.drafter, one.depth) == (34.5, 1, "mtp", 2)
    assert (one.box, one.weights, one.timing, one.tokens_per_step) == ("spark", "int4", "decode-only", 2.2)
    assert (four.users, four.scope, four.method) == (4, "per_stream", "stoker up, 8 requests, 1 failed")
    assert not [row for row in measurements() if row.own], "what is fitted is published"
    found = answer(Question("122b", "spark", weights="int4", draft="mtp:2", workload="prose"))
    assert one.id in [row.id for row in found.evidence]
    shown = stoker("evidence", "122b", "--box", "spark", "--json")
    assert [row["source"] for row in json.loads(shown.output)["rows"] if row["id"] == one.id] == [str(file)]


def test_rows_that_would_never_be_shown_are_refused(home):
    unknown = msgspec.structs.replace(FACTS, plan="")
    with pytest.raises(ReceiptError, match="does not know the model"):
        rows_of(made(recipe=unknown), "r.json")
    with pytest.raises(ReceiptError, match="no measured speed"):
        rows_of(made(measured=()), "r.json")
    own_file().parent.mkdir(parents=True)
    own_file().write_text("id,model\nx\n")
    failed = stoker("evidence", "122b")
    assert "cannot be read" in str(failed.exception)


def test_receipts_are_compared_with_the_first(home, tmp_path):
    first, second = made(), made(speed=70.0, date="2026-11-20T12:00:00+00:00", greedy_sha256="c" * 64)
    found = compared([first, second])
    (row,) = [row for row in found["figures"] if row["name"] == "Q&A"]
    assert (row["values"], row["changes"]) == ([35.0, 70.0], [0.0, 1.0])
    assert (found["same_recipe"], found["same_greedy_answer"]) == (True, False)
    assert any("look into that before speeds" in line for line in remarks([first, second]))
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file, each in zip(files, (first, second), strict=True):
        file.write_bytes(msgspec.json.encode(each))
    done = stoker("report", *files)
    assert done.exit_code == 0, done.output
    assert "70 (+100%)" in " ".join(done.output.split())
    out = tmp_path / "out.json"
    assert stoker("report", *files, "--json", out).exit_code == 0
    assert json.loads(out.read_text())["same_files"] is True
    assert "as a table or with --json" in str(stoker("report", *files, "--html", out).exception)
