"""Suites: which workloads, how many at a time, how often. A cell is one row of the result."""

from dataclasses import asdict, dataclass, field
from typing import Any

from stoker.bench import agent
from stoker.bench.workloads import MIXES, SINGLE, WORKLOADS, fits
from stoker.errors import BenchError

DEPTHS = (0, 4096, 8192, 16384, 32768, 65535, 100000)  # Spark Arena profile v2
DEPTH_CONCURRENCY = (1, 2, 5, 10)
HISTORIES = (8000, 32000, 100000)
NAMES = ("quick", "single", "agent", "mix", "prefix", "depth", "sweep", "soak")


@dataclass(frozen=True)
class Cell:
    """What is measured together: streams of one workload (or mix), a conversation, or one depth."""

    name: str
    variant: str = "cold"
    concurrency: int = 1
    each: int = 1  # requests per stream and round
    seconds: float | None = None  # instead of `each`: how long streams go on
    rate: float | None = None  # instead of streams: requests per second, arriving at random
    depth: int | None = None
    histories: tuple[int, ...] = ()  # a conversation with these points
    rounds: int = 3
    workloads: tuple[str, ...] = ()  # of a mix; stream i begins with number i
    pp: int = 0  # with a depth: tokens of the prompt after the context
    tg: int = 0  # and of the answer
    replay: str = ""  # recorded sessions: their digest

    @property
    def title(self) -> str:
        extra = [self.variant] if self.variant not in ("cold", "own") else []
        extra += [f"d{self.depth}"] if self.depth is not None else []
        extra += [f"{self.rate:g}/s"] if self.rate is not None else []
        extra += [f"c={self.concurrency}"] if self.concurrency > 1 else []
        return " ".join([self.name, *extra])


@dataclass(frozen=True)
class Options:
    """What a user may set. None or empty means the suite's own value."""

    runs: int = 3
    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    seconds: float | None = None
    depths: tuple[int, ...] = ()
    histories: tuple[int, ...] = ()
    tool_share: float = agent.TOOL_SHARE
    workloads: tuple[str, ...] = ()
    max_tokens: int | None = None
    pp: int = 2048  # Spark Arena's
    tg: int = 128


@dataclass
class Plan:
    cells: list[Cell] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def fingerprint(self, options: Options) -> dict[str, Any]:
        return {"cells": [asdict(cell) for cell in self.cells], "options": asdict(options)}


def plan(name: str, options: Options, context: int | None) -> Plan:
    """The cells of a suite that fit the server's context, and a sentence about each that does not."""
    if name not in NAMES:
        raise BenchError(f"there is no suite called {name!r}; choose one of: {', '.join(NAMES)}")
    unknown = [workload for workload in options.workloads if workload not in (*WORKLOADS, *MIXES, agent.NAME)]
    if unknown:
        known = ", ".join((*WORKLOADS, agent.NAME, *MIXES))
        raise BenchError(f"there is no workload called {', '.join(unknown)}; there are: {known}")
    if options.runs < 1:
        raise BenchError(f"--runs is {options.runs}; at least one measured run is needed")
    found = Plan()
    for cell in _cells(name, options):
        _add(found, cell, context, options)
    if not found.cells:
        raise BenchError(f"nothing of suite {name} fits: " + " ".join(found.skipped or ["no workload was named"]))
    return found


def _cells(name: str, options: Options) -> list[Cell]:
    runs, chosen = options.runs, options.workloads
    if name == "quick":
        names = chosen or ("Q&A", "Code", "JSON-KIE")
        cells = [Cell(workload, rounds=runs) for workload in names if workload in WORKLOADS]
        if not chosen or agent.NAME in chosen:
            cells.append(Cell(agent.NAME, "warm", histories=options.histories or (2000,), rounds=runs))
        if not chosen:
            cells.append(Cell("uniform_short", concurrency=4, rounds=runs, workloads=MIXES["uniform_short"]))
        return cells
    if name == "single":
        return [Cell(workload, rounds=runs) for workload in chosen or SINGLE]
    if name == "agent":
        return [Cell(agent.NAME, "warm", histories=options.histories or HISTORIES, rounds=runs)]
    if name == "mix":
        asked = {"uniform_short": (4,), "mixed_typical": (4,), "long_only_128k": (2, 4)}
        return [
            Cell(mix, concurrency=c, seconds=options.seconds or 90, rounds=runs, workloads=MIXES[mix])
            for mix in chosen or tuple(MIXES)
            for c in options.concurrency or asked.get(mix, (4,))
        ]
    if name == "prefix":
        names = chosen or ("Long-RAG-8K", "Long-RAG-32K")
        return [Cell(workload, variant, rounds=runs) for workload in names for variant in ("cold", "warm")]
    if name == "depth":
        return [
            Cell(
                f"pp{options.pp}/tg{options.tg}",
                "warm" if depth else "cold",
                c,
                depth=depth,
                rounds=runs,
                pp=options.pp,
                tg=options.tg,
            )
            for depth in options.depths or DEPTHS
            for c in options.concurrency or DEPTH_CONCURRENCY
        ]
    if name == "sweep":
        workload = (chosen or ("Q&A",))[0]
        mix = MIXES.get(workload, ())
        if options.rates:
            return [
                Cell(workload, rate=rate, seconds=options.seconds or 30, rounds=runs, workloads=mix)
                for rate in options.rates
            ]
        steps = options.concurrency or (1, 2, 4, 8, 16, 32)
        return [
            Cell(workload, concurrency=c, each=2, seconds=options.seconds, rounds=runs, workloads=mix) for c in steps
        ]
    workload = (chosen or ("mixed_typical",))[0]
    count = (options.concurrency or (4,))[0]
    return [
        Cell(workload, concurrency=count, seconds=options.seconds or 1800, rounds=1, workloads=MIXES.get(workload, ()))
    ]


def _add(found: Plan, cell: Cell, context: int | None, options: Options) -> None:
    if cell.histories:
        fitting = tuple(h for h in cell.histories if context is None or h + agent.MAX_TOKENS <= context)
        for history in set(cell.histories) - set(fitting):
            found.skipped.append(f"Agent turns at {history:,} tokens of history do not fit a context of {context:,}.")
        if fitting:
            found.cells.append(Cell(cell.name, cell.variant, histories=fitting, rounds=cell.rounds))
        return
    if cell.depth is not None:
        if context is None or cell.depth + cell.pp + cell.tg <= context:
            found.cells.append(cell)
        else:
            sizes = f"{cell.depth:,} + {cell.pp:,} + {cell.tg:,}"
            found.skipped.append(f"Depth {cell.depth:,} is left out: {sizes} tokens do not fit {context:,}.")
        return
    for name in cell.workloads or (cell.name,):
        workload = WORKLOADS[name]
        if not fits(workload, context, options.max_tokens):
            needs = workload.prompt_tokens + min(workload.max_tokens, options.max_tokens or workload.max_tokens)
            found.skipped.append(
                f"{cell.title} is left out: {name} takes {needs:,} tokens, the context is {context:,}."
            )
            return
    found.cells.append(cell)
