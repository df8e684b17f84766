"""A repository on a Hugging Face hub, at one commit: small files whole, large ones in parts. No torch.

huggingface_hub knows endpoint, token, cache, listing and downloads (HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE).
What it lacks is here: ranges of bytes that go on where a connection broke, checked against what was asked for.
"""

import email.utils
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, ModelInfo, get_session, hf_hub_url
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,  # httpx's in release 1, httpx2's in release 2
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, disable_progress_bars

import stoker
from stoker.errors import StokerError
from stoker.weights.json_file import read_json

TIMEOUT = 60.0  # seconds without a byte
ATTEMPTS = 6
LARGEST_RANGE = 8 << 30  # bytes of a request: content networks refuse answers of more than 20 to 50 GB
LONGEST_WAIT = 300.0  # seconds; a server that asks for more is left alone
LOGIN = "log in with `hf auth login` (or set HF_TOKEN) and accept the model's terms on its page"
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
FAILURES = (HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled)
T = TypeVar("T")


class HubError(StokerError):
    """A hub that does not have, does not give, or does not keep what was asked for."""


class HubUnavailable(HubError):
    """A hub that cannot be reached, or is busy for too long. What was fetched stays; the same command goes on."""


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


@dataclass(frozen=True)
class ListedFile:
    """A file as the hub lists it. A hash is empty where the hub does not tell it."""

    name: str
    size: int
    sha256: str  # of the content; of large files only
    git_blob: str  # sha1 as git makes it: of the content of a small file, of the pointer to a large one


def parse_repository(text: str) -> tuple[str, str]:
    """hf:OWNER/NAME or hf:OWNER/NAME@REVISION -> repository and revision."""
    name, _, revision = text.removeprefix("hf:").partition("@")
    if not REPOSITORY.fullmatch(name) or (not revision and "@" in text):
        raise HubError(f"{text!r} names no repository; expected hf:OWNER/NAME or hf:OWNER/NAME@REVISION.")
    return name, revision or "main"


@dataclass
class Hub:
    """One repository at one revision."""

    repository: str
    revision: str
    endpoint: str | None = None  # None: HF_ENDPOINT, or the public hub
    token: str | bool | None = field(default=None, repr=False)  # None: HF_TOKEN or the login's; False: none
    sleep: Callable[[float], None] = time.sleep
    attempts: int = ATTEMPTS  # in a row without progress

    def __post_init__(self) -> None:
        self._api = HfApi(self.endpoint, self.token, library_name="stoker", library_version=stoker.__version__)
        disable_progress_bars("huggingface_hub.http_get")  # the build shows its own

    def pin(self) -> list[str]:
        """Turn a branch into the commit it stands at, so that all requests see the same files; returns their names."""
        return [file.rfilename for file in self._describe()]

    def files(self) -> list[ListedFile]:
        """Pins, too; names with sizes and hashes."""
        found = []
        for file in self._describe(files_metadata=True):
            if file.size is None:
                raise HubError(f"{self._api.endpoint} does not tell the size of {self._what(file.rfilename)}.")
            large = file.lfs
            found.append(ListedFile(file.rfilename, file.size, large.sha256 if large else "", file.blob_id or ""))
        return found

    def _describe(self, files_metadata: bool = False) -> list[RepoSibling]:
        what = f"{self.repository}@{self.revision}"

        def ask() -> ModelInfo:
            return self._api.model_info(
                self.repository, revision=self.revision, timeout=TIMEOUT, files_metadata=files_metadata
            )

        try:
            info = self._retry(what, ask)
        except (ValueError, KeyError, TypeError) as error:
            raise HubError(f"{self._api.endpoint} gave no description of {what} that makes sense ({error}).") from None
        if not isinstance(info.sha, str) or info.siblings is None:
            raise HubError(f"{self._api.endpoint} gave no commit and file list for {what}.")
        self.revision = info.sha
        return info.siblings

    def cached_file(self, name: str, cache: Path | None = None) -> Path:
        """A file by way of the cache that all tools of the hub share; nothing is sent if its content is there."""
        return Path(
            self._retry(
                self._what(name),
                lambda: self._api.hf_hub_download(
                    self.repository, name, revision=self.revision, cache_dir=cache, etag_timeout=TIMEOUT
                ),
            )
        )

    def json_file(self, name: str) -> dict[str, Any]:
        return read_json(self.cached_file(name))

    def stat(self, name: str) -> RemoteFile:
        """Size and etag, from the answer to a request for the first byte."""
        return self._retry(self._what(name), lambda: self._first_byte(name))

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        return b"".join(self.stream(file, start, stop))

    def stream(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes]:
        """Bytes `start` to `stop` in order; a cut connection is taken up again where it broke."""
        position, failures = start, 0
        while position < stop:
            end = min(stop, position + LARGEST_RANGE)
            try:
                for data in self._range(file.name, position, end, file):
                    data = data[: end - position]
                    position += len(data)
                    failures = 0
                    yield data
                if position < end:
                    raise _TryAgain(f"the connection was cut after {position - start:,} of {stop - start:,} bytes")
            except (_TryAgain, *FAILURES) as error:
                failures += 1
                self._back_off(self._what(file.name), error, failures)

    def _first_byte(self, name: str) -> RemoteFile:
        found: list[RemoteFile] = []
        for _ in self._range(name, 0, 1, seen=found.append):
            pass
        return found[0]

    def _range(
        self,
        name: str,
        start: int,
        stop: int,
        expected: RemoteFile | None = None,
        seen: Callable[[RemoteFile], None] = lambda file: None,
    ) -> Iterator[bytes]:
        """One request: the bytes as they arrive, once the answer has been checked against `expected`."""
        url = hf_hub_url(self.repository, name, revision=self.revision, endpoint=self._api.endpoint)
        headers = {**self._headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as answer:
            if url.startswith("https:") and answer.url.scheme != "https":
                raise HubError(f"{self._api.endpoint} redirects {name} to an unprotected address; nothing is read.")
            if answer.status_code >= 300:
                raise self._refusal(answer.status_code, answer.headers, self._what(name))
            file = self._check_range(answer.status_code, answer.headers, name, start, stop)
            if expected and file != expected:
                raise HubError(
                    f"{self._what(name)} changed while it was read (size {expected.size:,} and etag {expected.etag} "
                    f"before, {file.size:,} and {file.etag} now); start again."
                )
            seen(file)
            yield from answer.iter_raw()

    def _check_range(self, status: int, headers: Mapping[str, str], name: str, start: int, stop: int) -> RemoteFile:
        """The answer must be the range asked for, of a file whose size it tells."""
        if status != 206:
            raise HubError(
                f"{self._api.endpoint} answered a request for {stop - start:,} bytes of {name} with the whole file "
                f"(status {status}); it does not serve ranges, so fetch the repository with hf download."
            )
        given, length = headers.get("Content-Range") or "", headers.get("Content-Length")
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", given.strip())
        asked = (start, stop - 1)
        if not match or (int(match[1]), int(match[2])) != asked or length not in (None, str(stop - start)):
            raise HubError(
                f"{self._api.endpoint} was asked for bytes {start}-{stop - 1} of {name} and answered "
                f"{given or 'no range'} with {length or 'unknown'} bytes; nothing of it is used."
            )
        return RemoteFile(name, int(match[3]), headers.get("ETag") or "")

    def _what(self, name: str) -> str:
        return f"{self.repository}/{name}"

    def _headers(self) -> dict[str, str]:
        return build_hf_headers(token=self.token, library_name="stoker", library_version=stoker.__version__)

    def _refusal(self, status: int, headers: Mapping[str, str], what: str) -> Exception:
        endpoint = self._api.endpoint
        if status in (401, 403):
            given = "authorization" in self._headers()
            seen = "the token was not accepted" if given else "no token was given"
            if headers.get("X-Error-Code") == "GatedRepo":
                allowed = "the account of the token has no access to it yet" if given else seen
                return HubError(
                    f"{endpoint} refused {what} (status {status}): the repository is gated, and {allowed}. Accept its "
                    f"terms at {endpoint}/{self.repository}, then log in with `hf auth login` or set HF_TOKEN."
                )
            return HubError(
                f"{endpoint} refused {what} (status {status}, {seen}): it is private, gated or not there. "
                f"Check the name, or {LOGIN}."
            )
        if status == 404:
            return HubError(f"{endpoint} has no {what} (revision {self.revision}); check name and revision.")
        if status == 416:
            return HubError(f"{what} is shorter than its own header says (status 416); it is damaged or has changed.")
        if status in (408, 429) or status >= 500:
            return _TryAgain(f"{endpoint} answered {what} with status {status}", _retry_after(headers))
        return HubError(f"{endpoint} answered {what} with status {status}.")

    def _retry(self, what: str, once: Callable[[], T]) -> T:
        failures = 0
        while True:
            try:
                return once()
            except (_TryAgain, *FAILURES) as error:
                failures += 1
                self._back_off(what, error, failures)

    def _back_off(self, what: str, error: Exception, failures: int) -> None:
        """Waits before the next attempt; raises where there is no point in one."""
        reason = self._reason(what, error)
        if not isinstance(reason, _TryAgain):
            raise reason from None
        if failures >= self.attempts:
            raise HubUnavailable(
                f"{reason}, {failures} times in a row; run the same command later to go on from here."
            ) from None
        wait = reason.wait if reason.wait is not None else float(2 ** (failures - 1))
        if wait > LONGEST_WAIT:
            raise HubUnavailable(
                f"{reason} and asks to wait {wait:,.0f} s; run the same command then to go on from here."
            ) from None
        self.sleep(wait)

    def _reason(self, what: str, error: BaseException) -> Exception:
        """A failure in our words: _TryAgain where it may pass."""
        if isinstance(error, LocalEntryNotFoundError) and error.__cause__:  # "nor is it in the cache"
            error = error.__cause__
        if isinstance(error, _TryAgain):
            return error
        if isinstance(error, OfflineModeIsEnabled):
            return HubError(
                f"HF_HUB_OFFLINE is set, so {what} cannot be fetched; unset it, or name a directory instead of hf:REPO."
            )
        if isinstance(error, HfHubHTTPError):
            return self._refusal(error.response.status_code, error.response.headers, what)
        if isinstance(error, HTTPError):
            return _TryAgain(f"{self._api.endpoint} cannot be reached ({error or type(error).__name__})")
        return HubError(f"{self._api.endpoint} did not give {what}: {str(error).splitlines()[0]}")


def _retry_after(headers: Mapping[str, str]) -> float | None:
    text = (headers.get("Retry-After") or "").strip()
    if text.isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None
