"""Text that no generator of ours wrote: Python's standard library, its manual, packages, two database manuals, novels,
the Jargon File. Licences stand in training/SOURCES.md. What is held out is decided by a document's name alone."""

import gzip
import hashlib
import re
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from training.data.fetch import DEBIAN, PACKAGES, fetch, fetch_wheels
from training.data.unpack import deb_files, html_text, r_lines

HELD_NOVEL = "northangerabbey"
LARGEST = 200_000  # characters of one document; tables of data are longer
TESTS = frozenset(["test", "tests", "testing", "unit", "functional", "idle_test"])  # folders
LEFT_OUT = frozenset(["_vendor", "_distutils", "locale"])  # copies of other packages; tables of words


@dataclass(frozen=True)
class Document:
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """One in 25 by hash of the name; and one whole novel, so that prose is new from the first page."""
        if self.name.startswith("novels/"):
            return HELD_NOVEL in self.name
        return hashlib.sha256(self.name.encode()).digest()[0] % 25 == 0


def _package(name: str) -> Path:
    return fetch(next(p for p in DEBIAN if p.name == name), PACKAGES)


def standard_library(tests: bool) -> Iterator[Document]:
    """Source of the running interpreter, either its tests or everything else."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        parts = name.split("/")
        is_test = any(part in ("test", "tests", "idle_test") for part in parts)
        if is_test != tests or "site-packages" in parts or name.startswith(("_sysconfigdata", "config-")):
            continue  # the last two hold paths of the machine Python was built on
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few tests hold other encodings on purpose
            continue
        if text.strip() and len(text) <= LARGEST:
            yield Document(f"python/{name}", text)


def passages(text: str) -> set[str]:
    """Every four lines that follow each other; short ones, which all code has, do not count."""
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 8]
    return {"\n".join(lines[i : i + 4]) for i in range(len(lines) - 3)}


def package_source() -> Iterator[Document]:
    """Source of Python packages without their tests, and without what they have from held-out parts of the library."""
    held_out = set().union(*(passages(d.text) for d in standard_library(tests=False) if d.held_out))
    for path in fetch_wheels():
        with zipfile.ZipFile(path) as wheel:
            for name in sorted(n for n in wheel.namelist() if n.endswith(".py")):
                parts = name.split("/")
                if any(part in TESTS | LEFT_OUT or part.startswith("test_") for part in parts):
                    continue
                text = wheel.read(name).decode("utf-8", "replace")
                if 400 <= len(text) <= LARGEST and held_out.isdisjoint(passages(text)):
                    yield Document(f"packages/{name}", text)


def python_manual() -> Iterator[Document]:
    for name, blob in deb_files(_package("python3.11-doc"), r"/_sources/.*\.rst\.txt$"):
        yield Document(f"python-doc/{name.split('/_sources/')[1]}", blob.decode("utf-8"))


def database_manuals() -> Iterator[Document]:
    for package, pattern in (("sqlite3-doc", r"/sqlite3/[^/]*\.html$"), ("postgresql-doc-15", r"/html/[^/]*\.html$")):
        for name, blob in deb_files(_package(package), pattern):
            text = html_text(blob.decode("utf-8", "replace"))
            if 500 < len(text) <= LARGEST:
                yield Document(f"{package}/{name.rsplit('/', 1)[1]}", text)


def novels() -> Iterator[Document]:
    """Jane Austen's six and Moby-Dick, a chapter each; lines are joined into paragraphs."""
    for package in ("r-cran-janeaustenr", "r-cran-tokenizers"):
        for _, blob in deb_files(_package(package), r"/data/Rdata\.rdb$"):
            for lines in r_lines(blob):
                text = re.sub(r"(?s)^.*?\*\*\* ?START[^\n]*\n|\*\*\* ?END.*", "", "\n".join(lines))
                title = re.sub(r"[^a-z]", "", text.lower())[:24]
                chapters = re.split(r"\n(?=\s*(?:CHAPTER|Chapter|VOLUME)\b)", text)
                for place, chapter in enumerate(chapters):
                    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", chapter)]
                    joined = "\n\n".join(p for p in paragraphs if p)
                    if len(joined) > 500:
                        yield Document(f"novels/{title}/{place:03d}", joined)


def jargon_file() -> Iterator[Document]:
    """Entries of the dictionary file, some thirty to a document."""
    ((_, blob),) = deb_files(_package("dict-jargon"), r"/jargon\.dict\.dz$")
    text = gzip.decompress(blob).decode("utf-8", "replace")
    entries = [" ".join(entry.split()) for entry in re.split(r"\n(?=\S)", text)]
    entries = [entry for entry in entries if len(entry) > 80]
    for place in range(0, len(entries), 30):
        yield Document(f"jargon/{place:05d}", "\n\n".join(entries[place : place + 30]))


COLLECTORS: dict[str, Callable[[], Iterator[Document]]] = {
    "code": lambda: standard_library(tests=False),
    "code_tests": lambda: standard_library(tests=True),
    "packages": package_source,
    "manual": python_manual,
    "databases": database_manuals,
    "novels": novels,
    "jargon": jargon_file,
}
