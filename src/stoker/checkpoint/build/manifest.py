"""`stoker.json` and the index: what a result is made of, whenever and in however many runs it was built."""

import json
import platform
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import stoker
from stoker.checkpoint.build.options import BuildOptions
from stoker.checkpoint.build.plan import Sources
from stoker.checkpoint.build.shards import Shard
from stoker.weights.json_file import read_json

MANIFEST = "stoker.json"


@dataclass
class Report:
    """What a build did."""

    out: Path
    rules: dict[str, list[str]]  # source -> a line per rule
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # file -> bytes and sha256

    @classmethod
    def of(cls, out: Path) -> "Report":
        """The report of a finished build, from its manifest."""
        raw = read_json(out / MANIFEST)
        return cls(out, raw["rules"], raw["files"])


def manifest(options: BuildOptions, sources: Sources, report: Report) -> dict[str, Any]:
    return {
        "command": options.command(),
        "recipe": options.as_dict(),
        "versions": versions(),
        "sources": [source.origin() for source in sources.all()],
        "rules": report.rules,
        "files": dict(sorted(report.files.items())),
    }


def state(options: BuildOptions, sources: Sources, files: dict[str, Shard]) -> dict[str, Any]:
    """What must be unchanged for a build to be resumed."""
    layout = sha256(b"".join(name.encode() + shard.header for name, shard in files.items())).hexdigest()
    return {
        "recipe": options.as_dict(),
        "command": options.command(),
        "sources": [source.identity() for source in sources.all()],
        "versions": versions(),
        "layout": layout,
    }


def versions() -> dict[str, str]:
    return {"stoker": stoker.__version__, "torch": torch.__version__, "python": platform.python_version()}


def index(shards: list[Shard]) -> dict[str, Any]:
    weight_map = {name: shard.file for shard in shards for name in shard.tensors}
    size = sum(nbytes for shard in shards for _, nbytes in shard.places.values())
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
