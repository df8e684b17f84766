"""Scores a checkpoint directory with Stoker: python -m training.evaluate --model DIR [--drafter DIR/dflash] --json FILE

Invoices to JSON, tool calls, bits per byte beside gzip and xz, and the drafters' acceptance on the model's own greedy
output; known layouts and tools apart from those training never saw.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from training import tokenizer as tokenizers
from training.batches import read_shard
from training.chat import prompt_of
from training.data import calls, coined_calls, coined_invoices, coined_notes, invoices, records
from training.data.sample import Chat, Split, Text
from training.scoring import calls_in, compressed_bits_per_byte, expected_calls, same_calls, same_json
from training.served import SLOTS, Acceptance, Served

MAX_TOKENS = 512
TEXTS = ("code", "novels", "manual", "databases", "jargon")
# what nobody of ours wrote, by its name in the report
RUNNING_TEXTS = {"code": "code", "packages": "packages", "prose": "novels", "manual": "manual"}
MTP_DEPTH = 2
GIVEN = 200  # tokens of running text that are continued

_served: Served | None = None  # one per process


def _begin(model: Path, drafter: Path | None, device: str) -> None:
    global _served
    _served = Served(model, drafter, device)


def _begin_alone(model: Path, drafter: Path | None, device: str) -> None:
    """As one of several processes, which share the cores by taking one each."""
    torch.set_num_threads(1)
    _begin(model, drafter, device)


def _answers(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    assert _served is not None
    return _served.answers(prompts, max_tokens)


def _bits(tokens: list[int], start: int) -> float:
    assert _served is not None
    return _served.bits(tokens, start)


def _accept(prompt: list[int], max_tokens: int, continued: bool) -> tuple[Acceptance, Acceptance | None]:
    """`continued` text has no end of its own: the stop token is not waited for."""
    assert _served is not None
    (output,) = _served.answers([prompt], max_tokens)
    if len(output) < 4 and continued:
        return Acceptance(), None
    dflash = _served.dflash_acceptance(prompt, output) if _served.drafter else None
    return _served.mtp_acceptance(prompt, output, MTP_DEPTH), dflash


class Evaluation:
    def __init__(self, model: Path, drafter: Path | None, data: Path, jobs: int, device: str, limit: float) -> None:
        self.tokenizer: Tokenizer = tokenizers.load(model)
        self.data, self.limit = data, limit
        self.pool: Executor
        if jobs == 1:
            self.pool = ThreadPoolExecutor(1, initializer=_begin, initargs=(model, drafter, device))
        else:  # spawn: a forked process would inherit torch's threads in an unknown state
            self.pool = ProcessPoolExecutor(jobs, get_context("spawn"), _begin_alone, (model, drafter, device))

    def count(self, wanted: int) -> int:
        return max(1, round(wanted * self.limit))

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def answers(self, prompts: list[str]) -> list[str]:
        encoded = [self.ids(prompt) for prompt in prompts]
        chunks = [encoded[i : i + SLOTS] for i in range(0, len(encoded), SLOTS)]
        made = self.pool.map(_answers, chunks, [MAX_TOKENS] * len(chunks))
        return [self.text(out) for chunk in made for out in chunk]

    def extraction(self, make: Callable[[Split, int], Chat], split: Split, wanted: int) -> dict[str, Any]:
        chats = [make(split, index) for index in range(self.count(wanted))]
        outputs = self.answers([prompt_of(chat.messages[:-1]) for chat in chats])
        marks = [same_json(out, chat.messages[-1]["content"]) for out, chat in zip(outputs, chats, strict=True)]
        return {
            "count": len(chats),
            "valid_json": sum(valid for valid, _ in marks) / len(marks),
            "exact": sum(exact for _, exact in marks) / len(marks),
        }

    def tool_calls(self, make: Callable[[Split, int], Chat], split: Split, wanted: int) -> dict[str, Any]:
        """A conversation is right when every one of its calls is; earlier turns are given as they should have been."""
        chats = [make(split, index) for index in range(self.count(wanted))]
        turns = [
            (place, at) for place, chat in enumerate(chats) for at, m in enumerate(chat.messages) if m.get("tool_calls")
        ]
        outputs = self.answers([prompt_of(chats[place].messages[:at], chats[place].tools) for place, at in turns])
        wrong: set[int] = set()
        named = 0
        for (place, at), out in zip(turns, outputs, strict=True):
            expected = expected_calls(chats[place].messages[at])
            found = calls_in(out, chats[place].tools)
            named += [name for name, _ in found] == [name for name, _ in expected]
            if not same_calls(found, expected):
                wrong.add(place)
        return {"count": len(chats), "right": 1 - len(wrong) / len(chats), "right_tool_per_turn": named / len(turns)}

    def held_out_tokens(self, source: str) -> list[int]:
        path = self.data / "shards" / "unseen" / f"{source}.xz"
        return [int(token) for token in read_shard(path)] if path.exists() else []

    def bits_per_byte(self, most: int = 60_000) -> dict[str, dict[str, float]]:
        end = self.tokenizer.token_to_id("<|endoftext|>")
        found = {}
        for source in TEXTS:
            tokens = [t for t in self.held_out_tokens(source)[: self.count(most)] if t != end]
            if not tokens:
                continue
            pieces = [tokens[i : i + 2048] for i in range(0, len(tokens), 2048)]
            text = self.text(tokens)
            bits = sum(self.pool.map(_bits, pieces, [end] * len(pieces)))
            found[source] = {"bytes": len(text.encode()), "model": bits / len(text.encode())}
            found[source] |= compressed_bits_per_byte(text)
        return found

    def acceptance(self, wanted: int = 20, passages: int = 96) -> dict[str, dict[str, float]]:
        """`passages` of each running text, spread over all of it: one file or chapter is far easier than another."""
        count = self.count(wanted)
        prompts = {
            "json": [prompt_of(invoices.make("known", i).messages[:-1]) for i in range(count)],
            "json, unseen": [prompt_of(invoices.make("unseen", i).messages[:-1]) for i in range(count)],
            "agent": [self._before_last(calls.three_turns("known", i)) for i in range(count)],
        }
        tasks = {kind: [self.ids(prompt) for prompt in texts] for kind, texts in prompts.items()}
        for kind, source in RUNNING_TEXTS.items():
            tokens = self.held_out_tokens(source)
            apart = max(1, (len(tokens) - GIVEN) // self.count(passages))
            tasks[kind] = [tokens[i : i + GIVEN] for i in range(0, len(tokens) - GIVEN, apart)][: self.count(passages)]
        found: dict[str, dict[str, float]] = {}
        for kind, encoded in tasks.items():
            if not encoded:
                continue
            running = kind in RUNNING_TEXTS
            size = len(encoded)
            pairs = list(self.pool.map(_accept, encoded, [160 if running else MAX_TOKENS] * size, [running] * size))
            mtp = sum((pair[0] for pair in pairs), Acceptance())
            found[kind] = {"prompts": size}
            found[kind] |= {f"mtp-{MTP_DEPTH} acceptance": mtp.rate, "mtp emitted per step": mtp.emitted_per_step}
            if any(pair[1] for pair in pairs):
                dflash = sum((pair[1] for pair in pairs if pair[1]), Acceptance())
                found[kind] |= {"dflash acceptance": dflash.rate, "dflash emitted per step": dflash.emitted_per_step}
        return found

    def _before_last(self, chat: Chat) -> str:
        last = max(i for i, message in enumerate(chat.messages) if message.get("tool_calls"))
        return prompt_of(chat.messages[:last], chat.tools)


def note(split: Split, index: int) -> Chat:
    """The records generator's conversations, without its plain texts."""
    while isinstance(made := records.make(split, index), Text):
        index += 10_000
    return made


def evaluate(
    model: Path,
    drafter: Path | None,
    data: Path,
    jobs: int,
    device: str,
    limit: float = 1.0,
    only: str = "",
    kept: Path | None = None,
) -> dict[str, Any]:
    """All scores, or those whose names begin with one of the words of `only` (between commas).

    They are written to `kept` one by one; scores of the same weights that are there already are not taken again.
    """
    report: dict[str, Any] = {"model": model.name, "weights_sha256": fingerprint(model, drafter), "limit": limit}
    report |= _going_on(kept, report)
    run = Evaluation(model, drafter, data, jobs, device, limit)
    splits: tuple[Split, ...] = ("known", "unseen")
    scores: dict[str, Callable[[], Any]] = {}
    for split in splits:
        scores |= {
            f"invoices, {split}": partial(run.extraction, invoices.make, split, 200),
            f"records, {split}": partial(run.extraction, note, split, 100),
            f"single-turn calls, {split}": partial(run.tool_calls, calls.single_turn, split, 200),
            f"three-turn calls, {split}": partial(run.tool_calls, calls.three_turns, split, 50),
            f"coined notes, {split}": partial(run.extraction, coined_notes.make, split, 100),
            f"coined invoices, {split}": partial(run.extraction, coined_invoices.make, split, 100),
            f"coined calls, {split}": partial(run.tool_calls, coined_calls.single_turn, split, 100),
            f"confusable three-turn calls, {split}": partial(run.tool_calls, calls.confusable_three_turns, split, 50),
        }
    scores |= {"bits per byte": run.bits_per_byte, "acceptance": run.acceptance}
    with run.pool:
        for name, score in scores.items():
            if name in report or not name.startswith(tuple(only.split(","))):
                continue
            report[name] = score()
            print(name, json.dumps(report[name]), flush=True)
            report |= _going_on(kept, report)  # others may take other scores at the same time
            if kept:
                kept.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def fingerprint(*directories: Path | None) -> str:
    """One hash of all files of weights."""
    digest = hashlib.sha256()
    files = {file for directory in directories if directory for file in directory.glob("model*.safetensors")}
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _going_on(kept: Path | None, begun: dict[str, Any]) -> dict[str, Any]:
    """The scores in a file, if they are of the same weights and as many questions."""
    if not kept or not kept.exists():
        return {}
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    wrong = [key for key in ("weights_sha256", "limit") if found.get(key) != begun[key]]
    if wrong:
        raise SystemExit(f"{kept} holds scores with another {wrong[0]}; give another file, or remove it to begin anew.")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--data", type=Path, default=Path("build/training"))
    parser.add_argument("--jobs", type=int, default=2, help="processes; each loads the checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=float, default=1.0, help="share of the questions to ask")
    parser.add_argument("--only", default="", help="scores whose names begin so: acceptance,three-turn")
    parser.add_argument("--json", type=Path, help="where scores are kept; those that are there are not taken again")
    options = parser.parse_args()
    evaluate(
        options.model,
        options.drafter,
        options.data,
        options.jobs,
        options.device,
        options.limit,
        options.only,
        options.json,
    )


if __name__ == "__main__":
    main()
