"""Scores mean what they say, and a whole evaluation runs on an exported checkpoint."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from training.chat import render
from training.config import TINY
from training.data import calls, invoices
from training.dflash import Drafter
from training.evaluate import evaluate
from training.export import export_drafter, export_model
from training.model import Model
from training.scoring import calls_in, compressed_bits_per_byte, expected_calls, same_calls, same_json
from training.served import Acceptance, Served


@pytest.fixture(scope="module")
def model() -> Model:
    """Near-uniform weights would draft the same token forever; these do not."""
    torch.manual_seed(5)
    model = Model(TINY.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv1d" not in name:
                parameter.normal_(std=1.0 if "embed" in name else 1 / math.sqrt(parameter.shape[-1]))
    return model


@pytest.fixture(scope="module")
def checkpoint(model: Model, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    export_model(model, TINY, directory, data / "tokenizer", dtype=torch.float32)
    export_drafter(Drafter(TINY.dflash), TINY, directory / "dflash", dtype=torch.float32)
    return directory


def test_calls_are_read_back_as_they_were_rendered() -> None:
    for index in range(80):
        chat = calls.make("train", index)
        for at, message in enumerate(chat.messages):
            if message.get("tool_calls"):
                text = render(chat.messages[: at + 1], chat.tools).rpartition("<|im_start|>assistant\n")[2]
                assert same_calls(calls_in(text, chat.tools), expected_calls(message))


@pytest.mark.parametrize(
    ("found", "right"),
    [
        ([("f", {"a": 3.0, "b": "x"})], True),
        ([("f", {"b": "x", "a": 3})], True),
        ([("f", {"a": "3", "b": "x"})], False),
        ([("f", {"a": True, "b": "x"})], False),
        ([("f", {"a": 3})], False),
        ([("g", {"a": 3, "b": "x"})], False),
        ([], False),
    ],
)
def test_a_call_is_right_when_tool_and_every_argument_are(found: list, right: bool) -> None:
    assert same_calls(found, [("f", {"a": 3, "b": "x"})]) == right


def test_json_is_compared_by_value() -> None:
    expected = invoices.make("known", 0).messages[1]["content"]
    assert same_json(json.dumps(json.loads(expected), indent=4), expected) == (True, True)
    assert same_json("{}", expected) == (True, False)
    assert same_json(expected[:-1], expected) == (False, False)


def test_repetition_compresses_and_noise_does_not() -> None:
    assert compressed_bits_per_byte("ab" * 5000)["gzip -9"] < 0.2
    rng = random.Random(0)
    noise = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz012345") for _ in range(5000))
    assert compressed_bits_per_byte(noise)["xz -9e"] > 4


def test_bits_are_those_of_the_training_forward(model: Model, checkpoint: Path) -> None:
    tokens = torch.randint(0, 496, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        logits = model.lm_head(model(torch.tensor([[496, *tokens[:-1]]])).hidden)[0]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens), reduction="sum") / math.log(2)
    assert Served(checkpoint).bits(tokens, start=496) == pytest.approx(float(expected), rel=1e-4)


def test_mtp_acceptance_is_that_of_drafting_by_the_training_forward(model: Model, checkpoint: Path) -> None:
    """The judge is a text the head drafts well: its own guesses, with some spoilt."""
    served = Served(checkpoint)
    tokens = torch.randint(0, 496, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    for place in range(20, 70):
        if place % 5:
            tokens[place] = _drafts(model, tokens[:place], 1)[0]
    expected, last = Acceptance(), 20
    while last + 3 < len(tokens):  # as long as a wholly accepted block leaves a token to go on from
        drafts = _drafts(model, tokens[: last + 1], 2)
        right = next((i for i in range(2) if drafts[i] != tokens[last + 1 + i]), 2)
        expected += Acceptance(1, right, 2)
        last += right + 1
    assert served.mtp_acceptance(tokens[:20], tokens[20:], 2) == expected
    assert 0 < expected.rate < 1


@torch.no_grad()
def _drafts(model: Model, tokens: list[int], depth: int) -> list[int]:
    """Greedy drafts after `tokens`, the last of which the trunk has not read yet."""
    hidden = model(torch.tensor([tokens[:-1]])).hidden
    drafted: list[int] = []
    for _ in range(depth):
        ids = torch.tensor([[*tokens, *drafted]])
        rows = len(tokens) - 1
        embeddings = [model.embed_tokens(ids[:, 1 + a : 1 + a + rows]) for a in range(len(drafted) + 1)]
        outputs, _ = model.mtp(embeddings, hidden)
        drafted.append(int(model.lm_head(outputs[-1][0, -1]).argmax()))
    return drafted


def test_a_perfect_drafter_would_emit_whole_blocks() -> None:
    assert Acceptance(10, 70, 70).emitted_per_step == 8
    assert (Acceptance(1, 1, 2) + Acceptance(1, 0, 2)).rate == 0.25


def test_a_whole_evaluation_reports_every_score(
    checkpoint: Path, data: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.evaluate.MAX_TOKENS", 24)
    report = evaluate(checkpoint, checkpoint / "dflash", data, jobs=1, device="cpu", limit=0.01)
    for split in ("known", "unseen"):
        assert 0 <= report[f"invoices, {split}"]["exact"] <= report[f"invoices, {split}"]["valid_json"] <= 1
        for score in ("three-turn calls", "coined calls", "confusable three-turn calls"):
            assert 0 <= report[f"{score}, {split}"]["right"] <= report[f"{score}, {split}"]["right_tool_per_turn"] <= 1
        for score in ("records", "coined notes", "coined invoices"):
            assert 0 <= report[f"{score}, {split}"]["exact"] <= 1
    assert set(report["acceptance"]) == {"json", "json, unseen", "agent"}  # no corpora in the miniature
    assert report["acceptance"]["agent"]["dflash emitted per step"] >= 1


def test_scores_are_kept_one_by_one_and_taken_once(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("training.evaluate.MAX_TOKENS", 8)
    kept = tmp_path / "scores.json"

    def some(only: str, limit: float = 0.01) -> list[str]:
        evaluate(checkpoint, None, data, jobs=1, device="cpu", limit=limit, only=only, kept=kept)
        return [line.split(" {")[0] for line in capsys.readouterr().out.splitlines()]

    assert some("records") == ["records, known", "records, unseen"]
    assert some("records,single-turn") == ["single-turn calls, known", "single-turn calls, unseen"]
    assert {"records, known", "records, unseen"} <= set(json.loads(kept.read_text()))
    with pytest.raises(SystemExit, match="another limit; give another file"):
        some("records", limit=0.02)
    kept.write_text(kept.read_text().replace('"weights_sha256": "', '"weights_sha256": "0'))
    with pytest.raises(SystemExit, match="another weights_sha256"):
        some("records")
