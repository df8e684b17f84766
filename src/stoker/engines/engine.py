"""What `stoker up` needs of an engine: the commands that start it, and how its log and its metrics are read."""

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct

from stoker.errors import StokerError
from stoker.recipes.load import Loaded
from stoker.recipes.recipe import Recipe

KEYS = {"stoker": "STOKER_API_KEY", "vllm": "VLLM_API_KEY"}  # environment: the key that an engine asks for
PORT = "{port}"  # in a command or an environment: the free port that the service's keeper chose for this start


class Launch(Struct, frozen=True):
    """One process of an engine. It is what `--dry-run` prints, what is run, and what a receipt keeps: no secrets."""

    command: tuple[str, ...]  # PORT in it is replaced
    env: dict[str, str] = {}  # beside the environment of `stoker up`, or of a login on `host`
    # Of ssh; empty: this machine. The host needs python3. Of the launch that answers requests, PORT on its loopback
    # interface is reached through the same connection.
    host: str = ""
    files: dict[str, str] = {}  # written before the start into the folder that the command runs in: name -> text
    cleanup: tuple[str, ...] = ()  # a command run when the process has ended, however it did: `docker rm --force ...`


class Deployment(Struct, frozen=True):
    """Everything that is needed to run an engine, and to run it again after a crash or a reboot."""

    recipe: str  # its name
    recipe_hash: str
    engine: Literal["stoker", "vllm"]
    launches: tuple[Launch, ...]  # in the order of their start; the first one answers requests
    model_name: str  # in the API
    ready_path: str = "/ready"  # answers 200 once requests are accepted; a JSON body before that may name the phase
    memory_bytes: int = 0  # what the plan says it takes; 0: unknown
    start_timeout_s: float = 1800.0
    drain_timeout_s: float = 30.0
    stall_s: float = 120.0  # requests run and no token comes for so long: wedged
    restarts: int = 4  # in a row without an answered request; the next fault, the fifth, ends in `failed`


class Phase(Struct, frozen=True):
    """What an engine that starts is doing."""

    name: str  # loading, compiling, recording graphs, ...
    percent: float | None = None
    detail: str = ""


class Counters(Struct, frozen=True):
    """What the watch reads from an engine's metrics."""

    running: int  # requests being computed
    work: float  # grows with every step, be it of a prompt or an answer: standing still while requests run, it hangs


class Engine(Protocol):
    name: str

    def version(self, recipe: Recipe | None = None) -> str:
        """The installed version, or that of a recipe's container or boxes. Raises a StokerError with the way out."""

    def problems(self, recipe: Recipe) -> list[str]:
        """What the installed version would not understand or cannot do, as sentences. Empty: the recipe can run."""

    def deployment(self, loaded: Loaded, model: Path, drafter: Path | None, memory_bytes: int) -> Deployment:
        """The commands for a model that is on disk."""

    def phase(self, line: str) -> Phase | None:
        """The phase that a line of the log begins or continues."""


def find(name: str) -> Engine:
    """The engine of a recipe."""
    from stoker.engines.stoker import Stoker
    from stoker.engines.vllm import Vllm

    known: dict[str, Callable[[], Engine]] = {"stoker": Stoker, "vllm": Vllm}
    if name not in known:
        raise StokerError(f"unknown engine {name!r}; known engines: {', '.join(known)}.")
    return known[name]()


def shell(launch: Launch) -> Sequence[str]:
    """The launch as lines a person can paste."""
    lines = [f"{key}={shlex.quote(value)} \\" for key, value in sorted(launch.env.items())]
    return [*lines, shlex.join(launch.command)]


# Tokens of prompts and answers, and for a prompt that takes minutes what an engine counts while it is computed.
RUNNING = "vllm:num_requests_running"
WORK = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_sum",
    "stoker:tokens_computed",
)
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (\S+)")


def counters(metrics: str) -> Counters | None:
    """From the text of an engine's /metrics; None if these are not an engine's."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        if (sample := _SAMPLE.match(line)) and sample[1] in (RUNNING, *WORK):
            found[sample[1]] = found.get(sample[1], 0.0) + float(sample[2])
    if RUNNING not in found:
        return None
    return Counters(int(found.pop(RUNNING)), sum(found.values()))
