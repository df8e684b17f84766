"""An engine's command in a container of docker or podman, its image by digest."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from stoker.engines.engine import PORT, Launch
from stoker.errors import StokerError
from stoker.recipes.recipe import Container

PROGRAM = "STOKER_CONTAINER"  # environment: docker, podman, or a path of one
# What vLLM compiled and tuned is kept on the host: it saves most of a minute at every start.
CACHES = ("vllm", "flashinfer", "triton")
SECRETS = ("HF_TOKEN", "VLLM_API_KEY")  # passed on by name: their values are on no command line
DETAILS_S = 20.0


def program() -> str:
    named = os.environ.get(PROGRAM)
    found = shutil.which(named) if named else shutil.which("docker") or shutil.which("podman")
    if not found:
        asked = f"{PROGRAM}={named} cannot be found" if named else "neither docker nor podman is installed"
        raise StokerError(f"the recipe runs in a container, and {asked}. Install one, or take [container] out.")
    return found


def is_podman(program: str) -> bool:
    return Path(program).name.startswith("podman")


def launch(
    container: Container,
    command: tuple[str, ...],
    env: Mapping[str, str],
    mounts: Iterable[Path],
    name: str,
    device: str,
    host: str = "",
    program_there: str = "",
) -> Launch:
    """`docker run` in the foreground, so that its log is the engine's and its end the container's.

    The host's network and memory segments are the container's, as engines of several processes need. Models keep their
    paths. The container is removed when its launcher ends, however that happens.
    """
    docker = program_there or program()
    unique = f"stoker-{name}-{PORT}"
    said = [docker, "run", "--rm", "--init", "--name", unique, "--network", "host", "--ipc", "host"]
    said += ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864", *_devices(docker, device)]
    for path in sorted({root(path) for path in mounts}):
        said += ["--volume", f"{path}:{path}:ro"]
    for cache in CACHES:
        said += ["--volume", f"stoker-{cache}:/root/.cache/{cache}"]
    for secret in SECRETS:
        said += ["--env", secret]
    for key, value in sorted(env.items()):
        said += ["--env", f"{key}={value}"]
    said += container.arguments
    if not any(each.partition("=")[0] == "--entrypoint" for each in container.arguments):
        said += ["--entrypoint", command[0]]
        command = command[1:]
    return Launch(
        command=(*said, container.image, *command),
        host=host,
        cleanup=(docker, "rm", "--force", unique),
    )


def root(path: Path) -> Path:
    """What must be mounted for a model: files of a hub's cache are links out of their folder."""
    for parent in path.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return parent.parent
    return path


def _devices(docker: str, device: str) -> list[str]:
    if device == "cpu":
        return []
    if os.path.exists("/dev/kfd"):  # AMD
        return ["--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "video"]
    return ["--device", "nvidia.com/gpu=all"] if is_podman(docker) else ["--gpus", "all"]


def is_present(image: str) -> bool:
    """Whether the image has been pulled. Raises StokerError if nobody answers."""
    docker = program()
    done = _ask([docker, "image", "inspect", "--format", "{{.Id}}", image])
    if done.returncode == 0:
        return True
    if re.search(r"no such image|not known|not found|does not exist", done.stderr, re.IGNORECASE):
        return False
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    raise StokerError(f"{Path(docker).name} cannot be asked for the image {image}: {last}")


def pull(image: str) -> list[str]:
    """The command that fetches an image; its output is progress for people."""
    return [program(), "pull", image]


def probing(image: str, program_there: str = "") -> tuple[str, ...]:
    """What runs its Python once, without a network, and without fetching the image."""
    docker = program_there or program()
    return (docker, "run", "--rm", "--pull", "never", "--network", "none", "--entrypoint", "python3", image)


def _ask(command: list[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DETAILS_S, text=True, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StokerError(f"{command[0]} cannot be asked: {error}") from error
