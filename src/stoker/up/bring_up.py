"""`stoker up`: a recipe becomes a running, checked service. Every stage goes on where an earlier run of it stopped.

plan, probe, fetch, build, inspect, start, smoke test, measure. A keeper holds the engines, so that this may be killed
at any moment; journal.py remembers what has been done.
"""

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import psutil

from stoker.bench.target import Target
from stoker.engines.engine import KEYS, Deployment, find
from stoker.errors import BenchError, StokerError
from stoker.plan.catalog import GIB
from stoker.recipes import shell
from stoker.recipes.load import Loaded
from stoker.recipes.recipe import Recipe, Step
from stoker.up import build, control, files, journal, receipt, state, systemd
from stoker.up.control import Control
from stoker.up.fetch import FetchProgress
from stoker.up.made import Made, make
from stoker.up.measure import GENERAL, Measured, cells, measure
from stoker.up.planning import DoesNotFit, Planned, box_of, plan
from stoker.up.probe import probe_box
from stoker.up.probe_readings import BoxProbe, shown
from stoker.up.receipt import Receipt, Revision
from stoker.up.smoke import Smoke, SmokeError, smoke_test
from stoker.up.starting import Launched, Mode, Starter, available, taken
from stoker.up.state import Instance, Status
from stoker.up.told import Told

PROBE_LASTS_S = 86400.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Options:
    name: str = state.DEFAULT
    host: str = ""  # empty: the recipe's
    port: int | None = None  # None: the recipe's; 0: a free one
    box: str | None = None
    service: bool = False  # under systemd
    yes: bool = False
    measure: bool = True


@dataclass(frozen=True)
class Outcome:
    receipt: Receipt
    file: Path
    url: str
    context: int | None  # most tokens of a request
    new: bool  # False: all of it had been done before


def address(recipe: Recipe, options: Options) -> tuple[str, int]:
    """Host and port that were asked for, else those that the service has, else the recipe's."""
    saved = state.read(options.name)
    has = (saved.host, saved.port) if saved and not saved.stopped else (recipe.serve.host, recipe.serve.port)
    return options.host or has[0], has[1] if options.port is None else options.port


class Up:
    """One run of `stoker up`, of one recipe on one service."""

    def __init__(self, loaded: Loaded, options: Options, told: Told, ask: Callable[[str], bool] | None = None) -> None:
        """`ask` puts a question to the user; None where nobody can be asked."""
        self._loaded, self._recipe, self._options = loaded, loaded.recipe, options
        self._told, self._ask = told, ask
        self._engine = find(loaded.recipe.engine)
        self._key = os.environ.get(KEYS[loaded.recipe.engine], "")
        self._host, self._port = address(loaded.recipe, options)
        self._starter = Starter(loaded.recipe, options.name, self._host, self._port, options.service, told)

    def run(self) -> Outcome:
        with state.lock(self._options.name, f"stoker up {self._recipe.name}"):
            self._journal = journal.load(self._options.name, self._loaded.hash)
            return self._run()

    def _run(self) -> Outcome:
        version = self._preflight()
        running = control.status(self._options.name)
        planned = self._plan(running)
        shell.confirm(self._recipe, self._options.yes, self._told.say, self._ask)
        self._probe(running)
        model, drafter, revisions = self._fetch()
        built = self._build(model, revisions)
        self._inspect(built or model)
        deployment = self._engine.deployment(self._loaded, built or model, drafter, planned.memory_bytes)
        launched = self._start(deployment)
        service, instance, accepted = launched.service, launched.instance, launched.accepted
        before = Path(self._journal.receipt)
        if accepted and before.is_file() and (self._journal.measured or not self._options.measure):
            return Outcome(receipt.read(before), before, service.status().url, self._context, new=False)
        self._shell("after", instance.address)
        self._smoke(service, instance, accepted)
        url = service.status().url
        self._measure(url, deployment.model_name)
        here = self._options.box or _box(self._journal.probe)
        what = Made(self._loaded, planned, deployment, instance, version, tuple(revisions), str(built or ""), here)
        file = receipt.write(make(what, self._options.name, self._journal))
        self._journal.receipt = str(file)
        journal.save(self._options.name, self._journal)
        return Outcome(receipt.read(file), file, url, self._context, new=True)

    @property
    def _context(self) -> int | None:
        return (self._journal.smoke.context if self._journal.smoke else None) or self._recipe.serve.context

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._journal.stage = name
        journal.save(self._options.name, self._journal)
        self._told.stage(name)
        began = time.monotonic()
        yield
        self._journal.seconds[name] = round(time.monotonic() - began, 3)
        journal.save(self._options.name, self._journal)

    # -- before anything is started

    def _preflight(self) -> str:
        """The engine's version. Raises with everything that it could not do."""
        control.Control.check(self._options.name, self._host, self._port)
        version = self._engine.version()
        problems = [*files.missing(self._loaded), *self._engine.problems(self._recipe), *shell.problems(self._recipe)]
        if problems:
            raise StokerError(
                f"{self._recipe.name} cannot run with {self._recipe.engine} {version}: {' '.join(problems)}"
            )
        if (known := self._recipe.known) and known.state == "broken":
            raise StokerError(f"{self._recipe.name} is known not to work: {known.where}.")
        if known and known.state == "parses":
            self._told.say(f"note: nobody is known to have run {self._recipe.name}: {known.where}.")
        serve, asked = self._recipe.serve, self._options.host or self._options.port is not None
        if not asked and (serve.host, serve.port) != (self._host, self._port):
            self._told.say(
                f"note: the service stays at {self._host}, port {self._port}. The recipe says {serve.host}, port "
                f"{serve.port}: stoker down first, and it goes there."
            )
        if self._host not in LOOPBACK and not self._key:
            self._told.say(
                f"The service will answer on {self._host} without a key: whoever reaches that address may use it. Set "
                f"{KEYS[self._recipe.engine]}, or choose --host 127.0.0.1."
            )
        if self._options.service:
            for text in systemd.notes(self._options.name, KEYS[self._recipe.engine] if self._key else ""):
                self._told.say(f"note: {text}.")
        return version

    def _plan(self, running: Status | None) -> Planned:
        """What runs in this service ends, or is the same: its memory is not counted against the recipe."""
        serving = running.serving if running and running.keeper_pid else None
        freed = serving.deployment.memory_bytes if serving and serving.state not in ("failed", "stopped") else 0
        same = bool(freed and serving and serving.deployment.recipe_hash == self._loaded.hash)
        with self._stage("plan"):
            box = box_of(self._recipe, self._options.box)
            on_disk = files.on_disk(self._loaded, self._recipe.model)
            try:
                planned = plan(self._loaded, box, on_disk, freed)
            except DoesNotFit as error:
                if not same:
                    raise
                planned = error.planned  # it runs
            self._told.done(_planned(planned))
        return planned

    def _probe(self, running: Status | None) -> None:
        found, asked = self._journal.probe, self._options.box or ""
        if found and self._journal.box == asked and (_fresh(found.date) or (running and running.keeper_pid)):
            return
        with self._stage("probe"):
            model = files.on_disk(self._loaded, self._recipe.model)
            self._journal.probe = probe = probe_box(self._options.box, model, told=self._told.doing)
            self._journal.box = asked
            warnings = [each.text for each in probe.findings if each.kind == "warning"]
            self._told.done(_probed(probe, len(warnings)))
            for text in warnings:
                self._told.say(f"warning: {text}.")

    def _fetch(self) -> tuple[Path, Path | None, list[Revision]]:
        wanted = [("model", self._recipe.model)]
        wanted += [("drafter", self._recipe.drafter)] if self._recipe.drafter else []
        paths, revisions = [], []
        with self._stage("fetch"):
            for what, each in wanted:
                here, note = files.fetch_files(self._loaded, what, each, self._fetching)
                paths.append(here.path)
                revisions.append(here.revision)
                if note:
                    self._told.say(f"{note}.")
            self._told.done(", ".join(f"{each.source} {_short(each.revision)}".strip() for each in revisions))
        return paths[0], paths[1] if len(paths) > 1 else None, revisions

    def _fetching(self, progress: FetchProgress) -> None:
        self._told.doing(f"{progress.step} {progress.note}".strip(), progress.done, progress.total)

    def _build(self, model: Path, revisions: Sequence[Revision]) -> Path | None:
        if not self._recipe.build:
            return None
        out = build.folder(self._loaded, model, revisions[0].revision)
        with self._stage("build"):
            if not build.is_built(out):
                self._told.say(f"stoker build makes {out}; interrupted, it goes on the next time.")
                build.run(self._loaded, model, out)
            self._told.done(str(out))
        return out

    def _inspect(self, path: Path) -> None:
        with self._stage("inspect"):
            self._told.done(files.check(path, self._recipe.engine))

    # -- the engine

    def _start(self, deployment: Deployment) -> Launched:
        with self._stage("start"):
            launched = self._starter.start(deployment, self._begin)
            self._remember(deployment, launched.instance)
            instance = launched.instance
            if not self._journal.memory_bytes:
                self._journal.memory_bytes = taken(instance, self._journal.free_before)
            if launched.accepted:
                self._told.done(f"{deployment.model_name} runs already, {instance.address}")
                return launched
            phases = " · ".join(f"{each.name} {each.seconds:.1f}" for each in instance.phases)
            self._told.done(f"ready after {instance.ready_s:.1f} s ({phases})")
        return launched

    def _begin(self, mode: Mode) -> None:
        """Just before the engine is started."""
        self._journal.shell = []
        self._shell("before", "")
        self._journal.free_before = available()[0] if mode == "beside" else 0
        self._journal.memory_bytes = 0
        journal.save(self._options.name, self._journal)

    def _remember(self, deployment: Deployment, instance: Instance) -> None:
        """What was found out about an engine holds for that start of it alone."""
        if self._journal.log != instance.log or self._journal.deployment != deployment:
            self._journal.log, self._journal.deployment = instance.log, deployment
            self._journal.smoke, self._journal.measured, self._journal.receipt = None, [], ""

    def _shell(self, when: Literal["before", "after"], url: str) -> None:
        """The recipe's steps on this machine, each once per start. The user has agreed to them."""
        for step in shell.on_this_machine(self._recipe.shell, when):
            if (mark := _mark(step)) not in self._journal.shell:
                env = {**self._recipe.env, **({"STOKER_URL": url} if url else {})}
                shell.run(step, self._loaded.folder, env, self._told.say)
                self._journal.shell.append(mark)
                journal.save(self._options.name, self._journal)

    # -- what it is worth

    def _smoke(self, service: Control, instance: Instance, accepted: bool) -> None:
        if self._journal.smoke is None:
            try:
                with self._stage("smoke test"):
                    self._journal.smoke = found = asyncio.run(self._test(instance))
                    self._told.done(_smoked(found))
            except (SmokeError, BenchError) as error:
                reason = f"the smoke test failed: {error}"
                if accepted:
                    raise SmokeError(f"{reason} It serves on; the log: {instance.log}") from error
                service.reject(reason)
                after = self._starter.afterwards(service)
                raise SmokeError(
                    f"{self._recipe.name} was not taken over: {reason} The log: {instance.log}.{after}"
                ) from error
            for note in found.notes:
                self._told.say(f"note: {note}.")
        if not accepted:
            service.accept()

    async def _test(self, instance: Instance) -> Smoke:
        async with Target(instance.address, instance.deployment.model_name, self._key) as target:
            exact = self._recipe.engine == "stoker"
            found = await smoke_test(target, self._recipe.serve.prefix_cache, exact, self._told.doing)
            found.context = target.context
            return found

    def _measure(self, url: str, model: str) -> None:
        """Through the address that clients use."""
        if not self._options.measure or self._journal.measured:
            return
        chosen = cells(self._recipe.expected.speed, self._context)
        with self._stage("measure"):

            async def run() -> None:
                async with Target(url, model, self._key) as target:
                    self._journal.measured = await measure(target, chosen, watcher)

            with self._told.measuring(chosen) as watcher:
                asyncio.run(run())
            self._told.done(_measured(self._journal.measured))


def _box(probe: BoxProbe | None) -> str:
    """The planner's name of this box."""
    return probe.published.box if probe and probe.published else ""


def _probed(probe: BoxProbe, warnings: int) -> str:
    name = probe.published.name if probe.published else probe.processor.name
    speeds = [f"{each.device} reads weights at {shown(each.gemv_gb_s)} GB/s" for each in probe.speeds]
    return ", ".join([name, *speeds, *([f"{warnings} warning{'s' * (warnings > 1)}"] if warnings else [])])


def _planned(planned: Planned) -> str:
    if planned.answer is None:
        return planned.note
    speed, budget = planned.answer.short, planned.answer.budget
    left = f"{budget.free_bytes / GIB:.1f} GiB left of {budget.capacity / GIB:.1f}"
    return f"fits {planned.box.name}, {left}; ≈ {speed.tokens_per_s:.1f} tokens/s predicted"


def _smoked(found: Smoke) -> str:
    cached = "not told" if found.cached_tokens is None else f"{found.cached_tokens:,}"
    same = "answers identical" if found.identical else "answers differ"
    return (
        f"chat {found.chat_tokens} tokens, tool call {found.tool_call.partition('(')[0]}, "
        f"{cached} of {found.long_prompt_tokens:,} tokens cached the second time, {same}"
    )


def _measured(rows: Sequence[Measured]) -> str:
    general, failed = rows[-1].decode_tokens_per_s, sum(row.failed for row in rows if row.workload != GENERAL)
    said = f"{general:.1f} tokens/s, the median of one user's workloads" if general else "no speed could be measured"
    return f"{said}; {failed} requests failed" if failed else said


def _fresh(date: str) -> bool:
    """Of this day, and of this start of the machine."""
    at = datetime.fromisoformat(date).timestamp()
    return time.time() - at < PROBE_LASTS_S and at > psutil.boot_time()


def _short(revision: str) -> str:
    return f"@{revision[:12]}" if revision else ""


def _mark(step: Step) -> str:
    return hashlib.sha256(f"{step.when}\0{step.run}".encode()).hexdigest()[:16]
