"""The data files of this package as objects, and the nearest names where a name is not among them."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from stoker.errors import RequestError
from stoker.plan.models import Model, from_config
from stoker.sizes.network import Drafter
from stoker.sizes.weights import GGUF, Scheme

DATA = Path(__file__).parent / "data"
GIB = 1 << 30
HUB_TIMEOUT_S = 5.0
LARGEST_CONFIG = 1 << 22  # bytes of a config.json


@dataclass(frozen=True)
class Box:
    key: str
    name: str
    architecture: str
    unified: bool  # one memory for processor and accelerator: the operating system lives in it too
    devices: int
    memory_gb: float
    visible_gib: float
    usable_gib: float
    reserve_gib: float
    bandwidth_gb_s: float  # of one device, on paper
    achievable_gb_s: float
    tflops_bf16: float
    power_w: float
    power_idle_w: float
    date: str
    source: str
    link_gb_s: float = 0.0  # between devices; 0: one device
    price_usd: float | None = None  # None: nobody was found who states one
    price_source: str = ""  # and when it was read
    aliases: tuple[str, ...] = ()
    base: str = ""  # what rows call one of the boxes that this is made of; empty: the key
    count: int = 1  # of such boxes

    @property
    def of_rows(self) -> tuple[str, int]:
        """Box and number as rows name them."""
        return self.base or self.key, self.count

    @property
    def visible_bytes(self) -> int:
        return int(self.visible_gib * GIB)

    @property
    def reserve_bytes(self) -> int:
        return int(self.reserve_gib * GIB)


@cache
def read(name: str) -> dict[str, Any]:
    with (DATA / name).open("rb") as file:
        return tomllib.load(file)


@cache
def boxes() -> tuple[Box, ...]:
    return tuple(Box(**{**entry, "aliases": tuple(entry.get("aliases", ()))}) for entry in read("boxes.toml")["box"])


@cache
def models() -> tuple[Model, ...]:
    return tuple(_model(name) for name in _names())


@cache
def _names() -> dict[str, tuple[str, ...]]:
    """Every model's names: its own, and what else it is called."""
    return {entry["name"]: (entry["name"], *entry["aliases"]) for entry in read("models.toml")["model"]}


@cache
def _model(name: str) -> Model:
    raw = read("models.toml")
    entry = next(entry for entry in raw["model"] if entry["name"] == name)
    return from_config(
        {**(raw[entry["like"]] if "like" in entry else {}), **entry["config"]},
        f"models.toml: {name}",
        name,
        vision_parameters=entry.get("vision_parameters", 0),
        drafter=Drafter(**entry["dflash"]) if "dflash" in entry else None,
        default_weights=entry["default_weights"],
        source=entry["source"],
    )


@cache
def by_row_name() -> dict[str, Model]:
    """Every model of a measured row by its name in lower case: those with a page of their own and those that are only
    evidence."""
    names = [alias for aliases in _names().values() for alias in aliases] + list(_others())
    return {name.lower(): model for name in names if (model := model_of_row(name))}


@cache
def model_of_row(name: str) -> Model | None:
    """The model of a measured row; None where nobody knows its shape."""
    wanted = name.lower()
    for known, aliases in _names().items():
        if wanted in {alias.lower() for alias in aliases}:
            return _model(known)
    entry = _others().get(wanted)
    return _other(entry) if entry else None


@cache
def _others() -> dict[str, str]:
    """Names of rows in lower case -> the entry of others.toml."""
    return {row.lower(): entry["name"] for entry in read("others.toml")["other"] for row in entry["rows"]}


@cache
def _other(name: str) -> Model:
    from stoker.plan.families import stranger

    entry = next(entry for entry in read("others.toml")["other"] if entry["name"] == name)
    return stranger(entry["config"], entry["name"], entry["source"])


def names_of_rows(model: Model) -> tuple[str, ...]:
    """The names, in lower case, under which rows have this model or one of the same shape."""
    entries = read("models.toml")["model"]
    own = next((e for e in entries if e["name"] == model.name), None)
    alike = [e for e in entries if own and (e["config"], e.get("like")) == (own["config"], own.get("like"))]
    found = [alias for e in alike for alias in (e["name"], *e["aliases"])]
    found += [row for row, entry in _others().items() if entry == model.name]
    return tuple(dict.fromkeys(name.lower() for name in (*found, model.name)))


@cache
def schemes() -> dict[str, Scheme]:
    own = ("title", "mtp", "not_gates", "approximate")
    return {
        key: Scheme(key, **{k: v for k, v in entry.items() if k in own},
                    parts={k: v for k, v in entry.items() if k not in own})
        for key, entry in read("weights.toml").items()
    }  # fmt: skip


def find_model(name: str, fetch: bool = True) -> Model:
    """A model of the catalogue by any of its names, one of those that are only evidence, a checkpoint directory, a
    config.json, `demo`, or a repository of the hub, whose config.json alone is fetched if `fetch`."""
    from stoker.demo import NAME, checkpoint_at
    from stoker.plan.models import from_file

    wanted = _plain(name.rsplit("/", 1)[-1])
    for known, aliases in _names().items():
        if wanted in {_plain(alias) for alias in aliases}:
            return _model(known)
    path = checkpoint_at(name)
    if name == NAME or path.is_dir() or path.suffix == ".json":
        file = path if path.suffix == ".json" else path / "config.json"
        model = from_file(file)
        called = "the embedded model" if name == NAME else model.name
        weights = "checkpoint" if path.is_dir() else model.default_weights
        return replace(model, name=called, default_weights=weights, source=str(file))
    for entry in read("others.toml")["other"]:
        if wanted in {_plain(known) for known in (entry["name"], *entry["rows"], *entry.get("aliases", ()))}:
            return replace(_other(entry["name"]), default_weights=entry.get("default_weights", "fp8"))
    if model_by_size := _of_size(name):
        return model_by_size
    if fetch and re.fullmatch(r"(hf:)?[\w.-]+/[\w.-]+", name):
        return _of_hub(name)
    near = suggestion(name, {alias: known for known, aliases in _names().items() for alias in aliases})
    raise RequestError(
        f"unknown model {name!r}, and no directory or config.json has that name. {near} Known: {', '.join(_names())}; "
        f"{', '.join(entry['name'] for entry in read('others.toml')['other'])}; any OWNER/NAME of the hub."
    )


def _of_size(name: str) -> Model | None:
    """A model that rows have and nobody's shapes: from the sizes that they state."""
    from stoker.plan.evidence import measurements
    from stoker.plan.families import sized

    wanted = _plain(name.rsplit("/", 1)[-1])
    for row in measurements():
        if _plain(row.model) == wanted and row.active_b and row.parameters_b:
            model = sized(row.model, 1e9 * row.active_b, 1e9 * row.parameters_b)
            return replace(model, default_weights="q4_k", source=f"sizes as row {row.id} states them")
    return None


def _of_hub(name: str) -> Model:
    from importlib.util import find_spec

    from stoker.plan.models import from_file, from_raw

    repository = name.removeprefix("hf:")
    if find_spec("huggingface_hub") is None:
        raise RequestError(
            f"unknown model {name!r}; to ask the hub for its config.json, huggingface_hub is needed: "
            "pip install -e '.[server]'."
        )
    import json
    from urllib.request import Request, urlopen

    from huggingface_hub import get_token, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    called, source = repository.rsplit("/", 1)[-1], f"hf:{repository}"
    try:
        cached = try_to_load_from_cache(repository, "config.json")
        if isinstance(cached, str):
            return replace(from_file(Path(cached), called), source=source)
        # asked once: the hub's own client repeats for half a minute where there is no network
        token = get_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        asked = Request(hf_hub_url(repository, "config.json"), headers=headers)
        with urlopen(asked, timeout=HUB_TIMEOUT_S) as response:
            raw = json.loads(response.read(LARGEST_CONFIG))
        return from_raw(raw, source, called)
    except (OSError, HFValidationError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RequestError(
            f"unknown model {name!r}, and its config.json could not be fetched from the hub ({first}). Give a "
            "directory, a config.json, or one of the models that stoker evidence lists."
        ) from error


def find_box(name: str) -> Box:
    """A box by any of its names, N of them (2x spark), one by its numbers (mem=128GB,bw=273GB/s), or `this`."""
    from stoker.plan.boxes import by_numbers, times

    if "=" in name:
        return by_numbers(name)
    wanted = _plain(name)
    if wanted in {"this", "here", "thismachine", "local"}:
        from stoker.plan.machine import this_machine

        return this_machine()
    for box in boxes():
        if wanted in {_plain(known) for known in (box.key, box.name, *box.aliases)}:
            return box
    if several := re.match(r"\s*(\d+)\s*[x*×]\s*(\S.*)", name, re.IGNORECASE):
        return times(int(several[1]), find_box(several[2]))
    known = {known: box.key for box in boxes() for known in (box.key, box.name, *box.aliases)}
    raise RequestError(
        f"unknown box {name!r}. {suggestion(name, known)} "
        f"Known: {', '.join(box.key for box in boxes())}, N of them as in '2x spark', this (the machine you are on), "
        "or any box by its numbers, as in mem=128GB,bw=273GB/s."
    )


# What people type for formats, without signs
CALLED = {
    "q4": "ud-q4_k", "ggufq4": "ud-q4_k", "gguf": "ud-q4_k", "q4kxl": "ud-q4_k", "udq4kxl": "ud-q4_k", "q4km": "q4_k",
    "q40": "gguf:4.5", "iq4xs": "gguf:4.3", "q5": "gguf:5.7", "q5km": "gguf:5.7", "ggufq5": "gguf:5.7",
    "q6": "gguf:6.6",
    "q6k": "gguf:6.6", "ggufq6": "gguf:6.6", "q8": "q8_0", "ggufq8": "q8_0", "ggufmxfp4": "mxfp4-gguf",
    "fp4": "nvfp4", "awq": "int4", "autoround": "int4", "w4a16": "int4", "4bit": "int4", "int4autoround": "int4",
    "gptq": "gptq-int4", "8bit": "fp8", "fp16": "bf16", "16bit": "bf16", "hybrid": "int4+fp8+int8head",
}  # fmt: skip


def find_scheme(name: str) -> Scheme:
    wanted = _plain(name)
    if wanted in CALLED:
        return scheme_of(CALLED[wanted])
    for key, scheme in schemes().items():
        if _plain(key) == wanted:
            return scheme
    if re.fullmatch(r"gguf:\d+(\.\d+)?", name):
        return scheme_of(name)
    hint = suggestion(name, {key: key for key in schemes()})
    raise RequestError(
        f"unknown weight format {name!r}. {hint} Known: {', '.join(schemes())}, gguf:BITS for an average of so many "
        "bits a weight, and what people call them: q4, q8, awq, gptq, mxfp4."
    )


GGUF_PARTS = ("routed", "shared", "dense", "deltanet", "attention", "head", "embedding")


def scheme_of(key: str) -> Scheme:
    """By its key; gguf:BITS is an average over all parts."""
    if key.startswith(GGUF):
        bits = key.removeprefix(GGUF)
        return Scheme(
            key, f"GGUF, about {bits} bits a weight", dict.fromkeys(GGUF_PARTS, key), "trunk", approximate=True
        )
    return schemes()[key]


def is_gguf(scheme: Scheme) -> bool:
    return any(part.startswith(GGUF) for part in scheme.parts.values())


def suggestion(name: str, known: Mapping[str, str]) -> str:
    """`known` leads from every name to the one to be suggested."""
    by_plain = {_plain(k): v for k, v in known.items()}
    close = get_close_matches(_plain(name), by_plain, n=3, cutoff=0.45)
    names = list(dict.fromkeys(by_plain[c] for c in close))
    return f"Did you mean {' or '.join(names)}?" if names else "Nothing there is close to it."


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum() or c == "+")
