"""Byte-level BPE with the special tokens of the family: training it, and the files a checkpoint carries.

Digits stand alone, so that numbers can be copied and added figure by figure. The chat template lies beside this file.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.chat import TEMPLATE
from training.config import RESERVED

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# added tokens that are not flagged special: decoding keeps them, parsers look for them
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# words with one space before them; single digits; punctuation; line ends; the spaces before a word but the last
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n+|\s+(?!\S)|\s+"


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer whose last RESERVED ids are special tokens and unused ones; the very last is the drafter's mask."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - RESERVED,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size != vocab_size - RESERVED:
        raise ValueError(
            f"the text yields only {size:,} tokens, {vocab_size - RESERVED:,} are needed; give the tokenizer more text."
        )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARKUP])
    return tokenizer


def write(tokenizer: Tokenizer, directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    _write_json(directory / "tokenizer_config.json", settings)
    (directory / "chat_template.jinja").write_text(TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")
    end, turn = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    _write_json(directory / "generation_config.json", {"eos_token_id": [turn, end], "pad_token_id": end})


def load(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; write it with `python -m training.data.build`.")
    return Tokenizer.from_file(str(path))


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
