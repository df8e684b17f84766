"""Worker processes that compile a grammar and compute masks, as the engine sees them. Nothing here waits for one.

Requests with the same grammar share a worker, which compiles it once. A worker that takes too long or dies costs the
request whose question it was answering. The other requests ask a new worker again: a mask depends on the output alone.
"""

import json
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple

from stoker.engine.grammar.fork_server import Child, Crashed, ForkServer
from stoker.errors import RequestError

if TYPE_CHECKING:
    from stoker.engine.grammar.mask import GrammarMask

START_S = 60.0  # for a worker to begin: the fork server may have to load the tokenizer first
COMPILE_S = 10.0  # for a grammar that the server has checked in less
LINE_BYTES = 32 * 1024  # of questions a busy worker is sent: what surely fits its socket
KEPT = 2  # workers without a request that stay, for a client that comes back with the same tools
KEPT_BYTES = 16 * 2**20  # that such a worker may have grown by


class Question(NamedTuple):
    mask: "GrammarMask"
    message: bytes
    seconds: float


@dataclass(eq=False)
class Worker:
    """A child process with one grammar, shared by all requests that have it."""

    server: ForkServer
    lark: str
    longest: int  # bytes of an answer
    masks: "set[GrammarMask]" = field(default_factory=set)
    unsent: deque[Question] = field(default_factory=deque)
    line: deque[Question] = field(default_factory=deque)  # sent; the child is working on the first
    failure: RequestError | None = None  # for all later questions
    grown: int = 0  # upper bound of the bytes that it does not share with the fork server

    def __post_init__(self) -> None:
        self._child: Child = self.server.fork()
        self._compiled: bool | None = None  # None: the child has not started yet
        self._since = time.monotonic()
        self._next = 0
        self._ended: list[int] = []  # requests whose state it may drop

    @property
    def connection(self) -> Connection:
        return self._child.connection

    @property
    def idle(self) -> bool:
        """Whether the child is idle, which means that it reads what it is sent."""
        return self._compiled is True and not self.line and not self.unsent and self.failure is None

    def number(self) -> int:
        """A number for a new request."""
        self._next += 1
        return self._next

    def poll(self) -> None:
        """Receives available answers, sends what can be sent, and fails on a time limit. Never blocks."""
        try:
            while self.failure is None and self.connection.poll():
                self._receive()
            self._send()
        except (Crashed, OSError, ValueError, LookupError, TypeError):  # it died, or its answer is malformed
            self._fail(Crashed())
            return
        limit = self.line[0].seconds if self.line else COMPILE_S if self._compiled is False else START_S
        if (self.line or not self._compiled) and time.monotonic() - self._since > limit:
            what = f"{limit:.3g} s for the masks of one step" if self._compiled else f"{limit:g} s to compile"
            self._fail(RequestError(f"the grammar is too complex: it takes more than {what}. Simplify it."))

    def remove(self, mask: "GrammarMask", number: int) -> None:
        """Removes a request. A worker that is busy with no other request is killed at once."""
        self.masks.discard(mask)
        self.unsent = deque(question for question in self.unsent if question.mask is not mask)
        self._ended.append(number)
        if not self.masks and not self.idle:
            self.end(RequestError("nobody waits for this grammar any more."))
        self.poll()

    def end(self, failure: RequestError) -> None:
        self.failure = self.failure or failure
        self._child.kill()

    def _receive(self) -> None:
        found = self._child.receive(self.longest)
        now = time.monotonic()
        if found is None:  # the greeting: the child has started and reads
            self._compiled = False
            self._child.send(self.lark.encode())
        elif not self._compiled:
            self._compiled = True
            if error := found[0]["error"]:
                self._fail(RequestError(f"the grammar cannot be used: {error}"))
        else:
            question = self.line.popleft()
            self.grown = int(found[0]["grown"])
            question.mask.answered(found[0], found[1], now - self._since)
        self._since = now

    def _send(self) -> None:
        if self._ended and self.idle:
            self._child.send(json.dumps({"forget": self._ended}).encode())
            self._ended = []
        while self.unsent and self._compiled and self.failure is None:
            question = self.unsent[0]
            if self.line and sum(len(each.message) for each in (*self.line, question)) > LINE_BYTES:
                return
            if not self.line:
                self._since = time.monotonic()
            self._child.send(question.message)  # if the child has died already, this question is not the cause
            self.line.append(self.unsent.popleft())

    def _fail(self, error: RequestError) -> None:
        """Kills the child. The request that it was working on fails; while it compiles, all requests do."""
        at_fault = [self.line[0].mask] if self.line else [] if self._compiled else list(self.masks)
        self.end(error)
        for mask in list(self.masks):
            mask.lost(error if mask in at_fault else None)


class Workers(threading.local):
    """The workers of one engine, which is stepped by one thread."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[ForkServer, str], Worker] = OrderedDict()

    def get(self, server: ForkServer, lark: str, longest: int) -> Worker:
        worker = self._found.pop((server, lark), None)
        if worker is None or worker.failure is not None:
            worker = Worker(server, lark, longest)
        self._found[server, lark] = worker
        return worker

    def evict(self) -> None:
        """Evicts unused workers, except for the last few small ones."""
        kept = 0
        for key, worker in reversed(list(self._found.items())):
            if worker.masks and worker.failure is None:
                continue
            kept += 1
            if worker.failure is not None or kept > KEPT or worker.grown > KEPT_BYTES:
                worker.end(RequestError("it is not used any more."))
                del self._found[key]


WORKERS = Workers()
