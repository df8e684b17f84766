"""`stoker recipe` as people and scripts meet it: files, one JSON document, notes on stderr, exit codes."""

import json
import sys
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.recipes.load import load

DATA = Path(__file__).parents[1] / "recipes" / "formats" / "data"
SPARKRUN = DATA / "sparkrun" / "02-hybrid-dflash.yaml"


@pytest.fixture
def stoker(monkeypatch, capsys):
    """Runs the command in this process; its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["stoker", *map(str, arguments)])
        code: object = 0
        try:
            main.run()
        except SystemExit as ended:
            code = ended.code or 0
        return (code, *capsys.readouterr())

    return run


def test_an_imported_file_is_a_recipe_and_what_it_lost_stands_on_stderr_and_in_it(stoker, tmp_path):
    target = tmp_path / "mine.toml"
    code, out, err = stoker("recipe", "import", SPARKRUN, "--out", target)
    assert (code, out) == (0, "")
    assert "metadata.maintainer: a reader" in err
    assert "# - metadata.maintainer: a reader" in target.read_text()
    assert load(str(target)).recipe.serve.draft == "dflash:7"
    code, _, err = stoker("recipe", "import", SPARKRUN, "--out", target)
    assert code == 2
    assert "--force replaces it" in err
    assert stoker("recipe", "import", SPARKRUN, "--out", target, "--force")[0] == 0


def test_without_a_file_it_goes_to_stdout(stoker, tmp_path):
    code, out, _ = stoker("recipe", "import", SPARKRUN)
    assert code == 0
    (tmp_path / "a.toml").write_text(out)
    assert load(str(tmp_path / "a.toml")).recipe.name == "02-hybrid-dflash"


def test_json_of_an_import_and_of_an_export(stoker, tmp_path):
    target = tmp_path / "a.toml"
    code, out, _ = stoker("recipe", "import", SPARKRUN, "--json", "--out", target)
    found = json.loads(out)
    assert code == 0
    assert (found["format"], found["out"], found["recipe"]["serve"]["users"]) == ("sparkrun", str(target), 3)
    assert {"what", "why"} == set(found["not_carried_over"][0])
    code, out, _ = stoker("recipe", "export", target, "--to", "vllm-recipes", "--json")
    assert json.loads(out)["text"].startswith("# Written by Stoker")


def test_a_folder_is_imported_and_what_cannot_be_is_said(stoker, tmp_path):
    there, here = tmp_path / "theirs", tmp_path / "ours"
    (there / "deep").mkdir(parents=True)
    (there / "deep" / "good.yaml").write_bytes(SPARKRUN.read_bytes())
    (there / "bad.yml").write_text("model: [1]\nrecipe_version: '2'\n")
    (there / ".hidden.yaml").write_text("no recipe")
    code, out, err = stoker("recipe", "import", there, "--out", here)
    assert code == 1
    assert "1 of 2 recipes imported" in out
    assert "bad.yml, line 1 (model): expected text" in err.replace("\n", " ")
    assert [path.name for path in here.iterdir()] == ["good.toml"]
    code, out, _ = stoker("recipe", "import", there, "--json")
    assert ["error" in one for one in json.loads(out)] == [True, False]
    assert stoker("recipe", "import", there)[0] == 2
    assert stoker("recipe", "import", here, "--out", here)[0] == 2


def test_shell_steps_of_a_recipe_are_shown_when_it_is_imported(stoker):
    _, _, err = stoker("recipe", "import", DATA / "sparkrun" / "05-hooks.yaml")
    assert "runs only after confirmation" in err
    assert "1. before the engine starts, inside the container\n" in err
    assert "pip install flash-attn --no-build-isolation" in err


def test_choices_reach_the_importer(stoker):
    path = DATA / "vllm-recipes" / "03-spark.yaml"
    options = ["--variant", "nvfp4", "--hardware", "dgx_spark_gb10", "--json"]
    found = json.loads(stoker("recipe", "import", path, *options)[1])
    assert found["recipe"]["serve"]["memory_share"] == 0.8
    boxes = json.loads(
        stoker("recipe", "import", DATA / "sparkrun" / "03-two-boxes.yaml", "--nodes", "a,b", "--json")[1]
    )
    assert boxes["recipe"]["nodes"]["hosts"] == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--nodes", "a"], "does not name several boxes"),
        (["--nodes", "a,b", "--solo"], "leave one of them out"),
        (["--from", "compose"], "known formats: sparkrun, spark-vllm-docker, vllm-recipes"),
        (["--from", "spark-vllm-docker"], "needs it, and it is missing"),
    ],
)
def test_options_that_make_no_sense(stoker, options, says):
    code, _, err = stoker("recipe", "import", SPARKRUN, *options)
    assert code == 2
    assert says in err


def test_export_names_what_is_wrong(stoker):
    assert "known formats" in stoker("recipe", "export", "demo", "--to", "compose")[2]
    code, _, err = stoker("recipe", "export", "demo", "--to", "sparkrun")
    assert (code, "engine" in err) == (2, True)
    assert stoker("recipe", "export", "no-such-recipe", "--to", "sparkrun")[0] == 2
