"""The shipped recipes' commands are what vLLM's own parser accepts: of the version that serves here, and the newest."""

from pathlib import Path

import msgspec
import pytest

from stoker.engines import vllm_parser
from stoker.engines.vllm import arguments
from stoker.recipes.load import load, shipped

ROOT = Path(__file__).parents[2]
NEWEST = ROOT / "build" / "vllm-newest"  # `make test-vllm` puts it there
RECIPES = [name for name in shipped() if load(name).recipe.engine == "vllm"]


def python(version: str) -> tuple[str, ...]:
    found = vllm_parser.find().python
    return (found,) if version == "0.32.0" else ("env", f"PYTHONPATH={NEWEST}", found)


def newest() -> str:
    lines = Path(__file__).with_name("newest.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith("vllm=="))


@pytest.mark.vllm
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("version", ["0.32.0", newest()])
def test_the_command_of_a_shipped_recipe_is_accepted(name: str, version: str) -> None:
    """Or the recipe says that it needs another version."""
    recipe = load(name).recipe
    said = arguments(recipe, recipe.model.source, recipe.drafter.source if recipe.drafter else "")
    report = vllm_parser.check(
        [each.written for each in said], tuple(recipe.env), recipe.engine_version, python(version)
    )
    assert report.version.startswith(version)
    assert len(report.accepted) + len(report.unknown) + len(report.refused) == len(said)
    if report.fits:
        assert report.problems(recipe.engine_version) == []
        assert report.environment == (), "variables that this vLLM does not read"


@pytest.mark.vllm
def test_the_parser_is_the_real_one() -> None:
    """It knows hundreds of options, and refuses what there is not."""
    for version in ("0.32.0", newest()):
        report = vllm_parser.check([["--max-num-seqs", "4"], ["--max-num-seqz", "4"]], (), "", python(version))
        assert report.flags > 200
        assert [list(each.option) for each in report.unknown] == [["--max-num-seqz", "4"]]
        assert msgspec.structs.asdict(report)["accepted"] == (("--max-num-seqs", "4"),)
