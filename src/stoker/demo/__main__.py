"""`make demo`: the embedded model answers on this CPU, plainly and with every way of drafting, and is compared token
for token."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from stoker.demo import EMBEDDED, prompts
from stoker.engine.generate import Timing, generate
from stoker.engine.request import AUTO
from stoker.engine.tokenizer import Tokenizer
from stoker.model.load import Loaded, load_model
from stoker.speculate.choice import DraftChoice
from stoker.speculate.sampling import Sampling

METHODS = {"none": "plain", "mtp:3": "MTP, 3 deep", "dflash:12": "DFlash, 12 deep", "lookup:8": "lookup, 8 deep"}
METHODS |= {"lookup+mtp:auto": "lookup + MTP, adaptive", "lookup+dflash:auto": "lookup + DFlash, adaptive"}
TITLES = {"JSON": "invoice to JSON", "agent": "tool call, third turn", "code": "Python", "prose": "a novel"}
PER_KIND, TOKENS = 4, 96


@dataclass
class Outcome:
    """One way of drafting on all prompts of a kind."""

    answers: list[list[int]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Those that steps made; the first of an answer comes out of prefill."""
        return sum(len(answer) - 1 for answer in self.answers)


def main() -> None:
    console = Console(highlight=False)
    loaded = load_model(EMBEDDED)
    parameters = 37.1  # million, trunk, MTP head and drafter: MODEL_CARD.md
    console.print(
        f"The embedded model: a Qwen3.5-style hybrid (6 GatedDeltaNet + 2 attention layers, 4 of 16 experts) with MTP "
        f"head and DFlash drafter, {parameters} M parameters in INT4, FP8, INT8 and BF16. What it was trained on and "
        "what it can do: src/stoker/demo/MODEL_CARD.md\n"
    )
    tokenizer = Tokenizer(EMBEDDED)
    asked = {kind: [tokenizer.encode(text) for text in prompts()[kind][:PER_KIND]] for kind in TITLES}
    outcomes: dict[tuple[str, str], Outcome] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("answering", total=len(TITLES) * len(METHODS) * PER_KIND)
        _answer(loaded, "lookup+mtp:auto", asked["JSON"][:1], lambda: None)  # warms up
        for kind, texts in asked.items():
            for method in METHODS:
                outcomes[kind, method] = _answer(loaded, method, texts, partial(bar.advance, task, 1))
    console.print(_example(tokenizer, asked["JSON"][0], outcomes["JSON", "none"].answers[0]), markup=False)
    console.print(_table(outcomes))
    console.print(
        f"Measured here, on this CPU: batch 1, greedy, {PER_KIND} unseen prompts of each kind, up to {TOKENS} "
        "tokens each, decoding only. 'identical' compares every token with plain decoding."
    )


def _answer(loaded: Loaded, method: str, texts: list[list[int]], advance: Callable[[], None]) -> Outcome:
    choice, outcome = DraftChoice.parse(method), Outcome()
    sampling = Sampling(max_tokens=TOKENS, stop_ids=loaded.config.eos_token_ids)
    for text in texts:
        timing = Timing()
        depth = AUTO if choice.adaptive else choice.depth
        build = partial(choice.build, loaded.model, EMBEDDED)
        outcome.answers.append(list(generate(loaded.model, text, sampling, timing, depth, build)))
        outcome.steps += timing.steps
        outcome.seconds += timing.decode_s
        advance()
    return outcome


def _example(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    return f"{tokenizer.decode(prompt).strip()}\n\n{tokenizer.decode(answer).strip()}\n"


def _table(outcomes: dict[tuple[str, str], Outcome]) -> Table:
    table = Table("text", "drafting", title="decoding with the embedded model")
    for name in ("tokens/s", "steps/s", "tokens\nper step", "speed-up", "identical"):
        table.add_column(name, justify="right")
    for kind, title in TITLES.items():
        plain = outcomes[kind, "none"]
        for method, name in METHODS.items():
            found = outcomes[kind, method]
            pairs = [zip(a, b, strict=False) for a, b in zip(found.answers, plain.answers, strict=True)]
            same = sum(a == b for pair in pairs for a, b in pair)
            rate = found.tokens / found.seconds
            table.add_row(
                title if method == "none" else "",
                name,
                f"{rate:.0f}",
                f"{found.steps / found.seconds:.0f}",
                f"{found.tokens / found.steps:.2f}",
                f"{rate / (plain.tokens / plain.seconds):.2f}x",
                f"{same} of {sum(map(len, plain.answers))}",
                end_section=method == list(METHODS)[-1],
            )
    return table


if __name__ == "__main__":
    main()
