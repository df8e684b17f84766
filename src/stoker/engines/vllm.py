"""vLLM: a recipe as a `vllm serve` command that the installed version's own parser accepts, here or in a container."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stoker.engines import container, vllm_parser
from stoker.engines.engine import PORT, Deployment, Launch, Phase
from stoker.engines.vllm_log import Phases
from stoker.engines.vllm_parser import Installed, Report, VllmError
from stoker.recipes import shell
from stoker.recipes.formats import flags
from stoker.recipes.formats.flags import Option, option
from stoker.recipes.load import Loaded
from stoker.recipes.recipe import Recipe

# What the keeper decides, whatever the recipe's public address is.
OWN = ("--host", "--port", "--served-model-name", "--uds", "--root-path")
# Passed where the version knows them: cached tokens in usage, which the smoke test counts; a log without the keeper's
# questions.
WELCOME = (
    option("--enable-prompt-tokens-details"),
    option("--disable-access-log-for-endpoints", "/health,/metrics"),
)
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "NO_COLOR": "1"}
START_TIMEOUT_S = 3600.0  # 76 GB at 150 MB/s are 8.5 minutes, and compiling comes after


class Vllm:
    name = "vllm"

    def __init__(self) -> None:
        self._phases = Phases()

    def version(self) -> str:
        return vllm_parser.find().version

    def problems(self, recipe: Recipe) -> list[str]:
        serve, found = recipe.serve, []
        if recipe.nodes:
            found.append("this version of Stoker starts vLLM on one box only: take [nodes] out.")
        if serve.memory_gib is not None or serve.reserve_gib is not None:
            found.append(
                "vLLM takes a share of the memory: write serve.memory_share in place of memory_gib, reserve_gib."
            )
        if serve.kv_dtype == "fp32":
            found.append("vLLM has no FP32 KV cache: write serve.kv_dtype = bf16 or fp8.")
        if serve.draft.startswith("dflash") and not recipe.drafter:
            found.append("vLLM takes a DFlash drafter out of files of its own: write them as [drafter].")
        found += shell.problems(recipe)
        if recipe.container and not container.is_present(recipe.container.image):
            return found  # its parser is asked once it has been fetched
        return found + self.report(recipe).problems(recipe.engine_version)

    def report(self, recipe: Recipe) -> Report:
        """What vLLM's parser says of the recipe, in the container if it has one."""
        drafter = recipe.drafter.source if recipe.drafter else ""
        return _check(recipe, arguments(recipe, recipe.model.source, drafter))

    def deployment(self, loaded: Loaded, model: Path, drafter: Path | None, memory_bytes: int) -> Deployment:
        """Arguments that the parser does not know or refuses are not in the command; `problems` tells them."""
        recipe = loaded.recipe
        said = arguments(recipe, str(model), str(drafter) if drafter else "")
        accepted = set(_check(recipe, said).accepted)
        passed = [part for each in (*said, *WELCOME) if tuple(each.written) in accepted for part in each.written]
        name = _name(recipe)
        own = ["--host", "127.0.0.1", "--port", PORT, "--served-model-name", name]
        command = ("serve", str(model), *own, *passed)
        return Deployment(
            recipe=recipe.name,
            recipe_hash=loaded.hash,
            engine="vllm",
            launches=(_launch(recipe, command, [path for path in (model, drafter) if path]),),
            model_name=name,
            ready_path="/health",  # its server listens once the engine is ready
            memory_bytes=memory_bytes,
            start_timeout_s=START_TIMEOUT_S,
        )

    def phase(self, line: str) -> Phase | None:
        return self._phases.read(line)


def arguments(recipe: Recipe, model: str, drafter: str) -> list[Option]:
    """What the recipe says in words of `vllm serve`, without what the keeper decides."""
    found = []
    for each in flags.write(recipe):
        name = each.flag.partition(".")[0]
        if name in OWN:
            continue
        found.append(_speculation(recipe, drafter) if name == "--speculative-config" and _ours(recipe, each) else each)
    return found


def _ours(recipe: Recipe, said: Option) -> bool:
    """Whether it comes from serve.draft, and not from serve.arguments."""
    return recipe.serve.draft != "none" and said.values == [json.dumps(flags.drafting(recipe))]


def _speculation(recipe: Recipe, drafter: str) -> Option:
    found = flags.drafting(recipe)
    found.pop("revision", None)
    if drafter:
        found["model"] = drafter
    return option("--speculative-config", json.dumps(found))


def _name(recipe: Recipe) -> str:
    return recipe.serve.name or recipe.name


def _check(recipe: Recipe, said: Sequence[Option]) -> Report:
    """Of the recipe's arguments and those that Stoker adds where they are known; what is said of these is left out."""
    prefix: tuple[str, ...] = ()
    if recipe.container:
        image = recipe.container.image
        if not container.is_present(image):
            fetch = " ".join(container.pull(image))
            raise VllmError(f"the image {image} is not here, so its vLLM cannot be asked. Fetch it: {fetch}")
        prefix = container.probing(image)
    options = [each.written for each in (*said, *WELCOME)]
    found = vllm_parser.check(options, tuple(recipe.env), recipe.engine_version, prefix)
    ours = [tuple(each.written) for each in WELCOME]
    return msgspec.structs.replace(found, unknown=tuple(each for each in found.unknown if each.option not in ours))


def _launch(recipe: Recipe, arguments: tuple[str, ...], mounts: list[Path]) -> Launch:
    env = {**ENVIRONMENT, **recipe.env}
    if recipe.container is None:
        return _bare(vllm_parser.find(), arguments, env)
    inside = shell.inside(recipe.shell, ("vllm", *arguments))
    return container.launch(recipe.container, inside, env, mounts, recipe.name, recipe.serve.device)


def _bare(installed: Installed, arguments: tuple[str, ...], env: dict[str, str]) -> Launch:
    if installed.alias:
        path = env.get("PYTHONPATH")
        env = {**env, "PYTHONPATH": f"{path}:." if path else "."}
    return Launch((installed.command, *arguments), env, files=installed.alias)
