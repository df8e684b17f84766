"""How many tokens a prompt has, by the server that will read it; never estimated from its length.

In this order: the server's /tokenize (vLLM, SGLang, Stoker; llama.cpp with its own template endpoint), a tokenizer file
given with --tokenizer, or the `usage` of requests for a single token, which every server has.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import BenchError

if TYPE_CHECKING:
    from stoker.bench.target import Target

SAMPLE = [{"role": "user", "content": "How many tokens is this?"}]


class Refused(BenchError):
    """The server answered with an error."""


class Counter:
    """Counts a chat as the server would render it, and plain text."""

    how = "none"
    exact = True  # whether `chat` is what the server will find, template included
    cheap = True  # whether a count costs no generation

    async def chat(self, body: dict[str, Any]) -> int:
        raise NotImplementedError

    async def text(self, text: str) -> int | None:
        raise NotImplementedError


class TokenizeEndpoint(Counter):
    """POST /tokenize as vLLM defines it: messages or a prompt."""

    how = "server's /tokenize"

    def __init__(self, target: "Target") -> None:
        self._target = target

    async def chat(self, body: dict[str, Any]) -> int:
        if "prompt" in body:
            return int(await self.text(body["prompt"]) or 0)
        asked = {"model": self._target.model, "messages": body["messages"], "add_generation_prompt": True}
        asked |= {key: body[key] for key in ("tools", "chat_template_kwargs") if key in body}
        return _length(await self._target.post("/tokenize", asked))

    async def text(self, text: str) -> int | None:
        asked = {"model": self._target.model, "prompt": text, "add_special_tokens": False}
        return _length(await self._target.post("/tokenize", asked))


class LlamaCpp(Counter):
    """llama.cpp: /apply-template renders, /tokenize takes `content`."""

    how = "server's /apply-template and /tokenize"

    def __init__(self, target: "Target") -> None:
        self._target = target

    async def chat(self, body: dict[str, Any]) -> int:
        if "prompt" in body:
            return int(await self.text(body["prompt"]) or 0)
        asked: dict[str, Any] = {key: body[key] for key in ("messages", "tools", "chat_template_kwargs") if key in body}
        rendered = await self._target.post("/apply-template", asked)
        found = await self._target.post("/tokenize", {"content": rendered["prompt"], "add_special": True})
        return _length(found)

    async def text(self, text: str) -> int | None:
        return _length(await self._target.post("/tokenize", {"content": text, "add_special": False}))


class TokenizerFile(Counter):
    """A tokenizer.json on this machine. One short request shows how many tokens the template adds."""

    exact = False

    def __init__(self, path: Path, target: "Target") -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise BenchError(
                "--tokenizer needs the tokenizers package; install it with: pip install tokenizers"
            ) from error
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise BenchError(f"--tokenizer {path}: there is no tokenizer.json there")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises no narrower class
            raise BenchError(f"--tokenizer {path}: {file.name} cannot be read: {error}") from error
        self._target = target
        self._added: int | None = None
        self.how = f"tokenizer file {file.name}, template measured once"

    async def chat(self, body: dict[str, Any]) -> int:
        if "prompt" in body:
            return self._count(body["prompt"])
        if self._added is None:
            self._added = await self._target.prompt_tokens({"messages": SAMPLE}) - self._count(SAMPLE[0]["content"])
        said = [str(message.get("content") or "") for message in body["messages"]]
        return self._added + sum(self._count(text) for text in said)

    async def text(self, text: str) -> int | None:
        return self._count(text)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


class UsageProbe(Counter):
    """A request for one token tells in its `usage` how long the prompt was."""

    how = "usage of one-token requests"
    cheap = False

    def __init__(self, target: "Target") -> None:
        self._target = target

    async def chat(self, body: dict[str, Any]) -> int:
        return await self._target.prompt_tokens(body)

    async def text(self, text: str) -> int | None:
        return None


async def find_counter(target: "Target", tokenizer: Path | None) -> Counter:
    if tokenizer is not None:
        return TokenizerFile(tokenizer, target)
    candidates: tuple[Callable[[], Counter], ...] = (lambda: TokenizeEndpoint(target), lambda: LlamaCpp(target))
    for make in candidates:
        counter = make()
        try:
            if await counter.chat({"messages": SAMPLE}) > 0:
                return counter
        except (BenchError, KeyError, TypeError):
            continue
    return UsageProbe(target)


def _length(found: Any) -> int:
    if isinstance(found.get("count"), int):
        return int(found["count"])
    return len(found["tokens"])
