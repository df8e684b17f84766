"""An engine that takes its time, and reading its streams without waiting for ever."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from stoker.engine.engine import EngineConfig
from stoker.engine.event import Event
from stoker.engine.worker.client import EngineClient, Stream
from stoker.sampling.settings import Sampling

PATIENCE_S = 60.0
CONFIG = EngineConfig(pages=48, slots=6, max_depth=2)
PAUSE = 0.02
LONG = Sampling(max_tokens=1000)  # 20 s and more with that pause: it is still running when something happens to it

T = TypeVar("T")


def live(engine: EngineClient) -> int:
    stats = engine.stats().result(PATIENCE_S)
    return stats.running + stats.waiting


def in_time(call: Callable[[], T]) -> T:
    """Fails rather than wait for ever."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(PATIENCE_S)


def next_of(stream: Stream) -> Event:
    return in_time(lambda: next(stream))


def tokens_of(stream: Stream) -> list[int]:
    return in_time(lambda: [token for event in stream for token in event.tokens])
