"""Anthropic's API as its clients use it: what cannot be offered is left out by name, and no session ends for it."""

import re
from typing import Any

import httpx2 as httpx
import pytest

from tests.server.running import PATIENCE_S, Running


def body(*messages: Any, **more: Any) -> dict[str, Any]:
    given = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    return {"messages": given or [{"role": "user", "content": "Say hi."}], "max_tokens": 4, **more}


def ask(server: Running, *messages: Any, **more: Any) -> httpx.Response:
    return server.post("/v1/messages", body(*messages, **more))


SERVER_TOOLS = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "mcp_toolset", "mcp_server_name": "files"},
    {"type": "tool_search_tool_regex_20251119", "name": "search"},
    {"type": "odd\r\nx-evil: 1,é", "name": "odd"},
]


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_that_cannot_be_offered_are_left_out_and_named(server: Running, streamed: bool) -> None:
    own = {"name": "look", "input_schema": {"type": "object"}, "defer_loading": True}
    given = body(tools=[*SERVER_TOOLS, own], stream=streamed)
    with httpx.stream("POST", server.url + "/v1/messages", json=given, timeout=PATIENCE_S) as response:
        response.read()
    assert response.status_code == 200, response.text
    left_out = (
        "tool:web_search_20250305,tool:code_execution_20250825,tool:mcp_toolset,"
        "tool:tool_search_tool_regex_20251119,tool:odd__x-evil:_1__"
    )
    assert response.headers["x-stoker-omitted"] == left_out
    assert f"answered without {left_out}" in server.log
    assert "x-stoker-omitted" not in ask(server, tools=[own]).headers


def test_tools_that_the_client_runs_are_offered_with_their_arguments(server: Running) -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
    ]
    forced = {"type": "tool", "name": "str_replace_based_edit_tool"}
    response = ask(server, tools=tools, tool_choice=forced, max_tokens=300, thinking={"type": "disabled"})
    assert response.status_code == 200, response.text
    assert "x-stoker-omitted" not in response.headers
    call = response.json()["content"][-1]
    assert call["name"] == "str_replace_based_edit_tool"
    if response.json()["stop_reason"] == "tool_use":
        assert call["input"]["command"] in ("view", "create", "str_replace", "insert")


def test_a_call_that_only_a_tool_left_out_could_answer_is_not_forced(server: Running) -> None:
    own = {"name": "look", "input_schema": {"type": "object"}}
    named = ask(server, tools=[SERVER_TOOLS[0], own], tool_choice={"type": "tool", "name": "web_search"})
    assert named.status_code == 200, named.text
    none_left = ask(server, tools=SERVER_TOOLS[:1], tool_choice={"type": "any"})
    assert none_left.status_code == 200, none_left.text
    unknown = ask(server, tools=[SERVER_TOOLS[0], own], tool_choice={"type": "tool", "name": "invented"})
    assert unknown.status_code == 400


def tokens(server: Running, *messages: Any, **more: Any) -> int:
    response = server.post("/v1/messages/count_tokens", {**body(*messages), **more})
    assert response.status_code == 200, response.text
    return int(response.json()["input_tokens"])


def test_calls_and_results_of_server_tools_in_a_conversation_are_read(server: Running) -> None:
    searched = [
        {"type": "text", "text": "I will look."},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "trains"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s1",
            "content": [
                {"type": "web_search_result", "title": "Trains", "url": "http://x/", "encrypted_content": "E" * 9000}
            ],
        },
        {"type": "mcp_tool_use", "id": "m1", "name": "read", "server_name": "files", "input": {}},
        {
            "type": "mcp_tool_result",
            "tool_use_id": "m1",
            "is_error": False,
            "content": [{"type": "text", "text": "hi"}],
        },
        {"type": "server_tool_use", "id": "c1", "name": "bash_code_execution", "input": {"command": "ls"}},
        {
            "type": "bash_code_execution_tool_result",
            "tool_use_id": "c1",
            "content": {"type": "bash_code_execution_result", "stdout": "a b", "stderr": "", "return_code": 0},
        },
        {
            "type": "web_fetch_tool_result",
            "tool_use_id": "w1",
            "content": {"type": "web_fetch_tool_error", "error_code": "x"},
        },
        {"type": "redacted_thinking", "data": "EEEE"},
        {"type": "text", "text": "Here."},
    ]
    found = [
        {
            "type": "tool_result",
            "tool_use_id": "t1",
            "content": [{"type": "tool_reference", "tool_name": "look"}, {"type": "text", "text": "one tool"}],
        },
        {"type": "document", "title": "D", "source": {"type": "text", "media_type": "text/plain", "data": "of trains"}},
        {"type": "search_result", "title": "S", "source": "x", "content": [{"type": "text", "text": "of rails"}]},
        {"type": "text", "text": "Thanks."},
    ]
    conversation = ["Search.", {"role": "assistant", "content": searched}, {"role": "user", "content": found}]
    response = ask(server, *conversation)
    assert response.status_code == 200, response.text
    assert "x-stoker-omitted" not in response.headers
    count = tokens(server, *conversation)
    assert 150 < count < 1000, "what was found is in the prompt, what is encrypted is not"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
def test_system_messages_anywhere_are_merged_into_the_first(server: Running, path: str) -> None:
    """Claude Code begins with a user's message and goes on with the system's; Codex adds some when it resumes."""
    name = "input" if path == "/v1/responses" else "messages"
    user, answer = {"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hi."}
    system = [{"role": "system", "content": text} for text in ("Be short.", "Be kind.", "Be quick.")]
    if path != "/v1/messages":
        system[1]["role"] = "developer"

    def prompt_tokens(*messages: dict[str, str]) -> int:
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        response = server.post(path, {name: list(messages), limit: 1})
        assert response.status_code == 200, response.text
        usage = response.json()["usage"]
        cached = usage.get("cache_read_input_tokens", 0)
        return int(usage.get("prompt_tokens") or usage["input_tokens"] + cached)

    scattered = prompt_tokens(user, system[0], answer, system[1], user, system[2])
    assert scattered == prompt_tokens(*system, user, answer, user)
    assert prompt_tokens(user, system[0]) == prompt_tokens(system[0], user)


LONG = "word " * 7500
CHAT_LIMITS = ["max_tokens", "max_completion_tokens"]


@pytest.mark.parametrize(
    ("path", "given", "limits"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, CHAT_LIMITS),
        ("/v1/completions", {"prompt": LONG}, ["max_tokens"]),
        ("/v1/responses", {"input": LONG}, ["max_output_tokens"]),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}]}, ["max_tokens"]),
    ],
)
def test_an_answer_ends_where_the_context_does_whatever_its_limit_says(
    server: Running, path: str, given: dict[str, Any], limits: list[str]
) -> None:
    """Agents name one with every request; here hundreds of tokens of 8,192 are left."""
    stop = {"stop_sequences" if path == "/v1/messages" else "stop": ["e", "a", " "]}
    for limit in limits:
        for most in (32_000, 10**30):
            response = server.post(path, {**given, **stop, limit: most})
            assert response.status_code == 200, response.text


def test_overflow_is_told_in_words_that_agents_know(server: Running) -> None:
    long = "word " * 9000
    refused = ask(server, long)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.fullmatch(r"prompt is too long: \d{4,} tokens > 8191 maximum", error["message"])
    for path, given in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/completions", {"prompt": long}),
        ("/v1/responses", {"input": long}),
    ):
        refused = server.post(path, given)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
        assert re.search(r"maximum context length is 8192 tokens.* \d{4,} tokens", error["message"])


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "See:"}


def test_a_picture_is_refused_in_words_that_clients_drop_it_for(server: Running) -> None:
    shown = {"role": "user", "content": [TEXT, IMAGE]}
    refused = ask(server, "Hello.", {"role": "assistant", "content": "Hi."}, shown, system="Be short.")
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("Could not process image: messages[2].content[1] ")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [TEXT, URL]}]
    refused = server.post("/v1/chat/completions", {"messages": messages})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("Could not process image: messages[1].content[1] ")
    assert refused.json()["error"]["code"] == "invalid_image"


def test_one_picture_does_not_end_a_session(server: Running) -> None:
    """Clients that keep what was refused go on sending it, and tools return pictures without being asked."""
    shown, result = {"role": "user", "content": [TEXT, IMAGE]}, {"type": "tool_result", "tool_use_id": "t1"}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "read", "input": {}}]}
    for messages in (
        [shown, "Never mind."],
        ["Read it.", call, {"role": "user", "content": [{**result, "content": [TEXT, IMAGE]}]}],
    ):
        response = ask(server, *messages)
        assert response.status_code == 200, response.text
        assert response.headers["x-stoker-omitted"] == "image"
    kept = [{"role": "user", "content": [TEXT, URL]}, {"role": "user", "content": "Never mind."}]
    response = server.post("/v1/chat/completions", {"messages": kept, "max_tokens": 4})
    assert response.status_code == 200, response.text
    assert response.headers["x-stoker-omitted"] == "image"


def test_sessions_with_different_billing_blocks_share_the_cached_prefix(server: Running) -> None:
    rules = {"type": "text", "text": "A rule for the billing test. " * 250}

    def usage(digits: str) -> dict[str, int]:
        block = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{digits}; cch={digits};"}
        response = ask(server, system=[block, rules], max_tokens=1)
        assert response.status_code == 200, response.text
        found: dict[str, int] = response.json()["usage"]
        return found

    first, second = usage("a1b2c"), usage("9f8e7")
    whole = first["input_tokens"] + first["cache_read_input_tokens"]
    assert whole > 1000
    assert second["cache_read_input_tokens"] > 0.8 * whole
    assert tokens(server, system=[rules]) == whole


def test_threads_are_refused_as_the_sdk_expects(server: Running) -> None:
    refused = ask(server, thread={"type": "continue", "thread_id": "thread_1"})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert ask(server, thread=None).status_code == 200
