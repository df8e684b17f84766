"""A hub on 127.0.0.1 that serves a directory as huggingface_hub asks for it, and misbehaves on request."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"
CHUNK = 1 << 16


@dataclass
class Fault:
    """What to do to the next request for a file whose name contains `file`. HEAD requests are spared."""

    file: str = ""
    status: int = 0  # answer with this status and nothing else
    headers: dict[str, str] = field(default_factory=dict)
    keep: int | None = None  # send only so many bytes of the body, then cut
    hold: threading.Event | None = None  # before the cut, wait for this
    shift: int = 0  # serve a range so many bytes further on, and say so
    short: int = 0  # leave out so many bytes at the end and give the length of the rest
    whole: bool = False  # ignore the Range header
    etag: str = ""  # claim another etag
    damage: bool = False  # change the first byte that is sent


@dataclass
class StandInHub:
    """A repository whose .safetensors files are large ones (LFS), named by their sha256."""

    directory: Path
    repository: str = "owner/model"
    faults: list[Fault] = field(default_factory=list)
    token: str = ""  # required when set
    gated: bool = False  # files need the token, their list does not
    xet: bool = False  # say that large files may be had by Xet, too, which is not spoken here
    redirect: bool = False  # send file requests on to another host, as a hub does to its CDN
    commit: str = COMMIT
    branches: dict[str, str] | None = None  # name -> commit; None: every name stands at `commit`
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)  # path, range, authorization
    sent: int = 0  # bytes of weight files
    sent_by_file: Counter[str] = field(default_factory=Counter)  # bytes of bodies that went out
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fault_for(self, name: str) -> Fault | None:
        hit = next((fault for fault in self.faults if fault.file in name), None)
        if hit:
            self.faults.remove(hit)
        return hit

    def stands_at(self, revision: str) -> str | None:
        return self.commit if self.branches is None else self.branches.get(revision)

    def listing(self, hashes: bool) -> list[dict[str, Any]]:
        found = []
        for path in sorted(path for path in self.directory.rglob("*") if path.is_file()):
            entry: dict[str, Any] = {"rfilename": path.relative_to(self.directory).as_posix()}
            if hashes:
                data = path.read_bytes()
                entry |= {"size": len(data), "blobId": git_blob(data)}
                if is_large(path):
                    entry["lfs"] = {"size": len(data), "sha256": sha256(data), "pointerSize": 135}
            found.append(entry)
        return found

    def tree(self) -> list[dict[str, Any]]:
        """The same as snapshot_download asks for it."""
        found = []
        for entry in self.listing(hashes=True):
            lfs = entry.get("lfs")
            more = {"lfs": {**lfs, "oid": lfs["sha256"]}} if lfs else {}
            found.append(
                {"type": "file", "path": entry["rfilename"], "size": entry["size"], "oid": entry["blobId"], **more}
            )
        return found

    @contextmanager
    def running(self) -> Iterator["StandInHub"]:
        hub = self

        class Handler(_Handler):
            stand_in = hub

        server = _Server(("127.0.0.1", 0), Handler)
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


def is_large(path: Path) -> bool:
    return path.suffix == ".safetensors"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""


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
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        listed = path.removeprefix(f"/api/models/{hub.repository}/revision/")
        on_cdn = path.startswith("/cdn/")
        if hub.token and not on_cdn and authorization != f"Bearer {hub.token}" and not (hub.gated and listed != path):
            refused = {"X-Error-Code": "GatedRepo"} if hub.gated else {}
            return self._answer(403 if authorization and hub.gated else 401, b"", refused)
        if listed != path:
            return self._list(listed, "blobs" in parts.query)
        if path == f"/api/models/{hub.repository}/tree/{hub.commit}":
            return self._answer(200, json.dumps(hub.tree()).encode())
        match = re.fullmatch(rf"/{hub.repository}/resolve/([^/]+)/(.+)|/cdn/(.+)", path)
        name = (match[2] or match[3]) if match else ""
        file = hub.directory / name
        if not match or not file.is_file() or match[1] not in (hub.commit, None):
            return self._answer(404, b"")
        if hub.redirect and not on_cdn:
            headers = {"Location": f"http://localhost:{hub.port}/cdn/{name}", "X-Repo-Commit": hub.commit}
            linked = {"X-Linked-Size": str(file.stat().st_size), "X-Linked-ETag": f'"{_etag(file)}"'}
            if hub.xet and is_large(file):
                linked |= {"X-Xet-Hash": "0" * 64, "X-Xet-Refresh-Route": f"{hub.endpoint}/xet"}
            return self._answer(302, b"", headers | linked)
        spared = self.command == "HEAD"
        return self._file(file, Fault() if spared else hub.fault_for(name) or Fault())

    def _list(self, revision: str, hashes: bool) -> None:
        hub = self.stand_in
        if fault := hub.fault_for("api"):
            return self._answer(fault.status, b"", fault.headers)
        commit = hub.commit if revision == hub.commit else hub.stands_at(revision)
        if commit is None:
            return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        info = {"id": hub.repository, "sha": commit, "siblings": hub.listing(hashes)}
        return self._answer(200, json.dumps(info).encode())

    def _file(self, path: Path, fault: Fault) -> None:
        if fault.status:
            return self._answer(fault.status, b"", fault.headers)
        data = path.read_bytes()
        headers = {"ETag": fault.etag or f'"{_etag(path)}"', "X-Repo-Commit": self.stand_in.commit}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if not asked or fault.whole:
            return self._answer(200, data, headers, fault)
        start, stop = int(asked[1]) + fault.shift, int(asked[2]) + 1 + fault.shift
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        body = data[start : stop - fault.short]
        if is_large(path):
            self.stand_in.sent += len(body)
        if fault.damage:
            body = bytes([body[0] ^ 1]) + body[1:]
        return self._answer(206, body, headers, fault)

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, fault: Fault | None = None
    ) -> None:
        fault = fault or Fault()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self._send(body[: fault.keep])
        if fault.keep is not None:
            if fault.hold:
                fault.hold.wait(60.0)
            self.close_connection = True

    def _send(self, body: bytes) -> None:
        name = unquote(urlsplit(self.path).path).rpartition("/")[2]
        with suppress(ConnectionError):
            for start in range(0, len(body), CHUNK):
                self.wfile.write(body[start : start + CHUNK])
                self.stand_in.sent_by_file[name] += len(body[start : start + CHUNK])
            self.wfile.flush()


def _etag(path: Path) -> str:
    data = path.read_bytes()
    return sha256(data) if is_large(path) else git_blob(data)
