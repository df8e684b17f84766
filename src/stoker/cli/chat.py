"""`stoker chat`: a conversation in the terminal. The engine runs in its own process; this one reads and prints."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.counts import context as count_context
from stoker.cli.extras import DEVICES, need_engine
from stoker.cli.progress import error_console, output_console, phase_progress
from stoker.demo import checkpoint_at
from stoker.errors import EngineError, RequestError, StokerError
from stoker.speculate.choice import FORMS, DraftChoice

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.cli.conversation import Conversation, Reply
    from stoker.engine.event import Stats
    from stoker.engine.worker.messages import Loading
    from stoker.engine.worker.process import EngineProcess

SNAPSHOTS = 8  # recurrent states kept, so that each turn computes only its new tokens
COMMANDS = {
    "/help": "what can be typed here",
    "/reset": "begin a new conversation",
    "/stats": "tokens, steps and speed so far",
    "/exit": "leave (so does Ctrl-D)",
}
PROMPT = "\001\033[1;36m\002> \001\033[0m\002"  # 001 and 002 mark what has no width, for line editing
# What a model writes must not move the cursor, recolour the terminal or set its title.
CONTROL = dict.fromkeys(code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t")


def chat(
    model: Annotated[str, typer.Option(help="A checkpoint directory, or demo: the embedded model.")],
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, thoughts included.")] = 1024,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that make up this share.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from that many likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    draft: Annotated[str, typer.Option(help=f"{FORMS}. Changes the speed, never the text.")] = "none",
    context: Annotated[
        int,
        typer.Option(
            parser=count_context, metavar="TOKENS", help="Tokens of conversation to make room for, as 8192 or 8k."
        ),
    ] = 8192,
    device: Annotated[str, typer.Option(help=DEVICES)] = "auto",
    no_think: Annotated[bool, typer.Option("--no-think", help="Ask the model to answer without thinking.")] = False,
) -> None:
    """Talk with a model. Ctrl-C stops an answer; /help shows what else can be typed."""
    need_engine()
    from stoker.backends.device import choose_device
    from stoker.backends.family import PAGE_SIZE
    from stoker.cli.conversation import Conversation
    from stoker.engine.config import EngineConfig
    from stoker.engine.event import AUTO
    from stoker.engine.tokenizer import Tokenizer
    from stoker.engine.worker.process import EngineProcess
    from stoker.engine.worker.spec import EngineSpec
    from stoker.sampling.settings import Sampling
    from stoker.weights.model_config import ModelConfig

    directory = checkpoint_at(model)
    choice = DraftChoice.parse(draft)
    chosen = choose_device(device)
    error_console().print(chosen.said, markup=False)
    config = ModelConfig.load(directory)
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop_ids=config.eos_token_ids,
    )
    context = min(context, config.max_positions)
    engine_config = EngineConfig(pages=-(-context // PAGE_SIZE), slots=1, max_depth=choice.depth, snapshots=SNAPSHOTS)
    bar = LoadingBar()
    with EngineProcess(EngineSpec(directory, engine_config, choice, chosen.device), bar.on_loading) as engine:
        tokenizer = Tokenizer(directory)  # while the engine loads
        depth = AUTO if choice.adaptive else choice.depth
        conversation = Conversation(engine, tokenizer, sampling, context, depth, system, not no_think)
        terminal = Terminal(engine, conversation, bar, output_console())
        bar.wait(engine)
        terminal.greet(f"{Path(model).resolve().name} · {context:,} tokens of context · drafting: {draft}")
        terminal.run()


class LoadingBar:
    """A progress bar of the loading engine process."""

    def __init__(self) -> None:
        self._latest: Loading | None = None

    def on_loading(self, loading: "Loading") -> None:
        """Called from another thread; `wait` draws the bar."""
        self._latest = loading

    def wait(self, engine: "EngineProcess") -> None:
        """Waits until the engine is ready. Raises the error with which loading failed."""
        console = error_console()
        with phase_progress(console) as show:
            while True:
                with suppress(TimeoutError):
                    ready = engine.ready.result(0.1)
                    break
                if self._latest:
                    show(self._latest)
        self._latest = None
        for note in ready.notes:
            console.print(f"note: {note}", markup=False)


class Terminal:
    """Reads lines, prints answers to stdout and everything else, including thoughts, to stderr. If stdin is not a
    terminal, every line is a message and the first error ends the program."""

    def __init__(
        self, engine: "EngineProcess", conversation: "Conversation", bar: LoadingBar, console: "Console"
    ) -> None:
        self._engine, self._conversation, self._bar = engine, conversation, bar
        self._console, self._aside = console, error_console()
        self._interactive = sys.stdin.isatty()
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # invalid UTF-8 should not end the program
        if self._interactive:
            with suppress(ImportError):
                import_module("readline")  # gives input() line editing and history

    def greet(self, line: str) -> None:
        if self._interactive:
            self._say(line)
            self._say("/help shows what can be typed; Ctrl-C stops an answer, Ctrl-D leaves.\n")

    def run(self) -> None:
        for line in self._lines():
            try:
                if not re.fullmatch(r"/\w+", line):
                    self._turn(line)
                elif line == "/exit":
                    return
                else:
                    self._run_command(line)
            except StokerError as error:
                if not self._interactive:
                    raise
                self._show_error(error)
            if self._interactive:
                self._console.print()

    def _show_error(self, error: StokerError) -> None:
        self._aside.print("[bold red]error:[/]", end=" ")
        self._aside.print(str(error), markup=False, soft_wrap=True)
        if isinstance(error, EngineError):
            self._say("Restarting the engine; the conversation is kept, the last message is not.")
            self._engine.restart()
            self._bar.wait(self._engine)

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                line = input(PROMPT if self._interactive else "").strip()
            except EOFError:
                if self._interactive:
                    self._console.print()
                return
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._say("\nNothing is running. /exit or Ctrl-D leaves.\n")
                continue
            if line:
                yield line

    def _run_command(self, command: str) -> None:
        if command not in COMMANDS:
            raise RequestError(f"unknown command {command}; known commands: {', '.join(COMMANDS)}.")
        if command == "/help":
            for name, meaning in COMMANDS.items():
                self._say(f"{name:8}{meaning}")
            self._say("Ctrl-C  stop the answer that is being written")
        elif command == "/reset":
            self._conversation.reset()
            self._say("A new conversation.")
        else:
            self._say(self._totals())

    def _turn(self, text: str) -> None:
        reply = None
        try:
            reply = self._conversation.ask(text)
            self._print(reply)
        except KeyboardInterrupt:
            if reply is None:
                return self._say("stopped before it began")
            reply.stop()
            self._print(reply)
        self._conversation.keep(text, reply)
        return self._say(_summary(reply))

    def _print(self, reply: "Reply") -> None:
        thinking = False
        for piece in reply:
            if thinking and not piece.thought:
                self._aside.print("\n")
            thinking = piece.thought
            console, style = (self._aside, "dim italic") if thinking else (self._console, None)
            console.out(piece.text.translate(CONTROL), style=style, end="", highlight=False)
        (self._aside if thinking else self._console).print()

    def _totals(self) -> str:
        costs = self._conversation.costs
        taken, made = sum(cost.prompt_tokens for cost in costs), sum(cost.output_tokens for cost in costs)
        cached = sum(cost.cached_tokens for cost in costs)
        answers = "1 answer" if len(costs) == 1 else f"{len(costs)} answers"
        return f"{answers} · {taken:,} tokens in ({cached:,} cached), {made:,} out · {_speed(costs)}"

    def _say(self, line: str) -> None:
        self._aside.print(line, style="dim", markup=False, soft_wrap=True)


def _summary(reply: "Reply") -> str:
    cost = reply.stats
    ended = {"length": ["cut off"], "cancelled": ["stopped"]}
    parts = [
        f"{cost.output_tokens:,} tokens",
        _speed([cost]),
        f"{cost.prompt_tokens:,} in ({cost.cached_tokens:,} cached)",
        f"{cost.queue_s + cost.prefill_s:.2f} s to first",
        *ended.get(reply.finish.value if reply.finish else "", []),
    ]
    return " · ".join(parts)


def _speed(costs: Sequence["Stats"]) -> str:
    """Decoding speed. The first token of an answer comes from prefill and is not counted."""
    made = sum(cost.output_tokens - 1 for cost in costs if cost.output_tokens)
    steps, seconds = sum(cost.steps for cost in costs), sum(cost.decode_s for cost in costs)
    return f"{made / seconds:.1f} tokens/s · {made / steps:.2f} tokens/step" if steps else "no steps"
