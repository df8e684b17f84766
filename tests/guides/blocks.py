"""Blocks of code in the README and the guides: commands, settings, and the sections they stand in."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "index.md", *sorted(GUIDES.glob("*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
_NAMED = re.compile(r"`(~/[^`]+)`[^`\n]*:\n\n\Z")  # the line before a block that is a file


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    file: str  # where it belongs, from the home folder on; empty: it is no file


@dataclass(frozen=True)
class Command:
    document: str
    text: str


def blocks(text: str) -> list[Block]:
    """All fenced blocks, in order."""
    found = []
    for match in _BLOCK.finditer(text):
        named = _NAMED.search(text[: match.start()])
        found.append(Block(match[1], match[2], named[1].removeprefix("~/") if named else ""))
    return found


def section(document: Path, heading: str) -> str:
    """The text under a heading of the second level."""
    text = document.read_text(encoding="utf-8")
    _, found, rest = text.partition(f"\n## {heading}\n")
    assert found, f"{document.name} has no section {heading!r}"
    return rest.partition("\n## ")[0]


def commands(document: Path) -> list[Command]:
    """Lines of blocks of shell commands; continued lines are one, and `a && b` are two."""
    found = []
    for block in blocks(document.read_text(encoding="utf-8")):
        if block.language == "sh":
            for line in block.text.replace("\\\n", " ").split("\n"):
                parts = (part.strip() for part in line.split(" && "))
                found += [Command(document.name, part) for part in parts if part and not part.startswith("#")]
    return found


def spans(document: Path) -> list[str]:
    """Commands of Stoker within sentences and tables."""
    prose = _BLOCK.sub("", document.read_text(encoding="utf-8"))
    return [" ".join(found.split()) for found in re.findall(r"`(stoker [^`]+)`", prose)]
