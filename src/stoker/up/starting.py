"""An engine of a service started through its keeper: beside the one that serves or in its place, and waited for."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import psutil

from stoker.cards import nvidia_cards
from stoker.engines.engine import Deployment
from stoker.errors import StokerError
from stoker.plan.catalog import GIB
from stoker.recipes.recipe import Recipe
from stoker.up.control import Control
from stoker.up.state import Instance, Status
from stoker.up.told import Told

Mode = Literal["beside", "swap"]
POLL_S = 0.2
ROLL_BACK_S = 3600.0  # that an engine which is started again may take before its command stops waiting
FREE_SHARE = 0.05  # of the box's memory that stays free beside two engines


class StartError(StokerError):
    """An engine that did not start. What served before serves on, or again."""


@dataclass(frozen=True)
class Launched:
    """An engine that is ready."""

    service: Control
    instance: Instance
    accepted: bool  # it serves already


class Starter:
    def __init__(self, recipe: Recipe, name: str, host: str, port: int, service: bool, told: Told) -> None:
        """`service`: systemd runs the keeper."""
        self._recipe, self._told = recipe, told
        self._name, self._host, self._port, self._service = name, host, port, service

    def start(self, deployment: Deployment, begin: Callable[[Mode], None]) -> Launched:
        """Starts it, or goes on with a start of it that an earlier command began. `begin` is called before it is."""
        service = Control.start(self._name, self._host, self._port, self._service)
        status = service.status()
        candidate, serving = status.candidate, status.serving
        if candidate and candidate.state != "failed" and candidate.deployment != deployment:
            service.reject(f"stoker up {self._recipe.name} took its place")
            candidate = None
        if candidate is None or candidate.state == "failed":
            if serving and serving.deployment == deployment and serving.state != "failed":
                return Launched(service, self._wait(service, lambda status: status.serving), accepted=True)
            mode = self._mode(serving, deployment)
            begin(mode)
            service.apply(deployment, mode)
        return Launched(service, self._wait(service, lambda status: status.candidate), accepted=False)

    def afterwards(self, service: Control) -> str:
        """What is left after a failure, once it has come to that: the old engine, or nothing."""
        until = time.monotonic() + ROLL_BACK_S
        while (found := service.status()).serving and found.state not in ("serving", "failed"):
            if time.monotonic() > until:
                break
            self._told.doing(f"{found.serving.deployment.recipe} comes back")
            time.sleep(POLL_S)
        if found.serving:
            old = found.serving.deployment.recipe
            return f" {old} serves on." if found.state == "serving" else f" {old} does not serve: see stoker status."
        service.stop(now=True)
        return " Nothing is left running."

    def _mode(self, serving: Instance | None, deployment: Deployment) -> Mode:
        """Beside the engine that serves if both fit, else in its place; the user hears why."""
        if serving is None:
            return "beside"
        if serving.state in ("failed", "stopped"):
            return "swap"
        free, total = available()
        room, needed = free - FREE_SHARE * total, deployment.memory_bytes
        old = serving.deployment.recipe
        if needed and needed <= room and not self._recipe.nodes:
            self._told.say(
                f"{old} serves on meanwhile: {free / GIB:.1f} GiB are free and {needed / GIB:.1f} are needed beside it."
            )
            return "beside"
        why = (
            f"{free / GIB:.1f} GiB are free, and {needed / GIB:.1f} with {FREE_SHARE:.0%} to spare are needed"
            if needed
            else "how much memory is needed is not known"
        )
        self._told.say(
            f"{old} ends first: {why}. Clients get 503 with Retry-After meanwhile, and {old} comes back if that fails."
        )
        return "swap"

    def _wait(self, service: Control, of: Callable[[Status], Instance | None]) -> Instance:
        """Until it is ready, phase by phase."""
        while True:
            status = service.status()
            instance = of(status)
            if instance is None or instance.state == "failed":
                fault = instance.fault if instance else next(iter(status.warnings), "it was rejected")
                log = f" The log: {instance.log}." if instance else ""
                after = self.afterwards(service)
                raise StartError(f"{self._recipe.name} did not start: {fault}.{log}{after}")
            if instance.state == "ready":
                return instance
            if instance.state == "restarting":
                self._told.doing(f"it is restarted: {instance.fault}")
            elif phase := instance.phase:
                detail = f": {phase.detail}" if phase.detail else ""
                self._told.doing(f"{phase.name}{detail}", phase.percent or 0, 100 if phase.percent is not None else 0)
            time.sleep(POLL_S)


def taken(instance: Instance, free_before: int) -> int:
    """Bytes that an engine took: on a CPU those of its processes, else what less an engine could take now."""
    if nvidia_cards():
        return max(0, free_before - available()[0]) if free_before else 0
    try:
        first = psutil.Process(instance.pid)
        return sum(each.memory_full_info().uss for each in (first, *first.children(recursive=True)))
    except (psutil.Error, ValueError):
        return 0


def available() -> tuple[int, int]:
    """Bytes that an engine could take now, and of all: of the cards, or of memory that is shared or the only one."""
    cards = [card for card in nvidia_cards() if card.total]
    if cards:
        return sum(card.free for card in cards), sum(card.total for card in cards)
    memory = psutil.virtual_memory()
    return memory.available, memory.total
