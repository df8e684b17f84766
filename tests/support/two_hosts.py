"""Two hosts on one machine: network namespaces with a cable between them, and an `ssh` that leads into them.

Each has a /dev/shm of its own too, so that engines do not find each other's memory. The namespaces belong to processes
and end with them, and no rights are needed where users may have namespaces.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

SHIM = Path(__file__).with_name("ssh_shim.py")
INTERFACE = "cable0"
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
# Makes the second namespace below the first, and the cable. It ends with its standard input.
_MAKE = f"""
set -e
ip link set lo up
mount -t tmpfs shm /dev/shm
unshare --net --mount sh -c 'mount -t tmpfs shm /dev/shm; exec sleep 100000' &
while [ "$(readlink /proc/$!/ns/net)" = "$(readlink /proc/$$/ns/net)" ]; do sleep 0.01; done
ip link add {INTERFACE} type veth peer name {INTERFACE} netns $!
ip addr add {ADDRESSES["a"]}/24 dev {INTERFACE}
ip link set {INTERFACE} up
nsenter --net=/proc/$!/ns/net sh -c 'ip link set lo up; ip addr add {ADDRESSES["b"]}/24 dev {INTERFACE}; \
ip link set {INTERFACE} up'
echo $$ $!
read end || true
kill $!
"""


def _unshare() -> list[str]:
    return ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--net", "--mount"]


def why_not() -> str:
    """Why there cannot be namespaces here; empty: there can."""
    if not all(shutil.which(name) for name in ("unshare", "nsenter", "ip")):
        return "unshare, nsenter or ip is missing"
    done = subprocess.run([*_unshare(), "mount", "-t", "tmpfs", "shm", "/dev/shm"], capture_output=True, text=True)
    return done.stderr.strip()


class Hosts:
    """`a` and `b`, as ssh knows them while PATH begins with `bin`."""

    def __init__(self, folder: Path, pids: dict[str, int]) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self._file = folder / "hosts.json"
        self._hosts: dict[str, dict[str, Any]] = {}
        for name, pid in pids.items():
            home = folder / name
            home.mkdir()
            self._hosts[name] = {"pid": pid, "user": os.geteuid() != 0, "home": str(home), "env": {}, "down": ""}
        self.bin.mkdir()
        ssh = self.bin / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {SHIM} {self._file} "$@"\n')
        ssh.chmod(0o755)
        self._write()

    def home(self, name: str) -> Path:
        return Path(self._hosts[name]["home"])

    def processes(self, name: str) -> list[psutil.Process]:
        """All that runs on a host, whatever it calls itself and whatever it has done to its environment."""
        holder = int(self._hosts[name]["pid"])
        space, found = os.readlink(f"/proc/{holder}/ns/net"), []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                ended = process.status() == psutil.STATUS_ZOMBIE
                if os.readlink(f"/proc/{process.pid}/ns/net") == space and process.pid != holder and not ended:
                    found.append(process)
        return found

    def change(self, name: str, **changes: Any) -> None:
        """`env` is what a login there has; `down` is what ssh says in place of connecting."""
        self._hosts[name] |= changes
        self._write()

    def _write(self) -> None:
        self._file.write_text(json.dumps(self._hosts))


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    maker = subprocess.Popen(
        [*_unshare(), "sh", "-c", _MAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert maker.stdin
    assert maker.stdout
    assert maker.stderr
    try:
        line = maker.stdout.readline().split()
        assert len(line) == 2, maker.stderr.read().decode()
        yield Hosts(folder, {"a": int(line[0]), "b": int(line[1])})
    finally:
        maker.stdin.close()
        maker.wait(timeout=10)
        maker.stdout.close()
        maker.stderr.close()
