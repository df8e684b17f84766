"""The keeper of a service: `python -m stoker.up.keeper FOLDER --host HOST --port PORT`.

One process that owns the public address, starts and watches engines, and changes them safely. It is told what to do
over a unix socket (control.py); what it knows is in service.json, from which it goes on after a crash or a reboot.
"""

import argparse
import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal

import msgspec
from aiohttp import web

from stoker.engines.engine import KEYS, Deployment
from stoker.errors import StokerError
from stoker.up import state, systemd
from stoker.up.control import KEEPER_LOCK, KEEPER_LOG, SOCKET, Apply, not_free
from stoker.up.front import RETRY_S, Front
from stoker.up.instance import Running
from stoker.up.launcher import GRACE_S, LEFT_S, PR_SET_CHILD_SUBREAPER, prctl
from stoker.up.state import Instance, Process, Service, Status
from stoker.up.watch import Fault, Power, Timing, environment_timing

log = logging.getLogger("stoker.up")

KEPT_LOGS = 4  # of instances
LONGEST_RETRY_S = 60  # clients of OpenAI's library follow no longer advice
DEAD_GRACE_S = 0.5  # that remains of an engine with a fault have between SIGTERM and SIGKILL
LOCK_S = 0.5  # commands that ask whether the lock is free hold it for a moment
KEEPER_LOG_BYTES = 1 << 20


class Keeper:
    def __init__(self, folder: Path, host: str, port: int, timing: Timing) -> None:
        self._folder, self._timing = folder, timing
        self._front = Front(self._why)
        saved = state.read_file(folder / "service.json")
        self._service = Service(host, port, Process.of(os.getpid()), Status(folder.name, "", os.getpid()))
        self._service.logs = saved.logs if saved else 0
        self._leftovers = saved.engines if saved else []
        self._left = saved.status.serving.deployment if saved and saved.status.serving and not saved.stopped else None
        self._asked_key = saved.asks_key if saved else False
        self._serving: Running | None = None
        self._candidate: Running | None = None
        self._retiring: dict[Running, asyncio.Task[None]] = {}
        self._rejected = ""  # the latest change that did not come to pass
        self._changing = asyncio.Lock()
        self._power = Power()
        self._unsaved = b""
        self._saving: asyncio.Task[None] | None = None
        self._end = asyncio.Event()
        self._stopping = False

    async def run(self) -> None:
        """Until it is told to stop. Raises StokerError if the address is taken."""
        service = self._service
        try:
            service.port = await self._front.listen(service.host, service.port)
        except OSError as error:
            await self._front.close()
            raise not_free(service.host, service.port, error) from error
        service.status.url = _url(service.host, service.port)
        await self._end_leftovers()
        if self._left:
            self._start_again(self._left)
        self._save()
        runner = web.AppRunner(self._control(), access_log=None)
        await runner.setup()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET)
        await web.UnixSite(runner, SOCKET).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._end.set)
        log.info("listening on %s", service.status.url)
        power = asyncio.create_task(self._power.watch(lambda: self._serving is not None and self._serving.busy))
        await self._end.wait()
        power.cancel()
        self._stopping = True
        await self._stop_all()
        await runner.cleanup()
        await self._front.close()
        self._save()
        await self._saved()

    def _start_again(self, left: Deployment) -> None:
        """What was accepted before. Whoever had asked clients for a key must not answer everybody now."""
        self._serving = serving = self._new(left, os.environ)
        if self._asked_key and not serving.asks_key:
            key, file = KEYS[left.engine], systemd.secrets_file(self._folder.name)
            serving.data.state = "failed"
            serving.data.fault = (
                f"clients needed a key, {key}, which its keeper does not have now, and without it everybody would be "
                f"answered: set it and run stoker up; for a service under systemd write it into {file}"
            )
            log.error("%s: %s", left.recipe, serving.data.fault)
            return
        log.info("starting %s again, which was accepted before", left.recipe)
        serving.task = asyncio.create_task(self._keep(serving))

    async def _end_leftovers(self) -> None:
        """Waits for engines of a keeper that was killed: their memory is needed. They end by themselves."""
        until = time.monotonic() + GRACE_S + LEFT_S
        while alive := [each for each in self._leftovers if each.alive]:
            if time.monotonic() > until:
                for each in alive:
                    log.warning("the engine of an earlier keeper is killed (pid %d)", each.pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(each.pid, signal.SIGKILL)
            await asyncio.sleep(0.05)

    # -- what is said over the socket

    def _control(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/status", self._answer(self._status))
        for path, call in (
            ("/apply", self._apply),
            ("/accept", self._accept),
            ("/reject", self._reject),
            ("/stop", self._stop),
        ):
            app.router.add_post(path, self._answer(call))
        return app

    def _answer(self, call: Callable[[bytes], Awaitable[object]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            try:
                found = await call(await request.read())
                if request.method == "POST":
                    await self._saved()
            except (StokerError, msgspec.MsgspecError) as error:
                return web.Response(status=409, text=str(error))
            return web.Response(body=msgspec.json.encode(found), content_type="application/json")

        return handle

    async def _status(self, body: bytes) -> Status:
        self._update()
        return self._service.status

    async def _apply(self, body: bytes) -> None:
        asked = msgspec.json.decode(body, type=Apply)
        async with self._changing:
            if self._candidate and self._candidate.data.state != "failed":
                name = self._candidate.data.deployment.recipe
                raise StokerError(f"{name} is a candidate already: accept or reject it first.")
            await self._drop_candidate()
            self._candidate = candidate = self._new(asked.deployment, asked.environment)
            log.info("candidate %s, %s", asked.deployment.recipe, asked.mode)
            candidate.task = asyncio.create_task(self._try(candidate, asked.mode))
            self._save()

    async def _accept(self, body: bytes) -> None:
        async with self._changing:
            candidate, old = self._candidate, self._serving
            if candidate is None or candidate.data.state != "ready":
                raise StokerError("there is no candidate that is ready, so there is nothing to accept.")
            log.info("%s is accepted", candidate.data.deployment.recipe)
            self._serving, self._candidate, self._rejected = candidate, None, ""
            self._front.backend = candidate.backend
            self._service.stopped = False
            if old:
                self._retire(old)
            self._save()

    async def _reject(self, body: bytes) -> None:
        reason = str(msgspec.json.decode(body).get("reason", ""))
        async with self._changing:
            if self._candidate is None:
                raise StokerError("there is no candidate to reject.")
            self._rejected = f"{self._candidate.data.deployment.recipe} was not taken over: {reason}"
            log.info("%s", self._rejected)
            await self._drop_candidate()
            self._roll_back()
            self._save()

    async def _stop(self, body: bytes) -> None:
        """The accepted engine will not be started again by itself."""
        now = msgspec.json.decode(body).get("now") is True
        async with self._changing:
            self._service.stopped = self._stopping = True
            await self._stop_all(0.0 if now else None)
        self._end.set()

    # -- engines

    def _new(self, deployment: Deployment, environment: Mapping[str, str]) -> Running:
        self._service.logs += 1
        number = self._service.logs
        path = self._folder / f"engine-{number}.log"
        for old in self._folder.glob("engine-*.log*"):
            if int(old.name.split("-")[1].split(".")[0]) <= number - KEPT_LOGS:
                old.unlink(missing_ok=True)
        data = Instance(deployment, log=str(path))
        return Running(
            data, self._folder / f"run-{number}", environment, self._timing, self._save, lambda: self._power.idle
        )

    async def _try(self, candidate: Running, mode: Literal["beside", "swap"]) -> None:
        """A candidate, and once it is accepted, the engine that serves. Fails at its first fault before that."""
        old = self._serving
        try:
            if self._retiring:
                await asyncio.wait(self._retiring.values())  # their memory is needed
            if mode == "swap" and old and old.data.state != "failed":
                await self._withdraw(old)
            await candidate.start()
            await candidate.until_ready()
            if mode == "swap" and old:
                asyncio.get_running_loop().call_later(self._timing.accept_s, self._expire, candidate)
            await candidate.watch()
        except Exception as error:
            fault = _fault(error)
        if candidate is self._serving:
            await self._restart(candidate, fault)
            await self._keep(candidate)
            return
        log.error("candidate %s: %s", candidate.data.deployment.recipe, fault)
        candidate.data.state, candidate.data.fault = "failed", fault
        self._rejected = f"{candidate.data.deployment.recipe} was not taken over: {fault}"
        self._save()
        await candidate.stop(DEAD_GRACE_S)
        self._roll_back()
        self._save()

    def _expire(self, candidate: Running) -> None:
        """Nobody is served while a candidate that took the place of another engine waits to be accepted."""
        if candidate is self._candidate and candidate.data.state == "ready":
            reason = f"nobody accepted it within {self._timing.accept_s:g} s"
            self._expiring = asyncio.create_task(self._reject(msgspec.json.encode({"reason": reason})))

    async def _keep(self, running: Running) -> None:
        """Keeps the accepted engine up, with restarts, until it is withdrawn or has failed."""
        while running.data.state != "failed":
            try:
                if not running.up:
                    await running.start()
                await running.until_ready()
                if running is self._serving:  # no other one was accepted just now
                    self._front.backend = running.backend
                self._save()
                began_at = time.monotonic()
                try:
                    await running.watch()
                finally:
                    if time.monotonic() - began_at > self._timing.stable_s:
                        running.in_a_row = 0
            except Exception as error:
                await self._restart(running, _fault(error))

    async def _restart(self, running: Running, fault: str) -> None:
        """Ends what is left, and waits before the next start; or marks it as failed."""
        self._leave(running)
        name, most = running.data.deployment.recipe, running.data.deployment.restarts
        log.error("%s: %s", name, fault)
        if running.count_faults(1, fault):
            running.data.state = "restarting"
            running.count_restarts(1)
            self._save()
            await running.stop(DEAD_GRACE_S)
            await asyncio.sleep(self._timing.backoff(running.in_a_row))
        else:
            running.data.state = "failed"
            running.data.fault = f"{fault} (after {most} restarts in a row)"
            log.error("%s has failed after %d restarts in a row", name, most)
            self._save()
            await running.stop(DEAD_GRACE_S)

    async def _withdraw(self, running: Running, drain_s: float | None = None) -> None:
        """Takes no more requests to it, lets those under way end, and ends it. It stays what is accepted."""
        drain_s = running.data.deployment.drain_timeout_s if drain_s is None else drain_s
        self._leave(running)
        await _cancel(running.task)
        running.data.state = "draining"
        self._save()
        if running.backend:
            await running.backend.drain(drain_s)
        await running.stop(self._timing.grace_s)
        running.data.state = "stopped"
        self._save()

    def _leave(self, running: Running) -> None:
        """New requests do not go to it any more."""
        if self._front.backend is running.backend:
            self._front.backend = None

    def _retire(self, running: Running) -> None:
        """Withdraws it in the background, and forgets it."""

        async def retire() -> None:
            await self._withdraw(running)
            running.close()
            del self._retiring[running]
            self._save()

        self._retiring[running] = asyncio.create_task(retire())

    async def _drop_candidate(self) -> None:
        if candidate := self._candidate:
            await _cancel(candidate.task)
            await candidate.stop(self._timing.grace_s)
            candidate.close()
            self._candidate = None

    def _roll_back(self) -> None:
        """Starts the accepted engine again if it gave way to a candidate."""
        old = self._serving
        if old and old.data.state in ("draining", "stopped"):
            log.info("%s is started again", old.data.deployment.recipe)
            old.in_a_row = 0
            old.task = asyncio.create_task(self._keep(old))

    async def _stop_all(self, drain_s: float | None = None) -> None:
        async with asyncio.TaskGroup() as group:
            if self._serving and self._serving.data.state != "stopped":
                group.create_task(self._withdraw(self._serving, drain_s))
            group.create_task(self._drop_candidate())
            for task in self._retiring.values():
                group.create_task(_wait(task))
        if self._serving:
            self._serving.close()

    # -- what is known

    def _save(self) -> None:
        """Begins to write down what is known now: a disk that is slow or busy must not keep clients waiting."""
        self._update()
        self._unsaved = msgspec.json.encode(self._service)
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while text := self._unsaved:
            self._unsaved = b""
            try:
                await asyncio.to_thread(state.write, self._folder / "service.json", msgspec.Raw(text))
            except StokerError as error:
                log.error("%s", error)

    async def _saved(self) -> None:
        if self._saving:
            await asyncio.shield(self._saving)

    def _update(self) -> None:
        service, status = self._service, self._service.status
        serving, candidate, retiring = self._serving, self._candidate, list(self._retiring)
        running = [each for each in (serving, candidate, *retiring) if each]
        service.engines = [process for each in running for process in each.processes]
        service.asks_key = bool(serving and (serving.asks_key or (self._asked_key and not serving.task)))
        status.serving = serving.data if serving else None
        status.candidate = candidate.data if candidate else None
        status.draining = [each.data for each in retiring]
        status.state = self._state()
        status.warnings = [text for text in (self._rejected, self._power.warning) if text]
        if serving and (recent := serving.recent_restarts()) > 1:
            status.warnings.append(f"it was restarted {recent} times within the last hour")

    def _state(self) -> Literal["empty", "starting", "serving", "restarting", "failed", "switching"]:
        serving, candidate = self._serving, self._candidate
        if candidate and candidate.data.state != "failed":
            return "switching" if serving else "starting"
        if serving is None:
            return "failed" if candidate else "empty"
        if serving.data.state == "failed":
            return "failed"
        if self._front.backend is not None:
            return "serving"
        return "restarting" if serving.data.restarts else "starting"

    def _why(self) -> tuple[str, int]:
        """For clients, while no engine serves."""
        if self._stopping:
            return "The service is being stopped.", LONGEST_RETRY_S
        found = self._candidate or self._serving
        now = self._state()
        if found is None or now == "empty":
            return "No model is deployed yet. Try again soon.", RETRY_S
        name = found.data.deployment.model_name
        if now == "failed":
            return f"The engine of {name} has failed; `stoker status` says why.", LONGEST_RETRY_S
        phase = f" ({found.data.phase.name})" if found.data.phase else ""
        what = {"switching": "is being changed", "restarting": "is being started again"}.get(now, "is being started")
        retry_s = found.expected_s() or RETRY_S
        return f"The engine of {name} {what}{phase}. Try again soon.", min(math.ceil(retry_s), LONGEST_RETRY_S)


def _fault(error: Exception) -> str:
    if not isinstance(error, Fault):
        log.error("the keeper did not expect this", exc_info=error)
        return f"{type(error).__name__}: {error}"
    return str(error)


async def _cancel(task: "asyncio.Task[None] | None") -> None:
    """A task that must not be the one that asks for it."""
    if task and task is not asyncio.current_task():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _wait(task: "asyncio.Task[None]") -> None:
    await task


def _url(host: str, port: int) -> str:
    """Where a client on this machine reaches it."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="stoker.up.keeper", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    os.umask(0o077)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)  # connections
    folder = asked.folder.absolute()
    os.chdir(folder)  # the path of a socket may have 107 bytes only
    handler = RotatingFileHandler(folder / KEEPER_LOG, maxBytes=KEEPER_LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    with state.lock_file(folder / KEEPER_LOCK, "the keeper", LOCK_S) as holder:
        if holder is not None:
            sys.exit(0)  # another one was faster
        try:
            asyncio.run(Keeper(folder, asked.host, asked.port, environment_timing()).run())
        except StokerError as error:
            log.error("%s", error)
            sys.exit(2)
        except Exception:
            log.exception("the keeper failed")
            raise


if __name__ == "__main__":
    main()
