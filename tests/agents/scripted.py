"""A real checkpoint whose weights follow a script: it calls one tool, and says one sentence once the tool has answered.

Loader, engine, drafter, server and parsers treat it like any other of its family. Its layers add nothing to the
residual stream, so that the head sees the last token alone and turns it into its successor; the words of the script are
tokens that occur in it once. It takes prompts as long as those of coding agents, which no small model can follow.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from stoker.demo import EMBEDDED
from tests.support.random_checkpoint import small_config, write_random_checkpoint

CONTEXT = 262_144
HIDDEN = 256  # wide enough for random embeddings to be told apart by far
# What a prompt ends with: one token, from which the model goes on.
THINK, CALL = "<think>\n", "<think>\n\n</think>\n\n"
ANSWER = "<think>\nThere is a result, or nothing to call.\n</think>\n\n"
BEGIN_ANSWER = "{%- if add_generation_prompt -%}"
GENERATION = (
    BEGIN_ANSWER
    + f"{{%- set think, call, answer = {THINK!r}, {CALL!r}, {ANSWER!r} -%}}"
    + """
    {{- '<|im_start|>assistant\\n' -}}
    {%- set turn = namespace(over=not tools) -%}
    {%- for message in messages if tools and message.role in ('tool', 'assistant') -%}
        {%- set turn.over = message.role == 'tool' -%}
    {%- endfor -%}
    {%- if turn.over -%}
        {{- answer -}}
    {%- elif enable_thinking is defined and enable_thinking is false -%}
        {{- call -}}
    {%- else -%}
        {{- think -}}
    {%- endif -%}
{%- endif -%}
"""
)


@dataclass(frozen=True)
class Script:
    tool: str
    arguments: Mapping[str, str]
    answer: str
    thought: str = "A command does that, so I run it."
    content: str = "\n\nOne moment.\n\n"  # between thought and call

    @property
    def call(self) -> str:
        """What stands between the tokens that begin and end a call."""
        lines = [f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in self.arguments.items()]
        return f"\n<function={self.tool}>\n{''.join(lines)}</function>\n"


@dataclass
class Words:
    """Adds the words of a script to a tokenizer, and keeps which token follows which."""

    tokenizer: Tokenizer
    successors: dict[int, int] = field(default_factory=dict)

    def follow(self, *tokens: int) -> None:
        self.successors.update(pairwise(tokens))

    def add(self, text: str) -> int:
        """A token that was none before."""
        assert self.tokenizer.token_to_id(text) is None
        self.tokenizer.add_tokens([AddedToken(text, normalized=False, special=False)])
        return self.known(text)

    def known(self, text: str) -> int:
        found = self.tokenizer.token_to_id(text)
        assert found is not None, f"{text!r} is no token"
        return found

    def cut(self, text: str) -> list[int]:
        """New tokens of at least four characters each, and of as many more as it takes to be new."""
        found: list[int] = []
        while text:
            sizes = (*range(4, len(text) - 3), len(text))
            size = next(size for size in sizes if self.tokenizer.token_to_id(text[:size]) is None)
            found.append(self.add(text[:size]))
            text = text[size:]
        return found


def write_scripted_checkpoint(directory: Path, script: Script) -> None:
    words = _words(script)
    config = small_config(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=-(-words.tokenizer.get_vocab_size() // 64) * 64,
        max_position_embeddings=CONTEXT,
        eos_token_id=words.known("<|im_end|>"),
    )
    write_random_checkpoint(directory, config, shards=1)
    for file in directory.glob("*.safetensors"):
        save_file(_scripted(load_file(file), words.successors), file, metadata={"format": "pt"})
    words.tokenizer.save(str(directory / "tokenizer.json"))
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(EMBEDDED / name, directory)
    template, found, _ = (EMBEDDED / "chat_template.jinja").read_text(encoding="utf-8").partition(BEGIN_ANSWER)
    assert found, "the embedded template begins the answer otherwise than expected here"
    (directory / "chat_template.jinja").write_text(template + GENERATION, encoding="utf-8")


def _words(script: Script) -> Words:
    """Ordinary tokens follow one another by number, so that a text that is not from the script never ends."""
    words = Words(Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")))
    words.follow(*range(words.tokenizer.get_vocab_size(with_added_tokens=False)), 0)
    begin, end, stop = (words.known(text) for text in ("<tool_call>", "</tool_call>", "<|im_end|>"))
    thought, content = words.cut(script.thought), words.cut(script.content)
    words.follow(words.add(THINK), *thought, words.known("</think>"), *content, begin)
    words.follow(words.add(CALL), begin, *words.cut(script.call), end, stop)
    words.follow(words.add(ANSWER), *words.cut(script.answer), stop)
    return words


def _scripted(tensors: dict[str, Tensor], successors: Mapping[int, int]) -> dict[str, Tensor]:
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            values.zero_()  # nothing is added to the residual stream
        elif name == "lm_head.weight":
            embedding = tensors["model.embed_tokens.weight"].float()
            before, after = torch.tensor(list(successors)), torch.tensor(list(successors.values()))
            head = torch.zeros(values.shape).index_add_(0, after, embedding[before])
            values.copy_(head)
        elif name == "mtp.fc.weight":  # the drafted token's embedding and nothing of the trunk
            values.copy_(torch.eye(*values.shape))
        elif "norm" in name and "linear_attn" not in name:
            values.zero_()  # norms are stored as offsets from 1
    return tensors
