"""Which request a number is: its path, headers, body, and how the client behaves while it sends and reads."""

import gzip
from dataclasses import dataclass
from urllib.parse import quote

from tests.server.fuzz.draw import Draw
from tests.server.fuzz.mutate import broken, encode
from tests.server.fuzz.requests import GET_WEIGHT, GETS, POSTS

SEED = "2026-11"  # another one makes other requests of all numbers
JSON = ("content-type", "application/json")
Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Case:
    number: int
    method: str
    path: str
    headers: Headers
    body: bytes
    pieces: int = 0  # a chunked body of so many chunks; 0: one with a length
    cut: int | None = None  # the client leaves after so many bytes of the body
    read: int | None = None  # the client leaves after so many bytes of the answer
    malformed: bool = False  # it may be no HTTP, and is then refused in plain text

    def __str__(self) -> str:
        how = f"pieces={self.pieces} cut={self.cut} read={self.read}"
        shown = self.body if len(self.body) <= 3000 else self.body[:3000] + b"..."
        head = "\n".join(f"{name}: {value[:200]}" for name, value in self.headers)
        return f"case {self.number} ({how}, {len(self.body):,} bytes)\n{self.method} {self.path}\n{head}\n\n{shown!r}"


def case(number: int, seed: str = SEED) -> Case:
    draw = Draw(f"{seed}/{number}")
    weights = [(float(weight), path) for path, (weight, _) in POSTS.items()]
    path = draw.weighted(*weights, (GET_WEIGHT, ""))
    return _post(draw, number, path) if path else _get(draw, number)


def _post(draw: Draw, number: int, path: str) -> Case:
    made = POSTS[path][1](draw)
    made = broken(draw, made) if draw.chance(0.6) else made
    body = encode(made, ascii_only=draw.chance(0.6)).encode("utf-8", "surrogatepass")
    headers: Headers = (JSON,)
    kind = draw.weighted((80, "plain"), (8, "bytes"), (6, "headers"), (4, "coded"), (2, "method"))
    method, malformed = "POST", False
    if kind == "bytes":
        body = _damaged(draw, body)
    elif kind == "headers":
        headers, malformed = _odd_headers(draw)
    elif kind == "coded":
        headers, body = _coded(draw, body)
    elif kind == "method":
        method = draw.choice(("PUT", "PATCH", "DELETE", "OPTIONS", "GET", "TRACE", "HEAD"))
    leaving = draw.weighted((90, ""), (4, "cut"), (6, "read"))
    return Case(
        number,
        method,
        path,
        headers,
        body,
        pieces=draw.weighted((90, 0), (5, 1), (5, draw.randint(2, 50))),
        cut=draw.randrange(len(body)) if leaving == "cut" and body else None,
        read=draw.choice((0, 1, 200, 700)) if leaving == "read" else None,
        malformed=malformed,
    )


def _get(draw: Draw, number: int) -> Case:
    path, malformed = draw.choice(GETS), False
    headers: Headers = ()
    kind = draw.weighted((10, "plain"), (5, "path"), (2, "headers"), (1, "method"))
    if kind == "path":
        path = draw.choice(
            (
                "/v1/models/" + quote(draw.text(), safe=draw.choice(("", "/"))), "/page/..%2fapp.py", "/v1/", "//",
                "/.env", "/page/%2e%2e/app.py", "/%00", "/%ff%fe", "/health?" + "x=1&" * 500, "/v1/chat/completions",
                "/?a=%zz", "/" + "a" * 8000, "/v1/models/" + "%F0%9F%99%82" * 100, "/tokenize", "/metrics/",
                "/HEALTH", "/v1/files",
            )
        )  # fmt: skip
    elif kind == "headers":
        headers, malformed = _odd_headers(draw)
    method = draw.choice(("HEAD", "OPTIONS", "DELETE", "POST", "PUT")) if kind == "method" else "GET"
    return Case(number, method, path, headers, b"", malformed=malformed)


def _damaged(draw: Draw, body: bytes) -> bytes:
    kind = draw.choice(("truncated", "flipped", "inserted", "doubled", "bom", "utf-16", "noise", "empty"))
    place = draw.randrange(len(body) + 1)
    if kind == "truncated":
        return body[:place]
    if kind == "flipped":
        changed = bytearray(body)
        for _ in range(draw.randint(1, 8)):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    if kind == "inserted":
        return body[:place] + draw.randbytes(draw.randint(1, 30)) + body[place:]
    if kind == "utf-16":
        return body.decode("utf-8", "replace").encode("utf-16")
    others = {"doubled": body * 2, "bom": b"\xef\xbb\xbf" + body, "noise": draw.randbytes(draw.randint(1, 4000))}
    return others.get(kind, b"")


def _coded(draw: Draw, body: bytes) -> tuple[Headers, bytes]:
    """Bodies under other names, and in codings that nobody offered to read."""
    named = draw.choice(
        ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application/xml")
    )
    kind = draw.choice(("gzip", "form", "named", "named", "charset", "none"))
    if kind == "gzip":
        return (JSON, ("content-encoding", "gzip")), gzip.compress(body, mtime=0)
    if kind == "form":
        return (("content-type", "application/x-www-form-urlencoded"),), b"prompt=" + quote(body).encode()
    if kind == "charset":
        return (("content-type", f"application/json; charset={draw.choice(('latin-1', 'utf-7', '?'))}"),), body
    return ((("content-type", named),) if kind == "named" else ()), body


def _odd_headers(draw: Draw) -> tuple[Headers, bool]:
    """And whether they may be no HTTP."""
    polite: tuple[Headers, ...] = (
        (JSON, ("origin", draw.choice(("http://evil.example", "null", "http://[", "http://127.0.0.1")))),
        (JSON, ("host", draw.choice(("evil.example", "localhost:99999", "[::1", "127.0.0.1:x", "")))),
        (JSON, ("authorization", draw.choice(("Bearer x", "Basic !!!", "Basic eDp5", "Bearer", "x" * 3000)))),
        (JSON, ("sec-fetch-site", "cross-site")),
        (JSON, ("accept", draw.choice(("text/event-stream", "x/y", "", "*/*;q=2"))), ("accept-encoding", "br, zstd")),
        (JSON, ("expect", "100-continue")),
        (JSON, ("connection", draw.choice(("close", "keep-alive", "upgrade, x"))), ("keep-alive", "timeout=1")),
        (JSON, ("upgrade", draw.choice(("websocket", "h2c"))), ("connection", "upgrade"), ("sec-websocket-key", "x")),
        (JSON, *((f"x-h{i}", "v" * 20) for i in range(150))),
        (JSON, ("x-forwarded-for", "1.2.3.4"), ("x-forwarded-host", "evil.example"), ("forwarded", "for=x")),
        (
            JSON,
            ("anthropic-version", draw.choice(("2023-06-01", "x"))),
            ("anthropic-beta", draw.choice(("a-2025-01-01", "é" * 300))),
        ),
        (JSON, ("content-type", "text/plain"), ("x-stoker-omitted", "a")),
    )
    rude: tuple[Headers, ...] = (
        (JSON, ("content-length", draw.choice(("-1", "abc", "5, 7", "99999999999999999999", "1e3", "")))),
        (JSON, ("transfer-encoding", draw.choice(("gzip", "chunked, chunked", "identity", "x")))),
        (JSON, ("x-bad", draw.choice(("\x00", "a\x01b", "é", "\x7f")))),
        (JSON, ("bad name", "x")),
        (JSON, ("x-long", "y" * 100_000)),
        (JSON, ("", "x")),
    )
    malformed = draw.chance(0.3)
    return draw.choice(rude if malformed else polite), malformed
