"""An engine for tests of what runs engines: it starts in a tenth of a second, and hangs or dies when told to.

`python fake_engine.py PORT [--name NAME] [--load SECONDS] [--die-loading] [--never-ready] [--ignore-term] [--child]`
answers /ready, /health, /metrics and /v1/chat/completions like a real one. The body of a completion may hold `tokens`
(how many), `delay` (seconds between them), `prompt_s` (how long the prompt takes) and `do`: `die` or `stall` before the
second token. Whatever else it is asked, it answers with what it was asked.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PHASES = ("loading", "compiling")


class Engine:
    def __init__(self, name: str, load_s: float, ready: bool) -> None:
        self.name, self.load_s, self.may_be_ready = name, load_s, ready
        self.began = time.monotonic()
        self.lock = threading.Lock()
        self.running = self.tokens = self.cancelled = 0

    def progress(self) -> float:
        """1 is ready."""
        share = 1.0 if not self.load_s else min(1.0, (time.monotonic() - self.began) / self.load_s)
        return share if self.may_be_ready else min(share, 0.99)

    def count(self, running: int = 0, tokens: int = 0, cancelled: int = 0) -> None:
        with self.lock:
            self.running += running
            self.tokens += tokens
            self.cancelled += cancelled


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def do_GET(self) -> None:
        engine, path = self.engine, self.path
        if path == "/health":
            self._json(200, {"status": "ok"})
        elif path == "/ready":
            share = engine.progress()
            phase = "ready" if share == 1.0 else PHASES[int(share * len(PHASES))]
            self._json(200 if share == 1.0 else 503, {"ready": share == 1.0, "phase": phase, "percent": share * 100})
        elif path == "/metrics":
            text = (
                f"vllm:num_requests_running {engine.running}\nvllm:generation_tokens_total {engine.tokens}\n"
                f"fake:cancelled {engine.cancelled}\n"
            )
            self._send(200, text.encode(), "text/plain")
        else:
            self._echo()

    def do_POST(self) -> None:
        if self.path != "/v1/chat/completions":
            self._echo()
            return
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        engine = self.engine
        engine.count(running=1)
        try:
            if asked.get("stream"):
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for _ in self._tokens(asked):
                    self._event(json.dumps({"choices": [{"index": 0, "delta": {"content": f"{engine.name} "}}]}))
                self._event("[DONE]")
                self.wfile.write(b"0\r\n\r\n")
                self.wfile.flush()
            else:
                text = "".join(f"{engine.name} " for _ in self._tokens(asked))
                self._json(200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]})
        except ConnectionError:
            engine.count(cancelled=1)
            self.close_connection = True
        finally:
            engine.count(running=-1)

    def _tokens(self, asked):
        until = time.monotonic() + asked.get("prompt_s", 0.0)
        while time.monotonic() < until:
            self.engine.count(tokens=1)
            time.sleep(0.02)
        for index in range(asked.get("tokens", 4)):
            if index == 1 and asked.get("do") == "die":
                os._exit(3)
            if index == 1 and asked.get("do") == "stall":
                time.sleep(3600)
            self.engine.count(tokens=1)
            yield index
            time.sleep(asked.get("delay", 0.0))

    def _event(self, data: str) -> None:
        text = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))
        self.wfile.flush()

    def _echo(self) -> None:
        body = b""
        if "chunked" in self.headers.get("transfer-encoding", ""):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        elif length := int(self.headers.get("content-length", 0)):
            body = self.rfile.read(length)
        found = {
            "engine": self.engine.name,
            "method": self.command,
            "path": self.path,
            "headers": [[name.lower(), value] for name, value in self.headers.items()],
            "bytes": len(body),
            "body": body[:1000].decode("latin-1"),
        }
        self._json(200, found)

    do_PUT = do_DELETE = do_OPTIONS = _echo

    def _json(self, status: int, found: dict) -> None:
        self._send(status, json.dumps(found).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("set-cookie", "a=1")
        self.send_header("set-cookie", "b=2")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that has left


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--name", default="fake")
    parser.add_argument("--load", type=float, default=0.0)
    parser.add_argument("--die-loading", action="store_true")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--child", action="store_true", help="has a child in a session of its own")
    asked = parser.parse_args()
    print(f"{asked.name} listens on {asked.port}", flush=True)
    if asked.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if asked.child:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    if secret := os.environ.get("FAKE_API_KEY"):
        print(f"the key is {secret}", flush=True)
    if asked.die_loading:
        print(
            "╭─ Error ─────────────────────╮\n│ out of memory: 3 GiB of 2 GiB │\n╰───────────────────────────────╯",
            flush=True,
        )
        sys.exit(7)
    Handler.engine = Engine(asked.name, asked.load, not asked.never_ready)
    Server(("127.0.0.1", asked.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
