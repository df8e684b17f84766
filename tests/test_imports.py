"""Which way imports point: the engine and drafters know no network, and no module of the package is for tests alone."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
NETWORKS = ("stoker.backends.network", "stoker.backends.cpu", "stoker.backends.gpu")
BY_NAME = (
    *("stoker.cli.", "stoker.weights.formats.", "stoker.engine.grammar.worker", "stoker.up.keeper"),
    "stoker.backends.gpu.compile_worker",
    *("__main__", "__init__"),
)


def imported(file: Path) -> set[str]:
    """Modules, and names in them, which may be modules too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts)


@pytest.mark.parametrize("package", ["engine", "speculate", "sampling"])
def test_no_network_is_known_above_the_backends(package: str) -> None:
    for file in (SOURCE / "stoker" / package).rglob("*.py"):
        inner = [name for name in imported(file) if name.startswith(NETWORKS)]
        assert not inner, f"{module_of(file)} imports {inner}"


@pytest.mark.parametrize(
    ("package", "others"),
    [("network", ("cpu", "gpu")), ("cpu", ("gpu",)), ("gpu", ("cpu",))],
)
def test_no_backend_imports_another_and_the_network_imports_none(package: str, others: tuple[str, ...]) -> None:
    barred = tuple(f"stoker.backends.{other}" for other in others)
    for file in (SOURCE / "stoker" / "backends" / package).rglob("*.py"):
        found = [name for name in imported(file) if name.startswith(barred)]
        assert not found, f"{module_of(file)} imports {found}"


def test_every_module_has_an_importer_in_the_package() -> None:
    files = {module_of(file): file for file in (SOURCE / "stoker").rglob("*.py")}
    used = {name for module, file in files.items() for name in imported(file) if name != module}
    unused = [name for name in files if name not in used and not any(part in name for part in BY_NAME)]
    assert not unused, f"nothing in src/ imports {unused}"
