"""Text of two devices beside each other: here the CPU twice, and a second one that strays."""

from unittest.mock import patch

import pytest
from benchmarks.lossless import Model

from benchmarks import gpu_agreement


def test_the_same_device_agrees_with_itself() -> None:
    found = gpu_agreement.main(["--prompts", "2", "--tokens", "8", "--device", "cpu"])
    assert found["prompts_identical"] == 2
    assert found["tokens_agreed"] == 16
    assert found["largest_margin_where_they_part"] == 0.0


def test_a_token_that_is_clearly_less_likely_is_an_error() -> None:
    alone, devices = Model.alone, []

    def strays(model, *arguments):
        answers = alone(model, *arguments)
        devices.append(model)
        return (
            answers if len(devices) == 1 else [[answer[0], (answer[1] + 1) % 4000, *answer[2:]] for answer in answers]
        )

    with patch.object(Model, "alone", strays), pytest.raises(SystemExit, match="clearly less likely"):
        gpu_agreement.main(["--prompts", "2", "--tokens", "8", "--device", "cpu"])
