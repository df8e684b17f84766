"""A service under systemd's user manager, on request: started with the machine, and again if its keeper is killed."""

import getpass
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from stoker.errors import StokerError

_UNIT = """\
[Unit]
Description=Stoker service {name}
After=network-online.target

[Service]
ExecStart={command}
# Secrets of engines, such as STOKER_API_KEY=...; a file that only its user can read.
EnvironmentFile=-{secrets}
Environment={environment}
Restart=on-failure
RestartSec=2
# The keeper ends its engines, when their requests are done.
KillMode=mixed
TimeoutStopSec=180

[Install]
WantedBy=default.target
"""


class Started:
    """A unit that was started."""

    pid: int | None = None  # systemd's to know

    def __init__(self, unit: str) -> None:
        self._unit = unit

    def ended(self) -> bool:
        return subprocess.run(_systemctl("is-active", "--quiet", self._unit), check=False).returncode != 0


def unit_name(name: str) -> str:
    return f"stoker-{name}.service"


def unit_file(name: str) -> Path:
    return _config() / "systemd" / "user" / unit_name(name)


def _config() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config").absolute()


def unit(name: str, command: list[str]) -> str:
    """The text of the unit. It keeps where state and programs are, and no secret."""
    kept = {key: os.environ[key] for key in ("PATH", "STOKER_STATE_HOME", "XDG_STATE_HOME") if key in os.environ}
    environment = " ".join(_quoted(f"{key}={value}") for key, value in kept.items())
    secrets = str(secrets_file(name)).replace("%", "%%")
    return _UNIT.format(name=name, command=" ".join(map(_quoted, command)), environment=environment, secrets=secrets)


def secrets_file(name: str) -> Path:
    """What the user writes secrets into that the service needs when it starts by itself."""
    return _config() / "stoker" / f"{name}.env"


def notes(name: str, key: str) -> Iterator[str]:
    """What is left to the user. `key`: the variable whose value clients must have, if they must."""
    if key and not secrets_file(name).exists():
        yield (
            f"systemd starts the service again without this environment: write {key}=... into {secrets_file(name)}, "
            "readable for you alone, or it will not start"
        )
    if not Path("/var/lib/systemd/linger", getpass.getuser()).exists():
        yield "it starts when you log in; after `loginctl enable-linger` it starts with the machine"


def start(name: str, command: list[str]) -> Started:
    """Writes the unit, enables and starts it. Raises where no user manager runs."""
    install(name, command)
    _run("start", unit_name(name))
    return Started(unit_name(name))


def install(name: str, command: list[str]) -> Path:
    """Writes and enables the unit, so that the service starts with the next login or, with lingering, the next boot."""
    if shutil.which("systemctl") is None:
        raise StokerError("this machine has no systemd (there is no systemctl): start the service without --service.")
    _run("show-environment")
    file = unit_file(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(unit(name, command), encoding="utf-8")
    _run("daemon-reload")
    _run("enable", unit_name(name))
    return file


def remove(name: str) -> bool:
    """Whether there was a unit, which is disabled and gone now. The service itself is left alone."""
    file = unit_file(name)
    if not file.exists():
        return False
    _run("disable", unit_name(name))
    file.unlink(missing_ok=True)
    _run("daemon-reload")
    return True


def _systemctl(*arguments: str) -> list[str]:
    return ["systemctl", "--user", *arguments]


def _run(*arguments: str) -> None:
    done = subprocess.run(_systemctl(*arguments), capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise StokerError(
            f"systemd's user manager refused `systemctl --user {' '.join(arguments)}`: "
            f"{said[-1] if said else done.returncode}. Start the service without --service if there is no such manager."
        )


def _quoted(word: str) -> str:
    """A word of a unit file, where % and $ mean something."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'
