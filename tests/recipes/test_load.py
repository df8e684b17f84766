"""A recipe says what it means or is refused with the line that is wrong."""

import pytest

from stoker.bench.workloads import MIXES, WORKLOADS
from stoker.plan.answer import Question, answer
from stoker.plan.catalog import find_model
from stoker.plan.evidence import measurements
from stoker.recipes.formats.translate import FORMATS, export
from stoker.recipes.load import RecipeError, line_of, load, parse, shipped
from stoker.recipes.recipe import Recipe

HEAD = 'name = "mine"\ntitle = "My box"\n'
MODEL = '[model]\nsource = "demo"\n'


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_is_named_as_its_file(name):
    recipe = load(name).recipe
    assert recipe.name == name
    assert recipe.known, "a shipped recipe says whether somebody ran it"
    assert all(speed.source for speed in recipe.expected.speed)


PUBLISHED = [name for name in shipped() if name != "demo"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_shipped_recipe_expects_is_what_its_evidence_says(name):
    recipe = load(name).recipe
    rows = {row.id: row for row in measurements()}
    for speed in recipe.expected.speed:
        assert speed.workload in (*WORKLOADS, *MIXES, "Agent", "general"), "stoker up could not measure it"
        if not speed.evidence:
            continue
        row = rows[speed.evidence]
        each = (row.decode_tok_s or 0) / (row.users if row.scope == "aggregate" else 1)
        assert (row.model, row.users) == (find_model(recipe.plan).name, speed.users)
        assert speed.tokens_per_s == pytest.approx(each, rel=0.001)
        assert row.timing in (speed.timing, "unstated")
        assert speed.tokens_per_step in (None, row.tokens_per_step)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_recipe_fits_the_box_it_is_for(name):
    recipe = load(name).recipe
    serve = recipe.serve
    found = answer(
        Question(
            recipe.plan,
            recipe.box,
            context=serve.context,
            users=serve.users,
            weights=recipe.weights,
            draft=serve.draft,
            engine=recipe.engine,
            kv=serve.kv_dtype or None,
            utilization=serve.memory_share,
        )
    )
    assert found.fits
    if pool := found.budget.pool:
        assert pool.concurrency >= serve.users, "its share of memory holds every user's whole context"


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", [name for name in PUBLISHED if load(name).recipe.engine == "vllm"])
def test_a_shipped_recipe_for_vllm_is_exported(name, to):
    found = export(load(name).recipe, to)
    assert load(name).recipe.model.source.removeprefix("hf:") in found.text


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (f"{HEAD}{MODEL}[serve]\n# a comment\ncontxt = 3\n", 7, "unknown key 'contxt'; known here: draft, context"),
        (f'{HEAD}{MODEL}[serve]\ncontext = "3"\n', 6, "Expected a whole number, got a text"),
        (f"{HEAD}{MODEL}[serve]\ncontext = 0\n", 6, ">= 1"),
        (f'{HEAD}engine = "tgi"\n{MODEL}', 3, "'tgi'"),
        (f"{HEAD}serve.users = 0\n{MODEL}", 3, ">= 1"),
        (f'{HEAD}model = {{ source = "demo", revison = "a" }}\n', 3, "revison"),
        (
            f'{HEAD}{MODEL}[[expected.speed]]\nworkload = "prose"\ntokens_per_s = 3\nsource = "x"\n'
            '[[expected.speed]]\nworkload = "code"\ntokens_per_s = -3\nsource = "x"\n',
            11,
            "> 0",
        ),
        (f'name = "A B"\ntitle = "t"\n{MODEL}', 1, "matching"),
        (f'{HEAD}{MODEL}[env]\nHF_TOKEN = "hf_x"\n', 6, "looks like a secret"),
        (f'{HEAD}{MODEL}[env]\nHF_ENDPOINT = "https://me:hush@hub"\n', 6, "a password in it"),
        (f'{HEAD}{MODEL}[serve]\narguments = ["--api-key", "hush"]\n', 6, "'--api-key' looks like a secret"),
        (f'{HEAD}{MODEL}[serve]\narguments = ["--ssl=http://me:hush@x"]\n', 6, "'--ssl' looks like a secret"),
        (f'{HEAD}engine = "vllm"\n{MODEL}[container]\nimage = "vllm/vllm-openai:latest"\n', 7, "by digest"),
        (f'{HEAD}{MODEL}[nodes]\nhosts = ["a", "b"]\n', 5, "several boxes"),
        (f'{HEAD}engine = "vllm"\n{MODEL}[serve]\ndraft = "lookup:4"\n', 7, "vLLM drafts with"),
        (f'{HEAD}{MODEL}revision = "abc"\n', 5, "hf:OWNER/NAME"),
        (f'{HEAD}[model]\nsource = "demo"\nsource = "demo"\n', 5, ""),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text, line, says):
    with pytest.raises(RecipeError) as raised:
        parse(text, "mine.toml")
    assert "mine.toml" in str(raised.value)
    assert f"line {line}" in str(raised.value)
    assert says in str(raised.value)


def test_numbers_of_tokens_and_names_of_variables_are_no_secrets():
    head = f'{HEAD}engine = "vllm"\n{MODEL}[serve]\narguments = ["--max-num-batched-tokens", "8192"]\n'
    image = f'image = "vllm@sha256:{"0" * 64}"'
    recipe = parse(f'{head}[container]\n{image}\narguments = ["-e", "HF_TOKEN"]\n')
    assert recipe.serve.arguments[1] == "8192"
    with pytest.raises(RecipeError, match="'HF_TOKEN' looks like a secret"):
        parse(f'{head}[container]\n{image}\narguments = ["-e", "HF_TOKEN=hf_x"]\n')


def test_a_missing_key_is_named():
    with pytest.raises(RecipeError, match="missing required field `title`"):
        parse(f'name = "mine"\n{MODEL}')


def test_the_hash_is_of_what_is_said_not_of_how_it_is_written(tmp_path):
    one, two, three = (tmp_path / f"{n}.toml" for n in "123")
    one.write_text(f"{HEAD}{MODEL}[serve]\nusers = 2\ncontext = 512\n")
    two.write_text(f"# the same\n{HEAD}[serve]\ncontext = 0x200\nusers = 2\n\n{MODEL}")
    three.write_text(f"{HEAD}{MODEL}[serve]\nusers = 3\ncontext = 512\n")
    assert load(str(one)).hash == load(str(two)).hash != load(str(three)).hash


def test_files_that_are_no_recipes_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(RecipeError, match=r"unknown recipe 'nonesuch'.*demo"):
        load("nonesuch")
    with pytest.raises(RecipeError, match=r"unknown recipe 'demmo'\. Did you mean demo\?"):
        load("demmo")
    with pytest.raises(RecipeError, match="is not a file"):
        load(str(tmp_path))
    (binary := tmp_path / "b.toml").write_bytes(b'name = "x"\n\xff')
    with pytest.raises(RecipeError, match="line 2: the file is not UTF-8"):
        load(str(binary))
    (large := tmp_path / "c.toml").write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(RecipeError, match="larger than"):
        load(str(large))
    with pytest.raises(RecipeError, match="nested too deeply"):
        parse("a = " + "[" * 5000)


def test_lines_are_found_in_tables_arrays_and_dotted_keys():
    text = 'a.b = 1\n[c]\n"d e" = 2\n[[f.g]]\nh = 3\n[[f.g]]\nh = 4\n'
    assert line_of(text, ["a", "b"]) == 1
    assert line_of(text, ["c", "d e"]) == 3
    assert line_of(text, ["f", "g", 1, "h"]) == 7
    assert line_of(text, ["f", "g", 1, "missing"]) == 6
    assert line_of(text, ["nowhere"]) is None


def test_a_recipe_written_out_reads_the_same():
    import msgspec

    recipe = load("demo").recipe
    assert parse(msgspec.toml.encode(recipe).decode()) == recipe
    assert isinstance(recipe, Recipe)
