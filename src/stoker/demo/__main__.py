"""`make demo`: runs a small model of the real architecture, checks it against transformers, and drafts with it.

The weights are random, so the text is noise and drafts are rarely right; the network, its loading, drafting and
exactness are the real thing.
"""

import logging
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from stoker.demo.random_checkpoint import (
    small_config,
    small_drafter_config,
    write_random_checkpoint,
    write_random_drafter,
)
from stoker.demo.tokenizer import write_byte_tokenizer
from stoker.engine.generate import Timing, generate
from stoker.engine.tokenizer import Tokenizer
from stoker.model.decoder import Decoder
from stoker.model.load import load_model
from stoker.speculate.choice import DRAFTER_FOLDER, DraftChoice
from stoker.speculate.sampling import Sampling

PROMPTS = {
    "JSON": '{"invoice": "2026-0117", "lines": [{"item": "paper, A4", "quantity": 3, "price": 4.20}], "total": ',
    "code": "def mean(values: list[float]) -> float:\n    if not values:\n        raise ValueError(",
    "prose": "The harbour was quiet in the morning, and the boats that had come in during the night lay ",
    "agent": "<tool_call>\n<function=read_file>\n<parameter=path>\nsrc/main.py\n</parameter>\n</function>\n",
}
DRAFTS = ("mtp:2", "dflash:4", "lookup:4")
TOKENS = 48

Prompts = dict[str, list[int]]  # token ids by kind


def main() -> None:
    console = Console(highlight=False)
    config = small_config(
        hidden_size=256, num_hidden_layers=8, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=128,
        shared_expert_intermediate_size=128, head_dim=64, linear_num_value_heads=8, linear_key_head_dim=64,
        linear_value_head_dim=64, vocab_size=1024,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="stoker-demo-") as folder:
        directory = Path(folder)
        write_random_checkpoint(directory, config)
        write_random_drafter(directory / DRAFTER_FOLDER, small_drafter_config(config))
        write_byte_tokenizer(directory)
        model = load_model(directory, dtype=torch.float32).model
        parameters = sum(parameter.numel() for parameter in model.parameters())
        console.print(
            f"A Qwen3.5-style hybrid (6 GatedDeltaNet + 2 attention layers, 16 experts, MTP head, "
            f"{parameters / 1e6:.1f} M parameters) and a DFlash drafter. [bold]Their weights are random[/]: a trained "
            "model is not embedded yet, so watch the numbers, not the text.\n"
        )
        tokenizer = Tokenizer(directory)
        prompts = {kind: tokenizer.encode(text) for kind, text in PROMPTS.items()}
        table = Table("prompt", "Stoker\ntokens/s", "transformers\ntokens/s", "identical", title="plain decoding")
        drafting = Table("prompt", *(f"{draft}\ntokens/step" for draft in DRAFTS), "identical", title="drafting")
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("generating", total=len(PROMPTS) * (2 + len(DRAFTS)))
            answers = _plain(model, directory, prompts, table, partial(bar.advance, task))
            _drafted(model, directory, prompts, answers, drafting, partial(bar.advance, task))
        console.print(table)
        console.print(drafting)
        console.print(
            f"Measured here: fp32 on this CPU, batch 1, greedy, {TOKENS} tokens each. 'identical' counts tokens equal "
            "to those of transformers' generate, and to those of plain decoding. Random drafters are rarely right, and "
            "lookup only where the noise repeats itself; a wrong draft costs time and never changes a token."
        )


def _plain(model: Decoder, directory: Path, prompts: Prompts, table: Table, advance: Callable[[int], None]) -> Prompts:
    """Stoker beside transformers on the same checkpoint. -> answers by prompt."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for name in ("transformers", "transformers.modeling_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    answers = {}
    for kind, ids in {"warm up": [1, 2, 3], **prompts}.items():
        timing = Timing()
        answers[kind] = list(generate(model, ids, Sampling(max_tokens=TOKENS), timing))
        started = time.perf_counter()
        reply = theirs.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        elapsed = time.perf_counter() - started
        if kind not in prompts:
            continue
        equal = sum(a == b for a, b in zip(answers[kind], reply[0, len(ids) :].tolist(), strict=True))
        rate = TOKENS / (timing.prefill_s + timing.decode_s)
        table.add_row(kind, f"{rate:.1f}", f"{TOKENS / elapsed:.1f}", f"{equal} of {TOKENS}")
        advance(2)
    return answers


def _drafted(
    model: Decoder, directory: Path, prompts: Prompts, answers: Prompts, table: Table, advance: Callable[[int], None]
) -> None:
    for kind, ids in prompts.items():
        cells, equal = [], 0
        for draft in DRAFTS:
            choice, timing = DraftChoice.parse(draft), Timing()
            build = partial(choice.build, model, directory)
            answer = list(generate(model, ids, Sampling(max_tokens=TOKENS), timing, choice.depth, build))
            cells.append(f"{(TOKENS - 1) / timing.steps:.2f}")
            equal += sum(a == b for a, b in zip(answer, answers[kind], strict=True))
            advance(1)
        table.add_row(kind, *cells, f"{equal} of {TOKENS * len(DRAFTS)}")


if __name__ == "__main__":
    main()
