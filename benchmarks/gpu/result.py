"""The result of a GPU benchmark: where and with what it was made, kept in a file and printed as the last line."""

import datetime
import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

import torch
import triton


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, interpreted: no speed"


def record(name: str, path: str | None, arguments: Sequence[str] | None = None, **found: Any) -> dict[str, Any]:
    """`name` is the benchmark's file in benchmarks/, `arguments` those it was called with if not the process's own."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--json" in words:  # where a file lay is nobody's business
        at = words.index("--json")
        del words[at : at + 2]
    result = {
        "command": " ".join(["python", f"benchmarks/{name}.py", *words]),
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        **found,
    }
    if path:
        with open(path, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    print(json.dumps(result))
    return result
