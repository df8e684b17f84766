"""What to type for a plan: a shipped recipe where there is one, else build and serve, or the engine's own command."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import stoker
from stoker.plan.catalog import Box, find_model, read
from stoker.plan.memory import Ask, Budget
from stoker.plan.models import Model
from stoker.sizes.step import DFLASH

SHIPPED = Path(stoker.__file__).parent / "recipes" / "shipped"
# vLLM's parsers of tool calls and of thinking, by model_type
PARSERS = {
    "qwen3_5_moe": ("qwen3_coder", "qwen3"),
    "qwen3_5": ("qwen3_coder", "qwen3"),
    "qwen3_moe": ("hermes", "qwen3"),
    "gpt_oss": ("openai", "openai_gptoss"),
    "glm4_moe": ("glm45", "glm45"),
    "minimax_m2": ("minimax_m2", "minimax_m2_append_think"),
    "deepseek_v3": ("deepseek_v3", "deepseek_r1"),
}
BUILT = ("int4+fp8", "int4+int8head", "int4+fp8+int8head")  # formats that stoker build makes of published ones
MXFP4_FLAGS = "--quantization mxfp4 --mxfp4-layers moe,qkv,o,lm_head"


@dataclass(frozen=True)
class Command:
    line: str
    what: str = ""  # a word on it, where it needs one


def commands(model: Model, weights: str, box: Box, ask: Ask, budget: Budget) -> tuple[Command, ...]:
    if not budget.fits:
        return (Command("stoker pick --box " + _box_word(box), "what fits there"),)
    found = [*_up(model, weights, box, ask)]
    if not found:
        makes = {"vLLM": _vllm, "llama.cpp": _llama, "SGLang": _sglang, "stoker": _stoker}
        built = weights in BUILT and model.config is not None and ask.engine in ("vLLM", "stoker")
        found = [*(_built if built else makes[ask.engine])(model, weights, ask, budget)]
    return tuple(found)


def _box_word(box: Box) -> str:
    return f"'{box.count}x {box.base}'" if box.count > 1 and box.base else box.key


@cache
def _shipped() -> tuple[dict[str, Any], ...]:
    found = []
    for path in sorted(SHIPPED.glob("*.toml")):
        with path.open("rb") as file:
            found.append(tomllib.load(file))
    return tuple(found)


def _up(model: Model, weights: str, box: Box, ask: Ask) -> Iterator[Command]:
    """A recipe of this model, format and drafter, for as many boxes."""
    for recipe in _shipped():
        same = recipe.get("weights") == weights and recipe["serve"].get("draft", "none") == str(ask.draft)
        boxes = len(recipe.get("nodes", {}).get("hosts", ())) or 1
        served = boxes == box.count and ask.engine in ("stoker", "vLLM") and bool(recipe.get("plan"))
        if same and served and find_model(recipe["plan"]).name == model.name:
            engine = "Stoker's engine" if recipe.get("engine", "stoker") == "stoker" else "vLLM"
            yield Command(f"stoker up {recipe['name']}", f"fetches, builds, starts and measures; {engine}")
            return


def repository(model: Model, weights: str) -> str:
    """Of the published checkpoint; empty: the planner knows none."""
    entry: dict[str, Any] = next((e for e in read("models.toml")["model"] if e["name"] == model.name), {})
    known: dict[str, str] = entry.get("repositories", {})
    return known.get(weights, "")


def _built(model: Model, weights: str, ask: Ask, budget: Budget) -> Iterator[Command]:
    base, eight = repository(model, "int4"), repository(model, "fp8")
    if base:
        yield Command(f"hf download {base} --local-dir int4")
    else:
        yield Command(
            "", f"the planner knows no INT4 checkpoint of {model.name}: quantise one with stoker build --quantize"
        )
    parts = [f"--shared-experts {f'hf:{eight}' if eight else 'FP8_DIR'}"] if "fp8" in weights else []
    parts += ["--lm-head int8"] if "int8head" in weights else []
    parts += (
        [f"--drafter hf:{model.drafter.repository.split()[0]}"] if ask.draft.kind == DFLASH and model.drafter else []
    )
    yield Command(f"stoker build --base int4 {' '.join(parts)} --out fast")
    yield from _serve("fast", ask)


def _stoker(model: Model, weights: str, ask: Ask, budget: Budget) -> Iterator[Command]:
    found = repository(model, weights)
    if found:
        yield Command(f"hf download {found} --local-dir model")
    name = "demo" if model.name == "the embedded model" else "model"
    yield from _serve(name, ask)


def _serve(directory: str, ask: Ask) -> Iterator[Command]:
    kv = " --kv-dtype fp8" if ask.kv == "fp8" else ""
    yield Command(
        f"stoker serve --model {directory} --draft {ask.draft} --context {ask.context} --users {ask.users}{kv}"
    )


def _vllm(model: Model, weights: str, ask: Ask, budget: Budget) -> Iterator[Command]:
    found = repository(model, weights)
    tools, thinking = PARSERS.get(model.family, ("", ""))
    parts = [f"vllm serve {found or 'MODEL'}", *budget.flags]
    if weights == "mxfp4-all":
        parts.append(MXFP4_FLAGS)
    if tools:
        parts += ["--enable-auto-tool-choice", f"--tool-call-parser {tools}", f"--reasoning-parser {thinking}"]
    said = [] if found else [f"MODEL: its {weights} checkpoint, a directory or a repository of the hub"]
    said += ["in the image vllm-node-mxfp4 of eugr/spark-vllm-docker"] if weights == "mxfp4-all" else []
    said += [] if tools else ["add the parsers of tool calls and thinking that vLLM names for it"]
    yield Command(" ".join(parts), "; ".join(said))


def _sglang(model: Model, weights: str, ask: Ask, budget: Budget) -> Iterator[Command]:
    found = repository(model, weights)
    line = f"python -m sglang.launch_server --model-path {found or 'MODEL'} --context-length {ask.context}"
    yield Command(f"{line} --max-running-requests {ask.users}", "" if found else f"MODEL: its {weights} checkpoint")


def _llama(model: Model, weights: str, ask: Ask, budget: Budget) -> Iterator[Command]:
    line = f"llama-server -m MODEL.gguf -c {ask.context * ask.users} -np {ask.users} -ngl 999 -fa on --jinja"
    drafts = f"; add what your version takes for {ask.draft}" if ask.draft.drafting else ""
    yield Command(line, f"MODEL.gguf: a file of {model.name} in {weights}{drafts}")
