"""`make demo`: the embedded model answers on this CPU, plainly and with every way of drafting, and is compared token
for token."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from stoker.demo import EMBEDDED, prompts
from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.request import AUTO
from stoker.engine.tokenizer import Tokenizer
from stoker.model.cache import PAGE_SIZE
from stoker.model.load import Loaded, load_model
from stoker.speculate.choice import DraftChoice
from stoker.speculate.sampling import Sampling

PLAIN = "none"
METHODS = {PLAIN: "plain", "mtp:3": "MTP, 3", "dflash:12": "DFlash, 12", "lookup:8": "lookup, 8"}
METHODS |= {"lookup+mtp:auto": "lookup+MTP, auto", "lookup+dflash:auto": "lookup+DFlash, auto"}
KINDS = ("JSON", "agent", "code", "prose")
PER_KIND, TOKENS = 4, 128


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
    console.print(
        "The embedded model: a Qwen3.5-style hybrid (6 GatedDeltaNet + 2 attention layers, 4 of 16 experts) with MTP "
        "head and DFlash drafter, in INT4, FP8, INT8 and BF16. What it was trained on and what it can do: "
        "src/stoker/demo/MODEL_CARD.md\n"
    )
    loaded, tokenizer = load_model(EMBEDDED), Tokenizer(EMBEDDED)
    asked = {kind: [tokenizer.encode(text) for text in prompts()[kind][:PER_KIND]] for kind in KINDS}
    outcomes: dict[str, dict[str, Outcome]] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("answering", total=len(KINDS) * len(METHODS) * PER_KIND)
        _answers(loaded, PLAIN, {"JSON": asked["JSON"][:1]}, lambda: None)  # warms up
        for method in METHODS:
            outcomes[method] = _answers(loaded, method, asked, lambda: bar.advance(task))
    question = prompts()["JSON"][0].partition("user\n")[2].partition("<|im_end|>")[0]
    console.print(question, markup=False, style="dim")
    console.print(f"\n{tokenizer.decode(outcomes[PLAIN]['JSON'].answers[0])}\n", markup=False)
    console.print(_table(outcomes))
    console.print(
        f"Measured here, on this CPU: batch 1, greedy, {PER_KIND} unseen prompts of each kind, up to {TOKENS} tokens "
        "each, decoding only. 'identical' compares every token with plain decoding."
    )


def _answers(
    loaded: Loaded, method: str, asked: dict[str, list[list[int]]], advance: Callable[[], None]
) -> dict[str, Outcome]:
    """All prompts, one after the other, through one engine: what it learns about drafting it keeps."""
    choice = DraftChoice.parse(method)
    longest = max(len(prompt) for texts in asked.values() for prompt in texts)
    pages = -(-(longest + TOKENS) // PAGE_SIZE)
    drafter = choice.build(loaded.model, EMBEDDED, pages, 1)
    engine = Engine(loaded.model, EngineConfig(pages=pages, slots=1, max_depth=choice.depth), drafter)
    sampling = Sampling(max_tokens=TOKENS, stop_ids=loaded.config.eos_token_ids)
    found = {}
    for kind, texts in asked.items():
        found[kind] = Outcome()
        for text in texts:
            engine.submit(text, sampling, AUTO if choice.adaptive else choice.depth)
            answer: list[int] = []
            while not engine.idle:
                for event in engine.step():
                    answer += event.tokens
                    if event.stats:
                        found[kind].steps += event.stats.steps
                        found[kind].seconds += event.stats.decode_s
            found[kind].answers.append(answer)
            advance()
    return found


def _table(outcomes: dict[str, dict[str, Outcome]]) -> Table:
    table = Table(title="decoding with the embedded model", box=SIMPLE, pad_edge=False)
    table.add_column("text", no_wrap=True, min_width=5)
    table.add_column("drafting", no_wrap=True)
    for name in ("tok/s", "steps/s", "tok/step", "speedup"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("identical", justify="right", no_wrap=True)
    for kind in KINDS:
        plain = outcomes[PLAIN][kind]
        for method, name in METHODS.items():
            found = outcomes[method][kind]
            pairs = [zip(a, b, strict=False) for a, b in zip(found.answers, plain.answers, strict=True)]
            same = sum(a == b for pair in pairs for a, b in pair)
            rate = found.tokens / found.seconds
            table.add_row(
                kind if method == PLAIN else "",
                name,
                f"{rate:.0f}",
                f"{found.steps / found.seconds:.0f}",
                f"{found.tokens / found.steps:.2f}",
                f"{rate / (plain.tokens / plain.seconds):.2f}",
                f"{same}/{sum(map(len, plain.answers))}",
                end_section=method == list(METHODS)[-1],
            )
    return table


if __name__ == "__main__":
    main()
