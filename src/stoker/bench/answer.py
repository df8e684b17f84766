"""What came back for one request: text, tokens per chunk, usage, speculation statistics, or why it failed.

Reads OpenAI chat and text completions as streamed by vLLM, SGLang, llama.cpp, TensorRT-LLM, Stoker and cloud APIs.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from stoker.bench.record import Failure
from stoker.bench.wire import Exchange, json_events
from stoker.speculate.assumed import LABEL

MESSAGE_LIMIT = 2000  # characters kept of a server's error


@dataclass
class Chunk:
    """An event that carried tokens."""

    at: float
    text: str
    ids: list[int] | None
    usage: int | None  # completion tokens so far, where the server streams them (continuous_usage_stats)
    tokens: int = 0  # filled in by `count`


@dataclass
class Answer:
    chunks: list[Chunk] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)  # by index: name, arguments
    finish_reason: str = ""
    usage: dict[str, Any] | None = None
    speculation: dict[str, Any] | None = None
    failure: Failure | None = None
    tokens: int | None = None  # all that were generated, hidden reasoning included
    source: str = "none"
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Everything the model wrote, tool calls included."""
        return self.reasoning + self.content + "".join(c["name"] + c["arguments"] for c in self.calls.values())

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.ids or ()]

    @property
    def digest(self) -> str:
        ids = self.ids
        said = json.dumps(ids) if ids else self.text
        return hashlib.sha256(said.encode()).hexdigest()

    def usage_number(self, *path: str) -> int | None:
        found: Any = self.usage
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, int) else None


def read(exchange: Exchange) -> Answer:
    """JSON can hold half a character, which no file can; a server that cuts one in two gets it back whole."""
    answer = _read(exchange)
    answer.content, answer.reasoning = _whole(answer.content), _whole(answer.reasoning)
    answer.calls = {index: {key: _whole(said) for key, said in call.items()} for index, call in answer.calls.items()}
    answer.finish_reason = answer.finish_reason and _whole(answer.finish_reason)
    if answer.failure:
        answer.failure = Failure(answer.failure.kind, answer.failure.status, _whole(answer.failure.message))
    return answer


def _whole(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read(exchange: Exchange) -> Answer:
    answer = Answer()
    if exchange.status != 200:
        answer.failure = _http_failure(exchange)
        return answer
    ended = False
    try:
        for at, event in json_events(exchange.pieces):
            if event is None:
                ended = True
            elif event.get("error") or event.get("object") == "error":
                answer.failure = Failure("error in stream", 200, _error_message(event))
                return answer
            else:
                _take(answer, at, event)
    except ValueError as error:
        answer.failure = Failure("malformed", 200, str(error)[:MESSAGE_LIMIT])
    if exchange.failure:
        came = f"{len(answer.chunks)} chunks with tokens had come"
        answer.failure = Failure(exchange.failure, 200, f"{exchange.reason}; {came}")
    elif answer.failure is None and not ended and not answer.finish_reason:
        body = exchange.body[:200].decode("utf-8", "replace")
        message = "the stream ended without finish_reason and without [DONE]"
        if not answer.chunks:
            message += f"; it began: {body}" if body else "; it was empty"
        answer.failure = Failure("closed early" if answer.chunks else "malformed", 200, message)
    elif answer.failure is None and not answer.chunks:
        answer.failure = Failure("empty", 200, f"an answer without a token; finish_reason {answer.finish_reason!r}")
    return answer


def count(answer: Answer, text_tokens: int | None = None) -> None:
    """Set the tokens of each chunk and their sum, from the best source available.

    `text_tokens` is the number of tokens in the answer's text by the server's tokenizer, if `needs_tokenizer`.
    """
    chunks, claimed = answer.chunks, answer.usage_number("completion_tokens")
    if not chunks:
        return
    if all(chunk.ids for chunk in chunks):
        for chunk in chunks:
            chunk.tokens = len(chunk.ids or ())
        answer.tokens, answer.source = sum(chunk.tokens for chunk in chunks), "token_ids"
        if claimed is not None and abs(claimed - answer.tokens) > max(1, answer.tokens // 50):
            answer.notes.append(f"usage claims {claimed} tokens, {answer.tokens} token ids came: ids are counted")
        return
    running = [chunk.usage for chunk in chunks]
    if claimed is None and running[-1] is not None:
        claimed = running[-1]
    # reasoning that was billed but not streamed precedes the first chunk, so it is no part of decoding
    hidden = answer.usage_number("completion_tokens_details", "reasoning_tokens") or 0
    hidden = hidden if claimed is not None and not answer.reasoning and hidden < claimed else 0
    shown = None if claimed is None else claimed - hidden
    # the markup around a tool call costs tokens but is not in the text, which then is only a lower bound
    most = float("inf") if answer.calls else 1.5 * (text_tokens or 0) + 16
    if text_tokens is not None and (shown is None or not 0.9 * text_tokens <= shown <= most):
        if shown is not None:
            answer.notes.append(f"usage claims {shown} tokens, the text has {text_tokens}: the text is counted")
        answer.tokens, answer.source = text_tokens + hidden, "tokenize"
        _spread(chunks, text_tokens)
    elif shown is not None:
        answer.tokens, answer.source = claimed, "usage"
        if not _take_running(chunks, running, shown):
            _spread(chunks, shown)
        if shown < 0.9 * len(chunks):
            answer.notes.append(f"usage claims {shown} tokens in {len(chunks)} chunks with text: not to be believed")
    else:
        answer.tokens, answer.source = len(chunks), "chunks (estimate)"
        _spread(chunks, len(chunks))


def needs_tokenizer(answer: Answer) -> bool:
    """Whether a count of the text would help: not if every chunk has its token ids."""
    return bool(answer.chunks) and not all(chunk.ids for chunk in answer.chunks)


def steps(answer: Answer) -> tuple[int | None, str]:
    """Forward passes after the first token, which prefill made. A step emits its accepted drafts and one token more."""
    if answer.tokens is None:
        return None, "none"
    after_first = sum(chunk.tokens for chunk in answer.chunks) - 1
    found = answer.speculation
    if found is not None and isinstance(found.get("num_accepted_draft_tokens"), int):
        # steps without drafts are not among num_spec_steps; drafts cut off by a stop are among the accepted
        drafted = int(found.get("num_spec_steps") or 0)
        source = f"response, {LABEL}" if found.get("acceptance_assumed") is not None else "response"
        return max(drafted, after_first - found["num_accepted_draft_tokens"], 0), source
    return len(answer.chunks) - 1, "chunks (estimate)"


def _take(answer: Answer, at: float, event: dict[str, Any]) -> None:
    usage = event.get("usage")
    if isinstance(usage, dict):
        answer.usage = usage
    metrics = event.get("metrics")
    if isinstance(metrics, dict) and isinstance(metrics.get("speculative_decoding"), dict):
        answer.speculation = metrics["speculative_decoding"]
    for choice in (event.get("choices") or ())[:1]:
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        delta = choice.get("delta") or {}
        content = delta.get("content") or choice.get("text") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        answer.content += content
        answer.reasoning += reasoning
        called = "".join(_take_call(answer, call) for call in delta.get("tool_calls") or ())
        ids = choice.get("token_ids") or delta.get("token_ids")
        text = reasoning + content + called
        if text or ids:  # not the chunk that only has a role
            so_far = usage.get("completion_tokens") if isinstance(usage, dict) else None
            answer.chunks.append(Chunk(at, text, ids if isinstance(ids, list) else None, so_far))


def _take_call(answer: Answer, call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    name, arguments = function.get("name") or "", function.get("arguments") or ""
    kept = answer.calls.setdefault(call.get("index") or 0, {"name": "", "arguments": ""})
    kept["name"] += name
    kept["arguments"] += arguments
    return str(name + arguments)


def _take_running(chunks: list[Chunk], running: list[int | None], total: int) -> bool:
    """Tokens per chunk from the running counts in the stream. False if they do not rise to the total."""
    before = 0
    for chunk, so_far in zip(chunks, running, strict=True):
        if so_far is None or so_far < before or so_far > total:
            return False
        chunk.tokens, before = so_far - before, so_far
    chunks[-1].tokens += total - before
    return True


def _spread(chunks: list[Chunk], total: int) -> None:
    """Spread a known total over the chunks by length of text. Running sums are rounded, so errors do not add up."""
    length = sum(len(chunk.text) for chunk in chunks) or 1
    seen = given = 0
    for chunk in chunks:
        seen += len(chunk.text)
        upto = round(total * seen / length)
        chunk.tokens, given = upto - given, upto


def _http_failure(exchange: Exchange) -> Failure:
    if not exchange.status:
        return Failure(exchange.failure, 0, exchange.reason[:MESSAGE_LIMIT])
    body = exchange.body.decode("utf-8", "replace")
    try:
        message = _error_message(json.loads(body))
    except ValueError:
        message = body
    return Failure(f"http {exchange.status}", exchange.status, message.strip()[:MESSAGE_LIMIT])


def _error_message(body: Any) -> str:
    """The message in an error body, or the whole body if there is none."""
    found = body
    for key in ("error", "message"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return (found if isinstance(found, str) else json.dumps(body))[:MESSAGE_LIMIT]
