"""Log-probabilities of two devices beside fp32: here the CPU twice, and a second one that is off."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from benchmarks.gpu import agreement as gpu_agreement


def test_the_same_device_agrees_with_itself() -> None:
    found = gpu_agreement.main(["--prompts", "2", "--tokens", "8", "--device", "cpu"])
    assert found["prompts_identical"] == 2
    assert found["tokens_agreed"] == 16
    assert found["distance_from_fp32"] == found["distance_of_the_cpu"] > 0


def test_more_than_the_error_of_bf16_is_an_error() -> None:
    answers, asked = gpu_agreement.answers, []

    def strays(model, *arguments):
        found = answers(model, *arguments)
        asked.append(model)
        if len(asked) == 1:
            return found
        return [[replace(each, top=tuple((token, value - 0.2) for token, value in each.top)) for each in answer]
                for answer in found]  # fmt: skip

    with patch.object(gpu_agreement, "answers", strays), pytest.raises(SystemExit, match="further from fp32"):
        gpu_agreement.main(["--prompts", "1", "--tokens", "4", "--device", "cpu"])
