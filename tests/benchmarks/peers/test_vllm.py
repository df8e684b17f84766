"""The comparison with vLLM, without vLLM: the model it is given, when the clock runs, the rows, and what is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.gpu.decode import WARM_UP
from benchmarks.gpu.weights import CODE_RMS, QWEN_122B, SHAPES, SHIFT, TINY
from benchmarks.peers.beside import compare, print_beside
from benchmarks.peers.vllm_config import text_config
from benchmarks.peers.vllm_measure import Bench, decode_run, prefill_run, random_prompts
from benchmarks.peers.vllm_worker import ExpertCount, fill

from benchmarks.peers import vllm
from stoker.backends.gpu.packed import Kind
from stoker.weights.model_config import ModelConfig

ROOT = Path(__file__).parents[3]


class FakeEngine:
    """vLLM's engine as the benchmark uses it, with a clock of its own: seconds and tokens of a step are known.

    Its first prompt takes twice as long, and before every fourth step it has nothing to say.
    """

    def __init__(self, prefill: float, step: float, gains: Callable[[int], int], distinct: float = 0.0) -> None:
        self.prefill, self.step_seconds, self.gains, self.distinct = prefill, step, gains, distinct
        self.now, self.calls, self.steps, self.seen, self.shut = 0.0, 0, 0, 0, False
        self.left: dict[str, int] = {}
        self.fresh: list[str] = []
        self.aborted: list[str] = []
        self.watched: int | None = None
        self.engine_core = SimpleNamespace(shutdown=self.shutdown)

    def add_request(self, name: str, prompt: dict[str, list[int]], params: int) -> None:
        assert prompt["prompt_token_ids"]
        self.left[name] = params
        self.fresh.append(name)

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        if self.aborted:  # what was under way for sequences that are gone
            self.aborted.clear()
            return []
        if self.fresh:  # prompts one after the other, the running sequences wait
            self.now += self.prefill if self.now else 2 * self.prefill
            return [self._output(self.fresh.pop(0), 1)]
        self.calls += 1
        if self.calls % 5 == 4:
            return []
        self.now += self.step_seconds
        self.steps += 1
        self.seen = len(self.left) * self.gains(self.steps)
        return [self._output(name, self.gains(self.steps)) for name in list(self.left)]

    def _output(self, name: str, tokens: int) -> Any:
        tokens = min(tokens, self.left[name])
        self.left[name] -= tokens
        if not self.left[name]:
            del self.left[name]
        return SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0] * tokens)])

    def abort_request(self, names: list[str]) -> None:
        self.aborted = names
        for name in names:
            self.left.pop(name, None)

    def collective_rpc(self, method: str, args: tuple[int, ...] = ()) -> list[Any]:
        if method == "watch_experts":
            (self.watched,) = args
            return [1]
        assert method == "distinct_experts"
        assert self.watched is not None
        return [[[self.seen, self.distinct], [999, 1.0]]]

    def shutdown(self) -> None:
        self.shut = True


@pytest.mark.parametrize("shape", ["qwen3.5-122b-a10b", "qwen3.5-35b-a3b", "tiny"])
def test_config_says_the_shape_to_every_reader(shape: str, tmp_path: Path) -> None:
    """Read by transformers' class and by our own reader of published configs."""
    transformers = pytest.importorskip("transformers")
    config = SHAPES[shape]
    written = text_config(config, "bf16", "bf16")
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "Qwen3_5MoeTextConfig"
    assert (theirs.hidden_size, theirs.num_hidden_layers) == (config.hidden_size, len(config.layer_types))
    assert tuple(theirs.layer_types) == config.layer_types
    assert theirs.rope_parameters["partial_rotary_factor"] * theirs.head_dim == config.rotary_dim
    assert sum(theirs.rope_parameters["mrope_section"]) == config.rotary_dim // 2
    assert config.moe is not None
    assert (theirs.num_experts, theirs.num_experts_per_tok) == (config.moe.num_experts, config.moe.top_k)
    assert ModelConfig.from_dict(written) == config


def test_published_config_values_of_the_122b() -> None:
    found = text_config(QWEN_122B, "int4", "int4")
    assert found["rope_parameters"]["mrope_section"] == [11, 11, 10]
    assert found["layer_types"][:4] == ["linear_attention"] * 3 + ["full_attention"]
    assert found["shared_expert_intermediate_size"] == 1024
    assert found["mamba_ssm_dtype"] == "float32"


@pytest.mark.parametrize(
    ("mtp", "blocks", "entries"), [("bf16", "model.layers", 192), ("int4", "model.layers,mtp.layers", 196)]
)
def test_int4_leaves_shared_experts_in_16_bit(mtp: str, blocks: str, entries: int) -> None:
    quantization = text_config(QWEN_122B, "int4", mtp)["quantization_config"]
    assert (quantization["quant_method"], quantization["bits"], quantization["group_size"]) == ("auto-round", 4, 128)
    assert quantization["block_name_to_quantize"] == blocks
    extra = quantization["extra_config"]
    assert len(extra) == entries
    assert extra["model.layers.47.mlp.shared_expert.down_proj"]["bits"] == 16
    assert ("mtp.layers.0.mlp.shared_expert_gate" in extra) == (mtp == "int4")


def test_speed_is_of_the_steps_after_the_first() -> None:
    """Prefill and the first steps are slow, and have no share in the result."""
    engine = FakeEngine(prefill=50.0, step=0.25, gains=lambda step: 2 + step % 2)
    seconds, tokens = decode_run(engine, 1000, random_prompts(256, 3, 5, 0), 8, lambda: engine.now)
    assert seconds == 8 * 0.25
    assert tokens == 3 * 8 * 2.5
    assert engine.steps == WARM_UP + 8
    assert not engine.left
    again = decode_run(engine, 1000, random_prompts(256, 1, 5, 1), 4, lambda: engine.now)
    assert again == (1.0, 10), "the echo of aborted requests is no step"


def test_sequences_that_end_too_early_are_an_error() -> None:
    engine = FakeEngine(1.0, 1.0, lambda step: 1)
    with pytest.raises(RuntimeError, match=r"The sequences ended 7 steps before the measurement did\."):
        decode_run(engine, 1 + WARM_UP + 3, [[1]], 10, lambda: engine.now)


def test_prefill_is_the_time_to_the_only_token() -> None:
    engine = FakeEngine(0.5, 99.0, lambda step: 1)
    assert [prefill_run(engine, 1, [1, 2, 3], lambda: engine.now) for _ in range(2)] == [1.0, 0.5]


def test_prompts_differ_and_repeat_by_seed() -> None:
    one, two = random_prompts(1000, 2, 64, 3)
    assert one != two
    assert all(0 <= token < 1000 for token in one)
    assert random_prompts(1000, 2, 64, 3) == [one, two] != random_prompts(1000, 2, 64, 4)


def bench(distinct: float, *arguments: str) -> tuple[Bench, list[FakeEngine]]:
    """Two tokens a step of 10 ms; prompts take a second."""
    options = vllm.parse(["--shape", "tiny", "--steps", "16", *arguments])
    engines: list[FakeEngine] = []

    def start(draft: str, eager: bool) -> FakeEngine:
        if engines:
            assert engines[-1].shut, "two engines do not fit into one memory"
        engines.append(FakeEngine(1.0, 0.01, lambda step: 1 if draft == "none" else 2, distinct))
        return engines[-1]

    return Bench(TINY, options, start, lambda tokens: tokens, lambda: engines[-1].now), engines


def test_rows_have_the_keys_of_the_decode_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    found, engines = bench(3.75, "--draft", "none,mtp:1", "--accept-length", "2", "--batch", "2", "--prefill", "64")
    found.run()
    plain, drafted = found.rows
    contract = {"shape", "weights", "batch", "draft", "accept_length", "acceptance_source", "context", "kv",
                "tokens_per_s", "steps_per_s", "spread", "distinct_experts", "distinct_expected", "counts"}  # fmt: skip
    assert plain.keys() >= contract
    assert plain["tokens_per_s"] == pytest.approx(200)
    assert drafted["tokens_per_s"] == pytest.approx(400)
    assert drafted["steps_per_s"] == pytest.approx(100)
    assert (drafted["accept_length"], drafted["acceptance_source"]) == (2.0, "assumed")
    assert plain["distinct_experts"] == plain["distinct_expected"] == 3.75, "16 experts, 2 for each of 2 tokens"
    assert plain["counts"]
    assert drafted["distinct_expected"] == pytest.approx(6.62, abs=0.01)
    assert not drafted["counts"], "four tokens that choose as few experts as two"
    assert found.prefill == [{"shape": "tiny", "weights": "int4", "kv": "bf16", "layers": 2, "tokens": 64, "context": 0,
                              "seconds": 1.0, "tokens_per_s": 64.0, "spread": 0.0}]  # fmt: skip
    assert [engine.watched for engine in engines] == [None, 2, None, 2], "experts are counted apart from the timing"
    assert "DOES NOT COUNT: 6.6 distinct experts expected" in capsys.readouterr().out


def test_a_row_whose_experts_nobody_counted_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    found, engines = bench(2.0, "--batch", "1", "--no-experts")
    found.run()
    assert [row["counts"] for row in found.rows] == [False]
    assert len(engines) == 1
    assert "experts not counted; DOES NOT COUNT" in capsys.readouterr().out


def test_distinct_experts_are_those_of_the_routers_in_steps_of_each_size() -> None:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.ModuleDict(
                    {"mlp": torch.nn.ModuleDict({"gate": torch.nn.Identity(), "up": torch.nn.Identity()})}
                )
                for _ in range(2)
            )

    model = Model()
    worker = ExpertCount()
    worker.get_model = lambda: model
    assert worker.watch_experts(2) == 2
    same, apart = torch.tensor([[9.0, 8, 1, 0]]).repeat(2, 1), torch.tensor([[9.0, 8, 1, 0], [0, 1, 8, 9.0]])
    for layer, logits in zip(model.layers, (same, apart), strict=True):
        layer["mlp"]["gate"](logits)  # type: ignore[index]
        layer["mlp"]["gate"](logits[:1])  # type: ignore[index]
        layer["mlp"]["up"](logits)  # type: ignore[index]
    assert worker.distinct_experts() == [[2, 3.0], [1, 2.0]]
    assert worker.distinct_experts() == []


def test_weights_keep_the_stream_near_its_token() -> None:
    """Each kind of parameter by the name vLLM gives it."""
    import torch

    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "model.embed_tokens.weight": ((64, 256), torch.bfloat16),
        "model.layers.0.mlp.experts.w13_qweight": ((4, 32, 512), torch.int32),
        "model.layers.0.mlp.experts.w13_scales": ((4, 2, 512), torch.bfloat16),
        "model.layers.0.mlp.experts.w2_scales": ((4, 2, 256), torch.bfloat16),
        "model.layers.0.mlp.experts.w2_qzeros": ((4, 2, 32), torch.int32),
        "model.layers.0.mlp.gate.weight": ((64, 256), torch.bfloat16),
        "model.layers.0.mlp.shared_expert.down_proj.weight": ((256, 256), torch.bfloat16),
        "model.layers.0.linear_attn.A_log": ((64,), torch.float32),
        "model.layers.0.linear_attn.dt_bias": ((64,), torch.float32),
        "model.layers.0.linear_attn.norm.weight": ((64,), torch.float32),
        "model.layers.0.input_layernorm.weight": ((64,), torch.bfloat16),
    }
    model = torch.nn.Module()
    for name, (shape, dtype) in sizes.items():
        parts = name.split(".")
        owner = model
        for part in parts[:-1]:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(parts[-1], torch.nn.Parameter(torch.full(shape, 77).to(dtype), requires_grad=False))
    fill(model)
    found = {name.split("model.layers.0.")[-1]: value.double() for name, value in model.named_parameters()}
    assert found["model.embed_tokens.weight"].std() == pytest.approx(1, rel=0.05)
    codes = found["mlp.experts.w13_qweight"]
    assert codes.abs().max() > 2**30
    assert codes.mean().abs() < 2**26
    step = 256**-0.5 / CODE_RMS[Kind.INT4]
    assert found["mlp.experts.w13_scales"].abs().unique().tolist() == pytest.approx([step], rel=0.01)
    assert found["mlp.experts.w13_scales"].mean().abs() < 0.1 * step
    assert found["mlp.experts.w2_scales"].abs().unique().tolist() == pytest.approx([SHIFT * step], rel=0.01)
    assert found["mlp.experts.w2_qzeros"].unique().tolist() == [float(0x77777777)]
    assert found["mlp.gate.weight"].std() == pytest.approx(256**-0.5, rel=0.05)
    assert found["mlp.shared_expert.down_proj.weight"].std() == pytest.approx(SHIFT * 256**-0.5, rel=0.05)
    assert -5 < found["linear_attn.A_log"].min() < found["linear_attn.A_log"].max() < 2.71
    assert found["linear_attn.dt_bias"].mean() == pytest.approx(-4, abs=0.6)
    assert found["linear_attn.norm.weight"].unique().tolist() == [1.0]
    assert found["input_layernorm.weight"].unique().tolist() == [0.0], "vLLM adds one"


def test_engine_arguments_and_what_is_listed() -> None:
    options = vllm.parse(["--draft", "none,mtp:2", "--accept-length", "2.6", "--prefill", "4096", "--batch", "1,64"])
    plain = vllm.engine_arguments(options, "model", "none", False)
    drafted = vllm.engine_arguments(options, "model", "mtp:2", True)
    assert "speculative_config" not in plain
    assert drafted["speculative_config"] == {
        "method": "mtp",
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.6,
    }
    assert (plain["enforce_eager"], drafted["enforce_eager"]) == (False, True)
    assert plain["max_num_seqs"] == 64, "at most so many sequences run at once"
    assert plain["max_model_len"] == 4097
    assert plain["load_format"] == "stoker-spread"
    listed = " ".join(vllm.modifications(options))
    for part in (
        "stoker-spread",
        "tokenizer",
        "prefix caching off",
        "2.6 tokens a step",
        "BF16",
        "vision",
        "max_num_seqs 64",
    ):
        assert part in listed
    other = " ".join(vllm.modifications(vllm.parse(["--load-format", "dummy", "--layers", "4"])))
    assert "'dummy'" in other
    assert "only 4 layers" in other
    assert "tokens a step" not in other


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--draft dflash:12", "'dflash:12' must be none or mtp:K with K from 1 to 15"),
        ("--draft mtp:0", "'mtp:0' must be none or mtp:K"),
        ("--batch 1,x", "'1,x' must be one or more whole numbers above 0"),
        ("--draft mtp:1 --accept-length 2.6", "--accept-length 2.6 is not between 1 and the 2 tokens of a step."),
        ("--read some.json", "--read runs nothing: say with --beside"),
        ("--weights hybrid", "invalid choice: 'hybrid'"),
    ],
)
def test_what_cannot_be_asked_for(arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        vllm.parse(arguments.split())
    assert stop.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"shape": "s", "weights": "int4", "batch": 1, "draft": "none", "context": 128, "kv": "bf16",
           "accept_length": 1.0, "tokens_per_s": 150.0, "counts": True}  # fmt: skip
    drafted = row | {"draft": "mtp:2", "accept_length": 2.6, "tokens_per_s": 200.0}
    prefill = {"shape": "s", "weights": "int4", "kv": "bf16", "tokens": 4096, "context": 0, "tokens_per_s": 16000.0}
    ours = [row | {"tokens_per_s": 330.0}, drafted | {"tokens_per_s": 500.0, "accept_length": 2.4, "counts": False}]
    assert compare(ours, [row, drafted, row | {"batch": 4}]) == [
        "| s int4, batch 1, none, context 128 | 330.0 | 150.0 | 2.20 |  |",
        "| s int4, batch 1, mtp:2, context 128 | 500.0 | 200.0 | 2.50 "
        "| Stoker's does not count; 2.40 against 2.60 tokens a step |",
        "| s int4, batch 4, none, context 128 | – | 150.0 | – | no such row of Stoker's |",
    ]
    paths = [str(tmp_path / name) for name in ("decode.json", "prefill.json", "vllm.json")]
    results = [{"device": "A", "rows": ours}, {"device": "B", "rows": [prefill | {"tokens_per_s": 20000.0}]},
               {"device": "A", "engine": "vllm 0.32.0", "rows": [row], "prefill": [prefill]}]  # fmt: skip
    for path, result in zip(paths, results, strict=True):
        Path(path).write_text(json.dumps(result))
    assert vllm.main(["--read", paths[2], "--beside", paths[0], paths[1]]) == 0
    out = capsys.readouterr().out
    assert "Not the same device: B beside A." in out
    assert "| s int4, prefill of 4,096 | 20,000.0 | 16,000.0 | 1.25 |  |" in out
    print_beside(paths[:1], results[2])
    assert "Not the same device" not in capsys.readouterr().out


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_says_how_to_install_it() -> None:
    """In a process of its own: started by its path it must not take itself for vLLM."""
    done = subprocess.run(
        [sys.executable, "benchmarks/peers/vllm.py", "--shape", "tiny"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    sentence = "vLLM is not installed. Written against 0.32.0: pip install vllm==0.32.0"
    assert done.stderr.strip().splitlines()[-1].startswith(sentence)
    assert "Traceback" not in done.stderr


def test_another_vllm_is_told_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The few names that are looked at before an engine is started."""
    options = vllm.parse(["--draft", "mtp:1", "--accept-length", "1.5"])
    known = dict.fromkeys(vllm.engine_arguments(options, "", "mtp:1", False).keys() - {"enable_prefix_caching"})
    speculative = {"method": None, "num_speculative_tokens": None}
    package = SimpleNamespace(
        __version__="0.23.0",
        EngineArgs=SimpleNamespace(__dataclass_fields__=known),
        ModelRegistry=SimpleNamespace(get_supported_archs=lambda: ["Qwen3_5MoeForConditionalGeneration"]),
    )
    config = SimpleNamespace(SpeculativeConfig=SimpleNamespace(__dataclass_fields__=speculative))
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    assert vllm.main(["--draft", "none,mtp:1", "--accept-length", "1.5"]) == 2
    assert capsys.readouterr().err == (
        "vLLM 0.23.0 differs from 0.32.0, which this was written against: EngineArgs has no enable_prefix_caching; "
        "SpeculativeConfig has no rejection_sample_method; SpeculativeConfig has no synthetic_acceptance_length; "
        "the architecture Qwen3_5MoeForCausalLM is unknown. Install vllm==0.32.0 to repeat the comparison.\n"
    )
