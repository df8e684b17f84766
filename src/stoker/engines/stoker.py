"""Stoker's own engine: a recipe as a `stoker serve` command."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import stoker
from stoker.engines.engine import PORT, Deployment, Launch, Phase
from stoker.errors import visible
from stoker.recipes.load import Loaded
from stoker.recipes.recipe import Recipe

FRAME = " │╭╮╰╯─"  # around the errors that typer prints
STALL_S = 150.0  # its server restarts a hanging engine process by itself after 120 s, which is sooner done
RUN = (sys.executable, "-m", "stoker")


def _misunderstood(arguments: Sequence[str]) -> str:
    """What its own parser says to them, empty if nothing: --help is only reached with options that it knows."""
    command = [*RUN, "serve", "--model", "demo", *arguments, "--help"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    lines = [line.strip(FRAME) for line in done.stderr.splitlines()]
    said = [line for line in lines if line and not line.startswith(("Usage:", "Try ", "Error"))]
    return visible(" ".join(said) or f"it ended with exit status {done.returncode}", keep="")


def _sampling(defaults: dict[str, float]) -> dict[str, float]:
    """top_k is a whole number, which TOML may write as 20.0."""
    return {name: int(value) if value == int(value) and name == "top_k" else value for name, value in defaults.items()}


class Stoker:
    name = "stoker"

    def version(self, recipe: Recipe | None = None) -> str:
        return stoker.__version__

    def problems(self, recipe: Recipe) -> list[str]:
        serve, found = recipe.serve, []
        if recipe.drafter:
            found.append(
                "Stoker's engine takes a DFlash drafter out of the checkpoint: write it as drafter = ... in [build]."
            )
        if serve.prefill_tokens is not None:
            found.append("Stoker's engine chooses how many prompt tokens a step takes: leave out serve.prefill_tokens.")
        if serve.arguments and (said := _misunderstood(serve.arguments)):
            found.append(f"stoker serve does not understand serve.arguments: {said}")
        return found

    def deployment(self, loaded: Loaded, model: Path, drafter: Path | None, memory_bytes: int) -> Deployment:
        recipe, serve = loaded.recipe, loaded.recipe.serve
        name = serve.name or recipe.name
        options: dict[str, object] = {
            "--draft": serve.draft,
            "--users": serve.users,
            "--device": serve.device,
            "--context": serve.context,
            "--kv-dtype": serve.kv_dtype or None,
            "--memory": serve.memory_gib,
            "--reserve": serve.reserve_gib,
            "--prefix-cache": None if serve.prefix_cache else 0,
            "--served-model-name": name,
            "--default-chat-template-kwargs": json.dumps(serve.template) if serve.template else None,
            "--default-sampling": json.dumps(_sampling(serve.sampling)) if serve.sampling else None,
        }
        said = [str(part) for key, value in options.items() if value is not None for part in (key, value)]
        # --any-model: coding agents ask for models by their vendor's names
        command = (*RUN, "serve", "--model", str(model), "--port", PORT, *said, "--any-model", *serve.arguments)
        return Deployment(
            recipe=recipe.name,
            recipe_hash=loaded.hash,
            engine="stoker",
            launches=(Launch(command, dict(recipe.env)),),
            model_name=name,
            ready_path="/ready",
            memory_bytes=memory_bytes,
            stall_s=STALL_S,
        )

    def phase(self, line: str) -> Phase | None:
        """Nothing: its /ready tells the phase."""
        return None
