"""A hub on 127.0.0.1 that serves a directory by range, and misbehaves on request."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class Fault:
    """What to do to the next request for a file whose name contains `file`."""

    file: str = ""
    status: int = 0  # answer with this status and nothing else
    headers: dict[str, str] = field(default_factory=dict)
    keep: int | None = None  # send only so many bytes of the body, then cut
    shift: int = 0  # serve a range so many bytes further on, and say so
    short: int = 0  # leave out so many bytes at the end and give the length of the rest
    whole: bool = False  # ignore the Range header
    etag: str = ""  # claim another etag


@dataclass
class StandInHub:
    directory: Path
    repository: str = "owner/model"
    faults: list[Fault] = field(default_factory=list)
    token: str = ""  # required when set
    redirect: bool = False  # send file requests on to another host, as a hub does to its CDN
    commit: str = COMMIT
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)  # path, range, authorization
    sent: int = 0  # bytes of weight files
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fault_for(self, name: str) -> Fault | None:
        hit = next((fault for fault in self.faults if fault.file in name), None)
        if hit:
            self.faults.remove(hit)
        return hit

    @contextmanager
    def running(self) -> Iterator["StandInHub"]:
        hub = self

        class Handler(_Handler):
            stand_in = hub

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.stand_in
        authorization = self.headers.get("Authorization")
        hub.requests.append((self.path, self.headers.get("Range"), authorization))
        on_cdn = self.path.startswith("/cdn/")
        if hub.token and not on_cdn and authorization != f"Bearer {hub.token}":
            return self._answer(401, b"")
        if self.path.startswith(f"/api/models/{hub.repository}/revision/"):
            if fault := hub.fault_for("api"):
                return self._answer(fault.status, b"", fault.headers)
            files = [{"rfilename": path.name} for path in sorted(hub.directory.iterdir())]
            info = {"id": hub.repository, "sha": hub.commit, "siblings": files}
            return self._answer(200, json.dumps(info).encode())
        match = re.fullmatch(rf"/{hub.repository}/resolve/([^/]+)/(.+)|/cdn/(.+)", self.path)
        name = (match[2] or match[3]) if match else ""
        path = hub.directory / name
        if not match or not path.is_file() or match[1] not in (hub.commit, None):
            return self._answer(404, b"")
        if hub.redirect and not on_cdn:
            headers = {"Location": f"http://localhost:{hub.port}/cdn/{name}", "X-Repo-Commit": hub.commit}
            linked = {"X-Linked-Size": str(path.stat().st_size), "X-Linked-ETag": f'"{name}"'}
            return self._answer(302, b"", headers | linked)
        return self._file(path, hub.fault_for(name) or Fault())

    def _file(self, path: Path, fault: Fault) -> None:
        if fault.status:
            return self._answer(fault.status, b"", fault.headers)
        data = path.read_bytes()
        headers = {"ETag": fault.etag or f'"{path.name}-{len(data)}"', "X-Repo-Commit": self.stand_in.commit}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if not asked or fault.whole:
            return self._answer(200, data, headers)
        start, stop = int(asked[1]) + fault.shift, int(asked[2]) + 1 + fault.shift
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        body = data[start : stop - fault.short]
        if path.suffix == ".safetensors":
            self.stand_in.sent += len(body)
        return self._answer(206, body, headers, fault.keep)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, keep: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:keep])
        if keep is not None:
            self.wfile.flush()
            self.close_connection = True
