"""A real `stoker serve` process for tests, and what they ask it."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.support.extent import ALL

PATIENCE_S = 300.0  # for a loaded machine to start a server
# in which /health must answer on an idle machine; beside other work of its cores it may wait longer for its turn
HEALTH_S = 0.1 if ALL else 0.4
NO_THINK = {"enable_thinking": False}
HELD = (
    "stoker:requests_live",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "stoker:kv_pages_held",
    "stoker:slots_used",
)


class Running:
    """Started at once; `wait` until it answers."""

    def __init__(self, *options: str, module: str = "stoker.cli.main", env: dict[str, str] | None = None) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False)  # noqa: SIM115
        start = f"from {module} import run; run()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, "serve", "--port", "0", *options],
            stdout=self._log,
            stderr=self._log,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        self._url: str | None = None

    @property
    def url(self) -> str:
        """Known as soon as the port is bound."""
        for _ in range(int(PATIENCE_S / 0.05)):
            if self._url is None and (found := re.search(r"listening on (http://\S+)", self.log)):
                self._url = found.group(1)
            if self._url is not None:
                return self._url
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            time.sleep(0.05)
        raise AssertionError(f"the server never listened:\n{self.log}")

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def wait(self, key: str | None = None) -> "Running":
        headers = {"authorization": f"Bearer {key}"} if key else {}
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            if httpx.get(f"{self.url}/ready", headers=headers, timeout=30.0).status_code == 200:
                return self
            time.sleep(0.1)
        raise AssertionError(f"the server was never ready:\n{self.log}")

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self._log.close()
            os.unlink(self._log.name)

    # -- asking

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_S, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_S, **more)

    def chat(self, text: str = "Say something.", **more: Any) -> dict[str, Any]:
        response = self.post("/v1/chat/completions", chat_body(text, **more))
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Messages of an event stream, up to its end."""
        with httpx.stream("POST", self.url + path, json={**body, "stream": True}, timeout=PATIENCE_S) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def gauges(self, headers: dict[str, str] | None = None) -> dict[str, float]:
        """Metrics without labels other than the model's, by name."""
        found: dict[str, float] = {}
        for line in self.get("/metrics", headers=headers or {}).text.splitlines():
            if match := re.fullmatch(r'([\w:]+)\{engine="0",model_name="[^"]*"\} (\S+)', line):
                found[match.group(1)] = float(match.group(2))
        return found

    @property
    def processes(self) -> list[int]:
        """Of the server and all that it has started."""
        found = [self.process.pid]
        for pid in found:
            with suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += [int(child) for child in (task / "children").read_text().split()]
        return found

    @property
    def memory(self) -> float:
        """MB that its processes hold, shared pages counted once."""
        total = 0
        for pid in self.processes:
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total / 1024

    @contextmanager
    def health_asked(self) -> Iterator[list[float]]:
        """Every 10 ms meanwhile: seconds that each answer took, infinity where it was no 200."""
        done, took = threading.Event(), [0.0]

        def ask() -> None:
            with httpx.Client(base_url=self.url, timeout=120.0) as client:
                while not done.wait(0.01):
                    began = time.perf_counter()
                    fine = client.get("/health").status_code == 200
                    took.append(time.perf_counter() - began if fine else math.inf)

        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            try:
                yield took
            finally:
                done.set()
                asking.result()

    def until(self, holds: Any, what: str, patience: float = PATIENCE_S) -> None:
        """Waits until `holds()`."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if holds():
                return
            time.sleep(0.1)
        raise AssertionError(f"{what} did not come about; metrics {self.gauges()}; log:\n{self.log[-3000:]}")

    def until_idle(self) -> None:
        """No request is known to server or engine, and nothing is held but by the prefix cache."""
        self.until(lambda: all(self.gauges().get(name) == 0 for name in HELD), "the idle state")


def chat_body(text: str = "Say something.", **more: Any) -> dict[str, Any]:
    more.setdefault("max_tokens", 12)
    more.setdefault("chat_template_kwargs", NO_THINK)
    return {"messages": [{"role": "user", "content": text}], **more}


def text_of(chunks: Sequence[dict[str, Any]], name: str = "content") -> str:
    return "".join(choice["delta"].get(name) or "" for chunk in chunks for choice in chunk["choices"])
