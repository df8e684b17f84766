"""A table of phrases says what was entered, in few bytes, and refuses files that are not what they should be."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from benchmarks.lossless import Answers, Configuration, Model, compare
from safetensors.numpy import load_file, save_file

from stoker.checkpoint.build.extras import sort_files
from stoker.demo import EMBEDDED
from stoker.errors import CheckpointError
from stoker.sampling.settings import Sampling
from stoker.speculate.draft import Draft
from stoker.speculate.drafter import DraftRequest
from stoker.speculate.lookup import LookupDrafter
from stoker.speculate.phrases import FACTOR, HASH_BITS, MASK, SHIFT, Phrases, hashes_of, save
from stoker.weights.checkpoint import PHRASES, Checkpoint
from stoker.weights.files import scan
from stoker.weights.headers import Reads

VOCABULARY = 600
CHANCES = (0.25, 0.5, 0.75)


def write(directory: Path, entries: dict[tuple[int, ...], tuple[int, int]], vocabulary: int = VOCABULARY) -> Path:
    """Entries: context -> next token and class of its chance."""
    hashes = np.array([hashes_of(np.array([context]))[0] for context in entries])
    tokens, classes = np.array(list(entries.values())).T
    path = directory / PHRASES
    save(path, hashes, tokens, classes, CHANCES, vocabulary, max(map(len, entries)))
    return path


def table(directory: Path, entries: dict[tuple[int, ...], tuple[int, int]]) -> Phrases:
    return Phrases.load(write(directory, entries), VOCABULARY)


def draft(drafter: LookupDrafter, text: Sequence[int], prompt: int = 2, depth: int = 4) -> Draft:
    return drafter.propose([DraftRequest(0, [], text[:prompt], text[prompt:], Sampling(), depth)])[0]


def test_the_longest_context_answers(tmp_path: Path) -> None:
    phrases = table(tmp_path, {(5,): (10, 0), (4, 5): (11, 2), (3, 4, 5): (12, 1), (0, 0): (13, 0), (0,): (0, 0)})
    assert len(phrases) == 5
    assert phrases.next([1, 2, 3, 4, 5]) == (12, 0.5)
    assert phrases.next([9, 4, 5]) == (11, 0.75)
    assert phrases.next([4, 9, 5]) == (10, 0.25)
    assert phrases.next([5]) == (10, 0.25)
    assert phrases.next([1, 0, 0]) == (13, 0.25)  # a context of zeros is not a shorter one
    assert phrases.next([5, 4]) is None
    assert phrases.next([]) is None


def test_a_file_gives_back_every_entry_and_is_small(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    contexts = np.unique(random.integers(0, 4608, (40_000, 3)), axis=0)
    hashes, first = np.unique(hashes_of(contexts), return_index=True)
    tokens = (random.pareto(0.6, len(hashes)) % 4608).astype(np.int64)
    classes = random.integers(0, 8, len(hashes))
    chances = [place / 8 for place in range(8)]
    path = tmp_path / PHRASES
    size = save(path, hashes, tokens, classes, chances, 4608, 3)
    assert size == path.stat().st_size < 4 * len(hashes)
    phrases = Phrases.load(path, 4608)
    assert len(phrases) == len(hashes)
    found = [phrases.next(context) for context in contexts[first].tolist()]
    assert found == [(token, chances[kind]) for token, kind in zip(tokens.tolist(), classes.tolist(), strict=True)]
    unknown = random.integers(0, 4608, (20_000, 3)).tolist()
    assert sum(phrases.next(context) is not None for context in unknown) < 100  # hashes are taken for another's


def test_a_checkpoint_without_the_file_has_no_table(tmp_path: Path) -> None:
    assert Phrases.beside(tmp_path, VOCABULARY) is None
    write(tmp_path, {(5,): (10, 0)})
    assert Phrases.beside(tmp_path, VOCABULARY) is not None


def test_a_checkpoint_with_a_table_is_whole_and_a_build_takes_it_along(tmp_path: Path) -> None:
    for path in EMBEDDED.iterdir():
        if path.name != PHRASES:
            (tmp_path / path.name).symlink_to(path)
    before = scan(tmp_path, Reads())
    path = write(tmp_path, {(5,): (10, 0)})
    assert scan(tmp_path, Reads()) == before
    assert Checkpoint.open(tmp_path).notes == []
    taken, left = sort_files(tmp_path)
    assert path in taken
    assert not any(PHRASES in line for line in left)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"about": [1, 601, 2, 2]}, "a vocabulary of 601 tokens and the model has 600"),
        ({"about": [1, 600, 9, 2]}, "contexts of up to 9 tokens, expected 1 to 8"),
        ({"about": [2, 600, 2, 2]}, "version 2, expected 1"),
        ({"about": [1, 600, 2, 3]}, "hashes unpacks to 8 bytes, expected 12"),
        ({"chances": [0.5, 0.5, 1.5]}, "counts or chances make no sense"),
        ({"chances": [0.5, 0.5, float("nan")]}, "counts or chances make no sense"),
        ({"chances": [0.5, 0.5]}, "counts unpacks to"),
        ({"about": [1, 600, 2]}, "is no table of phrases"),
        ({"more": [1]}, "is no table of phrases"),
    ],
)
def test_a_file_that_is_not_the_models_is_refused(tmp_path: Path, change: dict[str, list[float]], said: str) -> None:
    path = write(tmp_path, {(5,): (10, 0), (4, 5): (11, 2)})
    stored = load_file(path)
    for name, values in change.items():
        stored[name] = np.array(values, stored[name].dtype if name in stored else np.uint8)
    save_file(stored, path)
    with pytest.raises(CheckpointError, match=said) as refused:
        Phrases.load(path, VOCABULARY)
    assert str(path) in str(refused.value)


def test_hashes_that_name_the_same_place_lie_behind_each_other() -> None:
    """Also behind the last place, where half of these want to be."""
    hashes = np.concatenate([np.arange(40), (1 << HASH_BITS) - 1 - np.arange(40)])
    phrases = Phrases(hashes, VOCABULARY + np.arange(80), CHANCES, VOCABULARY, longest=1)
    back = pow(FACTOR, -1, 1 << 64)

    def asked(hashed: int) -> tuple[int, float] | None:
        """For a context of one token, if that is a large one, that has this hash."""
        return phrases.next([((hashed << SHIFT) * back & MASK) - 1])

    assert len(phrases) == 80
    assert [asked(hashed) for hashed in hashes.tolist()] == [(token, CHANCES[1]) for token in range(80)]
    assert [asked(hashed) for hashed in (40, 41, 1 << 20, (1 << HASH_BITS) - 41)] == [None] * 4


def test_a_hash_of_too_many_bits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / PHRASES
    save(path, np.array([1, 1 << HASH_BITS]), np.array([10, 10]), np.array([0, 0]), CHANCES, VOCABULARY, 2)
    with pytest.raises(CheckpointError, match="a hash has more than 27 bits"):
        Phrases.load(path, VOCABULARY)


def test_every_flipped_byte_of_the_columns_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, {(5,): (10, 0), (4, 5): (11, 2), (7, 8): (12, 1)})
    stored = load_file(path)
    for name in ("counts", "hashes"):
        for place in range(len(stored[name])):
            bad = {key: value.copy() for key, value in stored.items()}
            bad[name][place] ^= 0x10
            save_file(bad, path)
            with pytest.raises(CheckpointError, match="is damaged"):
                Phrases.load(path, VOCABULARY)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="cut short"):
        Phrases.load(path, VOCABULARY)


# -- drafting


def test_phrases_are_followed_while_they_are_likely(tmp_path: Path) -> None:
    phrases = table(tmp_path, {(5,): (6, 2), (5, 6): (7, 1), (6, 7): (8, 2), (7, 8): (9, 0), (9,): (1, 2)})
    found = draft(LookupDrafter(16, phrases), [1, 2, 5])
    assert (list(found), list(found.confidence)) == ([6, 7, 8], [0.75, 0.5, 0.75])  # a fourth: 0.07 for all of it
    assert found.source == "phrases"
    assert list(draft(LookupDrafter(2, phrases), [1, 2, 5])) == [6, 7]
    assert list(draft(LookupDrafter(16, phrases), [1, 2, 5], depth=1)) == [6]
    assert draft(LookupDrafter(16, phrases), [1, 2, 5], depth=0) == Draft()
    assert draft(LookupDrafter(16, phrases), [1, 2, 3]) == Draft()


def test_the_likelier_of_text_and_phrases_drafts(tmp_path: Path) -> None:
    phrases = table(tmp_path, {(1, 2): (50, 1)})
    text = [1, 2, 3, 4, 1, 2]
    drafter = LookupDrafter(4, phrases)
    drafter._went_on = [0.9 * seen for seen in drafter._seen]
    found = draft(drafter, text)
    assert (list(found), found.source) == ([3, 4, 1, 2], "lookup")
    drafter = LookupDrafter(4, phrases)
    drafter._went_on = [0.4 * seen for seen in drafter._seen]
    found = draft(drafter, text)
    assert (list(found), found.source) == ([50], "phrases")


def test_looking_back_learns_from_its_guess_where_phrases_were_drafted(tmp_path: Path) -> None:
    """The guess that was not drafted is compared with the text all the same."""
    alone, beside = LookupDrafter(4), LookupDrafter(4, table(tmp_path, {(1, 2): (50, 2), (9,): (9, 2)}))
    text = [1, 2, 3]
    for i in range(40):
        for token in (1, 2, 20 + i):
            text.append(token)
            draft(alone, text)
            draft(beside, text)
    assert (alone._went_on, alone._seen) == (beside._went_on, beside._seen)
    assert draft(beside, [*text, 1, 2]).source == "phrases"


# -- with the embedded model

TOKENS = 24


@pytest.fixture(scope="module")
def bare() -> Model:
    return Model()


@pytest.fixture(scope="module")
def model(bare: Model, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """With a table of what it answers to its first prompts, every third entry wrong."""
    entries: dict[tuple[int, ...], tuple[int, int]] = {}
    for answer in bare.alone("bf16", "greedy", 0, 4, TOKENS):
        for place in range(2, len(answer)):
            token = answer[place] if place % 3 else (answer[place] + 1) % 4608
            entries[answer[place - 2], answer[place - 1]] = token, 1 + place % 2
    directory = tmp_path_factory.mktemp("model")
    for path in EMBEDDED.iterdir():
        if path.name != PHRASES:
            (directory / path.name).symlink_to(path)
    write(directory, entries, 4608)
    return Model(directory)


@pytest.fixture(scope="module")
def plain(model: Model) -> dict[str, Answers]:
    return {sampling: model.alone("bf16", sampling, 0, 4, TOKENS) for sampling in ("greedy", "sampled")}


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize(
    ("drafter", "adaptive", "batch"),
    [("lookup", False, 1), ("lookup", True, 4), ("lookup+mtp", True, 4), ("lookup+dflash", False, 4)],
)
def test_every_token_is_that_of_plain_decoding(
    model: Model, plain: dict[str, Answers], drafter: str, adaptive: bool, batch: int, sampling: str
) -> None:
    configuration = Configuration(drafter, adaptive, batch, False, False, "bf16", False)
    found = compare(model, configuration, sampling, 0, TOKENS, plain[sampling])
    assert found["identical"] == found["tokens"] == 4 * TOKENS
    assert found["drafted"] > 0


def test_phrases_save_steps(bare: Model, model: Model, plain: dict[str, Answers]) -> None:
    alone = Configuration("lookup", False, 1, False, False, "bf16", False)
    steps = [compare(each, alone, "greedy", 0, TOKENS, plain["greedy"])["steps"] for each in (model, bare)]
    assert steps[0] < 0.8 * steps[1]
