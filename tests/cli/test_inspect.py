"""`stoker inspect` as people and scripts meet it: exit codes, one JSON document, 80 columns, no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

from stoker.weights.checkpoint import INDEX
from tests.support import situations

KEYS = {"architecture", "parameters", "groups", "bytes_per_step", "mtp", "problems"}
HEAVY = ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub")
WITHOUT_TORCH = f"import sys; sys.modules.update(dict.fromkeys({HEAVY}));"


def stoker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"{WITHOUT_TORCH} from stoker.cli.main import run; run()", "inspect", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "80"},
    )


def test_a_usable_checkpoint_in_json(tmp_path: Path) -> None:
    situations.intel_int4(tmp_path)
    done = stoker(str(tmp_path), "--json", "--verify")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) >= KEYS
    assert report["architecture"] == "qwen3_5_moe"
    assert {"present": True, "complete": True, "sane": True}.items() <= report["mtp"].items()
    groups = {group["name"]: group for group in report["groups"]}
    assert (groups["routed experts"]["format"], groups["head"]["bytes"]) == ("int4-g32", 512 * 128 * 2)
    assert report["bytes_per_step"] == sum(item["bytes"] for item in report["step_reads"])
    assert {problem["severity"] for problem in report["problems"]} == {"note"}
    assert report["verified"]["bytes"] == report["bytes"]


def test_a_broken_checkpoint_is_reported_in_full_and_exits_with_1(tmp_path: Path) -> None:
    broken = situations.shard_cut_short(tmp_path)
    done = stoker(str(tmp_path), "--json")
    assert done.returncode == 1
    (error,) = [p for p in json.loads(done.stdout)["problems"] if p["severity"] == "error"]
    assert set(error) >= {"severity", "message", "file", "tensor", "fix"}
    assert error["file"] == broken.file
    done = stoker(str(tmp_path))
    assert done.returncode == 1
    assert "routed experts" in done.stdout
    assert "Not usable as it is: 1 error." in done.stdout


def test_a_directory_that_does_not_exist_is_one_sentence_and_exit_2(tmp_path: Path) -> None:
    done = stoker(str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "is not a directory" in done.stderr


def test_the_tables_fit_80_columns(tmp_path: Path) -> None:
    situations.qwen_fp8(tmp_path)
    done = stoker(str(tmp_path), "--verify")
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    for part in ("fp8-b128 + bf16", "MTP head: 41 of 41 tensors, complete, sane", "Usable, MTP drafting included."):
        assert part in done.stdout


def test_files_that_are_not_a_model_are_described_all_the_same(tmp_path: Path) -> None:
    done = stoker(str(tmp_path))
    assert done.returncode == 1
    assert "config.json" in done.stdout
    assert "Begin with:" in done.stdout


OWNED = "\x1b]0;owned\x07\x1b[2J\u202e"
MARKUP = "[red]x[/red][link=http://x]y[/link]:bomb:"


def test_nothing_that_a_terminal_obeys_is_printed_from_files(tmp_path: Path) -> None:
    """Control characters in names of tensors, files and models are shown as escapes, rich's own markup as it is."""
    situations.bf16(tmp_path)
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    for name, tensor in ((f"a{OWNED}.safetensors", OWNED), ("b.safetensors", MARKUP)):
        header = json.dumps({tensor: entry}).encode()
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"] |= {OWNED: "b.safetensors", "c": OWNED, "\ud800": MARKUP}
    (tmp_path / INDEX).write_text(json.dumps(index))
    outputs = [stoker(str(tmp_path), *more) for more in ((), ("--json",), ("--verify",))]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": OWNED + MARKUP}))
    outputs.append(stoker(str(tmp_path)))
    for done in outputs:
        assert done.returncode == 1, done.stderr
        said = (done.stdout + done.stderr).replace("\n", "")
        assert said.isprintable()
        assert MARKUP in "".join(said.split())
