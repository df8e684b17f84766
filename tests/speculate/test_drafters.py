"""Drafters say how sure they are, stop when told to, may be made cheaper, and never change what comes out."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from stoker.backends.cpu.draft_head import DraftHead, HeadChoice
from stoker.backends.cpu.drafting import CpuDFlash, CpuMtp, Waiting
from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.experts import SparseMlp
from stoker.backends.network.load import load_drafter, load_model
from stoker.backends.network.low_bits import lower_all
from stoker.sampling.settings import Sampling
from stoker.speculate.choice import DRAFTER_FOLDER
from stoker.speculate.dflash import DFlashDrafter
from stoker.speculate.drafter import Draft, Drafter, DraftRequest, FirstOf, trusted
from stoker.speculate.lookup import LookupDrafter
from stoker.speculate.mtp import MtpDrafter
from tests.engine.drive import generate
from tests.support.random_checkpoint import small_config, small_drafter_config, write_random_drafter

PROMPT = [(7 * i * i + 3 * i) % 512 for i in range(70)]
PAGES = 4


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> Decoder:
    return load_model(checkpoints["qwen3_5_moe_text"]).model


@pytest.fixture(scope="module")
def directory(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a DFlash network where `stoker build` would put it."""
    folder = tmp_path_factory.mktemp("with-drafter")
    for path in checkpoints["qwen3_5_moe_text"].iterdir():
        (folder / path.name).symlink_to(path)
    write_random_drafter(folder / DRAFTER_FOLDER, small_drafter_config(small_config()))
    return folder


class Text:
    """One sequence, decoded greedily one token at a time beside a drafter."""

    def __init__(
        self,
        model: Decoder,
        network: CpuMtp | CpuDFlash,
        prompt: Sequence[int] = PROMPT,
        wrap: Callable[[Drafter], Drafter] = lambda own: own,
    ) -> None:
        self.model, self.network, self.prompt, self.output = model, network, list(prompt), list[int]()
        self.drafter = wrap(drafter_of(network))
        weight = model.embed_tokens.weight
        self.cache = Cache.allocate(model.config, pages=PAGES, slots=1, window=9, dtype=weight.dtype)
        self.pages = list(range(PAGES))
        network.reset(0)
        self._forward(Family.PREFILL, Run(self.prompt, 0, 0, self.pages))

    def step(self) -> None:
        length = len(self.prompt) + len(self.output)
        first = len(self.output) == 1
        self._forward(Family.STEP, Run(self.output[-1:], length - 1, 0, self.pages, 0 if first else 1))

    def propose(self, depth: int = 5, sampling: Sampling | None = None, free_only: bool = False) -> Draft:
        request = DraftRequest(0, self.pages, self.prompt, self.output, sampling or Sampling(), depth, free_only)
        return self.drafter.propose([request])[0]

    @torch.inference_mode()
    def _forward(self, family: Family, run: Run) -> None:
        batch = Batch.of(family, [run], PAGE_SIZE)
        hidden, taps = self.model(batch, self.cache, self.network.taps)
        self.output.append(int(self.model.logits(hidden[-1:]).argmax()))
        following = torch.tensor([*run.tokens[1:], self.output[-1]])
        self.network.observe(batch, hidden, taps, following)


def drafter_of(network: CpuMtp | CpuDFlash) -> MtpDrafter | DFlashDrafter:
    return MtpDrafter(network, 5) if isinstance(network, CpuMtp) else DFlashDrafter(network, 5)


def networks(
    model: Decoder, directory: Path, postpone: int = 0, head: HeadChoice | None = None
) -> dict[str, CpuMtp | CpuDFlash]:
    network = load_drafter(directory / DRAFTER_FOLDER, model.config)
    return {
        "mtp": CpuMtp(model, PAGES, 1, head, postpone),
        "dflash": CpuDFlash(model, network, PAGES, head, postpone),
    }


@pytest.mark.parametrize("name", ["mtp", "dflash"])
@torch.inference_mode()
def test_confidence_is_the_probability_of_the_drafted_token(model: Decoder, directory: Path, name: str) -> None:
    text = Text(model, networks(model, directory)[name])
    draft = text.propose()
    assert len(draft) == 5
    assert draft.source == name
    assert all(0.0 < sure <= 1.0 for sure in draft.confidence)
    if name == "mtp":
        assert isinstance(text.network, CpuMtp)
        expected = model.logits(text.network.last[:1]).softmax(-1).max()
        assert draft.confidence[0] == pytest.approx(float(expected), rel=1e-4)


@torch.inference_mode()
def test_mtp_makes_as_many_passes_as_it_is_told_and_dflash_needs_only_one(model: Decoder, directory: Path) -> None:
    for name, network in networks(model, directory).items():
        text = Text(model, network)
        drafter = text.drafter
        seen: list[int] = []

        def go_on(drafts: Sequence[Draft], seen: list[int] = seen) -> list[bool]:
            seen.append(len(drafts[0]))
            return [len(drafts[0]) < 3]

        request = DraftRequest(0, text.pages, text.prompt, text.output, Sampling(), 5)
        whole, (stopped,) = drafter.propose([request])[0], drafter.propose([request], go_on)
        assert stopped.tokens == (whole.first(3) if name == "mtp" else whole).tokens
        assert seen == ([1, 2, 3] if name == "mtp" else [])


@torch.inference_mode()
def test_what_is_not_worth_a_pass_gets_only_what_is_free(model: Decoder, directory: Path) -> None:
    for network in networks(model, directory).values():
        text = Text(model, network)
        assert len(text.propose(free_only=True)) == 0
        both = Text(model, network, [*PROMPT[:30], *PROMPT[:30]], lambda own: FirstOf(LookupDrafter(5), own))
        both.output[-1] = PROMPT[30]  # as if the text went on repeating itself
        both.output[:] = []
        both.prompt = [*PROMPT[:40], *PROMPT[10:20]]
        both.output.append(PROMPT[20])
        free = both.propose(free_only=True)
        assert free.source == "lookup"
        assert list(free) == PROMPT[21:26]


@pytest.mark.parametrize("name", ["mtp", "dflash"])
@torch.inference_mode()
def test_catching_up_in_one_pass_leaves_the_same_bits_as_observing_every_step(
    model: Decoder, directory: Path, name: str
) -> None:
    """Drafts now and then, so that tokens wait for 1, 2, 3, ... steps, and once for longer than they may."""
    prompt, late = Text(model, networks(model, directory)[name]), Text(model, networks(model, directory, 4)[name])
    for step in range(24):
        for text in (prompt, late):
            text.step()
        if step in (0, 1, 3, 6, 10, 23):
            ours, theirs = prompt.propose(), late.propose()
            assert (ours.tokens, ours.confidence) == (theirs.tokens, theirs.confidence)
    late.network.flush(0)
    written = len(PROMPT) + len(late.output) - 1
    for ours_kv, theirs_kv in zip(_kv(prompt.network), _kv(late.network), strict=True):
        assert torch.equal(ours_kv.flatten(0, 1)[:written], theirs_kv.flatten(0, 1)[:written])


def _kv(network: CpuMtp | CpuDFlash) -> list[torch.Tensor]:
    layers = network.pages if isinstance(network.pages, list) else [network.pages]
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def test_tokens_that_wait_go_with_their_slot(model: Decoder, directory: Path) -> None:
    network = networks(model, directory, postpone=64)["mtp"]
    text = Text(model, network)
    for _ in range(5):
        text.step()
    network.reset(0)
    assert network.waiting.count(0) == 0


def test_several_slots_are_caught_up_together_in_as_few_passes_as_rows_allow() -> None:
    waiting = Waiting()
    lengths, pages = {0: 100, 1: 60, 2: 10}, {0: [0, 1], 1: [2, 3], 2: [4]}
    for start in range(0, 100, 5):  # five tokens of each a step, as long as it goes on
        runs = [Run([7] * 5, start, slot, pages[slot]) for slot, n in lengths.items() if start < n]
        batch = Batch.of(Family.STEP, runs, PAGE_SIZE)
        places = batch.slots[batch.sequence] * 1000 + batch.positions  # stands for what the network reads
        waiting.add(batch, places[:, None].float(), batch.positions + 1)
    batches = list(waiting.take([2, 0, 1]))
    assert [batch.num_tokens for batch, _, _ in batches] == [128, 42]
    seen: dict[int, list[int]] = {}
    for batch, values, following in batches:
        slots = batch.slots[batch.sequence]
        assert values[:, 0].tolist() == (slots * 1000 + batch.positions).tolist()
        assert following.tolist() == (batch.positions + 1).tolist()
        for slot, position in zip(slots.tolist(), batch.positions.tolist(), strict=True):
            seen.setdefault(slot, []).append(position)
    assert seen == {slot: list(range(n)) for slot, n in lengths.items()}
    assert not list(waiting.take([0, 1, 2]))


# -- a cheaper head


@torch.inference_mode()
def test_a_trimmed_head_guesses_only_what_it_keeps_and_the_whole_one_is_the_models(model: Decoder) -> None:
    hidden = torch.randn(40, model.config.hidden_size, dtype=model.embed_tokens.weight.dtype)
    whole, part = DraftHead(model), DraftHead(model, HeadChoice(vocab=64))
    assert torch.equal(whole.logits(hidden), model.logits(hidden))
    assert len(part.kept) == 64
    logits = part.logits(hidden)
    assert torch.isinf(logits).sum() == 40 * (512 - 64)
    assert torch.allclose(logits[:, part.kept], model.logits(hidden)[:, part.kept], rtol=0.02, atol=0.02)
    assert part.nbytes * 8 == whole.nbytes


def test_a_trimmed_head_learns_the_tokens_of_the_text(model: Decoder) -> None:
    head = DraftHead(model, HeadChoice(vocab=80))
    used = list(range(400, 440))
    assert not set(used) & set(head.kept)
    request = DraftRequest(0, [0], used * 2, [used[0]], Sampling(), 4)
    head.read([request])
    assert set(used) <= set(head.kept)
    assert len(head.kept) == 80
    assert set(model.config.eos_token_ids) <= set(head.kept)
    counted = dict(head._counts)
    head.read([request])  # the same text again is not counted again
    assert dict(head._counts) == counted


@pytest.mark.parametrize(("bits", "share"), [(8, 0.53), (4, 0.30)])
@torch.inference_mode()
def test_fewer_bits_are_fewer_bytes_and_nearly_the_same_logits(model: Decoder, bits: int, share: float) -> None:
    head = DraftHead(model, HeadChoice(bits=8 if bits == 8 else 4))
    assert head.nbytes <= share * DraftHead(model).nbytes
    hidden = torch.randn(20, model.config.hidden_size, dtype=model.embed_tokens.weight.dtype)
    exact, rough = model.logits(hidden), head.logits(hidden)
    assert float((rough - exact).norm() / exact.norm()) < (0.02 if bits == 8 else 0.15)


def test_cheaper_drafting_is_known_to_be_cheaper(model: Decoder, directory: Path) -> None:
    for name in ("mtp", "dflash"):
        plain, small = (
            drafter_of(networks(model, directory, head=head)[name]).costs[name]
            for head in (None, HeadChoice(vocab=64, bits=8))
        )
        assert small.token + small.block < plain.token + plain.block


CHEAP = [
    "mtp:4,vocab=64",
    "mtp:4,head=int4",
    "mtp:4,weights=int8",
    "dflash:5,vocab=32,head=int8",
    "dflash:5,weights=int4",
]


@pytest.mark.parametrize("draft", [*CHEAP, "lookup+mtp:4,vocab=100", "lookup+dflash:5,weights=int8"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_output_is_the_same_however_cheap_the_drafts(
    directory: Path, model: Decoder, draft: str, temperature: float
) -> None:
    own = load_model(directory).model  # `weights` rewrites the MTP head in place
    sampling = Sampling(max_tokens=12, temperature=temperature, seed=4)
    plain = list(generate(model, PROMPT, sampling))
    assert list(generate(own, PROMPT, sampling, draft, directory)) == plain


def test_quantised_networks_keep_small_gates_as_they_are(model: Decoder, directory: Path) -> None:
    own = load_model(directory).model
    assert own.mtp is not None
    lower_all(own.mtp, 4)
    mlp = next(part for part in own.mtp.modules() if isinstance(part, SparseMlp))
    assert isinstance(mlp.gate.weight, torch.Tensor)
    assert not isinstance(mlp.experts.gate_up_proj, torch.Tensor)


# -- lookup


def lookup(drafter: LookupDrafter, text: Sequence[int], prompt: int = 4, depth: int = 4) -> Draft:
    return drafter.propose([DraftRequest(0, [], text[:prompt], text[prompt:], Sampling(), depth)])[0]


def test_lookup_follows_the_last_occurrence_across_prompt_and_output() -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 8, 1, 2, 3]
    for prompt in (2, 4, 8, len(text) - 1):
        assert list(lookup(LookupDrafter(4), text, prompt)) == [9, 8, 1, 2]
    assert list(lookup(LookupDrafter(4), [1, 2, 3, 4, 5])) == []


def test_lookup_learns_how_far_matches_go_without_any_being_verified() -> None:
    copying, drifting = LookupDrafter(4), LookupDrafter(4)
    block = [11, 12, 13, 14, 15, 16, 17]
    text = list(block)
    for i in range(60):  # the text repeats itself faithfully
        text.append(block[i % len(block)])
        guess = lookup(copying, text)
    assert min(guess.confidence) > 0.9
    text = [1, 2, 3]
    for i in range(120):  # the same two tokens, each time followed by something new
        text += [1, 2]
        guess = lookup(drifting, text)
        text.append(20 + i)
        lookup(drifting, text)
    assert guess.confidence[0] < 0.2


def test_a_pair_prefers_a_network_to_a_match_that_has_not_held_lately() -> None:
    class Sure:
        max_depth = 4
        costs = LookupDrafter.costs

        def reset(self, slot: int) -> None: ...
        def propose(self, requests: Sequence[DraftRequest], go_on: object = None) -> list[Draft]:
            return [Draft([77], [0.9], "sure") if request.depth else Draft() for request in requests]

    first = LookupDrafter(4)
    pair = FirstOf(first, Sure())
    text = [1, 2, 3, 4, 1, 2]
    request = DraftRequest(0, [], text[:3], text[3:], Sampling(), 4)
    first._went_on = [0.9 * seen for seen in first._seen]
    assert pair.propose([request])[0].source == "lookup"
    first._went_on = [0.1 * seen for seen in first._seen]
    assert pair.propose([request])[0].source == "sure"


def test_a_pair_prefers_a_network_whose_drafts_lately_were_right_further_than_the_match_promises() -> None:
    guess = Draft([1, 2], [0.9, 0.9], "lookup")  # promises 0.9 + 0.81
    assert trusted(guess, rival=1.7)
    assert not trusted(guess, rival=1.72)
    assert not trusted(Draft([1], [0.7], "lookup"), rival=0.0)
    assert not trusted(Draft(), rival=0.0)
