"""The files of the page and the state it shows, without a browser."""

import hashlib
import re
from pathlib import Path

from stoker.server.endpoints.page import FILES, FOLDER, POLICY, about
from tests.server.running import Running


def test_every_file_is_served_with_a_policy_that_lets_nothing_else_run(server: Running) -> None:
    for path in ("/", *(f"/page/{name}" for name in FILES)):
        found = server.get(path)
        assert found.status_code == 200
        assert found.headers["content-security-policy"] == POLICY
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    for name in ("../app.py", "..%2Fapp.py", "vendor/../../app.py", "vendor/README.md", "nothing.js"):
        assert server.get(f"/page/{name}").status_code == 404


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for name, file in FILES.items():
        if name.startswith("vendor/"):
            continue
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.findall(r"https?://\S+", text), name
        assert "innerHTML" not in text
        for asked in re.findall(r'(?:from|src=|href=)\s*"(\.?/[^"]+)"', text):
            assert asked.removeprefix("./").removeprefix("/page/") in FILES, (name, asked)


def test_vendored_libraries_are_those_their_authors_publish_and_have_their_licence() -> None:
    rows = [line.split("|")[1:-1] for line in (FOLDER / "vendor/README.md").read_text().splitlines() if "|" in line]
    listed = {row[0].strip(): row[-1].strip() for row in rows[2:]}
    assert set(listed) == {name.removeprefix("vendor/") for name in FILES if name.startswith("vendor/")}
    for name, digest in listed.items():
        assert hashlib.sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() == digest
        assert (FOLDER / "vendor" / name).with_suffix(".LICENSE").exists()


def test_the_state_says_what_the_model_is_and_counts_what_is_made(server: Running) -> None:
    before = server.get("/state").json()
    assert before["about"] == "25 MB demonstration model, not an assistant"
    assert before["demo"] is True
    made = server.chat(max_tokens=12)["usage"]["completion_tokens"]
    after = server.get("/state").json()
    counts = {name: after["counts"][name] - before["counts"][name] for name in before["counts"]}
    assert counts["tokens"] == made
    assert counts["step_tokens"] == made - 1, "the first token comes with the prompt's end"
    assert 0 <= counts["accepted"] <= counts["drafted"]
    assert after["at"] > before["at"]


def test_other_models_are_named_by_their_size(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(3_000_000))
    assert about(tmp_path) == "3 MB on disk"
