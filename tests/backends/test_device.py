"""`--device`: a GPU if one can be used, else the CPU, and a sentence for every reason why not."""

import pytest
import torch

from stoker.backends import device
from stoker.backends.device import Accelerator, choose_device, look_at
from stoker.errors import RequestError

GIB = 1 << 30
H200 = Accelerator("2.11.0+cu130", "", "NVIDIA H200", (9, 0), 140 * GIB)
SPARK = Accelerator("2.11.0+cu130", "", "NVIDIA GB10", (12, 1), 120 * GIB, unified=True)
STRIX = Accelerator("2.11.0+rocm7", "", "Radeon 8060S", None, 96 * GIB, unified=True)
OLD = Accelerator("2.11.0+cu130", "", "Tesla V100", (7, 0), 32 * GIB)
WITHOUT = Accelerator("2.13.0+cpu", "the torch that is installed (2.13.0+cpu) was built without CUDA")
NO_DRIVER = Accelerator("2.11.0+cu130", "CUDA says: Found no NVIDIA driver on your system (`nvidia-smi` shows ...)")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (H200, "Running on cuda: NVIDIA H200, 140.0 GiB."),
        (SPARK, "Running on cuda: NVIDIA GB10, 120.0 GiB, shared with the host."),
        (STRIX, "Running on cuda: Radeon 8060S, 96.0 GiB, shared with the host."),
    ],
)
def test_auto_takes_a_gpu_that_can_be_used(found: Accelerator, said: str) -> None:
    chosen = choose_device("auto", lambda device: found)
    assert (chosen.device, chosen.said) == ("cuda", said)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (WITHOUT, "(2.13.0+cpu) was built without CUDA"),
        (NO_DRIVER, "Found no NVIDIA driver"),
        (OLD, "Tesla V100 has compute capability 7.0, and the kernels need 8.0 or later"),
    ],
)
def test_auto_says_why_it_is_the_cpu_and_who_asks_for_cuda_is_refused_with_it(found: Accelerator, words: str) -> None:
    chosen = choose_device("auto", lambda device: found)
    assert chosen.device == "cpu"
    assert chosen.said.startswith("Running on the CPU: ")
    assert words in chosen.said
    with pytest.raises(RequestError) as refused:
        choose_device("cuda:1", lambda device: found)
    assert str(refused.value).startswith("--device cuda:1 cannot be used: ")
    assert words in str(refused.value)


def test_the_cpu_is_not_asked_about_cards() -> None:
    def look(device: str) -> Accelerator:
        raise AssertionError("nobody asked for a card")

    assert choose_device("cpu", look).device == "cpu"
    for unknown in ("tpu9", "meta", "cuda:", "cuda:x"):
        with pytest.raises(RequestError, match="write auto, cpu, cuda or cuda:0"):
            choose_device(unknown, look)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_what_torch_says_of_this_machine_is_a_reason() -> None:
    found = look_at("cuda")
    assert found.reason
    assert "\n" not in found.reason
    assert choose_device("auto").device == "cpu"


def test_a_card_that_is_not_there_is_refused() -> None:
    with pytest.raises(RequestError, match="cuda:99 cannot be used"):
        choose_device("cuda:99")


@pytest.mark.parametrize(
    "message",
    ["Found no NVIDIA driver on your system. Please check", "The NVIDIA driver on your system is too old\n(found 1)"],
)
def test_an_error_of_cuda_becomes_a_clause(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    def fail() -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(device, "_torch_version", lambda: {"__version__": "2.13.0+cu130", "cuda": "13.0"})
    monkeypatch.setattr(device, "_has_nvidia_driver", lambda: True)
    monkeypatch.setattr("torch.cuda.init", fail)
    chosen = choose_device("auto")
    assert chosen.device == "cpu"
    assert message.split("\n")[0].rstrip(".") in chosen.said


def test_a_torch_with_cuda_is_not_asked_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_torch_version", lambda: {"__version__": "2.13.0+cu130", "cuda": "13.0"})
    monkeypatch.setattr(device, "_has_nvidia_driver", lambda: False)
    monkeypatch.setattr("torch.cuda.init", lambda: pytest.fail("there is nothing to find"))
    assert choose_device("auto").said == (
        "Running on the CPU: no NVIDIA driver was found (`nvidia-smi` shows what there is)."
    )


def test_what_torch_was_built_for_is_known_without_importing_it() -> None:
    made = device._torch_version()
    assert made["__version__"] == torch.__version__
    assert made["cuda"] == torch.version.cuda
    assert made["hip"] == torch.version.hip
