"""One command from nothing to token shards: python -m training.data.build

Writes build/training/{tokenizer, shards/<split>/<source>.xz, manifest.json}. The same sources give the same bytes;
training/manifest.json says which bytes those are (`--check` compares, `--record` replaces it). `--add` keeps the
tokenizer and the shards that are there and writes only those that are missing.
"""

import argparse
import hashlib
import json
import lzma
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from training import tokenizer as tokenizers
from training.chat import render
from training.config import DEMO
from training.data import (
    arithmetic,
    calls,
    coined_calls,
    coined_invoices,
    coined_notes,
    invoices,
    questions,
    records,
    stories,
    words,
)
from training.data.corpora import COLLECTORS
from training.data.fetch import DEBIAN, wheel_hashes
from training.data.sample import Chat, Sample, Split

OUT = Path("build/training")
MANIFEST = Path(__file__).parents[1] / "manifest.json"
HELD_OUT_SHARE = 0.005  # documents of a generator in its held-out splits, as a share of its training documents

# generator -> training documents
GENERATORS: dict[str, tuple[Callable[[Split, int], Sample], int]] = {
    "invoices": (invoices.make, 70_000),
    "calls": (calls.make, 60_000),
    "calls_single": (calls.single_turn, 30_000),
    "records": (records.make, 40_000),
    "logs": (records.log, 5_000),
    "arithmetic": (arithmetic.make, 50_000),
    "questions": (questions.make, 30_000),
    "stories": (stories.make, 25_000),
    "coined_notes": (coined_notes.make, 40_000),
    "coined_invoices": (coined_invoices.make, 26_000),
    "coined_calls": (coined_calls.make, 18_000),
    "calls_confusable": (calls.confusable, 12_000),
}
# what the tokenizer is trained on. Trained weights belong to their tokenizer, so sources added later are not in here.
TOKENIZER_SOURCES = ("invoices", "calls", "calls_single", "records", "logs", "arithmetic", "questions", "stories")
TOKENIZER_CORPORA = ("code", "code_tests", "manual", "databases", "novels", "jargon")
REASONS = ["I can answer this directly.", "Short question, short answer.", "Röviden válaszolok."]


def text_of(sample: Sample, *name: object) -> str:
    """The text the model learns. `name` decides where a conversation is cut and whether the assistant thinks aloud."""
    if not isinstance(sample, Chat):
        return sample.text
    rng = words.rng_for("text", *name)
    messages = sample.messages
    queries = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(queries) > 1 and rng.random() < 0.6:  # earlier turns are also answered as the last one
        messages = messages[: rng.choice(queries[1:])]
    if rng.random() < 0.1:
        messages = [_thinking(message, rng.choice(REASONS)) for message in messages]
    return render(messages, sample.tools)


def _thinking(message: dict[str, Any], otherwise: str) -> dict[str, Any]:
    if message["role"] != "assistant":
        return message
    wanted = [call["function"]["name"] for call in message.get("tool_calls", [])]
    return {**message, "reasoning_content": f"I will call {' and '.join(wanted)}." if wanted else otherwise}


def generated(source: str, split: Split, count: int) -> Iterator[str]:
    make, _ = GENERATORS[source]
    return (text_of(make(split, index), source, split, index) for index in range(count))


def collected(source: str, split: Split) -> Iterator[str]:
    """Corpora have no known layouts: what is held out is new altogether, and filed under `unseen`."""
    return (d.text for d in COLLECTORS[source]() if d.held_out == (split == "unseen"))


def all_texts(scale: float, corpora: bool) -> Iterator[tuple[Split, str, Iterator[str]]]:
    splits: tuple[Split, ...] = ("train", "known", "unseen")
    for split in splits:
        for source, (_, documents) in GENERATORS.items():
            share = scale if split == "train" else scale * HELD_OUT_SHARE
            yield split, source, generated(source, split, max(8, round(documents * share)))
        for source in COLLECTORS if corpora and split != "known" else ():
            yield split, source, collected(source, split)


def tokenizer_texts(scale: float, corpora: bool) -> Iterator[str]:
    """A fair sample: the first documents of its generators, every fourth of every corpus."""
    for source in TOKENIZER_SOURCES:
        _, documents = GENERATORS[source]
        yield from generated(source, "train", max(40, round(documents * scale * 0.05)))
    for source in TOKENIZER_CORPORA if corpora else ():
        yield from (text for place, text in enumerate(collected(source, "train")) if place % 4 == 0)


def write_shard(path: Path, texts: Iterator[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokens as little-endian uint16, <|endoftext|> after every document, compressed with xz."""
    end = tokenizer.token_to_id("<|endoftext|>")
    path.parent.mkdir(parents=True, exist_ok=True)
    parts: list[np.ndarray] = []
    size, batch = 0, list[str]()

    def flush() -> None:
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            parts.append(np.array([*encoding.ids, end], dtype="<u2"))
        batch.clear()

    for text in texts:
        size += len(text.encode())
        batch.append(text)
        if len(batch) == 512:
            flush()
    flush()
    tokens = np.concatenate(parts).tobytes() if parts else b""
    path.write_bytes(lzma.compress(tokens, preset=6))
    return {
        "documents": len(parts),
        "bytes": size,
        "tokens": len(tokens) // 2,
        "sha256": hashlib.sha256(tokens).hexdigest(),
    }


def build(
    out: Path, vocab_size: int, scale: float = 1.0, corpora: bool = True, only_missing: bool = False
) -> dict[str, Any]:
    started = time.monotonic()
    if only_missing:
        manifest = _present(out)
        tokenizer = tokenizers.load(out / "tokenizer")
    else:
        tokenizer = tokenizers.train(tokenizer_texts(scale, corpora), vocab_size)
        tokenizers.write(tokenizer, out / "tokenizer")
        shutil.rmtree(out / "shards", ignore_errors=True)  # a shard of an older build must not be trained on
        manifest = {
            "python": platform.python_version(),
            "tokenizer_sha256": _tokenizer_hash(out),
            "shards": {},
        }
    if corpora:
        manifest["packages"] = {f"{p.name}={p.version}": p.sha256 for p in DEBIAN} | wheel_hashes()
    present, shards = manifest["shards"], {}
    for split, source, texts in all_texts(scale, corpora):
        path, name = out / "shards" / split / f"{source}.xz", f"{split}/{source}"
        if name in present and path.exists():
            shards[name] = present[name]
            continue
        shards[name] = entry = write_shard(path, texts, tokenizer)
        print(
            f"{name:24} {entry['documents']:>7,} documents {entry['bytes']:>12,} bytes "
            f"{entry['tokens']:>11,} tokens {path.stat().st_size:>11,} compressed  {time.monotonic() - started:5.0f} s",
            flush=True,
        )
    manifest["shards"] = shards | {name: entry for name, entry in present.items() if name not in shards}
    text = json.dumps(manifest, indent=1) + "\n"
    (out / "manifest.json").write_text(text, encoding="utf-8")
    return manifest


def _tokenizer_hash(out: Path) -> str:
    return hashlib.sha256((out / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest()


def _present(out: Path) -> dict[str, Any]:
    """The manifest of a data directory whose tokenizer is the one its shards were written with."""
    path = out / "manifest.json"
    if not path.exists():
        raise SystemExit(f"{out} holds no manifest.json, so there is nothing to add to; build without --add first.")
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if manifest["tokenizer_sha256"] != _tokenizer_hash(out):
        raise SystemExit(
            f"{out / 'tokenizer'} is not the tokenizer that the shards in {out} were written with; build them all anew "
            "without --add."
        )
    return manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the generated documents")
    parser.add_argument("--no-corpora", action="store_true", help="generated text only")
    parser.add_argument("--add", action="store_true", help="keep what --out holds, write only the missing shards")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true", help="compare with training/manifest.json")
    group.add_argument("--record", action="store_true", help="replace training/manifest.json")
    options = parser.parse_args()
    manifest = build(options.out, DEMO.trunk["vocab_size"], options.scale, not options.no_corpora, options.add)
    packed = sum(path.stat().st_size for path in (options.out / "shards").rglob("*.xz"))
    print(f"{sum(e['tokens'] for e in manifest['shards'].values()):,} tokens, {packed / 2**20:.1f} MiB compressed")
    if options.record:
        MANIFEST.write_text((options.out / "manifest.json").read_text(encoding="utf-8"), encoding="utf-8")
    if options.check:
        recorded = json.loads(MANIFEST.read_text(encoding="utf-8"))
        wrong = [name for name, entry in recorded["shards"].items() if manifest["shards"].get(name) != entry]
        if wrong or recorded["tokenizer_sha256"] != manifest["tokenizer_sha256"]:
            sys.exit(
                f"the data differs from training/manifest.json in {', '.join(wrong) or 'the tokenizer'}; it was "
                f"recorded with Python {recorded['python']}, this is {manifest['python']}."
            )
        print("the same bytes as in training/manifest.json")


if __name__ == "__main__":
    main()
