"""A chat request becomes engine requests: prompt, sampling, tools and grammar.

The other chat APIs are translated into chat requests first, so they pass through here too.
"""

from dataclasses import replace

from stoker.engine.rules import ThinkingBudget
from stoker.server.errors import ApiError
from stoker.server.generation import EngineRequest
from stoker.server.lifecycle.service import Service
from stoker.server.model import thinks_at_the_end
from stoker.server.output.answer import CLOSE as THOUGHT_END
from stoker.server.output.tags import OPEN
from stoker.server.prepare.sampling import choice_count, choice_samplings, sampling_of
from stoker.server.prepare.structured import answer_mask, call_mask, strict_mask
from stoker.server.prepare.template import template_messages, template_tools, tool_schemas
from stoker.server.schemas.chat import AllowedToolsChoice, ChatRequest, NamedTool
from stoker.server.schemas.common import SamplingBody

MOST_LOGPROBS = 20
MOST_PROMPT_LOGPROBS = 131_072  # numbers that one prompt may ask for


def chat_requests(service: Service, body: ChatRequest) -> list[EngineRequest]:
    """One engine request per choice. Rendering and tokenising take time, so this runs in a thread."""
    _refuse(body)
    custom, body = body.custom_tools, _only_allowed(body)
    model = service.model
    tools = template_tools(body.tools)
    messages = template_messages(body.messages, service.config.max_messages, body.omitted)
    begin = True if body.add_generation_prompt is None else body.add_generation_prompt
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt cannot both be true: an answer either continues the last "
            "message or begins one.",
            param="continue_final_message",
        )
    prompt = model.render(messages, tools, begin, body.template_options, continued)
    request = engine_request(service, body, prompt, _max_tokens(body), _top_logprobs(body))
    thinking = thinks_at_the_end(messages) if continued else model.opens_thought(prompt)
    request = replace(
        request,
        boundaries=model.boundaries(prompt),
        thinking=thinking,
        omitted=tuple(body.omitted),
        custom=custom,
    )
    request = with_tools(service, request, body)
    if request.mask is None and (body.response_format or body.structured_outputs):
        request = replace(request, mask=answer_mask(model, body.response_format, body.structured_outputs, thinking))
    request = with_budget(service, request, body.thinking_token_budget)
    return [replace(request, sampling=each) for each in choice_samplings(request.sampling, choice_count(body))]


def with_budget(service: Service, request: EngineRequest, tokens: int | None) -> EngineRequest:
    """Closes a thought that the prompt has opened after that many tokens."""
    if tokens is None or not request.thinking:
        return request
    name = "thinking_token_budget"
    if tokens < 0:
        raise ApiError(400, f"{name} is {tokens}, expected 0 or more.", param=name)
    close, call = service.model.token_id(THOUGHT_END), service.model.token_id(OPEN)
    if close is None:
        raise ApiError(400, f"{name} cannot be kept: {THOUGHT_END} is not a token of this model.", param=name)
    ends = () if request.tools is None or call is None else (call,)
    return replace(request, mask=ThinkingBudget(tokens, close, ends, service.model.vocab_size, request.mask))


def engine_request(
    service: Service,
    body: SamplingBody,
    prompt: list[int],
    wanted: int | None,
    logprobs: int | None = None,
    echoed: int | None = None,
) -> EngineRequest:
    """An engine request for a prompt with the body's sampling. max_tokens is cut to the context, since agents send a
    limit with every request and seldom one that fits. `echoed`: top log-probabilities per token of an echoed prompt."""
    room = service.room_for_answer(prompt)
    sampling = sampling_of(body, service.model, room if wanted is None else min(wanted, room), logprobs)
    scored = replace(sampling, prompt_logprobs=_prompt_logprobs(body, len(prompt), echoed))
    request = EngineRequest(prompt, scored, drafted=body.draft is not False)
    service.check(request)
    return request


def _prompt_logprobs(body: SamplingBody, tokens: int, echoed: int | None) -> int | None:
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


def with_tools(service: Service, request: EngineRequest, body: ChatRequest) -> EngineRequest:
    """Parses, forbids or forces tool calls, as tool_choice says."""
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if not body.tools:
        if choice not in ("none", "auto") and not body.omitted:
            raise ApiError(400, "tool_choice asks for a call, but there are no tools.", param="tool_choice")
        return request
    schemas = tool_schemas(body.tools)
    if choice == "none":
        # The tools stay in the prompt, so that the prefix cache still matches, but no call can begin.
        token = service.model.token_id(OPEN)
        bias = {**request.sampling.logit_bias, **({} if token is None else {token: -100.0})}
        return replace(request, sampling=replace(request.sampling, logit_bias=bias))
    if choice == "auto":
        strict = tuple(tool.function.name for tool in body.tools if tool.function.strict)
        formatted = body.structured_outputs or (body.response_format and body.response_format.type != "text")
        mask = strict_mask(service.model, schemas, strict) if strict and not formatted else None
        return replace(request, tools=schemas, strict=strict, mask=mask)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in schemas:
            raise ApiError(400, f"tool_choice names {name[:200]!r}, which is not among the tools.", param="tool_choice")
        schemas = {name: schemas[name]}
    parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    return replace(request, tools=schemas, mask=call_mask(service.model, schemas, parallel, request.thinking))


def _only_allowed(body: ChatRequest) -> ChatRequest:
    """The body with only the tools that tool_choice allows."""
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


def _max_tokens(body: ChatRequest) -> int | None:
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
