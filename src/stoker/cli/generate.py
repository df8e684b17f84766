"""`stoker generate`: answers one prompt, with the engine in this process."""

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.extras import DEVICES, need_engine
from stoker.cli.progress import error_console, phase_progress
from stoker.demo import checkpoint_at
from stoker.server.output.answer import ReasoningSplitter
from stoker.speculate.choice import FORMS, DraftChoice

if TYPE_CHECKING:
    from stoker.engine.engine import Engine
    from stoker.engine.worker.spec import Buildable


def generate(
    model: Annotated[str, typer.Option(help="A checkpoint directory, or demo: the embedded model.")],
    prompt: Annotated[str, typer.Option(help="The text to continue, or with --chat the user's message.")],
    max_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that make up this share.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from that many likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given several times.")] = None,
    draft: Annotated[str, typer.Option(help=f"{FORMS}. Changes the speed, never the text.")] = "none",
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    device: Annotated[str, typer.Option(help=DEVICES)] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Continue a text, or answer a message with --chat."""
    need_engine()
    from stoker.backends.device import choose_device
    from stoker.backends.family import PAGE_SIZE
    from stoker.cli.conversation import prompt_opens_thought
    from stoker.engine.config import EngineConfig, check_request
    from stoker.engine.event import AUTO
    from stoker.engine.tokenizer import Tokenizer
    from stoker.engine.worker.spec import EngineSpec
    from stoker.sampling.settings import Sampling
    from stoker.weights.model_config import ModelConfig

    directory = checkpoint_at(model)
    sampling = Sampling(  # validates the numbers before anything is loaded
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ())
    )
    choice = DraftChoice.parse(draft)
    model_config = ModelConfig.load(directory)
    tokenizer = Tokenizer(directory)
    sampling = replace(sampling, stop_ids=model_config.eos_token_ids)
    ids = tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
    check_request(model_config, ids, sampling)
    chosen = choose_device(device)
    error_console().print(chosen.said, markup=False)

    pages = -(-(len(ids) + max_tokens) // PAGE_SIZE)
    config = EngineConfig(pages=pages, slots=1, max_depth=choice.depth)
    engine = _built(EngineSpec(directory, config, choice, chosen.device))
    engine.submit(ids, sampling, AUTO if choice.adaptive else choice.depth)

    prefill_s = decode_s = 0.0
    steps = 0
    produced: list[int] = []
    stream = tokenizer.stream(sampling.stop)
    answer = Answer(chat, chat and prompt_opens_thought(tokenizer, ids), quiet=as_json)
    while not engine.idle:
        started, decoding = time.perf_counter(), bool(produced)
        events = engine.step()
        if decoding:
            decode_s += time.perf_counter() - started
            steps += 1
        else:  # the first token comes from prefill
            prefill_s += time.perf_counter() - started
        for event in events:
            for token in event.tokens:
                produced.append(token)
                answer.push(stream.push(token))
            if event.failure:
                raise event.failure
    answer.push(stream.flush())
    answer.finish()
    steps_per_s = steps / decode_s if steps else 0.0
    accepted = (len(produced) - 1) / steps if steps else 0.0
    if as_json:
        result = {
            "text": answer.text,
            **({"reasoning": answer.thought} if chat else {}),
            "token_ids": produced,
            "prompt_tokens": len(ids),
            "completion_tokens": len(produced),
            "steps": steps,
            "accepted_per_step": accepted,
            "tokens_per_s": steps_per_s * accepted,
            "steps_per_s": steps_per_s,
        }
        typer.echo(json.dumps(result))
        return
    typer.echo()
    typer.echo(
        f"{len(ids)} tokens in, {len(produced)} out; prefill {prefill_s:.2f} s, "
        f"then {steps_per_s * accepted:.1f} tokens/s at {accepted:.2f} tokens per step",
        err=True,
    )


class Answer:
    """Text as it is made. In a chat thoughts go to stderr, the answer to stdout, and the tags around them nowhere."""

    def __init__(self, chat: bool, thinking: bool, quiet: bool) -> None:
        self._splitter = ReasoningSplitter(thinking) if chat else None
        self._quiet = quiet
        self.text = self.thought = ""

    def push(self, piece: str) -> None:
        self._show(*(self._splitter.push(piece) if self._splitter else ("", piece)))

    def finish(self) -> None:
        if self._splitter:
            self._show(*self._splitter.flush())

    def _show(self, thought: str, text: str) -> None:
        if not self._quiet:
            if thought:
                typer.secho(thought, nl=False, err=True, dim=True)
            if text and self.thought + thought and not self.text:
                typer.echo("\n", err=True)
            typer.echo(text, nl=False)
        self.thought += thought
        self.text += text


def _built(spec: "Buildable") -> "Engine":
    """The engine, made under a progress bar; prints its notes."""
    console = error_console()
    with phase_progress(console) as show:
        built = spec.build(show)
    for note in built.notes:
        console.print(f"note: {note}", markup=False)
    return built.engine
