"""Reading text out of packages with the standard library: .deb archives, HTML pages, R's lazy-load data."""

import io
import lzma
import re
import struct
import tarfile
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

AR_MAGIC = b"!<arch>\n"
STRING_VECTOR, STRING = 16, 9  # type codes in R's serialisation


def deb_files(path: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Files of a Debian package whose path matches `pattern`, by name."""
    blob = path.read_bytes()
    if not blob.startswith(AR_MAGIC):
        raise ValueError(f"{path} is not a Debian package: it does not begin with {AR_MAGIC!r}.")
    place = len(AR_MAGIC)
    while place < len(blob):
        name = blob[place : place + 16].decode().strip().rstrip("/")
        size = int(blob[place + 48 : place + 58])
        body = blob[place + 60 : place + 60 + size]
        if name == "data.tar.xz":
            with tarfile.open(fileobj=io.BytesIO(lzma.decompress(body))) as tar:
                members = {m.name: m for m in tar if m.isfile() and re.search(pattern, m.name)}
                for member in sorted(members):
                    file = tar.extractfile(members[member])
                    assert file is not None
                    yield member, file.read()
        place += 60 + size + size % 2


class _Blocks(HTMLParser):
    """Text of paragraphs, headings and code; everything else on the page is skipped."""

    BREAKS = frozenset(
        [
            "p",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
            "h6",
            "li",
            "dd",
            "dt",
            "pre",
            "td",
            "th",
            "tr",
            "div",
            "table",
            "ul",
            "ol",
            "dl",
            "blockquote",
            "br",
            "hr",
        ]
    )
    SKIPPED = frozenset(["script", "style", "head", "nav", "form"])

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self.parts: list[str] = []
        self.skipping = 0
        self.code = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.skipping += tag in self.SKIPPED
        if tag in self.BREAKS:
            self.flush()
        if tag == "pre":
            self.code = True

    def handle_endtag(self, tag: str) -> None:
        self.skipping -= tag in self.SKIPPED
        if tag in self.BREAKS:
            self.flush()

    def handle_data(self, data: str) -> None:
        if self.skipping <= 0:
            self.parts.append(data)

    def flush(self) -> None:
        text = "".join(self.parts)
        text = text.strip("\n") if self.code else " ".join(text.split())
        if text.strip():
            self.blocks.append(text.rstrip())
        self.parts, self.code = [], False


def html_text(page: str, shortest: int = 40) -> str:
    """Blocks of at least `shortest` characters: sentences and code, not menus and table cells."""
    parser = _Blocks()
    parser.feed(page)
    parser.flush()
    return "\n\n".join(block for block in parser.blocks if len(block) >= shortest)


def r_lines(rdb: bytes) -> Iterator[list[str]]:
    """The string vectors of an R lazy-load file: one list of lines per object."""
    place = 0
    while place + 4 < len(rdb):
        stream = zlib.decompressobj()  # each object: uncompressed length, then a zlib stream
        data = stream.decompress(rdb[place + 4 :])
        place = len(rdb) - len(stream.unused_data)
        start = _object_start(data)
        (flags,) = struct.unpack_from(">I", data, start)
        if flags & 0xFF == STRING_VECTOR:
            yield "\n".join(_strings(data, start + 4)).split("\n")


def _object_start(data: bytes) -> int:
    """Past the header: format, three versions and, from version 3 on, the name of the encoding."""
    (version,) = struct.unpack_from(">I", data, 2)
    (encoding,) = struct.unpack_from(">I", data, 14)
    return 18 + encoding if version >= 3 else 14


def _strings(data: bytes, place: int) -> list[str]:
    (count,) = struct.unpack_from(">I", data, place)
    place += 4
    lines = []
    for _ in range(count):
        flags, size = struct.unpack_from(">Ii", data, place)
        if flags & 0xFF != STRING:
            raise ValueError(f"expected a string at byte {place} of an R object, found type {flags & 0xFF}.")
        place += 8
        lines.append(data[place : place + max(size, 0)].decode("utf-8", "replace"))
        place += max(size, 0)
    return lines
