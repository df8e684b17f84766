"""Kernels compiled ahead are those that an engine launches, under the keys that it looks for. No GPU is needed."""

import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("triton")

from stoker.backends.gpu.kernel_cache import mark_complete
from stoker.demo import EMBEDDED

CHEAP = ("norm_kernel", "begin_kernel", "choose_kernel")  # to compile


@pytest.mark.parametrize("draft", ["mtp:2", pytest.param("lookup+dflash:3", marks=pytest.mark.long)])
def test_every_kernel_that_an_engine_launches_is_on_the_list(compiler, draft: str) -> None:
    listed, launched = compiler(listed_and_launched, draft)
    assert launched <= listed, launched - listed
    assert len(launched) > 30


def listed_and_launched(draft: str) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """By the list, and by an engine whose tensors have memory and which serves prompts, steps and drafts."""
    import stoker.backends.network.load as load
    from stoker.backends.gpu.build import gpu_backend
    from stoker.backends.gpu.kernel_list import Needed, launches_told
    from stoker.backends.gpu.kernels.launch import assumed
    from stoker.engine.config import EngineConfig
    from stoker.engine.engine import Engine
    from stoker.sampling.settings import Sampling
    from stoker.speculate.choice import DraftChoice

    choice = DraftChoice.parse(draft)
    sizes = EngineConfig(pages=20, slots=2, max_depth=choice.depth, snapshots=2, prefill_budget=256)
    launched: list[Needed] = []
    prepare, load.prepare = load.prepare, lambda module, progress=None: None  # the CPU's own order of weights
    try:
        model = load.load_model(EMBEDDED).model
    finally:
        load.prepare = prepare
    with launches_told(target(), launched.append), assumed(card()):
        backend, drafter = gpu_backend(model, sizes, choice, EMBEDDED)
        backend.prompts._prefill.logits.zero_()  # which nothing computes
        engine = Engine(sizes, backend, drafter)
        for prompt, sampling in (
            (list(range(3, 100)), Sampling(max_tokens=6)),
            (list(range(7, 320)), Sampling(max_tokens=5, temperature=0.8)),
            ([5], Sampling(max_tokens=3, prompt_logprobs=0)),
            (list(range(3, 100)), Sampling(max_tokens=2)),
        ):
            engine.submit(prompt, sampling, depth=min(2, choice.depth))
        while not engine.idle:
            assert not any(event.error for event in engine.step())
    return {(each.name, each.key) for each in listed(sizes, draft)}, {(each.name, each.key) for each in launched}


def test_a_launch_finds_what_was_compiled_ahead(compiler, tmp_path: Path) -> None:
    """The list is made on tensors without memory, the launch on tensors with it."""
    assert compiler(hits, str(tmp_path)) == [True, False], "a kernel of the list, and one for other numbers"


def hits(folder: str) -> list[bool]:
    """Whether Triton finds the norm of prompts, at the model's size and at another, once the model's was compiled."""
    import torch
    from triton import knobs
    from triton.runtime.jit import KernelInterface

    from stoker.backends.gpu.kernel_list import compile_kernel
    from stoker.backends.gpu.kernels.launch import assumed
    from stoker.backends.gpu.kernels.prefill_rows import norm, norm_kernel
    from stoker.engine.config import EngineConfig
    from stoker.weights.model_config import ModelConfig

    found: list[bool] = []
    launch = KernelInterface.__getitem__
    model = ModelConfig.load(EMBEDDED)
    needed = listed(EngineConfig(pages=20, slots=2, max_depth=0, prefill_budget=256), "none")
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir, knobs.compilation.always_compile = folder, False
        for each in needed:
            if each.name == norm_kernel.__name__:
                compile_kernel(each)
        norm_kernel.device_caches.clear()  # or this process would know it without looking
        knobs.compilation.listener = lambda *, cache_hit, **rest: found.append(cache_hit)
        KernelInterface.__getitem__ = lambda self, grid: lambda *a, **k: self.run(*a, grid=grid, warmup=True, **k)
        try:
            with assumed(card()):
                for size in (model.hidden_size, 2 * model.hidden_size):
                    x, scale = torch.zeros(33, size, dtype=torch.bfloat16), torch.ones(size)
                    norm(x, scale, torch.zeros_like(x), model.rms_norm_eps, torch.zeros_like(x))
        finally:
            KernelInterface.__getitem__ = launch
            norm_kernel.device_caches.clear()
    return found


def test_kernels_are_hashed_in_one_order_whatever_was_launched_before(compiler) -> None:
    early, usual = compiler(hashes, ["route_kernel", "linear_kernel"]), compiler(hashes, [])
    assert len(usual) > 50
    assert early == usual


def hashes(launched: list[str]) -> dict[str, str]:
    """Of kernels and what they call, as a process finds them that launches these first."""
    from triton.runtime.jit import JITFunction

    from stoker.backends.gpu import kernel_list  # noqa: F401
    from stoker.backends.gpu.kernel_cache import hash_kernels

    modules = [module for name, module in sys.modules.items() if name.startswith("stoker.")]
    found = {
        value.__name__: value for each in modules for value in vars(each).values() if isinstance(value, JITFunction)
    }
    for each in found.values():
        each.hash = None  # as in a new process
        each.used_global_vals.clear()
    hash_kernels()
    for name in launched:
        _ = found[name].cache_key
    assert all(each.hash for each in found.values()), "all were hashed"
    return {name: each.cache_key for name, each in found.items()}


def test_processes_compile_what_is_listed(compiler, tmp_path: Path) -> None:
    lines = compiler(compiled_by_processes, str(tmp_path))
    assert lines[0] == [0, 1, False]
    assert lines[-1][0] == lines[-1][1] > 2
    assert lines[-1][2], "the list was complete"
    assert {file.name for file in tmp_path.glob("*/*.cubin")} == {f"{name}.cubin" for name in CHEAP}


def compiled_by_processes(folder: str) -> list[Any]:
    """What is told of it, of some kernels of the demo."""
    from triton import knobs

    from stoker.backends.gpu import compile_worker
    from stoker.backends.gpu.compile_ahead import Task
    from stoker.backends.gpu.kernel_list import list_kernels
    from stoker.engine.config import EngineConfig
    from stoker.speculate.choice import DraftChoice

    sizes, output = EngineConfig(pages=20, slots=1, max_depth=0), io.StringIO()

    def some(directory: Path, sizes: Any, draft: Any, target: Any, card: Any, found: Any) -> None:
        list_kernels(
            directory, sizes, draft, target, card, lambda needed: found(needed) if needed.name in CHEAP else None
        )

    task = Task(EMBEDDED, sizes, DraftChoice.parse("none"), ("cuda", 90, 32), card(), 2)
    with (
        patch.object(compile_worker, "list_kernels", some),
        patch.object(compile_worker, "_end_with_input", lambda: None),  # this process has no input
        knobs.cache.scope(),
    ):
        knobs.cache.dir = folder
        compile_worker.compile_all(task, compile_worker.Progress(output))
    return [json.loads(line) for line in output.getvalue().splitlines()]


def test_a_start_goes_on_if_nothing_could_be_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from stoker.backends.gpu.compile_ahead import Compilation, Task
    from stoker.backends.gpu.kernels.launch import Card
    from stoker.engine.config import EngineConfig
    from stoker.speculate.choice import DraftChoice

    monkeypatch.setattr(sys, "executable", "/bin/false")
    task = Task(EMBEDDED, EngineConfig(), DraftChoice.parse("none"), ("cuda", 90, 32), Card((9, 0), 132), 1)
    with Compilation(task, tmp_path, "key") as compilation:
        compilation.wait(lambda done, total: None)
    assert "ended with exit code 1: they are compiled one by one" in caplog.text
    assert not list(tmp_path.iterdir()), "the next start tries again"
    mark_complete(tmp_path, "key")


def target() -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", 90, 32)


def card() -> Any:
    from stoker.backends.gpu.kernels.launch import Card

    return Card((9, 0), 132)


def listed(sizes: Any, draft: str) -> list[Any]:
    from stoker.backends.gpu.kernel_list import list_kernels
    from stoker.speculate.choice import DraftChoice

    found: list[Any] = []
    list_kernels(EMBEDDED, sizes, DraftChoice.parse(draft), target(), card(), found.append)
    return found
