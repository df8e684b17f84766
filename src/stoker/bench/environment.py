"""Where and how a benchmark ran, so that somebody else can repeat it."""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import stoker
from stoker.bench.record import Client, Environment, ServerFacts

SECRET = ("--api-key", "--against-api-key")


def environment(started: datetime, gpus: list[str], servers: list[ServerFacts], client: Client) -> Environment:
    import psutil

    return Environment(
        stoker=stoker.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        processor=processor(),
        cpus=os.cpu_count() or 0,
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpus,
        started=started.astimezone(UTC).isoformat(timespec="seconds"),
        duration_s=(datetime.now(UTC) - started).total_seconds(),
        command=command(sys.argv),
        servers=servers,
        client=client,
    )


def command(arguments: list[str]) -> str:
    """The exact command line, with API keys replaced by ***."""
    from shlex import quote

    shown, hide = ["stoker"], False
    for argument in arguments[1:]:
        name, equals, _ = argument.partition("=")
        shown.append("***" if hide else f"{name}=***" if name in SECRET and equals else quote(argument))
        hide = argument in SECRET
    return " ".join(shown)


def processor() -> str:
    """The name of the CPU. ARM's kernel has only numbers of its parts, which lscpu knows by name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
        said = subprocess.run(["lscpu", "--json"], capture_output=True, timeout=5.0, check=True).stdout
        entries = [entry for top in json.loads(said)["lscpu"] for entry in (top, *_below(top))]
        names = [entry["data"] for entry in entries if entry["field"] == "Model name:"]
        if names:
            return " + ".join(dict.fromkeys(names))  # cores of several kinds
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        pass
    return platform.processor() or platform.machine()


def _below(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Fields within a field: newer releases of lscpu nest them."""
    return [found for child in entry.get("children", ()) for found in (child, *_below(child))]
