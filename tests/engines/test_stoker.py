"""A recipe becomes a `stoker serve` command that says the same."""

from pathlib import Path

from stoker.engines.engine import PORT, counters, find, shell
from stoker.recipes.load import Loaded, load, parse


def _loaded(text: str) -> Loaded:
    text = f'name = "mine"\ntitle = "t"\n{text}\n[model]\nsource = "demo"\n'
    return Loaded(parse(text), Path(), text)


def test_every_setting_reaches_the_command():
    loaded = _loaded(
        'serve = { draft = "mtp:2", context = 4096, users = 2, kv_dtype = "fp8", memory_gib = 8.5, reserve_gib = 1,'
        ' prefix_cache = false, name = "m", template = { enable_thinking = false },'
        ' sampling = { temperature = 0.6, top_k = 20.0 }, arguments = ["--queue", "3"] }\n'
        'env = { OMP_NUM_THREADS = "1" }'
    )
    deployment = find("stoker").deployment(loaded, Path("/models/m"), None, 1)
    (launch,) = deployment.launches
    pairs = dict(zip(launch.command, launch.command[1:], strict=False))
    assert pairs["--model"] == "/models/m"
    assert pairs["--port"] == PORT
    assert pairs["--draft"] == "mtp:2"
    assert pairs["--context"] == "4096"
    assert pairs["--kv-dtype"] == "fp8"
    assert pairs["--memory"] == "8.5"
    assert pairs["--prefix-cache"] == "0"
    assert pairs["--served-model-name"] == deployment.model_name == "m"
    assert pairs["--default-chat-template-kwargs"] == '{"enable_thinking": false}'
    assert pairs["--default-sampling"] == '{"temperature": 0.6, "top_k": 20}'
    assert "--any-model" in launch.command, "Claude Code asks for models by Anthropic's names"
    assert launch.command[-2:] == ("--queue", "3")
    assert "OMP_NUM_THREADS=1 \\" in shell(launch)


def test_what_the_engine_cannot_do_is_said_before_it_starts():
    loaded = _loaded('serve = { prefill_tokens = 8192 }\ndrafter = { source = "demo" }')
    assert len(find("stoker").problems(loaded.recipe)) == 2
    assert not find("stoker").problems(load("demo").recipe)


def test_options_that_the_server_does_not_know_are_found_by_its_own_parser():
    known = _loaded('serve = { arguments = ["--queue", "3"] }').recipe
    unknown = _loaded('serve = { arguments = ["--queue", "3", "--nonsense", "1"] }').recipe
    assert not find("stoker").problems(known)
    (said,) = find("stoker").problems(unknown)
    assert said == "stoker serve does not understand serve.arguments: No such option: --nonsense"


def test_progress_is_read_from_metrics_of_either_engine():
    text = (
        '# HELP x\nvllm:num_requests_running{engine="0",model_name="a b"} 2.0\n'
        'vllm:generation_tokens_total{engine="0"} 10.0\nvllm:prompt_tokens_total{engine="0"} 5.0\nother 3\n'
    )
    found = counters(text)
    assert found
    assert (found.running, found.work) == (2, 15.0)
    assert counters("python_info 1.0\n") is None
