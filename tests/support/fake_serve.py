"""A `stoker serve` for tests of `stoker up`: ready in a tenth of a second, with the answers that it is told to give.

It takes the real one's options and, among the recipe's arguments, `--fake KEY=VALUE`: `start` and `delay` (seconds
until it is ready, and of every answer), `wait=FILE` (it is not ready before that file is there), `hold=FILE` (while
that is there, answers wait from the one on whose number stands in it), `tools=none|other|broken` (calls no tool,
another one, or with no JSON), `cache=none` (finds no prompt again), `again=other|late` (another answer to a cached
prompt, from its beginning or later), `die=1` (ends while it starts). Its answers say the model's name. With
STOKER_API_KEY in its environment it asks for that key. Every request for an answer is a line of its output.
"""

import json
import math
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "--help" in sys.argv:  # it knows all options
    sys.exit()
TOKENS, TOKENS_PER_CHUNK = 16, 2  # of an answer
FAKE = dict(value.split("=", 1) for name, value in zip(sys.argv, sys.argv[1:], strict=False) if name == "--fake")
MODEL = sys.argv[sys.argv.index("--served-model-name") + 1]
PORT = int(sys.argv[sys.argv.index("--port") + 1])
KEY = os.environ.get("STOKER_API_KEY", "")
BEGAN = time.monotonic()
LOCK = threading.Lock()
SEEN: set[str] = set()  # prompts
COUNT = [0]  # answers


def held() -> float:
    try:
        with open(FAKE.get("hold", "")) as file:
            return int(file.read() or 0)
    except OSError:
        return math.inf


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        ready = time.monotonic() - BEGAN >= float(FAKE.get("start", 0))
        ready = ready and os.path.exists(FAKE.get("wait", "/"))
        if self.path == "/health":
            self._json(200, {})
        elif self.path == "/ready":
            self._json(200 if ready else 503, {"phase": "ready" if ready else "loading", "percent": 50})
        elif self._refused():
            pass
        elif self.path == "/metrics":
            self._send(200, b"vllm:num_requests_running 0\nvllm:generation_tokens_total 1\n", "text/plain")
        else:
            self._json(200, {"data": [{"id": MODEL, "owned_by": "stoker", "max_model_len": 4096}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self._refused():
            return
        if self.path == "/tokenize":
            text = asked.get("prompt") or " ".join(message["content"] for message in asked["messages"])
            self._json(200, {"count": len(text.split())})
            return
        prompt = json.dumps([asked["messages"], asked.get("tools")])
        with LOCK:
            cached, words = prompt in SEEN, len(prompt.split())
            SEEN.add(prompt)
            COUNT[0] += 1
            number = COUNT[0]
            print(f"answer {words}", flush=True)
        while number >= held():
            time.sleep(0.01)
        time.sleep(float(FAKE.get("delay", 0)))
        deltas = list(self._deltas(asked, cached))
        hits = 0 if FAKE.get("cache") == "none" else words // 2 * cached
        usage = {
            "prompt_tokens": words,
            "completion_tokens": sum(len(ids) for _, ids in deltas),
            "prompt_tokens_details": {"cached_tokens": hits},
        }
        if not asked.get("stream"):
            text = "".join(delta.get("content", "") for delta, _ in deltas)
            self._json(200, {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for delta, ids in deltas:
            self._event({"choices": [{"index": 0, "delta": delta, "token_ids": ids}]})
            time.sleep(0.002)
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _deltas(self, asked, cached):
        """Pieces of an answer with their token ids."""
        if asked.get("tools") and FAKE.get("tools") != "none":
            name = "get_time" if FAKE.get("tools") == "other" else asked["tools"][0]["function"]["name"]
            arguments = '{"city": "Par' if FAKE.get("tools") == "broken" else '{"city": "Paris"}'
            function = {"name": name, "arguments": arguments}
            yield {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]}, [1, 2, 3]
            return
        changed = {"other": 0, "late": 6}.get(FAKE.get("again", ""), TOKENS) if cached else TOKENS
        for place in range(min(asked.get("max_tokens", TOKENS), TOKENS) // TOKENS_PER_CHUNK):
            word = "other" if place >= changed else MODEL
            yield {"content": f"{word} {word} "}, [len(word), place]

    def _refused(self) -> bool:
        if KEY and self.headers.get("authorization") != f"Bearer {KEY}":
            self._json(401, {"error": {"message": "no key"}})
            return True
        return False

    def _event(self, data) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def _json(self, status: int, data) -> None:
        self._send(status, json.dumps(data).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that has left


if __name__ == "__main__":
    for name in ("HF_TOKEN", "STOKER_API_KEY"):
        if name in os.environ:
            print(f"{name} is {os.environ[name]}", flush=True)
    if "die" in FAKE:
        sys.exit("out of memory: 3 GiB of 2 GiB")
    Server(("127.0.0.1", PORT), Handler).serve_forever()
