"""A sound request of every endpoint; `mutate.py` then breaks it."""

from collections.abc import Callable
from typing import Any

from tests.server.fuzz import sampling
from tests.server.fuzz.draw import Draw
from tests.server.fuzz.schemas import Json, any_schema

UNSUPPORTED = (
    "guided_json", "grammar", "functions", "chat_template", "documents", "audio", "n_predict", "bad_words", "suffix",
    "mirostat", "typical_p", "prompt_embeds", "lora_path", "truncate_prompt_tokens", "output_format",
    "logits_processors",
)  # fmt: skip
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def most_tokens(draw: Draw) -> int:
    return draw.randint(1, sampling.MOST_TOKENS)


def beside(draw: Draw, body: Json) -> Json:
    """With a parameter that is unknown or not supported, now and then."""
    if draw.chance(0.04):
        body[draw.choice((*UNSUPPORTED, "x-made-up", draw.text()))] = draw.choice((True, "x", 1, {"a": [1]}, None, 0))
    return body


# -- /v1/chat/completions


def chat(draw: Draw) -> Json:
    most = most_tokens(draw)
    body = {
        "messages": chat_messages(draw),
        draw.choice(("max_tokens", "max_completion_tokens")): most,
        **sampling.sampling(draw, most),
        **sampling.streaming(draw),
    }
    if draw.chance(0.3):
        tools = draw.several(3, lambda: sampling.function_tool(draw), least=1)
        body |= sampling.with_tools(draw, tools, sampling.function_choice(draw))
    body |= draw.some(
        0.08,
        {
            "response_format": lambda: sampling.response_format(draw),
            "logprobs": lambda: True,
            "chat_template_kwargs": lambda: sampling.template_options(draw),
            "add_generation_prompt": lambda: draw.chance(0.5),
            "continue_final_message": lambda: draw.chance(0.7),
            "reasoning_effort": lambda: draw.choice(EFFORTS),
            "include_reasoning": lambda: draw.chance(0.5),
            "thinking_token_budget": lambda: draw.randrange(6),
            "modalities": lambda: draw.choice((["text"], ["text"], ["text", "audio"], [])),
            "metadata": lambda: {"a": draw.text()},
        },
    )
    if body.get("continue_final_message") and draw.chance(0.8):
        body["messages"].append({"role": "assistant", "content": draw.text()})
    if body.get("logprobs") and draw.chance(0.7):
        body["top_logprobs"] = draw.randint(0, 20)
    return beside(draw, body)


def chat_messages(draw: Draw) -> list[Json]:
    found = draw.several(4, lambda: chat_message(draw))
    return [*found, {"role": "user", "content": draw.text()}] if draw.chance(0.8) or not found else found


def chat_message(draw: Draw) -> Json:
    role = draw.choice(("system", "developer", "user", "user", "assistant", "assistant", "tool", "function"))
    content: Any = draw.text() if draw.chance(0.7) else draw.several(3, lambda: sampling.content_part(draw))
    found: Json = {"role": role, "content": content}
    if role == "assistant":
        found |= draw.some(0.4, {"tool_calls": lambda: draw.several(2, lambda: chat_call(draw))})
        found |= draw.some(0.3, {"reasoning_content": draw.text}) | draw.some(
            0.1, {"content": lambda: None, "reasoning": draw.text}
        )
    if role == "tool":
        found["tool_call_id"] = draw.identifier()
    return found | draw.some(0.05, {"name": draw.name})


def chat_call(draw: Draw) -> Json:
    if draw.chance(0.2):
        return {"id": draw.identifier(), "type": "custom", "custom": {"name": draw.name(), "input": draw.text()}}
    called = {"name": draw.name(), "arguments": sampling.arguments(draw)}
    return {"id": draw.identifier(), "type": "function", "function": called}


# -- /v1/completions


def completion(draw: Draw) -> Json:
    prompt = draw.weighted(
        (6, lambda: draw.text(20)),
        (2, lambda: draw.several(3, draw.text, least=1)),
        (2, lambda: draw.tokens(20)),
        (1, lambda: draw.several(3, lambda: draw.tokens(8), least=1)),
    )()
    most = most_tokens(draw)
    body = {"prompt": prompt, "max_tokens": most, **sampling.sampling(draw, most), **sampling.streaming(draw)}
    body |= draw.some(
        0.2,
        {
            "echo": lambda: draw.chance(0.8),
            "logprobs": lambda: draw.randint(0, 20),
            "response_format": lambda: sampling.response_format(draw),
        },
    )
    if body.get("echo") and draw.chance(0.3):
        body["max_tokens"] = 0
    return beside(draw, body)


# -- /v1/responses


def response(draw: Draw) -> Json:
    given: Any = draw.text()
    if draw.chance(0.6):
        items = draw.several(5, lambda: response_item(draw))
        given = [*items, {"role": "user", "content": draw.text()}] if draw.chance(0.8) or not items else items
    most = most_tokens(draw)
    chosen = sampling.sampling(draw, most)
    if draw.chance(0.9):  # parameters of chat completions alone
        chosen = {name: value for name, value in chosen.items() if name not in ("n", "best_of", "prompt_logprobs")}
    body = {"input": given, "max_output_tokens": most, **chosen, **sampling.streaming(draw)}
    if draw.chance(0.3):
        tools = draw.several(3, lambda: response_tool(draw), least=1)
        body |= sampling.with_tools(draw, tools, response_choice(draw))
    body |= draw.some(
        0.1,
        {
            "instructions": draw.text,
            "text": lambda: {"format": response_text_format(draw)} | draw.some(0.3, {"verbosity": lambda: "low"}),
            "reasoning": lambda: {"effort": draw.choice(EFFORTS), "summary": draw.choice(("auto", None))},
            "metadata": lambda: {draw.text(): draw.text()},
            "store": lambda: draw.chance(0.5),
            "include": lambda: draw.choice((["message.output_text.logprobs"], ["reasoning.encrypted_content"], [])),
            "top_logprobs": lambda: draw.randint(0, 20),
            "truncation": lambda: draw.choice(("auto", "disabled")),
            "previous_response_id": lambda: draw.weighted((4, None), (1, "resp_1")),
            "conversation": lambda: draw.weighted((4, None), (1, "conv_1")),
            "background": lambda: draw.chance(0.2),
            "chat_template_kwargs": lambda: sampling.template_options(draw),
            "thinking_token_budget": lambda: draw.randrange(6),
            "prompt_cache_key": draw.text,
        },
    )
    return beside(draw, body)


def response_text_format(draw: Draw) -> Json:
    kind = draw.choice(("text", "json_object", "json_schema", "json_schema"))
    return {"type": kind} | ({"name": draw.name(), "schema": any_schema(draw)} if kind == "json_schema" else {})


def response_item(draw: Draw) -> Json:
    name, call_id = draw.name(), draw.identifier()
    parts: Any = draw.text() if draw.chance(0.6) else draw.several(3, lambda: sampling.content_part(draw))
    call = {"call_id": call_id, "name": name} | draw.some(0.2, {"namespace": draw.name, "id": draw.identifier})
    message = {"type": "message", "role": draw.choice(("user", "assistant", "system", "developer")), "content": parts}
    return draw.weighted(
        (6, message),
        (4, {"role": "user", "content": parts}),
        (2, {"type": "function_call", **call, "arguments": sampling.arguments(draw)}),
        (2, {"type": "function_call_output", "call_id": call_id, "output": parts}),
        (1, {"type": "custom_tool_call", **call, "input": draw.text()}),
        (1, {"type": "custom_tool_call_output", "call_id": call_id, "output": draw.text()}),
        (1, {"type": "reasoning", "summary": [{"type": "summary_text", "text": draw.text()}], "content": None}),
        (1, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": draw.text()}, draw.text()]}),
        (1, {"type": "item_reference", "id": draw.identifier()}),
        (1, {"type": "local_shell_call", "call_id": call_id, "action": {"command": ["ls"], "env": {"A": draw.text()}}}),
        (
            1,
            {
                "type": "local_shell_call_output",
                "id": call_id,
                "output": draw.choice((draw.text(), {"a": [draw.text()]})),
            },
        ),
        (1, {"type": "apply_patch_call", "operation": draw.text()}),
        (
            1,
            {
                "type": draw.choice(
                    ("web_search_call", "mcp_list_tools", "compaction", "computer_call_output", "made_up")
                )
            },
        ),
    )


def response_tool(draw: Draw) -> Json:
    kind = draw.weighted((6, "function"), (2, "custom"), (2, "namespace"), (2, "foreign"))
    if kind == "foreign":
        return {"type": draw.choice(sampling.FOREIGN)} | draw.some(0.3, {"server_url": lambda: "http://127.0.0.1:1"})
    if kind == "namespace":
        inner = draw.several(3, lambda: response_tool(draw))
        return {"type": kind, "name": draw.name(), "description": draw.text(), "tools": inner}
    if kind == "custom":
        return {"type": kind, "name": draw.name(), "description": draw.text(), **sampling.custom_format(draw)}
    return {"type": kind, "name": draw.name(), "parameters": sampling.parameters(draw)} | draw.some(
        0.3, {"strict": lambda: draw.chance(0.7), "description": draw.text}
    )


def response_choice(draw: Draw) -> Any:
    named = {"type": draw.choice(("function", "custom", "namespace")), "name": draw.name()}
    allowed = {
        "type": "allowed_tools",
        "mode": draw.choice(("auto", "required")),
        "tools": draw.several(2, lambda: named),
    }
    return draw.choice(("auto", "none", "required", named, named, allowed, {"type": "web_search"}, draw.text()))


# -- /v1/messages


def message(draw: Draw) -> Json:
    body = {**conversation(draw), "max_tokens": most_tokens(draw)}
    if draw.chance(0.45):
        body["stream"] = True
    body |= draw.some(
        0.1,
        {
            "temperature": lambda: draw.choice((0, 0.5, 1)),
            "top_p": lambda: draw.choice((0.5, 1)),
            "top_k": lambda: draw.choice((1, 40, -1)),
            "stop_sequences": lambda: draw.several(3, draw.text),
            "output_config": lambda: draw.some(
                0.7,
                {
                    "effort": lambda: draw.choice(EFFORTS),
                    "format": lambda: {"type": "json_schema", "schema": any_schema(draw)},
                },
            ),
            "metadata": lambda: {"user_id": draw.text()},
            "service_tier": lambda: "auto",
            "container": lambda: None,
            "context_management": lambda: {"edits": []},
        },
    )
    return beside(draw, body)


def conversation(draw: Draw) -> Json:
    """What counting tokens takes too."""
    body: Json = {"model": draw.weighted((38, "demo"), (1, "claude-x"), (1, draw.text()))}
    body["messages"] = [*draw.several(4, lambda: turn(draw)), {"role": "user", "content": draw.text()}]
    if draw.chance(0.15):
        body["messages"].append({"role": "assistant", "content": draw.text()})
    if draw.chance(0.3):
        body["tools"] = draw.several(3, lambda: claude_tool(draw), least=1)
        choice = {"type": draw.choice(("auto", "any", "none"))}
        choice = {"type": "tool", "name": draw.name()} if draw.chance(0.3) else choice
        body |= draw.some(
            0.5, {"tool_choice": lambda: choice | draw.some(0.3, {"disable_parallel_tool_use": lambda: True})}
        )
    return body | draw.some(
        0.15,
        {
            "system": lambda: draw.choice(
                (draw.text(), draw.several(3, lambda: {"type": "text", "text": draw.text()}))
            ),
            "thinking": lambda: draw.choice(
                ({"type": "enabled", "budget_tokens": draw.randrange(5)}, {"type": "disabled"})
            ),
            "thread": lambda: draw.weighted((9, None), (1, "t")),
        },
    )


def turn(draw: Draw) -> Json:
    role = draw.choice(("user", "assistant", "user", "assistant", "system"))
    text_only = role == "system" and draw.chance(0.9)
    return {
        "role": role,
        "content": draw.text() if text_only or draw.chance(0.5) else draw.several(3, lambda: block(draw)),
    }


def block(draw: Draw) -> Json:
    inner: Any = draw.text() if draw.chance(0.5) else [{"type": "text", "text": draw.text()}]
    source = draw.choice(
        (
            {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
            {"type": "text", "media_type": "text/plain", "data": draw.text()},
            {"type": "content", "content": inner},
            {"type": "url", "url": "http://127.0.0.1:1/x"},
        )
    )
    result = {"tool_use_id": draw.identifier(), "content": inner, "is_error": draw.chance(0.2)}
    return draw.weighted(
        (8, {"type": "text", "text": draw.text()}),
        (2, {"type": "tool_use", "id": draw.identifier(), "name": draw.name(), "input": {"city": draw.text()}}),
        (2, {"type": "tool_result", **result}),
        (1, {"type": "thinking", "thinking": draw.text(), "signature": "x"}),
        (1, {"type": "redacted_thinking", "data": "x"}),
        (1, {"type": "image", "source": source}),
        (1, {"type": "document", "source": source, "title": draw.text(), "citations": {"enabled": True}}),
        (1, {"type": "search_result", "source": draw.text(), "title": draw.text(), "content": inner}),
        (
            1,
            {"type": "server_tool_use", "id": draw.identifier(), "name": "web_search", "input": {"query": draw.text()}},
        ),
        (
            1,
            {
                "type": "web_search_tool_result",
                **result,
                "content": [{"type": "web_search_result", "title": draw.text()}],
            },
        ),
        (1, {"type": "web_search_tool_result", **result, "content": {"type": "web_search_tool_result_error"}}),
        (
            1,
            {
                "type": "code_execution_tool_result",
                **result,
                "content": {"type": "code_execution_result", "stdout": "1"},
            },
        ),
        (1, {"type": "tool_result", **result, "content": [{"type": "tool_reference", "tool_name": draw.name()}]}),
        (1, {"type": draw.choice(("container_upload", "mcp_tool_use", "compaction", "made_up"))}),
    )


def claude_tool(draw: Draw) -> Json:
    kind = draw.weighted((6, "custom"), (4, "other"))
    if kind == "custom":
        return {"name": draw.name(), "input_schema": sampling.parameters(draw)} | draw.some(
            0.3, {"type": lambda: "custom", "strict": lambda: True, "description": draw.text}
        )
    dated = (
        "bash_20250124",
        "text_editor_20250728",
        "memory_20250818",
        "web_search_20250305",
        "code_execution_20250825",
    )
    return {"type": draw.choice((*dated, "mcp_toolset", "computer_20250124", "tool_search_tool_bm25"))} | draw.some(
        0.8, {"name": draw.name}
    )


# -- the rest


def tokenize(draw: Draw) -> Json:
    body: Json = {"prompt": draw.text(40)}
    if draw.chance(0.4):
        body = {"messages": chat_messages(draw)}
        body |= draw.some(0.3, {"tools": lambda: draw.several(2, lambda: sampling.function_tool(draw))})
    return body | draw.some(
        0.2,
        {
            "return_token_strs": lambda: True,
            "add_special_tokens": lambda: draw.chance(0.5),
            "add_generation_prompt": lambda: draw.chance(0.5),
            "chat_template_kwargs": lambda: sampling.template_options(draw),
            "model": lambda: "demo",
        },
    )


def detokenize(draw: Draw) -> Json:
    return {"tokens": draw.tokens(draw.choice((10, 1000)))} | draw.some(0.1, {"model": lambda: "demo"})


POSTS: dict[str, tuple[int, Callable[[Draw], Json]]] = {  # weight, and what makes a body
    "/v1/chat/completions": (30, chat),
    "/v1/completions": (14, completion),
    "/v1/responses": (18, response),
    "/v1/messages": (18, message),
    "/v1/messages/count_tokens": (6, conversation),
    "/tokenize": (4, tokenize),
    "/detokenize": (3, detokenize),
}
GETS = (
    "/v1/models", "/v1/models/demo", "/v1/models/none", "/health", "/ready", "/version", "/metrics", "/state", "/",
    "/page/app.js", "/page/none.js", "/openapi.json",
)  # fmt: skip
GET_WEIGHT = 7
