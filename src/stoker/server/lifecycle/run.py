"""Starts, drains and stops the server process."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn

from stoker.engine.worker import heap
from stoker.engine.worker.process import PreparedProcess
from stoker.engine.worker.spec import Buildable, EngineSpec
from stoker.errors import RequestError, StokerError
from stoker.server.app import create_app
from stoker.server.config import ServerConfig
from stoker.server.lifecycle.plan import Plan
from stoker.server.lifecycle.service import Service
from stoker.server.protocol import TimeoutProtocol
from stoker.speculate.choice import DraftChoice

log = logging.getLogger("stoker.server")
END_S = 5.0  # that connections may take to close after the last request has ended


def serve(
    config: ServerConfig,
    plan: Plan,
    wrap: Callable[[Buildable], Buildable] = lambda spec: spec,
    announce: Callable[[str], object] = lambda address: None,
    prepared: PreparedProcess | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT. Raises the StokerError that made the server stop.

    `wrap` changes how the engine is built, for fault injection in tests; `announce` gets the address once it is bound.
    `prepared` becomes the first engine.
    """
    heap.limit_arenas()
    heap.unmap_large_blocks()
    spec = wrap(EngineSpec(config.directory, plan.engine, DraftChoice.parse(config.draft), config.device))
    failure = asyncio.run(_serve(config, plan, spec, announce, prepared))
    if failure:
        raise failure


async def _serve(
    config: ServerConfig,
    plan: Plan,
    spec: Buildable,
    announce: Callable[[str], object],
    prepared: PreparedProcess | None,
) -> StokerError | None:
    listening = listen(config.host, config.port)
    service = Service(config, plan, spec, prepared)
    await Server(service, announce).serve(sockets=[listening])
    return service.failure


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. It is bound before anything is loaded, so that a port in use is reported at once.

    The protocol is given explicitly because asyncio sets TCP_NODELAY only on such sockets; otherwise each event of a
    stream would wait until the previous one is acknowledged.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise RequestError(
            f"the server cannot listen on {host}, port {port}: {error.strerror}. Stop what listens there, or choose "
            "another --host or --port (0 takes a free one)."
        ) from error
    return listening


def _timeouts(service: Service) -> dict[str, Any]:
    config = service.config
    return {
        "body_timeout": config.body_timeout,
        "stall_timeout": config.stall_timeout,
        "requests_queued": staticmethod(lambda: len(service.live) > config.users),
    }


class Server(uvicorn.Server):
    def __init__(self, service: Service, announce: Callable[[str], object]) -> None:
        config = service.config
        super().__init__(
            uvicorn.Config(
                create_app(service),
                host=config.host,
                port=config.port,
                http=type("Protocol", (TimeoutProtocol,), _timeouts(service)),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(config.drain_timeout + END_S),
                timeout_keep_alive=75,
            )
        )
        self._service, self._announce = service, announce
        service.on_end = self._drain
        self._stopped_at: float | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The first signal drains, the second one stops at once. The exit code is that of a clean stop either way."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        for server in getattr(self, "servers", []):
            for bound in server.sockets:
                host, port = bound.getsockname()[:2]
                self._announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stopped_at is not None:
            if time.monotonic() - self._stopped_at > 0.5:  # a terminal may deliver one signal twice
                self.force_exit = True
                self._service.abort_all(f"the server was ended by a second {name}.")
            return
        self._stopped_at = time.monotonic()
        running, timeout = len(self._service.live), self._service.config.drain_timeout
        log.info("%s: no more requests are taken; %d running ones have %.0f s to end", name, running, timeout)
        self._drain(f"the server was told to stop by {name} and this request did not end within {timeout:.0f} s.")

    def _drain(self, reason: str) -> None:
        """Stops accepting requests. Running ones may finish until the drain timeout; the rest end with `reason`."""
        self._service.draining = True
        self.should_exit = True
        asyncio.get_running_loop().call_later(self._service.config.drain_timeout, self._service.abort_all, reason)
