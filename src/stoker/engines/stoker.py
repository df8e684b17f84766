"""Stoker's own engine: a recipe as a `stoker serve` command."""

import json
import sys
from pathlib import Path

import stoker
from stoker.engines.engine import PORT, Deployment, Launch, Phase
from stoker.recipes.load import Loaded
from stoker.recipes.recipe import Recipe

RUN = (sys.executable, "-m", "stoker")


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
        )

    def phase(self, line: str) -> Phase | None:
        """Nothing: its /ready tells the phase."""
        return None
