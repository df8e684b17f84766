"""Recipes of other tools become ours and back: what both have survives, and what is lost is listed."""

from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import RequestError
from stoker.recipes.formats import yaml_file
from stoker.recipes.formats.foreign import slug
from stoker.recipes.formats.translate import FORMATS, Wanted, export, import_file, import_table
from stoker.recipes.formats.vllm_recipes import Choice
from stoker.recipes.load import RecipeError, parse, shipped
from stoker.recipes.load import load as load_recipe
from stoker.recipes.recipe import Container, Files, Nodes, Recipe, Serve, Step

DATA = Path(__file__).parent / "data"
THEIRS = sorted(DATA.rglob("*.yaml"))
DIGEST = "example/vllm@sha256:4c3d1f0e9b8a7766554433221100ffeeddccbbaa99887766554433221100abcd"


def named(path):
    return f"{path.parent.name}/{path.stem}"


def table(text):
    return yaml_file.parse(text.encode(), "theirs.yaml")


def read(text, stem="theirs", wanted=None):
    return import_table(table(text), stem, wanted)


def notes(found):
    return "\n".join(f"{one.what} ({one.why})" for one in found.notes)


# --- the ten recipes of each format ---


def test_there_are_ten_recipes_of_each_format():
    assert {name: sum(path.parent.name == name for path in THEIRS) for name in FORMATS} == dict.fromkeys(FORMATS, 10)


# The fields that each format documents: a dot leads into a table, * is any name.
DOCUMENTED = {
    "sparkrun": (
        *("recipe_version", "model", "model_revision", "runtime", "container", "min_nodes", "max_nodes", "env"),
        *(f"defaults.{key}" for key in ("port", "host", "tensor_parallel", "pipeline_parallel", "data_parallel")),
        *("defaults.gpu_memory_utilization", "defaults.max_model_len", "defaults.served_model_name"),
        *("defaults.kv_cache_dtype", "command", "runtime_config", "metadata.description", "benchmark"),
        *("executor_config", "pre_exec", "post_exec", "post_commands", "builder", "readiness.port_timeout_s"),
        *(f"readiness.{key}" for key in ("health_timeout_s", "inference", "inference_timeout_s")),
    ),
    "spark-vllm-docker": (
        *("recipe_version", "name", "description", "model", "container", "command", "cluster_only", "solo_only"),
        *("build_args", "mods", "defaults", "env"),
    ),
    "vllm-recipes": (
        *("meta.title", "meta.slug", "model.model_id", "model.min_vllm_version", "model.base_args", "model.base_env"),
        *("model.docker_image", "features.*.args", "opt_in_features", "variants.*.precision"),
        *("variants.*.vram_minimum_gb", "variants.*.model_id", "variants.*.extra_args", "variants.*.extra_env"),
        *("variants.*.hardware_overrides.*.extra_args", "variants.*.hardware_overrides.*.extra_env"),
        *("compatible_strategies", "strategy_overrides.*.extra_args", "strategy_min_gpus", "dependencies"),
    ),
}


def has(data, field):
    first, _, rest = field.partition(".")
    inner = data.values() if first == "*" else [data[first]] if first in data else []
    return any(not rest or (isinstance(each, dict) and has(each, rest)) for each in inner)


@pytest.mark.parametrize("format", FORMATS)
def test_every_documented_field_is_in_one_of_the_ten(format):
    ten = [yaml.safe_load(path.read_text()) for path in THEIRS if path.parent.name == format]
    assert [field for field in DOCUMENTED[format] if not any(has(one, field) for one in ten)] == []


@pytest.mark.parametrize("path", THEIRS, ids=named)
def test_a_recipe_of_theirs_is_recognised_and_makes_a_valid_one_of_ours(path):
    found = import_file(path)
    assert found.format == path.parent.name
    assert found.recipe.engine == "vllm"
    assert parse(found.text) == found.recipe, "the TOML with its comments says the same"


@pytest.mark.parametrize("path", THEIRS, ids=named)
def test_theirs_to_ours_to_theirs_loses_nothing_that_ours_has_kept(path):
    found = import_file(path)
    again = export(found.recipe, found.format)
    back = read(again.text, found.recipe.name)
    assert back.recipe == without_lost_steps(found.recipe, found.format)
    assert export(back.recipe, found.format).text.split("\n\n", 1)[1] == again.text.split("\n\n", 1)[1]


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("path", THEIRS, ids=named)
def test_from_one_format_to_another_what_all_have_survives(path, to):
    found = import_file(path).recipe
    # Boxes and cards are counted differently; everything else of the server is the same.
    back = read(export(found, to).text, found.name).recipe
    assert (back.name, back.title, back.model, back.drafter) == (found.name, found.title, found.model, found.drafter)
    assert (back.serve, back.env, back.container) == (found.serve, found.env, found.container)


def without_lost_steps(recipe, format):
    """Descriptions of steps live in one format only, and not every format has every moment."""
    kept = [replace_note(step, format) for step in recipe.shell if has_moment(step, format)]
    return msgspec.structs.replace(
        recipe, shell=kept, engine_version=recipe.engine_version if "recipes" in format else ""
    )


def replace_note(step, format):
    return step if format == "vllm-recipes" else msgspec.structs.replace(step, note="")


def has_moment(step, format):
    return {
        "sparkrun": step.inside or step.when == "after",
        "spark-vllm-docker": step.inside and step.when == "before",
        "vllm-recipes": not step.inside and step.when == "before",
    }[format]


@pytest.mark.parametrize("path", [path for path in THEIRS if path.parent.name != "vllm-recipes"], ids=named)
def test_every_key_of_theirs_is_in_ours_or_listed(path):
    """Values of keys that nobody took over appear in the notes: unknown ones, and those that ours has no word for."""
    text = path.read_text()
    found = import_file(path)
    more = read(f"{text}\nbrand_new_key: 17\nanother: {{deep: [1, 2]}}\n", path.stem)
    assert {one.what for one in more.notes} - {one.what for one in found.notes} == {
        "brand_new_key: 17",
        "another: {'deep': [1, 2]}",
    }
    listed = ("mods", "build_args", "builder", "executor_config", "benchmark", "readiness", "runtime_config")
    for key in (*listed, "stop_after_post"):
        assert (key in yaml.safe_load(text)) == any(one.what.startswith(f"{key}:") for one in found.notes)


@pytest.mark.parametrize(
    "where", ["", "meta", "model", "variants.default", "strategy_overrides.single_node_tp", "strategy_overrides"]
)
def test_unknown_keys_of_a_vllm_recipe_are_listed_wherever_they_stand(where):
    data = yaml.safe_load((DATA / "vllm-recipes" / "04-generations.yaml").read_text())
    place = data
    for key in where.split(".") if where else []:
        place = place[key]
    place["brand_new_key"] = 17
    found = read(yaml.safe_dump(data))
    assert "brand_new_key: 17" in notes(found)


def all_of(format):
    found = {path.stem: import_file(path) for path in THEIRS if path.parent.name == format}
    recipe = {name: one.recipe for name, one in found.items()}
    return found, recipe, {name: one.serve for name, one in recipe.items()}


def test_settings_of_sparkrun_are_ours():
    found, recipe, serve = all_of("sparkrun")
    dflash = recipe["02-hybrid-dflash"]
    assert dflash.model == Files("hf:someone/Qwen3.5-122B-A10B-int4-fp8-hybrid", "5f1c0de")
    assert dflash.drafter == Files("hf:z-lab/Qwen3.5-122B-A10B-DFlash")
    assert dflash.container == Container(DIGEST)
    assert dflash.env == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert dflash.serve == Serve(
        draft="dflash:7",
        context=262144,
        users=3,
        kv_dtype="fp8",
        memory_share=0.85,
        prefill_tokens=8192,
        host="0.0.0.0",
        name="qwen-122b",
        tool_parser="qwen3_xml",
        reasoning_parser="qwen3",
        arguments=["--trust-remote-code", "--enable-chunked-prefill"],
    )
    assert recipe["03-two-boxes"].nodes == Nodes(["box-1", "box-2"], tensor_parallel=2)
    assert not serve["03-two-boxes"].prefix_cache
    ray = recipe["04-ray-pipeline"].nodes
    assert ray == Nodes([f"box-{n}" for n in range(1, 5)], "ray", "", 2, 2, True)
    assert serve["04-ray-pipeline"].context == 32_000
    assert recipe["05-hooks"].shell == [
        Step("pip install flash-attn --no-build-isolation", inside=True),
        Step("echo ready: Qwen/Qwen3.6-27B", when="after", inside=True),
        Step("curl -s $STOKER_URL/v1/models", when="after"),
    ]
    assert "pre_exec[1]" in notes(found["05-hooks"])
    assert "only sparkrun knows {head_ip}" in notes(found["05-hooks"])
    assert serve["06-from-defaults"].arguments == [
        "--trust-remote-code", "--quantization", "fp8", "--data-parallel-size", "2",
    ]  # fmt: skip
    assert serve["07-nested-templates"].sampling == {"temperature": 0.7, "top_p": 0.95, "top_k": 20}
    assert serve["07-nested-templates"].template == {"enable_thinking": False, "budget": 1024}
    assert serve["07-nested-templates"].name == "thinker-27b"
    assert serve["08-odd-drafting"].draft == "none"
    assert '"moe_backend":"triton"' in serve["08-odd-drafting"].arguments[-1]
    shell = recipe["09-shell-around"]
    assert shell.model == Files("/models/local-122b")
    assert shell.env == {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_USE_DEEP_GEMM": "0", "OMP_NUM_THREADS": "4"}
    assert shell.shell == [Step("pip install -q fastsafetensors", inside=True)]
    assert "--lora-modules $LORAS (only a shell" in notes(found["09-shell-around"])
    assert "tee /tmp/log" in notes(found["09-shell-around"])
    assert serve["10-one-box-many-cards"].arguments[-2:] == ["--tensor-parallel-size", "4"]
    assert "--served-model-name oss" in notes(found["10-one-box-many-cards"])


def test_settings_of_spark_vllm_docker_are_ours():
    found, recipe, serve = all_of("spark-vllm-docker")
    assert recipe["01-minimal"].name == "glm-4.7-flash-awq"
    assert recipe["02-defaults"].env == {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    assert recipe["03-cluster"].nodes.launcher == "ray"
    assert "mods/fix-nemotron" in notes(found["04-mods"])
    assert "--vllm-ref" in notes(found["04-mods"])
    assert serve["05-dflash"].draft == "dflash:15"
    assert serve["06-json-in-defaults"].draft == "mtp:5"
    [step] = recipe["07-script"].shell
    assert step == Step("sed -i 's/a/b/' /workspace/config.json && pip install -q x", inside=True)
    assert serve["07-script"].context == 65_536
    assert recipe["08-digest"].model.revision == "0a1b2c3"
    assert recipe["09-pipeline"].nodes.pipeline_parallel == 3
    assert recipe["10-other-model"].model == Files("/models/served")
    assert serve["10-other-model"].template == {"enable_thinking": False}


def test_settings_of_vllm_recipes_are_ours():
    found, recipe, serve = all_of("vllm-recipes")
    assert recipe["01-minimal"].engine_version == ">=0.17.0"
    assert serve["02-features"].tool_parser == "qwen3_coder"
    assert serve["02-features"].draft == "none", "opt-in features are off"
    assert recipe["06-dependencies"].shell == [
        Step("uv pip install git+https://example.org/transformers.git@56d68c6", note="a commit of transformers")
    ]
    assert "optional" in notes(found["06-dependencies"])
    assert len(recipe["07-several-boxes"].nodes.hosts) == 4
    assert recipe["08-pipeline"].nodes.pipeline_parallel == 2
    assert recipe["09-digest-map"].container == Container(DIGEST.replace("vllm", "vllm-openai"))
    assert recipe["10-experts"].nodes.expert_parallel


@pytest.mark.parametrize("path", THEIRS, ids=named)
def test_no_secret_of_theirs_is_in_what_is_written(path):
    found = import_file(path)
    written = found.text + notes(found)
    assert "sk-do-not-keep-this" not in written
    assert "abc-def-ghi" not in written


def test_a_secret_that_is_left_out_is_named():
    found = read((DATA / "spark-vllm-docker" / "10-other-model.yaml").read_text())
    assert "env.VLLM_API_KEY: (hidden)" in notes(found)
    assert "--api-key: (hidden)" in notes(found)
    found = read(f"{DOCKER}solo_only: true\ncommand: x --token hf_1234 && vllm serve a/b\n")
    assert not found.recipe.shell
    assert "hf_1234" not in found.text
    assert "command: (hidden)" in notes(found)


def test_an_image_without_a_digest_is_listed_with_the_way_to_pin_it():
    found = import_file(DATA / "sparkrun" / "01-minimal.yaml")
    assert found.recipe.container is None
    assert "container: example/vllm:0.23" in notes(found)
    assert "docker image inspect" in notes(found)
    pinned = import_file(DATA / "sparkrun" / "01-minimal.yaml", Wanted(image=DIGEST))
    assert pinned.recipe.container == Container(DIGEST)
    with pytest.raises(RequestError, match="not by digest"):
        import_file(DATA / "sparkrun" / "01-minimal.yaml", Wanted(image="example/vllm:0.23"))


# --- choices ---


def spark(**choice):
    path = DATA / "vllm-recipes" / "03-spark.yaml"
    return import_file(path, Wanted(choice=Choice(**choice)))


def test_a_variant_and_a_hardware_profile_are_chosen():
    found = spark(variant="nvfp4", hardware="dgx_spark_gb10")
    assert found.recipe.name == "qwen3.6-35b-a3b-nvfp4-dgx-spark-gb10"
    assert found.recipe.model == Files("hf:nvidia/Qwen3.6-35B-A3B-NVFP4")
    assert found.recipe.env == {"VLLM_USE_FLASHINFER_MOE_FP4": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    serve = found.recipe.serve
    assert (serve.kv_dtype, serve.memory_share, serve.users) == ("fp8", 0.8, 8), "the last of two equal options counts"
    assert serve.arguments == ["--trust-remote-code", "--load-format", "fastsafetensors"]
    plain = spark(variant="nvfp4")
    assert (plain.recipe.serve.memory_share, plain.recipe.serve.users) == (None, 16)
    assert "dgx_spark_gb10" in notes(plain), "what was not chosen is listed"


def test_what_is_not_offered_is_refused_with_what_is():
    with pytest.raises(RecipeError, match=r"no variant 'int4'; it has: default, nvfp4"):
        spark(variant="int4")
    with pytest.raises(RecipeError, match="unknown hardware 'spark'; known: b200"):
        spark(hardware="spark")
    with pytest.raises(RecipeError, match="no feature 'drafts'; it has: none"):
        spark(features=("drafts",))
    with pytest.raises(RequestError, match="only in recipes of vllm-recipes"):
        import_file(DATA / "sparkrun" / "01-minimal.yaml", Wanted(choice=Choice(variant="fp8")))


def test_changes_for_a_generation_apply_to_its_cards():
    path = DATA / "vllm-recipes" / "04-generations.yaml"
    blackwell = import_file(path, Wanted(choice=Choice(hardware="b200"))).recipe
    assert blackwell.serve.kv_dtype == "fp8"
    assert blackwell.env == {"A": "blackwell"}
    assert blackwell.serve.arguments[-2:] == ["--tensor-parallel-size", "8"], "320 GB do not fit one card of 180"
    assert "--moe-backend" in blackwell.serve.arguments
    hopper = import_file(path, Wanted(choice=Choice(hardware="h200"))).recipe
    assert (hopper.serve.kv_dtype, hopper.env) == ("", {"A": "base"})


def test_features_are_turned_on_and_off_and_their_mode_chosen():
    path = DATA / "vllm-recipes" / "05-modes.yaml"
    assert import_file(path).recipe.serve.draft == "none"
    on = import_file(path, Wanted(choice=Choice(features=("spec_decoding",))))
    assert on.recipe.serve.draft == "mtp:2"
    assert "dflash" in notes(on)
    other = import_file(path, Wanted(choice=Choice(features=("spec_decoding=dflash",)))).recipe
    assert (other.serve.draft, other.drafter) == ("dflash:12", Files("hf:z-lab/Modes-DFlash"))
    assert import_file(path, Wanted(choice=Choice("fused"))).recipe.serve.draft == "mtp:2", "the variant turns it on"
    with pytest.raises(RecipeError, match="no mode 'dflash' for this variant; it has: mtp"):
        import_file(path, Wanted(choice=Choice("fused", features=("spec_decoding=dflash",))))
    tools = DATA / "vllm-recipes" / "02-features.yaml"
    assert import_file(tools, Wanted(choice=Choice(without=("tool_calling",)))).recipe.serve.tool_parser == ""


def test_boxes_are_named_or_reduced_to_one():
    path = DATA / "sparkrun" / "03-two-boxes.yaml"
    named = import_file(path, Wanted(nodes=("a", "b"))).recipe.nodes
    assert named == Nodes(["a", "b"], tensor_parallel=2)
    solo = import_file(path, Wanted(solo=True))
    assert solo.recipe.nodes is None
    assert "--tensor-parallel-size: 2 (it counted boxes" in notes(solo)
    with pytest.raises(RecipeError, match="one box only"):
        import_file(DATA / "sparkrun" / "02-hybrid-dflash.yaml", Wanted(nodes=("a", "b")))
    with pytest.raises(RecipeError, match="over no second box"):
        import_file(DATA / "sparkrun" / "01-minimal.yaml", Wanted(nodes=("a", "b")))
    both = import_file(DATA / "vllm-recipes" / "04-generations.yaml", Wanted(nodes=("a", "b"))).recipe
    assert both.nodes == Nodes(["a", "b"], tensor_parallel=2)


# --- export ---


def test_recipes_for_stokers_engine_are_not_exported():
    with pytest.raises(RecipeError, match=r"only recipes with engine = \"vllm\""):
        export(load_recipe("demo").recipe, "sparkrun")


@pytest.mark.parametrize("to", FORMATS)
def test_every_shipped_recipe_for_vllm_is_exported_and_read_again(to):
    for name in shipped():
        recipe = load_recipe(name).recipe
        if recipe.engine == "vllm":
            back = read(export(recipe, to).text, recipe.name).recipe
            assert (back.serve.draft, back.serve.context, back.env) == (
                recipe.serve.draft,
                recipe.serve.context,
                recipe.env,
            )


@pytest.mark.parametrize("to", FORMATS)
def test_what_an_exported_recipe_lost_is_listed_and_written_in_its_head(to):
    recipe = parse(
        'name = "mine"\ntitle = "Mine"\nengine = "vllm"\nweights = "int4"\n'
        '[model]\nsource = "hf:a/b"\nsha256 = { "config.json" = "' + "0" * 64 + '" }\n'
        '[serve]\nreserve_gib = 4\n[expected.memory_gib]\nvalue = 80\nsource = "me"\n'
        '[known]\nstate = "runs"\nwhere = "here"\n'
    )
    found = export(recipe, to)
    lost = {one.what for one in found.notes}
    assert {"weights", "model.sha256", "serve.reserve_gib", "expected", "known"} <= lost
    assert all(f"# - {what} (" in found.text for what in lost)


# --- what the formats have in common ---

SPECIAL = st.text("abcXYZ 012.,:;/_=@%+-'\"{}[]#&|<>()!?*~^\\", min_size=1, max_size=12)
PLAIN = st.text("abcXYZ012._/-", min_size=1, max_size=12).filter(lambda text: text[0].isalnum())
WORDS = st.lists(PLAIN, min_size=1, max_size=5).map(" ".join)
NAMES = PLAIN.map(slug)
HUB = st.builds("{}/{}".format, st.from_regex(r"[A-Za-z][\w.-]{0,8}", fullmatch=True), PLAIN.map(slug))
MODELS = st.builds(Files, HUB.map("hf:{}".format), st.sampled_from(["main", "0a1b2c3"])) | st.just(Files("/models/a"))
RAW = st.lists(
    st.sampled_from(
        [
            ["--trust-remote-code"],
            ["--load-format", "fastsafetensors"],
            ["-cc.cudagraph_mode=PIECEWISE"],
            ["--seed", "-1"],
        ]
    )
    | SPECIAL.filter(lambda text: not text.startswith("-")).map(lambda text: ["--note", text]),
    max_size=3,
).map(lambda options: [token for option in options for token in option])
DRAFTS = st.sampled_from(["none", "mtp:1", "mtp:2", "dflash:12"])
SERVE = st.builds(
    Serve,
    draft=DRAFTS,
    context=st.none() | st.integers(1, 1 << 20),
    users=st.integers(1, 256),
    kv_dtype=st.sampled_from(["", "bf16", "fp8"]),
    memory_share=st.none() | st.floats(0.01, 1).map(lambda share: round(share, 3)),
    prefill_tokens=st.none() | st.integers(1, 1 << 16),
    prefix_cache=st.booleans(),
    host=st.sampled_from(["127.0.0.1", "0.0.0.0", "::"]),
    port=st.integers(1, 65535),
    name=st.just("") | PLAIN,
    tool_parser=st.just("") | PLAIN,
    reasoning_parser=st.just("") | PLAIN,
    template=st.dictionaries(PLAIN, st.booleans() | st.integers(-5, 5) | SPECIAL, max_size=2),
    sampling=st.dictionaries(PLAIN, st.floats(0, 2) | st.integers(0, 99).map(float), max_size=2),
    arguments=RAW,
)
ENV = st.dictionaries(st.from_regex(r"[A-Z][A-Z0-9_]{0,6}", fullmatch=True), SPECIAL | st.just("1"), max_size=3)
BEFORE = st.sampled_from(["pip install x", "sed -i 's/a b/c/' f && echo \"done\"", "a\nb -c 'd {e}'"])
NODES = {
    # tensor, pipeline, expert, launcher: boxes and cards are counted alike if each box has one card
    "sparkrun": st.sampled_from([(2, 1, False, "vllm"), (2, 2, True, "ray"), (1, 3, False, "vllm")]),
    "spark-vllm-docker": st.sampled_from([(2, 1, False, "vllm"), (2, 2, True, "ray"), (1, 3, False, "vllm")]),
    "vllm-recipes": st.sampled_from([(2, 1, False, "vllm"), (4, 1, True, "vllm"), (1, 3, False, "vllm")]),
}
STEPS = {
    "sparkrun": st.lists(
        st.builds(Step, BEFORE, st.just("before"), st.just(True))
        | st.builds(Step, st.sampled_from(["echo $STOKER_URL/v1", "x"]), st.just("after"), st.booleans()),
        max_size=3,
    ).map(lambda steps: sorted(steps, key=lambda step: (step.when == "after", not step.inside))),
    "spark-vllm-docker": st.lists(st.builds(Step, BEFORE, st.just("before"), st.just(True)), max_size=1),
    "vllm-recipes": st.lists(st.builds(Step, BEFORE, st.just("before"), st.just(False), WORDS), max_size=2),
}


@st.composite
def in_common(draw, format):
    """A recipe of ours with everything that a format can say, and nothing else."""
    serve = draw(SERVE)
    spread = draw(st.none() | NODES[format])
    nodes = None
    if spread:
        tensor, pipeline, expert, launcher = spread
        hosts = [f"box-{number}" for number in range(1, tensor * pipeline + 1)]
        nodes = Nodes(hosts, launcher, "", tensor, pipeline, expert)
    return Recipe(
        name=draw(NAMES),
        title=draw(WORDS),
        model=draw(MODELS),
        engine="vllm",
        engine_version=draw(st.sampled_from(["", ">=0.25"])) if format == "vllm-recipes" else "",
        drafter=draw(st.builds(Files, HUB.map("hf:{}".format), st.sampled_from(["main", "b0"])))
        if serve.draft.startswith("dflash")
        else None,
        serve=serve,
        env=draw(ENV),
        container=draw(st.none() | st.just(Container(DIGEST))),
        nodes=nodes,
        shell=draw(STEPS[format]),
    )


@pytest.mark.parametrize("format", FORMATS)
def test_ours_to_theirs_to_ours_is_the_same_recipe(format):
    @settings(max_examples=60, deadline=None)
    @given(in_common(format))
    def check(recipe):
        recipe = unambiguous(recipe, format)
        there = export(recipe, format)
        back = read(there.text, recipe.name)
        assert back.format == format
        assert back.recipe == recipe, there.text
        said = {"nodes.hosts", "container", "meta"}
        assert {one.what for one in there.notes} <= said, "it lost nothing but the names of the boxes"

    check()


def unambiguous(recipe, format):
    """An API name that is the recipe's own is the same as none, and sparkrun fills in what looks like its keys."""
    serve = recipe.serve
    if serve.name == recipe.name:
        serve = msgspec.structs.replace(serve, name="")
    return msgspec.structs.replace(recipe, serve=serve)


def test_what_sparkrun_would_fill_in_is_listed_and_not_written():
    recipe = Recipe(
        "a", "A", Files("hf:a/b"), engine="vllm", serve=Serve(arguments=["--note", "at {port}"]), env={"A": "$HOME"}
    )
    found = export(recipe, "sparkrun")
    assert "--note" not in found.text.split("\n\n", 1)[1]
    assert {"--note 'at {port}'", "env.A"} <= {one.what for one in found.notes}


# --- what is wrong is said with its line ---

DOCKER = "recipe_version: '1'\nname: a\ncontainer: b\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("recipe_version: '2'\nmodel: a/b\nruntime: sglang\n", "line 3 (runtime): it is for sglang"),
        ("recipe_version: '2'\nmodel: [a]\n", "line 2 (model): expected text, got a list"),
        ("recipe_version: '2'\nmodel: 'a b'\n", "line 2 (model): 'a b' is neither OWNER/NAME nor a path"),
        ("recipe_version: '2'\nmodel: a/b\nenv: 3\n", "line 3 (env): expected a table, got a number, 3"),
        ("recipe_version: '2'\nmodel: a/b\nenv:\n  A: [1]\n", "line 4 (env.A): expected text"),
        ("recipe_version: '2'\nmodel: a/b\nmin_nodes: two\n", "line 3 (min_nodes): expected a whole number"),
        ("recipe_version: '2'\nmodel: a/b\nsolo_only: 'yes'\n", "line 3 (solo_only): expected true or false"),
        ("recipe_version: '2'\nmodel: a/b\ndefaults:\n  port: [1]\n", "line 4 (defaults.port): a value of defaults"),
        ("recipe_version: '2'\nruntime: vllm\n", "names no model"),
        (
            "recipe_version: '2'\nmodel: a/b\ndefaults: {tensor_parallel: 5000000}\n",
            "'5000000' is not a number of cards",
        ),
        ("recipe_version: '2'\nmodel: a/b\ndefaults: {tensor_parallel: 999}\n", "999 boxes"),
        (
            f"{DOCKER}command: sglang serve a/b\n",
            "line 4 (command): it does not run `vllm serve` but `sglang serve a/b`",
        ),
        (
            f"{DOCKER}command: vllm serve a/b --port {{port}}\n",
            "line 4 (command): the key {port} has no value in defaults",
        ),
        (f"{DOCKER}command: vllm serve a/b {{a.b}}\n", "'{a.b}' is no {key}"),
        (f'{DOCKER}command: vllm serve "a/b\n', "is not closed"),
        (f"{DOCKER}command: [a]\n", "line 4 (command): expected text"),
        (
            "recipe_version: '1'\nname: a\ncommand: vllm serve a/b\n",
            "(container): a recipe of spark-vllm-docker needs it",
        ),
        ("model: {model_id: a/b}\nvariants: 3\n", "line 2 (variants): expected a table"),
        ("model: {model_id: a/b, base_args: --x}\n", "(model.base_args): expected a list"),
        ("model: {model_id: a/b}\nomni: {}\nmeta: {}\nomni: {}\n", "the key 'omni' is there twice"),
        ("model: {model_id: a/b}\nomni: {tasks: [x]}\n", "line 2 (omni): it is served by vLLM-Omni"),
        ("model: {model_id: a/b}\ndependencies: [x]\n", "line 2 (dependencies[0]): expected a table"),
        (
            "model: {model_id: a/b}\nvariants: {default: {tp: many}}\n",
            "(variants.default.tp): expected a number of cards",
        ),
        ("hello: world\n", "looks like no recipe"),
        (
            "recipe_version: '2'\nmodel: a/b\ncommand: '{a}'\ndefaults: {a: '"
            + "{b}" * 9
            + "', b: '"
            + "{a}" * 9
            + "'}\n",
            "longer than",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text, says):
    with pytest.raises(RecipeError) as raised:
        read(text)
    assert says in str(raised.value)
    assert "theirs.yaml" in str(raised.value)


# Any table with their keys and any values: a recipe or a sentence, never a traceback.
KEYS_OF_THEIRS = st.sampled_from(
    [
        *("recipe_version", "name", "model", "runtime", "container", "defaults", "env", "command", "metadata"),
        *("min_nodes", "max_nodes", "solo_only", "mods", "pre_exec", "post_commands"),
        *("meta", "variants", "default", "features", "opt_in_features", "hardware_overrides", "strategy_overrides"),
        *("strategy_min_gpus", "compatible_strategies", "dependencies", "model_id", "base_args", "base_env"),
        *("extra_args", "hardware", "docker_image"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(
        ["1", "2", "vllm", "vllm serve a/b --port {port}", "a/b", "default", "--x", "mtp", "{", "sh -c '", "\x1b[2J"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS_OF_THEIRS, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(KEYS_OF_THEIRS, VALUES, max_size=8), st.sampled_from(["", *FORMATS]))
def test_anything_at_all_becomes_a_recipe_or_a_sentence(data, of):
    try:
        found = import_table(table(yaml.safe_dump(data)), "any", Wanted(of))
    except RecipeError as refused:
        said = str(refused)
    else:
        said = "theirs.yaml" if parse(found.text) == found.recipe else found.text
    assert said.startswith("theirs.yaml")
