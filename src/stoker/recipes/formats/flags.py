"""Arguments of `vllm serve` as settings of a recipe, and back.

What has no setting of its own is kept among `serve.arguments`, as it is.
"""

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.recipes.load import SECRET, USERINFO, is_remote
from stoker.recipes.recipe import Files, Recipe

SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-sc": "--speculative-config",
    "-n": "--nnodes",
    "-r": "--node-rank",
}
KV = {"auto": "", "bfloat16": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8"}
KV_BACK = {"bf16": "bfloat16", "fp8": "fp8"}
# Options with one JSON value, which may also be given key by key: --flag.key value
JSON_FLAGS = ("--speculative-config", "--default-chat-template-kwargs", "--override-generation-config")
# What decides over boxes; `place` in translate.py reads it.
PARALLEL = {
    "--tensor-parallel-size": "tensor",
    "--pipeline-parallel-size": "pipeline",
    "--enable-expert-parallel": "expert",
    "--nnodes": "nodes",
    "--node-rank": "rank",
    "--master-addr": "address",
    "--master-port": "port",
    "--headless": "headless",
    "--distributed-executor-backend": "backend",
}
# Not said by a recipe, these have other values in vLLM than in ours.
DEFAULTS = {
    "--max-num-seqs": "users = 4 (vLLM: 256 or more)",
    "--host": "host = 127.0.0.1 (vLLM: every interface)",
    "--enable-prefix-caching": "prefix_cache = true (vLLM: as the model allows)",
}
SECRETS = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
_MTP = re.compile(r"(\w+_)?mtp\Z")
_NUMBER = re.compile(r"-\d+(\.\d+)?\Z")
_SHORT_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])\Z")
_SCALE = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass
class Settings:
    """Of a recipe, as its TOML tables; `parallel` is what decides over boxes."""

    serve: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] | None = None
    revision: str = ""
    parallel: dict[str, str] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)  # what is not carried over, and why


@dataclass
class Option:
    flag: str  # long and with hyphens; empty: arguments before the first option
    values: list[str]
    written: list[str]  # as it was given


def option(flag: str, *values: str) -> Option:
    return Option(flag, list(values), [flag, *values])


def options(arguments: Sequence[str]) -> list[Option]:
    """Arguments by option. A number such as -1 is a value."""
    found: list[Option] = []
    for token in arguments:
        if token.startswith("-") and len(token) > 1 and not _NUMBER.match(token):
            flag, equals, value = token.partition("=")
            name, dot, key = flag.partition(".")
            flag = SHORT.get(name, name.replace("_", "-") if name.startswith("--") else name) + dot + key
            found.append(Option(flag, [value] if equals else [], [token]))
        elif found:
            found[-1].values.append(token)
            found[-1].written.append(token)
        else:
            found.append(Option("", [token], [token]))
    return found


def read(arguments: Sequence[str], model: str = "") -> Settings:
    """Settings out of arguments; of an option given twice the last one counts, as for vLLM."""
    settings = Settings()
    found = _joined(options(arguments))
    last = {option.flag: option for option in found}
    rest: list[str] = []
    if "--tool-call-parser" in last and "--enable-auto-tool-choice" not in last:
        last.pop("--tool-call-parser")  # by itself it is for tools that a request forces: kept as it is
    for option in found:
        read_one = _KNOWN.get(option.flag)
        if option.flag in PARALLEL or read_one:
            if last.get(option.flag) is not option and option.flag in last:
                continue
            if option.flag in PARALLEL:
                settings.parallel[PARALLEL[option.flag]] = option.values[0] if option.values else "true"
                continue
            if option.flag in last and read_one and read_one(settings, option.values, model):
                continue
        elif secret(option.flag) or any(map(secret_value, option.written)):
            said = f"recipes hold no secrets: set {SECRETS.get(option.flag, 'it')} in the environment of stoker up"
            settings.problems.append((f"{option.flag}: (hidden)", said))
            continue
        rest += option.written
    if "--enable-auto-tool-choice" in last and "tool_parser" not in settings.serve:
        rest.append("--enable-auto-tool-choice")
    if rest:
        settings.serve["arguments"] = rest
    defaults = [
        ours for flag, ours in DEFAULTS.items() if flag not in last and flag.replace("enable", "no-enable") not in last
    ]
    if defaults:
        settings.problems.append(("what it does not say", f"Stoker's own values hold: {', '.join(defaults)}"))
    return settings


def _joined(found: list[Option]) -> list[Option]:
    """Options given key by key (--speculative-config.method mtp) as one with JSON."""
    kept: list[Option] = []
    tables: dict[str, Option] = {}
    for option in found:
        flag, dot, key = option.flag.partition(".")
        if not dot or flag not in JSON_FLAGS or len(option.values) != 1 or "." in key:
            kept.append(option)
            continue
        if flag not in tables:
            tables[flag] = Option(flag, ["{}"], [])
            kept.append(tables[flag])
        value: Any = option.values[0]
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
        table = {**json.loads(tables[flag].values[0]), key.replace("-", "_"): value}
        tables[flag].values = [json.dumps(table)]
        tables[flag].written = [flag, json.dumps(table)]
    return kept


def secret(name: str) -> bool:
    """Whether a name is of something that recipes must not hold."""
    return bool(SECRET.search(name.replace("-", "_")))


def secret_value(text: str) -> bool:
    """Whether a text has a name and a password in an address."""
    return bool(USERINFO.search(text))


Read = Callable[[Settings, list[str], str], bool]  # whether it understood the values


def _count(key: str, least: int = 1) -> Read:
    def read_it(settings: Settings, values: list[str], model: str) -> bool:
        number = _whole(values)
        if key == "context" and values in (["-1"], ["auto"]):
            return True
        if number is None or number < least or (key == "port" and number > 65535):
            return False
        settings.serve[key] = number
        return True

    return read_it


def _whole(values: list[str]) -> int | None:
    """A number of vLLM, where 32k is 32,000 and 32K is 32,768."""
    if len(values) != 1 or len(values[0]) > 12:
        return None
    text = values[0]
    if text.isascii() and text.isdigit():
        return int(text)
    short = _SHORT_COUNT.match(text)
    if not short or (short[2].isupper() and "." in short[1]):
        return None
    return int(float(short[1]) * _SCALE[short[2]]) if "." in short[1] else int(short[1]) * _SCALE[short[2]]


def _text(key: str) -> Read:
    def read_it(settings: Settings, values: list[str], model: str) -> bool:
        if len(values) != 1 or not values[0]:
            return False
        settings.serve[key] = values[0]
        return True

    return read_it


def _name(settings: Settings, values: list[str], model: str) -> bool:
    if not values or not values[0]:
        return False
    settings.serve["name"] = values[0]
    for other in values[1:]:
        settings.problems.append((f"--served-model-name {other}", "a recipe gives the model one name"))
    return True


def _memory(settings: Settings, values: list[str], model: str) -> bool:
    try:
        share = float(values[0]) if len(values) == 1 else 0.0
    except ValueError:
        return False
    if not 0 < share <= 1:
        return False
    settings.serve["memory_share"] = share
    return True


def _kv(settings: Settings, values: list[str], model: str) -> bool:
    if len(values) != 1 or values[0] not in KV:
        return False
    if KV[values[0]]:
        settings.serve["kv_dtype"] = KV[values[0]]
    return True


def _switch(key: str, value: bool) -> Read:
    def read_it(settings: Settings, values: list[str], model: str) -> bool:
        if values:
            return False
        settings.serve[key] = value
        return True

    return read_it


def _auto_tools(settings: Settings, values: list[str], model: str) -> bool:
    return not values  # written again from tool_parser


def _object(values: list[str]) -> dict[str, Any] | None:
    if len(values) != 1:
        return None
    try:
        found = json.loads(values[0])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _template(settings: Settings, values: list[str], model: str) -> bool:
    found = _object(values)
    if found is None or not _fits_toml(found):
        return False
    settings.serve["template"] = found
    return True


def _fits_toml(value: Any) -> bool:
    """TOML has no null, its whole numbers have 64 bits, and floats should be finite."""
    if isinstance(value, dict):
        return all(_fits_toml(inner) for inner in value.values())
    if isinstance(value, list):
        return all(_fits_toml(inner) for inner in value)
    if isinstance(value, int | float):
        return abs(value) < 2**63
    return isinstance(value, str)


def _sampling(settings: Settings, values: list[str], model: str) -> bool:
    found = _object(values)
    if found is None or not all(type(value) in (int, float) and abs(value) < 2**53 for value in found.values()):
        return False
    settings.serve["sampling"] = {key: float(value) for key, value in found.items()}
    return True


def _draft(settings: Settings, values: list[str], model: str) -> bool:
    found = _object(values) or {}
    method, depth, drafter = str(found.get("method")), found.get("num_speculative_tokens"), found.get("model")
    unknown = set(found) - {"method", "num_speculative_tokens", "model", "revision"}
    if type(depth) is int and depth > 0 and not unknown:
        if _MTP.match(method) and drafter in (None, model) and "revision" not in found:
            settings.serve["draft"] = f"mtp:{depth}"
            return True
        revision = found.get("revision", "")
        if method == "dflash" and isinstance(drafter, str) and isinstance(revision, str):
            with contextlib.suppress(ValueError):
                settings.drafter = files(drafter, revision)
                settings.serve["draft"] = f"dflash:{depth}"
                return True
    settings.problems.append(
        (
            "--speculative-config as a setting",
            "draft says only mtp:K and dflash:K: this one stays among serve.arguments, and the plan does not count it",
        )
    )
    return False


def _revision(settings: Settings, values: list[str], model: str) -> bool:
    if len(values) != 1 or not values[0]:
        return False
    settings.revision = values[0]
    return True


_KNOWN: dict[str, Read] = {
    "--served-model-name": _name,
    "--host": _text("host"),
    "--port": _count("port"),
    "--max-model-len": _count("context"),
    "--max-num-seqs": _count("users"),
    "--max-num-batched-tokens": _count("prefill_tokens"),
    "--kv-cache-dtype": _kv,
    "--gpu-memory-utilization": _memory,
    "--enable-prefix-caching": _switch("prefix_cache", True),
    "--no-enable-prefix-caching": _switch("prefix_cache", False),
    "--enable-auto-tool-choice": _auto_tools,
    "--tool-call-parser": _text("tool_parser"),
    "--reasoning-parser": _text("reasoning_parser"),
    "--default-chat-template-kwargs": _template,
    "--override-generation-config": _sampling,
    "--speculative-config": _draft,
    "--revision": _revision,
}


_MODEL_ID = re.compile(r"[\w.-]+(/[\w.-]+)?\Z")


def files(model: str, revision: str = "") -> dict[str, Any]:
    """A model as another tool names it, as our table: a hub's OWNER/NAME or a path. ValueError: neither."""
    if model.startswith(("/", "./", "../", "~")):
        return {"source": model}
    if not _MODEL_ID.match(model):
        raise ValueError(f"{model!r} is neither OWNER/NAME nor a path")
    return {"source": f"hf:{model}", **({"revision": revision} if revision and revision != "main" else {})}


def hub_name(source: Files) -> str:
    """A model of ours as other tools name it."""
    return source.source.removeprefix("hf:") if is_remote(source) else source.source


def write(recipe: Recipe) -> list[Option]:
    """The arguments of a recipe for one box, in a steady order. What decides over boxes is not among them."""
    serve = recipe.serve
    model = hub_name(recipe.model)
    name = serve.name or recipe.name
    said: list[tuple[str, object]] = [
        ("--served-model-name", name if name != model else None),
        ("--host", serve.host),
        ("--port", serve.port),
        ("--max-model-len", serve.context),
        ("--max-num-seqs", serve.users),
        ("--max-num-batched-tokens", serve.prefill_tokens),
        ("--kv-cache-dtype", KV_BACK.get(serve.kv_dtype)),
        ("--gpu-memory-utilization", serve.memory_share),
        ("--enable-prefix-caching" if serve.prefix_cache else "--no-enable-prefix-caching", ()),
        ("--enable-auto-tool-choice", () if serve.tool_parser else None),
        ("--tool-call-parser", serve.tool_parser or None),
        ("--reasoning-parser", serve.reasoning_parser or None),
        ("--default-chat-template-kwargs", json.dumps(serve.template) if serve.template else None),
        ("--override-generation-config", json.dumps(_sampled(serve.sampling)) if serve.sampling else None),
        ("--speculative-config", json.dumps(drafting(recipe)) if serve.draft != "none" else None),
    ]
    found = []
    for flag, value in said:
        if value is not None:
            found.append(option(flag) if value == () else option(flag, str(value)))
    return found + options(serve.arguments)


def _sampled(sampling: dict[str, float]) -> dict[str, float]:
    """Whole numbers without a point: vLLM refuses top_k = 20.0."""
    return {key: int(value) if float(value).is_integer() else value for key, value in sampling.items()}


def drafting(recipe: Recipe) -> dict[str, Any]:
    """vLLM's speculative config."""
    kind, _, depth = recipe.serve.draft.partition(":")
    found: dict[str, Any] = {"method": kind}
    if recipe.drafter:
        found["model"] = hub_name(recipe.drafter)
        if recipe.drafter.revision != "main":
            found["revision"] = recipe.drafter.revision
    return {**found, "num_speculative_tokens": int(depth)}
