"""Traces of drafting: what each drafter would have proposed at every position of real answers, and what came of it.

    python -m benchmarks.plan.traces --model build/demo-checkpoint --out benchmarks/results/depth-traces.npz

Runs a checkpoint over five kinds of text. At each position every drafter drafts as deep as it can and the block goes
through the model, wrong guesses included, so that a replay may verify any number of them from any position. Kept per
position: how many drafts, how many of them right, their confidences, and the distinct experts per layer that the first
1, 2, ... tokens of the block touch. JSON and agent turns are greedy answers. Code and prose are sampled (temperature
0.7, top-p 0.9), as a small model's greedy prose goes in circles. Random text is uniform tokens, forced on the model.
"""

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stoker.backends.cpu.drafting import CpuDFlash, CpuMtp
from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.experts import SparseMlp
from stoker.backends.network.load import load_drafter, load_model
from stoker.sampling.sampler import Row, choose
from stoker.sampling.settings import Sampling
from stoker.speculate.dflash import DFlashDrafter
from stoker.speculate.drafter import Draft, Drafter, DraftRequest
from stoker.speculate.lookup import LookupDrafter
from stoker.speculate.mtp import MtpDrafter

KINDS = ("json", "code", "prose", "agent", "random")
DEPTHS = {"mtp": 8, "dflash": 15, "lookup": 15}
TOGETHER = 7  # texts at a time: 7 blocks of 16 tokens fit the 128 rows of a step
LOGITS = (-8.0, 12.0)  # range in which confidences are stored, as log odds in 256 levels


@dataclass(frozen=True)
class Task:
    kind: str
    prompt: list[int]
    sampling: Sampling
    tokens: int  # most to answer
    forced: list[int] = field(default_factory=list)  # the answer, where it is given


@dataclass
class _Sequence:
    task: Task
    slot: int
    pages: list[int]
    output: list[int]
    drafts: dict[str, list[Draft]]  # one per position
    distinct: dict[str, list[list[float]]]
    done: bool = False


# -- texts


def tasks_of(model: Path, data: Path, texts: int, tokens: int) -> list[Task]:
    """Held-out prompts: half of the JSON and agent ones with layouts and tools that training never saw."""
    from training.batches import read_shard
    from training.chat import prompt_of
    from training.data import calls, invoices
    from training.data.sample import Split

    from training import tokenizer as tokenizers

    tokenizer = tokenizers.load(model)
    found: list[Task] = []
    for i in range(texts):
        split: Split = "unseen" if i % 2 else "known"
        invoice, chat = invoices.make(split, i), calls.three_turns(split, i)
        last = max(place for place, message in enumerate(chat.messages) if message.get("tool_calls"))
        for kind, text in (
            ("json", prompt_of(invoice.messages[:-1])),
            ("agent", prompt_of(chat.messages[:last], chat.tools)),
        ):
            found.append(Task(kind, list(tokenizer.encode(text, add_special_tokens=False).ids), Sampling(), tokens))
        for kind, source in (("code", "code"), ("prose", "novels")):
            shard = read_shard(data / "shards" / "unseen" / f"{source}.xz")
            start = i * 600
            prompt = [int(token) for token in shard[start : start + 200]]
            found.append(Task(kind, prompt, Sampling(temperature=0.7, top_p=0.9, seed=i), tokens))
    return found


def random_tasks(vocab: int, texts: int, tokens: int) -> list[Task]:
    rng = random.Random(7)
    return [
        Task("random", _noise(rng, vocab, 64), Sampling(), tokens, _noise(rng, vocab, tokens)) for _ in range(texts)
    ]


def _noise(rng: random.Random, vocab: int, count: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]


# -- recording


def distinct_experts(model: Decoder, start: int, stop: int) -> list[float]:
    """Experts per layer that rows start, start + 1, ... of the last forward touch together, on average over layers."""
    layers = [part for part in model.layers.modules() if isinstance(part, SparseMlp)]
    counts = torch.zeros(stop - start)
    for layer in layers:
        assert layer.routed is not None
        touched = torch.zeros(stop - start, layer.moe.num_experts)
        touched.scatter_(1, layer.routed[start:stop].long(), 1.0)
        counts += touched.cummax(0).values.sum(1)
    return (counts / max(1, len(layers))).tolist()


class Recorder:
    def __init__(
        self,
        model: Decoder,
        drafters: dict[str, Drafter],
        networks: Sequence[CpuMtp | CpuDFlash],
        pages: int,
        slots: int,
    ) -> None:
        self.model, self.drafters, self.networks = model, drafters, networks
        weight = model.embed_tokens.weight
        self._cache = Cache.allocate(
            model.config,
            pages=pages,
            slots=slots,
            window=1 + max(DEPTHS.values()),
            dtype=weight.dtype,
            device=weight.device,
        )
        self._taps = next((network.taps for network in networks if network.taps), ())

    @torch.inference_mode()
    def record(self, tasks: Sequence[Task]) -> list[_Sequence]:
        """Answers a few tasks side by side, one token per step, drafting at every step."""
        each = -(-(max(len(t.prompt) + t.tokens for t in tasks) + 1 + max(DEPTHS.values())) // PAGE_SIZE)
        sequences = []
        for slot, task in enumerate(tasks):
            self._cache.reset(slot)
            for drafter in self.drafters.values():
                drafter.reset(slot)
            for network in self.networks:
                network.reset(slot)
            pages = list(range(slot * each, (slot + 1) * each))
            sequence = _Sequence(task, slot, pages, [], {n: [] for n in self.drafters}, {n: [] for n in self.drafters})
            self._prefill(sequence)
            sequences.append(sequence)
        first = True
        while live := [s for s in sequences if not s.done]:
            self._step(live, replay=0 if first else 1)
            first = False
        return sequences

    def _prefill(self, sequence: _Sequence) -> None:
        prompt = sequence.task.prompt
        run = Run(prompt, 0, sequence.slot, sequence.pages)
        batch = Batch.of(Family.PREFILL, [run], PAGE_SIZE, self.model.embed_tokens.weight.device)
        hidden, taps = self.model(batch, self._cache, self._taps)
        self._emit(sequence, self.model.logits(hidden[-1:]))
        following = torch.tensor([*prompt[1:], sequence.output[0]], device=hidden.device)
        for network in self.networks:
            network.observe(batch, hidden, taps, following)

    def _step(self, live: list[_Sequence], replay: int) -> None:
        for name, drafter in self.drafters.items():
            requests = [
                DraftRequest(s.slot, s.pages, s.task.prompt, s.output, s.task.sampling, DEPTHS[name]) for s in live
            ]
            drafts = drafter.propose(requests)
            runs = [
                Run([s.output[-1], *draft], len(s.task.prompt) + len(s.output) - 1, s.slot, s.pages, replay)
                for s, draft in zip(live, drafts, strict=True)
            ]
            replay = 0  # the next block starts from the same state
            batch = Batch.of(Family.STEP, runs, PAGE_SIZE, self.model.embed_tokens.weight.device)
            hidden, taps = self.model(batch, self._cache, self._taps)
            starts = batch.starts.tolist()
            for i, (sequence, draft) in enumerate(zip(live, drafts, strict=True)):
                sequence.drafts[name].append(draft)
                sequence.distinct[name].append(distinct_experts(self.model, starts[i], starts[i + 1]))
        newest = batch.starts[:-1]
        logits = self.model.logits(hidden[newest])
        for i, sequence in enumerate(live):
            self._emit(sequence, logits[i : i + 1])
        following = torch.tensor([s.output[-1] for s in live], device=hidden.device)
        kept = torch.zeros(batch.num_tokens, dtype=torch.bool, device=hidden.device)
        kept[newest] = True
        for network in self.networks:
            network.observe(batch.select(kept), hidden[kept], taps[kept], following)

    def _emit(self, sequence: _Sequence, logits: Tensor) -> None:
        task, output = sequence.task, sequence.output
        if task.forced:
            token = task.forced[len(output)]
        else:
            token = int(choose(logits, [Row(task.sampling, len(task.prompt) + len(output), task.prompt, output)]))
        output.append(token)
        ended = not task.forced and token in self.model.config.eos_token_ids
        sequence.done = ended or len(output) >= task.tokens


# -- the file


def pack(sequences: Sequence[_Sequence], experts: int, top_k: int) -> dict[str, np.ndarray]:
    """Arrays by "kind/drafter/what"; the last token of a text has nothing after it and is left out."""
    arrays: dict[str, np.ndarray] = {"experts": np.array([experts, top_k])}
    for kind in dict.fromkeys(s.task.kind for s in sequences):
        texts = [s for s in sequences if s.task.kind == kind and len(s.output) > 1]
        arrays[f"{kind}/lengths"] = np.array([len(s.output) - 1 for s in texts], dtype=np.uint16)
        for name in sequences[0].drafts:
            depth = DEPTHS[name]
            made, right, sure, distinct = [], [], [], []
            for sequence in texts:
                for place in range(len(sequence.output) - 1):
                    draft = sequence.drafts[name][place]
                    truth = sequence.output[place + 1 :]
                    made.append(len(draft))
                    right.append(_matching(draft, truth))
                    sure.append([*draft.confidence, *[0.0] * (depth - len(draft))])
                    counts = sequence.distinct[name][place]
                    distinct.append([*counts, *[counts[-1]] * (depth + 1 - len(counts))])
            arrays[f"{kind}/{name}/made"] = np.array(made, dtype=np.uint8)
            arrays[f"{kind}/{name}/right"] = np.array(right, dtype=np.uint8)
            arrays[f"{kind}/{name}/sure"] = _to_levels(np.array(sure))
            arrays[f"{kind}/{name}/distinct"] = np.rint(np.array(distinct) / max(1, experts) * 255).astype(np.uint8)
    return arrays


def _matching(draft: Draft, truth: Sequence[int]) -> int:
    count = 0
    while count < min(len(draft), len(truth)) and draft.tokens[count] == truth[count]:
        count += 1
    return count


def _to_levels(sure: np.ndarray) -> np.ndarray:
    sure = np.clip(sure, 1e-6, 1 - 1e-6)
    low, high = LOGITS
    return np.rint((np.clip(np.log(sure / (1 - sure)), low, high) - low) / (high - low) * 255).astype(np.uint8)


def from_levels(levels: np.ndarray) -> np.ndarray:
    low, high = LOGITS
    return 1 / (1 + np.exp(-(levels / 255 * (high - low) + low)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, help="the DFlash network; MODEL/drafter or MODEL/dflash if there")
    parser.add_argument("--data", type=Path, default=Path("build/training"), help="held-out code and prose")
    parser.add_argument("--texts", type=int, default=7, help="of each kind")
    parser.add_argument("--tokens", type=int, default=192, help="of each answer, at most")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    loaded = load_model(options.model)
    model = loaded.model
    tasks = tasks_of(options.model, options.data, options.texts, options.tokens)
    tasks += random_tasks(model.config.vocab_size, options.texts, options.tokens)
    longest = max(len(t.prompt) + t.tokens for t in tasks)
    pages = TOGETHER * (-(-(longest + 1 + max(DEPTHS.values())) // PAGE_SIZE))
    folder = options.drafter or next((p for n in ("drafter", "dflash") if (p := options.model / n).is_dir()), None)
    networks: list[CpuMtp | CpuDFlash] = []
    drafters: dict[str, Drafter] = {"lookup": LookupDrafter(DEPTHS["lookup"])}
    if model.mtp is not None:
        mtp = CpuMtp(model, pages, TOGETHER)
        networks.append(mtp)
        drafters["mtp"] = MtpDrafter(mtp, DEPTHS["mtp"])
    if folder:
        dflash = CpuDFlash(model, load_drafter(folder, model.config, model.embed_tokens.weight.dtype), pages)
        networks.append(dflash)
        drafters["dflash"] = DFlashDrafter(dflash, DEPTHS["dflash"])
    recorder = Recorder(model, drafters, networks, pages, TOGETHER)
    moe = model.config.moe
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sequences: list[_Sequence] = []
    for kind in KINDS:
        started = time.perf_counter()
        wanted = [task for task in tasks if task.kind == kind]
        made = [s for at in range(0, len(wanted), TOGETHER) for s in recorder.record(wanted[at : at + TOGETHER])]
        sequences += made
        arrays = pack(sequences, moe.num_experts if moe else 0, moe.top_k if moe else 0)
        np.savez_compressed(options.out, **arrays)  # type: ignore[arg-type]
        print(f"{kind}: {sum(len(s.output) for s in made)} tokens in {time.perf_counter() - started:.0f} s", flush=True)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
