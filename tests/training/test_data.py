"""Training data is the same every time, its splits do not touch, and what it asks for can be answered."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from training.batches import PROMPT_WEIGHT, WEIGHTS, Marks, Mixture, emphasis, loss_weights
from training.chat import render
from training.config import TINY
from training.data import arithmetic, calls, coined_calls, invoices, records
from training.data.build import GENERATORS, TOKENIZER_SOURCES, build, generated, tokenizer_texts
from training.data.corpora import COLLECTORS
from training.data.invoice_parts import HELD_KEYS, HELD_LABELS, HELD_LINES, HELD_ROWS, KEYS, LABELS, LINES, ROWS, layout
from training.data.sample import Chat, Split
from training.data.tools import catalogue
from training.data.unpack import html_text

from tests.training.conftest import SCALE


def test_building_twice_gives_the_same_bytes(data: Path, tmp_path: Path) -> None:
    again = build(tmp_path, TINY.trunk["vocab_size"], SCALE, corpora=False)
    assert json.loads((data / "manifest.json").read_text()) == again


def test_adding_missing_shards_ends_where_a_whole_build_does(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    shutil.copytree(data, out)
    whole = json.loads((data / "manifest.json").read_text())
    missing = [name for name in whole["shards"] if name.endswith(("coined_notes", "calls_confusable"))]
    before = {**whole, "shards": {name: entry for name, entry in whole["shards"].items() if name not in missing}}
    (out / "manifest.json").write_text(json.dumps(before))
    for name in missing:
        (out / "shards" / f"{name}.xz").unlink()
    kept = out / "shards" / "train" / "stories.xz"
    kept.write_bytes(b"as it was")
    made = build(out, TINY.trunk["vocab_size"], SCALE, corpora=False, only_missing=True)
    assert len(missing) == 6
    assert kept.read_bytes() == b"as it was"
    assert (out / "manifest.json").read_text() == (data / "manifest.json").read_text()
    assert made == whole
    for name in missing:
        assert (out / "shards" / f"{name}.xz").read_bytes() == (data / "shards" / f"{name}.xz").read_bytes()


def test_nothing_is_added_to_shards_of_another_tokenizer(data: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing to add to"):
        build(tmp_path, TINY.trunk["vocab_size"], SCALE, corpora=False, only_missing=True)
    shutil.copytree(data / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "manifest.json").write_text(json.dumps({"tokenizer_sha256": "another", "shards": {}}))
    with pytest.raises(SystemExit, match="is not the tokenizer"):
        build(tmp_path, TINY.trunk["vocab_size"], SCALE, corpora=False, only_missing=True)


def test_a_generator_gives_the_bytes_that_were_recorded() -> None:
    """A change here changes the data: rebuild it and record the manifest anew."""
    import hashlib

    def first(sources: Iterable[str]) -> str:
        text = "\0".join(t for source in sources for t in generated(source, "train", 20))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    assert first(TOKENIZER_SOURCES) == "b6f10f70477dd4c6"  # these also make the tokenizer, which trained weights need
    assert first(GENERATORS) == "0ec9a22b74a6733c"


def test_the_tokenizer_learns_from_its_own_sources_only() -> None:
    later = [source for source in GENERATORS if source not in TOKENIZER_SOURCES]
    assert not set(tokenizer_texts(SCALE, corpora=False)) & {t for s in later for t in generated(s, "train", 40)}


@pytest.mark.parametrize("source", [name for name in GENERATORS if name != "questions"])  # a small table of facts
def test_no_held_out_document_is_in_training(source: str) -> None:
    train = set(generated(source, "train", 400))
    for split in ("known", "unseen"):
        assert not train & set(generated(source, split, 100))


def test_unseen_layouts_labels_and_keys_are_new() -> None:
    for language, fields in HELD_LABELS.items():
        for field, labels in fields.items():
            assert not set(labels) & set(LABELS[language][field])
    assert not {k for keys in HELD_KEYS.values() for k in keys} & {k for keys in KEYS.values() for k in keys}
    assert not set(HELD_LINES) & set(LINES)
    assert not set(HELD_ROWS) & set(ROWS)
    assert not set(invoices.UNSEEN_LAYOUTS) & set(invoices.TRAIN_LAYOUTS)
    known = {(label, value) for name in invoices.TRAIN_LAYOUTS for label, value in layout(name, False).labels.items()}
    held = {(label, value) for name in invoices.UNSEEN_LAYOUTS for label, value in layout(name, True).labels.items()}
    assert not known & held


def test_unseen_tools_share_no_name_with_training_ones() -> None:
    known, held = catalogue("known"), catalogue("unseen")
    assert not {t.name for t in known} & {t.name for t in held}
    assert not {t.thing for t in known} & {t.thing for t in held}
    assert not {t.verb for t in known} & {t.verb for t in held}
    assert not {name for t in known for name in t.kinds} & {name for t in held for name in t.kinds}
    assert not set(records.KEYS) & set(records.HELD_KEYS)


def test_held_out_sums_are_not_practised() -> None:
    for index in range(300):
        chat = arithmetic.make("known", index)
        assert chat.messages[1]["content"].isdigit()


@pytest.mark.parametrize("split", ["train", "known", "unseen"])
def test_every_invoice_answer_is_json_with_the_keys_asked_for(split: Split) -> None:
    for index in range(100):
        question, answer = (message["content"] for message in invoices.make(split, index).messages)
        for key, value in json.loads(answer).items():
            assert key in question
            if isinstance(value, str) and key not in {*KEYS["currency"], *HELD_KEYS["currency"]}:
                assert value in question


CONVERSATIONS = [
    calls.make,
    calls.single_turn,
    calls.three_turns,
    calls.confusable,
    calls.confusable_three_turns,
    coined_calls.make,
    coined_calls.single_turn,
]


@pytest.mark.parametrize("make", CONVERSATIONS)
@pytest.mark.parametrize("split", ["train", "unseen"])
def test_every_call_fits_the_schema_of_a_tool_on_offer(make: Callable[[Split, int], Chat], split: Split) -> None:
    types: dict[str, type | tuple[type, ...]] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
    }
    for index in range(60):
        chat = make(split, index)
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat.tools}
        for message in chat.messages:
            for call in message.get("tool_calls", []):
                schema = offered[call["function"]["name"]]
                arguments = call["function"]["arguments"]
                assert set(schema["required"]) <= set(arguments)
                for name, value in arguments.items():
                    assert isinstance(value, types[schema["properties"][name]["type"]])


def test_three_turns_are_three_turns_with_calls() -> None:
    chat = calls.three_turns("known", 3)
    assert sum(message["role"] == "user" for message in chat.messages) == 3
    assert sum("tool_calls" in message for message in chat.messages) == 3


def test_only_what_the_assistant_writes_counts_in_full(tokenizer: Tokenizer) -> None:
    chat = calls.single_turn("train", 0)
    text = render(chat.messages, chat.tools)
    ids = tokenizer.encode(text + "<|endoftext|>plain text", add_special_tokens=False).ids
    weights = loss_weights(np.array([ids]), Marks.of(tokenizer))[0]
    full = tokenizer.decode([i for i, w in zip(ids, weights, strict=True) if w == 1.0], skip_special_tokens=False)
    turn = text[text.index("assistant\n<think>") :]
    assert full == turn + "<|endoftext|>plain text"
    assert set(weights) == {np.float32(PROMPT_WEIGHT), np.float32(1.0)}


def test_batches_depend_on_seed_and_step_alone(data: Path, tokenizer: Tokenizer) -> None:
    one, other = (Mixture(data / "shards", tokenizer) for _ in range(2))
    other.batch(1, 3, 4, 64)
    tokens, weights = one.batch(1, 7, 4, 64)
    again, _ = other.batch(1, 7, 4, 64)
    assert np.array_equal(tokens, again)
    assert not np.array_equal(tokens, one.batch(1, 8, 4, 64)[0])
    assert tokens.shape == (4, 65)
    assert weights.shape == (4, 64)


def test_every_source_has_a_weight() -> None:
    assert set(WEIGHTS) == {*GENERATORS, *COLLECTORS}
    assert all(weight > 0 for weight in WEIGHTS.values())


def test_an_emphasised_source_is_taken_so_many_times_as_often(data: Path, tokenizer: Tokenizer) -> None:
    chosen = ("stories", "questions", "arithmetic")
    plain = Mixture(data / "shards", tokenizer, only=chosen)
    factors = emphasis("stories=3,questions=0")
    shifted = Mixture(data / "shards", tokenizer, only=chosen, factors=factors)
    before, after = (dict(zip(m.names, m.shares, strict=True)) for m in (plain, shifted))
    assert after["questions"] == 0
    assert after["stories"] / after["arithmetic"] == pytest.approx(3 * before["stories"] / before["arithmetic"])
    assert sum(after.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("prose=2", "no source 'prose'"), ("code", "SOURCE=FACTOR"), ("code=-1", "0 or more"), ("code=nan", "0 or more")],
)
def test_an_emphasis_that_makes_no_sense_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        emphasis(text)


def test_no_rows_can_be_drawn_when_every_source_is_left_out(data: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="leave one of them in"):
        Mixture(data / "shards", tokenizer, only=("stories",), factors={"stories": 0})


def test_missing_shards_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(FileNotFoundError, match=r"training\.data\.build"):
        Mixture(tmp_path, tokenizer)


def test_pages_become_sentences_without_their_menus() -> None:
    page = "<head><title>x</title></head><ul><li>Home<li>About</ul><p>A sentence that is long enough to be kept here."
    assert html_text(page) == "A sentence that is long enough to be kept here."
