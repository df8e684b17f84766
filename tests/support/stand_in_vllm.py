"""Environments with the stand-in for vLLM (fake_vllm/): a `vllm` beside a Python of its own."""

import shutil
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

SUPPORT = Path(__file__).parent
LOG = SUPPORT.parent / "engines" / "data" / "vllm-0.32-cpu.log"
_SCRIPT = """#!{python}
import sys
sys.path.append({support!r})
import fake_engine
from vllm.serving import main
main(fake_engine)
"""


def install(folder: Path, package: str = "vllm", version: str = "0.32.0") -> Path:
    """The path of the command `vllm`. `package` is how it calls itself on the package index."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    shutil.copytree(SUPPORT / "fake_vllm" / "vllm", site / "vllm")
    packaging = find_spec("packaging")
    assert packaging
    assert packaging.submodule_search_locations
    shutil.copytree(packaging.submodule_search_locations[0], site / "packaging")  # vLLM has it
    info = site / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    python = folder / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    command = folder / "bin" / "vllm"
    command.write_text(_SCRIPT.format(python=python, support=str(SUPPORT)))
    command.chmod(0o755)
    return command
