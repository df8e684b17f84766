"""Servers of the embedded model for `make demo`: started, waited for, stopped whatever happens."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from stoker.errors import EngineError

PATIENCE_S = 300.0  # a start takes seconds, on a busy machine minutes
STOKER = (sys.executable, "-c", "from stoker.cli.main import run; run()")


@contextmanager
def serving(drafts: Sequence[str], say: Callable[[str], None]) -> Iterator[list[str]]:
    """The address of a `stoker serve` for each way of drafting, once all of them answer."""
    servers: list[_Server] = []
    before = signal.signal(signal.SIGTERM, _stop)  # or a kill would leave the servers behind
    try:
        for draft in drafts:  # one after another: at the same time they would fight for the cores
            servers.append(_Server(draft))
            servers[-1].wait_until_ready(say)
        yield [server.address for server in servers]
    finally:
        for server in servers:
            server.process.terminate()
        for server in servers:
            try:
                server.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.process.kill()
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class _Server:
    def __init__(self, draft: str) -> None:
        self._draft = draft
        command = [*STOKER, "serve", "--model", "demo", "--port", "0", "--draft", draft]
        command += ["--users", "4", "--device", "cpu"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}
        )
        self._said: list[str] = []
        self.address = ""
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()

    def wait_until_ready(self, say: Callable[[str], None]) -> None:
        began = time.monotonic()
        while True:
            phase = self._phase()
            if phase == "ready":
                return
            if (ended := self.process.poll() is not None) or time.monotonic() - began > PATIENCE_S:
                self._reader.join(timeout=5.0 if ended else 0.0)  # its last words may still be on their way
                raise EngineError(
                    f"the demo's server with --draft {self._draft} did not get ready in "
                    f"{time.monotonic() - began:.0f} s; it said:\n" + "".join(self._said[-20:])
                )
            say(f"stoker serve --model demo --draft {self._draft}: {phase}, {time.monotonic() - began:.0f} s")
            time.sleep(0.3)

    def _phase(self) -> str:
        if not self.address:
            return "starting"
        try:
            with urlopen(f"{self.address}/ready", timeout=5) as response:
                return "ready" if response.status == 200 else "starting"
        except HTTPError as error:
            try:
                return str(json.loads(error.read()).get("phase", "starting"))
            except ValueError:
                return "starting"
        except (URLError, OSError):
            return "starting"

    def _follow(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._said.append(line)
            if found := re.search(r"listening on (http://\S+)", line):
                self.address = found[1]
