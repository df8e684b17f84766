"""What a turn of an agent costs when its context is cached, generated text included, and how often the answer agrees
with that of a cold start.

    python -m benchmarks.server.turns [--turns 8] [--tokens 96] [--json]

A conversation on the embedded model: a question, then turns of generated text and a tool's result. Each turn is asked
of an engine that has seen the conversation, and of a new one. Cached prompt text gives the bits of a cold start; text
the model itself generated was computed as steps, which round differently from a prefill, so agreement is a rate.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from itertools import takewhile

import torch

from stoker.backends.cpu.build import cpu_backend
from stoker.backends.family import PAGE_SIZE
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_model
from stoker.demo import EMBEDDED, prompts
from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.event import Stats
from stoker.engine.prefix_cache import message_boundaries
from stoker.engine.tokenizer import Tokenizer
from stoker.sampling.settings import Sampling
from stoker.speculate.choice import DraftChoice

DEPTH = 3


@dataclass(frozen=True)
class Turn:
    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int
    first_token_s: float
    cold_first_token_s: float
    output_tokens: int
    same_as_cold: int  # tokens up to the first that differs


def new_engine(model: Decoder, tokens: int, snapshots: int) -> Engine:
    pages = 2 * (-(-tokens // PAGE_SIZE)) + 1
    config = EngineConfig(pages, slots=1, max_depth=DEPTH, snapshots=snapshots, snapshot_interval=512)
    return Engine(config, *cpu_backend(model, config, DraftChoice.parse(f"mtp:{DEPTH}"), EMBEDDED))


def ask(engine: Engine, prompt: list[int], boundaries: list[int], tokens: int) -> tuple[list[int], Stats]:
    engine.submit(prompt, Sampling(max_tokens=tokens), DEPTH, boundaries)
    answer: list[int] = []
    while not engine.idle:
        for event in engine.step():
            answer += event.tokens
            if event.stats:
                stats = event.stats
    return answer, stats


def measure(turns: int, tokens: int) -> list[Turn]:
    model, tokenizer = load_model(EMBEDDED).model, Tokenizer(EMBEDDED)
    start = tokenizer.encode("<|im_start|>")[0]
    results = [tokenizer.encode(text)[:400] for text in prompts()["code"]]
    text = tokenizer.encode("<|im_start|>user\nRead the files and say what they do.<|im_end|>\n")
    opening = tokenizer.encode("<|im_start|>assistant\n<think>\n")
    room = min(model.config.max_positions, len(text) + turns * (tokens + 500))
    warm = new_engine(model, room, snapshots=16)
    found = []
    for number in range(turns):
        prompt = text + opening
        if len(prompt) + tokens > room:
            break
        boundaries = message_boundaries(prompt, start)
        answer, stats = ask(warm, prompt, boundaries, tokens)
        cold_answer, cold = ask(new_engine(model, room, snapshots=0), prompt, [], tokens)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer, cold_answer, strict=False)))
        found.append(
            Turn(
                stats.prompt_tokens,
                stats.cached_tokens,
                stats.prefill_tokens,
                stats.prefill_s,
                cold.prefill_s,
                stats.output_tokens,
                same,
            )
        )
        result = tokenizer.encode("<|im_end|>\n<|im_start|>user\n<tool_response>\n")
        text = prompt + answer + result + results[number % len(results)]
        text += tokenizer.encode("\n</tool_response><|im_end|>\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    turns = measure(arguments.turns, arguments.tokens)
    agreement = sum(turn.same_as_cold for turn in turns) / sum(turn.output_tokens for turn in turns)
    if arguments.json:
        print(json.dumps({"agreement": agreement, "turns": [asdict(turn) for turn in turns]}))
        return
    print("turn  prompt  cached  computed  first token s  cold s  same as cold")
    for number, turn in enumerate(turns, start=1):
        print(
            f"{number:4d}  {turn.prompt_tokens:6,d}  {turn.cached_tokens:6,d}  {turn.prefill_tokens:8,d}  "
            f"{turn.first_token_s:13.3f}  {turn.cold_first_token_s:6.3f}  "
            f"{turn.same_as_cold:4d} of {turn.output_tokens}"
        )
    print(f"tokens up to the first difference from a cold start: {agreement:.1%}")


if __name__ == "__main__":
    main()
