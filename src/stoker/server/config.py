"""The configuration of `stoker serve`, validated when it is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from stoker.engine.config import KV_DTYPES
from stoker.errors import RequestError, brief
from stoker.sampling.settings import SAMPLED, Sampling, is_usable
from stoker.speculate.assumed import check_assumed
from stoker.speculate.choice import DraftChoice

MIB = 1 << 20


@dataclass(frozen=True)
class ServerConfig:
    directory: Path
    names: tuple[str, ...]  # clients may use any of them; responses carry the first
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    no_key: bool = False  # serving other machines without a key is intended
    allowed_hosts: tuple[str, ...] = ()  # further host names by which a proxy or a network reaches this server
    cors_origins: tuple[str, ...] = ()  # origins of web pages that may use the server from a browser; "*" allows all
    any_model: bool = False  # accept any model name in requests
    draft: str = "auto"
    context: int | None = None  # most tokens of one request; None: as many as the model and memory allow
    users: int = 8  # requests computed at the same time
    kv_dtype: str | None = None
    assume_acceptance: float | None = None  # tokens a step is to emit, its drafts accepted unseen; None: the truth
    device: str = "cpu"
    prompt_pause: float = 0.2  # s that the prompts of a step may keep running answers waiting
    queue: int = 64  # requests that may wait in addition to those that run
    memory: int | None = None  # bytes for weights and caches; None: all that is available
    reserve: int | None = None  # bytes that stay free; None: a share of the machine's memory
    prefix_cache: int | None = None  # bytes of kept recurrent states; None: a share of the caches
    max_body: int = 16 * MIB
    max_messages: int = 4096  # in one conversation
    request_timeout: float = 3600.0  # s from arrival to the last token
    body_timeout: float = 30.0  # s for the header of a request to arrive, and again for its body
    stall_timeout: float = 30.0  # s that an answer waits for a client that does not read
    step_timeout: float = 120.0  # s without an answer after which an engine is killed and restarted
    drain_timeout: float = 30.0  # s that running requests have to finish after SIGTERM
    template_options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, float] = field(default_factory=dict)  # defaults of requests, before generation_config.json's
    self_test: bool = True

    def __post_init__(self) -> None:
        check_assumed(self.assume_acceptance, DraftChoice.parse(self.draft))
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise RequestError(f"--kv-dtype is {self.kv_dtype!r}, expected {', '.join(KV_DTYPES)}.")
        for name, least in (("users", 1), ("queue", 0), ("port", 0), ("max_body", 1024), ("max_messages", 1)):
            if getattr(self, name) < least:
                option = name.replace("_", "-")
                raise RequestError(f"--{option} is {getattr(self, name)}, expected at least {least}.")
        if self.context is not None and self.context < 64:
            raise RequestError(f"--context is {self.context}, expected at least 64 tokens.")
        if not self.prompt_pause > 0:
            raise RequestError(f"--prompt-pause is {self.prompt_pause}, expected more than 0 seconds.")
        if self.port > 65535:
            raise RequestError(f"--port is {self.port}, expected 0 to 65535.")
        if self.api_key is not None and not self.api_key.strip():
            raise RequestError("--api-key is empty. Give a key, or leave the option out to serve without one.")
        if self.api_key is not None and self.no_key:
            raise RequestError("--no-key and an API key (--api-key or STOKER_API_KEY) are both given. Leave one out.")
        self._check_sampling()
        for host in self.allowed_hosts:
            if not host or "/" in host or (":" in host and not host.startswith("[")):
                raise RequestError(f"--allowed-host is {host!r}, expected a name without a port, such as llm.example.")
        for origin in self.cors_origins:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and (not scheme or not rest or "/" in rest):
                raise RequestError(
                    f"--cors-origin is {origin!r}, expected * or an origin such as https://chat.example."
                )

    def _check_sampling(self) -> None:
        """Wrong defaults are refused here, since every request that leaves them open would fail."""
        for name, value in self.sampling.items():
            if name not in SAMPLED:
                raise RequestError(f"--default-sampling has {brief(name)}, expected {', '.join(SAMPLED)}.")
            if not is_usable(value):
                raise RequestError(f"--default-sampling: {name} is {brief(value)}, expected a number.")
        given: dict[str, Any] = {name: value for name, value in self.sampling.items() if (name, value) != ("top_k", -1)}
        try:
            Sampling(**given)
        except RequestError as error:
            raise RequestError(f"--default-sampling: {error}") from error

    @property
    def open_to_all(self) -> bool:
        """Whether other machines are served without a key."""
        return self.api_key is None and not self.loopback

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False
