"""Recipes out of TOML files, with the line of whatever is wrong; shipped ones by name."""

import hashlib
import json
import re
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from stoker.errors import StokerError, brief
from stoker.recipes.recipe import Files, Recipe, to_json

SHIPPED = Path(__file__).parent / "shipped"
SUFFIX = ".toml"
LARGEST = 1 << 20  # bytes of a recipe
# Names of environment variables whose values are secrets: `stoker up` would write them into receipts and logs.
# ..._TOKENS is a number of them.
SECRET = re.compile(r"(token|(secret|password|passwd|credential|(api|access|private)_?key)s?)\Z", re.IGNORECASE)
USERINFO = re.compile(r"://[^/@\s]+@")  # a name and a password in an address
_WRITTEN = re.compile(r"`[^`]*`")
# msgspec's names of types, as somebody who writes TOML calls them.
_NAMES = {
    "`str`": "a text",
    "`int`": "a whole number",
    "`int | null`": "a whole number",
    "`float`": "a number",
    "`float | null`": "a number",
    "`bool`": "true or false",
    "`array`": "a list [ ]",
    "`object`": "a table",
    "`object | null`": "a table",
}
_AT = re.compile(r" - at `(\$[^`]*)`\Z")
_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(#.*)?\Z")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


class RecipeError(StokerError):
    """A recipe that cannot be read, or that contradicts itself. The message names file and line."""


@dataclass(frozen=True)
class Loaded:
    """A recipe, and the folder that paths in it start from."""

    recipe: Recipe
    folder: Path
    text: str

    @property
    def hash(self) -> str:
        """Of what the recipe says, whatever its comments and its order of keys."""
        said = json.dumps(to_json(self.recipe), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(said.encode()).hexdigest()


def shipped() -> dict[str, Path]:
    """The recipes that come with Stoker, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob(f"*{SUFFIX}"))}


def find(name: str) -> Path:
    """The file of a recipe: a path, or the name of a shipped one."""
    if name.endswith(SUFFIX) or "/" in name:
        return Path(name)
    if name in shipped():
        return shipped()[name]
    near = get_close_matches(name.lower(), shipped(), n=2)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise RecipeError(f"unknown recipe {name!r}.{hint} Give a file NAME{SUFFIX} or one of: {', '.join(shipped())}.")


def load(name: str) -> Loaded:
    path = find(name)
    try:
        if not path.is_file():
            raise RecipeError(f"{path} is not a file; give a recipe in TOML, or one of: {', '.join(shipped())}.")
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}.") from error
    if len(data) > LARGEST:
        raise RecipeError(f"{path} is larger than {LARGEST:,} bytes; a recipe is a page of text.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise RecipeError(f"{path}, line {line}: the file is not UTF-8.") from error
    return Loaded(parse(text, str(path)), path.absolute().parent, text)


def parse(text: str, where: str = "the recipe") -> Recipe:
    """A recipe out of TOML. Raises RecipeError with `where` and the line of what is wrong."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where}: {error}.") from error
    except RecursionError as error:
        raise RecipeError(f"{where}: its values are nested too deeply.") from error
    try:
        recipe = msgspec.convert(data, Recipe)
    except msgspec.ValidationError as error:
        at = _AT.search(str(error))
        path = keys(at[1]) if at else []
        said = _WRITTEN.sub(lambda found: _NAMES.get(found[0], found[0]), _AT.sub("", str(error)))
        if unknown := re.search(r"unknown field `(.*)`\Z", said):
            path.append(unknown[1])
            said = f"unknown key {brief(unknown[1])}; known here: {', '.join(_known(path[:-1]))}"
        raise RecipeError(f"{where}, {_place(text, path)}: {said}.") from None
    for path, said in contradictions(recipe):
        raise RecipeError(f"{where}, {_place(text, path)}: {said}")
    return recipe


def contradictions(recipe: Recipe) -> list[tuple[list[str | int], str]]:
    """What does not go together, as the keys that lead to it and a sentence."""
    found: list[tuple[list[str | int], str]] = []
    for key in recipe.env:
        if SECRET.search(key):
            said = f"{key} looks like a secret, and recipes hold none; set it in the environment of stoker up."
            found.append((["env", key], said))
        if USERINFO.search(recipe.env[key]):
            said = f"{key} is an address with a password in it, and recipes hold none."
            found.append((["env", key], said))
    passed = [(["serve", "arguments"], recipe.serve.arguments)]
    passed += [(["container", "arguments"], recipe.container.arguments)] if recipe.container else []
    for path, arguments in passed:
        for argument in arguments:
            name, given, _ = argument.partition("=")
            valued = given or name.startswith("--")  # -e NAME of a container passes on what the environment has
            if (valued and SECRET.search(name.replace("-", "_"))) or USERINFO.search(argument):
                said = f"{brief(name)} looks like a secret, and recipes hold none; set it in the environment instead."
                found.append(([*path], said))
    if recipe.nodes and recipe.engine != "vllm":
        found.append((["nodes"], 'only engine = "vllm" runs on several boxes.'))
    if recipe.container and recipe.engine != "vllm":
        found.append((["container"], 'only engine = "vllm" runs in a container.'))
    if recipe.container and not re.search(r"@sha256:[0-9a-f]{64}\Z", recipe.container.image):
        said = (
            "the image is not named by digest (NAME@sha256:64 hexadecimal digits), so it may change under the recipe."
        )
        found.append((["container", "image"], said))
    kind = recipe.serve.draft.partition(":")[0]
    if recipe.engine == "vllm" and kind not in ("none", "mtp", "dflash"):
        said = f"vLLM drafts with none, mtp:K or dflash:K, not {brief(recipe.serve.draft)}."
        found.append((["serve", "draft"], said))
    if recipe.serve.memory_share is not None and recipe.engine != "vllm":
        found.append((["serve", "memory_share"], "memory_share is vLLM's; Stoker's engine takes memory_gib."))
    for key, files in (("model", recipe.model), ("drafter", recipe.drafter)):
        if files and not is_remote(files) and files.revision != "main":
            found.append(([key, "revision"], "only files of a hub (hf:OWNER/NAME) have a revision."))
    return found


def is_remote(files: Files) -> bool:
    return files.source.startswith("hf:")


def _known(path: list[str | int]) -> list[str]:
    """The keys that a table of the recipe may have."""
    kind: Any = Recipe
    for key in path:
        if isinstance(key, str):
            field = next(f for f in msgspec.structs.fields(kind) if f.encode_name == key)
            kind = _struct_of(field.type)
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def _struct_of(annotation: Any) -> Any:
    """The table's class in a field's type: in Annotated, in an optional, in a list."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    inner = (_struct_of(of) for of in getattr(annotation, "__args__", ()))
    return next((found for found in inner if found), None)


def keys(path: str) -> list[str | int]:
    """`$.expected.speed[1].users` as keys."""
    found: list[str | int] = []
    for name, index, quoted in re.findall(r"\.([^.\[]+)|\[(\d+)\]|\[(\.\.\.|[^\]]+)\]", path):
        found.append(int(index) if index else name or quoted)
    return [key for key in found if key != "..."]


def _place(text: str, path: list[str | int]) -> str:
    line = line_of(text, path)
    shown = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
    return f"line {line} ({shown})" if line and shown else f"line {line}" if line else shown or "line 1"


def line_of(text: str, path: list[str | int]) -> int | None:
    """The line of a key, or of the nearest table or array around it. `path` is as `keys` gives it."""
    best, deepest = None, 0
    table: list[str | int] = []
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = list(_dotted(header[2]))
            if header[1] == "[[":
                name = ".".join(map(str, table))
                counts[name] = counts.get(name, -1) + 1
                table.append(counts[name])
            here = table
        elif key := _KEY.match(line):
            here = [*table, *_dotted(key[1])]
        else:
            continue
        depth = len(here) if here == path[: len(here)] else 0
        if depth > deepest:
            best, deepest = number, depth
    return best


def _dotted(text: str) -> list[str]:
    return [part.strip("\"'") for part in re.findall(r""""[^"]*"|'[^']*'|[\w-]+""", text)]
