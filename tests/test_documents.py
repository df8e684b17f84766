"""Documents keep their word: links lead somewhere, and the files and results that they name exist.

No result is kept that no document names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FOLDERS = (".", "docs", "docs/guides", "docs/log", "training", "src/stoker/demo")
DOCUMENTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
ENDING = r"\.(?:json|txt|svg|npz)\b"
# A path into the results' folder, or a name with the day or the commit it was measured at.
NAMED = re.compile(
    rf"benchmarks/results/([\w.-]+?{ENDING})|\b([a-z]\w*(?:-\w+)*?-(?:20\d\d-\d\d-\d\d|[0-9a-f]{{7}})[\w-]*{ENDING})"
)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
# A path of code with a folder before it, and what `python -m` runs.
CODE = re.compile(r"(?<![\w./~:-])((?:[\w-]+/)+[\w-]+\.(?:py|toml|csv|jinja))\b")
MODULE = re.compile(r"python3? -m ((?:benchmarks|training|tests|tools)[\w.]*)")
PAST = {"CHANGELOG.md"}  # it may name files that have moved, as entries of the log may


def prose(path: Path) -> str:
    """The text without blocks of code, whose brackets are no links."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    """What a heading is called in a link, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", prose(path), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def named(text: str) -> set[str]:
    return {first or second for first, second in NAMED.findall(text)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    for target, heading in LINK.findall(prose(path)):
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), f"{target} does not exist"
        assert not heading or heading in anchors(there), f"{target} has no heading #{heading}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_result_that_a_document_names_is_kept(path: Path) -> None:
    missing = [name for name in sorted(named(path.read_text(encoding="utf-8"))) if not (RESULTS / name).exists()]
    assert not missing, f"not in benchmarks/results: {', '.join(missing)}"


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if path.parent.name != "log" and path.name not in PAST],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_file_that_a_document_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    modules = {module.strip(".").replace(".", "/") for module in MODULE.findall(text)}
    folders = (ROOT, ROOT / "src" / "stoker", path.parent)
    missing = [name for name in CODE.findall(text) if not any((folder / name).exists() for folder in folders)]
    missing += [
        name for name in modules if not ((ROOT / f"{name}.py").exists() or (ROOT / name / "__main__.py").exists())
    ]
    assert not missing, f"named but not there: {', '.join(sorted(missing))}"


def test_every_kept_result_is_named_in_a_document() -> None:
    """A new result belongs into docs/log or the page that quotes it; one that it replaces goes: git keeps it."""
    words = {
        Path(word).name
        for path in DOCUMENTS
        for word in re.findall(rf"[\w./-]+?{ENDING}", path.read_text(encoding="utf-8"))
    }
    unnamed = sorted(path.name for path in RESULTS.iterdir() if path.name not in words)
    assert not unnamed, f"named in no document: {', '.join(unnamed)}"
