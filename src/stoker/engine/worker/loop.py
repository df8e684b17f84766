"""The loop around an engine: commands in, a step, events out. The same in a process of its own and in a thread."""

import logging
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from stoker.engine.event import Event, Finish
from stoker.engine.worker import heap
from stoker.engine.worker.messages import (
    Answer,
    AskStats,
    Cancel,
    Command,
    Ended,
    Events,
    ReleaseMemory,
    Report,
    RequestBody,
    Shutdown,
    Submit,
)
from stoker.errors import EngineError, RequestError

if TYPE_CHECKING:
    from stoker.engine.engine import Engine

log = logging.getLogger("stoker.engine")
REST_S = 2.0  # without a step, until freed memory goes back to the system


class EngineLoop:
    """Owns the engine: nobody else may step it. Commands are obeyed between steps, all that are there before each."""

    def __init__(self, engine: "Engine", inbox: SimpleQueue[Command], send: Callable[[Report], None]) -> None:
        self._engine, self._inbox, self._send = engine, inbox, send
        self._engine_ids: dict[int, int] = {}  # by the client's id
        self._request_ids: dict[int, int] = {}  # and back
        self._outgoing: list[Event] = []
        self._shutdown: Shutdown | None = None
        self._steps = self._trimmed = 0  # made until now, and until freed memory was last given back
        self._stepped_at = 0.0

    def run(self) -> None:
        """Until it is told to stop or a step raises. After an exception nothing goes on: caches are in doubt."""
        try:
            while not self._over:
                for command in self._commands():
                    self._obey(command)
                self._flush()
                if not self._over and not self._engine.idle:
                    self._step()
                    self._flush()
            assert self._shutdown is not None
            self._send(Ended(EngineError(self._shutdown.reason)))
        except BaseException as error:
            log.exception("the engine failed in step %d", self._steps + 1)
            sentence = (
                f"the engine failed in step {self._steps + 1:,} with {type(error).__name__}: {error}. "
                f"{len(self._engine_ids)} requests were lost. Start it again."
            )
            self._send(Ended(EngineError(sentence, traceback.format_exc())))

    @property
    def _over(self) -> bool:
        return self._shutdown is not None and not (self._shutdown.drain and self._engine_ids)

    def _commands(self) -> Iterator[Command]:
        """All that have come; sleeps until one comes when there is nothing else to do."""
        try:
            yield self._next_command() if self._engine.idle else self._inbox.get_nowait()
            while True:
                yield self._inbox.get_nowait()
        except Empty:
            return

    def _next_command(self) -> Command:
        """Sleeps until one comes. Freed memory goes back to the system once no step has been made for a while."""
        while self._trimmed < self._steps:
            if time.monotonic() - self._stepped_at > REST_S:
                heap.trim()
                self._trimmed = self._steps
                break
            with suppress(Empty):
                return self._inbox.get(timeout=REST_S)
        return self._inbox.get()

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Cancel():
                engine_id = self._engine_ids.get(command.request_id)
                event = None if engine_id is None else self._engine.cancel(engine_id)
                if event:
                    self._pass_on(event)
            case AskStats():
                self._send(Answer(command.ticket, self._engine.stats()))
            case ReleaseMemory():
                released = self._engine.release_memory()
                log.warning("the prefix cache was given up, and %d bytes went back to the system", released)
            case Shutdown():
                self._shutdown = command

    def _submit(self, command: Submit) -> None:
        try:
            body: RequestBody = pickle.loads(command.body)
            mask = None if body.mask is None else body.mask()
            engine_id = self._engine.submit(body.prompt, body.sampling, body.depth, body.boundaries, mask)
        except RequestError as error:
            self._refuse(command.request_id, str(error))
        except BaseException as error:  # no sound request, or a panic of a library; the others have no part in it
            self._refuse(command.request_id, f"the request cannot be queued: {type(error).__name__}: {error}")
        else:
            self._engine_ids[command.request_id] = engine_id
            self._request_ids[engine_id] = command.request_id

    def _refuse(self, request_id: int, sentence: str) -> None:
        self._outgoing.append(Event(request_id, (), Finish.ERROR, error=sentence))

    def _step(self) -> None:
        events = self._engine.step()
        self._steps, self._stepped_at = self._steps + 1, time.monotonic()
        for event in events:
            self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        """An event of the engine, under the client's id."""
        request_id = self._request_ids[event.request_id]
        if event.finish:
            del self._request_ids[event.request_id], self._engine_ids[request_id]
        self._outgoing.append(replace(event, request_id=request_id))

    def _flush(self) -> None:
        """One message for all events there are."""
        if self._outgoing:
            self._send(Events(self._outgoing))
            self._outgoing = []
