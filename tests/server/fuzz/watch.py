"""A neighbour: streams answers one after another and asks for /health, and measures how long it has to wait.

`python -m tests.server.fuzz.watch URL` runs until its input ends and then writes what it saw as JSON. It is a process
of its own, so that what it measures is the server and not the client that makes requests up.
"""

import json
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection
from urllib.parse import urlsplit

LOOK_S = 0.02  # how often it is seen whether this process itself gets to run
HEALTH_S = 0.05  # from one question to the next
STREAM = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 1.0}
ERROR = b'data: {"error":'
KEPT = 10  # of the longest waits


@dataclass
class Seen:
    streams: int = 0
    chunks: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)  # seconds without a chunk, and when they ended
    first_token_s: float = 0.0  # the longest
    health: list[tuple[float, float]] = field(default_factory=list)
    asked: int = 0
    failures: list[str] = field(default_factory=list)


class Watch:
    def __init__(self, url: str) -> None:
        self._url, self.seen = urlsplit(url), Seen()
        self._began = time.monotonic()
        self._done = threading.Event()

    def run(self) -> Seen:
        threads = [threading.Thread(target=self._repeat, args=[each]) for each in (self._stream, self._health)]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        self._done.set()
        for thread in threads:
            thread.join()
        return self.seen

    def _repeat(self, look: Callable[[], None]) -> None:
        while not self._done.is_set():
            try:
                look()
            except Exception as error:  # whatever it is, it is reported
                self.seen.failures.append(repr(error)[:500])
                time.sleep(0.5)

    def _note(self, waits: list[tuple[float, float]], seconds: float) -> None:
        waits.append((round(seconds, 3), round(time.monotonic() - self._began, 1)))
        waits.sort(reverse=True)
        del waits[KEPT:]

    def _stream(self) -> None:
        body = json.dumps(STREAM).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._url.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection((self._url.hostname, self._url.port), timeout=120) as connection:
            began = time.monotonic()
            connection.sendall(head.encode() + body)
            text = connection.recv(1 << 16)
            if b" 200 OK" not in text[:30]:
                raise AssertionError(f"the neighbour was answered {text!r}")
            self.seen.streams += 1
            last, own, first = time.monotonic(), 0.0, True
            while b"[DONE]" not in text[-100:] and not self._done.is_set():
                before = time.monotonic()
                readable = select.select([connection], [], [], LOOK_S)[0]
                now = time.monotonic()
                if not readable:
                    own += max(0.0, now - before - LOOK_S)
                    continue
                text = text[-1000:] + connection.recv(1 << 16)
                if ERROR in text:
                    raise AssertionError(f"the neighbour's stream failed: {text[text.index(ERROR) :]!r}")
                self.seen.chunks += 1
                if first:
                    self.seen.first_token_s = max(self.seen.first_token_s, now - began)
                else:
                    self._note(self.seen.gaps, now - last - own)
                last, own, first = now, 0.0, False

    def _health(self) -> None:
        connection = HTTPConnection(self._url.netloc, timeout=120)
        while not self._done.is_set():
            began = time.monotonic()
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            self._note(self.seen.health, time.monotonic() - began)
            self.seen.asked += 1
            if answer.status != 200:
                raise AssertionError(f"/health says {answer.status}")
            self._done.wait(HEALTH_S)


if __name__ == "__main__":
    print(json.dumps(asdict(Watch(sys.argv[1]).run())))
