"""Where and how a benchmark ran, so that somebody else can repeat it."""

import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import stoker
from stoker.bench.record import Client, Environment, ServerFacts

SECRET = ("--api-key", "--against-api-key")


def environment(started: datetime, gpus: list[str], servers: list[ServerFacts], client: Client) -> Environment:
    import psutil

    return Environment(
        stoker=stoker.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        processor=_processor(),
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


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
