"""What measuring itself costs: how late this client stamps arrivals, its CPU time, and board power where NVML is there.

A client that is late reports its own slowness as the server's, so its lateness stands in every report.
"""

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from stoker.bench.record import Client, Request
from stoker.bench.stats import median, percentiles
from stoker.cards import Card, nvidia_cards

PROBE_S = 0.02  # between two probes


@dataclass
class Overhead:
    """The client's lateness and CPU time, collected over all rounds."""

    lags: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)  # of the current round
    cpu_s: float = 0.0
    wall_s: float = 0.0

    @contextmanager
    def measuring(self, power: "Power | None") -> Iterator[None]:
        """Around a round's requests."""
        cpu, wall, self.watts = time.process_time(), time.monotonic(), []
        loop = asyncio.get_running_loop()
        here, there = socket.socketpair()
        here.setblocking(False)
        loop.add_reader(here, self._receive, here)
        over = threading.Event()
        probes = threading.Thread(target=self._send_probes, args=(there, over, power), daemon=True)
        probes.start()
        try:
            yield
        finally:
            over.set()
            probes.join()
            loop.remove_reader(here)
            here.close()
            there.close()
            self.cpu_s += time.process_time() - cpu
            self.wall_s += time.monotonic() - wall

    def _receive(self, here: socket.socket) -> None:
        """Stamps one turn of the loop later, which is when the coroutine that stamps an answer's bytes runs."""
        asyncio.get_running_loop().call_soon(self._stamp, here.recv(1 << 12))

    def _stamp(self, data: bytes) -> None:
        now = time.monotonic()
        self.lags += [now - sent for (sent,) in struct.iter_unpack("d", data[: len(data) // 8 * 8])]

    def _send_probes(self, there: socket.socket, over: threading.Event, power: "Power | None") -> None:
        """Sends the time through a socket, as a server sends its bytes, from a thread that is otherwise idle."""
        next_reading = 0.0
        while not over.wait(PROBE_S):
            there.send(struct.pack("d", time.monotonic()))
            if power is not None and time.monotonic() >= next_reading:
                self.watts.append(power.watts())
                next_reading = time.monotonic() + 0.5

    def client(self, requests: list[Request]) -> Client:
        gaps = [b - a for r in requests for a, b in zip(r.chunk_s, r.chunk_s[1:], strict=False)]
        lag, gap = percentiles(self.lags), median(gaps)
        share = self.cpu_s / self.wall_s if self.wall_s else None
        return Client(
            share,
            lag.p50 if lag else None,
            lag.p99 if lag else None,
            lag.p50 / gap if lag and gap else None,
        )


class Power:
    """Board power of all cards of this machine: the server's, if it runs here."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards, self.names = cards, [card.name for card in cards]

    def watts(self) -> float:
        return sum(card.watts() for card in self._cards)


def find_power() -> Power | None:
    cards = nvidia_cards()
    return Power(cards) if cards else None
