"""`stoker check` and the server it asks, each as a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Served:
    process: "subprocess.Popen[str]"
    url: str

    def wait_for(self, requests: int) -> None:
        """Until so many items have been asked, of this and earlier checks together."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if int(line) >= requests:
                return


@contextmanager
def served(suite: str, seconds: float = 0.0, answers: dict[str, str] | None = None, port: int = 0) -> Iterator[Served]:
    """The knowing server; each answer takes so many seconds."""
    settings = (suite, str(seconds), json.dumps(answers or {}), str(port))
    process = subprocess.Popen([sys.executable, "-m", "tests.check.mock", *settings], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Served(process, process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "stoker", "check", *arguments]


def environment(home: str) -> dict[str, str]:
    """With a cache of its own, and a terminal that is wide enough."""
    return {**os.environ, "XDG_CACHE_HOME": home, "COLUMNS": "140"}


def check(*arguments: str, home: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment(home), timeout=120, check=False
    )
