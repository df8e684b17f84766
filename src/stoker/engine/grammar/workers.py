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
    """A child process with one grammar, for all requests that have it."""

    server: ForkServer
    lark: str
    longest: int  # bytes of an answer
    masks: "set[GrammarMask]" = field(default_factory=set)
    unsent: deque[Question] = field(default_factory=deque)
    line: deque[Question] = field(default_factory=deque)  # sent; the child is at the first
    failure: RequestError | None = None  # for whoever asks from now on
    grown: int = 0  # bytes beside those that it shares with the fork server, at most

    def __post_init__(self) -> None:
        self._child: Child = self.server.fork()
        self._compiled: bool | None = None  # None: not there yet
        self._since = time.monotonic()
        self._next = 0
        self._ended: list[int] = []  # requests that it may forget

    @property
    def connection(self) -> Connection:
        return self._child.connection

    @property
    def resting(self) -> bool:
        """Whether it waits for questions, so that it reads what it is sent."""
        return self._compiled is True and not self.line and not self.unsent and self.failure is None

    def number(self) -> int:
        """For a request that comes to it."""
        self._next += 1
        return self._next

    def poll(self) -> None:
        """Takes the answers that are there, sends what can be sent, and gives up what takes too long. Never waits."""
        try:
            while self.failure is None and self.connection.poll():
                self._take()
            self._send()
        except (Crashed, OSError, ValueError, LookupError, TypeError):  # gone, or what it says makes no sense
            self._fail(Crashed())
            return
        limit = self.line[0].seconds if self.line else COMPILE_S if self._compiled is False else START_S
        if (self.line or not self._compiled) and time.monotonic() - self._since > limit:
            what = f"{limit:.3g} s for the masks of one step" if self._compiled else f"{limit:g} s to compile"
            self._fail(RequestError(f"the grammar is too complex: it takes more than {what}. Simplify it."))

    def leave(self, mask: "GrammarMask", number: int) -> None:
        """Nobody waits for this request any more. A worker that is busy with it alone is ended at once."""
        self.masks.discard(mask)
        self.unsent = deque(question for question in self.unsent if question.mask is not mask)
        self._ended.append(number)
        if not self.masks and not self.resting:
            self.end(RequestError("nobody waits for this grammar any more."))
        self.poll()

    def end(self, failure: RequestError) -> None:
        self.failure = self.failure or failure
        self._child.kill()

    def _take(self) -> None:
        found = self._child.receive(self.longest)
        now = time.monotonic()
        if found is None:  # it is there, and reads
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
        if self._ended and self.resting:
            self._child.send(json.dumps({"forget": self._ended}).encode())
            self._ended = []
        while self.unsent and self._compiled and self.failure is None:
            question = self.unsent[0]
            if self.line and sum(len(each.message) for each in (*self.line, question)) > LINE_BYTES:
                return
            if not self.line:
                self._since = time.monotonic()
            self._child.send(question.message)  # if it is gone already, this question is not to blame
            self.line.append(self.unsent.popleft())

    def _fail(self, error: RequestError) -> None:
        """Ends it. Who was being answered fails; before anything was compiled, that is everybody."""
        suspects = [self.line[0].mask] if self.line else [] if self._compiled else list(self.masks)
        self.end(error)
        for mask in list(self.masks):
            mask.lost(error if mask in suspects else None)


class Workers(threading.local):
    """Those of one engine, which is stepped by one thread."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[ForkServer, str], Worker] = OrderedDict()

    def get(self, server: ForkServer, lark: str, longest: int) -> Worker:
        worker = self._found.pop((server, lark), None)
        if worker is None or worker.failure is not None:
            worker = Worker(server, lark, longest)
        self._found[server, lark] = worker
        return worker

    def tidy(self) -> None:
        """Ends workers that nobody uses, but for the last few that are small."""
        kept = 0
        for key, worker in reversed(list(self._found.items())):
            if worker.masks and worker.failure is None:
                continue
            kept += 1
            if worker.failure is not None or kept > KEPT or worker.grown > KEPT_BYTES:
                worker.end(RequestError("it is not used any more."))
                del self._found[key]


WORKERS = Workers()
