"""vLLM: a recipe as `vllm serve` commands that the installed version's own parser accepts, here, in a container, or on
several boxes."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stoker.engines import container, vllm_nodes, vllm_parser
from stoker.engines.engine import PORT, Deployment, Launch, Phase
from stoker.engines.vllm_log import Phases
from stoker.engines.vllm_parser import Report, VllmError
from stoker.recipes import shell
from stoker.recipes.formats import flags
from stoker.recipes.formats.flags import Option, option
from stoker.recipes.load import Loaded
from stoker.recipes.recipe import Recipe
from stoker.up import nodes
from stoker.up.nodes import Survey

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

    def version(self, recipe: Recipe | None = None) -> str:
        if recipe and recipe.container:
            return f"in {recipe.container.image}"
        if recipe and recipe.nodes:
            return _surveyed(recipe, None, None).boxes[0].version
        return vllm_parser.find().version

    def problems(self, recipe: Recipe) -> list[str]:
        serve, found = recipe.serve, []
        if serve.memory_gib is not None or serve.reserve_gib is not None:
            found.append("vLLM takes a share of the memory: write serve.memory_share, not memory_gib or reserve_gib.")
        if serve.kv_dtype == "fp32":
            found.append("vLLM has no FP32 KV cache: write serve.kv_dtype = bf16 or fp8.")
        if serve.draft.startswith("dflash") and not recipe.drafter:
            found.append("vLLM takes a DFlash drafter out of files of its own: write them as [drafter].")
        survey = nodes.survey(recipe, None, None, _command(recipe)) if recipe.nodes else None
        if survey and survey.problems:
            return [*found, *survey.problems]
        if recipe.container and not recipe.nodes and not container.is_present(recipe.container.image):
            return found  # its parser is asked once it has been fetched
        return found + self.report(recipe, survey).problems(recipe.engine_version)

    def report(self, recipe: Recipe, survey: Survey | None = None) -> Report:
        """What vLLM's parser says of the recipe: of this machine, of the first box, or in the container."""
        drafter = recipe.drafter.source if recipe.drafter else ""
        return _check(recipe, arguments(recipe, recipe.model.source, drafter), survey)

    def deployment(self, loaded: Loaded, model: Path, drafter: Path | None, memory_bytes: int) -> Deployment:
        """Arguments that the parser does not know or refuses are not in the command; `problems` tells them."""
        recipe = loaded.recipe
        survey = _surveyed(recipe, model, drafter) if recipe.nodes else None
        said = arguments(recipe, str(model), str(drafter) if drafter else "")
        accepted = set(_check(recipe, said, survey).accepted)
        passed = [part for each in (*said, *WELCOME) if tuple(each.written) in accepted for part in each.written]
        name = _name(recipe)
        own = ["--host", "127.0.0.1", "--port", PORT, "--served-model-name", name]
        command = ("serve", str(model), *own, *passed)
        mounts = [path for path in (model, drafter) if path]
        return Deployment(
            recipe=recipe.name,
            recipe_hash=loaded.hash,
            engine="vllm",
            launches=_on_boxes(recipe, survey, command, mounts) if survey else (_launch(recipe, command, mounts),),
            model_name=name,
            ready_path="/health",  # its server listens once the engine is ready
            memory_bytes=memory_bytes,
            start_timeout_s=START_TIMEOUT_S,
        )

    def phase(self, line: str) -> Phase | None:
        return self._phases.read(line)


def arguments(recipe: Recipe, model: str, drafter: str) -> list[Option]:
    """What the recipe says in words of `vllm serve`, without what the keeper decides and what differs by rank."""
    found = []
    for each in flags.write(recipe):
        name = each.flag.partition(".")[0]
        if name in OWN:
            continue
        found.append(_speculation(recipe, drafter) if name == "--speculative-config" and _ours(recipe, each) else each)
    return found + (vllm_nodes.options(recipe.nodes) if recipe.nodes else [])


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


def _command(recipe: Recipe) -> str:
    """Where boxes may have `vllm`: where this machine has it, if it does. Else on their PATH."""
    try:
        return "" if recipe.container else vllm_parser.find().command
    except VllmError:
        return ""


def _surveyed(recipe: Recipe, model: Path | None, drafter: Path | None) -> Survey:
    found = nodes.survey(recipe, model, drafter, _command(recipe))
    if found.problems:
        raise nodes.NodesError(" ".join(found.problems))
    return found


def _check(recipe: Recipe, said: Sequence[Option], survey: Survey | None = None) -> Report:
    """Of the recipe's arguments and those that Stoker adds where they are known; what is said of these is left out."""
    options = [each.written for each in (*said, *WELCOME)]
    prefix, host = _python(recipe, survey)
    if recipe.nodes:
        options += [each.written for each in vllm_nodes.rank_options(recipe.nodes, 1, "192.0.2.1")]
    found = vllm_parser.check(options, tuple(recipe.env), recipe.engine_version, prefix, host)
    ours = [tuple(each.written) for each in WELCOME]
    return msgspec.structs.replace(found, unknown=tuple(each for each in found.unknown if each.option not in ours))


def _python(recipe: Recipe, survey: Survey | None) -> tuple[tuple[str, ...], str]:
    """The Python that has the vLLM which will run, and the host that it is on."""
    head = survey.boxes[0] if survey else None
    if recipe.container:
        image = recipe.container.image
        if head and head.facts:
            return container.probing(image, head.facts.image["program"]), head.ssh
        if not container.is_present(image):
            fetch = " ".join(container.pull(image))
            raise VllmError(f"the image {image} is not here, so its vLLM cannot be asked. Fetch it: {fetch}")
        return container.probing(image), ""
    if head and head.facts:
        return (head.facts.vllm["python"],), head.ssh
    return (), ""


def _launch(recipe: Recipe, arguments: tuple[str, ...], mounts: list[Path]) -> Launch:
    env = {**ENVIRONMENT, **recipe.env}
    if recipe.container:
        inside = shell.inside(recipe.shell, ("vllm", *arguments))
        return container.launch(recipe.container, inside, env, mounts, recipe.name, recipe.serve.device)
    installed = vllm_parser.find()
    files = vllm_parser.alias(installed.package, installed.version)
    return Launch((installed.command, *arguments), vllm_parser.with_alias(env, files), files=files)


def _on_boxes(recipe: Recipe, survey: Survey, arguments: tuple[str, ...], mounts: list[Path]) -> tuple[Launch, ...]:
    assert recipe.nodes
    head = survey.boxes[0]
    ranks = []
    for rank in range(len(survey.boxes)):
        more = vllm_nodes.rank_options(recipe.nodes, rank, head.address)
        ranks.append((*arguments, *[part for each in more for part in each.written]))
    return vllm_nodes.launches(recipe, survey.boxes, ranks, ENVIRONMENT, mounts)
