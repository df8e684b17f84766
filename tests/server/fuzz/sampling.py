"""What generating requests have in common: sampling, formats, tools, content parts."""

from typing import Any

from tests.server.fuzz.draw import Draw
from tests.server.fuzz.schemas import Json, any_schema, grammar, object_schema, pattern, schema

MOST_TOKENS = 8
PICTURE = "data:image/png;base64,iVBORw0KGgo="
FOREIGN = (
    "web_search", "web_search_preview", "file_search", "code_interpreter", "computer_use_preview", "image_generation",
    "mcp", "local_shell", "shell", "apply_patch", "tool_search", "made_up",
)  # fmt: skip


def sampling(draw: Draw, most_tokens: int) -> Json:
    """Few of the parameters at a time, most of them sound."""
    found = draw.some(
        0.1,
        {
            "temperature": lambda: draw.choice((0, 0.0, 0.7, 1, 2, 0.01)),
            "top_p": lambda: draw.choice((1, 0.5, 1e-6)),
            "top_k": lambda: draw.choice((0, -1, 1, 40, 10**6)),
            "min_p": lambda: draw.choice((0, 0.05, 0.9)),
            "presence_penalty": lambda: draw.uniform(-2, 2),
            "frequency_penalty": lambda: draw.uniform(-2, 2),
            "repetition_penalty": lambda: draw.choice((1, 1.1, 0.5)),
            "logit_bias": lambda: {str(token): draw.randint(-100, 100) for token in draw.tokens(draw.choice((3, 300)))},
            "seed": lambda: draw.getrandbits(draw.choice((8, 62, 63))),
            "stop": lambda: draw.choice(("\n", ["a", " the"], [draw.text()], draw.text(), [])),
            "stop_token_ids": lambda: draw.tokens(draw.choice((3, 300))),
            "min_tokens": lambda: draw.randint(0, most_tokens),
            "ignore_eos": lambda: draw.chance(0.5),
            "n": lambda: draw.weighted((20, draw.randint(1, 3)), (2, 8), (1, 30)),
            "prompt_logprobs": lambda: draw.randint(0, 5),
            "include_stop_str_in_output": lambda: draw.chance(0.1),
            "skip_special_tokens": lambda: draw.chance(0.5),
            "structured_outputs": lambda: structured(draw),
            "return_token_ids": lambda: draw.chance(0.5),
            "return_drafts": lambda: draw.chance(0.5),
            "draft": lambda: draw.chance(0.5),
            "use_beam_search": lambda: draw.chance(0.1),
            "user": draw.text,
            "model": lambda: draw.weighted((18, "demo"), (1, "other"), (1, draw.text())),
        },
    )
    return found | draw.some(0.02, {"best_of": lambda: found.get("n", 1)})


def streaming(draw: Draw) -> Json:
    if not draw.chance(0.45):
        return {}
    options = {"include_usage": draw.chance(0.5), "continuous_usage_stats": draw.chance(0.3)}
    return {"stream": True} | ({"stream_options": options} if draw.chance(0.4) else {})


def structured(draw: Draw) -> Json:
    kind = draw.choice(("json", "regex", "choice", "grammar"))
    if kind == "json":
        return {kind: draw.choice((any_schema(draw), '{"type": "integer"}', "{"))}
    if kind == "regex":
        return {kind: pattern(draw)}
    return {kind: grammar(draw) if kind == "grammar" else draw.several(3, draw.text)}


def response_format(draw: Draw) -> Json:
    kind = draw.choice(("text", "json_object", "json_schema", "json_schema", "json_schema"))
    return {"type": kind} | (
        {"json_schema": {"name": draw.name(), "schema": any_schema(draw), "strict": draw.chance(0.5)}}
        if kind == "json_schema"
        else {}
    )


def parameters(draw: Draw) -> Any:
    return object_schema(draw) if draw.chance(0.85) else any_schema(draw)


def function_tool(draw: Draw) -> Json:
    """In the words of chat completions."""
    kind = draw.weighted((8, "function"), (2, "custom"), (1, "foreign"))
    if kind == "foreign":
        return {"type": draw.choice(FOREIGN)} | draw.some(0.3, {"name": draw.name, "filters": lambda: {"a": 1}})
    if kind == "custom":
        return {"type": "custom", "custom": {"name": draw.name(), "description": draw.text(), **custom_format(draw)}}
    function = {"name": draw.name(), "parameters": parameters(draw)} | draw.some(
        0.3, {"strict": lambda: draw.chance(0.7), "description": draw.text}
    )
    return {"type": "function", "function": function}


def custom_format(draw: Draw) -> Json:
    syntax = {"syntax": draw.choice(("lark", "regex", "made-up")), "definition": grammar(draw)}
    return draw.choice(
        (
            {},
            {"format": {"type": "text"}},
            {"format": {"type": "grammar", **syntax}},
            {"format": {"type": "grammar", "grammar": syntax}},
        )
    )


def function_choice(draw: Draw) -> Any:
    named = {"type": "function", "function": {"name": draw.name()}}
    custom = {"type": "custom", "custom": {"name": draw.name()}}
    allowed = {"mode": draw.choice(("auto", "required")), "tools": draw.several(2, lambda: named)}
    return draw.choice(
        (
            "auto",
            "none",
            "required",
            "required",
            named,
            named,
            custom,
            {"type": "allowed_tools", "allowed_tools": allowed},
        )
    )


def with_tools(draw: Draw, tools: list[Json], choice: Any) -> Json:
    return {"tools": tools} | draw.some(
        0.5, {"tool_choice": lambda: choice, "parallel_tool_calls": lambda: draw.chance(0.5)}
    )


def content_part(draw: Draw) -> Json:
    """Of a chat message or a response's input: mostly text."""
    kind = draw.weighted((12, "text"), (2, "input_text"), (1, "refusal"), (3, "other"))
    if kind == "refusal":
        return {"type": kind, kind: draw.text()}
    if kind != "other":
        return {"type": kind, "text": draw.text()}
    return draw.choice(
        (
            {
                "type": "image_url",
                "image_url": {"url": draw.choice((PICTURE, "file:///dev/zero", "http://127.0.0.1:1/x"))},
            },
            {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
            {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
            {"type": "video_url", "video_url": {"url": "x"}},
            {"type": "file", "file": {"file_data": "x", "filename": draw.text()}},
            {"type": "input_file", "file_id": "f"},
            {"type": draw.text()},
            {"text": draw.text()},
            {},
        )
    )


def arguments(draw: Draw) -> str:
    """Of a call in a conversation's past: JSON text, as a rule."""
    sound = '{"city": "Oslo", "seats": 2}'
    return draw.weighted(
        (8, sound), (2, "{}"), (1, ""), (1, "[1]"), (1, '{"a":'), (1, '{"x": 1e999}'), (1, draw.text())
    )


def template_options(draw: Draw) -> Json:
    return draw.some(0.4, {"enable_thinking": lambda: draw.chance(0.5), draw.name(): lambda: schema(draw)})
