"""From a checked body to what the engine is asked: prompt, sampling, tools and grammar of a chat request.

The other APIs say their requests again as chat requests and come through here too.
"""

from dataclasses import replace
from typing import Any

from stoker.server.conversation import template_messages, template_tools, tool_schemas
from stoker.server.errors import ApiError
from stoker.server.generation import Ask
from stoker.server.parse.tools import OPEN
from stoker.server.protocol.chat import ChatRequest, NamedTool
from stoker.server.sampled import choice_samplings, choices_of, sampling_of
from stoker.server.service import Service
from stoker.server.structured import answer_mask, call_mask

MOST_LOGPROBS = 20
REFUSED = {
    "functions": "it was replaced by tools",
    "function_call": "it was replaced by tool_choice",
    "chat_template": "only the model's own template is run",
    "continue_final_message": "an answer always begins a message of its own",
    "audio": "this server writes text only",
}


def chat_asks(service: Service, body: ChatRequest, clamp: bool = False) -> list[Ask]:
    """One per choice. Tokenising takes its time, so this runs in a thread.

    With `clamp`, an answer longer than the context has room for is cut there and not refused: clients of the other
    APIs always name a limit, and seldom one that fits.
    """
    _refuse(body)
    model = service.model
    tools = template_tools(body.tools)
    messages = template_messages(body.messages, service.config.max_messages)
    begin = True if body.add_generation_prompt is None else body.add_generation_prompt
    options = dict(body.chat_template_kwargs or {})
    prompt = model.render(messages, tools, begin, options)
    most = _most_tokens(body)
    if clamp and most is not None:
        most = min(most, service.room_for_answer(prompt))
    ask = prompted(service, body, prompt, most, _top_logprobs(body))
    thinking = model.opens_thought(prompt)
    ask = replace(ask, boundaries=model.boundaries(prompt), thinking=thinking)
    ask = with_tools(service, ask, body)
    if ask.mask is None:
        ask = replace(ask, mask=answer_mask(model, body.response_format, body.structured_outputs, thinking))
    return [replace(ask, sampling=each) for each in choice_samplings(ask.sampling, choices_of(body))]


def prompted(service: Service, body: Any, prompt: list[int], wanted: int | None, logprobs: int | None = None) -> Ask:
    """A prompt with the request's sampling, checked against the context. Without a limit, an answer may fill it."""
    room = service.room_for_answer(prompt)
    sampling = sampling_of(body, service.model, room if wanted is None else wanted, logprobs)
    ask = Ask(prompt, sampling)
    service.check(ask)
    return ask


def with_tools(service: Service, ask: Ask, body: ChatRequest) -> Ask:
    """Calls are looked for, forbidden or forced, as tool_choice says."""
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if not body.tools:
        if choice not in ("none", "auto"):
            raise ApiError(400, "tool_choice asks for a call, but there are no tools.", param="tool_choice")
        return ask
    schemas = tool_schemas(body.tools)
    if choice == "none":
        # the tools stay in the prompt, so that it is still in the prefix cache, but no call can begin
        token = service.model.token_id(OPEN)
        bias = {**ask.sampling.logit_bias, **({} if token is None else {token: -100.0})}
        return replace(ask, sampling=replace(ask.sampling, logit_bias=bias))
    if choice == "auto":
        return replace(ask, tools=schemas)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in schemas:
            raise ApiError(400, f"tool_choice names {name[:200]!r}, which is not among the tools.", param="tool_choice")
        schemas = {name: schemas[name]}
    parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    return replace(ask, tools=schemas, mask=call_mask(service.model, schemas, parallel, ask.thinking))


def _refuse(body: ChatRequest) -> None:
    for name, reason in REFUSED.items():
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported: {reason}.", param=name)
    if body.modalities and set(body.modalities) != {"text"}:
        raise ApiError(400, f"modalities is {body.modalities}; this server writes text only.", param="modalities")


def _most_tokens(body: ChatRequest) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _top_logprobs(body: ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
        return None
    top = body.top_logprobs or 0
    if not 0 <= top <= MOST_LOGPROBS:
        raise ApiError(400, f"top_logprobs is {top}, expected 0 to {MOST_LOGPROBS}.", param="top_logprobs")
    return top
