"""An engine in a process of its own, so that its death (a CUDA fault, the out-of-memory killer) is not its client's.

Two pipes lie between: commands to the engine, reports back, each message one pickle. On both sides a thread reads, so
nobody ever waits for the other to finish a step.
"""

import atexit
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue

from stoker.backends.progress import UNITS
from stoker.engine.worker import heap
from stoker.engine.worker.client import SHUT, EngineClient, pending
from stoker.engine.worker.loop import EngineLoop, log
from stoker.engine.worker.messages import Command, Ended, Loading, PhaseTime, Ready, Report, Shutdown
from stoker.engine.worker.spec import Buildable
from stoker.errors import EngineError, StokerError

PARENT_CHECK_S = 1.0  # how often the engine looks whether its parent lives; a closed pipe tells it at once
ENGINES = "stoker.backends.build"  # with torch and all that networks are made of
SHUTDOWN_S = 10.0  # what an engine may take to end its step before it is killed


class EngineProcess(EngineClient):
    """Starts at once and loads in the background; requests may be submitted meanwhile. `ready` says when it is up.

    When the process dies, every running and queued request fails with the reason; `restart` begins anew.
    """

    def __init__(
        self,
        spec: Buildable,
        on_loading: Callable[[Loading], object] = lambda loading: None,
        prepared: "PreparedProcess | None" = None,
    ) -> None:
        """`on_loading` is called from a thread, while weights are read. `prepared` serves the first start."""
        super().__init__()
        self._spec, self._on_loading, self._prepared = spec, on_loading, prepared
        self._child: PreparedProcess
        self.ready: Future[Ready]  # `.result(timeout)`, or `await asyncio.wrap_future(...)`
        self.exit_error: Future[StokerError]  # why there is no engine any more
        self._begin()
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._down is None

    def kill(self, reason: str) -> None:
        """For an engine that hangs: ends it at once, as a crash would. Requests are told the reason."""
        self._child.kill(reason)

    def restart(self) -> None:
        """A new process in place of the old one, dead or alive. Requests that were still under way fail.

        Waits for the old one's end, as `close` does: under asyncio, call it in a thread.
        """
        self.close()
        self._begin()
        atexit.register(self.close)

    def close(self, drain: bool = False, timeout: float | None = SHUTDOWN_S) -> None:
        """Ends the process after its step, or with `drain` after its requests; kills it if that takes longer than
        `timeout`, or if it is still loading. May be called again."""
        atexit.unregister(self.close)
        loaded = self.ready.done() and not self.ready.exception()
        if loaded:
            self._shut(drain)
        else:
            self._mark_down(EngineError(SHUT))
        self._child.end(timeout if loaded else 0.0)

    def _begin(self) -> None:
        """Nothing is taken on before there is a process to send it to; if none can be started, it is marked down."""
        with self._lock:
            self.ready, self.exit_error = pending(), pending()
            try:
                self._child, self._prepared = self._prepared or PreparedProcess(), None
                self._child.build(self._spec, self._deliver)
            except OSError as failure:  # no memory or no file left for another process
                error = EngineError(f"the engine process could not be started: {failure}. restart() tries again.")
                self._down = error
            else:
                self._down = None
                return
        self._mark_down(error)
        raise error

    def _send(self, command: Command) -> None:
        self._child.send(command)

    def _deliver(self, report: Report) -> None:
        match report:
            case Loading():
                self._on_loading(report)
            case Ready():
                with suppress(InvalidStateError):  # closed in the meantime
                    self.ready.set_result(report)
            case _:
                super()._deliver(report)

    def _mark_down(self, error: StokerError) -> None:
        super()._mark_down(error)
        with suppress(InvalidStateError):  # it was ready
            self.ready.set_exception(error)
        with suppress(InvalidStateError):  # told already
            self.exit_error.set_result(error)


class PreparedProcess:
    """One life of the engine process, seen from its parent. It begins by importing what every engine needs; `build`
    says which engine it will be."""

    def __init__(self) -> None:
        context = get_context("spawn")  # a forked process could not use CUDA
        commands, self._commands = context.Pipe(duplex=False)
        self._reports, reports = context.Pipe(duplex=False)
        self._process = context.Process(target=_main, args=(commands, reports), name="stoker-engine", daemon=True)
        with _interrupts_held():
            self._process.start()
        commands.close()  # the child's ends: while they are open here, its death would go unnoticed
        reports.close()
        self.pid = self._process.pid or 0
        self._deliver: Callable[[Report], None]
        self._kill_reason: str | None = None  # why this side killed it, if it did
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="stoker-commands", daemon=True)
        self._reader = threading.Thread(target=self._read, name="stoker-reports", daemon=True)

    def build(self, spec: Buildable, deliver: Callable[[Report], None]) -> None:
        """Once, before all else."""
        self._deliver = deliver
        self._outbox.put(pickle.dumps(spec))
        self._writer.start()
        self._reader.start()

    def send(self, command: Command) -> None:
        self._outbox.put(pickle.dumps(command))

    def kill(self, reason: str) -> None:
        self._kill_reason = self._kill_reason or reason
        self._process.kill()

    def end(self, timeout: float | None) -> None:
        """Waits for the process, kills it when time is up, and returns when its last report is delivered."""
        self._reader.join(timeout)  # it alone asks how the process ended: the answer is given once
        if self._reader.is_alive():
            late = f" and had not ended after {timeout:g} s" if timeout else ""
            self.kill(f"it was told to stop{late}")
        self._reader.join()
        self._writer.join()

    def _write(self) -> None:
        """A long prompt does not fit a pipe's buffer: it is this thread that waits, not who submits."""
        with suppress(OSError):  # the process is gone; the reader knows why
            while (message := self._outbox.get()) is not None:
                self._commands.send_bytes(message)
        self._commands.close()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                report: Report = pickle.loads(self._reports.recv_bytes())
                try:
                    self._deliver(report)
                except Exception:  # of a callback on loading: no reason to stop listening
                    log.exception("a report of the engine could not be handed on")
        self._process.join()
        self._reports.close()
        self._outbox.put(None)
        self._deliver(Ended(EngineError(_exit_reason(self.pid, self._process.exitcode, self._kill_reason))))


def _exit_reason(pid: int, code: int | None, kill_reason: str | None) -> str:
    """A sentence. Only a SIGKILL that did not come from here may be the kernel's."""
    how = f"ended with exit code {code}"
    if code == -signal.SIGKILL and kill_reason:
        how = f"was killed by this program: {kill_reason}"
    elif code is not None and code < 0:
        named = -code in set(signal.Signals)  # real-time signals have no names
        how = f"was killed by {signal.Signals(-code).name if named else f'signal {-code}'}"
        how += " (most often by the kernel, when memory runs out)" if -code == signal.SIGKILL else ""
    return f"the engine process (pid {pid}) {how}. What it was working on is lost; restart() begins anew."


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal. A child started in here is deaf to it from its first instruction."""
    resource_tracker.ensure_running()  # or starting the child would start it, and that lifts the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- in the engine process


def _main(commands: Connection, reports: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    heap.limit_arenas()
    with heap.collection_paused():
        import_module(ENGINES)
    try:
        spec: Buildable = pickle.loads(commands.recv_bytes())
    except EOFError:  # the parent is gone, or needs no engine
        return
    inbox: SimpleQueue[Command] = SimpleQueue()
    threading.Thread(target=_listen, args=(commands, inbox), name="stoker-commands", daemon=True).start()

    def send(report: Report) -> None:
        try:
            reports.send_bytes(pickle.dumps(report))
        except OSError:  # the parent is gone
            os._exit(1)

    watch = Stopwatch(_every_percent(send))
    try:
        with heap.collection_paused():
            built = spec.build(watch.report)
    except StokerError as error:
        send(Ended(error))
        return
    except Exception as error:
        log.exception("the engine could not be started")
        sentence = f"the engine could not be started: {type(error).__name__}: {error}"
        send(Ended(EngineError(sentence, traceback.format_exc())))
        return
    told = Shutdown(drain=False, reason=f"the engine process (pid {os.getpid()}) was told to stop by SIGTERM.")
    signal.signal(signal.SIGTERM, lambda number, frame: inbox.put(told))  # while loading, it simply ends
    heap.freeze_loaded()
    send(Ready(built.engine.backend.model, tuple(built.notes), os.getpid(), watch.stop()))
    EngineLoop(built.engine, inbox, send).run()


def _listen(commands: Connection, inbox: SimpleQueue[Command]) -> None:
    """Reads commands while the engine steps. When the parent is gone, nobody wants the rest: ends at once."""
    parent = parent_process()
    try:
        with suppress(EOFError, OSError):
            while parent is not None and os.getppid() == parent.pid:
                if commands.poll(PARENT_CHECK_S):
                    inbox.put(pickle.loads(commands.recv_bytes()))
    except Exception:
        log.exception("a command could not be read")
    finally:
        os._exit(1)  # an engine that does not listen must not live on


class Stopwatch:
    """How long each phase of a start takes; phases are told on."""

    def __init__(self, tell: Callable[[Loading], None]) -> None:
        self._tell, self._began = tell, time.perf_counter()
        self._latest = Loading("starting")
        self._phases: dict[str, PhaseTime] = {}

    def report(self, loading: Loading) -> None:
        if loading.phase != self._latest.phase:
            self._close()
        self._latest = loading
        self._tell(loading)

    def stop(self) -> tuple[PhaseTime, ...]:
        self._close()
        return tuple(self._phases.values())

    def _close(self) -> None:
        now, latest = time.perf_counter(), self._latest
        before = self._phases.get(latest.phase, PhaseTime(latest.phase, 0.0)).seconds
        count = latest.total if UNITS.get(latest.phase) in ("kernels", "graphs") else 0
        self._phases[latest.phase] = PhaseTime(latest.phase, before + now - self._began, count)
        self._began = now


def _every_percent(send: Callable[[Report], None]) -> Callable[[Loading], None]:
    """Of thousands of tensors read, those that move the bar."""
    shown: tuple[str, int | None] | None = None

    def report(loading: Loading) -> None:
        nonlocal shown
        if (loading.phase, loading.percent) != shown:
            shown = loading.phase, loading.percent
            send(loading)

    return report
