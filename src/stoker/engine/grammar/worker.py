"""The fork server of grammar workers: `python -m stoker.engine.grammar.worker`, started by `fork_server.py`.

It loads llguidance and the tokenizer once and forks a child per grammar, in 2 ms, with a limit on memory. It never
reads a grammar itself, so it always responds. It kills its children on command, and when its parent has died.
"""

import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import llguidance

COMMAND = struct.Struct("<cI")  # FORK, with the child's socket attached, or KILL; and the child's number
FORK, KILL = b"F", b"K"
MEMORY = 256 * 2**20  # bytes a child may take beside what it shares with the fork server
REAP_S = 5.0  # how often children that ended by themselves are looked for
# Half of what llguidance takes by default where memory is concerned; real schemas of 200,000 characters pass.
LIMITS = llguidance.LLParserLimits(max_lexer_states=100_000, verbose_errors=False)


def main(control_fd: str, tokenizer_file: str, vocab_size: str, *ends: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches it too; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager sends it to every process
    control = socket.socket(fileno=int(control_fd))
    _name("stoker-grammar")
    tokenizer = llguidance.LLTokenizer(tokenizer_file, n_vocab=int(vocab_size), eos_token=[int(end) for end in ends])
    gc.collect()
    gc.freeze()  # or garbage collection in a child would copy shared pages
    children: dict[int, int] = {}
    while True:
        readable = select.select([control], [], [], REAP_S)[0]
        for number in [number for number, pid in children.items() if os.waitpid(pid, os.WNOHANG)[0]]:
            del children[number]
        if not readable:
            continue
        command, sockets, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if len(command) < COMMAND.size:
            break
        kind, number = COMMAND.unpack(command)
        if kind == FORK:
            try:
                pid = os.fork()
            except OSError:  # the parent sees that the socket is closed
                os.close(sockets[0])
                continue
            if not pid:
                control.close()
                _child(sockets[0], tokenizer)
            os.close(sockets[0])
            children[number] = pid
        elif number in children:
            _end(children.pop(number))
    for pid in children.values():
        _end(pid)


def _end(pid: int) -> None:
    """Kills a child. Safe in its parent only: a pid is not reused before its parent has waited for it."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _child(fd: int, tokenizer: llguidance.LLTokenizer) -> None:
    try:
        _limit()
        _serve(Connection(fd), tokenizer)
    except (EOFError, OSError):  # the parent closed the connection
        pass
    finally:
        os._exit(0)


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive the fork server
        with open("/proc/self/statm", encoding="ascii") as statm:
            most = int(statm.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _name(name: str) -> None:
    """Sets the process name that `ps` and `top` show."""
    _prctl(15, name.encode()[:15])  # PR_SET_NAME


# -- in a child


class GrammarFailed(Exception):
    """The text so far does not follow the grammar, or a limit of llguidance was reached."""


def _serve(connection: Connection, tokenizer: llguidance.LLTokenizer) -> None:
    """Sends a greeting, compiles the grammar that it receives, then answers questions."""
    connection.send_bytes(b"")
    before = _peak()
    start = llguidance.LLMatcher(tokenizer, connection.recv_bytes().decode(), log_level=0, limits=LIMITS)
    if not start.is_error():
        start.compute_bitmask()
    _say(connection, {"error": _reason(start)})
    walks: dict[int, Walk] = {}
    while True:
        asked: dict[str, Any] = json.loads(connection.recv_bytes())
        if "forget" in asked:
            for number in asked["forget"]:
                walks.pop(number, None)
            continue
        number = asked.pop("id")
        walk = walks.setdefault(number, Walk(start))
        try:
            answer, masks = walk.answer(**asked)
        except GrammarFailed as failure:
            del walks[number]
            answer, masks = {"error": str(failure)}, []
        _say(connection, {"id": number, "grown": _peak() - before, **answer}, masks)


def _say(connection: Connection, head: dict[str, Any], masks: Sequence[bytes] = ()) -> None:
    """Sends JSON rather than a pickle: the parent must not trust a process that has read a client's grammar."""
    connection.send_bytes(b"\n".join([json.dumps(head).encode(), b"".join(masks)]))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reason(matcher: llguidance.LLMatcher) -> str:
    return str(matcher.get_error()).strip().split("\n")[0][:500] if matcher.is_error() else ""


class Walk:
    """The matcher of one request."""

    def __init__(self, start: llguidance.LLMatcher) -> None:
        self._start, self._matcher = start, start.deep_copy()
        self._text: list[int] = []  # tokens that the matcher has consumed

    def answer(
        self, keep: int, add: list[int], drafts: list[int], room: int, first: bool
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Masks after the first `keep` tokens of the text and `add` (if `first`), and after each allowed draft.

        Where the grammar leaves no choice, up to `room` forced tokens replace the drafts. A failure after a draft ends
        the drafts there.
        """
        if keep < len(self._text):
            self._matcher.rollback(len(self._text) - keep)
        del self._text[keep:]
        self._consume(add)
        masks = [self._mask()] if first else []
        forced = self._matcher.compute_ff_tokens()[:room] if room else []
        drafts, walked = forced or drafts, 0
        base = list(self._text)
        try:
            for draft in drafts:
                if masks and not _allows(masks[-1], draft):  # a first mask that was not wanted allows the first draft
                    break
                self._consume([draft])
                masks.append(self._mask())
                walked += 1
        except GrammarFailed:  # a matcher does not leave its error state
            self._matcher, self._text = self._start.deep_copy(), []
            self._consume(base)
        return {"forced": forced, "walked": walked, "at": len(self._text), "masks": len(masks)}, masks

    def _consume(self, tokens: list[int]) -> None:
        if tokens:
            self._matcher.consume_tokens(tokens)
            self._check()
            self._text += tokens

    def _mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check()
        return bytes(mask)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(_reason(self._matcher))


def _allows(mask: bytes, token: int) -> bool:
    return 0 <= token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
