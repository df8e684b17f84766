"""How many files of ours a chat request, or a weight tensor, passes through on the CPU.

    python -m tools.request_trace request           files that run between the sockets for one streamed chat request
    python -m tools.request_trace weight [TENSOR]   files that hold a tensor, from the checkpoint's file to the kernel

`request` starts the demo as `stoker serve` does, server and engine in processes of their own, and asks it twice. The
first request warms up. A function counts if it is called during the second request and not while the server is idle.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import stoker

OURS = str(Path(stoker.__file__).parent) + os.sep
IDLE, REQUEST, DONE = "idle", "request", "done"  # what is recorded, in this order
IDLE_S, POLL_S = 3.0, 0.02
BODY = {"messages": [{"role": "user", "content": "Write a haiku about the sea."}], "max_tokens": 24, "stream": True}


def main(what: str = "request", *rest: str) -> None:
    found = trace_weight(*rest) if what == "weight" else trace_request()
    for file, where in sorted(found.items()):
        print(f"{file:45} {where}")
    print(f"{len(found)} files")


# -- one request


class Recorder:
    """Functions of ours that a process calls, by what is being recorded. The driver says so through files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._called: dict[str, set[Any]] = {IDLE: set(), REQUEST: set()}
        self._now: set[Any] | None = None
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        threading.Thread(target=self._follow, daemon=True).start()

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if self._now is not None and event == "call":
            self._now.add(frame.f_code)

    def _follow(self) -> None:
        while not (self._folder / DONE).exists():
            phase = next((phase for phase in (REQUEST, IDLE) if (self._folder / phase).exists()), None)
            if phase and self._now is not self._called[phase]:
                self._now = self._called[phase]
                (self._folder / f"{os.getpid()}.{phase}").touch()
            time.sleep(POLL_S)
        self._now = None
        files = {code.co_filename for code in self._called[REQUEST] - self._called[IDLE]}
        report = self._folder / f"{os.getpid()}.part"
        report.write_text(json.dumps(sorted(file for file in files if file.startswith(OURS))))
        report.rename(report.with_suffix(".json"))


@dataclass(frozen=True)
class RecordedSpec:
    """An engine's spec whose process is recorded as soon as it is built."""

    spec: Any
    folder: Path

    def build(self, report: Callable[..., None]) -> Any:
        built = self.spec.build(report)
        Recorder(self.folder)
        return built


def trace_request() -> dict[str, str]:
    from stoker.demo import EMBEDDED
    from stoker.server.config import ServerConfig
    from stoker.server.lifecycle.memory_guard import read_memory
    from stoker.server.lifecycle.plan import plan_engine
    from stoker.server.lifecycle.run import serve

    config = ServerConfig(directory=EMBEDDED, names=("demo",), port=0, context=2048)
    plan = plan_engine(config, read_memory())
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Recorder(folder)

        def drive(address: str) -> None:
            try:
                _wait_until_ready(address)
                _ask(address)
                for phase in (IDLE, REQUEST):
                    (folder / phase).touch()
                    _wait_for_two(folder, phase)  # on a busy machine a process may be late to notice
                    time.sleep(IDLE_S) if phase == IDLE else _ask(address)
                    time.sleep(10 * POLL_S)
                (folder / DONE).touch()
                _wait_for_two(folder, "json")
                for report in folder.glob("*.json"):
                    process = "server" if report.stem == str(os.getpid()) else "engine"
                    for file in json.loads(report.read_text()):
                        shown = file.removeprefix(OURS)
                        found[shown] = f"{found[shown]}, {process}" if shown in found else process
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        def announce(address: str) -> None:
            threading.Thread(target=drive, args=(address,), daemon=True).start()

        serve(config, plan, wrap=lambda spec: RecordedSpec(spec, folder), announce=announce)
    return found


def _wait_for_two(folder: Path, ending: str) -> None:
    """Until server and engine have left a file."""
    while len(list(folder.glob(f"*.{ending}"))) < 2:
        time.sleep(POLL_S)


def _wait_until_ready(address: str) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"{address}/ready"):
                return
        except OSError:  # 503 until the model is loaded
            time.sleep(0.2)


def _ask(address: str) -> None:
    """One streamed answer, read to its end."""
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(BODY).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        assert b"[DONE]" in answer.read()


# -- one weight


class Follower:
    """Files whose frames hold a tensor by name, as a tensor, or in a record, table or module.

    While the model is loaded, what a function makes of the tensor counts as the tensor too; afterwards it does not.
    """

    def __init__(self, tensor: str) -> None:
        self.files: dict[str, str] = {}
        self.loading = True
        self._tensor = tensor
        self._memory: set[int] = set()  # addresses of its storages
        self._kept: list[Any] = []  # so that no other tensor gets one of them

    def profile(self, frame: FrameType, event: str, result: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(OURS):
            return
        values = list(frame.f_locals.values())
        if event == "return" and self.loading:
            for value in (*values, result):
                self._claim(value)
        named = self.loading and any(_names(value, self._tensor) for value in values)
        holds = any(self._holds(value) for value in values)
        if named or holds:
            self.files.setdefault(frame.f_code.co_filename.removeprefix(OURS), frame.f_code.co_qualname)
        if holds and event == "return" and self.loading:
            self._take(result)

    def _claim(self, value: Any) -> None:
        """Takes the tensor where it stands beside its name."""
        if isinstance(value, dict) and self._tensor in value:
            self._take(value[self._tensor])
        elif isinstance(value, tuple) and value and getattr(value[0], "name", None) == self._tensor:
            self._take(value[1:])

    def _take(self, value: Any) -> None:
        for tensor in filter(_in_memory, _parts(value)):
            self._memory.add(_address(tensor))
            self._kept.append(tensor)

    def _holds(self, value: Any) -> bool:
        return any(_in_memory(part) and _address(part) in self._memory for part in _parts(value))


def _in_memory(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _address(tensor: Any) -> int:
    """Of a tensor's storage; oneDNN's own layouts have none that can be seen."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except NotImplementedError:
        return id(tensor)


def _names(value: Any, tensor: str, depth: int = 3) -> bool:
    """Whether a value is the tensor's name, or a record or table with it."""
    if isinstance(value, str) or not depth:
        return bool(value == tensor)
    if isinstance(value, dict):
        return tensor in value or (len(value) <= 16 and any(_names(each, tensor, depth - 1) for each in value.values()))
    if isinstance(value, list | tuple):
        return len(value) <= 16 and any(_names(each, tensor, depth - 1) for each in value)
    return is_dataclass(value) and _is_record(value) and _names(list(vars(value).values())[:16], tensor, depth)


def _parts(value: Any, depth: int = 4) -> list[Any]:
    """A value and what lies in it, but for modules below a module."""
    import torch

    if isinstance(value, torch.Tensor) or not depth:
        return [value]
    if isinstance(value, list | tuple) and len(value) <= 16:
        inner = list(value)
    elif isinstance(value, torch.nn.Module):
        inner = [*vars(value).get("_parameters", {}).values(), *vars(value).get("_buffers", {}).values()]
        inner += [each for name, each in vars(value).items() if not name.startswith("_") and _is_record(each)]
    elif _is_record(value):
        inner = [getattr(value, field.name, None) for field in fields(value)] if is_dataclass(value) else []
        inner = inner or list(vars(value).values())
    else:
        return []
    return [part for each in inner for part in _parts(each, depth - 1) if not isinstance(each, torch.nn.Module)]


def _is_record(value: Any) -> bool:
    """An object of ours that computes or stores, and not one that runs the show."""
    kind = type(value)
    return kind.__module__.startswith("stoker.") and hasattr(value, "__dict__") and "engine" not in kind.__module__


def trace_weight(tensor: str = "model.layers.0.linear_attn.out_proj.qweight") -> dict[str, str]:
    from stoker.demo import EMBEDDED
    from stoker.engine.config import EngineConfig
    from stoker.engine.worker.spec import EngineSpec
    from stoker.sampling.settings import Sampling
    from stoker.speculate.choice import DraftChoice

    spec = EngineSpec(EMBEDDED, EngineConfig(), DraftChoice.parse("none"))
    follower = Follower(tensor)
    threading.setprofile(follower.profile)
    sys.setprofile(follower.profile)
    engine = spec.build(lambda loading: None).engine
    follower.loading = False
    engine.submit([1, 2, 3, 4], Sampling(max_tokens=2))
    while not engine.idle:
        engine.step()
    sys.setprofile(None)
    return follower.files


if __name__ == "__main__":
    main(*sys.argv[1:])
