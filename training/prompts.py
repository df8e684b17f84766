"""Writes the prompts that the demo, the losslessness check and the benchmarks use: python -m training.prompts

Held-out instances of the generators, as the chat template renders them, and beginnings of passages from text that
training never saw.
"""

import argparse
import json
from pathlib import Path

from training import tokenizer as tokenizers
from training.batches import read_shard
from training.chat import prompt_of
from training.data import calls, invoices

COUNT = 50  # of each kind
FIRST = 1000  # instances before this one are asked by training.evaluate
TOKENS, APART = 160, 640  # of a passage, and from one to the next
PASSAGES = {"code": "code", "prose": "novels"}  # kind -> shard


def invoice(index: int) -> str:
    return prompt_of(invoices.make("known", index).messages[:-1])


def agent_turn(index: int) -> str:
    """A conversation up to the last call the assistant has to make."""
    chat = calls.three_turns("known", index)
    last = max(place for place, message in enumerate(chat.messages) if message.get("tool_calls"))
    return prompt_of(chat.messages[:last], chat.tools)


def passages(data: Path, source: str) -> list[str]:
    tokenizer = tokenizers.load(data / "tokenizer")
    end = tokenizer.token_to_id("<|endoftext|>")
    tokens = [int(token) for token in read_shard(data / "shards" / "unseen" / f"{source}.xz") if token != end]
    starts = range(0, len(tokens) - TOKENS, APART)[:COUNT]
    return [str(tokenizer.decode(tokens[start : start + TOKENS])) for start in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/training"))
    parser.add_argument("--out", type=Path, default=Path("src/stoker/demo/prompts.json"))
    options = parser.parse_args()
    indices = range(FIRST, FIRST + COUNT)
    prompts = {"JSON": [invoice(index) for index in indices], "agent": [agent_turn(index) for index in indices]}
    prompts |= {kind: passages(options.data, source) for kind, source in PASSAGES.items()}
    text = json.dumps(prompts, ensure_ascii=False, indent=1)
    options.out.write_text(text + "\n", encoding="utf-8")
    print(f"{options.out}: {', '.join(f'{len(texts)} {kind}' for kind, texts in prompts.items())}, {len(text):,} bytes")


if __name__ == "__main__":
    main()
