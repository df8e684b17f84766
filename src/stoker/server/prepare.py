"""From a checked body to what the engine is asked: prompt, sampling, tools and grammar of a chat request.

The other APIs say their requests again as chat requests and come through here too.
"""

from dataclasses import replace

from stoker.server.continued import thinks_at_the_end
from stoker.server.conversation import template_messages, template_tools, tool_schemas
from stoker.server.errors import ApiError
from stoker.server.generation import Ask
from stoker.server.lifecycle.service import Service
from stoker.server.output.reasoning import CLOSE as THOUGHT_END
from stoker.server.output.tags import OPEN
from stoker.server.sampled import choice_samplings, choices_of, sampling_of
from stoker.server.schemas.chat import AllowedToolsChoice, ChatRequest, NamedTool
from stoker.server.schemas.common import Sampled
from stoker.server.structured import answer_mask, call_mask, strict_mask
from stoker.server.thinking_budget import ThinkingBudget

MOST_LOGPROBS = 20
MOST_PROMPT_LOGPROBS = 131_072  # numbers that one prompt may ask for


def chat_asks(service: Service, body: ChatRequest) -> list[Ask]:
    """One per choice. Tokenising takes its time, so this runs in a thread."""
    _refuse(body)
    body = _only_allowed(body)
    model = service.model
    tools = template_tools(body.tools)
    messages = template_messages(body.messages, service.config.max_messages, body.omitted)
    begin = True if body.add_generation_prompt is None else body.add_generation_prompt
    going_on = bool(body.continue_final_message)
    if going_on and body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt cannot both be true: an answer either continues the last "
            "message or begins one.",
            param="continue_final_message",
        )
    prompt = model.render(messages, tools, begin, body.template_options, going_on)
    ask = prompted(service, body, prompt, _most_tokens(body), _top_logprobs(body))
    thinking = thinks_at_the_end(messages) if going_on else model.opens_thought(prompt)
    ask = replace(ask, boundaries=model.boundaries(prompt), thinking=thinking, omitted=tuple(body.omitted))
    ask = with_tools(service, ask, body)
    if ask.mask is None:
        ask = replace(ask, mask=answer_mask(model, body.response_format, body.structured_outputs, thinking))
    ask = with_budget(service, ask, body.thinking_token_budget)
    return [replace(ask, sampling=each) for each in choice_samplings(ask.sampling, choices_of(body))]


def with_budget(service: Service, ask: Ask, tokens: int | None) -> Ask:
    """A thought that the prompt has opened is closed after that many tokens."""
    if tokens is None or not ask.thinking:
        return ask
    name = "thinking_token_budget"
    if tokens < 0:
        raise ApiError(400, f"{name} is {tokens}, expected 0 or more.", param=name)
    close, call = service.model.token_id(THOUGHT_END), service.model.token_id(OPEN)
    if close is None:
        raise ApiError(400, f"{name} cannot be kept: {THOUGHT_END} is no token of this model.", param=name)
    ends = () if ask.tools is None or call is None else (call,)
    return replace(ask, mask=ThinkingBudget(tokens, close, ends, service.model.vocab_size, ask.mask))


def prompted(
    service: Service,
    body: Sampled,
    prompt: list[int],
    wanted: int | None,
    logprobs: int | None = None,
    echoed: int | None = None,
) -> Ask:
    """A prompt with the request's sampling. An answer ends where the context does: agents name a limit with every
    request, and seldom one that fits. `echoed`: likeliest tokens beside each token of a prompt that is given back."""
    room = service.room_for_answer(prompt)
    sampling = sampling_of(body, service.model, room if wanted is None else min(wanted, room), logprobs)
    ask = Ask(prompt, replace(sampling, prompt_logprobs=_prompt_logprobs(body, len(prompt), echoed)))
    service.check(ask)
    return ask


def _prompt_logprobs(body: Sampled, tokens: int, echoed: int | None) -> int | None:
    asked, name = body.prompt_logprobs, "prompt_logprobs"
    if asked is not None and not 0 <= asked <= MOST_LOGPROBS:
        raise ApiError(400, f"{name} is {asked}, expected 0 to {MOST_LOGPROBS}.", param=name)
    if asked is not None and body.stream:
        raise ApiError(400, f"{name} come with a whole answer, not with a stream. Leave out stream.", param=name)
    if asked is None and echoed is None:
        return None
    top = max(asked or 0, echoed or 0)
    numbers = tokens * (1 + top)
    if numbers > MOST_PROMPT_LOGPROBS:
        raise ApiError(
            400,
            f"log-probabilities of {tokens:,} prompt tokens and the {top} likeliest beside each are {numbers:,} "
            f"numbers, and at most {MOST_PROMPT_LOGPROBS:,} are given. Ask for fewer, or send a shorter prompt.",
            param="echo" if asked is None else name,
        )
    return top


def with_tools(service: Service, ask: Ask, body: ChatRequest) -> Ask:
    """Calls are looked for, forbidden or forced, as tool_choice says."""
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if not body.tools:
        if choice not in ("none", "auto") and not body.omitted:
            raise ApiError(400, "tool_choice asks for a call, but there are no tools.", param="tool_choice")
        return ask
    schemas = tool_schemas(body.tools)
    if choice == "none":
        # the tools stay in the prompt, so that it is still in the prefix cache, but no call can begin
        token = service.model.token_id(OPEN)
        bias = {**ask.sampling.logit_bias, **({} if token is None else {token: -100.0})}
        return replace(ask, sampling=replace(ask.sampling, logit_bias=bias))
    if choice == "auto":
        strict = tuple(tool.function.name for tool in body.tools if tool.function.strict)
        formatted = body.structured_outputs or (body.response_format and body.response_format.type != "text")
        mask = strict_mask(service.model, schemas, strict) if strict and not formatted else None
        return replace(ask, tools=schemas, strict=strict, mask=mask)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in schemas:
            raise ApiError(400, f"tool_choice names {name[:200]!r}, which is not among the tools.", param="tool_choice")
        schemas = {name: schemas[name]}
    parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    return replace(ask, tools=schemas, mask=call_mask(service.model, schemas, parallel, ask.thinking))


def _only_allowed(body: ChatRequest) -> ChatRequest:
    """The model is shown the tools that tool_choice allows, and no others."""
    choice = body.tool_choice
    if not isinstance(choice, AllowedToolsChoice):
        return body
    names = [tool.function.name for tool in choice.allowed_tools.tools]
    tools = [tool for tool in body.tools or () if tool.function.name in names]
    unknown = set(names) - {tool.function.name for tool in tools}
    if unknown:
        message = f"tool_choice allows {min(unknown)[:200]!r}, which is not among the tools."
        raise ApiError(400, message, param="tool_choice")
    return body.model_copy(update={"tools": tools, "tool_choice": choice.allowed_tools.mode if tools else "none"})


def _refuse(body: ChatRequest) -> None:
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
