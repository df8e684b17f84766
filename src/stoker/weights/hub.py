"""Parts of files on a Hugging Face hub, by HTTP range: retried, resumed, and refused when they do not add up. No torch.

Standard library only. Knows requests, lengths and answers; which tensors are wanted is `build.fetch`'s business.
"""

import email.utils
import http.client
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any, TypeVar

from stoker.errors import StokerError
from stoker.weights.json_file import parse_json

ENDPOINT = "https://huggingface.co"
CHUNK = 1 << 20  # bytes handed on at a time
TIMEOUT = 60.0  # seconds without a byte
ATTEMPTS = 6  # in a row without progress
LONGEST_WAIT = 300.0  # seconds; a server that asks for more is left alone
LARGEST_JSON = 256 << 20
LOGIN = "log in with `hf auth login` (or set HF_TOKEN) and accept the model's terms on its page"
T = TypeVar("T")
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class HubError(StokerError):
    """A hub that does not have, does not give, or does not keep what was asked for."""


class _TryAgain(Exception):
    """A failure that may pass: a cut connection, a busy server."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True)
class RemoteFile:
    """A file as first seen; every later answer has to agree."""

    name: str
    size: int
    etag: str


def parse_repository(text: str) -> tuple[str, str]:
    """hf:OWNER/NAME or hf:OWNER/NAME@REVISION -> repository and revision."""
    name, _, revision = text.removeprefix("hf:").partition("@")
    if not REPOSITORY.fullmatch(name) or (not revision and "@" in text):
        raise HubError(f"{text!r} names no repository; expected hf:OWNER/NAME or hf:OWNER/NAME@REVISION.")
    return name, revision or "main"


def default_token() -> str:
    """HF_TOKEN, or what `hf auth login` wrote."""
    if token := os.environ.get("HF_TOKEN", "").strip():
        return token
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    path = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


@dataclass
class Hub:
    """One repository at one revision."""

    repository: str
    revision: str
    endpoint: str = field(default_factory=lambda: os.environ.get("HF_ENDPOINT", "").rstrip("/") or ENDPOINT)
    token: str = field(default_factory=default_token, repr=False)
    sleep: Callable[[float], None] = time.sleep
    fetched: int = 0  # bytes of bodies received

    def pin(self) -> list[str]:
        """Turn a branch into the commit it stands at, so that all requests see the same files; returns their names."""
        url = f"{self.endpoint}/api/models/{self.repository}/revision/{urllib.parse.quote(self.revision, safe='')}"
        answer = self._json(url, f"{self.repository}@{self.revision}")
        sha, siblings = answer.get("sha"), answer.get("siblings")
        if not isinstance(sha, str) or not isinstance(siblings, list):
            raise HubError(f"{self.endpoint} gave no commit and file list for {self.repository}@{self.revision}.")
        self.revision = sha
        return [str(entry["rfilename"]) for entry in siblings if isinstance(entry, dict) and "rfilename" in entry]

    def json_file(self, name: str) -> dict[str, Any]:
        return self._json(self._url(name), f"{self.repository}/{name}")

    def stat(self, name: str) -> RemoteFile:
        """Size and etag, from the answer to a request for the first byte."""
        return self._retry(lambda: self._first_byte(name))

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        return b"".join(self.stream(file, start, stop))

    def stream(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes]:
        """Bytes `start` to `stop` in order; a cut connection is taken up again where it broke."""
        position, failures = start, 0
        while position < stop:
            try:
                for data in self._range(file, position, stop):
                    position += len(data)
                    failures = 0
                    yield data
                if position < stop:
                    raise _TryAgain(f"the connection was cut after {position - start:,} of {stop - start:,} bytes")
            except _TryAgain as error:
                failures += 1
                self._back_off(error, failures)

    def _range(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes]:
        with self._open(self._url(file.name), f"{self.repository}/{file.name}", start, stop) as answer:
            found = self._check_range(answer, file.name, start, stop)
            if found != file:
                raise HubError(
                    f"{self.repository}/{file.name} changed while it was read (size {file.size:,} and etag {file.etag} "
                    f"before, {found.size:,} and {found.etag} now); start again."
                )
            left = stop - start
            while left:
                data = _read_some(answer, min(CHUNK, left))
                if not data:
                    return
                left -= len(data)
                self.fetched += len(data)
                yield data

    def _first_byte(self, name: str) -> RemoteFile:
        with self._open(self._url(name), f"{self.repository}/{name}", 0, 1) as answer:
            file = self._check_range(answer, name, 0, 1)
            self.fetched += len(_read_some(answer, 1))
            return file

    def _check_range(self, answer: http.client.HTTPResponse, name: str, start: int, stop: int) -> RemoteFile:
        """The answer must be the range asked for, of a file whose size it tells."""
        if answer.status != 206:
            raise HubError(
                f"{self.endpoint} answered a request for {stop - start:,} bytes of {name} with the whole file "
                f"(status {answer.status}); it does not serve ranges, so fetch the repository with hf download."
            )
        given = answer.headers.get("Content-Range") or ""
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", given.strip())
        length = answer.headers.get("Content-Length")
        asked = (start, stop - 1)
        if not match or (int(match[1]), int(match[2])) != asked or length not in (None, str(stop - start)):
            raise HubError(
                f"{self.endpoint} was asked for bytes {start}-{stop - 1} of {name} and answered "
                f"{given or 'no range'} with {length or 'unknown'} bytes; nothing of it is used."
            )
        return RemoteFile(name, int(match[3]), answer.headers.get("ETag") or "")

    def _json(self, url: str, what: str) -> dict[str, Any]:
        def once() -> bytes:
            with self._open(url, what) as answer:
                data = b""
                while len(data) <= LARGEST_JSON and (more := _read_some(answer, CHUNK)):
                    data += more
                expected = answer.headers.get("Content-Length")
                if expected is not None and int(expected) != len(data):
                    raise _TryAgain(f"{what} was cut after {len(data):,} of {int(expected):,} bytes")
                self.fetched += len(data)
                return data

        try:
            raw = parse_json(self._retry(once))
        except ValueError as error:
            raise HubError(f"{what} at {self.endpoint} is not valid JSON ({error}).") from None
        if not isinstance(raw, dict):
            raise HubError(f"{what} at {self.endpoint} is a JSON {type(raw).__name__}, expected an object.")
        return raw

    def _url(self, name: str) -> str:
        return f"{self.endpoint}/{self.repository}/resolve/{self.revision}/{urllib.parse.quote(name)}"

    def _open(self, url: str, what: str, start: int | None = None, stop: int = 0) -> http.client.HTTPResponse:
        request = urllib.request.Request(url, headers={"User-Agent": "stoker", "Accept-Encoding": "identity"})
        if self.token:
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        if start is not None:
            request.add_header("Range", f"bytes={start}-{stop - 1}")
        try:
            answer: http.client.HTTPResponse = _OPENER.open(request, timeout=TIMEOUT)
            return answer
        except urllib.error.HTTPError as error:
            error.close()
            raise self._refusal(error.code, error.headers, what) from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            raise _TryAgain(f"{self.endpoint} cannot be reached ({getattr(error, 'reason', error)})") from None

    def _refusal(self, status: int, headers: Message, what: str) -> Exception:
        if status in (401, 403):
            seen = "the token was not accepted" if self.token else "no token was given"
            return HubError(
                f"{self.endpoint} refused {what} (status {status}, {seen}): it is private, gated or not there. "
                f"Check the name, or {LOGIN}."
            )
        if status == 404:
            return HubError(f"{self.endpoint} has no {what} (revision {self.revision}); check name and revision.")
        if status == 416:
            return HubError(f"{what} is shorter than its own header says (status 416); it is damaged or has changed.")
        if status in (408, 429) or status >= 500:
            return _TryAgain(f"{self.endpoint} answered {what} with status {status}", _retry_after(headers))
        return HubError(f"{self.endpoint} answered {what} with status {status}.")

    def _retry(self, once: Callable[[], T]) -> T:
        failures = 0
        while True:
            try:
                return once()
            except _TryAgain as error:
                failures += 1
                self._back_off(error, failures)

    def _back_off(self, error: _TryAgain, failures: int) -> None:
        if failures >= ATTEMPTS:
            raise HubError(f"{error}, {failures} times in a row; run the same command later to go on from here.")
        wait = error.wait if error.wait is not None else float(2 ** (failures - 1))
        if wait > LONGEST_WAIT:
            raise HubError(f"{error} and asks to wait {wait:,.0f} s; run the same command then to go on from here.")
        self.sleep(wait)


class _SameScheme(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https only, never from https down to http, and shows the token to no other host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        scheme = urllib.parse.urlsplit(newurl).scheme
        if scheme not in ("http", "https") or (req.type == "https" and scheme != "https"):
            raise HubError(f"{req.host} redirects to {newurl!r:.80}, which is not followed.")
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following and following.host == req.host and req.has_header("Authorization"):
            following.add_unredirected_header("Authorization", str(req.get_header("Authorization")))
        return following


_OPENER = urllib.request.build_opener(_SameScheme)


def _read_some(answer: http.client.HTTPResponse, count: int) -> bytes:
    try:
        return answer.read(count)
    except http.client.IncompleteRead as error:
        return error.partial
    except (http.client.HTTPException, OSError):
        return b""  # what is missing is asked for again


def _retry_after(headers: Message) -> float | None:
    text = (headers.get("Retry-After") or "").strip()
    if text.isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None
