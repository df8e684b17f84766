"""YAML of strangers: read within limits into plain values, each with its line, and walked with errors that name it.

Only plain data is read: text, numbers, booleans, lists and tables. A `Table` knows which of its keys were asked for, so
that an importer can list the others instead of dropping them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from stoker.errors import brief
from stoker.recipes.load import RecipeError

LARGEST = 256 << 10  # bytes; the longest recipe published in these formats has 58 KB, most of it a guide
MOST_VALUES = 20_000  # after aliases are followed
DEEPEST = 32

_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + name for name in ("str", "int", "float", "bool", "null")}
_AS_TEXT = {_TAG + "timestamp", _TAG + "value"}  # dates stay as they are written

Place = tuple[str | int, ...]


@dataclass
class Source:
    """Where values come from, for messages."""

    name: str
    lines: dict[Place, int] = field(default_factory=dict)

    def error(self, place: Place, said: str) -> RecipeError:
        known = next((place[:n] for n in range(len(place), -1, -1) if place[:n] in self.lines), ())
        line = self.lines.get(known, 1)
        return RecipeError(f"{self.name}, line {line}{f' ({path_text(place)})' if place else ''}: {said}")


def path_text(place: Place) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).lstrip(".")


class Table:
    """A mapping of the file. Every getter marks its key as read and raises RecipeError for a value of a wrong type."""

    def __init__(self, source: Source, values: dict[str, Any], place: Place = ()) -> None:
        self.source, self.values, self.place = source, values, place
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def error(self, key: str, said: str) -> RecipeError:
        return self.source.error((*self.place, key), said)

    def take(self, key: str) -> Any:
        self._read.add(key)
        return self.values.get(key)

    def unread(self) -> list[str]:
        return [key for key, value in self.values.items() if key not in self._read and value not in (None, "", [], {})]

    def text(self, key: str, default: str = "") -> str:
        """A text, or a number as it is printed."""
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.error(key, f"expected text, got {_kind(value)}.")
        return str(value)

    def integer(self, key: str) -> int | None:
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"expected a whole number, got {_kind(value)}.")
        return value

    def flag(self, key: str) -> bool:
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"expected true or false, got {_kind(value)}.")
        return bool(value)

    def table(self, key: str) -> "Table":
        value = self.take(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, f"expected a table, got {_kind(value)}.")
        return Table(self.source, value or {}, (*self.place, key))

    def items(self, key: str) -> list[Any]:
        value = self.take(key)
        if value is not None and not isinstance(value, list):
            raise self.error(key, f"expected a list, got {_kind(value)}.")
        return value or []

    def texts(self, key: str) -> list[str]:
        found = self.items(key)
        for number, value in enumerate(found):
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise self.source.error((*self.place, key, number), f"expected text, got {_kind(value)}.")
        return [str(value) for value in found]

    def environment(self, key: str) -> dict[str, str]:
        """A table of single values, as text."""
        values = self.table(key).values
        for name, value in values.items():
            if isinstance(value, list | dict):
                raise self.source.error((*self.place, key, name), f"expected text, got {_kind(value)}.")
        return {name: str(value) for name, value in values.items() if value is not None}


def _kind(value: Any) -> str:
    kinds = {dict: "a table", list: "a list", bool: "true or false", str: "text", int: "a number", float: "a number"}
    return f"{kinds.get(type(value), 'something else')}, {brief(value)}"


def read(path: Path) -> Table:
    """The table a YAML file consists of. Raises RecipeError with the file's name and the line of what is wrong."""
    try:
        if not path.is_file():
            raise RecipeError(f"{path} is not a file.")
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}.") from error
    return parse(data, str(path))


def parse(data: bytes, name: str) -> Table:
    if len(data) > LARGEST:
        raise RecipeError(f"{name} is larger than {LARGEST:,} bytes; a recipe is a few pages of text.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise RecipeError(f"{name}, line {line}: the file is not UTF-8.") from error
    source = Source(name)
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            values = None if root is None else _Values(loader, source).of(root, (), 0)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = " ".join(str(part) for part in (error.context, error.problem) if part)
        raise RecipeError(f"{name}, line {mark.line + 1 if mark else 1}: {said}.") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise RecipeError(f"{name}, line {line}: the character {error.character!r} is not allowed in YAML.") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{name}, line 1: a recipe is a table of keys and values, not {_kind(values)}.")
    return Table(source, values)


class _Loader(yaml.SafeLoader):
    """Composes nodes no deeper than DEEPEST and no more than MOST_VALUES."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = self.count = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        mark = self.peek_event().start_mark
        self.depth += 1
        self.count += 1
        if self.depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"its values are nested deeper than {DEEPEST} levels", problem_mark=mark)
        if self.count > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem=f"it has more than {MOST_VALUES:,} values", problem_mark=mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Values:
    """Plain values out of composed nodes. Aliases are followed, and counted as often as they are used."""

    def __init__(self, loader: _Loader, source: Source) -> None:
        self.loader, self.source, self.count = loader, source, 0

    def of(self, node: Node, place: Place, depth: int) -> Any:
        self.count += 1
        if self.count > MOST_VALUES or depth > DEEPEST:
            raise self._error(node, f"its aliases make more than {MOST_VALUES:,} values or {DEEPEST} levels")
        self.source.lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
            return [self.of(value, (*place, number), depth + 1) for number, value in enumerate(node.value)]
        if isinstance(node, MappingNode) and node.tag == _TAG + "map":
            return self._table(node, place, depth)
        if isinstance(node, ScalarNode):
            self._check_text(node)
        if isinstance(node, ScalarNode) and node.tag in _AS_TEXT:
            return node.value
        if isinstance(node, ScalarNode) and node.tag in _SCALARS:
            try:
                return self.loader.construct_object(node)
            except (ValueError, KeyError, OverflowError):
                raise self._error(node, f"{brief(node.value)} cannot be read as a value") from None
        raise self._error(node, f"values of the kind {brief(node.tag)} are not read")

    def _table(self, node: MappingNode, place: Place, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode) or key_node.tag == _TAG + "merge":
                raise self._error(
                    key_node, "a key is a word; merged tables (<<) and keys with a structure are not read"
                )
            self._check_text(key_node)
            key = key_node.value
            if key in found:
                raise self._error(key_node, f"the key {brief(key)} is there twice")
            self.source.lines[(*place, key)] = key_node.start_mark.line + 1
            found[key] = self.of(value_node, (*place, key), depth + 1)
        return found

    def _check_text(self, node: ScalarNode) -> None:
        if "\0" in node.value or any("\ud800" <= c <= "\udfff" for c in node.value):
            raise self._error(node, "the text has characters that cannot be written to a file or an environment")

    @staticmethod
    def _error(node: Node, said: str) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(problem=said, problem_mark=node.start_mark)
