"""Starting, draining and ending the server process."""

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
from stoker.engine.worker.spec import Buildable, EngineSpec
from stoker.errors import RequestError, StokerError
from stoker.server.app import create_app
from stoker.server.config import ServerConfig
from stoker.server.lifecycle.plan import Plan
from stoker.server.lifecycle.service import Service
from stoker.server.protocol import TimeoutProtocol
from stoker.speculate.choice import DraftChoice

log = logging.getLogger("stoker.server")
END_S = 5.0  # what connections may take to close once every request has ended


def serve(
    config: ServerConfig,
    plan: Plan,
    wrap: Callable[[Buildable], Buildable] = lambda spec: spec,
    announce: Callable[[str], object] = lambda address: None,
) -> None:
    """Serves until SIGTERM or SIGINT. Raises the StokerError that made the server impossible.

    `wrap` changes how the engine is built, for tests of its faults; `announce` is told the address once it is bound.
    """
    heap.limit_arenas()
    heap.unmap_large_blocks()
    spec = wrap(EngineSpec(config.directory, plan.engine, DraftChoice.parse(config.draft), config.device))
    failure = asyncio.run(_serve(config, plan, spec, announce))
    if failure:
        raise failure


async def _serve(
    config: ServerConfig, plan: Plan, spec: Buildable, announce: Callable[[str], object]
) -> StokerError | None:
    listening = listen(config.host, config.port)
    service = Service(config, plan, spec)
    await Server(service, announce).serve(sockets=[listening])
    return service.failure


def listen(host: str, port: int) -> socket.socket:
    """Bound before anything is loaded, so that a port that is taken is found out at once.

    With its protocol spelled out: on other sockets asyncio lets an event wait until the one before is acknowledged.
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


def _limits(service: Service) -> dict[str, Any]:
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
                http=type("Protocol", (TimeoutProtocol,), _limits(service)),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(config.drain_timeout + END_S),
                timeout_keep_alive=75,
            )
        )
        self._service, self._announce = service, announce
        service.on_end = self._end
        self._stopped_at: float | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The first signal drains, a second one ends at once. The exit code stays that of a clean end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_stop, number)
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

    def _told_to_stop(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stopped_at is not None:
            if time.monotonic() - self._stopped_at > 0.5:  # a terminal may send one signal to a whole group twice
                self.force_exit = True
                self._service.abort_all(f"the server was ended by a second {name}.")
            return
        self._stopped_at = time.monotonic()
        live, patience = len(self._service.live), self._service.config.drain_timeout
        log.info("%s: no more requests are taken; %d running ones have %.0f s to end", name, live, patience)
        self._end(f"the server was told to stop by {name} and this request did not end within {patience:.0f} s.")

    def _end(self, reason: str) -> None:
        """Running requests may end; those that have not by the drain timeout are told why."""
        self._service.draining = True
        self.should_exit = True
        asyncio.get_running_loop().call_later(self._service.config.drain_timeout, self._service.abort_all, reason)
