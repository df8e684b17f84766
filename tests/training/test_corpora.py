"""Source of Python packages: the files that were asked for, without tests and without what is held out elsewhere."""

import hashlib
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from training.data import corpora, fetch

LINES = "\n".join(f"value_{i} = compute(another_value_{i})" for i in range(40)) + "\n"


def write_wheel(directory: Path, name: str, files: dict[str, str]) -> str:
    """Its SHA-256."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ask_for(monkeypatch: pytest.MonkeyPatch, directory: Path, hashes: dict[str, str]) -> None:
    listed = directory / "packages.txt"
    lines = [f"{name}==1.0 --hash=sha256:{sha256}  # MIT\n" for name, sha256 in hashes.items()]
    listed.write_text("# names\n" + "".join(lines))
    monkeypatch.setattr(fetch, "WHEELS", listed)


def test_every_package_is_pinned_with_its_licence() -> None:
    lines = fetch.WHEELS.read_text().splitlines()[1:]
    assert len(fetch.wheel_hashes()) == len(lines) > 20
    for line in lines:
        assert line.rpartition("  # ")[2] in {"MIT", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0", "MIT or Apache-2.0"}


def test_files_that_are_there_are_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = {name: write_wheel(tmp_path, name, {f"{name}/a.py": name}) for name in ("second", "first")}
    ask_for(monkeypatch, tmp_path, hashes)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing is missing"))
    assert [path.name.split("-")[0] for path in fetch.fetch_wheels(tmp_path)] == ["second", "first"]


def test_a_file_that_is_not_what_was_asked_for_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = write_wheel(tmp_path / "index", "thing", {"thing/a.py": LINES})
    write_wheel(tmp_path / "here", "thing", {"thing/a.py": "another text"})
    ask_for(monkeypatch, tmp_path, {"thing": good})
    commands: list[Sequence[str]] = []

    def pip(command: Sequence[str], check: bool) -> None:
        commands.append(command)
        (wheel,) = (tmp_path / "index").iterdir()
        (tmp_path / "here" / wheel.name).write_bytes(wheel.read_bytes())

    monkeypatch.setattr(subprocess, "run", pip)
    (path,) = fetch.fetch_wheels(tmp_path / "here")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == good
    assert {"--require-hashes", "--no-deps"} <= set(commands[0])


def test_tests_copies_and_held_out_passages_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = next(d for d in corpora.standard_library(tests=False) if d.held_out and len(d.text) > 4000)
    some = "\n".join(held_out.text.splitlines()[20:60])
    files = {
        "thing/own.py": LINES,
        "thing/tests/test_own.py": LINES,
        "thing/_vendor/other.py": LINES,
        "thing/short.py": "x = 1\n",
        "thing/copied.py": LINES + some + LINES,
        "thing/data.txt": LINES,
    }
    write_wheel(tmp_path, "thing", files)
    monkeypatch.setattr(corpora, "fetch_wheels", lambda: list(tmp_path.glob("*.whl")))
    found = list(corpora.package_source())
    assert [document.name for document in found] == ["packages/thing/own.py"]
    assert found[0].text == LINES
