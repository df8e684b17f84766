"""The kernels' benchmark in Triton's interpreter: its checks find what they are for, and its command runs those asked
for, so that minutes on a GPU are not spent on mistakes of the benchmark."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("check", ["linear", "head", "deltanet", "attention", "long attention"])
def test_checks_pass(interpreter, check: str) -> None:
    interpreter(check_small, check)


def test_experts_are_near_their_reference(interpreter) -> None:
    interpreter(check_experts)


def test_a_wrong_kernel_is_caught(interpreter) -> None:
    interpreter(check_wrong)


def test_the_command_runs_what_is_asked_for_and_one_failure_hides_no_other(interpreter, tmp_path: Path) -> None:
    interpreter(check_command, tmp_path / "result.json")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-times", "--only", "rubbish"], "There are linear INT4 in"),
        (["--no-times", "--shape", "tiny,huge"], "not huge"),
        (["--only", "deltanet"], "times need a GPU"),
    ],
)
def test_what_cannot_be_run_is_said(interpreter, arguments: list[str], said: str) -> None:
    assert said in interpreter(refusal, arguments)


def test_words_choose_by_name(interpreter) -> None:
    interpreter(check_words)


def check_small(name: str) -> None:
    """A check at sizes that an interpreter can do; a GPU's are the defaults."""
    from benchmarks.gpu.checks import (
        check_attention,
        check_deltanet,
        check_head,
        check_linear,
        check_long_attention,
        passed,
    )
    from benchmarks.gpu.weights import TINY

    from stoker.backends.gpu.packed import Kind

    jobs = {
        "linear": lambda: check_linear(Kind.INT4, 48, 256, most=3),
        "head": lambda: check_head(Kind.INT8, 256, 128),
        "deltanet": lambda: check_deltanet(TINY, tokens=4),
        "attention": lambda: check_attention(TINY, True, tokens=3),
        "long attention": lambda: check_long_attention(TINY, False, context=300),
    }
    # short runs, so that several are joined
    with patch.multiple("stoker.backends.gpu.kernels.attention", RUN=1, JOINED_AT_ONCE=0):
        found = jobs[name]()
    if name == "head":  # products of tiles of 8 and of 16 rows are numpy's here, and differ in bits
        del found["row_counts_equal"]
    if name == "deltanet":  # bf16 is rounded towards zero here: up to 0.02; 0.1 and more where beta is left out
        found["limit"] = 0.03
    assert passed(found), found


def check_experts() -> None:
    import torch
    from benchmarks.gpu.checks import MoeCase
    from benchmarks.gpu.timing import relative_error
    from benchmarks.gpu.weights import TINY

    case, x = MoeCase(TINY, "hybrid"), torch.randn(2, TINY.hidden_size).bfloat16()
    y, routing = case.run(x)
    added = case.expected(x, routing)
    assert relative_error(y, x.float() + added) < 0.02
    assert relative_error(y, x) > 0.2


def check_wrong() -> None:
    """A product that depends on how many rows there are, and one that is off by a hundredth."""
    from benchmarks.gpu import checks as gpu_checks
    from stoker.backends.gpu.packed import Kind

    usual = gpu_checks.product
    with patch.object(gpu_checks, "product", lambda x, *rest: usual(x, *rest) * (1 + 1e-6 * x.shape[0])):
        found = gpu_checks.check_linear(Kind.BF16, 32, 128, most=3)
    assert not found["row_counts_equal"]
    assert not gpu_checks.passed(found)
    with patch.object(gpu_checks, "product", lambda *given: usual(*given) * 1.01):
        found = gpu_checks.check_linear(Kind.BF16, 32, 128, most=3)
    assert found["row_counts_equal"]
    assert not gpu_checks.passed(found)


def check_command(path: Path) -> None:
    from benchmarks.gpu import kernels as gpu_kernels

    def fails() -> None:
        raise ValueError("y must be contiguous")

    good = {"relative_error": 1e-6, "rows_alone_equal": True}
    jobs = {"head BF16": lambda: good, "deltanet": fails, "attention FP8": lambda: good}
    arguments = ["--shape", "tiny", "--no-times", "--only", "DeltaNet,attention", "--json", str(path)]
    with patch.object(gpu_kernels, "checks", lambda _: jobs), pytest.raises(SystemExit, match="failed: tiny deltanet;"):
        gpu_kernels.main(arguments)
    result = json.loads(path.read_text())
    assert result.keys() >= {"command", "device", "versions", "weights", "bandwidth", "checks", "rows"}
    assert result["checks"] == {
        "tiny deltanet": {"failed": "ValueError: y must be contiguous"},
        "tiny attention FP8": good,
    }


def check_words() -> None:
    from benchmarks.gpu.checks import checks
    from benchmarks.gpu.kernels import chosen, times
    from benchmarks.gpu.weights import QWEN_122B

    checked, timed = checks(QWEN_122B), times(QWEN_122B)
    assert chosen(checked, "") == list(checked)
    assert chosen(checked, "deltanet, attention fp8,") == ["deltanet", "attention FP8", "long attention FP8"]
    assert chosen(timed, "deltanet, attention fp8") == ["deltanet", "attention FP8"]
    assert chosen(timed, "int4 in") == chosen(checked, "int4 in") == ["linear INT4 in"]


def refusal(arguments: list[str]) -> str:
    from contextlib import redirect_stderr
    from io import StringIO

    from benchmarks.gpu.kernels import main

    with redirect_stderr(StringIO()) as said, pytest.raises(SystemExit):
        main(arguments)
    return said.getvalue()
