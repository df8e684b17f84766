"""vLLM's log: the phase that a line begins, and what it says it took, in seconds and GiB."""

import re
from collections.abc import Iterable

from msgspec import Struct

from stoker.engines.engine import Phase

INITIALIZING = "initializing"
WEIGHTS, DRAFTER = "loading weights", "loading drafter"
COMPILING, AUTOTUNING, CAPTURING = "compiling", "autotuning", "capturing graphs"
CACHES, WARMING_UP, API = "allocating caches", "warming up", "starting the API"

_PERCENT = r":\s+(?P<percent>\d+)%"
# The first that matches counts. Lines of progress say how far, others only what has begun.
_BEGINS = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"vLLM API server version|non-default args:|Initializing a V\d LLM engine", INITIALIZING),
        (r"Loading drafter model", DRAFTER),
        (rf"Loading [\w ]*checkpoint shards{_PERCENT}|Starting to load model", WEIGHTS),
        (rf"[Aa]utotun(?:e|ing)[^%]*?(?:{_PERCENT}|\bstart)", AUTOTUNING),
        (rf"Capturing [^%]*CUDA graphs[^%]*{_PERCENT}", CAPTURING),
        (r"Starting torch\.compile|Dynamo bytecode transform time|Compiling a graph|Warming up model for", COMPILING),
        (r"torch\.compile (?:takes|took) [\d.]+ s|Warming up done|Graph capturing finished", WARMING_UP),
        (r"\w+ KV cache size: [\d,]+ tokens", CACHES),
        (r"init engine \(.*\) took|Starting vLLM (?:API )?server", API),
    )
]


class Phases:
    """Lines of one start after another as phases."""

    def __init__(self) -> None:
        self._drafter = False

    def read(self, line: str) -> Phase | None:
        """None where the phase goes on, or begins no other."""
        for pattern, name in _BEGINS:
            if found := pattern.search(line):
                if name == INITIALIZING:
                    self._drafter = False
                self._drafter |= name == DRAFTER
                percent = found.groupdict().get("percent")
                begun = DRAFTER if name == WEIGHTS and self._drafter else name
                return Phase(begun, None if percent is None else float(percent))
        return None


class Took(Struct, frozen=True):
    """A part of the start by vLLM's own count."""

    name: str
    seconds: float


class Start(Struct):
    """What the log of a start says. None: it does not."""

    took: list[Took] = []
    weights_gib: float | None = None  # of the model and its drafter, of this rank
    cache_gib: float | None = None
    cache_tokens: int | None = None
    requests_of_full_context: float | None = None  # that the caches hold at the same time
    graphs_gib: float | None = None

    def seconds(self, name: str) -> float:
        return sum(each.seconds for each in self.took if each.name == name)


_WEIGHTS_TOOK = re.compile(r"Loading weights took ([\d.]+) seconds")
_TOOK = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"(?:\[(?P<part>\w+)\] )?torch\.compile (?:takes|took) (?P<s>[\d.]+) s in total", COMPILING),
        (r"(?:\[(?P<part>\w+)\] )?Initial profiling/warmup run took (?P<s>[\d.]+) s", WARMING_UP),
        (r"Graph capturing finished in (?P<s>[\d.]+) secs", CAPTURING),
        (r"init engine \([^)]*\) took (?P<s>[\d.]+) s", "init engine"),
        (r"Model loading took [\d.]+ GiB(?: memory)? and (?P<s>[\d.]+) seconds", "model and drafter"),
    )
]
_NUMBERS = {
    "weights_gib": re.compile(r"Model loading took ([\d.]+) GiB"),
    "cache_gib": re.compile(r"Available KV cache memory: ([\d.]+) GiB|Auto set \(([\d.]+)/[\d.]+\) GiB for KV cache"),
    "cache_tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),
    "requests_of_full_context": re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x"),
    "graphs_gib": re.compile(r"Graph capturing finished in [\d.]+ secs, took ([\d.]+) GiB"),
}


def read_start(lines: Iterable[str]) -> Start:
    """Of the latest start in a log. Of several ranks that say the same, the first counts."""
    start = Start()
    seen: set[str] = set()
    drafter = False
    for line in lines:
        if "non-default args:" in line or "vLLM API server version" in line:
            start, seen, drafter = Start(), set(), False
        drafter |= "Loading drafter model" in line
        if found := _WEIGHTS_TOOK.search(line):
            _add(start, seen, DRAFTER if drafter else WEIGHTS, float(found[1]))
        for pattern, name in _TOOK:
            if found := pattern.search(line):
                part = found.groupdict().get("part")
                _add(start, seen, f"{name}: {part}" if part else name, float(found["s"]))
        for name, pattern in _NUMBERS.items():
            if name not in seen and (found := pattern.search(line)):
                seen.add(name)
                number = float((found[1] or found[found.lastindex or 1]).replace(",", ""))
                setattr(start, name, int(number) if name == "cache_tokens" else number)
    return start


def _add(start: Start, seen: set[str], name: str, seconds: float) -> None:
    if name not in seen:
        seen.add(name)
        start.took.append(Took(name, seconds))
