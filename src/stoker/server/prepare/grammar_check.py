"""Checks the grammar of a request before the engine gets it, by compiling it in a worker process."""

from collections import OrderedDict
from hashlib import sha256
from threading import BoundedSemaphore, Lock

from stoker.engine.rules import Grammar
from stoker.errors import RequestError

CHECK_S = 5.0  # to compile a grammar; the start of a worker is not counted
START_S = 60.0
CHECKS_AT_A_TIME, CHECKS_WAITING = 4, 12
QUEUE_S = 12.0  # that a check may wait for a free place
CACHED = 256  # results that are cached
BUSY = "Many schemas are being checked, and some of them take long. Try again soon."


class ChecksBusy(RequestError):
    """Too many grammars are being checked."""


class TooComplex(RequestError):
    """A grammar that takes too much time, memory or stack to compile."""


_slots = BoundedSemaphore(CHECKS_AT_A_TIME)
_waiting_places = BoundedSemaphore(CHECKS_AT_A_TIME + CHECKS_WAITING)  # each occupies a thread of the server
_lock = Lock()
_verdicts: OrderedDict[bytes, str | TooComplex | None] = OrderedDict()


def check(grammar: Grammar) -> str | None:
    """What is wrong with a grammar, in a sentence; None if it compiles. Blocks, so call it in a thread.

    Raises TooComplex if compiling exceeds a limit."""
    key = sha256(repr(grammar).encode()).digest()  # a grammar itself can be megabytes
    with _lock:
        known, verdict = key in _verdicts, _verdicts.get(key)
        if known:
            _verdicts.move_to_end(key)
    if not known:
        verdict = _check_uncached(grammar)
        with _lock:
            _verdicts[key] = verdict
            if len(_verdicts) > CACHED:
                _verdicts.popitem(last=False)
    if isinstance(verdict, TooComplex):
        raise TooComplex(str(verdict))
    return verdict


def _check_uncached(grammar: Grammar) -> str | TooComplex | None:
    if not _waiting_places.acquire(blocking=False):
        raise ChecksBusy(BUSY)
    try:
        if not _slots.acquire(timeout=QUEUE_S):
            raise ChecksBusy(BUSY)
        try:
            verdict = _compiled(grammar)
        finally:
            _slots.release()
    finally:
        _waiting_places.release()
    return verdict


def _compiled(grammar: Grammar) -> str | TooComplex | None:
    try:
        child = grammar.server.fork()
    except RequestError as failure:
        raise ChecksBusy(str(failure)) from failure
    try:
        if not child.connection.poll(START_S) or child.receive(0) is not None:
            return TooComplex("the grammar worker did not start")
        child.send(grammar.lark.encode())
        if not child.connection.poll(CHECK_S):
            return TooComplex(f"it is too complex, for it takes more than {CHECK_S:g} s to compile.")
        found = child.receive(1 << 16)
        assert found is not None
        error = str(found[0]["error"])
    except RequestError as failure:
        return TooComplex(str(failure))
    else:
        return error or None
    finally:
        child.kill()
