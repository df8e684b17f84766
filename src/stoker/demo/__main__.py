"""`make demo`: runs a small model of the real architecture and checks it against transformers, in one table.

The weights are random, so the text is noise; the network, its loading and its exactness are the real thing.
"""

import logging
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from stoker.cli.generate import load_with_progress
from stoker.demo.random_checkpoint import small_config, write_random_checkpoint
from stoker.demo.tokenizer import write_byte_tokenizer
from stoker.engine.generate import Timing, generate
from stoker.engine.tokenizer import Tokenizer
from stoker.model.load import load_model
from stoker.speculate.sampling import Sampling

PROMPTS = {
    "JSON": '{"invoice": "2026-0117", "lines": [{"item": "paper, A4", "quantity": 3, "price": 4.20}], "total": ',
    "code": "def mean(values: list[float]) -> float:\n    if not values:\n        raise ValueError(",
    "prose": "The harbour was quiet in the morning, and the boats that had come in during the night lay ",
    "agent": "<tool_call>\n<function=read_file>\n<parameter=path>\nsrc/main.py\n</parameter>\n</function>\n",
}
TOKENS = 48


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
        write_byte_tokenizer(directory)
        loaded = load_with_progress(directory)
        parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
        console.print(
            f"A Qwen3.5-style hybrid (6 GatedDeltaNet + 2 attention layers, 16 experts, MTP head, "
            f"{parameters / 1e6:.1f} M parameters). [bold]Its weights are random[/]: a trained model is not embedded "
            "yet, so watch the numbers, not the text.\n"
        )
        console.print(_compare(directory, console))
        console.print(
            "Measured here, in fp32 on this CPU, batch 1, greedy, no drafting. "
            "'identical' counts tokens equal to those of transformers' generate on the same checkpoint."
        )


def _compare(directory: Path, console: Console) -> Table:
    from transformers import AutoModelForCausalLM

    for name in ("transformers", "transformers.modeling_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
    tokenizer = Tokenizer(directory)
    ours = load_model(directory, dtype=torch.float32).model
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    table = Table("prompt", "prompt tokens", "Stoker tokens/s", "transformers tokens/s", "identical")
    warm_up = tokenizer.encode("warm up")
    list(generate(ours, warm_up, Sampling(2)))
    theirs.generate(torch.tensor([warm_up]), max_new_tokens=2, do_sample=False, eos_token_id=None)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for kind in bar.track(PROMPTS, description="generating"):
            ids = tokenizer.encode(PROMPTS[kind])
            timing = Timing()
            mine = list(generate(ours, ids, Sampling(TOKENS), timing))
            started = time.perf_counter()
            reply = theirs.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
            elapsed = time.perf_counter() - started
            other = reply[0, len(ids) :].tolist()
            equal = sum(a == b for a, b in zip(mine, other, strict=True))
            own_rate = TOKENS / (timing.prefill_s + timing.decode_s)
            table.add_row(kind, str(len(ids)), f"{own_rate:.1f}", f"{TOKENS / elapsed:.1f}", f"{equal} of {TOKENS}")
    return table


if __name__ == "__main__":
    main()
